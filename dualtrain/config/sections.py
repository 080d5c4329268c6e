"""Every setting of a run, by subject. These classes define the flags, and the keys of recipes and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from dualtrain.config.fields import (
    ABOVE_ZERO,
    ONE_LINE,
    STEPS,
    UNIT,
    Setting,
    at_least,
    between,
    fixed_setting,
    one_of,
    setting,
    settings_of,
)
from dualtrain.files import absolute

MOST_THREADS = 1024  # a limit, since OpenMP ends the process if it cannot start all threads
MOST_WORKERS = 1024  # a limit, since a wrong number would start processes until the host has no memory
AUTO = "auto"  # value of --resume; a checkpoint file named auto must be given as ./auto
AUGMENTATIONS = ("none", "crop-flip", "imagenet", "weights")


@dataclass(frozen=True)
class RunSection:
    """Execution of a run: backend, devices, ranks and threads."""

    backend: str = setting(
        "auto", "auto (what the launcher implies), torch, horovod or local", one_of("auto", "torch", "horovod", "local")
    )
    transport: str = setting(
        "auto", "how gradients on CPUs are sent: shm (shared memory on each host), native (the backend's library), or auto",
        one_of("auto", "shm", "native"),
    )  # fmt: skip
    nproc: int | None = setting(None, "start this many ranks on this host, without a launcher", at_least(1))
    max_restarts: int = setting(0, "how many times --nproc starts all ranks again after one has failed", at_least(0))
    data_parallel: bool = setting(
        False, "train on all visible GPUs in one process, with torch's nn.DataParallel (--backend local or auto)"
    )
    output_device: int | None = setting(None, "the GPU that nn.DataParallel gathers the outputs on", at_least(0))
    parallel_loss: bool = setting(
        False, "with --data-parallel: the loss is computed on each GPU, and only sums are gathered"
    )
    recipe: str = setting(
        "digits-convnet", "a named set of settings, which other flags override; --recipe list prints all recipes"
    )
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    timeout: float = setting(300.0, "the longest wait for another rank or a data worker, in seconds", between(0.1, 1e6))
    deterministic: bool = setting(False, "use only operations whose results repeat bit for bit, on GPUs too")
    threads: int | None = setting(
        None, "intra-op threads of a rank (default: the host's cores divided by its ranks, or 1 with virtual ranks; "
        "for a resumed run, the checkpoint's number)",
        between(1, MOST_THREADS), resumed=True,
    )  # fmt: skip


@dataclass(frozen=True)
class DataSection:
    """The samples, and how they are read. ``None``: the dataset's default."""

    dataset: str = fixed_setting(
        "digits",
        "digits (part of the package), mnist, fashion-mnist, cifar10, imagefolder, text, synthetic, or pkg.mod:build",
    )
    data_dir: str | None = setting(None, "the folder that holds the dataset's files")
    download: bool = setting(False, "fetch files that are missing, on one rank of each host")
    workers: int = setting(2, "processes that read files, for each rank; 0: the rank reads them", between(0, MOST_WORKERS))
    augment: str | None = fixed_setting(
        None,
        "none, crop-flip, imagenet, or weights (the transforms published with the model's weights)",
        one_of(*AUGMENTATIONS),
    )
    image_size: int | None = fixed_setting(None, "side of the images that the model gets, in pixels", at_least(1))
    resize: int | None = fixed_setting(None, "length of the shorter side before cropping, in pixels", at_least(1))
    pad: int = fixed_setting(0, "pixels of zeros around an image before crop-flip crops it", at_least(0))
    normalize: str | None = fixed_setting(
        None, "none, dataset, imagenet, or MEANS/DEVIATIONS as in 0.5,0.5,0.5/0.2,0.2,0.2"
    )
    classes: int | None = fixed_setting(None, "number of classes of synthetic data or of your own dataset", at_least(1))
    shape: str | None = fixed_setting(None, "the shape of a synthetic sample, as in 3,224,224")
    samples: int = fixed_setting(
        1280, "number of synthetic training samples; evaluation has a fifth of this number", at_least(1)
    )
    text_file: str | None = fixed_setting(None, "the file of training text, UTF-8 (default: Python's own documentation)")
    sequence_length: int = fixed_setting(64, "number of tokens in a text sample", at_least(2))
    vocabulary: int = fixed_setting(4096, "largest number of different tokens", at_least(5))


