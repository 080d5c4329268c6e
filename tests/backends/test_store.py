"""The store in which a job's processes find each other: its operations, and which processes it accepts."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from datetime import timedelta

import pytest
import torch.distributed as dist

from dualtrain import UserError
from dualtrain.backends.torch import _JobStore
from dualtrain.launchers import World
from dualtrain.rendezvous import hosts, meeting_point, store
from dualtrain.rendezvous.http_store import HttpStore
from dualtrain.rendezvous.reachability import check_all_reachable
from dualtrain.rendezvous.store import StoreClient, dial, listen, serve
from tests.pool import free_port

LOCAL = "127.0.0.1"


@pytest.fixture(autouse=True)
def process_ids(monkeypatch):
    """Give each call of ``serve`` or ``dial`` its own process id, as if each call came from a process of its own."""
    monkeypatch.setattr(store, "_process", lambda: secrets.token_hex(8))


@pytest.fixture
def job():
    """Yield the server of a job, and the server's port. The job has three ranks, but only rank 0 has joined."""
    server = serve(listen(LOCAL, [0], 3), 3, "the secret")
    yield server, server._listening.getsockname()[1]
    server.close()


@pytest.fixture
def join():
    """Yield a function that calls :func:`dial` for this host. Its clients are closed after the test."""
    clients = []

    def joined(ports, rank, secret="the secret", timeout=5.0, world="", size=3):
        clients.append(dial(LOCAL, ports, rank, size, secret, timeout, world))
        return clients[-1]

    yield joined
    for each in clients:
        each.close()


def is_open(port):
    """Return whether a server listens at ``port``."""
    try:
        socket.create_connection((LOCAL, port), 1.0).close()
    except (ConnectionRefusedError, ConnectionResetError):  # closed before or during this connection attempt
        return False
    return True


def closes(port):
    """Wait up to 20 s until the port is closed; return whether it is. It may close a moment after the last ``join``."""
    deadline = time.monotonic() + 20.0
    while is_open(port) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_open(port)


def test_a_client_repeats_its_request_until_the_value_is_there_or_the_wait_ends(job, join, monkeypatch):
    server, port = job
    monkeypatch.setattr(store, "_SLICE_SECONDS", 0.0)
    client, requests = join([port], 1), []
    ask = client._ask

    def counted(request):
        requests.append(request)
        if len(requests) % 3 == 0:
            server.call("set", request[1] or request[2][0], "here")
        return ask(request)

    monkeypatch.setattr(client, "_ask", counted)
    assert client.call("get", "one", wait=60.0) == "here"
    assert client.call("has", "", ["two"], wait=60.0) is True
    assert len(requests) == 6
    assert client.call("get", "three") is None


def test_a_server_that_can_start_no_thread_for_a_client_names_the_limit(job, monkeypatch):
    server, port = job

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with socket.create_connection(("127.0.0.1", port), 20.0) as client:
        client.settimeout(20.0)
        assert client.recv(1) == b""  # the server has closed the connection
    with pytest.raises(UserError, match=r"cannot serve another process: .*ulimit -u"):
        server.call("get", "key", wait=20.0)


@pytest.mark.parametrize("end", ["server", "client"])
def test_the_store_behaves_like_torchs_hash_store(job, end, join):
    server, port = job
    endpoint = server if end == "server" else join([port], 1)
    ours, theirs = _JobStore(endpoint, 5.0), dist.HashStore()
    for each in (ours, theirs):
        each.set("bytes", bytes(range(256)))
        each.set("text", "words")
    steps = [
        lambda s: s.get("bytes"),
        lambda s: s.get("text"),
        lambda s: [s.add("sum", 3), s.add("sum", -5), s.get("sum")],
        lambda s: [s.compare_set("new", "", "first"), s.compare_set("new", "other", "second"), s.get("new")],
        lambda s: [s.compare_set("new", "first", "third"), s.compare_set("none", "x", "y"), s.check(["none"])],
        lambda s: [s.check(["text", "new"]), s.check(["text", "gone"]), s.num_keys()],
        lambda s: [s.delete_key("text"), s.delete_key("text"), s.check(["text"])],
        lambda s: s.wait(["new", "sum"], timedelta(seconds=1)),
    ]
    for step in steps:
        assert step(ours) == step(theirs)
    for waits in (lambda s: s.wait(["never"], timedelta(seconds=0.1)), lambda s: _JobStore(endpoint, 0.1).get("never")):
        with pytest.raises(dist.DistStoreError, match=r"no process has set 'never' within 0.1 s"):
            waits(ours)


def test_a_wait_ends_when_another_process_sets_the_key(job, join):
    _, port = job
    clients = [join([port], rank) for rank in (1, 2)]
    setter = threading.Timer(0.2, clients[0].call, ("set", "late", "here"))
    setter.start()
    assert clients[1].call("get", "late", wait=20.0) == "here"
    setter.join()  # its call of "set" may return after the other client's "get"


def test_the_port_is_closed_when_all_ranks_have_joined(job, join):
    server, port = job
    assert is_open(port)
    clients = [join([port], rank) for rank in (1, 2)]
    assert closes(port)
    clients[0].call("set", "still", "works")
    assert clients[1].call("get", "still", wait=5.0) == server.call("get", "still") == "works"


