"""Trainers whose arguments differ between ranks are refused on all ranks; equal arguments are accepted."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam, lr_scheduler

from dualtrain import Trainer
from dualtrain.errors import BackendError, RanksDifferError
from dualtrain.trainer import same_run
from dualtrain.trainer.description import describe, of_object
from dualtrain.trainer.objective import CrossEntropy
from tests.threads import run_threads


def net(p: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(p), nn.Linear(4, 2))


class WithSettings(nn.Module):
    """A model with the given settings as attributes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        for name, value in settings.items():
            setattr(self, name, value)


class Loss:
    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets)

    def method(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self(outputs, targets)

    def margins(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.multi_margin_loss(outputs, targets, margin=self.margin)  # type: ignore[attr-defined]


class Penalty(nn.Module):
    """A loss that refers to the model and has a parameter of its own, ``strength``.

    ``strength`` must be equal on all ranks; the model's weights may differ.
    """

    def __init__(self, model: nn.Module, strength: float) -> None:
        super().__init__()
        self.model, self.strength = model, nn.Parameter(torch.tensor([strength]))


def capturing(smoothing: float, **others: Any) -> Any:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert others is not None  # a use, so that the function captures ``others``
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    return loss


def configured(args: SimpleNamespace, table: dict[str, int]) -> Any:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return table["weight"] * functional.cross_entropy(outputs, targets, label_smoothing=args.smoothing)

    return loss


def groups(model: nn.Sequential, decay: float, *, swapped: bool = False) -> SGD:
    first, second = list(model[0].parameters()), list(model[2].parameters())
    if swapped:
        first, second = second, first
    return SGD([{"params": first}, {"params": second, "weight_decay": decay}], 0.1)


def with_state(optimizer: torch.optim.Optimizer, value: float) -> torch.optim.Optimizer:
    """Add state to ``optimizer``, as loading a checkpoint does, and return it."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, value)
    return optimizer


def given(model: nn.Module | None = None, optimizer: Any = None, schedule: Any = None, **options: Any) -> dict[str, Any]:
    """Return a trainer's arguments. ``optimizer(model)`` makes the optimizer, ``schedule(optimizer)`` the schedule."""
    model = model or net()
    optimizer = optimizer(model) if optimizer else SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "schedule": schedule and schedule(optimizer), **options}


def sequential(optimizer: torch.optim.Optimizer, drop: int) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, drop)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


