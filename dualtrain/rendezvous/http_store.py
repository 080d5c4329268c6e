"""The small key-value server at which Horovod's processes find each other when no horovodrun has started one.

Horovod's Gloo controller speaks plain HTTP: PUT /scope/key, GET /scope/key (404 until it is there), DELETE
/scope/rank when done. Its own server (``RendezvousServer``) listens on every interface, and forgets keys of one scope
when another ends (so a second start on the same server can hang); this one listens on one address and lives for one
start.

Horovod sends no password. But it takes what we say of the address for the beginning of a URL, so the secret travels in
the path: in front of every key, where all who ask without it get a 403.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds for the next words of a connection
    server: HttpStore

    def do_GET(self) -> None:
        if self._knows_the_secret():
            value = self.server.values.get(self.path)
            self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        if self._knows_the_secret():
            self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        if self._knows_the_secret():
            self._answer(200, b"")

    def _knows_the_secret(self) -> bool:
        said = self.path.encode()[: len(self.server.beginning)]
        if hmac.compare_digest(said, self.server.beginning):
            return True
        self.close_connection = True  # a body that was not read would be taken for the next request
        self._answer(403, b"")
        return False

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


class HttpStore(ThreadingHTTPServer):
    """Serves until it is closed, on a free port of one address."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__((address, 0), _Handler)
        self._secret = secrets.token_hex(32)
        self.beginning = f"/{self._secret}:{self.port}/".encode()
        # It looks so many seconds apart for whether it shall end: ``close`` waits for that.
        serve = partial(self.serve_forever, poll_interval=0.05)
        threading.Thread(target=serve, name="dualtrain-http-store", daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller who hangs up is nobody's concern."""

    @property
    def place(self) -> str:
        """What Horovod is to be told for the server's address, which it puts ":port/scope/key" behind."""
        return f"{self.server_address[0]!s}:{self.port}/{self._secret}"

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stops listening; blocks for a moment."""
        self.shutdown()
        self.server_close()