def test_a_rank_and_a_server_with_different_secrets_refuse_each_other(job, join):
    server, port = job
    with pytest.raises(UserError, match=rf"rank 1 .*{LOCAL}:{port} .*not of this job, or has another DUALTRAIN_SECRET"):
        join([port], 1, "a guess")
    assert server.call("count") == 0
    assert isinstance(join([port], 1), StoreClient)  # rank 1 can still join


def test_the_secret_is_not_sent_and_a_proof_cannot_be_replayed(job, join):
    """An impostor records the bytes that a rank sends to it. The job's server refuses the same bytes."""
    _, port = job
    with listen(LOCAL, [0], 1) as impostor:
        said = []

        def listener():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b'{"nonce": "00"}\n')
                said.append(connection.recv(4096))
                connection.sendall(b'{"proof": "' + json.loads(said[0])["proof"].encode() + b'"}\n')

        thread = threading.Thread(target=listener)
        thread.start()
        with pytest.raises(UserError, match="not of this job"):
            join([impostor.getsockname()[1]], 1, timeout=1.0)
        thread.join()
    assert b"the secret" not in said[0]
    with socket.create_connection((LOCAL, port), 5.0) as connection, connection.makefile("rwb") as lines:
        lines.readline()
        lines.write(said[0])
        lines.flush()
        assert json.loads(lines.readline()) == {"refused": "secret"}


@pytest.mark.parametrize("answer", [b'{"refused": "buy new hosts"}', b"[]", b'"no"'])
def test_the_text_of_a_refusal_without_proof_is_not_shown(join, answer):
    with socket.create_server((LOCAL, 0)) as impostor:

        def listener():
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b'{"nonce": "00"}\n')
                connection.recv(4096)
                connection.sendall(answer + b"\n")

        thread = threading.Thread(target=listener)
        thread.start()
        with pytest.raises(UserError, match="could not meet the others") as refusal:
            join([impostor.getsockname()[1]], 1, timeout=1.0)
        thread.join()
    assert "new hosts" not in str(refusal.value)


def test_unauthenticated_peers_do_not_delay_ranks(job, join):
    _, port = job
    silent = [socket.create_connection((LOCAL, port)) for _ in range(20)]
    for request in (
        b"GET / HTTP/1.0\r\n\r\n",
        b"[]\n",
        b"\xff\n",
        b'{"rank": "x"}\n',
        b"[" * 4000 + b"\n",
        b'{"rank": Infinity}\n',
        b"x" * 5000,
    ):
        with socket.create_connection((LOCAL, port)) as loud:
            loud.sendall(request)
    client = join([port], 1)
    client.call("set", "key", "value")
    for each in silent:
        each.close()


def test_two_processes_with_the_same_rank_end_the_job(job, join):
    server, port = job
    first = join([port], 1)
    with pytest.raises(
        UserError, match=r"two processes are rank 1 \(process \d+ on .*, and process \d+ on .*each of the 3"
    ):
        join([port], 1)
    for each in (server, first):
        with pytest.raises(UserError, match="two processes are rank 1"):
            each.call("get", "host/2", wait=60.0)


def test_a_process_that_has_not_received_the_answer_may_join_again(job, join, monkeypatch):
    server, port = job
    monkeypatch.setattr(store, "_process", lambda: "the same")
    join([port], 1)._connection.socket.close()
    join([port], 1).call("set", "key", "value")
    assert server.call("get", "key") == "value"


def test_a_rank_may_join_in_two_worlds(job, join):
    _, port = job
    for world in ("0-1", "2-3"):
        join([port], 1, world=world)
    assert closes(port)


def test_a_relay_at_another_port_is_detected(job, join):
    """Relay messages between a rank and the server, without knowing the secret.

    The server refuses the rank's proof, which was computed for the relay's port.
    """
    _, port = job
    with listen(LOCAL, [0], 1) as impostor:

        def relay():
            caller, _ = impostor.accept()
            with caller, socket.create_connection((LOCAL, port)) as server:
                caller.sendall(server.recv(4096))
                server.sendall(caller.recv(4096))
                caller.sendall(server.recv(4096))

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(UserError, match="not of this job"):
            join([impostor.getsockname()[1]], 1, timeout=1.0)
        thread.join()
    join([port], 1)  # rank 1 can still join


def test_a_rank_outside_the_world_size_is_refused(job, join):
    server, port = job
    with pytest.raises(UserError, match=r"rank 3 \(process .*\) is not one of this job's 3 ranks: give every process"):
        join([port], 3)
    assert server.call("count") == 0


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_different_world_sizes_end_the_job(job, join, size):
    server, port = job
    said = rf"rank 1 \(process \d+ on .*\) was started in a world of {size}, but another process in a world of 3 \(rank 0, "
    with pytest.raises(UserError, match=said):
        join([port], 1, size=size)
    with pytest.raises(UserError, match=said):
        server.call("get", "host/1", wait=60.0)


