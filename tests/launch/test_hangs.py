"""Calls in which Horovod hangs or crashes. With dualtrain.hvd they succeed or are refused, as tests/hvd/ shows."""

from __future__ import annotations

import signal

from tests.conftest import require_horovod
from tests.forked import Forked, rank_variables
from tests.hvd.test_hvd_semantics_hangs import BODIES
from tests.launch.jobs import ENV, ROOT

WITH_HOROVOD = """
import os, sys, threading
from dualtrain import connect
import tests.hvd.test_hvd_semantics_hangs as bodies
connect("horovod")
import horovod.torch as hvd
def give_up():
    print("HANGS", flush=True)
    os._exit(7)
threading.Timer(1.5, give_up).start()
print("BEGINS", flush=True)
getattr(bodies, sys.argv[1])(hvd)
print("ENDS", flush=True)
os._exit(0)
"""


def test_horovod_hangs_or_crashes_in_calls_that_dualtrain_handles(tmp_path):
    require_horovod()
    # Test all calls at the same time, because the ranks mostly wait.
    ranks = [
        (
            body,
            Forked(
                ("-c", WITH_HOROVOD, body.__name__),
                tmp_path / body.__name__,
                env={**ENV, "PYTHONPATH": str(ROOT), **variables},
            ),
        )
        for body in BODIES
        for variables in rank_variables(2)
    ]
    try:
        for _, rank in ranks:
            rank.wait(120)
        for body, rank in ranks:
            assert rank.output.startswith("BEGINS"), (body.__name__, rank.errors)
            # 7: the call hangs. A failed assertion of the body would give status 1.
            # If the other rank has crashed first, Horovod reports this instead.
            crashed = any(one.poll() == -signal.SIGSEGV for other, one in ranks if other is body)
            shut_down = crashed and rank.poll() == 1 and "HorovodInternalError" in rank.errors
            assert shut_down or rank.poll() in (7, -signal.SIGSEGV), (body.__name__, rank.output, rank.errors)
    finally:
        for _, rank in ranks:
            rank.kill()
