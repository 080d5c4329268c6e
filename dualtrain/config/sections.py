"""Every setting of a run, in one typed table. The command line, the recipes and the checkpoints are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from dualtrain.config.fields import ABOVE_ZERO, UNIT, at_least, between, one_of, section

_run = section("the run")
_data = section("the data")
_sample = section("the data", fixed=True)  # decides what the samples are
_model = section("the model", fixed=True)
_step = section("a step", fixed=True)
_plan = section("the learning rate", fixed=True)
_end = section("how long")
_keep = section("what is kept and shown")


@dataclass(frozen=True)
class Config:
    """Everything that decides how a run goes."""

    backend: str = _run(
        "auto", "auto (what the launcher implies), torch, horovod or local", one_of("auto", "torch", "horovod", "local")
    )
    transport: str = _run(
        "auto", "what carries gradients on CPUs: shm (memory that a host's ranks share), native (the library), or auto",
        one_of("auto", "shm", "native"),
    )  # fmt: skip
    nproc: int | None = _run(None, "start this many ranks on this host, without a launcher", at_least(1))
    data_parallel: bool = _run(False, "one process, all visible GPUs: torch's nn.DataParallel (with --backend local)")
    output_device: int | None = _run(None, "the GPU that nn.DataParallel gathers the outputs on", at_least(0))
    parallel_loss: bool = _run(False, "with --data-parallel: the loss is computed on each GPU, and only sums are gathered")
    recipe: str = _run("digits-convnet", "the named set of defaults that the other flags override; list shows them")
    device: str = _run("auto", "auto (a GPU if there is one), cpu, cuda or cuda:N")
    timeout: float = _run(300.0, "seconds that any wait for another rank lasts at most", between(0.1, 1e6))
    deterministic: bool = _run(False, "only operations whose results repeat bit for bit, on GPUs too")

    dataset: str = _sample(
        "digits", "digits (embedded), mnist, fashion-mnist, cifar10, imagefolder, text, synthetic, or pkg.mod:build"
    )
    data_dir: str | None = _data(None, "the folder that holds the dataset's files")
    download: bool = _data(False, "fetch files that are missing, on one rank of each host")
    workers: int = _data(2, "processes a rank that read files; 0: none", at_least(0))
    augment: str | None = _sample(
        None, "none, crop-flip, imagenet, or weights (the transforms of the model's weights)",
        one_of("none", "crop-flip", "imagenet", "weights"),
    )  # fmt: skip
    image_size: int | None = _sample(None, "pixels, the side of the images that the model gets", at_least(1))
    resize: int | None = _sample(None, "pixels, what the shorter side is scaled to before", at_least(1))
    pad: int = _sample(0, "pixels of zeros around an image before crop-flip takes its window", at_least(0))
    normalize: str | None = _sample(None, "none, dataset, imagenet, or MEANS/DEVIATIONS as in 0.5,0.5,0.5/0.2,0.2,0.2")
    classes: int | None = _sample(None, "classes of synthetic data and of your own", at_least(1))
    shape: str | None = _sample(None, "the shape of a synthetic sample: 3,224,224")
    samples: int = _sample(1280, "synthetic samples; a fifth as many for evaluation", at_least(1))
    text_file: str | None = _sample(None, "the text to learn, UTF-8 (default: Python's own documentation)")
    sequence_length: int = _sample(64, "tokens of a text sample", at_least(2))
    vocabulary: int = _sample(4096, "tokens that are told apart", at_least(5))

    model: str = _model("convnet", "convnet, mnist-net, mnist-convnet, bert-small, any of torchvision's, or pkg.mod:build")
    pretrained: bool = _model(False, "start from torchvision's weights, but for the last layer")
    freeze_backbone: bool = _model(False, "train the last layer only")
    weights: str | None = section("the model")(None, "start from this file of weights: safetensors or a state dict")
    channels_last: bool = _model(False, "lay images out with the channels last")
    compile: bool = section("the model")(False, "compile the model with torch.compile")
    sync_batchnorm: bool = _model(False, "BatchNorm over the samples of all ranks")

    batch_size: int | None = section("a step")(None, "samples a step on each rank", at_least(1))
    global_batch_size: int | None = section("a step")(None, "samples a step on all ranks together", at_least(1))
    accumulate: int = _step(1, "backward passes that a rank's samples of a step are split into", at_least(1))
    drop_last: bool = _step(False, "leave out the last batch of an epoch if it is short")
    optimizer: str = _step("sgd", "any of torch.optim: sgd, adam, adamw, rmsprop, …")
    optimizer_options: str | None = _step(None, "its other options: nesterov=true,dampening=0")
    momentum: float = _step(0.0, "momentum, of optimizers that have it", UNIT)
    weight_decay: float = _step(0.0, "weight decay", at_least(0))
    label_smoothing: float = _step(0.0, "probability that is taken from the true class for all", UNIT)
    clip_norm: float | None = _step(None, "scale gradients down to this norm, over all parameters and ranks", ABOVE_ZERO)
    amp: str = _step("off", "mixed precision: off, bf16 or fp16", one_of("off", "bf16", "fp16"))
    compress: str = _step("none", "what gradients travel as: none, fp16 or bf16", one_of("none", "fp16", "bf16"))
    ema: float | None = _step(None, "also average the weights, with this decay; evaluated in their place", UNIT)
    seed: int = _step(0, "decides the first weights, the order of samples and their augmentation", between(0, 2**32 - 1))

    lr: float = _plan(0.1, "learning rate, never scaled behind your back", ABOVE_ZERO)
    lr_scale: str = _plan(
        "none", "times k (linear) or √k (sqrt), k = global batch / --lr-batch", one_of("none", "linear", "sqrt")
    )
    lr_batch: int | None = _plan(None, "the batch that --lr was chosen for (default: --batch-size)", at_least(1))
    schedule: str = _plan(
        "constant", "constant, cosine, step, multistep, one-cycle or polynomial, in optimizer steps",
        one_of("constant", "cosine", "step", "multistep", "one-cycle", "polynomial"),
    )  # fmt: skip
    warmup_steps: int = _plan(0, "steps in which the learning rate rises linearly to its value", at_least(0))
    lr_step: int | None = _plan(None, "schedule step: optimizer steps between drops", at_least(1))
    lr_milestones: str | None = _plan(None, "schedule multistep: the steps of the drops, as in 1000,2000")
    lr_gamma: float = _plan(0.1, "schedules step and multistep: the factor of a drop", ABOVE_ZERO)
    lr_power: float = _plan(1.0, "schedule polynomial: the exponent", ABOVE_ZERO)
    lr_min: float = _plan(0.0, "schedules cosine and polynomial: where the learning rate ends", at_least(0))

    epochs: int = _end(1, "passes over the training samples", at_least(1))
    max_steps: int | None = _end(None, "stop after this many optimizer steps", at_least(1))
    early_stop: int | None = _end(None, "stop after this many epochs without a better --best", at_least(1))

    run_dir: str | None = _keep(None, "the run's folder (default: a new one below runs/)")
    resume: str | None = _keep(None, "go on from --run-dir's newest good checkpoint, or from this file")
    checkpoint_every: int | None = _keep(None, "optimizer steps between checkpoints, beside those of epochs", at_least(1))
    checkpoint_epochs: int = _keep(1, "epochs between checkpoints", at_least(1))
    keep: int = _keep(3, "checkpoints that are kept, beside the best", at_least(1))
    best: str = _keep("val_loss", "what the best is: val_loss or val_accuracy", one_of("val_loss", "val_accuracy"))
    log_every: int = _keep(10, "optimizer steps between lines of metrics.jsonl", at_least(1))
    tensorboard: bool = _keep(False, "write the metrics for TensorBoard too, below the run's folder")

    def global_batch(self, size: int) -> int:
        """Samples a step on all of ``size`` ranks."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size is not None
        return self.batch_size * size
