"""A rank is killed in each phase of a run, once per start. The last restart ends with the result of a run without kills."""

from __future__ import annotations

from tests.kills import kills, survive


def test_a_job_survives_a_kill_in_every_phase(tmp_path):
    survive(tmp_path, kills(0), "--backend", "torch")
