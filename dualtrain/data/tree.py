"""The image files below a folder of classes, in the order in which torchvision's ``ImageFolder`` has them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dualtrain.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Tree:
    """The classes, in alphabetical order, and (path, class number) of each image."""

    classes: list[str]
    samples: list[tuple[str, int]]


def read_tree(folder: str) -> Tree:
    """The classes and images of ``folder``, which has a folder for each class.

    Raises:
        OSError: a folder cannot be read, or there are no classes, or no images in one.
        UserError: an image is no regular file, or a link leads back to a folder that it is in.
    """
    with os.scandir(folder) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir())
    if not classes:
        raise FileNotFoundError("no folders of classes in it")
    samples: list[tuple[str, int]] = []
    for number, name in enumerate(classes):
        images = _images(os.path.join(folder, name))
        if not images:
            raise FileNotFoundError(f"no images of class {name!r}; they end in {', '.join(EXTENSIONS)}")
        samples += [(path, number) for path in images]
    return Tree(classes, samples)


def _images(top: str) -> list[str]:
    """The images below ``top``, links to folders followed: by folder, then by name."""
    found: list[tuple[str, list[str]]] = []
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [(top, frozenset())]
    while waiting:
        folder, above = waiting.pop()
        status = os.stat(folder)
        identity = status.st_dev, status.st_ino
        if identity in above:
            raise UserError(f"{folder!r} is a link to a folder that it is in: delete it, since its images have no end")
        names = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if _is_dir(entry):
                    waiting.append((entry.path, above | {identity}))
                elif entry.name.lower().endswith(EXTENSIONS):
                    _check_image(entry)
                    names.append(entry.name)
        found.append((folder, sorted(names)))
    return [os.path.join(folder, name) for folder, names in sorted(found) for name in names]


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads nowhere
        return False


def _check_image(entry: os.DirEntry[str]) -> None:
    try:
        regular = entry.is_file()  # known from the folder, without a look at the file, unless it is a link
    except OSError as error:
        raise UserError(f"the image {entry.path!r} cannot be read ({error.strerror}): mend or delete it") from error
    if not regular:
        raise UserError(f"the image {entry.path!r} cannot be read (no regular file): mend or delete it")
