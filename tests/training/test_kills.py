"""A job is started once per phase, and a rank is killed in that phase.

The last start, without a kill, ends with the same result as a job that was never killed.
"""

from __future__ import annotations

from tests.kills import kills, survive


def test_a_job_survives_a_kill_in_every_phase(tmp_path):
    survive(tmp_path, kills(0), "--backend", "torch")
