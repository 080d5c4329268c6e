"""The training loop of the command line: steps, evaluations, checkpoints and the end of a run.

This module passes sections of the ``Config``, or a dict of all settings, to other modules, never the ``Config`` itself.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from dualtrain.backends import Backend
from dualtrain.batchnorm import SyncBatchNorm
from dualtrain.config import Config, OutputSection, RunFacts, run_name, without_effect
from dualtrain.cores import usable_cores
from dualtrain.data import Task
from dualtrain.data.draws import derived
from dualtrain.data.loader import LoaderSource
from dualtrain.data.sampler import Sampler
from dualtrain.data.sources import IGNORED, Source
from dualtrain.data.text import CHOSEN
from dualtrain.errors import BackendError, DivergedError, StoppedError, UserError
from dualtrain.files import absolute
from dualtrain.on_ranks import on_all_ranks, on_rank_zero
from dualtrain.run_folder import checkpoint
from dualtrain.run_folder.attempt_events import recoveries_in
from dualtrain.run_folder.attempts import Attempt
from dualtrain.run_folder.checkpoint_writer import Writer
from dualtrain.run_folder.folder_lock import FolderLock
from dualtrain.run_folder.restarts import allow_restart, recorded
from dualtrain.run_folder.run_dir import claim
from dualtrain.run_folder.save_clock import SaveClock
from dualtrain.trainer.machine import platform_of, threads, use_threads, warn_of_other_platform
from dualtrain.trainer.objective import CrossEntropy, training_metrics
from dualtrain.trainer.passes import Tensors
from dualtrain.trainer.rank_state import seed_all
from dualtrain.trainer.same_run import compare_settings
from dualtrain.trainer.step import Counted
from dualtrain.trainer.trainer import Trainer
from dualtrain.training.assemble import (
    check_batches,
    check_virtual_ranks,
    determinism,
    first_not_finite,
    load_task,
    make_computation,
    make_model,
    try_out,
    warn_of_other_workers,
)
from dualtrain.training.batch_plan import BatchPlan
from dualtrain.training.cursor import Cursor
from dualtrain.training.one_sample import check_one_sample
from dualtrain.training.opening import job_in_words, model_line, settings_line, verbose_lines
from dualtrain.training.optimizers import make_optimizer, make_schedule, restore_rates, scaled_lr
from dualtrain.training.origin import origin_of
from dualtrain.training.progress import Waiting
from dualtrain.training.records import Records, check_tensorboard
from dualtrain.training.results import done_line, summarize, way_to_continue, weights_of, write_results, write_task
from dualtrain.training.resume import (
    adopted,
    compare_batches_and_data,
    compare_samples,
    restore_best,
    set_aside,
    settings_in,
    with_lr_batch,
)
from dualtrain.training.saveable import saveable
from dualtrain.training.signals import SAVE, SIGNALS, STOP, Signals
from dualtrain.training.start import Start, start_of
from dualtrain.user_code import enough_memory, takes_arguments

T = TypeVar("T")
_SMALLER = "choose smaller samples, a smaller model, or a smaller --batch-size"


def train(config: Config, backend: Backend) -> dict[str, Any]:
    """Train with the settings in ``config``, and return the summary on every rank. Collective; blocks.

    If a run that ``--resume auto`` or a restart would continue has already ended, return its summary without training.

    Raises:
        RanksDifferError: the ranks have different settings, versions or data, or only some ranks can read a file.
        UserError: a setting cannot be used in this run, a file that the run needs cannot be read or written, a process has
            too little memory, or another process uses the run's folder.
        DivergedError: a loss, a gradient that was sent in fp16, or a weight became infinite or not a number.
        BackendError: a rank failed, or the timeout passed.
        NotSavedError: the training ended, but its results could not be written.
        StoppedError: a signal stopped the run, which first tried to save a checkpoint.
    """
    lock = FolderLock()
    try:
        with enough_memory(_SMALLER):
            return _train(config, backend, lock)
    finally:
        lock.release()


def _train(config: Config, backend: Backend, lock: FolderLock) -> dict[str, Any]:
    settings = config.plain()
    compare_settings(settings, backend)  # first, because ranks with different settings would call different collectives
    name = run_name(config.run.recipe, config.data.dataset, config.model.name)
    seconds, first = config.output.log_seconds, backend.rank == 0
    with Waiting("looking for the run's checkpoints", seconds, shown=first):
        start = start_of(config.output, name, settings, backend, lock)
    given_settings = settings
    if start.summary is not None:
        return start.summary
    if start.saved is not None:
        settings = adopted(settings, settings_in(start.saved))
    # The number of threads changes the bits of matrix products. Virtual ranks give the same bits on any number of ranks, so
    # with them the number of threads must not depend on the cores.
    number = settings["threads"] or (threads(backend) if settings["virtual_ranks"] is None else 1)
    weights = settings["weights"] and str(absolute(settings["weights"]))
    config = Config.of({**with_lr_batch(settings), "threads": number, "weights": weights})
    use_threads(number, backend)
    # The user's own function may draw the data, or a random split, from these generators. It must get the same numbers on
    # every rank and at each start.
    seed_all(derived(config.step.seed, "data"))
    with Waiting("loading the data", seconds, shown=first):
        task = load_task(config.data, config.model.name, backend)
    try:
        # Virtual ranks need operations that repeat bit for bit. On a GPU, or with several threads, not all operations do.
        repeats = number == 1 and backend.device.type == "cpu"
        exact = config.run.deterministic or (config.step.virtual_ranks is not None and not repeats)
        with determinism(exact):
            run = _opened(name, config, backend, task, start, lock)
            try:
                with recorded(run.attempt, given_settings, backend), enough_memory(_SMALLER), Signals() as signals:
                    summary = run.train(signals)
            finally:
                lock.release(run.writer.thread)
    except BaseException:
        with suppress(Exception):  # an error of the source's close() must not replace the error that ended the run
            task.close()
        raise
    task.close()
    return summary


def _opened(name: str, config: Config, backend: Backend, task: Task, start: Start, lock: FolderLock) -> Run:
    """Make the model and the run, and open the run's folder. Collective; blocks."""
    with Waiting("making the model", config.output.log_seconds, shown=backend.rank == 0) as wait:
        model = make_model(config.model, task, config.step.seed, backend, resumed=start.saved is not None)
        wait.phase("reading and computing one sample")
        on_all_ranks(backend, "model", lambda: try_out(task, model, config.data.dataset, config.model.name))
        on_all_ranks(backend, "data", lambda: warn_of_other_workers(task, backend))
        wait.phase("preparing the trainer")
        run = Run(name, config, backend, task, model, lock)
        wait.phase("opening the run's folder" if start.saved is None else "restoring the checkpoint")
        run.open(start)
    return run


