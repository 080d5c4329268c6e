"""Resume a run: read the checkpoint, compare its settings, and restore the files of the run's folder."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dualtrain.config import SETTINGS, OutputSection
from dualtrain.data import Task
from dualtrain.errors import UserError
from dualtrain.files import link_whole, or_nothing, read_json, remove_temporary
from dualtrain.on_ranks import on_rank_zero
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.run_dir import BEST_WEIGHTS, WEIGHTS, has_weights, step_of, write_weights
from dualtrain.trainer.same_run import changed_samples
from dualtrain.trainer.trainer import Trainer
from dualtrain.training.cursor import Cursor
from dualtrain.training.results import weights_of

log = logging.getLogger("dualtrain")

#: Settings on which the shapes of a model's weights may depend, besides the model.
_SHAPES = {"dataset", "classes", "shape", "image_size", "resize", "augment", "vocabulary", "sequence_length", "text_file"}
_CHECKPOINTS = re.compile(r"(best|step-[0-9]+)\.safetensors")


def read_checkpoint(output: OutputSection, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read the checkpoint that ``output.resume`` names, or else the newest good one in the run's folder.

    Args:
        output: a section whose ``resume`` is neither ``None`` nor ``AUTO``.
        settings: all settings of this run by name, to be compared with those in the checkpoint.

    Raises:
        UserError: there is no such checkpoint, it cannot be read, or it was made with other settings.
        OSError: the run's folder cannot be read.
    """
    file = output.resume_file
    if file is not None:
        tree, folder = checkpoint.load(file), file.parent.parent
    else:
        assert output.run_dir is not None
        folder = Path(output.run_dir)
        tree, problems = checkpoint.newest_good(folder / "checkpoints")
        for problem in problems:
            log.warning("skipped: %s", problem)
    compare_with_checkpoint(tree, settings, folder)
    return tree