def test_a_secret_may_have_bytes_that_are_not_utf8(join):
    port = free_port()
    server = serve(listen(LOCAL, [port], 2), 2, "\udcff")
    assert isinstance(join([port], 1, "\udcff", size=2), StoreClient)
    server.close()


def test_a_client_may_start_before_the_server(join):
    port, found = free_port(), []
    thread = threading.Thread(target=lambda: found.append(join([port], 1, "", 20.0, size=2)))
    thread.start()
    server = serve(listen(LOCAL, [port], 2), 2, "")
    thread.join()
    found[0].call("set", "key", "value")
    assert server.call("get", "key") == "value"


def test_jobs_that_try_the_same_ports_have_stores_of_their_own(join):
    base = free_port()
    ports = range(base, base + 4)
    servers = [serve(listen(LOCAL, ports, 2), 2, job) for job in ("job 1", "job 2")]
    for server, job in zip(servers, ("job 1", "job 2"), strict=True):
        join(ports, 1, job, size=2).call("set", "from", job)
        assert server.call("get", "from") == job
    assert len({server._values["from"] for server in servers}) == 2


def test_the_end_of_the_serving_process_is_reported(join):
    port = free_port()
    server = serve(listen(LOCAL, [port], 3), 3, "")
    client = join([port], 1, "")
    client._connection.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(UserError, match="the process that serves the job's store has ended"):
        _JobStore(client, 5.0).get("key")
    server.close()


def test_a_call_after_an_interrupted_call_receives_no_reply_of_the_earlier_request(job, join, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    _, port = job
    client = join([port], 1)
    # Patch only the client's connection, because the server's threads call the same method of theirs.
    monkeypatch.setattr(client._connection, "receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.call("set", "key", "value")
    monkeypatch.undo()
    with pytest.raises(OSError, match="descriptor"):
        client.call("get", "key")


def test_the_http_store_for_horovod_refuses_requests_without_the_secret():
    server = HttpStore(LOCAL)
    url = f"http://{LOCAL}:{server.port}"
    url_with_secret = f"http://{server.url_prefix}:{server.port}/scope/key"
    try:
        urllib.request.urlopen(urllib.request.Request(url_with_secret, b"value", method="PUT"), timeout=5).close()
        with urllib.request.urlopen(url_with_secret, timeout=5) as answer:
            assert answer.read() == b"value"
        for path, method in (("/scope/key", "GET"), ("/0:1/scope/key", "PUT"), ("/", "DELETE")):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(url + path, b"x", method=method), timeout=5)
        assert list(server.values.values()) == [b"value"]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("address", "host"), [("2001:db8::7", "2001:db8::7"), ("::1", "192.0.2.7"), ("192.0.2.8", "192.0.2.8")]
)
def test_rank_0_listens_at_the_given_address_unless_other_hosts_cannot_reach_it(monkeypatch, address, host):
    monkeypatch.setattr(meeting_point, "address", lambda: "192.0.2.7")
    monkeypatch.setattr(meeting_point, "listen", lambda host, ports, backlog: host)
    monkeypatch.setattr(meeting_point, "serve", lambda listening, *_: listening)
    world = World(size=2, local_size=1, rendezvous=(address, 29500))
    assert meeting_point._serve(world, address, 29500) == host


def test_a_port_that_the_user_may_not_use_is_named(monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(meeting_point, "listen", refuse)
    message = r"rank 0 may not listen at port 80 \(Permission denied\): set MASTER_PORT to a free one above 1023"
    with pytest.raises(UserError, match=message):
        meeting_point._serve(World(size=2, rendezvous=(LOCAL, 80)), LOCAL, 80)


def test_a_hosts_address_is_that_of_the_chosen_interface(monkeypatch):
    addresses = {"eth0": "192.0.2.7", "ib0": "192.0.2.8", hosts.loopback(): "127.0.0.1"}
    monkeypatch.setattr(hosts, "ipv4", addresses.get)
    monkeypatch.setattr(hosts.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(hosts, "_resolved", lambda host: "127.0.1.1" if host == "here" else host)
    monkeypatch.setattr(hosts, "_route", lambda towards: "192.0.2.9" if towards == "there" else "127.0.0.1")
    monkeypatch.setattr(hosts.socket, "if_nameindex", lambda: list(enumerate(addresses)))
    for name in hosts.OVERRIDES:
        monkeypatch.delenv(name, raising=False)
    assert hosts.address("there") == "192.0.2.9"
    assert hosts.address() == "192.0.2.7"  # eth0: the host's name and the default route give loopback addresses
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert hosts.address("there") == "192.0.2.8"


def test_a_host_with_a_loopback_address_alone_is_named_as_such():
    values = {"reach/at/1": f"{LOCAL} {free_port()}", "reach/result/1": ""}
    message = f"cannot reach the host of rank 1, whose only IPv4 address is {LOCAL}: give all hosts IPv4 addresses"
    with pytest.raises(UserError, match=message):
        check_all_reachable(World(size=2, local_size=1), ["a", "b"], values.__setitem__, values.__getitem__, None)
    assert message in values["reach/result/0"]
