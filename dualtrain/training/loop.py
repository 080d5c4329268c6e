"""The training loop of the command line: which batches, when to look, when to save, when to stop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from dualtrain.backends import Backend
from dualtrain.config import Config
from dualtrain.data import Batch, Task
from dualtrain.data.draws import derived
from dualtrain.data.sampler import Sampler, share
from dualtrain.data.text import CHOSEN
from dualtrain.errors import DivergedError, StoppedError, UserError, enough_memory
from dualtrain.training import checkpoint
from dualtrain.training.assemble import compiled, determinism, load_task, make_model, threads, try_out
from dualtrain.training.checkpoint_writer import Writer
from dualtrain.training.cursor import Cursor
from dualtrain.training.data_parallel import measured, replicate
from dualtrain.training.objective import CrossEntropy, metrics
from dualtrain.training.on_ranks import on_root, together
from dualtrain.training.optimizers import check_state, make_optimizer, make_schedule, scaled_lr
from dualtrain.training.records import Records, check_tensorboard, opening
from dualtrain.training.results import conclude, weights_of, write_task
from dualtrain.training.resume import restore_best, set_aside
from dualtrain.training.run_dir import claim
from dualtrain.training.same_run import compare_settings
from dualtrain.training.signals import SIGNALS, Signals
from dualtrain.training.trainer import Tensors, Trainer

EVALUATION_BATCH = 512


def train(config: Config, backend: Backend) -> dict[str, Any]:
    """Trains as ``config`` says and gives the summary, on every rank. Collective.

    Raises:
        RanksDifferError: the ranks have other settings, versions or data.
        UserError: something in the configuration cannot be done here.
        DivergedError: the loss became infinite or not a number.
        BackendError: the ranks lost each other.
        NotSavedError: the training ended, and its results could not be written.
        StoppedError: a signal asked for it; a checkpoint was saved.
    """
    with enough_memory("choose smaller samples, a smaller model, or a smaller --batch-size"):
        return _train(config, backend)


def _train(config: Config, backend: Backend) -> dict[str, Any]:
    compare_settings(config, backend)  # before anything that only some settings do
    torch.set_num_threads(threads(backend))
    task = load_task(config, backend)
    try:
        with determinism(config.deterministic):
            model = make_model(config, task, backend)
            together(backend, "model", lambda: try_out(config, task, model))
            wanted = config.resume is not None
            saved = on_root(backend, "checkpoint", lambda: checkpoint.to_resume(config)) if wanted else None
            run = Run(config, backend, task, model)
            run.open(saved)
            with Signals() as signals:
                return run.train(signals)
    finally:
        task.close()


class Run:
    """One run, from its start or its last checkpoint to its summary. Making one is collective, and writes nothing."""

    def __init__(self, config: Config, backend: Backend, task: Task, model: nn.Module) -> None:
        self.config = config
        self.backend = backend
        self.task = task
        self.sampler = Sampler(len(task.train), config.global_batch(backend.size), config.seed, config.drop_last)
        self.cursor = Cursor()
        steps = config.epochs * self.sampler.batches
        self.total_steps = min(steps, config.max_steps) if config.max_steps else steps
        self.lr, self.arithmetic = scaled_lr(config, backend.size)
        optimizer, options = together(backend, "trainer", lambda: self._prepare(model))
        self.trainer = Trainer(model, optimizer, CrossEntropy(config.label_smoothing), backend=backend, **options)
        self._stream: Iterator[Tensors] | None = None

    def _prepare(self, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer, and the trainer's other arguments. Not collective: it may fail on one rank."""
        config = self.config
        check_tensorboard(config)
        self._check_batches()
        optimizer = make_optimizer(config, model, self.lr)
        if config.compress == "bf16" and torch.bfloat16 not in self.backend.narrow:
            raise UserError(f"--compress bf16: the {self.backend.name} backend does not carry it; use fp16")
        return optimizer, {
            "schedule": make_schedule(config, optimizer, self.lr, self.total_steps),
            "clip_norm": config.clip_norm,
            "amp": config.amp,
            "ema": config.ema,
            "compress": config.compress,
            **self._computation(model),
        }

    def _computation(self, model: nn.Module) -> dict[str, Any]:
        """What computes the model, where the settings ask for more than the model itself."""
        config, device = self.config, self.backend.device
        if config.data_parallel and self.backend.size > 1:
            raise UserError(f"--data-parallel is one process on all GPUs, and this job has {self.backend.size}: start one")
        if config.parallel_loss:
            return {"measure": measured(model, device, config.output_device, config.label_smoothing)}
        if config.data_parallel:
            return {"forward": replicate(model, device, config.output_device)}
        return {"forward": compiled(model)} if config.compile else {}

    def _check_batches(self) -> None:
        config, size = self.config, self.backend.size
        if not self.sampler.batches:
            raise UserError(
                f"--drop-last leaves nothing of {self.sampler.samples} samples in batches of {self.sampler.global_batch}: "
                "lower --batch-size"
            )
        if config.sync_batchnorm and self.sampler.smallest // size < config.accumulate:
            raise UserError(
                f"--sync-batchnorm needs samples on every rank in every backward pass, and the smallest batch has "
                f"{self.sampler.smallest} for {size} ranks × {config.accumulate}: give --drop-last, or another batch size"
            )

    def open(self, saved: dict[str, Any] | None) -> None:
        """Goes on from a checkpoint, if there is one, and takes the run's folder. Collective."""
        if saved is not None:
            self._resume(saved)
        self.folder = Path(on_root(self.backend, "run folder", lambda: claim(self.config)))

        def prepare() -> None:
            # Later checkpoints of this folder belong to a course that is not taken: kept, but not gone on from.
            set_aside(self.folder, self.cursor.step)
            write_task(self.folder, self.task)

        on_root(self.backend, "run folder", prepare)
        self.records = together(self.backend, "run folder", self._records)
        self.writer = Writer(self.folder, self.config.keep, self.records.say, self.config.timeout)
        if saved is not None and not restore_best(self, saved):
            lost = self.cursor.best["step"]
            self.records.say(f"the checkpoint of the best evaluation (step {lost}) is gone: the best is chosen from now on")
            self.cursor.best, self.cursor.stale = {}, 0

    def _records(self) -> Records:
        return Records(
            self.folder,
            self.config,
            shown=self.backend.rank == 0,
            launcher=self.backend.world.launcher,
            total=self.total_steps,
            done=self.cursor.step,
        )

    def _resume(self, saved: dict[str, Any]) -> None:
        if saved["global_batch"] != self.sampler.global_batch:
            raise UserError(
                f"the checkpoint was trained with {saved['global_batch']} samples a step and this run has "
                f"{self.sampler.global_batch}: give --global-batch-size {saved['global_batch']}",
                shared=True,
            )
        if saved["data"] != self._data():
            had, has = (f"{one['samples']} samples of {one['classes']} classes" for one in (saved["data"], self._data()))
            raise UserError(f"the checkpoint was trained on {had}, and the data here are {has}: give the same", shared=True)
        self.cursor = together(self.backend, "checkpoint", lambda: self._take(saved))

    def _take(self, saved: dict[str, Any]) -> Cursor:
        """Loads a checkpoint into the trainer; gives the place that it is of."""
        with checkpoint.fitting("the checkpoint"):
            self.trainer.load_state_dict(saved["trainer"])
            check_state(self.trainer.optimizer)
            return Cursor.of(saved["cursor"])

    def _data(self) -> dict[str, int]:
        """What tells other data from these."""
        return {"samples": len(self.task.train), "classes": self.task.classes}

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self, signals: Signals) -> dict[str, Any]:
        """The steps that are left, then the model and the summary."""
        cursor, self.signals = self.cursor, signals
        with self.records:
            self.records.say(self._opening_line())
            if self.backend.rank == 0:
                self.records.say(opening(self.config, self.trainer.model))
            # A run that was stopped behind its last step still has to look at what it came to.
            while cursor.judged != cursor.step or (cursor.step < self.total_steps and not self._early):
                self._stream = self.task.train.stream(self._asked(), self.backend.device)
                while cursor.batch < self.sampler.batches and cursor.step < self.total_steps:
                    self._act_on(self._step())
                self._end_epoch()
            self.writer.wait()
            return conclude(self)

    def _asked(self) -> Iterator[Batch]:
        """This rank's backward passes of the rest of the epoch, in order. Read ahead of the steps."""
        epoch, seed = self.cursor.epoch, derived(self.config.seed, "augmentation", self.cursor.epoch)
        for number in range(self.cursor.batch, self.sampler.batches):
            for part in self._parts(self.sampler.batch(epoch, number)):
                yield Batch(part, seed)

    def _parts(self, batch: torch.Tensor) -> list[torch.Tensor]:
        """This rank's samples of a global batch, one tensor for each backward pass; none if it has no samples."""
        mine = share(batch, self.backend.rank, self.backend.size)
        return list(mine.tensor_split(min(self.config.accumulate, len(mine)))) if len(mine) else []

    def _step(self) -> list[float]:
        """One optimizer step on one global batch; gives how many ranks have noted each of ``SIGNALS``."""
        cursor, started = self.cursor, time.perf_counter()
        batch = self.sampler.batch(cursor.epoch, cursor.batch)
        passes, samples = len(self._parts(batch)), len(batch)
        lr = self.trainer.optimizer.param_groups[0]["lr"]
        try:
            done = self.trainer.step(self._batches(passes), samples * self._counts(), self.signals.take())
        except DivergedError as error:
            self._diverge(str(error), step=cursor.step + 1)
        cursor.count(done.totals, samples, time.perf_counter() - started)
        values = metrics(done.totals, "")
        self.records.step(cursor.step, cursor.epoch, samples, {**values, "lr": lr})
        return done.news

    def _batches(self, passes: int) -> Iterator[Tensors]:
        assert self._stream is not None
        for _ in range(passes):
            inputs, targets = next(self._stream)
            if self.config.channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, targets

    def _counts(self) -> float:
        """How much counts in a sample, about: the trainer makes up for the difference."""
        return 1.0 if self.task.kind == "classes" else max(1.0, round(self.task.shape[0] * CHOSEN))

    def _act_on(self, news: list[float]) -> None:
        """Saves, and stops, as signals on any rank or the settings ask for."""
        cursor = self.cursor
        asked = [number for number, ranks in zip(SIGNALS, news, strict=True) if ranks]
        every = self.config.checkpoint_every
        ends = cursor.batch == self.sampler.batches or cursor.step == self.total_steps
        if asked or (every and cursor.step % every == 0 and not ends):
            self._save(best=False)
        stops = [number for number in asked if number != signal.SIGUSR1]
        if stops:
            self.writer.wait()
            failed = on_root(self.backend, "checkpoint", lambda: str(self.writer.failed or ""))
            path = checkpoint.path_of(self.folder / "checkpoints", cursor.step)
            saved = f"its checkpoint could not be written ({failed})" if failed else f"saved in {path}"
            raise StoppedError(
                f"{signal.Signals(stops[0]).name} ended the run after step {cursor.step} of {self.total_steps}, {saved}; "
                f"go on with the same command and --run-dir {self.folder} --resume",
                stops[0],
            )

    def _end_epoch(self) -> None:
        cursor = self.cursor
        evaluation = self.trainer.evaluate(self._evaluation(), CrossEntropy())
        if not math.isfinite(evaluation["val_loss"]):
            self._diverge("the validation loss became infinite or not a number on all ranks", step=cursor.step)
        whole = cursor.batch == self.sampler.batches
        best = cursor.judge(evaluation, self.config.best)
        if whole:
            cursor.next_epoch()
        values = {**cursor.last, "samples_per_second": cursor.speed}
        self.records.epoch(cursor.step, cursor.epoch, self.config.epochs, values)
        ends = cursor.step == self.total_steps or self._early
        if best or ends or cursor.epoch % self.config.checkpoint_epochs == 0:
            self._save(best=best)

    def _evaluation(self) -> Iterator[Tensors]:
        """This rank's samples of the evaluation, none of them twice: every ``size``-th."""
        mine = torch.arange(self.backend.rank, len(self.task.val), self.backend.size)
        size = min(EVALUATION_BATCH, max(self.sampler.global_batch // self.backend.size, 64))
        batches = [Batch(numbers) for numbers in mine.split(size) if len(numbers)]
        yield from self.task.val.stream(batches, self.backend.device)

    @property
    def _early(self) -> bool:
        return self.config.early_stop is not None and self.cursor.stale >= self.config.early_stop

    def _diverge(self, what: str, step: int) -> NoReturn:
        """Ends the run on all ranks."""
        self.writer.wait()
        saved = checkpoint.found(self.folder / "checkpoints") if self.backend.rank == 0 else []
        last = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        what, _, where = what.rpartition(" on ")
        raise DivergedError(f"{what} in step {step} on {where}; {last}; try a lower --lr (now {self.config.lr:g})")

    # -- what is kept -----------------------------------------------------------------------------------------------

    def _save(self, *, best: bool) -> None:
        """Has a checkpoint written while the loop goes on. Collective."""
        state = self.trainer.state_dict()
        if not all(parameter.isfinite().all() for parameter in self.trainer.model.parameters()):
            self._diverge("the weights became infinite or not a number on all ranks", step=self.cursor.step)
        weights = weights_of(self.trainer) if best else None
        if self.backend.rank != 0:
            return
        tree = {
            "format": checkpoint.FORMAT,
            "trainer": state,
            "cursor": self.cursor.plain(),
            "config": vars(self.config),
            "global_batch": self.sampler.global_batch,
            "data": self._data(),
        }
        self.writer.write(self.cursor.step, checkpoint.Packed(tree), best=weights)

    def _opening_line(self) -> str:
        backend, parameters = self.backend, sum(p.numel() for p in self.trainer.model.parameters())
        return (
            f"{self.config.recipe} on {backend.size} × {backend.device.type}, {backend.name} backend over "
            f"{backend.transport}, started by {backend.world.launcher}: {parameters} parameters, "
            f"{self.sampler.samples} samples in batches of {self.sampler.global_batch}, {self.total_steps} steps, "
            f"{self.arithmetic}, into {self.folder}"
        )
