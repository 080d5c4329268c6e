"""Format the first lines of a run: the job, the settings that differ from the recipe's, the model."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from dualtrain.backends import Backend
from dualtrain.config import own_settings
from dualtrain.training.resume import in_words

#: Settings that other lines show, or that do not affect what a run computes.
_NOT_LISTED = ("recipe", "run_dir", "resume", "threads", "verbose")


def job_in_words(backend: Backend, virtual_ranks: int | None, threads: int) -> str:
    """Format a run's ranks, threads, backend and launcher."""
    ranks = f"{backend.size} × {backend.device.type}" + (f" as {virtual_ranks} virtual ranks" if virtual_ranks else "")
    with_threads = f"{threads} thread{'s' * (threads != 1)}" + " each" * (backend.size > 1)
    over = f" over {backend.transport}" if backend.transport != "none" else ""
    launcher = backend.world.launcher
    started = f"started by {launcher}" if launcher != "none" else "without a launcher"
    return f"{ranks}, {with_threads}, {backend.name} backend{over}, {started}"


def settings_line(settings: Mapping[str, Any], folder: Path) -> str:
    """Format the settings in which a run differs from its recipe, as flags."""
    own = own_settings(settings)
    # A given --global-batch-size sets the recipe's --batch-size to None, and vice versa.
    own = {name: value for name, value in own.items() if name not in _NOT_LISTED and value is not None}
    more = f" with {in_words(own)}" if own else ""
    return f"settings: recipe {settings['recipe']}{more}; all are in {folder / 'config.json'}"


def model_line(name: str, model: nn.Module) -> str:
    """Format the size of a model. A layer is a module that has parameters and contains no other module."""
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    layers = sum(1 for part in model.modules() if not [*part.children()] and [*part.parameters()])
    return (
        f"model: {name}, {sum(parameter.numel() for parameter in parameters):,} parameters, {trained:,} of them trainable, "
        f"in {layers} layer{'s' * (layers != 1)}"
    )


def verbose_lines(settings: Mapping[str, Any], model: nn.Module) -> str:
    """Format all settings, and a table of the model's layers if torchinfo is installed."""
    values = ", ".join(f"{name}={value}" for name, value in settings.items())
    lines = [f"all settings: {textwrap.fill(values, 116, subsequent_indent='  ')}"]
    with suppress(ImportError):
        import torchinfo

        lines.append(str(torchinfo.summary(model, depth=2, verbose=0, row_settings=("var_names",))))
    return "\n".join(lines)
