"""dualtrain/hvd/README.md#broadcasts-of-state: broadcasts of parameters, optimizer states and objects."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib

import numpy as np
import pytest
import torch
from torch import nn

from dualtrain.backends import objects
from tests.hvd.worlds import EVERY, OURS, PAIR, check, library, same

OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD"]
VALUES = [
    *(None, True, 1, 2**70, 1.5, "text", b"bytes", [1, [2]], (1, "a"), {1, 2}, {"a": {1: [None]}}, 1 + 2j),
    *(frozenset({1}), bytearray(b"ab"), range(1, 9, 2), slice(1, None), float, torch.float32, torch.Size([1])),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.defaultdict(list, {1: [2]})),
    *(
        collections.deque([1, 2], 3),
        argparse.Namespace(lr=0.1, layers=[1]),
        decimal.Decimal("1.10"),
        fractions.Fraction(1, 3),
    ),
    *(datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.UTC), datetime.date(2020, 1, 2), datetime.timedelta(3, 4)),
    *(pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/x"), np.float32(1.5), np.int64(3), np.bool_(True), np.dtype("f4")),
]
ARRAYS = [
    np.arange(6).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 2), "f2"),
    np.array(["a", "bc"]),
    np.array([1, "a", None], dtype=object),
    np.array("2020-01-01", dtype="M8[D]"),
    np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
]


class OfTheUser:
    """A class that only one test registers with ``torch.serialization.safe_globals``."""


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_decoded_values_equal_the_encoded_ones(value):
    found = objects.decode(objects.encode([value]))[0]
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: str(array.dtype))
def test_decoded_arrays_equal_the_encoded_ones(array):
    found = objects.decode(objects.encode({"x": array}))["x"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


@pytest.mark.parametrize("value", [print, OfTheUser(), OfTheUser, lambda: 0, [eval], nn.Linear(1, 1), ...])
def test_objects_of_classes_that_are_not_allowed_are_refused_on_the_sending_rank(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        objects.encode(value)


def test_classes_that_the_user_registered_stay_registered():
    mine = argparse.Namespace
    with torch.serialization.safe_globals([mine, OfTheUser]):
        assert isinstance(objects.decode(objects.encode([OfTheUser()]))[0], OfTheUser)
        assert mine in torch.serialization.get_safe_globals()
    assert mine not in torch.serialization.get_safe_globals()


def sent_objects(backend):
    with library(backend) as hvd:
        me, size = hvd.rank(), hvd.size()
        for value in VALUES[:12] + VALUES[-6:]:
            found = hvd.broadcast_object(value if me == 1 else None, 1, name="object")
            assert found == value
        array = hvd.broadcast_object(np.arange(3) * (me + 1), 1)
        assert array.tolist() == [0, 2, 4]
        mine = argparse.Namespace(rank=me, text="x" * me)
        assert hvd.allgather_object(mine, name="all") == [argparse.Namespace(rank=r, text="x" * r) for r in range(size)]
        # If one rank cannot send its object, all ranks raise instead of waiting, and later calls work.
        code, optimizer = OfTheUser() if me == 1 else 1, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.param_groups[0]["own"] = code
        check(
            hvd,
            ("broadcast", lambda: hvd.broadcast_object(code, 1, name="code") and None, None, "TypeError"),
            ("allgather", lambda: hvd.allgather_object(code, name="code") and None, None, "TypeError"),
            ("optimizer", lambda: hvd.broadcast_optimizer_state(optimizer, 1), None, "TypeError"),
        )
        assert hvd.broadcast_object(me, 1, name="code") == 1
        if backend.name != "horovod":
            for call in (hvd.allgather_object, lambda obj: hvd.broadcast_object(obj, 1)):
                with pytest.raises(TypeError, match=r"^rank 1: an object of type OfTheUser cannot be sent"):
                    call(code)


@EVERY
def test_objects_are_broadcast_and_gathered(real):
    real(sent_objects)


def parameters(backend):
    theirs = backend.name == "horovod"
    with library(backend) as hvd:
        torch.manual_seed(hvd.rank() + 1)
        for form in ("state_dict", "named", "list", "generator", "channels_last"):
            model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
            if form == "channels_last":
                model = model.to(memory_format=torch.channels_last)
            argument = {
                "state_dict": model.state_dict,
                "channels_last": model.state_dict,
                "named": lambda m=model: list(m.named_parameters()),
                "list": lambda m=model: [(f"p{i}", p) for i, p in enumerate(m.parameters())],
                "generator": model.named_parameters,
            }[form]()
            refused = "ValueError" if form in ("generator", "channels_last") else None
            check(hvd, (form, lambda g=argument: hvd.broadcast_parameters(g, 1), refused, None))
            if theirs and refused:
                continue
            for p in model.parameters():
                everyone = hvd.allgather(p.detach()[None].contiguous(), name=f"{form} {tuple(p.shape)}")
                assert (everyone == everyone[1]).all()
        for wrong in (1, torch.ones(2)):
            check(hvd, same("wrong", lambda w=wrong: hvd.broadcast_parameters(w, 0), "ValueError"))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        plain = {"weight": torch.ones(1), "note": "not a tensor", "_extra_state": {"scale": torch.ones(1)}}
        nested = {"model": model.state_dict(), "weight": torch.ones(1)}
        for title, argument in (("nested", nested), ("no tensor", optimizer.state_dict()), ("plain", plain)):
            result = None if title == "plain" else "ValueError"
            call = lambda g=argument: hvd.broadcast_parameters(g, 0)  # noqa: E731
            check(hvd, (title, call, "AttributeError", result))
        check(hvd, same("empty", lambda: hvd.broadcast_parameters({}, 0), None))
        if not theirs:
            # The broadcast of the first "p" may end before the second "p" is reached.
            twice = [("p", torch.ones(1)), *((f"p{i}", torch.ones(1)) for i in range(300)), ("p", torch.ones(1))]
            with pytest.raises(ValueError, match="'p'"):
                hvd.broadcast_parameters(twice, 0)


@EVERY
def test_parameters_of_the_root_are_broadcast(fresh):
    fresh(parameters)


def fresh_states(backend):
    """Return weights and learning rates after a broadcast of optimizers that have not stepped."""
    with library(backend) as hvd:
        me, found = hvd.rank(), {}
        for kind, options in [("SGD", {"momentum": 0.9}), ("AdamW", {}), ("SGD", {})]:
            p = nn.Parameter(torch.ones(2))
            optimizer = getattr(torch.optim, kind)([p], lr=0.1 + me * 0.1, weight_decay=0.1, **options)
            hvd.broadcast_optimizer_state(optimizer, 0)
            title = kind + (" stateless" if kind == "SGD" and not options else "")
            found[title] = p[0].item(), optimizer.param_groups[0]["lr"]
            assert p.grad.tolist() == [0, 0]
        return found


@PAIR
def test_a_broadcast_of_a_fresh_optimizer_changes_weights_only_with_horovod(real):
    first, second = real(fresh_states)
    if real.name == "torch":
        assert first == second == dict.fromkeys(("SGD", "AdamW", "SGD stateless"), (1, 0.1))
        return
    # Horovod's broadcast takes a step, with each rank's own learning rate: the weights change, and differ between ranks.
    assert first["SGD"][0] == pytest.approx(0.99)
    assert second["SGD"][0] == pytest.approx(0.98)
    assert second["AdamW"] == pytest.approx((0.98, 0.1))
    assert second["SGD stateless"][1] == 0.2  # Horovod does not send the options of an optimizer without state


def resumed(backend):
    """Load a checkpoint on the root only, then broadcast weights and optimizer state, as Horovod documents it."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1)
        if hvd.rank() == 0:
            p.grad = torch.ones(2)
            optimizer.step()
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        hvd.broadcast_parameters([("p", p)], 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        buffer = optimizer.state[p]["momentum_buffer"]
        return p.tolist(), buffer.tolist(), optimizer.param_groups[0]["lr"]


@PAIR
def test_a_state_that_only_the_root_has_is_broadcast(real):
    first, second = real(resumed)
    assert first[1:] == second[1:]
    # On Horovod, rank 1 steps during the broadcast, because its state is empty.
    assert (first[0] == second[0]) == (real.name == "torch")


def other_dtypes(backend):
    """Broadcast states whose dtype differs from that of the parameter."""
    with library(backend) as hvd:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        optimizer.state[p]["momentum_buffer"] = torch.full((2,), hvd.rank() + 1 + 2.0**-40, dtype=torch.float64)
        hvd.broadcast_optimizer_state(optimizer, 1)
        return optimizer.state[p]["momentum_buffer"].dtype, optimizer.state[p]["momentum_buffer"].tolist()


@PAIR
def test_states_keep_their_dtypes(real):
    assert real(other_dtypes) == [(torch.float64, [2 + 2.0**-40] * 2)] * 2


def learning_rates(backend, compat):
    """Change the learning rate after a broadcast; return the wrapper's learning rate after each change.

    First change it in the inner optimizer, as a scheduler made before wrapping does. Then change it in a parameter group
    that the program got from the wrapper before the broadcast.
    """
    with library(backend, DUALTRAIN_HVD_COMPAT=compat) as hvd:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
        group = optimizer.param_groups[0]
        hvd.broadcast_optimizer_state(optimizer, 0)
        inner.param_groups[0]["lr"] = 0.25
        scheduled = optimizer.param_groups[0]["lr"]
        group["lr"] = 0.125
        return scheduled, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("compat", ["0", "1"])
@PAIR
def test_a_broadcast_of_optimizer_state_keeps_the_param_group_objects(real, compat):
    assert real(learning_rates, compat) == [(0.25, 0.125)] * 2


def every_optimizer(backend):
    with library(backend) as hvd:
        me = hvd.rank()
        newer = [title for title in ("Muon",) if hasattr(torch.optim, title)]  # since torch 2.9
        for title in [*OPTIMIZERS, "Adafactor", "SparseAdam", "LBFGS", *newer]:
            for stepped_ranks in ("none", "root", "all"):
                torch.manual_seed(me)
                model = nn.Linear(3, 2, bias=False)
                optimizer = getattr(torch.optim, title)(model.parameters(), lr=0.01 * (me + 1))
                if stepped_ranks == "all" or (stepped_ranks == "root" and me == 1):
                    model.weight.grad = torch.randn(2, 3)
                    model.weight.grad = model.weight.grad.to_sparse() if title == "SparseAdam" else model.weight.grad
                    optimizer.step(lambda m=model: m(torch.ones(1, 3)).sum())
                before = model.weight.detach().clone()
                hvd.broadcast_optimizer_state(optimizer, 1)
                assert torch.equal(model.weight, before)  # no step was taken
                states = hvd.allgather_object(optimizer.state_dict(), name=f"{title} {stepped_ranks}")
                for state in states:
                    assert repr(state) == repr(states[1]), (title, stepped_ranks)
                assert optimizer.param_groups[0]["lr"] == 0.02
                kinds = {key: type(value) for key, value in optimizer.param_groups[0].items()}
                untouched = getattr(torch.optim, title)(model.parameters(), lr=0.02).param_groups[0]
                assert kinds == {key: type(value) for key, value in untouched.items()}


@OURS
def test_the_state_of_every_optimizer_is_broadcast(real):
    real(every_optimizer)


def restored(backend):
    with library(backend) as hvd:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        state = hvd.elastic.TorchState(optimizer=optimizer, scheduler=scheduler, seen=[1], step=0)
        optimizer.step()
        scheduler.step()
        state.seen.append(2)
        state.step = 1
        generator = torch.get_rng_state()
        torch.rand(1)
        state.restore()
        check(
            hvd,
            same("number", lambda: state.step, 0),
            same("optimizer", lambda: optimizer.param_groups[0]["lr"], 1.0),
            ("list", lambda: state.seen, [1, 2], [1]),
            ("scheduler", lambda: scheduler.last_epoch, 1, 0),
            ("generator", lambda: torch.equal(torch.get_rng_state(), generator), False, True),
        )


@PAIR
def test_a_restore_undoes_changes_of_lists_schedulers_and_generators_only_with_dualtrain(real):
    real(restored)
