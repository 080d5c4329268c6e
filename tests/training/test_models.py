"""Models by name: they are built, learn, and load weights that fit. Weights that do not fit are refused."""

from __future__ import annotations

import copy
import itertools
import pickle
from http.client import BadStatusLine
from pathlib import Path
from unittest import mock
from urllib.error import URLError

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

from dualtrain.errors import UserError
from dualtrain.models import build, fetch, weights
from dualtrain.models.classifiers import names
from dualtrain.models.freezing import freeze_backbone


class Trap:
    """Object whose unpickling touches a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def build_linear(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes))


def build_fixed():
    return nn.Linear(2, 2)


def build_without_parameters():
    return nn.Flatten()


BUILT = nn.Flatten()


def build_nothing():
    return 3


@pytest.fixture(autouse=True)
def same_start():
    torch.manual_seed(0)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Make a torch hub folder with weights of resnet18; return the model that has these weights."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    path = tmp_path / "checkpoints" / weights.published("resnet18").url.rpartition("/")[2]
    path.parent.mkdir()
    original = build("resnet18", (3, 32, 32), 1000)
    torch.save(original.state_dict(), path)
    return original


def take_two_steps(model, inputs, targets):
    """Take two steps of SGD; return the loss before each step."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(2):
        logits = model(inputs)
        losses.append(functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return losses[0].item(), losses[1].item()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("convnet", (1, 8, 8)),
        ("mnist-net", (1, 28, 28)),
        ("mnist-convnet", (1, 28, 28)),
        ("resnet18", (1, 32, 32)),
        ("squeezenet1_1", (3, 32, 32)),
        ("vit_b_32", (2, 32, 32)),
        ("tests.training.test_models:build_linear", (3, 4, 4)),
    ],
)
def test_each_model_of_images_learns_or_gives_outputs_of_the_right_shape(name, shape):
    model = build(name, shape, 10)
    if name.startswith(("squeezenet", "vit")):  # test only the shape of the outputs
        model.eval()
        assert model(torch.rand(2, *shape)).shape == (2, 10)
        return
    before, after = take_two_steps(model, torch.rand(4, *shape), torch.arange(4))
    assert after < before


def test_bert_learns_and_ignores_padding():
    model = build("bert-small", (16,), 50)
    tokens = torch.randint(4, 50, (3, 16))
    tokens[:, 10:] = 0
    before, after = take_two_steps(model, tokens, tokens)
    assert after < before
    assert not any(name.startswith("output.") for name in model.state_dict())
    longer = torch.cat([tokens[:, :10], torch.zeros(3, 2, dtype=torch.int64)], 1)
    assert torch.allclose(model(tokens)[:, :10], model(longer)[:, :10], atol=1e-5)


def test_the_last_layers_of_the_tutorials_models_have_the_tutorials_sizes():
    assert build("mnist-net", (1, 28, 28), 10)[-1].in_features == 490
    assert build("mnist-convnet", (1, 28, 28), 10)[-1].in_features == 1568


def as_in_the_tutorials(model):
    """Return a model of the same layers, with ReLU before pooling as in the PyTorch tutorials these models come from."""
    layers = list(model)
    for number, (layer, following) in enumerate(itertools.pairwise(layers)):
        if isinstance(layer, nn.MaxPool2d) and isinstance(following, nn.ReLU):
            layers[number : number + 2] = [following, layer]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", ["convnet", "mnist-net", "mnist-convnet"])
def test_pooling_before_the_relu_changes_no_bit(name, amp, layout):
    model = build(name, (1, 28, 28), 10).to(memory_format=layout)
    other = as_in_the_tutorials(copy.deepcopy(model))
    assert [type(layer) for layer in other] != [type(layer) for layer in model]
    # Use few different values, so that some pooling windows have several equal maxima, and some have no positive value.
    inputs = torch.randint(-2, 3, (16, 1, 28, 28)).float().contiguous(memory_format=layout)
    targets = torch.randint(10, (16,))
    for one in (model, other):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = functional.cross_entropy(one(inputs), targets)
            loss.backward()
            optimizer.step()
    assert list(model.state_dict()) == list(other.state_dict())
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_names_of_torchvision_models_are_known():
    assert {"resnet18", "resnet50", "inception_v3"} < set(names())


