"""The process of one rank: receives a function from the process that has started it, calls it, and sends its outcome."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from dualtrain.functions.link import inherited
from dualtrain.functions.outcome import outcome_of
from dualtrain.functions.payload import Call, dumps, loads
from dualtrain.processes import release, signal_at_parents_end


def prepare() -> None:
    """Make ``import horovod.torch`` load ``dualtrain.hvd`` in this rank, and set HOROVOD_RANK and its like."""
    from dualtrain.heap import keep_freed_memory
    from dualtrain.horovod_variables import publish_place
    from dualtrain.horovodize.imports import install

    install()
    keep_freed_memory()
    publish_place()


def main(descriptor: int, parent: int) -> None:
    """Run as a rank that the process ``parent`` has started; ``descriptor`` is this end of a socket pair.

    If the function raises, the process ends here with status 1.
    """
    signal_at_parents_end(signal.SIGKILL, parent)
    link = inherited(descriptor)
    data = link.receive()
    outcome = outcome_of(lambda: _call(data))
    link.send(dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    if outcome.result is None:
        release()
        os._exit(1)  # exit handlers would wait for ranks that may have exited


def _call(data: bytes) -> Any:
    # The caller prints the traceback. A connected backend adds a hook by which the other ranks learn of the exception.
    sys.excepthook = lambda *_: None
    try:
        prepare()
        call: Call = loads(data)
        function, args, kwargs = call
        return function(*args, **kwargs)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