class Run:
    """One run, from step 0 or from a checkpoint, to the summary. The constructor is collective, and writes no file."""

    def __init__(self, name: str, config: Config, backend: Backend, task: Task, model: nn.Module, lock: FolderLock) -> None:
        step, length = config.step, config.length
        self.config = config
        self.backend = backend
        self.task = task
        self.lock = lock
        self.name = name
        self.platform = platform_of(backend)
        #: Number of parts of a global batch: the number of virtual ranks, or the number of ranks if there are no virtual
        #: ranks. The global batch size and the learning rate are computed from it.
        self.parts = step.parts(backend.size)
        self.sampler = Sampler(len(task.train), step.global_batch(self.parts), step.seed, step.drop_last)
        self.cursor = Cursor()
        self.steps_of_epochs = length.epochs * self.sampler.batches
        self.total_steps = min(self.steps_of_epochs, length.max_steps or self.steps_of_epochs)
        self.lr, self.lr_in_words = scaled_lr(config.schedule, step, self.parts)
        optimizer, options = on_all_ranks(backend, "trainer", lambda: self._prepare(model))
        self.trainer = Trainer(model, optimizer, CrossEntropy(step.label_smoothing), backend=backend, **options)
        mine = [backend.rank] if step.virtual_ranks is None else list(self.trainer.shards)
        self.plan = BatchPlan(self.sampler, self.parts, mine, step.accumulate)
        self._stream: Iterator[Tensors] | None = None
        self.attempt = Attempt(lock)

    def _prepare(self, model: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """Return the optimizer, and the trainer's other arguments. Not collective: a UserError on one rank is allowed."""
        config, step, backend = self.config, self.config.step, self.backend
        check_tensorboard(config.output)
        check_batches(self.sampler, self.parts, step.accumulate, sync_batchnorm=config.model.sync_batchnorm)
        check_virtual_ranks(step, config.model, config.run, backend.size)
        optimizer = make_optimizer(step, model, self.lr)
        if step.compress == "bf16" and torch.bfloat16 not in backend.narrow:
            raise UserError(f"--compress bf16: the {backend.name} backend cannot send bf16; use fp16")
        return optimizer, {
            "schedule": make_schedule(config.schedule, optimizer, self.lr, self.total_steps),
            "clip_norm": step.clip_norm,
            "amp": step.amp,
            "ema": step.ema,
            "compress": step.compress,
            "virtual_ranks": step.virtual_ranks,
            "seed": step.seed,
            **make_computation(config.run, config.model, step.label_smoothing, model, backend),
        }

    def open(self, start: Start) -> None:
        """Restore the checkpoint if there is one; then claim the run's folder, and write its first files. Collective.

        Before that, :func:`check_one_sample` is called if there is no checkpoint.
        """
        config, output, saved, lock = self.config, start.output, start.saved, self.lock
        if saved is not None:
            self._resume(saved, output)
        else:
            on_all_ranks(self.backend, "batches", self._check_passes)
        self.origin = origin_of(self.backend, start.runs.parent)
        content = {**config.plain(), "platform": self.platform, "origin": self.origin}
        new, limit = start.runs / self.name, config.run.timeout
        self.folder = Path(on_rank_zero(self.backend, "run folder", lambda: claim(output, new, content, lock, limit)))

        def prepare() -> None:
            # An earlier start may have written files of later steps, and this run computes those steps again. Rename these
            # files, so that no run resumes from them.
            set_aside(self.folder, self.cursor, lock)
            write_task(self.folder, self.task, lock)
            allow_restart(self.folder, lock)
            for name, tree in start.copies.items():
                checkpoint.write(self.folder / "checkpoints" / name, tree, lock)
            lock.record_job()  # from here on, a restart may resume from the newest checkpoint

        on_rank_zero(self.backend, "run folder", prepare)
        self.records = on_all_ranks(self.backend, "run folder", self._records)
        try:
            self.writer = Writer(self.folder, output.keep, self.records.warn, limit, lock)
            if saved is not None:
                self._restore_best(saved, output.resume_file)
                # A run that was killed during a save may have left old checkpoints, and this start may not save again.
                on_rank_zero(self.backend, "old checkpoints", self.writer.remove_old)
                assert isinstance(self.trainer.schedule, LambdaLR)
                # Set the learning rates last: the calls above load saved rates, and this run may have a different length.
                restore_rates(self.trainer.schedule)
            self.attempt.begin(self.folder, self.cursor.step, self.backend, start.settings_hash)
        except BaseException:
            self.records.close()
            raise

    def _check_passes(self) -> None:
        model, step = self.trainer.model, self.config.step
        check_one_sample(model, self.config.model.name, self.task, self.sampler, step, self.parts, self.total_steps)

    def _restore_best(self, saved: dict[str, Any], file: Path | None) -> None:
        """Restore the files of the best evaluation. If that is impossible, warn, and drop that evaluation. Collective."""
        other = file.parent if file else None
        if not restore_best(self.trainer, self.cursor, saved, self.folder, other, self.lock):
            step = self.cursor.best["step"]
            self.records.warn(
                f"the checkpoint of the best evaluation (step {step}) is missing: only later evaluations can be the best"
            )
            self.cursor.best, self.cursor.stale = {}, 0

    def _records(self) -> Records:
        return Records(
            self.folder,
            self.config.output,
            shown=self.backend.rank == 0,
            launcher=self.backend.world.launcher,
            total=self.total_steps,
            done=self.cursor.step,
            evaluated=self.cursor.evaluated_step,
            lock=self.lock,
        )

    def _resume(self, saved: dict[str, Any], output: OutputSection) -> None:
        """Load a checkpoint. Raise UserError on every rank if this run does not fit it. Collective."""
        folder = output.resume_file.parent.parent if output.resume_file else Path(output.run_dir or "")
        data = {**self._data(), "validation": len(self.task.val)}
        compare_batches_and_data(saved, self.sampler.global_batch, data, folder)
        on_rank_zero(self.backend, "data", lambda: compare_samples(saved, self.task, folder))
        if self.backend.rank == 0:
            warn_of_other_platform(saved.get("platform", {}), self.platform)
        self.cursor = on_all_ranks(self.backend, "checkpoint", lambda: self._load(saved))
        if self.cursor.step > self.total_steps:
            raise UserError(
                f"the checkpoint is of step {self.cursor.step}, and this run would end after step {self.total_steps}: give "
                "more --epochs or --max-steps, or an older checkpoint",
                shared=True,
            )

    def _load(self, saved: dict[str, Any]) -> Cursor:
        """Load a checkpoint into the trainer; return its position."""
        with checkpoint.fitting("the checkpoint"):
            self.trainer.load_state_dict(saved["trainer"])
            return Cursor.of(saved["cursor"])

    def _data(self) -> dict[str, int]:
        """Return the sizes of the data, which must be equal in a resumed run.

        Don't add an entry: earlier versions would refuse the checkpoint.
        """
        return {"samples": len(self.task.train), "classes": self.task.classes}

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self, signals: Signals) -> dict[str, Any]:
        """Run the remaining steps, write the model and the summary, and return the summary. Collective; blocks."""
        cursor, self.signals = self.cursor, signals
        self.clock = SaveClock(self.config.output.checkpoint_seconds)
        with self.records, self._naming_the_step():
            self._print_opening()
            if self.backend.rank == 0:
                self.attempt.train()
            # A run that was stopped after its last step still lacks the evaluation of that step.
            while cursor.evaluated_step != cursor.step or (cursor.step < self.total_steps and not self._stops_early):
                rest = self.plan.rest_of_epoch(cursor.epoch, cursor.batch)
                self._stream = self.task.train.stream(rest, self.backend.device)
                while cursor.batch < self.sampler.batches and cursor.step < self.total_steps:
                    self._act_on(self._step())
                self._end_epoch()
            self.writer.wait()
            return self._conclude()

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """Add the last completed step to the message of a failed collective operation."""
        try:
            yield
        except BackendError as error:
            error.args = (f"after step {self.cursor.step}: {error}",)
            raise

    def _step(self) -> list[float]:
        """Take one optimizer step on one global batch; return the control flags, summed over ranks."""
        cursor, started = self.cursor, time.perf_counter()
        batch = self.sampler.batch(cursor.epoch, cursor.batch)
        counts, samples = [len(part) for part in self.plan.passes(batch)], len(batch)
        lr = self.trainer.optimizer.param_groups[0]["lr"]
        try:
            batches = self._for_trainer([Counted(self._batches(count), count) for count in counts])
            result = self.trainer.step(batches, samples * self._weight_of_sample(), self._control_flags())
        except DivergedError as error:
            self._diverge(str(error), cursor.step + 1, "training", self.task.train, batch)
        if not result.totals[1] > 0:  # all targets of the batch are ignored
            self.trainer.advance_schedule()
        cursor.count(result.totals, samples, time.perf_counter() - started)
        values = training_metrics(result.totals, "")
        self.records.step(cursor.step, cursor.epoch + 1, samples, {**values, "lr": lr})
        self._note_progress()
        return result.control_flags

    def _note_progress(self) -> None:
        for line in self.attempt.step(self.cursor.step):
            self.records.print(line)

    def _control_flags(self) -> list[float]:
        """Return this rank's flags for the next step.

        The flags report signals. Rank 0's flags also request a save that is due by time, and a stop if another process uses
        the folder.
        """
        flags, cursor = self.signals.take(), self.cursor
        ends = self._saves_at_end(cursor.batch + 1, cursor.step + 1)
        # Don't save by time if the end of the epoch or of the run saves anyway. Don't save by time during a write either:
        # the loop would wait for that write.
        if self.backend.rank == 0 and self.clock.due and not ends and not self.writer.busy:
            flags[SAVE] = 1.0
        if self.lock.superseded:
            flags[STOP] = 1.0
        return flags

    def _saves_at_end(self, batch: int, step: int) -> bool:
        """Return whether an epoch or the run ends after ``batch`` batches and ``step`` steps, with a save at that end."""
        saves = (self.cursor.epoch + 1) % self.config.output.checkpoint_epochs == 0
        return step == self.total_steps or (batch == self.sampler.batches and saves)

    def _for_trainer(self, parts: list[T]) -> T | list[T]:
        """Return the trainer's argument: the batches of this rank's part, or a list with the batches of each shard."""
        return parts[0] if self.config.step.virtual_ranks is None else parts

    def _batches(self, passes: int) -> Iterator[Tensors]:
        assert self._stream is not None
        for _ in range(passes):
            self.records.progress.phase("waiting for data")
            inputs, targets = next(self._stream)
            self.records.progress.phase("computing a step")
            if self.config.model.channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, targets

    def _weight_of_sample(self) -> float:
        """Estimate the weight of one sample in the loss. If the real weights differ, the trainer rescales the gradients."""
        return 1.0 if self.task.kind == "classes" else max(1.0, round(self.task.shape[0] * CHOSEN))

    def _act_on(self, control_flags: list[float]) -> None:
        """Save a checkpoint if a control flag or ``--checkpoint-every`` requires it. Collective.

        Raises:
            StoppedError: a flag of a signal that ends the run is set; the checkpoint was written, if possible.
            UserError: on every rank, if the run stops because another process uses its folder now.
            DivergedError, UserError: see :meth:`_save`.
        """
        cursor = self.cursor
        received = [number for number, ranks in zip(SIGNALS, control_flags, strict=True) if ranks]
        every = self.config.output.checkpoint_every
        if received or (every and cursor.step % every == 0 and not self._saves_at_end(cursor.batch, cursor.step)):
            self._save(best=False)
        stops = [number for number in received if number != signal.SIGUSR1]
        if stops:
            self.writer.wait()
            saved = on_rank_zero(self.backend, "checkpoint", self._describe_save)
            hangups = self.backend.allgather_object(self.signals.received_hangup(), name="SIGHUP")
            number = signal.SIGHUP if any(hangups) else stops[0]
            reason = f"{number.name} ended the run after step {cursor.step} of {self.total_steps}"
            raise StoppedError(f"{reason}, {saved}", number)

    def _describe_save(self) -> str:
        """Describe where the last checkpoint was saved, or why it was not, and how to continue the run. Call it on rank 0.

        Raises:
            SupersededError: another process uses the run's folder now.
        """
        self.lock.check()
        output, folder, failed = self.config.output, self.folder, self.writer.failed
        if failed is None:
            path = checkpoint.path_of(folder / "checkpoints", self.cursor.step)
            return f"saved in {path}; continue with {output.again(folder)}"
        cure = way_to_continue(output, folder, [failed])
        return f"and its checkpoint could not be written ({failed.strerror or failed}): {cure}"

    def _end_epoch(self) -> None:
        """Evaluate after the last step of an epoch or of the run, and save a checkpoint if one is due. Collective.

        Raises:
            UserError: all training targets of an epoch, or all validation targets, are ``IGNORED``.
            DivergedError: the validation loss or a weight is not finite.
        """
        cursor, output = self.cursor, self.config.output
        whole, epoch = cursor.batch == self.sampler.batches, cursor.epoch + 1
        if whole and not cursor.sums[1]:
            raise UserError(
                f"no training target has a loss, since all are {IGNORED}: correct the training data", shared=True
            )
        progress = self.records.progress
        parts = self.plan.validation(len(self.task.val))
        progress.phase("evaluating", sum(map(len, parts)))
        batches = self._for_trainer([progress.counted(self.task.val.stream(part, self.backend.device)) for part in parts])
        evaluation = self.trainer.evaluate(batches, CrossEntropy())
        if math.isnan(evaluation["val_accuracy"]):
            reason = f"no validation target has a loss, since all are {IGNORED}: correct the validation data"
            raise UserError(reason, shared=True)
        if not math.isfinite(evaluation["val_loss"]):
            numbers = torch.arange(len(self.task.val))
            what = "the validation loss became infinite or not a number on all ranks"
            self._diverge(what, cursor.step, "validation", self.task.val, numbers)
        best = cursor.update_best(evaluation, output.best)
        if whole:
            cursor.next_epoch()
        values = {**cursor.last, "samples_per_second": cursor.speed}
        self.records.epoch(cursor.step, epoch, self.config.length.epochs, values)
        ends = cursor.step == self.total_steps or self._stops_early
        if best or ends or cursor.epoch % output.checkpoint_epochs == 0:
            self._save(best=best)

    @property
    def _stops_early(self) -> bool:
        limit = self.config.length.early_stop
        return limit is not None and self.cursor.stale >= limit

    def _diverge(
        self, what: str, step: int, split: str = "", source: Source | None = None, numbers: torch.Tensor | None = None
    ) -> NoReturn:
        """Raise DivergedError. If one of the samples with the indices ``numbers`` is the cause, the message names it.

        ``what`` ends with " on " and the ranks. Rank 0's message names the last checkpoint, so first wait until a
        checkpoint that is being written is complete. Call this method on every rank, so that every rank raises.
        """
        self.writer.wait()
        last = ""
        if self.backend.rank == 0:  # the folder may be on rank 0's host only
            with suppress(OSError):  # the folder cannot be read now
                saved = checkpoint.found(self.folder / "checkpoints")
                last = f"the last good checkpoint is {saved[0]}; " if saved else "there is no checkpoint yet; "
        what, _, where = what.rpartition(" on ")
        bad = None if source is None or numbers is None else first_not_finite(source, numbers.tolist())
        lr = self.config.schedule.lr
        cure = f"try a lower --lr (now {lr:g})"
        if bad is not None:
            cure = f"{split} sample {bad} has inputs that are infinite or not a number: correct or remove it"
        raise DivergedError(f"{what} in step {step} on {where}; {last}{cure}")

    # -- saving -----------------------------------------------------------------------------------------------------

    def _save(self, *, best: bool) -> None:
        """Start writing a checkpoint, after the previous write has ended. Collective.

        Raises:
            DivergedError: on every rank, if a weight is not finite.
            UserError: on rank 0, if the state cannot be saved, or the previous write hangs.
        """
        self.records.progress.phase("saving a checkpoint")
        with self.clock.saving():
            self._write(best=best)

    def _write(self, *, best: bool) -> None:
        state = self.trainer.state_dict()
        if not all(parameter.isfinite().all() for parameter in self.trainer.model.parameters()):
            self._diverge("the weights became infinite or not a number on all ranks", self.cursor.step)
        weights = weights_of(self.trainer) if best else None
        if self.backend.rank != 0:
            return
        tree = {
            "format": checkpoint.FORMAT,
            "trainer": state,
            "cursor": self.cursor.plain(),
            "config": self.config.plain(),
            "platform": self.platform,
            "global_batch": self.sampler.global_batch,
            "data": self._data(),
            "validation": len(self.task.val),
            "checksums": self.task.checksums,
        }
        with saveable(f"the model's state in step {self.cursor.step}"):
            packed = checkpoint.Packed(tree)
        self.writer.write(self.cursor.step, packed, best=weights)

    def _conclude(self) -> dict[str, Any]:
        """Write the model and the summary; return the summary on every rank. Collective."""
        weights = weights_of(self.trainer)
        costs = self.clock.costs()
        self._note_progress()  # after a restart with no step left to train, the recovery is recorded here
        recoveries = on_rank_zero(self.backend, "recoveries", lambda: recoveries_in(self.folder))
        entries = {"learning_rate": self.lr_in_words, "global_batch": self.sampler.global_batch, "checkpoints": costs}
        entries["recoveries"] = recoveries
        summary = summarize(self.trainer, self.cursor, weights, self.config.plain(), self.origin, **entries)
        write_results(self.trainer, self.folder, weights, summary, self.writer.unwritten, self.lock, self.config.output)
        if self.backend.rank == 0:
            self.attempt.end()
        self.records.print(done_line(summary, self.folder))
        return summary

    def _print_opening(self) -> None:
        """Print on rank 0 what is trained, where, and with which settings."""
        if self.backend.rank:
            return
        settings, model, per_rank = self.config.plain(), self.trainer.model, self.config.run.threads or 1
        batches = f"{self.sampler.samples} samples in batches of {self.sampler.global_batch}"
        self.records.print(
            f"{self.name} on {job_in_words(self.backend, self.trainer.virtual_ranks, per_rank)}: {batches}, "
            f"{self.total_steps} step{'s' * (self.total_steps != 1)}, {self.lr_in_words}, into {self.folder}"
        )
        self.records.print(settings_line(settings, self.folder))
        self.records.print(model_line(settings["model"], model))
        if self.config.output.verbose:
            self.records.print(verbose_lines(settings, model))
        for line in without_effect(settings, self._facts()):
            self.records.print(f"note: {line}")

    def _facts(self) -> RunFacts:
        """Return the facts that decide whether a setting has an effect on this run."""
        dataset, sampler = self.config.data.dataset, self.sampler
        return RunFacts(
            steps=self.total_steps,
            steps_of_epochs=self.steps_of_epochs,
            global_batch=sampler.global_batch,
            part=-(-min(sampler.global_batch, sampler.samples) // self.parts),
            short_batch=sampler.samples % sampler.global_batch > 0,
            shape=self.task.shape,
            classes=self.task.classes,
            ranks=self.backend.size,
            cores=usable_cores(),
            resumed=self.cursor.step > 0,
            norms=any(isinstance(part, SyncBatchNorm) for part in self.trainer.model.modules()),
            workers=isinstance(self.task.train, LoaderSource),
            folder=":" not in dataset or takes_arguments(dataset, self.config.data.data_dir),
        )