@dataclass(frozen=True)
class ModelSection:
    """The model."""

    name: str = fixed_setting(
        "convnet",
        "convnet, mnist-net, mnist-convnet, bert-small, a classification model of torchvision, or pkg.mod:build",
        flag="model",
    )
    pretrained: bool = fixed_setting(
        False, "start from torchvision's weights, except in the last layer if its size differs"
    )
    freeze_backbone: bool = fixed_setting(False, "train the last layer only")
    weights: str | None = setting(None, "start from this file of weights: safetensors or a state dict")
    channels_last: bool = fixed_setting(False, "use the memory format channels_last for images")
    compile: bool = setting(False, "compile the model with torch.compile")
    sync_batchnorm: bool = fixed_setting(False, "BatchNorm over the samples of all ranks")


@dataclass(frozen=True)
class StepSection:
    """One optimizer step."""

    batch_size: int | None = setting(None, "samples per step on each rank, or on each virtual rank", at_least(1))
    global_batch_size: int | None = setting(None, "samples per step on all ranks together", at_least(1))
    virtual_ranks: int | None = fixed_setting(
        None, "train as this many ranks would, bit for bit the same on any number of real ranks (default: off; "
        "for a resumed run, the checkpoint's number)",
        between(1, 4096), resumed=True,
    )  # fmt: skip
    accumulate: int = fixed_setting(
        1, "number of backward passes per step on each rank, or on each virtual rank", at_least(1)
    )
    drop_last: bool = fixed_setting(False, "leave out the last batch of an epoch if it is short")
    optimizer: str = fixed_setting("sgd", "an optimizer of torch.optim: sgd, adam, adamw, rmsprop, …")
    optimizer_options: str | None = fixed_setting(None, "the optimizer's other options: nesterov=true,dampening=0")
    momentum: float = fixed_setting(0.0, "momentum, of optimizers that have it", UNIT)
    weight_decay: float = fixed_setting(0.0, "weight decay", at_least(0))
    label_smoothing: float = fixed_setting(0.0, "probability taken from the true class and spread over all classes", UNIT)
    clip_norm: float | None = fixed_setting(
        None, "largest norm of the averaged gradients, over all parameters; larger ones are scaled down to it", ABOVE_ZERO
    )
    amp: str = fixed_setting("off", "mixed precision: off, bf16 or fp16", one_of("off", "bf16", "fp16"))
    compress: str = fixed_setting("none", "round gradients for sending: none, fp16 or bf16", one_of("none", "fp16", "bf16"))
    ema: float | None = fixed_setting(None, "keep a moving average of the weights with this decay, and evaluate it", UNIT)
    seed: int = fixed_setting(
        0, "determines the initial weights, the order of samples and their augmentation", between(0, 2**32 - 1)
    )

    def parts(self, size: int) -> int:
        """Return the number of parts of a global batch: ``virtual_ranks``, else ``size``. ``batch_size`` is per part."""
        return self.virtual_ranks or size

    def global_batch(self, size: int) -> int:
        """Return the number of samples per step on ``size`` ranks together, real or virtual."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size is not None
        return self.batch_size * size


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate of every step."""

    lr: float = fixed_setting(0.1, "learning rate; scaled only by --lr-scale", ABOVE_ZERO)
    lr_scale: str = fixed_setting(
        "none", "multiply --lr by k (linear) or √k (sqrt), k = global batch / --lr-batch", one_of("none", "linear", "sqrt")
    )
    lr_batch: int | None = fixed_setting(
        None, "the batch size that --lr was chosen for (default: --batch-size; for a resumed run, the checkpoint's number)",
        at_least(1), resumed=True,
    )  # fmt: skip
    name: str = fixed_setting(
        "constant", "constant, cosine, step, multistep, one-cycle or polynomial; all count optimizer steps",
        one_of("constant", "cosine", "step", "multistep", "one-cycle", "polynomial"), flag="schedule",
    )  # fmt: skip
    warmup_steps: int = fixed_setting(
        0, "number of first steps, in which the learning rate rises linearly to --lr, scaled by --lr-scale", at_least(0)
    )
    lr_step: int | None = fixed_setting(None, "with --schedule step: optimizer steps between drops", at_least(1))
    lr_milestones: str | None = fixed_setting(
        None, "with --schedule multistep: the steps of the drops, as in 1000,2000", STEPS
    )
    lr_gamma: float = fixed_setting(0.1, "with --schedule step or multistep: the factor of a drop", ABOVE_ZERO)
    lr_power: float = fixed_setting(1.0, "with --schedule polynomial: the exponent", ABOVE_ZERO)
    lr_min: float = fixed_setting(0.0, "with --schedule cosine or polynomial: the last learning rate", at_least(0))


