"""Fixtures of the tests that run the same bodies on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import pytest

from tests.conftest import Spmd


@pytest.fixture
def fresh(real: Spmd) -> Spmd:
    """The world ``real``, with Horovod restarted.

    Other tests can leave behind process sets, or counters that differ between ranks. Unnamed calls would then hang.
    """
    if real.name == "horovod":
        real.leave()
    return real