@pytest.mark.parametrize(("suffix", "wrap"), [("safetensors", None), ("pt", None), ("pt", "state_dict"), ("pt", "module.")])
def test_weights_of_a_file_are_loaded(tmp_path, suffix, wrap):
    model, file = build("convnet", (1, 8, 8), 10), tmp_path / f"w.{suffix}"
    state = dict(model.state_dict())
    if wrap == "module.":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    elif wrap:
        state = {wrap: state, "epoch": 3}
    if suffix == "safetensors":  # another program's metadata, with keys that the files of a run have too
        safetensors.torch.save_file(state, file, {"structure": "convnet", "step": "last", "dualtrain": "no"})
    else:
        torch.save(state, file)
    torch.manual_seed(1)
    other = build("convnet", (1, 8, 8), 10, weights=str(file))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_weights_that_do_not_fit_are_refused_by_name_and_shape(tmp_path, suffix):
    state = dict(build("convnet", (1, 8, 8), 7).state_dict())
    state["extra"] = state.pop("0.bias")
    file = tmp_path / f"w.{suffix}"
    safetensors.torch.save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    with pytest.raises(UserError) as refusal:
        build("convnet", (1, 8, 8), 10, weights=str(file))
    for part in ("1 missing (0.bias)", "1 unexpected (extra)", "8.weight (7×64 in the file, 10×64 in the model)"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_loading_a_weights_file_runs_no_code(tmp_path):
    file, trace = tmp_path / "w.pt", tmp_path / "trace"
    torch.save({"a": Trap(trace)}, file)
    with pytest.raises(UserError, match="holds more than weights"):
        build("convnet", (1, 8, 8), 10, weights=str(file))
    assert not trace.exists()


def test_too_little_memory_is_not_reported_as_a_damaged_weights_file(tmp_path, monkeypatch):
    def load(*args, **options):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    file = tmp_path / "w.pt"
    torch.save({"a": torch.zeros(2)}, file)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        build("convnet", (1, 8, 8), 10, weights=str(file))


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"abc", "list"])
def test_files_without_weights_are_refused(tmp_path, name, content):
    file = tmp_path / name
    if content == "list":
        torch.save([1, 2], file)
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match="--weights") as refusal:
        build("convnet", (1, 8, 8), 10, weights=str(file))
    assert "\n" not in str(refusal.value)


def test_a_weights_file_that_does_not_fit_into_memory_is_not_reported_as_damaged(tmp_path, monkeypatch):
    file = tmp_path / "w.safetensors"
    safetensors.torch.save_file(build("convnet", (1, 8, 8), 10).state_dict(), file)
    error = RuntimeError("unable to mmap 240000080 bytes from file </proc/self/fd/3>: Cannot allocate memory (12)")
    monkeypatch.setattr(safetensors.torch, "load_file", mock.Mock(side_effect=error))
    with pytest.raises(RuntimeError, match="Cannot allocate memory"):
        build("convnet", (1, 8, 8), 10, weights=str(file))


def test_published_weights_fill_all_layers_except_a_head_of_another_size(hub):
    model = build("resnet18", (3, 32, 32), 10, pretrained=True)
    for name, tensor in hub.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]) or name.startswith("fc.")
    grey = build("resnet18", (1, 32, 32), 1000, pretrained=True)
    images = torch.rand(2, 1, 32, 32)
    assert torch.equal(grey.fc.weight, hub.fc.weight)
    assert torch.allclose(grey.eval()(images), hub.eval()(images.expand(-1, 3, -1, -1)), atol=1e-4)


def test_a_frozen_backbone_keeps_its_weights_and_statistics(hub):
    model = build("resnet18", (3, 32, 32), 10, pretrained=True, freeze_backbone=True)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["fc.weight", "fc.bias"]
    for trained in (model, copy.deepcopy(model)):
        before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        take_two_steps(trained, torch.rand(4, 3, 32, 32), torch.arange(4))
        changed = [name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, before[name])]
        assert changed == ["fc.weight", "fc.bias"]
    plain = build("resnet18", (3, 32, 32), 10)
    plain.load_state_dict(model.state_dict())


