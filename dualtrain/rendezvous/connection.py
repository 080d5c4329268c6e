"""An authenticated TCP connection between two processes of a job, for JSON messages, one per line.

In the handshake, each end proves by HMAC that it knows the job's secret, without sending the secret over the connection.
Other messages follow only after both proofs. The control channel consists of such connections, one between rank 0 and each
other rank.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dualtrain.differences import ranks_in_words
from dualtrain.errors import BackendError, UserError

MESSAGE_BYTES = 1 << 24
_HANDSHAKE_BYTES = 4096
_SECONDS = 5.0  # for one send or receive
_WRONG_SECRET = "secret"
_NETWORK = {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}


class UnauthenticatedError(ValueError):
    """The peer did not prove that it knows this job's secret, or ``admit`` refused it."""


class Connection:
    """One end of a connection. :meth:`accept` and :meth:`dial` return authenticated connections.

    Attributes:
        socket: the TCP socket. A send or receive on it fails after 5 s, unless the owner sets a different timeout.
        rank: the peer's rank; :meth:`dial` assumes that it is 0.
        address: the peer's IP address.
    """

    def __init__(self, connected: socket.socket, rank: int, max_bytes: int = MESSAGE_BYTES) -> None:
        self.socket = connected
        self.rank = rank
        self.address = str(connected.getpeername()[0])
        self._max_bytes = max_bytes
        self._unread = b""
        self._sending = threading.Lock()
        connected.settimeout(_SECONDS)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Keep-alive probes: a host cut off from the network counts as failed within 10 s.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 9000)):
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @classmethod
    def accept(
        cls,
        accepted: socket.socket,
        secret: str,
        admit: Callable[[int, Mapping[str, Any]], str | None] = lambda rank, hello: None,
    ) -> Connection:
        """Authenticate a peer that has connected. Blocks for 5 s at most per message, however slowly its bytes arrive.

        Args:
            accepted: the socket; the caller closes it on an error.
            secret: known to all processes of the job.
            admit: called with the authenticated peer's rank and first message; returns a reason to refuse it, or ``None``.

        Raises:
            UnauthenticatedError: the peer does not know the secret, or was refused.
            OSError: the connection ended or timed out.
            Exception: whatever ``admit`` raises.
        """
        connection = cls(accepted, rank=-1, max_bytes=_HANDSHAKE_BYTES)
        nonce = secrets.token_hex(16)
        connection.send({"nonce": nonce})
        try:
            hello = connection.receive_one(time.monotonic() + _SECONDS)
            accepted.settimeout(_SECONDS)
            connection.rank = int(hello["rank"])
            facts = connection.rank, nonce, str(hello["nonce"]), int(accepted.getsockname()[1])
            genuine = hmac.compare_digest(str(hello["proof"]), _proof(secret, "client", *facts))
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise UnauthenticatedError("not a message of this protocol") from error
        if not genuine:
            connection.send({"refused": _WRONG_SECRET})
            raise UnauthenticatedError("not of this job")
        refusal = admit(connection.rank, hello)
        answer = {"proof": _proof(secret, "server", *facts)}
        connection.send(answer if refusal is None else {**answer, "refused": refusal})
        if refusal is not None:
            raise UnauthenticatedError(refusal)
        connection._max_bytes = MESSAGE_BYTES
        return connection

    @classmethod
    def dial(
        cls, address: tuple[str, int], rank: int, secret: str, timeout: float, fields: Mapping[str, object] | None = None
    ) -> Connection:
        """Connect to ``address`` as ``rank`` and authenticate both ends. Blocks.

        Args:
            address: host and port of a process that calls :meth:`accept`.
            rank: this process's rank.
            secret: known to all processes of the job.
            timeout: the longest wait, in seconds, of the attempt to connect (for each IP address of the host), and of each
                send and receive in the handshake.
            fields: further fields of the first message, for the other end's ``admit``.

        Raises:
            UserError: the other end refuses this process; the message is the reason.
            UnauthenticatedError: the other end does not know the secret.
            OSError: the connection failed, ended or timed out.
            ValueError, TypeError, LookupError: the other end uses a different protocol.
        """
        connected = socket.create_connection(address, timeout)
        try:
            connection = cls(connected, rank=0)
            challenge = connection.receive_one(time.monotonic() + timeout)
            facts = rank, str(challenge["nonce"]), secrets.token_hex(16), int(connected.getpeername()[1])
            hello = {**(fields or {}), "rank": rank, "nonce": facts[2], "proof": _proof(secret, "client", *facts)}
            connected.settimeout(timeout)
            connection.send(hello)
            answer = dict(connection.receive_one(time.monotonic() + timeout))
            if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "server", *facts)):
                raise UnauthenticatedError("not of this job")
            if "refused" in answer:
                raise UserError(str(answer["refused"]))
        except BaseException:
            connected.close()
            raise
        connected.settimeout(_SECONDS)
        return connection

    def send(self, message: Any) -> None:
        """Send one message; block while the peer's buffers are full. May be called by several threads.

        Raises:
            OSError: the connection ended or timed out.
        """
        data = frame(message)
        with self._sending:
            self.socket.sendall(data)

    def receive(self) -> list[Any]:
        """Return the messages that have arrived; block until there is one.

        Raises:
            OSError: the connection ended or timed out.
            ValueError: a message is not JSON, or too long.
        """
        self._read_line()
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def receive_one(self, deadline: float | None = None) -> Any:
        """Return the next message. Blocks, at most until ``time.monotonic()`` is ``deadline``; raises as :meth:`receive`.

        If a deadline is given, this method changes the socket's timeout.
        """
        self._read_line(deadline)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def buffered(self) -> list[Any]:
        """Return messages that were read together with the handshake: a selector cannot report them. Does not block."""
        return self.receive() if b"\n" in self._unread else []

    def _read_line(self, deadline: float | None = None) -> None:
        while b"\n" not in self._unread:
            if deadline is not None:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the peer has closed the connection")
            self._unread += data
            if len(self._unread) > self._max_bytes:
                raise ValueError("a message is too long")


