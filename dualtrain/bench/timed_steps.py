"""Timing of steps: of one contender, or of several contenders in turns.

Processes that run the same program differ in speed by up to 15 %, and a slow process stays slow until it ends. If several
contenders run in turns in the same processes, this difference is the same for all contenders, and cancels in the ratio of
their times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from dualtrain.bench.contenders import Contender
from dualtrain.bench.workloads import Task

TURN = 4  # steps of one contender before the next contender's turn


class TimedSteps:
    """A contender's steps of one task, and their times.

    Attributes:
        first_step_ended: the value of ``time.time()`` after the first step.
        left: how many steps have not run yet.
    """

    def __init__(self, contender: Contender, task: Task) -> None:
        self.first_step_ended = 0.0
        self.left = task.warmup + task.steps
        self._warmup = task.warmup
        self._device = task.device
        self._steps = contender.train(task)
        self._times: list[float] = []

    def warm_up(self) -> None:
        """Run the warm-up steps, whose times do not count."""
        next(self._steps)
        self.first_step_ended = time.time()
        self.left -= 1
        self._run(self._warmup - 1)

    def turn(self, steps: int, discarded: int = 0) -> None:
        """Run ``steps`` steps, or the rest if fewer are left. Discard the times of the first ``discarded`` steps.

        The time of the last step always counts.
        """
        steps = min(steps, self.left)
        first = min(discarded, steps - 1)
        self._run(first)
        self._times += self._run(steps - first)

    def seconds(self) -> float:
        """Return the median time of the steps that count."""
        return statistics.median(self._times)

    def finish(self) -> torch.nn.Module:
        """Return the trained model, after the last step.

        Raises:
            RuntimeError: the contender's loop has further steps.
        """
        try:
            next(self._steps)
        except StopIteration as end:
            model: torch.nn.Module = end.value
            return model
        raise RuntimeError("the contender's loop goes on after the task's last step")

    def _run(self, steps: int) -> list[float]:
        self._synchronize()
        times, began = [], time.perf_counter()
        for _ in range(steps):
            started = time.perf_counter()
            next(self._steps)
            times.append(time.perf_counter() - started)
        self._synchronize()
        self.left -= steps
        if self._device.type == "cuda":  # kernels run asynchronously: only the time of all steps together is known
            return [(time.perf_counter() - began) / steps for _ in times]
        return times

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def run_steps(all_steps: Sequence[TimedSteps]) -> None:
    """Run all steps of all contenders. Several contenders run in turns, in the order A B, B A, A B, …

    With several contenders, the time of a turn's first step is discarded, because the caches still hold the data of the
    previous contender.
    """
    for one in all_steps:
        one.warm_up()
    if len(all_steps) == 1:
        all_steps[0].turn(all_steps[0].left)
    order = list(all_steps)
    while any(one.left for one in order):
        for one in order:
            one.turn(TURN, discarded=1)
        order.reverse()
