"""From an image file to pixels: what is decoded at all, and what is said of bytes that are no image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualtrain.errors import UserError
from dualtrain.files import open_regular

#: PIL finds a file's format in its content, whatever its name. Not among these: formats for which it starts programs
#: (EPS is given to Ghostscript), or which are rare enough that nobody looks at their decoders.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


def read_image(path: str | Path) -> Any:
    """The image in a file, as PIL has it, decoded.

    Raises:
        UserError: it cannot be read, is no image of these formats, or has pixels of more than 8 bits.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            image.load()
    except UnidentifiedImageError as error:
        raise _unreadable(path, f"it is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # PIL raises what its bytes lead to, decompression bombs among them
        raise _unreadable(path, getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
    if image.mode.startswith(("I", "F")):
        # PIL converts them by cutting off: of 16-bit values, all but the darkest 255 become white.
        raise UserError(f"the image {str(path)!r} has pixels of more than 8 bits, mode {image.mode}: convert it to 8 bits")
    return image


def _unreadable(path: str | Path, reason: str) -> UserError:
    first = reason.partition("\n")[0]
    return UserError(f"the image {str(path)!r} cannot be read ({first}): mend or delete it, or convert it to PNG")
