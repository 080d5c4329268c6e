"""Listing of the image files below a folder of classes, in the order of torchvision's ``ImageFolder``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dualtrain.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Tree:
    """The classes in alphabetical order, and the (path, class index) of each image."""

    classes: list[str]
    samples: list[tuple[str, int]]


def read_tree(folder: str) -> Tree:
    """List the classes and images of ``folder``, which has one folder per class.

    Raises:
        OSError: a folder cannot be read, there are no classes, or a class has no images.
        UserError: an image is not a regular file, or a link leads to a folder that contains the link.
    """
    with os.scandir(folder) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        raise FileNotFoundError("no folders of classes in it")
    samples: list[tuple[str, int]] = []
    for number, name in enumerate(classes):
        images = images_below(os.path.join(folder, name))
        if not images:
            raise FileNotFoundError(f"class {name!r} has no files that end in {', '.join(EXTENSIONS)}")
        samples += [(path, number) for path in images]
    return Tree(classes, samples)


def images_below(top: str) -> list[str]:
    """List the images below ``top``, sorted by folder, then by name. Links to folders are followed.

    Raises:
        OSError: a folder cannot be read.
        UserError: an image is not a regular file, or a link leads to a folder that contains the link.
    """
    found: list[tuple[str, list[str]]] = []
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while pending:
        folder, above = pending.pop()
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        if identity in above:
            raise UserError(f"{folder!r} is a link to a folder that contains it: delete the link")
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_dir(entry):
                    pending.append((entry.path, above | {identity}))
                elif entry.name.lower().endswith(EXTENSIONS):
                    _check_image(entry)
                    names.append(entry.name)
        found.append((folder, sorted(names)))
    return [os.path.join(folder, name) for folder, names in sorted(found) for name in names]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example, a link to itself
        return False


def _check_image(entry: os.DirEntry[str]) -> None:
    try:
        regular = entry.is_file()  # the directory entry has the type, so only a link needs a stat call
    except OSError as error:
        raise UserError(f"the image {entry.path!r} cannot be read ({error.strerror}): fix or delete it") from error
    if not regular:
        raise UserError(f"the image {entry.path!r} cannot be read (not a regular file): fix or delete it")
