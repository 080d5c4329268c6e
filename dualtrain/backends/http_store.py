"""The small key-value server at which Horovod's processes find each other when no horovodrun has started one.

Horovod's Gloo controller speaks plain HTTP: PUT /scope/key, GET /scope/key (404 until it is there), DELETE
/scope/rank when done. Its own server (``RendezvousServer``) listens on every interface, and forgets keys of one scope
when another ends (so a second start on the same server can hang); this one listens on one address and lives for one
start.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpStore

    def do_GET(self) -> None:
        value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def do_DELETE(self) -> None:
        self._answer(200, b"")

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
        threading.Thread(target=self.serve_forever, name="dualtrain-http-store", daemon=True).start()

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return int(self.server_address[1])

    def close(self) -> None:
        """Stops listening; blocks for a moment."""
        self.shutdown()
        self.server_close()
