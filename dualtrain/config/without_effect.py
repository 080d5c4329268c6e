"""Find the user's settings that have no effect on a run, and format one line for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualtrain.config.fields import steps_in
from dualtrain.config.sections import SETTINGS

Settings = Mapping[str, Any]

_IMAGES = ("image_size", "resize", "pad", "normalize")
#: Models of torchvision that, with --pretrained, also convert their inputs.
_CONVERT_INPUTS = ("googlenet", "inception_v3")
_IN_MEMORY = ("digits", "mnist", "fashion-mnist", "cifar10")


def _is_users_function(name: str) -> bool:
    return ":" in name


#: Each rule: names of settings, a function that returns whether these have an effect, and the reason if they have none.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Settings], bool], str], ...] = (
    (_IMAGES, lambda s: s["augment"] != "weights", "--augment weights uses the transforms of the model's weights"),
    (
        (*_IMAGES, "augment"),
        lambda s: s["dataset"] in (*_IN_MEMORY, "imagefolder"),
        "image transforms are not applied to --dataset {dataset}",
    ),
    (("pad",), lambda s: s["augment"] in ("crop-flip", "weights"), "only --augment crop-flip pads images"),
    (("shape", "samples"), lambda s: s["dataset"] == "synthetic", "it is for --dataset synthetic"),
    (
        ("classes",),
        lambda s: s["dataset"] == "synthetic" or _is_users_function(s["dataset"]),
        "--dataset {dataset} has its own number of classes",
    ),
    (("text_file", "sequence_length", "vocabulary"), lambda s: s["dataset"] == "text", "it is for --dataset text"),
    (("data_dir",), lambda s: s["dataset"] not in ("digits", "synthetic", "text"), "--dataset {dataset} reads no folder"),
    (("download",), lambda s: s["dataset"] in _IN_MEMORY[1:], "--dataset {dataset} is not downloaded"),
    (
        ("workers",),
        lambda s: s["dataset"] == "imagefolder" or _is_users_function(s["dataset"]),
        "--dataset {dataset} is in memory, and needs no processes that read it",
    ),
    (
        ("pretrained",),
        lambda s: s["weights"] is None or s["model"] in _CONVERT_INPUTS,
        "--weights replaces all weights",
    ),
    (("lr_batch",), lambda s: s["lr_scale"] != "none", "--lr-scale none scales nothing"),
    (("lr_step",), lambda s: s["schedule"] == "step", "it is for --schedule step"),
    (("lr_milestones",), lambda s: s["schedule"] == "multistep", "it is for --schedule multistep"),
    (("lr_gamma",), lambda s: s["schedule"] in ("step", "multistep"), "it is for --schedule step and multistep"),
    (("lr_power",), lambda s: s["schedule"] == "polynomial", "it is for --schedule polynomial"),
    (("lr_min",), lambda s: s["schedule"] in ("cosine", "polynomial"), "it is for --schedule cosine and polynomial"),
)


@dataclass(frozen=True)
class RunFacts:
    """Facts that decide whether a setting has an effect, and that are known only after the run was prepared.

    Attributes:
        steps: the optimizer step after which the run ends, by ``--epochs`` and ``--max-steps``.
        steps_of_epochs: how many optimizer steps the run would have without ``--max-steps``.
        global_batch: samples of a step, on all ranks.
        part: the largest number of samples of a step on one rank or virtual rank.
        short_batch: true if, without ``--drop-last``, an epoch's last batch has fewer samples than the others.
        shape: the shape of one input.
        classes: the number of classes of the data.
        ranks: the number of ranks.
        cores: how many cores this process may use.
        resumed: whether the run resumes from a checkpoint.
        norms: whether the model has SyncBatchNorm layers, to which ``--sync-batchnorm`` converts trained BatchNorm layers.
        workers: whether worker processes can read the data.
        folder: whether the dataset may use the folder of the data; false only if it is a user's function without arguments.
    """

    steps: int
    steps_of_epochs: int
    global_batch: int
    part: int
    short_batch: bool
    shape: tuple[int, ...]
    classes: int
    ranks: int
    cores: int
    resumed: bool
    norms: bool
    workers: bool
    folder: bool


def without_effect(settings: Settings, facts: RunFacts) -> list[str]:
    """Return one line for each setting that differs from its default and has no effect, or only a part of its effect.

    Also return a line if there are more ``--workers`` than cores.
    """
    given = {name for name, one in SETTINGS.items() if settings[name] not in (one.default, None)}
    lines: dict[str, str] = {}
    for names, has_effect, reason in _RULES:
        for name in names:
            if name in given and not has_effect(settings):
                lines.setdefault(name, reason.format_map(settings))
    lines = {**_beyond_the_end(settings, facts), **_in_this_run(settings, facts), **lines}
    flags = {name: "" if settings[name] is True else f" {settings[name]}" for name in lines}
    found = [f"{SETTINGS[name].flag}{flags[name]} has no effect: {why}" for name, why in lines.items() if name in given]
    if settings["warmup_steps"] >= facts.steps:
        end = f"--warmup-steps {settings['warmup_steps']} does not end within the run, which ends after step {facts.steps}"
        found.append(f"{end}: the learning rate does not reach its full value")
    drops = steps_in(settings["lr_milestones"])
    late = [str(step) for step in drops if step + settings["warmup_steps"] >= facts.steps]
    if settings["schedule"] == "multistep" and 0 < len(late) < len(drops):
        beyond = f"--lr-milestones {settings['lr_milestones']}: the run ends after step {facts.steps}"
        found.append(f"{beyond}, so that the learning rate is not changed at {', '.join(late)}")
    if settings["accumulate"] > facts.part:
        samples = f"{facts.part} sample{'s' * (facts.part != 1)}"
        more = f"--accumulate {settings['accumulate']} is more than the {samples} that a rank has in a step"
        found.append(f"{more}: each backward pass has one sample")
    if "workers" in given and "workers" not in lines and settings["workers"] > facts.cores:
        cores = f"{facts.cores} core{'s' * (facts.cores != 1)}"
        more = f"--workers {settings['workers']} is more than the {cores} that each rank may use"
        found.append(f"{more}: fewer workers are probably as fast")
    return found


def _in_this_run(settings: Settings, facts: RunFacts) -> dict[str, str]:
    """Return the settings that have no effect because of the run's data, model or ranks, each with the reason."""
    dataset = settings["dataset"]
    found = {
        "weights": facts.resumed and "the run resumes with the weights of a checkpoint",
        "sync_batchnorm": (not facts.norms and "the model has no BatchNorm that is trained")
        or (facts.ranks == 1 and "the run has one rank"),
        "transport": facts.ranks == 1 and "the run has one rank",
        "drop_last": not facts.short_batch
        and f"all batches have {facts.global_batch} sample{'s' * (facts.global_batch != 1)}",
        "channels_last": len(facts.shape) != 3 and f"it is for images, and a sample has the shape {facts.shape}",
        "classes": facts.classes != settings["classes"] and f"{dataset} returns data of {facts.classes} classes",
        "workers": not facts.workers and f"{dataset} returns data that worker processes do not read",
        "data_dir": not facts.folder and f"{dataset} takes no argument",
    }
    return {name: reason for name, reason in found.items() if reason}