#: The arguments of rank r, and a part of the expected refusal; "" if they are accepted.
CASES: dict[str, tuple[Any, str]] = {
    "the same": (lambda r: given(), ""),
    "lr": (
        lambda r: given(optimizer=lambda m: SGD(m.parameters(), [0.1, 0.2][r])),
        "optimizer.param_groups[0]['lr'] is 0.1 on rank 0 and 0.2 on rank 1; ",
    ),
    "lr as a tensor": (
        lambda r: given(optimizer=lambda m: Adam(m.parameters(), torch.tensor([0.5, 0.25][r]))),
        "optimizer.param_groups[0]['lr'] is 0.5 on rank 0 and 0.25 on rank 1",
    ),
    "class of the optimizer": (
        lambda r: given(optimizer=lambda m: [SGD, Adam][r](m.parameters(), 0.1)),
        "optimizer is torch.optim.sgd.SGD on rank 0 and torch.optim.adam.Adam on rank 1; ",
    ),
    "momentum": (lambda r: given(optimizer=lambda m: SGD(m.parameters(), 0.1, r / 2)), "['momentum'] is 0.0 on rank 0 and"),
    "betas": (
        lambda r: given(optimizer=lambda m: Adam(m.parameters(), betas=(0.9, [0.99, 0.999][r]))),
        "optimizer.param_groups[0]['betas'] is (0.9, 0.99) on rank 0 and (0.9, 0.999) on rank 1",
    ),
    "weight decay of a group": (
        lambda r: given(optimizer=lambda m: groups(m, [0.1, 0.2][r])),
        "optimizer.param_groups[1]['weight_decay'] is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "groups in another order": (
        lambda r: given(optimizer=lambda m: groups(m, 0.1, swapped=bool(r))),
        "parameter 0 of optimizer.param_groups[0] is '0.weight' on rank 0 and '2.weight' on rank 1",
    ),
    "state of the optimizer": (
        lambda r: given(optimizer=lambda m: with_state(SGD(m.parameters(), 0.1), r)),
        "optimizer.state of 0.weight is {'exp_avg': float32 (4, 3) ",
    ),
    "state on one rank": (
        lambda r: given(optimizer=lambda m: with_state(Adam(m.parameters()), 0) if r else Adam(m.parameters())),
        "optimizer.state of 0.weight is missing on rank 0 and {'exp_avg': ",
    ),
    "clip_norm": (lambda r: given(clip_norm=[None, 1.0][r]), "clip_norm is not set on rank 0 and 1.0 on rank 1"),
    "amp": (lambda r: given(amp=["off", "bf16"][r]), "amp is 'off' on rank 0 and 'bf16' on rank 1"),
    "amp that is unknown on one rank": (
        lambda r: given(amp=["off", "fp8"][r]),
        "amp is 'off' on rank 0 and 'fp8' on rank 1",
    ),
    "ema": (lambda r: given(ema=[0.5, None][r]), "ema is 0.5 on rank 0 and not set on rank 1"),
    "compress": (lambda r: given(compress=["none", "fp16"][r]), "compress is 'none' on rank 0"),
    "dropout": (lambda r: given(net(r / 2)), "model.1.p is 0.0 on rank 0 and 0.5 on rank 1"),
    "class of a layer": (lambda r: given(nn.Sequential(nn.Linear(3, 2), [nn.ReLU, nn.Tanh][r]())), "model.1 is torch.nn"),
    "attribute of the model": (
        lambda r: given(WithSettings(kind=["a", "b"][r])),
        "model.kind is 'a' on rank 0 and 'b' on rank 1",
    ),
    "attributes of a model that may differ": (
        lambda r: given(
            WithSettings(rank=r, device=f"cuda:{r}", path=f"/host/{r}", _calls=r, log=SimpleNamespace(number=r))
        ),
        "",
    ),
    "a number that is not a rank": (lambda r: given(WithSettings(heads=r)), "model.heads is 0 on rank 0 and 1 on rank 1"),
    "mode": (lambda r: given([net(), net().eval()][r]), ""),
    "label smoothing": (
        lambda r: given(loss=nn.CrossEntropyLoss(label_smoothing=r / 4)),
        "loss.label_smoothing is 0.0 on rank 0 and 0.25 on rank 1",
    ),
    "label smoothing of dualtrain's CrossEntropy": (
        lambda r: given(loss=CrossEntropy(r / 4)),
        "loss.label_smoothing is 0.0 on rank 0 and 0.25",
    ),
    "class weights": (lambda r: given(loss=nn.CrossEntropyLoss(torch.ones(2) + r)), "loss.weight is float32 (2,) "),
    "reduction": (lambda r: given(loss=nn.MSELoss(reduction=["mean", "sum"][r])), "loss.reduction is 'mean' on rank 0 and"),
    "class of the loss": (lambda r: given(loss=[nn.MSELoss, nn.L1Loss][r]()), "loss is torch.nn.modules.loss.MSELoss on"),
    "a loss on one rank": (lambda r: given(loss=[None, nn.MSELoss()][r]), "loss is not set on rank 0 and torch.nn.mod"),
    "function": (
        lambda r: given(loss=[functional.mse_loss, functional.l1_loss][r]),
        "loss is torch.nn.functional.mse_loss (code ",
    ),
    "code of a lambda": (
        lambda r: given(loss=[lambda y, t: y.mean() * 0.5, lambda y, t: y.mean() * 0.25][r]),
        "loss is tests.training.test_same_trainer.<lambda>.<locals>.<lambda> (code ",
    ),
    "captured": (lambda r: given(loss=capturing(r / 4)), "loss.smoothing is 0.0 on rank 0 and 0.25 on rank 1"),
    "captured model": (lambda r: given(loss=capturing(0.1, model=nn.Linear(2, 2))), ""),
    "partial": (
        lambda r: given(loss=functools.partial(functional.cross_entropy, label_smoothing=r / 4)),
        "loss.keywords is {'label_smoothing': 0.0} on rank 0 and {'label_smoothing': 0.25} on rank 1",
    ),
    "attribute of a loss": (
        lambda r: given(loss=Loss(weight=torch.tensor([1.0, r]), margin=1)),
        "loss.weight is float32 (2,) ",
    ),
    "method": (
        lambda r: given(loss=[Loss().method, Loss().__call__][r]),
        "loss is tests.training.test_same_trainer.Loss.m",
    ),
    "attributes of a loss that may differ": (lambda r: given(loss=Loss(rank=r, local_rank=r, _file=r, log=object())), ""),
    "arguments that a function uses": (
        lambda r: given(loss=configured(SimpleNamespace(smoothing=r / 4, gpu=r, port=r), {})),
        "loss.args.smoothing is 0.0 on rank 0 and 0.25 on rank 1; give",
    ),
    "arguments in a dictionary": (
        lambda r: given(loss=configured(SimpleNamespace(smoothing=0), {"weight": r, "local_rank": r, "port": r})),
        "loss.table['weight'] is 0 on rank 0 and 1 on rank 1; give",
    ),
    "arguments that a function does not use": (
        lambda r: given(loss=configured(SimpleNamespace(smoothing=0, gpu=r, port=r), {"weight": 1, "port": r})),
        "",
    ),
    "attributes that a method uses": (
        lambda r: given(loss=Loss(margin=r / 4, port=r).margins),
        "loss.self.margin is 0.0 on rank 0 and 0.25 on rank 1; give",
    ),
    "a loss with weights": (lambda r: penalised(0.5), ""),
    "a loss with other weights": (lambda r: penalised(float(r)), "loss.strength is float32 (1,) "),
    "schedule": (
        lambda r: given(schedule=lambda o: lr_scheduler.StepLR(o, 3 + r)),
        "schedule.step_size is 3 on rank 0 and 4 on rank 1",
    ),
    "class of the schedule": (
        lambda r: given(schedule=lambda o: [lr_scheduler.StepLR, lr_scheduler.CosineAnnealingLR][r](o, 3)),
        "schedule is torch.optim.lr_scheduler.StepLR on rank 0 and torch.optim.lr_scheduler.CosineAnnealingLR on rank 1",
    ),
    "schedule on one rank": (
        lambda r: given(schedule=(lambda o: lr_scheduler.ExponentialLR(o, 0.9)) if r else None),
        "schedule is not set on rank 0",
    ),
    "function of a schedule": (
        lambda r: given(schedule=lambda o: lr_scheduler.LambdaLR(o, lambda step: [0.5, 0.25][r] ** step)),
        "r=0)] on rank 0",
    ),
    "schedule in a schedule": (
        lambda r: given(schedule=lambda o: sequential(o, 3 + r)),
        "step_size=3, gamma=",
    ),
    "forward": (lambda r: given(forward=[None, net()][r]), "forward is not set on rank 0 and torch.nn.modules.container"),
}