class NormAct(nn.BatchNorm2d):
    """A subclass of a BatchNorm layer, such as other libraries define."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


@pytest.mark.parametrize("norm", [NormAct, nn.SyncBatchNorm])
def test_a_frozen_backbone_keeps_the_statistics_of_other_classes_of_batchnorm(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4), nn.Flatten(), nn.Linear(4, 2))
    freeze_backbone(model, "3")
    freeze_backbone(model, "3")
    for trained in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(trained[1], norm)
        before = copy.deepcopy(trained[1].state_dict())
        take_two_steps(trained, torch.rand(4, 3, 3, 3), torch.arange(4) % 2)
        assert all(torch.equal(tensor, before[name]) for name, tensor in trained[1].state_dict().items())


@pytest.mark.parametrize(
    ("error", "reason"),
    [(URLError("no network"), "no network"), (BadStatusLine("no network\r\n"), "no network"), (EOFError(), "EOFError")],
)
def test_without_a_network_the_message_says_where_the_weights_go(error, reason, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    with pytest.raises(UserError, match=rf"\({reason}\): put https://.*/resnet50-11ad3fa6\.pth into .*/checkpoints"):
        fetch("resnet50")


def build_odd() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_model_with_meta_sparse_or_inference_tensors_is_refused_but_a_lazy_model_is_not(monkeypatch):
    def sparse() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("edges", torch.eye(2).to_sparse(), persistent=False)
        return model

    def inference() -> nn.Module:
        with torch.inference_mode():
            return nn.Linear(2, 2)

    odd = (
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (sparse, "'edges' is a sparse tensor"),
    )
    for make, part in (*odd, (inference, "'weight' is an inference tensor")):
        monkeypatch.setattr(f"{__name__}.build_odd", make)
        with pytest.raises(UserError, match=f"returned a Linear whose {part}: make it an ordinary tensor"):
            build("tests.training.test_models:build_odd", (2,), 2)
    monkeypatch.setattr(f"{__name__}.build_odd", lambda: nn.LazyLinear(2))
    assert isinstance(build("tests.training.test_models:build_odd", (2,), 2), nn.LazyLinear)


@pytest.mark.parametrize(
    ("name", "shape", "options", "part"),
    [
        ("resnet", (3, 8, 8), {}, "choose one of bert-small, convnet, mnist-convnet, mnist-net"),
        ("convnet", (64,), {}, "takes images"),
        ("bert-small", (3, 8, 8), {}, "takes texts"),
        ("resnet18", (64,), {}, "takes images"),
        ("vit_b_16", (1, 8, 8), {}, "--model vit_b_16 does not take images of 8 × 8 pixels ("),
        ("convnet", (1, 8, 8), {"pretrained": True}, "--pretrained"),
        ("bert-small", (8,), {"freeze_backbone": True}, "--freeze-backbone"),
        ("tests.training.test_models:build_fixed", (1, 8, 8), {"freeze_backbone": True}, "--freeze-backbone"),
        ("tests.training.test_models:build_nothing", (1, 8, 8), {}, "torch.nn.Module"),
        (
            "tests.training.test_models:build_without_parameters",
            (1, 8, 8),
            {},
            "returned a Flatten without parameters: there is nothing",
        ),
        ("tests.training.test_models:missing", (1, 8, 8), {}, "no callable"),
        ("missing.module:build", (1, 8, 8), {}, "not found"),
        ("tests/__init__.py:build", (1, 8, 8), {}, "does not name a callable"),
        ("tests.versions.py:build", (1, 8, 8), {}, "instead of its file: tests.versions:build"),
        ("tests.training.test_models:BUILT", (1, 8, 8), {}, "is a module (Flatten): give a function that builds it"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_in_one_line(name, shape, options, part):
    with pytest.raises(UserError) as refusal:
        build(name, shape, 10, **options)
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