def frame(message: Any) -> bytes:
    """Return the bytes in which a message is sent."""
    return json.dumps(message).encode() + b"\n"


def _proof(secret: str, end: str, rank: int, server_nonce: str, client_nonce: str, port: int) -> str:
    """Return an HMAC that only a holder of the secret can compute, and that is valid for one handshake only.

    The HMAC includes the port of the accepting end. So a process at another port cannot forward the proof of one end to the
    other end.
    """
    facts = f"{end} {rank} {server_nonce} {client_nonce} {port}"
    return hmac.new(secret.encode(errors="surrogateescape"), facts.encode(), "sha256").hexdigest()


def cut_off(error: Exception) -> bool:
    """Return whether a connection ended because a host or the network failed, rather than because the peer exited."""
    return isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno in _NETWORK)


class Ranks(Protocol):
    """Ranks, such as those of a connected backend, that can broadcast a small object."""

    timeout: float  # seconds

    @property
    def rank(self) -> int:
        """This process's rank."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def broadcast_object(self, obj: Any = None, root: int = 0, name: str | None = None) -> Any:
        """Return rank ``root``'s ``obj`` on every rank. Collective; blocks."""
        ...


def open_control_channel(ranks: Ranks, address: str, name: str) -> list[Connection]:
    """Connect every rank to rank 0. Return this rank's connections: size - 1 on rank 0, one elsewhere. Collective; blocks.

    Args:
        ranks: broadcasts the address and the secret.
        address: rank 0's address on the interface through which the other ranks reach it.
        name: shown in errors; also the name of the broadcast.

    Raises:
        BackendError: a rank did not connect within the timeout, or rank 0 cannot be reached or cannot listen at
            ``address``.
    """
    if ranks.size == 1:
        return []
    return _accept_all(ranks, address, name) if ranks.rank == 0 else [_dial_rank_zero(ranks, name)]


def _accept_all(ranks: Ranks, address: str, name: str) -> list[Connection]:
    """Do rank 0's part of :func:`open_control_channel`. After an error, close the connections that were accepted."""
    connections: dict[int, Connection] = {}
    try:
        _accept_each(ranks, address, name, connections)
    except BaseException:
        for connection in connections.values():
            connection.socket.close()
        raise
    return list(connections.values())


def _accept_each(ranks: Ranks, address: str, name: str, connections: dict[int, Connection]) -> None:
    """Add a connection to ``connections`` for each rank but rank 0."""
    secret = secrets.token_hex(32)
    try:
        server = socket.create_server((address, 0), backlog=ranks.size)
    except OSError as error:
        reason = f"{name}: rank 0 cannot listen at {address} ({error})"
        ranks.broadcast_object({"failed": reason}, name=name)  # the other ranks wait for the address
        raise BackendError(reason) from error
    with server:
        deadline = time.monotonic() + ranks.timeout
        ranks.broadcast_object({"at": server.getsockname()[:2], "secret": secret}, name=name)
        while len(connections) < ranks.size - 1:
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise TimeoutError  # unauthenticated peers must not prolong the wait
                server.settimeout(left)
                accepted, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, ranks.size)) - set(connections))
                raise BackendError(
                    f"{name}: {ranks_in_words(missing)} did not connect to rank 0 within {ranks.timeout:g} s"
                ) from None
            try:
                connection = Connection.accept(accepted, secret)
            except (OSError, UnauthenticatedError):
                accepted.close()
                continue
            if (earlier := connections.pop(connection.rank, None)) is not None:
                earlier.socket.close()
            connections[connection.rank] = connection


def _dial_rank_zero(ranks: Ranks, name: str) -> Connection:
    """Do another rank's part of :func:`open_control_channel`."""
    where = ranks.broadcast_object(name=name)
    if "failed" in where:
        raise BackendError(where["failed"])
    try:
        return Connection.dial(tuple(where["at"]), ranks.rank, where["secret"], ranks.timeout)
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise BackendError(f"{name}: rank {ranks.rank} cannot reach rank 0 at {where['at']} ({error})") from error
