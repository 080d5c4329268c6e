"""Fixtures of the tests that run the same bodies on Horovod itself and on ``dualtrain.hvd``."""

from __future__ import annotations

import pytest

from tests.conftest import Spmd


@pytest.fixture
def fresh(real: Spmd) -> Spmd:
    """The world ``real``. A Horovod world is closed first, so that the test's first call opens a new one.

    Earlier tests may have left process sets, or may have made different numbers of calls on each rank. Horovod names an
    unnamed call after a counter of its rank's calls, so unnamed calls would hang.
    """
    if real.name == "horovod":
        real.leave()
    return real
