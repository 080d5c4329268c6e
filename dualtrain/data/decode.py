"""Decoding of image files: the accepted formats, and the errors for files that are not images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualtrain.errors import UserError, is_disk_or_network_error
from dualtrain.files import open_regular

#: PIL detects a file's format from its content, not from its name. The list leaves out formats for which PIL starts an
#: external program (Ghostscript for EPS), and rare formats, whose decoders get little review.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")


def read_image(path: str | Path) -> Any:
    """Read and decode an image file; return a PIL image.

    Raises:
        UserError: the file cannot be read, is not an image in one of ``FORMATS``, has too many pixels, or has more than 8
            bits per value.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            image.load()
    except UnidentifiedImageError as error:
        raise _unreadable(path, error, f"it is none of {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:
        raise UserError(f"the image {str(path)!r} cannot be read ({error}): delete it, or make it smaller") from error
    except Exception as error:  # a damaged file can make PIL raise almost any exception
        raise _unreadable(path, error, getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
    if image.mode.startswith(("I", "F")):
        # PIL would clip 16-bit values to 255, so most pixels would become white.
        raise UserError(f"the image {str(path)!r} has pixels of more than 8 bits, mode {image.mode}: convert it to 8 bits")
    return image


def _unreadable(path: str | Path, error: Exception, reason: str) -> UserError:
    first, transient = reason.partition("\n")[0], is_disk_or_network_error(error)
    if transient:
        cure = "repair the disk or the network"
    elif isinstance(error, OSError) and error.errno is not None:  # an error of the system, and not of a decoder
        cure = "check its path and permissions"
    else:
        cure = "fix or delete it, or convert it to PNG"
    return UserError(f"the image {str(path)!r} cannot be read ({first}): {cure}", transient=transient)
