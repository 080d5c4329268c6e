"""The process of one rank: receives a function from its parent process, calls it, and sends the outcome."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

from dualtrain.console import open_closed_streams
from dualtrain.functions.link import inherited
from dualtrain.functions.outcome import outcome_of
from dualtrain.functions.payload import Call, dumps, loads
from dualtrain.processes import release, signal_at_parents_end


def prepare() -> None:
    """Make ``import horovod.torch`` load ``dualtrain.hvd`` in this rank, and set HOROVOD_RANK and similar variables.

    Also make ``import torchvision`` work with a CPU build of torch, and apply the memory settings of ``heap.py``.
    Raises UserError if Horovod itself is already imported.
    """
    from dualtrain.heap import keep_freed_memory, use_huge_pages
    from dualtrain.horovod_variables import set_rank_variables
    from dualtrain.horovodize.imports import install

    install()
    keep_freed_memory()
    use_huge_pages()
    set_rank_variables()


def main(descriptor: int, parent: int) -> None:
    """Run as a rank that the process ``parent`` has started. ``descriptor`` is this rank's end of the socket pair.

    If the function raises, or its result cannot be pickled, exit with status 1.
    """
    signal_at_parents_end(signal.SIGKILL, parent)
    open_closed_streams()
    link = inherited(descriptor)
    data = link.receive()
    link.send(b"")  # shows the parent process that this rank has started
    outcome = outcome_of(lambda: _call(data))
    link.send(dumps(outcome))
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # the function has replaced the stream by None, or closed it
            stream.flush()
    if outcome.result is None:
        release()
        os._exit(1)  # no sys.exit: exit handlers would wait for ranks that may have exited


def _call(data: bytes) -> Any:
    # Print no traceback here: the parent's exception contains it. But call sys.excepthook, because a connected backend
    # adds a hook that reports the exception to the other ranks.
    sys.excepthook = lambda *_: None
    try:
        prepare()
        call: Call = loads(data)
        function, args, kwargs = call
        return function(*args, **kwargs)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