def adopted(settings: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings``. If a setting that a resumed run keeps is missing, it is taken from the checkpoint.

    Args:
        settings: all settings of the resumed run by name; ``None`` for those not given.
        written: the settings in the checkpoint, by name.
    """
    missing = [name for name, one in SETTINGS.items() if one.resumed and settings[name] is None]
    return {**settings, **{name: written.get(name) for name in missing}}


def with_lr_batch(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``settings``, with the default of ``lr_batch`` filled in if the learning rate is scaled.

    A checkpoint must contain this number: the run may resume with another ``batch_size`` on another number of ranks.
    """
    number = settings.get("lr_batch")
    if number is None and settings.get("lr_scale", "none") != "none":
        number = settings.get("batch_size")
        number = number if SETTINGS["batch_size"].accepts(number) else None
    return {**settings, "lr_batch": number}


def settings_in(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the checkpoint ``tree``, with the ``lr_batch`` with which its run began.

    Older versions did not write a default ``lr_batch``, and the ``batch_size`` that they wrote may be that of a resumed
    run. The base learning rate of the schedule is always that of the first start, so ``lr_batch`` is computed from it.
    """
    config, filled = tree["config"], with_lr_batch(tree["config"])
    if filled["lr_batch"] == config.get("lr_batch"):
        return filled
    try:
        factor = float(tree["trainer"]["schedule"]["base_lrs"][0]) / config["lr"]
        batch = tree["global_batch"] / (factor**2 if config["lr_scale"] == "sqrt" else factor)
        filled["lr_batch"] = max(round(batch), 1)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        log.debug("the checkpoint has no base learning rate: its run is assumed to have begun with its --batch-size")
    return filled


def compare_with_checkpoint(tree: dict[str, Any], settings: Mapping[str, Any], folder: Path) -> None:
    """Raise UserError if settings that must stay the same during a run differ from those in the checkpoint.

    Raise it too if the file is not a checkpoint of ``dualtrain train``, or has a format that this version cannot read.

    Args:
        tree: the checkpoint.
        settings: all settings of this run by name.
        folder: the folder of the checkpoint's run.
    """
    written_as = tree.get("format")
    if type(written_as) is not int or written_as not in checkpoint.READABLE:
        raise UserError(
            "the checkpoint was not written by dualtrain train, or was written by another version of it: start anew, or "
            "use that version"
        )
    _check_form(tree)
    config = settings_in(tree)
    settings = adopted(settings, config)
    unlike = differences(config, settings)
    if unlike:
        had, has = in_words(unlike), in_words({name: settings[name] for name in unlike})
        anew = f"start anew{with_its_weights(folder, unlike)}"
        raise UserError(f"the checkpoint was made with {had}, and this run has {has}: give {had}, or {anew}")


def compare_batches_and_data(tree: dict[str, Any], global_batch: int, data: Mapping[str, int], folder: Path) -> None:
    """Raise UserError if the global batch or the data differ from those of the checkpoint's run.

    Args:
        tree: the checkpoint, the same on every rank.
        global_batch: the number of samples per step of this run.
        data: the numbers of samples, validation samples and classes of this run.
        folder: the folder of the checkpoint's run.
    """
    if tree["global_batch"] != global_batch:
        raise UserError(
            f"the checkpoint was trained with {tree['global_batch']} samples per step and this run has "
            f"{global_batch}: give --global-batch-size {tree['global_batch']}, or start anew"
            f"{with_its_weights(folder)}",
            shared=True,
        )
    # Checkpoints of older versions do not contain the number of validation samples. New ones contain it outside of
    # tree["data"], because older versions refuse a checkpoint if that dictionary has an additional entry.
    written = {"validation": tree.get("validation", data["validation"]), **tree["data"]}
    if written != data:
        had, has = (_data_in_words(one) for one in (written, data))
        raise UserError(
            f"the checkpoint was trained on {had}, and this run has {has}: give the same data, or start anew"
            f"{with_its_weights(folder, ['dataset'])}",
            shared=True,
        )


def compare_samples(tree: dict[str, Any], task: Task, folder: Path) -> None:
    """Compare some samples with those of the checkpoint's run. Call this on rank 0 only.

    A changed sample is an error if the source gives samples as they are on the disk. Otherwise it causes a warning, since
    the code that computes the samples, or a library, may have changed.

    Raises:
        UserError: the data have changed.
    """
    earlier = tree.get("checksums")  # older checkpoints have none
    if not isinstance(earlier, dict):
        return
    for sample, stored in changed_samples(task, earlier):
        if stored:
            raise UserError(
                f"the checkpoint was trained with other data: {sample} has changed since then; give the same data, or "
                f"start anew{with_its_weights(folder, ['dataset'])}"
            )
        log.warning(
            "%s is not what it was before the checkpoint: the result will not be that of an uninterrupted run; if the "
            "data have changed, start anew%s",
            *(sample, with_its_weights(folder, ["dataset"])),
        )


def _data_in_words(data: Mapping[str, Any]) -> str:
    return f"{data['samples']} samples of {data['classes']} classes, with {data['validation']} validation samples"


def with_its_weights(folder: Path, changed: Collection[str] = ()) -> str:
    """Format the flag that starts another run from the weights of the run in ``folder``; "" if they cannot be used.

    ``changed`` has the names of the settings that differ.
    """
    files = [folder / name for name in (WEIGHTS, BEST_WEIGHTS) if (folder / name).exists()]
    if not files or "model" in changed:
        return ""
    condition = ", if they fit" if _SHAPES.intersection(changed) else ""
    return f" (with the weights of that run{condition}: --weights {files[0]})"


def differences(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values in ``config`` that a resumed run must keep, and that differ from the values in ``settings``."""
    # A setting that is newer than the checkpoint had its default in the checkpoint's run.
    written = {name: config.get(name, one.default) for name, one in SETTINGS.items() if one.fixed}
    written |= {name: config[name] for name, one in SETTINGS.items() if one.resumed and config.get(name) is not None}
    return {name: value for name, value in written.items() if value != settings[name]}


def in_words(values: Mapping[str, Any]) -> str:
    """Format settings as flags."""
    return " ".join(_as_flag(name, value) for name, value in values.items())


def _check_form(tree: dict[str, Any]) -> None:
    """Raise UserError if the checkpoint lacks a part that a run's checkpoint has, or a part has the wrong type."""
    parts = {"platform": {}, **tree}  # older checkpoints have no platform
    kinds = {"trainer": dict, "cursor": dict, "config": dict, "platform": dict, "global_batch": int, "data": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(parts.get(name), kind)]
    wrong += [name for name in ("config", "platform") if name not in wrong and not _are_values(parts[name])]
    numbers = {"validation": 0, **tree["data"]} if isinstance(tree.get("data"), dict) else {}
    if wrong or any(type(numbers.get(name)) is not int for name in ("samples", "classes", "validation")):
        missing = ", ".join(wrong) or "data"
        raise UserError(f"the checkpoint has no usable {missing}: dualtrain train did not write it; start anew")


def _are_values(values: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's settings or platform are plain values, and the settings to adopt are valid."""
    try:
        json.dumps(values)
    except TypeError:  # a tensor
        return False
    to_adopt = {name: values[name] for name, one in SETTINGS.items() if one.resumed and values.get(name) is not None}
    return all(SETTINGS[name].accepts(value) for name, value in to_adopt.items())


def _as_flag(name: str, value: Any) -> str:
    """Format a setting as a flag."""
    flag = SETTINGS[name].flag
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return f"no {flag}" if value is None else f"{flag} {value}"


def set_aside(folder: Path, cursor: Cursor, lock: FolderLock) -> None:
    """Rename files of steps after that of ``cursor``, and remove temporary files of killed processes.

    Call this on rank 0 only. Raises OSError, or SupersededError.
    """
    lock.check()
    step = cursor.step
    remove_temporary(folder / "checkpoints", _CHECKPOINTS)
    checkpoint.put_later_aside(folder / "checkpoints", step, lock, has_best=bool(cursor.best))
    weights = folder / BEST_WEIGHTS
    best_step = step_of(weights)
    unreadable = best_step is None and not cursor.best and os.path.lexists(weights)
    if unreadable or (best_step is not None and best_step > step):
        checkpoint.put_aside(weights, weights, lock)
    summary = folder / "summary.json"
    last_step = or_nothing(lambda: read_json(summary)).get("steps")
    if os.path.lexists(summary) and (type(last_step) is not int or last_step > step):
        checkpoint.put_aside(summary, summary, lock)  # otherwise a restart would conclude that the run has ended


def restore_best(
    trainer: Trainer, cursor: Cursor, saved: dict[str, Any], folder: Path, other: Path | None, lock: FolderLock
) -> bool:
    """Restore missing files of the best evaluation that ``cursor`` names. Collective.

    They are missing if the run was killed before it wrote them.

    Args:
        trainer: holds the state of ``saved``, before and after this call.
        cursor: the position in ``saved``.
        saved: the checkpoint from which the run resumes.
        folder: the run's folder.
        other: another folder of checkpoints to search, or ``None``.
        lock: the lock of the run's folder.

    Returns:
        False if a file is missing, and no checkpoint of that step is left. True otherwise, also if there is no
        best evaluation yet.

    Raises:
        UserError: on every rank, if a file cannot be read now or written.
    """
    if not cursor.best:
        return True
    step = int(cursor.best["step"])
    exists, state = on_rank_zero(trainer.backend, "best checkpoint", lambda: _find_best(folder, other, step, lock))
    if not exists or state is None:
        return bool(exists)
    # Collective: all ranks compute the evaluated weights from the state of that step.
    if step != cursor.step:
        trainer.load_state_dict(state)
    weights = weights_of(trainer)
    if step != cursor.step:
        trainer.load_state_dict(saved["trainer"])
    on_rank_zero(trainer.backend, "best weights", lambda: write_weights(folder / BEST_WEIGHTS, weights, step, lock))
    return True


def _find_best(folder: Path, other: Path | None, step: int, lock: FolderLock) -> tuple[bool, dict[str, Any] | None]:
    """Return whether there is a checkpoint of ``step``, and its trainer state if its weights must be written again.

    If the checkpoint is in another file than ``BEST``, make ``BEST`` a link to that file.

    Raises UserError if a file that may be this checkpoint cannot be read now, SupersededError, or OSError.
    """
    best, written = folder / "checkpoints" / checkpoint.BEST, has_weights(folder / BEST_WEIGHTS, step)
    if checkpoint.step_in(best) == step and written:
        return True, None
    found = checkpoint.find_step([best.parent, *([other] if other else [])], step)
    if found is None:
        return False, None
    path, tree = found
    if path != best:
        lock.check()
        link_whole(path, best)
    return True, None if written else tree["trainer"]
