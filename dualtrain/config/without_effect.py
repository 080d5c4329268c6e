"""Find settings that have no effect on a run, and format one line for each, since the user expects an effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dualtrain.config.sections import SETTINGS

Settings = Mapping[str, Any]

_IMAGES = ("image_size", "resize", "pad", "normalize")
_IN_MEMORY = ("digits", "mnist", "fashion-mnist", "cifar10")


def _own(name: str) -> bool:
    return ":" in name


#: Each rule: names of settings, a function that returns whether these have an effect, and the reason if they have none.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Settings], bool], str], ...] = (
    (_IMAGES, lambda s: s["augment"] != "weights", "--augment weights uses the transforms of the model's weights"),
    (
        (*_IMAGES, "augment"),
        lambda s: s["dataset"] in (*_IN_MEMORY, "imagefolder"),
        "--dataset {dataset} makes its inputs itself",
    ),
    (("pad",), lambda s: s["augment"] in ("crop-flip", "weights"), "only --augment crop-flip pads images"),
    (("shape", "samples"), lambda s: s["dataset"] == "synthetic", "it is for --dataset synthetic"),
    (
        ("classes",),
        lambda s: s["dataset"] == "synthetic" or _own(s["dataset"]),
        "--dataset {dataset} has its own number of classes",
    ),
    (("text_file", "sequence_length", "vocabulary"), lambda s: s["dataset"] == "text", "it is for --dataset text"),
    (("data_dir",), lambda s: s["dataset"] not in ("digits", "synthetic", "text"), "--dataset {dataset} reads no folder"),
    (("download",), lambda s: s["dataset"] in _IN_MEMORY[1:], "--dataset {dataset} is not downloaded"),
    (
        ("workers",),
        lambda s: s["dataset"] == "imagefolder" or _own(s["dataset"]),
        "--dataset {dataset} is in memory, and needs no processes that read it",
    ),
    (("lr_batch",), lambda s: s["lr_scale"] != "none", "--lr-scale none scales nothing"),
    (("lr_step",), lambda s: s["schedule"] == "step", "it is for --schedule step"),
    (("lr_milestones",), lambda s: s["schedule"] == "multistep", "it is for --schedule multistep"),
    (("lr_gamma",), lambda s: s["schedule"] in ("step", "multistep"), "it is for --schedule step and multistep"),
    (("lr_power",), lambda s: s["schedule"] == "polynomial", "it is for --schedule polynomial"),
    (("lr_min",), lambda s: s["schedule"] in ("cosine", "polynomial"), "it is for --schedule cosine and polynomial"),
)


def without_effect(
    settings: Settings, *, steps: int, steps_of_epochs: int, resumed: bool = False, norms: bool = True, cores: int = 4096
) -> list[str]:
    """Return one line for each setting that differs from its default and has no effect, or not its whole effect.

    Args:
        settings: all settings of the run, by name.
        steps: optimizer steps of the whole run.
        steps_of_epochs: optimizer steps in all epochs of the run.
        resumed: whether the run resumes from a checkpoint.
        norms: whether the model has BatchNorm that is trained.
        cores: how many cores this host has.
    """
    given = {name for name, one in SETTINGS.items() if settings[name] not in (one.default, None)}
    lines: dict[str, str] = {}
    for names, has_effect, reason in _RULES:
        for name in names:
            if name in given and not has_effect(settings):
                lines.setdefault(name, reason.format_map(settings))
    if resumed:
        lines["weights"] = "the run resumes with the weights of a checkpoint"
    if not norms:
        lines["sync_batchnorm"] = "the model has no BatchNorm that is trained"
    lines |= _beyond_the_end(settings, steps, steps_of_epochs)
    flags = {name: "" if settings[name] is True else f" {settings[name]}" for name in lines}
    found = [f"{SETTINGS[name].flag}{flags[name]} has no effect: {why}" for name, why in lines.items() if name in given]
    if settings["warmup_steps"] >= steps:
        longer = f"--warmup-steps {settings['warmup_steps']} is longer than the run, which ends after step {steps}"
        found.append(f"{longer}: the learning rate does not reach its value")
    if "workers" in given and "workers" not in lines and settings["workers"] > cores:
        more = f"--workers {settings['workers']} is more for each rank than this host's {cores} core{'s' * (cores != 1)}"
        found.append(f"{more}: fewer are probably as fast")
    return found


def _beyond_the_end(settings: Settings, steps: int, steps_of_epochs: int) -> dict[str, str]:
    """Return the settings that would take effect only after the last step, each with the reason."""
    warmup, last = settings["warmup_steps"], f"the run ends after step {steps}"
    drops = [part for part in (settings["lr_milestones"] or "").split(",") if part.strip().isdigit()]
    found = {
        "max_steps": (settings["max_steps"] or 0) > steps_of_epochs and f"{last}, with --epochs {settings['epochs']}",
        "lr_step": (settings["lr_step"] or 0) + warmup >= steps and last,
        "lr_milestones": bool(drops) and min(map(int, drops)) + warmup >= steps and last,
        "checkpoint_every": (settings["checkpoint_every"] or 0) >= steps and last,
        "early_stop": (settings["early_stop"] or 0) >= settings["epochs"] and f"the run has {settings['epochs']} epochs",
    }
    return {name: reason for name, reason in found.items() if reason}
