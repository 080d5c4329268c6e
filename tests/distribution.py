"""Distribution of the tests over pytest-xdist's processes, in whole files, and with few messages between the processes."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling


class ByFile(LoadGroupScheduling):
    """Scheduler for ``--dist loadgroup`` whose work units are files, or groups for tests with the mark ``xdist_group``.

    The fixtures of a module are then set up in one process only. With one unit per test, the time that xdist takes would
    grow with the square of the number of tests. Units are started in the order of the tests. xdist's default is to start
    units with few tests last, but a file of tests/launch has few tests and takes long.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]


def send_fewer_messages(config: pytest.Config) -> None:
    """Suppress messages that do not affect the output.

    These are test starts, and short set-ups and teardowns that passed without output. With ``-v``, all messages are sent.
    """
    (worker,) = (each for each in config.pluginmanager.get_plugins() if type(each).__name__ == "WorkerInteractor")
    send = worker.sendevent

    def send_if_needed(name: str, **values: Any) -> None:
        if name != "logstart" and not (name == "testreport" and _is_routine(values["data"])):
            send(name, **values)

    if config.option.verbose <= 0:
        worker.sendevent = send_if_needed


def _is_routine(report: dict[str, Any]) -> bool:
    # The limit is 5 ms because pytest's --durations lists no shorter phases by default.
    passed = report["outcome"] == "passed" and report["when"] != "call" and not report["sections"]
    return passed and report["duration"] < 0.005
