"""Fixtures of the tests that run the same bodies on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import pytest

from tests.conftest import Spmd


@pytest.fixture
def fresh(real: Spmd) -> Spmd:
    """The world ``real``. A world of Horovod is opened again before the test.

    Other tests can leave behind process sets, and counters of calls that differ between ranks. With these counters,
    Horovod's unnamed calls would hang.
    """
    if real.name == "horovod":
        real.leave()
    return real