def penalised(strength: float) -> dict[str, Any]:
    model = net()
    return given(model, loss=Penalty(model, strength))


def make(backend, arguments: dict[str, Any]) -> str:
    """Make a trainer; return the class and message of its error, or an empty text."""
    try:
        Trainer(arguments.pop("model"), arguments.pop("optimizer"), backend=backend, **arguments)
    except (RanksDifferError, BackendError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def make_equal(backend) -> list[str]:
    """Make a trainer for each case that must be accepted; return the results of :func:`make`."""
    cases = [case for case, part in CASES.values() if not part]
    return [make(backend, case(backend.rank % 2)) for case in cases]


def test_ranks_in_different_processes_accept_equal_trainer_arguments(processes):
    assert {text for texts in processes(make_equal) for text in texts} == {""}


def make_all(backend) -> list[str]:
    return [make(backend, case(backend.rank)) for case, _ in CASES.values()]


def test_the_arguments_of_a_trainer_are_compared_between_ranks():
    one, other = run_threads(2, make_all)
    assert one == other
    for (name, (_, part)), text in zip(CASES.items(), one, strict=True):
        if part:
            assert text.startswith("RanksDifferError: the ranks do not have the same settings of the trainer: "), name
            assert part in text, f"{name}: {text}"
            assert len(text) < 700, name
        else:
            assert text == "", f"{name}: {text}"


def test_the_order_of_a_set_is_not_compared():
    orders = [{0, 8}, {8, 0}]
    assert list(orders[0]) != list(orders[1])  # as with strings in processes with different hash seeds
    captured = [capturing(0.1, names=order, other=dict.fromkeys(order)) for order in orders]
    constants = [eval(f"lambda y, t: y.sum() if 1 in {{{order}}} else y.mean()") for order in ("0, 8", "8, 0")]
    for one, other in (captured, constants):
        assert describe(one) == describe(other)


def test_optimizer_states_of_parameters_outside_of_the_model_are_compared():
    others = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    description = same_run._optimizer(with_state(SGD(others, 0.1), 1.0), net())
    assert len([name for name in description if name.startswith("optimizer.state of ")]) == 2


def other_epochs(backend) -> str:
    arguments = given()
    trainer = Trainer(arguments["model"], arguments["optimizer"], backend=backend)
    with pytest.raises(RanksDifferError) as error:
        trainer.fit([], epochs=1 + backend.rank)
    return str(error.value)


def test_fit_is_refused_if_epochs_differ_between_ranks():
    one, other = run_threads(2, other_epochs)
    assert one == other
    assert "the same arguments of fit: epochs is 1 on rank 0 and 2 on rank 1; give every rank the same" in one


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": (2.0, None)}, "{'a': (2.0, None), 'b': 1}"),
        ({3, 1, 2}, "{1, 2, 3}"),
        (torch.device("cuda:1"), "cuda"),
        (torch.tensor(2), "2"),
        (torch.empty(2, device="meta"), "float32 (2,)"),
        (nn.Parameter(torch.ones(2)), "float32 (2,)"),
        (torch.float16, "torch.float16"),
        (len, "builtins.len"),
        (dict, "builtins.dict"),
        (object(), "builtins.object"),
    ],
)
def test_descriptions_of_objects_contain_no_addresses_and_sort_sets(value, text):
    assert describe(value) == text


def test_describing_an_object_terminates_if_it_is_recursive_and_calls_none_of_its_methods():
    loop: list[Any] = []
    loop.append(loop)
    assert len(describe(loop)) < 100

    def recursive(n: int) -> Any:
        return recursive(n - 1) if n else loop

    assert list(of_object("loss", recursive)) == ["loss", "loss.loop", "loss.recursive"]

    class Broken:
        """Object whose methods raise: describing it must call none of them."""

        @property
        def setting(self) -> int:
            raise AssertionError("run")

        def __repr__(self) -> str:
            raise AssertionError("run")

    assert describe(Broken()).endswith("Broken")
