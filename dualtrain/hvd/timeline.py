"""Timeline of calls: a Chrome trace (chrome://tracing, Perfetto) with the event names of Horovod's timeline.

Rank 0 writes the file. For each call except ``join``, the file shows when each rank requested it (in NEGOTIATE_…), and, if
rank 0 takes part, when rank 0 executed it. For calls that open channels or change process sets, it shows the requests only.
For a gradient that is sent in a bucket, it shows only rank 0: NEGOTIATE_ALLREDUCE until the bucket is sent, then ALLREDUCE
until the exchange ends. The file is valid JSON at any moment, even if the run is killed.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dualtrain.horovod_variables import log


class Timeline:
    """Writer of a trace file. While no file is open, nothing is written.

    If the file cannot be written, an error is logged, and the file is closed: as on Horovod, training continues.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._path = ""
        self._lines: dict[str, int] = {}  # call or gradient → index of its line in the chart
        self._activities: set[tuple[str, str]] = set()  # in progress; also kept up to date while no file is open
        self._start_time = 0.0
        self._size = 0  # bytes written so far
        self.mark_cycles = False

    @property
    def active(self) -> bool:
        """Return whether a file is open."""
        return self._file is not None

    def start(self, path: str, mark_cycles: bool) -> None:
        """Open a new file at ``path``; close the previous one first."""
        self.stop()
        with self._lock:
            self._path = path
            try:
                self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open until stop()
            except OSError as error:
                self._give_up(error)
                return
            self._lines, self.mark_cycles = {}, mark_cycles
            self._start_time = time.time()
            self._size = 0
            self._write(
                name="process_name", ph="M", pid=0, args={"start_time_since_epoch_in_micros": int(self._start_time * 1e6)}
            )
            for what, activity in sorted(self._activities):  # activities that were in progress when the file was opened
                self._write(name=activity, ph="B", pid=self._line(what))

    def stop(self) -> None:
        """Close the file, if one is open."""
        with self._lock:
            for what, activity in sorted(self._activities) if self.active else ():
                self._write(name=activity, ph="E", pid=self._line(what))
            if self._file is not None:
                try:
                    self._file.close()  # a network file system may report a full disk only now
                except OSError as error:
                    self._give_up(error)
                self._file = None

    def begin(self, what: str, activity: str) -> None:
        """Record that ``activity`` (such as ALLREDUCE) starts for the call or gradient ``what``, such as allreduce.loss.

        Do nothing if it has started already, and not ended.
        """
        with self._lock:
            if (what, activity) in self._activities:
                return
            self._activities.add((what, activity))
            if self._file is not None:
                self._write(name=activity, ph="B", pid=self._line(what))

    def end(self, what: str, activity: str) -> None:
        """Record that ``activity`` ends; do nothing if it has not started."""
        with self._lock:
            if (what, activity) not in self._activities:
                return
            self._activities.remove((what, activity))
            if self._file is not None:
                self._write(name=activity, ph="E", pid=self._line(what))

    def mark(self, what: str, rank: int) -> None:
        """Record that ``rank`` has requested the call ``what``."""
        with self._lock:
            if self._file is not None:
                self._write(name=str(rank), ph="X", pid=self._line(what), dur=0)

    def cycle(self) -> None:
        """Record that rank 0 looks for matching calls."""
        with self._lock:
            if self._file is not None and self.mark_cycles:
                self._write(name="CYCLE_START", ph="i", pid=0, s="g")

    def _line(self, what: str) -> int:
        if what not in self._lines:
            number = self._lines[what] = len(self._lines) + 1
            self._write(name="process_name", ph="M", pid=number, args={"name": what})
            self._write(name="process_sort_index", ph="M", pid=number, args={"sort_index": number})
        return self._lines[what]

    def _write(self, **event: Any) -> None:
        if self._file is None:
            return
        if event["ph"] != "M":
            event |= {"ts": int((time.time() - self._start_time) * 1e6), "tid": 0}
        # Overwrite the bracket that closes the list, and add a new one: the file is valid JSON at any moment.
        try:
            self._file.seek(max(self._size - 2, 0))
            self._file.write((",\n" if self._size else "[\n") + json.dumps(event) + "\n]")
            self._file.flush()
            self._size = self._file.tell()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("the timeline %s cannot be written (%s): training continues without it", self._path, error.strerror)
        if self._file is not None:
            with suppress(OSError):  # closing writes what is left in the buffer
                self._file.close()
            self._file = None
