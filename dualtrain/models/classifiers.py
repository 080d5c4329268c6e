"""torchvision's classification models by name, adapted to the data's channels and classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dualtrain.errors import UserError
from dualtrain.models.freezing import find_head
from dualtrain.models.weights import differences, fetch, read_pickled
from dualtrain.torchvision_shim import torchvision

# No auxiliary heads: with them, outputs in training mode are tuples. No init_weights: torchvision's
# own initialization of these models takes about a second.
_PLAIN = {"aux_logits": False, "init_weights": False}
_OPTIONS: dict[str, dict[str, Any]] = {"googlenet": _PLAIN, "inception_v3": _PLAIN}


def names() -> list[str]:
    """Return the names of torchvision's classification models."""
    models = torchvision().models
    found: list[str] = models.list_models(module=models)
    return found


def classifier(
    name: str, shape: tuple[int, int, int], classes: int, pretrained: bool, *, load_published: bool = True
) -> nn.Module:
    """Build torchvision's model ``name`` with a first convolution for ``shape``'s channels and a head for ``classes``.

    With ``pretrained``, all layers start from torchvision's weights, except a head of a different size. If the images do
    not have 3 channels, each input channel of the first convolution gets the sum of torchvision's weights over the 3 RGB
    channels, divided by the number of the images' channels. If ``load_published`` is false, torchvision's weights are not
    loaded, because the caller loads weights of the whole model.

    Raises:
        UserError: the model does not take images of this size, or the weights cannot be downloaded, are damaged, or do not
            fit.
    """
    options: dict[str, Any] = dict(_OPTIONS.get(name, {}))
    if "vit" in name and "max" not in name:
        options["image_size"] = shape[1]
    try:
        model: nn.Module = torchvision().models.get_model(name, weights=None, num_classes=classes, **options)
    except AssertionError as error:  # the image's side is not a multiple of a vision transformer's patch
        raise UserError(
            f"--model {name} does not take images of {shape[1]} × {shape[2]} pixels ({error}): give another --image-size"
        ) from error
    if pretrained and load_published:
        _load_published(model, name)
    if pretrained and hasattr(model, "transform_input"):
        # The published weights of GoogLeNet and Inception v3 need inputs in [-1, 1]; forward() converts normalized images.
        model.transform_input = shape[0] == 3  # type: ignore[assignment]
    if shape[0] != 3:
        _replace_first_convolution(model, shape[0], keep=pretrained)
    return model


def _load_published(model: nn.Module, name: str) -> None:
    path = fetch(name)
    try:
        state = read_pickled(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the weights in {path} are damaged: delete the file, and the next run downloads it") from error
    state = {key: value for key, value in state.items() if not key.lower().startswith("aux")}
    head, ours = find_head(model), model.state_dict()
    for key in (f"{head}.weight", f"{head}.bias"):
        if key in state and key in ours and state[key].shape != ours[key].shape:
            state[key] = ours[key]
    wrong = differences(ours, state)
    if wrong:
        raise UserError(
            f"torchvision's weights of {name} do not fit inputs of this size ({'; '.join(wrong)}): resize the inputs"
        )
    model.load_state_dict(state, strict=False)


def _replace_first_convolution(model: nn.Module, channels: int, keep: bool) -> None:
    """Replace the first convolution by a convolution for ``channels`` channels.

    With ``keep``, make its weights from the old ones, so that it gives the same result for a grey image as the old
    convolution for the image's RGB copy.
    """
    name, old = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    if keep:
        with torch.no_grad():
            new.weight.copy_(old.weight.sum(1, keepdim=True).expand_as(new.weight) / channels)
            if old.bias is not None and new.bias is not None:
                new.bias.copy_(old.bias)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
