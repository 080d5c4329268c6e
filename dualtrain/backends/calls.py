"""The order of collective calls, and errors of one rank's call, which all ranks raise."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from operator import index
from typing import NoReturn, TypeVar

import torch

from dualtrain.backends.agreement import Call, refuse
from dualtrain.backends.base import CLOSED, Primitives, Work
from dualtrain.backends.compilation import not_compiled
from dualtrain.backends.serial import SerialQueue
from dualtrain.errors import BackendError
from dualtrain.launchers import World

T = TypeVar("T")

#: How many forks led to this process. Unlike ``os.getpid()``, it needs no system call, which takes time in every step.
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Calls(Primitives):
    """Primitives, and the order in which this rank makes collective calls.

    A method of a subclass passes a function to ``_now``, which blocks, or to ``_later``, which does not. The passed
    function compares the calls of the ranks (``agreement.py``), and then starts primitives.
    """

    def __init__(self, world: World, device: torch.device, timeout: float) -> None:
        super().__init__(world, device, timeout)
        self._queue = SerialQueue()
        self._of_thread = threading.local()  # not the thread's ID, which a later thread may reuse
        self._of_thread.made_backend = True
        self._open = True
        self._forks = _forks

    @not_compiled
    def with_flag(self, call: Callable[[], T], flag: bool) -> tuple[T, bool]:
        """Return the result of ``call``, and whether any rank's ``flag`` is true.

        ``call`` must call exactly one method of this backend. The flags are sent in the messages in which the ranks compare
        this call, so they need no exchange of their own.
        """
        self.drain()  # an earlier asynchronous call must not send the flag
        self.flag = flag
        try:
            return call(), self.any_flag
        finally:
            self.flag = False

    def drain(self) -> None:
        """Block until the asynchronous calls made so far have ended, so that the next primitive starts after them.

        Raises:
            BackendError: as :meth:`check_process`.
        """
        self.check_process()
        self._queue.drain()

    @property
    def is_own_process(self) -> bool:
        """Return whether this process has made the backend; False in a process that was forked from it later."""
        return self._forks == _forks

    def check_process(self) -> None:
        """Check that this process is the rank itself, and not a forked child, whose data would be mistaken for the rank's.

        Raises:
            BackendError: this process was forked from the rank, and the backend has several ranks.
        """
        if self.size > 1 and not self.is_own_process:
            raise BackendError(
                f"this process was forked from rank {self.job_rank}, and cannot use that rank's backend: make collective "
                "calls and backward passes in the rank's own process, and none in a data worker, for example"
            )

    def settle(self) -> None:
        """Deprecated name of :meth:`drain`."""
        warnings.warn(
            "Backend.settle is now called Backend.drain; the old name will be removed in version 0.3.0",
            DeprecationWarning,
            stacklevel=2,
        )
        self.drain()

    def refuse(self, kind: str, name: str | None, problem: Exception) -> NoReturn:
        """Raise an error on every rank, because this rank found ``problem`` before its call ``kind``. Collective; blocks.

        Call this in place of the first collective call of an operation that consists of several steps.

        Raises:
            Exception: ``problem``, on every rank, if all of them refuse this call for this reason.
            BackendError: on every rank, if their calls or problems differ (the message names each rank's); or a rank
                failed, or the comparison timed out.
        """
        self._now(kind, name, partial(raise_problem, problem))
        raise AssertionError("a call that raises has returned")

    @not_compiled
    def _now(self, kind: str, name: str | None, call: Callable[[], T]) -> T:
        self._check_open()
        self._queue.drain()
        return self.whole_call(partial(self._call_or_refuse, kind, name, call, self._is_second_thread()))

    @not_compiled
    def _later(self, kind: str, name: str | None, call: Callable[[], T]) -> Work[T]:
        self._check_open()
        call = partial(self._call_or_refuse, kind, name, call, self._is_second_thread())
        return self._queue.submit(partial(self.whole_call, call))

    def _is_second_thread(self) -> bool:
        """Return whether this backend was made by a different thread than the calling one."""
        return not hasattr(self._of_thread, "made_backend")

    def _call_or_refuse(self, kind: str, name: str | None, call: Callable[[], T], second_thread: bool) -> T:
        """Return the result of ``call``; ``second_thread`` says whether a second thread makes it.

        If ``call`` raises an error before the ranks have compared their calls, and it is not a BackendError, raise an error
        on every rank, so that the other ranks do not wait for this rank. Their error names this rank's call by ``kind`` and
        ``name``.
        """
        before = self.in_second_thread, self.compared
        self.in_second_thread, self.compared = second_thread, False
        try:
            self._of_thread.in_call = True
            return call()
        except BackendError:
            raise
        except Exception as problem:  # of any type: the arguments may run the user's code
            if self.compared:
                raise
            refuse(self, Call(kind, name if isinstance(name, str) else None), problem)
        finally:
            self._of_thread.in_call = False
            self.in_second_thread, self.compared = before

    def _check_open(self) -> None:
        if not self._open:
            raise BackendError(CLOSED)
        self.check_process()
        if getattr(self._of_thread, "in_call", False):  # the new call would get the data of the interrupted one
            raise BackendError(
                "a signal handler or finalizer calls this backend during another call of its thread on rank "
                f"{self.job_rank}: let the handler set a variable, and make the call in the training loop; or make a "
                "channel() for the handler"
            )

    def _checked_root(self, root: int) -> int:
        root = index(root)  # convert any integer type to int: the ranks compare the text of the call
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not a rank of this backend: choose one from 0 to {self.size - 1}")
        return root


def raise_problem(problem: Exception) -> NoReturn:
    """Raise ``problem``. A call that must fail gets this function as its implementation."""
    raise problem
