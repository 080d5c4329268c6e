"""Warnings for the deprecated names of options and attributes, which will be removed in version 0.3.0."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is deprecated. ``stacklevel`` is passed to :func:`warnings.warn`; 3 is the caller's caller."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)


def renamed_option(old: str, value: int | None, new: str, default: int) -> int:
    """Return ``value`` and warn if ``old`` was given; otherwise return ``default``, the value of ``new``."""
    if value is None:
        return default
    warn_renamed(old, new, stacklevel=4)
    return value
