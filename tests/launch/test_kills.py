"""Kills in every phase of two jobs: one with Horovod, one with virtual ranks.

tests/training/test_kills.py does the same with the torch backend and without virtual ranks. In each phase that both ranks
have, the two files kill different ranks.
"""

from __future__ import annotations

import pytest

from tests.conftest import require_horovod
from tests.kills import kills, survive


@pytest.mark.parametrize("flags", [["--backend", "horovod"], ["--virtual-ranks", "3", "--transport", "native"]])
def test_a_job_survives_a_kill_in_every_phase(flags, tmp_path):
    if "horovod" in flags:
        require_horovod()
    survive(tmp_path, kills(1), *flags)
