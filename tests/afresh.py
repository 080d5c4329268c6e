"""Forked processes with the signal handlers and descriptors of a new interpreter, for tests of multiprocessing."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from dualtrain.training.signals import is_ignored, take_early_request


class AfreshContext:
    """Replacement of multiprocessing's ``spawn`` context: forks, resets signals, and closes close-on-exec descriptors."""

    def Process(  # noqa: N802 - multiprocessing's name
        self, target: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> BaseProcess:
        return multiprocessing.get_context("fork").Process(target=_begin, args=(target, args), name=name)


def _begin(target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        if not is_ignored(number):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_early_request()  # a new interpreter has no record of the parent's SIGUSR1
    kept = 0, 1, 2, resource_tracker.getfd()
    for each in map(int, os.listdir("/proc/self/fd")):
        try:
            if each not in kept and fcntl.fcntl(each, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(each)
        except OSError:
            pass  # the descriptor of /proc/self/fd itself, which is already closed
    multiprocessing.set_start_method("spawn", force=True)
    target(*args)
