"""Fixtures of the tests that run the same bodies on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import pytest

from tests.conftest import Spmd


@pytest.fixture
def fresh(real: Spmd) -> Spmd:
    """The world ``real``. A Horovod world is closed first, so that the test's first call opens a new one.

    Other tests can leave process sets behind, and counters of calls that differ between ranks. With these counters,
    Horovod's unnamed calls would hang.
    """
    if real.name == "horovod":
        real.leave()
    return real
