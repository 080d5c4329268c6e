"""Deprecated: import ``AVERAGE`` and ``Transfer`` from ``dualtrain.gradients``.

This module will be removed in version 0.3.0.
"""

from __future__ import annotations

from dualtrain import gradients
from dualtrain.gradients.deprecated import warn_renamed


def __getattr__(name: str) -> object:
    if name not in ("AVERAGE", "Transfer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"dualtrain.buckets.{name}", f"dualtrain.gradients.{name}")
    return getattr(gradients, name)
