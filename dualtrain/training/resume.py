"""What the folder of a run that goes on must hold before its next step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualtrain.files import link_whole, remove_temporary
from dualtrain.training import checkpoint
from dualtrain.training.on_ranks import on_root
from dualtrain.training.results import weights_of
from dualtrain.training.run_dir import BEST_WEIGHTS, step_of, write_weights

if TYPE_CHECKING:
    from dualtrain.training.loop import Run

_CHECKPOINTS = re.compile(r"(best|step-[0-9]+)\.safetensors")


def set_aside(folder: Path, step: int) -> None:
    """Renames what a run's folder holds of steps behind ``step``, and removes what a killed process left. On rank 0."""
    remove_temporary(folder / "checkpoints", _CHECKPOINTS)
    checkpoint.set_aside(folder / "checkpoints", step)
    weights = folder / BEST_WEIGHTS
    of = step_of(weights)
    if of is not None and of > step:
        checkpoint.put_aside(weights, weights)


def restore_best(run: Run, saved: dict[str, Any]) -> bool:
    """Makes the files of the best evaluation those that ``run.cursor`` names; a run may be killed before it writes them.

    Collective. Gives whether they are there: not if no checkpoint of that step is left.
    """
    if not run.cursor.best:
        return True
    step = int(run.cursor.best["step"])
    there, state = on_root(run.backend, "best checkpoint", lambda: _find_best(run, step))
    if not there or state is None:
        return bool(there)
    # The weights that are evaluated are computed by all ranks, from the state of that step.
    if step != run.cursor.step:
        run.trainer.load_state_dict(state)
    weights = weights_of(run.trainer)
    if step != run.cursor.step:
        run.trainer.load_state_dict(saved["trainer"])
    on_root(run.backend, "best weights", lambda: write_weights(run.folder / BEST_WEIGHTS, weights, step))
    return True


def _find_best(run: Run, step: int) -> tuple[bool, dict[str, Any] | None]:
    """Whether there is a best checkpoint, of ``step``; and the trainer's state in it, if its weights have no file yet."""
    folder = run.folder / "checkpoints"
    best = folder / checkpoint.BEST
    if checkpoint.step_in(best) == step and step_of(run.folder / BEST_WEIGHTS) == step:
        return True, None
    elsewhere = [Path(run.config.resume).parent] if run.config.resume else []
    found = checkpoint.find_step([folder, *elsewhere], step)
    if found is None:
        return False, None
    path, tree = found
    if path != best:
        link_whole(path, best)
    return True, tree["trainer"] if step_of(run.folder / BEST_WEIGHTS) != step else None
