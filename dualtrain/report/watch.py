"""HTTP server of the report, on the loopback interface. The page reloads itself while it is open.

Other users of the host can connect to the port too. Therefore the address contains a secret; other paths get status 403.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dualtrain.errors import UserError
from dualtrain.report.report_page import page
from dualtrain.report.runs import read_runs

_FILES = ("attempts.jsonl", "config.json", "metrics.jsonl", "summary.json")


class _Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds to wait for a request
    server: ReportServer

    def do_GET(self) -> None:
        if not hmac.compare_digest(self.path.encode(errors="replace"), self.server.path.encode()):
            return self._answer(403)
        # Compute the version before reading the files: if a file changes meanwhile, the next request finds a new version.
        version = self.server.version()
        if self.headers.get("If-None-Match") == version:
            return self._answer(304, version=version)
        return self._answer(200, self.server.render().encode(), version)

    def _answer(self, status: int, body: bytes = b"", version: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing. The base class would write to standard error."""


class ReportServer(ThreadingHTTPServer):
    """HTTP server of one page on 127.0.0.1.

    Args:
        folders: the runs' folders.
        port: TCP port; 0 for a free one.
        render: function that returns the page.

    Raises:
        OSError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[str], port: int, render: Callable[[], str]) -> None:
        self.render = render
        self._files = [Path(folder, name) for folder in folders for name in _FILES]
        self.path = f"/{secrets.token_hex(32)}/"
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a failed request. In most cases, the client has disconnected."""

    @property
    def url(self) -> str:
        """Address of the page, with the secret."""
        return f"http://127.0.0.1:{self.server_address[1]}{self.path}"

    def version(self) -> str:
        """Return an ETag that changes when one of the ``_FILES`` of a run changes."""
        found = [_state(path) for path in self._files]
        return f'"{hashlib.sha256(repr(found).encode()).hexdigest()[:32]}"'


def _state(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def server_of(folders: Sequence[str], port: int) -> ReportServer:
    """Return a server of the report. Runs may have no metrics yet. The caller starts and closes the server.

    Raises:
        UserError: a folder does not exist, or the port cannot be used.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(f"{folder!r} is not a folder: start the run first, or name its folder (--run-dir of the run)")
    try:
        return ReportServer(folders, port, lambda: page(read_runs(folders, require_metrics=False), refresh=True))
    except OSError as error:
        cure = "choose another --port, or leave it out for a free one"
        raise UserError(f"--port {port} cannot be used ({error.strerror}): {cure}") from error
