"""A job under two agents of torchrun on one host; its ranks and its second agent are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forked import run
from tests.launch.jobs import QUICK, processes, rank_of, summary
from tests.pool import ROOT, free_port

KILLS = 8  # number of killed ranks, four of each agent
SECONDS = 90.0  # for each wait, on a busy machine; three times as long for the end of a run
FLAGS = ["--virtual-ranks", "2", "--global-batch-size", "16", "--lr", "0.01", "--epochs", "40", "--checkpoint-every", "5"]
FLAGS += ["--log-every", "1", "--timeout", "30"]

#: Environment of the agents. Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE, an agent may keep the MASTER_PORT of an earlier
#: rendezvous round after another agent has got group rank 0.
AGENT_ENV = {**QUICK, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Agent:
    """One of the two agents. Each starts one rank; the first agent serves the rendezvous."""

    def __init__(self, is_first: bool, port: int, folder: Path, log: Path) -> None:
        rendezvous = f"is_host={int(is_first)},last_call_timeout=3,join_timeout=60,keep_alive_interval=1"
        command = ["torchrun", "--nnodes=1:2", "--nproc_per_node=1", f"--max-restarts={2 * KILLS}", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=restarts", f"--rdzv-conf={rendezvous}"]
        command += ["--monitor-interval=0.1", "-m", "dualtrain.main", *FLAGS, "--run-dir", str(folder), "--resume", "auto"]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=AGENT_ENV, stdout=output, stderr=output)
        self._folder = folder

    def rank_pid(self) -> int | None:
        """Return the process id of the agent's rank, if it runs."""
        found = [
            pid for pid in processes(str(self._folder)) if rank_of(pid) is not None and _parent(pid) == self.process.pid
        ]
        return found[0] if found else None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    with suppress(OSError):
        lines = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == kind]
    return []


def progress(folder: Path) -> int:
    with suppress(OSError):
        return int((folder / ".progress").read_text().split()[1])
    return 0


@pytest.mark.timeout(900)  # enough for one start and ten restarts, each of some seconds on an idle machine
def test_a_job_of_two_agents_survives_killed_ranks_and_a_killed_agent(folder, tmp_path, capsys):
    log, port = tmp_path / "log", free_port()

    def wait(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (what, log.read_text())
            assert not (folder / "summary.json").exists(), f"the run has ended before {what}: it needs more steps"
            time.sleep(0.02)

    def starts_on(ranks: int) -> int:
        return log.read_text().count(f" on {ranks} × cpu as 2 virtual ranks")

    def trains(count: int, ranks: int, earlier_starts: int = 0) -> bool:
        """Return whether there are ≥ ``count`` recoveries, and > ``earlier_starts`` starts on ``ranks`` ranks."""
        return len(events(folder, "recovery")) >= count and starts_on(ranks) > earlier_starts

    agents = [Agent(is_first, port, folder, log) for is_first in (True, False)]
    try:
        for number in range(KILLS):
            # Wait for new steps: three failures after the same step would end the run.
            wait(lambda: progress(folder) >= 10 * number + 1, "progress")  # noqa: B023
            pids: list[int] = []
            wait(lambda: pids.extend(filter(None, [agents[number % 2].rank_pid()])) or pids, "a rank")  # noqa: B023
            earlier = starts_on(2)
            os.kill(pids[0], signal.SIGKILL)
            wait(lambda: trains(number + 1, 2, earlier), f"recovery {number + 1}")  # noqa: B023
        # The killed agent's rank gets SIGTERM, so both ranks save and exit. Then the other agent starts one rank.
        agents[1].kill()
        wait(lambda: trains(KILLS + 1, 1), "the recovery with one rank")
        earlier = starts_on(2)
        # When a new agent joins, the running rank gets SIGTERM, saves and exits. Then each agent starts a rank.
        agents[1] = Agent(False, port, folder, log)
        wait(lambda: trains(KILLS + 2, 2, earlier), "the recovery with two ranks")
        assert [agent.process.wait(3 * SECONDS) for agent in agents] == [0, 0], log.read_text()
    finally:
        for agent in agents:
            agent.kill()
        for pid in processes(str(folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    found = summary(folder)
    seconds = sorted(one["seconds"] for one in found["recoveries"])
    with capsys.disabled():
        print(f"\n{len(seconds)} recoveries: median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s")
    command = ("-m", "dualtrain.main", *FLAGS, "--run-dir", tmp_path / "whole")
    assert run(command, tmp_path / "output", seconds=3 * SECONDS).returncode == 0
    whole = summary(tmp_path / "whole")
    for name in ("weights_sha256", "steps", "val_loss", "best"):
        assert found[name] == whole[name], name
