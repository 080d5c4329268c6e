"""Key-value server at which Horovod's processes find each other if horovodrun has not started its own server.

Horovod's Gloo controller speaks plain HTTP: PUT /scope/key, GET /scope/key (404 until the key is set), DELETE
/scope/rank when done. Horovod's own server (``RendezvousServer``) listens on every interface. When all ranks have left one
scope, it forgets which ranks have left the other scopes, so a second start on the same server can hang.
:class:`HttpStore` listens on one address, and serves one start of Horovod, or the creation of one process set. A DELETE
removes nothing from it.

Horovod sends no password, but its URLs begin with the value of HOROVOD_GLOO_RENDEZVOUS_ADDR. So this value contains a
secret as a part of the path, in front of every key. A request without the secret is answered with status 403.
"""

from __future__ import annotations

import hmac
import secrets
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from dualtrain.processes import start_thread


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # seconds to wait for the next request of a connection
    server: HttpStore

    def do_GET(self) -> None:
        if self._authenticate():
            value = self.server.values.get(self.path)
            self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        if self._authenticate():
            self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, b"")

    def do_DELETE(self) -> None:
        if self._authenticate():
            self._answer(200, b"")

    def _authenticate(self) -> bool:
        """Return whether the request contains the secret. If not, answer it with status 403."""
        given = self.path.encode()[: len(self.server.path_prefix)]
        if hmac.compare_digest(given, self.server.path_prefix):
            return True
        self.close_connection = True  # a body that was not read would be parsed as the next request
        self._answer(403, b"")
        return False

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: overrides the base class, which writes to standard error."""


class HttpStore(ThreadingHTTPServer):
    """Key-value server on a free port of one address. Serves until :meth:`close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str) -> None:
        self.values: dict[str, bytes] = {}
        super().__init__((address, 0), _Handler)
        self._secret = secrets.token_hex(32)
        self.path_prefix = f"/{self._secret}:{self.port}/".encode()
        # ``close`` waits for up to one poll interval.
        serve = partial(self.serve_forever, poll_interval=0.05)
        start_thread(serve, "dualtrain-http-store")

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore failed requests, such as those of clients that disconnect."""

    @property
    def url_prefix(self) -> str:
        """Value for HOROVOD_GLOO_RENDEZVOUS_ADDR. Horovod appends ":port/scope/key" to it."""
        return f"{self.server_address[0]!s}:{self.port}/{self._secret}"

    @property
    def port(self) -> int:
        """TCP port of the server."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stop the server. Blocks for one poll interval at most."""
        self.shutdown()
        self.server_close()
