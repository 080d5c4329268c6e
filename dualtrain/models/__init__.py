"""Models by name: small ones of this package, torchvision's classifiers, and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dualtrain.errors import UserError
from dualtrain.models import bert, small
from dualtrain.models.freezing import find_head, freeze_backbone
from dualtrain.models.weights import fetch, load_weights
from dualtrain.user_code import call_user_code

__all__ = ["Shape", "build", "fetch"]

Shape = tuple[int, ...]


def build(
    name: str,
    shape: Shape,
    classes: int,
    *,
    pretrained: bool = False,
    load_published: bool = True,
    freeze_backbone: bool = False,
    weights: str | None = None,
) -> nn.Module:
    """Build the model ``name`` on the CPU. Weights are random, from torch's global generator, unless an option sets them.

    Args:
        name: a model of this package, a classification model of torchvision, or ``pkg.mod:build``, which is called with
            ``(shape, classes)``, or without arguments if it takes none, and returns a module.
        shape: shape of one input: (channels, height, width) of an image, (length,) of a text.
        classes: number of classes; for a text, the size of the vocabulary.
        pretrained: start from torchvision's weights, except for a head of a different size. Missing weights are downloaded.
        load_published: false if ``weights`` or a checkpoint replaces torchvision's weights. Then ``pretrained`` loads no
            weights, but still sets ``transform_input`` of GoogLeNet and Inception v3 for images of 3 channels, as their
            published weights require.
        freeze_backbone: train only the last linear or convolutional layer; all BatchNorm layers stay in evaluation mode.
        weights: file of weights for the whole model, safetensors or a state dict.

    Raises:
        UserError: the name is unknown, the user's function raises or returns no usable module, the model does not take
            inputs of this shape, an option does not work with the model, or weights are missing or do not fit.
    """
    model = _build(name, shape, classes, pretrained, load_published)
    if weights is not None:
        load_weights(model, weights)
    if freeze_backbone:
        _freeze(model, name)
    return model


def _build(name: str, shape: Shape, classes: int, pretrained: bool, load_published: bool) -> nn.Module:
    if pretrained and (":" in name or name in _IMAGE_MODELS or name in _TEXT_MODELS):
        raise UserError(f"--pretrained works with torchvision's models, not with {name!r}: leave --pretrained out")
    if ":" in name:
        return _checked(call_user_code(name, "--model", "(shape, classes)", shape, classes), name)
    if name in _TEXT_MODELS:
        return _TEXT_MODELS[name](_checked_shape(name, shape, 1, "texts (length)"), classes)
    if name in _IMAGE_MODELS:
        return _IMAGE_MODELS[name](_image_shape(name, shape), classes)
    from dualtrain.models import classifiers

    if name not in classifiers.names():
        own = ", ".join(sorted([*_IMAGE_MODELS, *_TEXT_MODELS]))
        raise UserError(
            f"--model {name!r} is not known: choose one of {own}, a classification model of torchvision "
            "(resnet18, …), or pkg.mod:build"
        )
    return classifiers.classifier(name, _image_shape(name, shape), classes, pretrained, load_published=load_published)


def _freeze(model: nn.Module, name: str) -> None:
    if name in _TEXT_MODELS:
        raise UserError(
            f"--freeze-backbone does not work with {name}, whose output layer shares the embedding's weights: omit the flag"
        )
    freeze_backbone(model, find_head(model))


def _image_shape(name: str, shape: Shape) -> tuple[int, int, int]:
    channels, height, width = _checked_shape(name, shape, 3, "images (channels, height, width)")
    return channels, height, width


def _checked_shape(name: str, shape: Shape, dimensions: int, inputs: str) -> Shape:
    if len(shape) != dimensions:
        raise UserError(f"--model {name} takes {inputs}, and a sample has the shape {tuple(shape)}: choose another --model")
    return shape


def _checked(model: object, name: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name!r} returned a {type(model).__name__}: it must return a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise UserError(f"--model {name!r} returned a {type(model).__name__} without parameters: there is nothing to train")
    for part, tensor in chain(model.named_parameters(), model.named_buffers()):
        kind = "" if is_lazy(tensor) else _kind(tensor)
        if kind:
            raise UserError(
                f"--model {name!r} returned a {type(model).__name__} whose {part!r} is {kind}: make it an ordinary tensor"
            )
    return model


def _kind(tensor: torch.Tensor) -> str:
    """Describe a tensor that cannot be sent to other ranks or cannot be updated; return "" for other tensors."""
    if tensor.is_meta:
        return "on the meta device"
    if tensor.layout != torch.strided:
        return "a sparse tensor"
    return "an inference tensor" if tensor.is_inference() else ""


_IMAGE_MODELS: dict[str, Callable[[tuple[int, int, int], int], nn.Module]] = {
    "convnet": small.convnet,
    "mnist-net": small.mnist_net,
    "mnist-convnet": small.mnist_convnet,
}
_TEXT_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "bert-small": lambda shape, classes: bert.Bert(classes, shape[0]),
}
