"""Warnings about deprecated names of options and attributes. The names will be removed in version 0.3.0."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is deprecated. ``stacklevel`` is passed to :func:`warnings.warn`; 3 is the caller's caller."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)


def renamed_option(old: str, value: int | None, new: str, new_value: int) -> int:
    """Return ``value`` and warn if the option ``old`` was given; otherwise return ``new_value``.

    ``value`` is the value of ``old``, or ``None``; ``new_value`` is the value of ``new``, given or by default.
    """
    if value is None:
        return new_value
    warn_renamed(old, new, stacklevel=4)
    return value
