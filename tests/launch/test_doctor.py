"""The doctor under horovodrun, with Gloo and with MPI; tests/commands/ tests the doctor on forked ranks."""

from __future__ import annotations

import pytest

from tests.commands.test_doctor import assert_that_both_work
from tests.conftest import require_horovod
from tests.launch.jobs import run


@pytest.mark.parametrize("controller", ["--gloo", "--mpi"])
def test_two_ranks_reach_each_other_on_both_backends(controller):
    require_horovod()
    end = run(["horovodrun", controller, "-np", "2", "python", "-m", "dualtrain.doctor"])
    assert end.returncode == 0, end.stderr
    assert_that_both_work(end.stdout, "horovod")
