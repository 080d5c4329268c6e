"""The key-value store in which a job's processes find each other: one process serves it, all others call that one.

torch's own ``TCPStore`` lets anyone read and write who reaches its port, for as long as the job runs. Here, both ends
prove that they know the job's secret before a word is taken from the other, and nobody listens any more once all have
joined; their connections stay. Values are text.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

from dualtrain.backends.lines import LINE_BYTES, Line
from dualtrain.errors import UserError

_SLICE_SECONDS = 1.0  # a wait is asked for again after this, so that threads which share a connection take turns
_FAREWELL_SECONDS = 3.0  # that others have to hear why the job ends, and hang up
_STRANGERS = 64  # that may have called and not said who they are, beside the job's own processes
_GREETING_BYTES = 4096
_CALL_SECONDS = 5.0  # for one attempt to reach the server


class Store(Hashable, Protocol):
    """What both ends offer. A process that is told that the job is broken raises UserError from every call."""

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0) -> Any:
        """One operation; blocks for ``wait`` seconds at most, if it is one that waits.

        ``"set"`` a value; ``"get"`` one, or None if there is none in time; ``"add"`` a number to one and get the sum;
        ``"swap"`` a [value, new value] if it has the first, or is not there and that is "", and get the one it has then;
        ``"drop"`` a key; ``"has"`` whether all keys of a list are there in time; ``"count"`` them.
        """
        ...

    def close(self) -> None:
        """Lets nobody in any more; a process that called hangs up."""
        ...


class StoreServer:
    """Serves until its process ends, and lets in ``size`` processes, each with its own rank.

    Args:
        listening: a bound socket that listens; it is closed when all have joined.
        size: how many processes the job has.
        secret: what all of them know.
    """

    def __init__(self, listening: socket.socket, size: int, secret: str) -> None:
        self._listening = listening
        self._size = size
        self._secret = secret
        self._values: dict[str, str] = {}
        self._places: dict[tuple[str, int], tuple[str, str]] = {}  # of a world's name and a rank: process, and who that is
        self._connected = 0
        self._greeted = 0  # of these, that have not shown yet who they are
        self._closed = False
        self._broken: str | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, name="dualtrain-store", daemon=True).start()

    def join(self, rank: int, world: str, process: str, who: str) -> str | None:
        """Notes a process, which may come again if it has not heard the answer; gives the reason if it must not join."""
        with self._changed:
            if not 0 <= rank < self._size:
                return f"rank {rank} ({who}) is none of this job's {self._size}: give every process the same world size"
            other, other_who = self._places.setdefault((world, rank), (process, who))
            if other != process:
                self._broken = (
                    f"two processes are rank {rank} ({other_who}, and {who}): "
                    f"give each of the {self._size} its own rank, from 0 to {self._size - 1}"
                )
                self._changed.notify_all()
                return self._broken
        return None

    def close_if_complete(self) -> None:
        """Lets nobody in any more once all have joined."""
        with self._changed:
            complete = len({process for process, _ in self._places.values()}) >= self._size
        if complete:
            self.close()

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0, *, remote: bool = False) -> Any:
        """As :class:`Store` says."""
        with self._changed:
            if what in ("get", "has"):
                keys = [key] if what == "get" else value
                self._changed.wait_for(lambda: self._broken or all(each in self._values for each in keys), wait)
            if self._broken:
                if not remote:
                    # This process ends now, and the store with it: the others hear of the reason first.
                    self._changed.wait_for(lambda: self._connected == 0, _FAREWELL_SECONDS)
                raise UserError(self._broken)
            result = self._do(what, key, value)
            self._changed.notify_all()
            return result

    def close(self) -> None:
        """As :class:`Store` says; who has joined stays connected."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listening.close()

    def _do(self, what: str, key: str, value: Any) -> Any:
        values = self._values
        if what == "set":
            values[key] = str(value)
        elif what == "add":
            values[key] = str(int(values.get(key, "0")) + int(value))
            return int(values[key])
        elif what == "swap":
            expected, new = value
            if values.get(key, "") == expected:
                values[key] = str(new)
            return values.get(key, expected)
        elif what == "drop":
            return values.pop(key, None) is not None
        elif what == "has":
            return all(each in values for each in value)
        elif what == "count":
            return len(values)
        elif what == "get":
            return values.get(key)
        else:
            raise ValueError(f"the store has no operation {what!r}")
        return None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # short of descriptors, perhaps: a stranger who holds them goes within seconds
                continue
            with self._changed:
                welcome = self._greeted < _STRANGERS + self._size
                self._greeted += welcome
                self._connected += welcome
            if not welcome:
                connection.close()
                continue
            # A thread for each, so that a stranger who says nothing keeps nobody waiting.
            threading.Thread(target=self._serve, args=(connection,), name="dualtrain-store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            # What a stranger says may make anything of this fail.
            with connection, suppress(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
                self._talk(connection)
        finally:
            with self._changed:
                self._connected -= 1
                self._changed.notify_all()

    def _talk(self, connection: socket.socket) -> None:
        try:
            line = Line(connection, rank=-1, longest=_GREETING_BYTES)
            self._welcome(line)
        finally:
            with self._changed:
                self._greeted -= 1
        line.longest = LINE_BYTES
        connection.settimeout(None)
        while True:
            for what, key, value, wait in line.receive():
                line.send(self._answer(what, key, value, wait))

    def _answer(self, what: str, key: str, value: Any, wait: float) -> dict[str, Any]:
        try:
            return {"value": self.call(what, key, value, wait, remote=True)}
        except UserError as error:
            return {"broken": str(error)}

    def _welcome(self, line: Line) -> None:
        """Lets a process in that proves to know the secret; raises ValueError, or what its answer makes fail, if not."""
        ours = secrets.token_hex(16)
        line.send({"store": ours})
        [hello] = line.receive()
        rank, words = int(hello["rank"]), (ours, str(hello["nonce"]), line.connection.getsockname()[1])
        if not hmac.compare_digest(str(hello["proof"]), _proof(self._secret, "caller", rank, *words)):
            line.send({"refused": "secret"})
            raise ValueError("not of this job")
        refusal = self.join(rank, str(hello["world"]), str(hello["process"]), str(hello["who"]))
        line.send({"refused": refusal} if refusal else {"proof": _proof(self._secret, "server", rank, *words)})
        if refusal:
            raise ValueError(refusal)
        self.close_if_complete()


class StoreClient:
    """A connection to the job's server. May be shared by threads."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._turn = threading.Lock()

    def call(self, what: str, key: str = "", value: Any = None, wait: float = 0.0) -> Any:
        """As :class:`Store` says. Raises OSError when the process that serves has gone."""
        deadline = time.monotonic() + wait
        while True:
            left = max(0.0, deadline - time.monotonic())
            answer = self._ask([what, key, value, min(left, _SLICE_SECONDS)])
            if "broken" in answer:
                raise UserError(answer["broken"])
            if what not in ("get", "has") or answer["value"] not in (None, False) or left <= _SLICE_SECONDS:
                return answer["value"]

    def close(self) -> None:
        """As :class:`Store` says."""
        self._line.connection.close()

    def _ask(self, request: list[Any]) -> dict[str, Any]:
        with self._turn:
            self._line.send(request)
            [answer] = self._line.receive()
            return dict(answer)


class _OtherJobError(Exception):
    """What listens there does not know this job's secret."""


def serve(listening: socket.socket, size: int, secret: str, world: str = "") -> StoreServer:
    """Serves there, as rank 0 of ``world``. Does not block."""
    server = StoreServer(listening, size, secret)
    server.join(0, world, _process(), _who())
    server.close_if_complete()
    return server


def listen(host: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """A socket that listens on the first free one of ``ports`` (0: any) at one address. Raises OSError if there is none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    for port in ports:
        try:
            return socket.create_server((str(where[0]), port), family=family, backlog=max(backlog, 16))
        except OSError as error:
            if port == ports[-1]:
                raise error
    raise ValueError("no ports")


def dial(host: str, ports: Sequence[int], rank: int, secret: str, timeout: float, world: str = "") -> StoreClient:
    """Joins, as ``rank`` of ``world``, the job that is served at one of ``ports``; tries for ``timeout`` seconds.

    It may start later than this process.

    Raises:
        UserError: nobody serves there, or not this job, or it has no place for this rank.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    while True:
        reasons, final = [], False
        for port in ports:
            try:
                return StoreClient(_greet((host, port), rank, world, secret, deadline))
            except UserError:
                raise  # refused: that does not change
            except _OtherJobError:
                reasons.append("what listens there is not of this job: DUALTRAIN_SECRET must be the same for all its ranks")
                final = len(ports) == 1  # else this job's may be at the next one
            except (OSError, ValueError, KeyError, TypeError) as error:
                reasons.append(getattr(error, "strerror", None) or str(error))
        if final or time.monotonic() > deadline:
            within = "" if final else f" within {timeout:g} s"
            raise UserError(
                f"rank {rank} could not meet the others at {host}:{ports[0]}{within} ({reasons[0]}): check that the "
                "address is rank 0's, that the port is open, and that all processes were started"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _greet(where: tuple[str, int], rank: int, world: str, secret: str, deadline: float) -> Line:
    connection = socket.create_connection(where, min(_CALL_SECONDS, max(0.1, deadline - time.monotonic())))
    try:
        line = Line(connection, rank=0)
        [greeting] = line.receive()
        words = str(greeting["store"]), secrets.token_hex(16), connection.getpeername()[1]
        proof = _proof(secret, "caller", rank, *words)
        place = {"rank": rank, "world": world, "process": _process(), "who": _who()}
        line.send({**place, "nonce": words[1], "proof": proof})
        [answer] = line.receive()
        if answer.get("refused") not in (None, "secret"):
            raise UserError(str(answer["refused"]))
        if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "server", rank, *words)):
            raise _OtherJobError
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return line


def _proof(secret: str, end: str, rank: int, ours: str, theirs: str, port: int) -> str:
    """What only who knows the secret can say, of this one conversation.

    The port is part of it: who listens at another one cannot pass on what the two ends say to each other.
    """
    return hmac.new(secret.encode(), f"{end} {rank} {ours} {theirs} {port}".encode(), "sha256").hexdigest()


@cache
def _process() -> str:
    """This process's name for itself, and nobody else's."""
    return secrets.token_hex(8)


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