@dataclass(frozen=True)
class LengthSection:
    """The length of a run."""

    epochs: int = setting(1, "passes over the training samples", at_least(1))
    max_steps: int | None = setting(None, "stop after this many optimizer steps", at_least(1))
    early_stop: int | None = setting(
        None, "stop after this many epochs without a better value of the metric that --best names", at_least(1)
    )


@dataclass(frozen=True)
class OutputSection:
    """The files and the output of a run."""

    run_dir: str | None = setting(None, "the run's folder (default: a new one below runs/)", ONE_LINE)
    resume: str | None = setting(
        None, "resume from this checkpoint file or, without a value, from the newest good checkpoint in --run-dir; auto: "
        "resume from --run-dir if it has a good checkpoint, else start anew"
    )  # fmt: skip
    checkpoint_every: int | None = setting(
        None, "optimizer steps between checkpoints; the checkpoints of epochs are written too", at_least(1)
    )
    checkpoint_seconds: float = setting(60.0, "the longest time between checkpoints, in seconds; 0: no limit", at_least(0))
    checkpoint_epochs: int = setting(1, "epochs between checkpoints", at_least(1))
    keep: int = setting(3, "number of checkpoints that are kept, not counting the best", at_least(1))
    best: str = setting(
        "val_loss",
        "the metric by which the best checkpoint is chosen: val_loss or val_accuracy",
        one_of("val_loss", "val_accuracy"),
    )
    log_every: int = setting(10, "optimizer steps between lines of metrics.jsonl", at_least(1))
    log_seconds: float = setting(
        10.0, "without a terminal: seconds between lines of progress; 0: no such lines", between(0, 1e9)
    )
    tensorboard: bool = setting(False, "write the metrics for TensorBoard too, below the run's folder")
    verbose: bool = setting(False, "print all settings at the start and, if torchinfo is installed, the model's layers")

    @property
    def resume_file(self) -> Path | None:
        """The checkpoint to resume from, if ``resume`` names a file."""
        return Path(self.resume) if self.resume not in (None, "", AUTO) else None

    def located(self) -> Self:
        """Return a copy with absolute paths: the user's code may change the current folder."""
        file, folder = self.resume_file, self.run_dir
        return replace(
            self,
            run_dir=None if folder is None else str(absolute(folder)),
            resume=self.resume if file is None else str(absolute(file)),
        )

    def again(self, folder: Path) -> str:
        """Describe the command that resumes the run in ``folder``: the same command, and the flags to add to it."""
        if self.run_dir is not None and self.resume in ("", AUTO):
            return "the same command"
        return f"the same command and {'' if self.run_dir is not None else f'--run-dir {folder} '}--resume"


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    run: RunSection = field(default_factory=RunSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    step: StepSection = field(default_factory=StepSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    length: LengthSection = field(default_factory=LengthSection)
    output: OutputSection = field(default_factory=OutputSection)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from ``values``, whose keys are flag names (``run_dir``); the rest gets defaults."""
        given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for name, value in values.items():
            given[SETTINGS[name].section][SETTINGS[name].attribute] = value
        return cls(**{name: kind(**given[name]) for name, (kind, _) in SECTIONS.items()})

    def plain(self) -> dict[str, Any]:
        """Return all values, keyed by the names of flags (``run_dir``), as config.json and checkpoints hold them."""
        return {name: getattr(getattr(self, one.section), one.attribute) for name, one in SETTINGS.items()}


#: The class of each section, and its heading in ``--help``.
SECTIONS: dict[str, tuple[Any, str]] = {
    "run": (RunSection, "the run"),
    "data": (DataSection, "the data"),
    "model": (ModelSection, "the model"),
    "step": (StepSection, "a step"),
    "schedule": (ScheduleSection, "the learning rate"),
    "length": (LengthSection, "the length of the run"),
    "output": (OutputSection, "what is kept and shown"),
}
#: Every setting by its flag's name, with underscores.
SETTINGS: dict[str, Setting] = {
    one.name: one for section, (kind, _) in SECTIONS.items() for one in settings_of(section, kind)
}