def _beyond_the_end(settings: Settings, facts: RunFacts) -> dict[str, str]:
    """Return the settings that would take effect only at the end of the run or later, each with the reason."""
    steps, warmup, last = facts.steps, settings["warmup_steps"], f"the run ends after step {facts.steps}"
    drops = steps_in(settings["lr_milestones"])
    epochs = settings["epochs"]
    begun = -(-steps * epochs // facts.steps_of_epochs)  # epochs that the run begins; --max-steps may reduce them
    only = f"the run has {begun} epoch{'s' * (begun != 1)}"
    found = {
        "max_steps": (settings["max_steps"] or 0) > facts.steps_of_epochs and f"{last}, with --epochs {epochs}",
        "lr_step": (settings["lr_step"] or 0) + warmup >= steps and last,
        "lr_milestones": bool(drops) and min(drops) + warmup >= steps and last,
        "checkpoint_every": (settings["checkpoint_every"] or 0) >= steps and last,
        # A run always saves a checkpoint at its end. So this setting changes only runs of more than one epoch.
        "checkpoint_epochs": steps * epochs <= facts.steps_of_epochs and "the run ends in its first epoch",
        "log_every": settings["log_every"] > steps and last,
        # The first epoch is always the best so far. So at most begun - 1 epochs can pass without a better one, and after
        # the last of them, the run ends in any case. A resumed run may have more evaluations than epochs: an earlier
        # --max-steps may have ended it in the middle of an epoch, where it was evaluated too.
        "early_stop": not facts.resumed and (settings["early_stop"] or 0) >= max(1, begun - 1) and only,
    }
    return {name: reason for name, reason in found.items() if reason}
