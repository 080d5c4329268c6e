"""The report that is served while runs train: access, updates, and the end of the server."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from dualtrain.report import __main__ as report
from dualtrain.report.watch import ReportServer, server_of
from tests.commands.test_report import Page, make


@contextmanager
def serving(*folders: str) -> Iterator[ReportServer]:
    server = server_of(folders, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert not thread.is_alive()


def get(url: str, path: str | None = None, **headers: str) -> tuple[int, str, str | None]:
    """Return the status, the body and the ETag of a response."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        connection.request("GET", parts.path if path is None else path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["ETag"]
    finally:
        connection.close()


def test_the_page_follows_a_run_from_before_its_first_step_to_its_end(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with serving(str(folder)) as server:
        status, body, first = get(server.url)
        assert (status, "has not logged its first steps" in body) == (200, True)
        assert dict(Page(body).attributes)["html"] == {"lang": "en", "data-refresh": ""}
        assert get(server.url, **{"If-None-Match": str(first)}) == (304, "", first)
        (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 7, "loss": 0.5}\n{"kind": "st')
        status, body, second = get(server.url, **{"If-None-Match": str(first)})
        assert (status, "M7,-0.5" in body, "not finished" in body) == (200, True, True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('ep", "step": 8, "loss": 0.25}\n')
        status, body, third = get(server.url, **{"If-None-Match": str(second)})
        assert (status, "M7,-0.5 8,-0.25" in body) == (200, True)
        whole = Path(make(tmp_path / "whole"))
        for name in ("config.json", "summary.json"):
            (whole / name).rename(folder / name)
        status, body, fourth = get(server.url, **{"If-None-Match": str(third)})
        assert (status, ">finished<" in body) == (200, True)
        assert len({first, second, third, fourth}) == 4


def test_the_page_is_served_only_to_requests_with_the_secret(tmp_path):
    with serving(make(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        secret = urlsplit(server.url).path
        assert len(secret) == 66
        for path in ("/", "/favicon.ico", secret[:-2] + "/", secret[:-1], secret + "x", f"/{'0' * 64}/", secret + "%00"):
            assert get(server.url, path) == (403, "", None)
        assert get(server.url)[0] == 200
    with serving(make(tmp_path / "other")) as server:
        assert urlsplit(server.url).path != secret


def test_the_server_still_answers_after_clients_that_send_no_request_or_read_no_answer(tmp_path, capfd):
    with serving(make(tmp_path / "run")) as server:
        address = server.server_address[:2]
        for sent in (b"", b"GET / HTTP/1.1\r\nHost", f"GET {server.path} HTTP/1.0\r\n\r\n".encode()):
            with socket.create_connection(address, timeout=10) as client:
                client.sendall(sent)
        assert get(server.url)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_run_whose_metrics_are_removed_is_shown_as_not_begun(tmp_path):
    folder = Path(make(tmp_path / "run"))
    with serving(str(folder)) as server:
        (folder / "metrics.jsonl").unlink()
        (folder / "config.json").write_text("cut o")
        assert "has not logged its first steps" in get(server.url)[1]


def test_the_address_is_printed_and_ctrl_c_ends_the_server(tmp_path, monkeypatch, capsys):
    def interrupted(server: ReportServer) -> None:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        raise KeyboardInterrupt

    monkeypatch.setattr(ReportServer, "serve_forever", interrupted)
    assert report.main([make(tmp_path / "run"), "--watch"]) == 130
    said = capsys.readouterr()
    assert said.out.startswith("http://127.0.0.1:")
    assert said.err == ""
    assert not list(tmp_path.rglob("report.html"))


def test_the_user_may_choose_a_port_and_a_port_in_use_is_refused(tmp_path, capsys):
    run = make(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert report.main([run, "--watch", "--port", str(port)]) == 2
        assert f"--port {port} cannot be used (Address already in use)" in capsys.readouterr().err
    with server_of([run], port) as server:
        assert server.server_address == ("127.0.0.1", port)


def test_the_version_of_the_page_changes_if_a_file_is_replaced_by_one_of_the_same_length(tmp_path):
    folder = Path(make(tmp_path / "run"))
    with server_of([str(folder)], 0) as server:
        before = server.version()
        assert server.version() == before
        status = (folder / "config.json").stat()
        (folder / "new").write_bytes(b" " * status.st_size)
        os.utime(folder / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        (folder / "new").rename(folder / "config.json")
        assert server.version() != before
