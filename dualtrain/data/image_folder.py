"""A folder of images, ``train/CLASS/…`` and ``val/CLASS/…``, as ImageNet is usually stored."""

from __future__ import annotations

from pathlib import Path

from dualtrain.data.images import Geometry, ImageFiles
from dualtrain.data.loader import LoaderSource
from dualtrain.data.options import Options
from dualtrain.data.sources import Task
from dualtrain.data.transforms import IMAGENET, Transform, to_float
from dualtrain.data.tree import Tree, read_tree
from dualtrain.errors import UserError
from dualtrain.models.weights import published

SIZE = 224
# Shorter side of the resized image, divided by the side of the crop, unless --resize or --augment weights is given. Applies
# to evaluation, and to training with crop-flip or without augmentation.
MARGIN = 256 / 224


def load_image_folder(folder: str | None, options: Options) -> Task:
    """List the images below ``folder``, and return the task, whose sources read the images later.

    Raises:
        UserError: no folder is given, folders or images are missing or cannot be listed, train/ and val/ have different
            classes, or :func:`geometries` raises it.
    """
    if folder is None:
        raise UserError("--dataset imagefolder needs the folder of train/ and val/: name it with --data-dir")
    train, val = _tree(folder, "train"), _tree(folder, "val")
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))[0]
        raise UserError(
            f"--data-dir {folder!r}: only one of train/ and val/ has the class {odd!r}: give both the same classes"
        )
    geometry, evaluation, transform = geometries(options)
    return Task(
        LoaderSource(ImageFiles(train.samples, geometry), options.workers, transform),
        LoaderSource(ImageFiles(val.samples, evaluation), options.workers, transform),
        shape=(3, geometry.size, geometry.size),
        classes=len(train.classes),
        names=tuple(train.classes),
    )


def _tree(folder: str, part: str) -> Tree:
    path = Path(folder, part)
    try:
        return read_tree(str(path))
    except OSError as error:  # no such folder, no classes in it, or a class without images
        reason = str(error.strerror or error).partition("\n")[0]
        raise UserError(
            f"--data-dir {folder!r} is not an image folder ({str(path)!r}: {reason}): put images into {part}/CLASS/*.jpg"
        ) from error


def geometries(options: Options) -> tuple[Geometry, Geometry, Transform]:
    """Return the geometry for training, the geometry for evaluation, and the transform of whole batches.

    Raises:
        UserError: the options contradict each other, or they request the transforms of torchvision's weights of
            ``options.model``, and there are no such weights.
    """
    augment = options.augment or "imagenet"
    if augment == "weights":
        preset = published(options.model or "").transforms()
        size, resize = preset.crop_size[0], preset.resize_size[0]
        same = Geometry(size, resize, interpolation=preset.interpolation.value)
        statistics = tuple(preset.mean), tuple(preset.std)
        return same, same, lambda images, numbers, seed: to_float(images, statistics)
    size = options.image_size or SIZE
    resize = options.resize or round(size * MARGIN)
    options.check_crop(size, resize)
    normalize = options.statistics_for(3, IMAGENET) if options.normalize else IMAGENET
    return (
        Geometry(size, resize, augment, options.pad),
        Geometry(size, resize),
        lambda images, numbers, seed: to_float(images, normalize),
    )
