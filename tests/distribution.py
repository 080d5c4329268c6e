"""Distribution of the tests over the processes of pytest-xdist: whole files, and few messages."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadGroupScheduling


class ByFile(LoadGroupScheduling):
    """``--dist loadgroup`` with units of whole files, except for tests with the mark ``xdist_group``.

    The fixtures of a module are then set up in one process only. With single tests as units, the time that xdist takes
    would grow with the square of their number. Units are started in the order of the tests. xdist's default is to start
    units with few tests last, but a file of tests/launch has few tests and takes long.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return super()._split_scope(nodeid).partition("::")[0]


def send_fewer_messages(config: pytest.Config) -> None:
    """Don't send messages that change no output: starts of tests, and short set-ups and teardowns that passed."""
    (worker,) = (each for each in config.pluginmanager.get_plugins() if type(each).__name__ == "WorkerInteractor")
    send = worker.sendevent

    def send_if_needed(name: str, **values: Any) -> None:
        if name != "logstart" and not (name == "testreport" and _is_routine(values["data"])):
            send(name, **values)

    if config.option.verbose <= 0:
        worker.sendevent = send_if_needed


def _is_routine(report: dict[str, Any]) -> bool:
    # Durations below 5 ms are not listed by --durations either.
    passed = report["outcome"] == "passed" and report["when"] != "call" and not report["sections"]
    return passed and report["duration"] < 0.005
