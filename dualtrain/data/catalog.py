"""Map a dataset's name to its :class:`~dualtrain.data.sources.Task`. The only module that loads datasets by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dualtrain.data.memory import TensorSource
from dualtrain.data.options import Options
from dualtrain.data.sources import Task, Tensors
from dualtrain.data.transforms import ImageTransform, Statistics, Transform, WeightsTransform
from dualtrain.errors import UserError
from dualtrain.files import absolute

# Mean and standard deviation of each channel over the training images.
STATISTICS: dict[str, Statistics] = {
    "digits": ((0.3056,), (0.3761,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def load_data(name: str, folder: str | None = None, **options: Any) -> Task:
    """Load the dataset ``name`` from ``folder``.

    Datasets that need no files, such as the digits, read nothing from ``folder``, but a given ``folder`` must be readable.

    Args:
        name: digits, mnist, fashion-mnist, cifar10, imagefolder, text, synthetic, or ``pkg.mod:build``, which is called
            with ``folder``, or without arguments if it takes none, and returns a :class:`Task` or two map-style datasets.
        folder: the folder of the files, or the folder to download them to with ``download=True``.
        options: fields of :class:`~dualtrain.data.options.Options`; ``shape`` may be a tuple of numbers.

    Raises:
        UserError: the name is unknown, options are invalid or contradict each other, files are missing or cannot be read, a
            download fails, or ``pkg.mod:build`` fails or returns something else.
    """
    if isinstance(options.get("shape"), tuple | list):
        options["shape"] = ",".join(map(str, options["shape"]))
    chosen = Options(dataset=name, data_dir=folder, **options)
    if chosen.augment == "weights" and chosen.model is None:
        raise UserError("--augment weights uses the transforms of a torchvision model: name it with --model")
    if name in STATISTICS:
        return _in_memory(name, usable_folder(folder, create=chosen.download), chosen)
    if ":" in name:
        from dualtrain.data.wrapped import load_own

        return load_own(name, folder, chosen)
    if name not in _OTHERS:
        known = ", ".join(sorted([*STATISTICS, *_OTHERS]))
        raise UserError(f"--dataset {name!r} is not known: choose one of {known}, or pkg.mod:build")
    return _OTHERS[name](usable_folder(folder, create=False), chosen)


def usable_folder(folder: str | None, *, create: bool) -> str | None:
    """Return the absolute path of ``folder``; make it if ``create`` is set. Raises UserError if it cannot be used.

    Return ``None`` if ``folder`` is ``None``.
    """
    verb, cure = "read", "give a folder that exists on every host"
    try:
        if folder is not None:
            if create and not Path(folder).exists():
                verb, cure = "made", "give a folder that can be made and written"
                Path(folder).mkdir(parents=True, exist_ok=True)
            next(Path(folder).iterdir(), None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"--data-dir {folder!r} cannot be {verb} ({reason}): {cure}") from error
    return None if folder is None else str(absolute(folder))


def _in_memory(name: str, folder: str | None, options: Options) -> Task:
    train, val = _read(name, folder, options.download)
    channels, side = train[0].shape[1:3]
    for_train, for_val, shape = transforms_of(name, channels, side, options)
    return Task(TensorSource(*train, for_train), TensorSource(*val, for_val), shape, classes=10)


def _read(name: str, folder: str | None, download: bool) -> tuple[Tensors, Tensors]:
    if name == "digits":
        from dualtrain.data.digits import read_digits

        return read_digits()
    if name == "cifar10":
        from dualtrain.data.cifar import read_cifar10

        return read_cifar10(folder, download)
    from dualtrain.data.mnist import read_mnist

    return read_mnist(name, folder, download)


def transforms_of(
    name: str, channels: int, side: int, options: Options
) -> tuple[Transform, Transform, tuple[int, int, int]]:
    """Return the transforms for training and for evaluation, and the shape of the inputs that they return.

    Raises:
        UserError: ``options`` do not fit images of ``channels`` channels and ``side`` × ``side`` pixels, or torchvision has
            no weights of ``options.model``, whose transforms the options request.
    """
    if options.augment == "imagenet":
        raise UserError(f"--augment imagenet is for image files, and {name} is held in memory: use crop-flip")
    if options.augment == "weights":
        from dualtrain.models.weights import published

        preset = published(options.model or "").transforms()
        given = WeightsTransform(preset)
        return given, given, (3, preset.crop_size[0], preset.crop_size[0])
    statistics = options.statistics_for(channels, STATISTICS[name])
    augment = options.augment == "crop-flip"
    size, resize = options.image_size, options.resize
    if size is not None and resize is None and size > options.largest_crop(side):
        resize = size
    if size is not None:
        options.check_crop(size, resize or side)
    final = size or resize or side
    shape = channels, final, final
    evaluation = ImageTransform(size, resize, statistics=statistics)
    return (ImageTransform(size, resize, augment, options.pad, statistics) if augment else evaluation), evaluation, shape


def _files(folder: str | None, options: Options) -> Task:
    from dualtrain.data.image_folder import load_image_folder

    return load_image_folder(folder, options)


def _text(folder: str | None, options: Options) -> Task:
    from dualtrain.data.text import load_text

    return load_text(options)


def _synthetic(folder: str | None, options: Options) -> Task:
    from dualtrain.data.synthetic import load_synthetic

    return load_synthetic(options)


_OTHERS: dict[str, Callable[[str | None, Options], Task]] = {
    "imagefolder": _files,
    "text": _text,
    "synthetic": _synthetic,
}
