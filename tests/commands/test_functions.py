"""``dualtrain.run``, and dualtrain's ``horovod.run``: results, failures, refusals, and the end of all processes."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dualtrain
from dualtrain import BackendError, RankFailedError, UserError
from dualtrain.functions import children, horovod_run, run
from dualtrain.functions.outcome import outcome_of
from dualtrain.functions.payload import dumps, pickled_call
from dualtrain.launchers import detect_world
from tests.forked import ROOT, has_ended, wait_until

SECONDS = 60.0  # longest wait for a process on a busy machine


def world_and_arguments(*args, **kwargs):
    world = detect_world()
    return world.launcher, world.rank, world.size, args, kwargs, os.environ["HOROVOD_RANK"]


def test_results_are_in_rank_order_and_functions_get_their_arguments():
    assert dualtrain.run is run
    assert run(world_and_arguments, (1, "two"), {"x": [3]}, nproc=2) == [
        ("spawn", rank, 2, (1, "two"), {"x": [3]}, str(rank)) for rank in range(2)
    ]


def test_importing_horovod_gives_dualtrain_hvd_and_ranks_share_a_world(monkeypatch):
    def total(scale):
        import horovod.torch as hvd
        import torch

        hvd.init()
        return hvd.__name__, hvd.rank(), hvd.allreduce(torch.ones(1) * scale * (hvd.rank() + 1), op=hvd.Sum).item()

    monkeypatch.setenv("HOROVOD_RANK", "7")  # must not reach the ranks
    monkeypatch.setattr(sys, "path", [Path("no text"), *sys.path])  # Python ignores entries that are not str
    assert run(total, (2,), nproc=2) == [("dualtrain.hvd", rank, 6.0) for rank in range(2)]


def test_dualtrain_run_ignores_a_launcher_that_started_only_one_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert [found[:3] for found in run(world_and_arguments, nproc=2)] == [("spawn", 0, 2), ("spawn", 1, 2)]


def test_the_cores_are_split_among_ranks_unless_the_user_sets_the_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    per_rank = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [int(found) <= per_rank for found in run(os.getenv, ("OMP_NUM_THREADS",), nproc=2)] == [True, True]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(os.getenv, ("OMP_NUM_THREADS",)) == ["7"]


def test_functions_and_results_may_be_larger_than_a_sockets_buffer():
    data = bytes(range(256)) * (1 << 15)
    assert run(lambda: data[::-1], nproc=2) == [data[::-1]] * 2


@pytest.mark.parametrize("name", ["-", "program.py"])
def test_a_function_of_the_main_program_needs_no_file_and_no_main_guard(name, tmp_path):
    """Run ``__main__`` from standard input, as in a notebook, and from a file."""
    source = (
        "import os, dualtrain\n"
        "class Box:\n    def __init__(self, x): self.x = x\n"
        "factor = 10\n"
        "def f(x): return Box(factor * x + int(os.environ['RANK']))\n"
        "print('once', [box.x for box in dualtrain.run(f, (4,), nproc=2)], flush=True)\n"
    )
    (tmp_path / "program.py").write_text(source)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, name], input=source, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "once [40, 41]\n", done.stderr


class Odd(Exception):  # noqa: N818
    """Exception that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def test_an_exception_comes_back_with_rank_traceback_and_cause():
    def broken():
        if os.environ["RANK"] == "1":
            raise ValueError("no such thing")
        time.sleep(SECONDS)

    with pytest.raises(RankFailedError, match=r"^rank 1 of 2 failed: ValueError: no such thing\n\nTraceback") as seen:
        run(broken, nproc=2)
    assert (seen.value.rank, repr(seen.value.__cause__)) == (1, "ValueError('no such thing')")
    assert "in broken\n" in seen.value.trace
    assert "functions" + os.sep not in seen.value.trace.partition("in broken")[0].replace(__file__, "")
    assert isinstance(seen.value, RuntimeError)  # horovod.run raises RuntimeError too


def test_an_exception_without_text_is_named_by_its_class():
    class SilentError(Exception):
        def __str__(self):
            raise KeyError("text")

    def fail():
        raise SilentError

    with pytest.raises(RankFailedError, match="rank 0 of 1 failed: SilentError: its __str__ raised KeyError"):
        run(fail, nproc=1)


def test_a_rank_failed_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(RankFailedError("rank 1 of 2 failed: x", 1, "Traceback\n", by_peer=True)))
    assert (str(error), error.rank, error.trace, error.by_peer) == (
        *("rank 1 of 2 failed: x\n\nTraceback", 1, "Traceback\n"),
        True,
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: Odd("a", "b"), "Odd: a b"),
        (lambda: SystemExit(3), "SystemExit: 3"),
        (lambda: ValueError("\n two\n lines"), "ValueError: two lines"),
    ],
)
def test_sys_exit_and_exceptions_that_have_several_lines_or_cannot_be_unpickled_are_reported(error, said):
    def broken():
        raise error()

    with pytest.raises(RankFailedError) as seen:
        run(broken)
    assert str(seen.value).partition("\n")[0] == f"rank 0 of 1 failed: {said}"


def test_an_exception_without_a_message_is_reported_without_a_colon():
    assert outcome_of(sys.exit).reason == "SystemExit"


def test_the_rank_that_caused_a_failure_is_named_and_not_one_whose_collective_failed():
    def broken():
        if os.environ["RANK"] == "0":
            raise RuntimeError("sum failed") from BackendError("rank 1 has left")
        time.sleep(0.5)
        raise ValueError("the reason")

    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: the reason"):
        run(broken, nproc=2)


def test_a_failed_collective_is_the_reason_if_no_rank_gives_another(monkeypatch):
    monkeypatch.setattr(children, "GRACE_SECONDS", 0.3)

    def broken():
        if os.environ["RANK"] == "0":
            raise BackendError("timed out")
        time.sleep(SECONDS)

    with pytest.raises(RankFailedError, match="rank 0 of 2 failed: BackendError: timed out"):
        run(broken, nproc=2)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by SIGKILL"),
        (lambda: os._exit(0), "exited with status 0"),
        (lambda: os._exit(5), "exited with status 5"),
    ],
)
def test_a_rank_whose_process_ends_is_named(end, said):
    def broken():
        if os.environ["RANK"] == "1":
            end()
        time.sleep(SECONDS)

    with pytest.raises(RankFailedError, match=f"^rank 1 of 2 {said} before its function returned$"):
        run(broken, nproc=2)


def test_a_rank_that_exits_with_an_error_after_its_result_is_a_failure():
    def late():
        import atexit

        atexit.register(os._exit, 9)
        return 1

    with pytest.raises(RankFailedError, match=r"^rank 0 of 1 exited with status 9 after its function returned$"):
        run(late)


def test_a_function_may_close_or_remove_its_standard_streams():
    def close():
        sys.stdout.close()
        sys.stderr = None
        return "result"

    assert run(close) == ["result"]


def test_a_rank_that_does_not_exit_after_its_result_is_ended(monkeypatch, caplog):
    monkeypatch.setattr(children, "EXIT_SECONDS", 0.2)

    def keeps_running():
        threading.Thread(target=time.sleep, args=(SECONDS,)).start()
        return os.getpid()

    (pid,) = run(keeps_running)
    assert has_ended(pid)
    assert "rank 0 did not exit within 0.2 s after returning" in caplog.text


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank():
    with pytest.raises(RankFailedError, match=r"^rank 0 of 1 failed: its result cannot be pickled \(TypeError: .*lock"):
        run(threading.Lock)


def test_a_result_that_cannot_be_unpickled_is_an_error_of_its_rank():
    with pytest.raises(RankFailedError, match=r"^rank 0 of 1 failed: its result cannot be unpickled \(TypeError: .*second"):
        run(lambda: Odd("a", "b"))


def test_no_process_of_a_failed_job_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "END_SECONDS", 0.5)

    def broken():
        rank = os.environ["RANK"]
        child = subprocess.Popen(["sleep", str(SECONDS)])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / f"new.{rank}").write_text(f"{os.getpid()} {child.pid}")
        (tmp_path / f"new.{rank}").rename(tmp_path / f"pids.{rank}")
        if rank == "1":
            while not (tmp_path / "pids.0").exists():
                time.sleep(0.01)
            raise ValueError
        time.sleep(SECONDS)

    with pytest.raises(RankFailedError):
        run(broken, nproc=2)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pids.{rank}").read_text().split()]
    assert len(pids) == 4
    assert wait_until(lambda: all(has_ended(pid) for pid in pids))


def test_an_interrupt_ends_the_ranks(tmp_path):
    def waits():
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(tmp_path / "pid")
        time.sleep(SECONDS)

    def interrupt():
        wait_until(lambda: (tmp_path / "pid").exists())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # A shell without job control starts background jobs with SIGINT ignored. Pytest may be such a job, so set Python's
    # default handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(waits)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_ranks_end_when_their_caller_is_killed(tmp_path):
    # Use os.write: with PYTHONUNBUFFERED, print() writes a line in two parts, between which the other rank can write.
    source = (
        "import os, time, dualtrain\n"
        "def f():\n    os.write(1, f'{os.getpid()}\\n'.encode())\n    time.sleep(60)\n"
        "dualtrain.run(f, nproc=2)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", source], env=env, stdout=subprocess.PIPE, text=True) as caller:
        pids = [int(caller.stdout.readline()) for _ in range(2)]
        caller.kill()
    assert wait_until(lambda: all(has_ended(pid) for pid in pids))


def test_run_works_without_standard_streams(tmp_path):
    source = (
        "import dualtrain\n"
        f"file = open({str(tmp_path / 'results')!r}, 'w')\n"
        "def prints(): print('lost'); return 3\n"
        "file.write(str(dualtrain.run(prints)))\n"
    )
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, source]
    assert subprocess.run(command, cwd=ROOT, timeout=SECONDS, check=False).returncode == 0
    assert (tmp_path / "results").read_text() == "[3]"


def test_run_works_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(run(world_and_arguments)))
    thread.start()
    thread.join(SECONDS)
    assert [each[:3] for each in found] == [("spawn", 0, 1)]


def test_without_cloudpickle_a_local_function_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UserError, match=r"<lambda> cannot be sent .*: pip install cloudpickle, or define") as seen:
        run(lambda: 1)
    assert "\n" not in str(seen.value)
    assert run(os.getenv, ("RANK",), nproc=2) == ["0", "1"]


def test_without_cloudpickle_a_function_of_main_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    def of_a_notebook():
        pass

    of_a_notebook.__module__, of_a_notebook.__qualname__ = "__main__", "of_a_notebook"
    monkeypatch.setattr(sys.modules["__main__"], "of_a_notebook", of_a_notebook, raising=False)
    assert pickle.loads(pickle.dumps(of_a_notebook)) is of_a_notebook
    with pytest.raises(UserError, match="of_a_notebook is defined in __main__"):
        pickled_call(of_a_notebook, (), None)
    assert pickle.loads(dumps([1, os.getenv])) == [1, os.getenv]


def test_an_argument_that_cannot_be_pickled_is_refused():
    with pytest.raises(UserError, match=r"cannot be sent to other processes \(TypeError: .*lock.*\): create such objects"):
        run(print, (threading.Lock(),))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nproc": 0}, "number of ranks is 0"),
        ({"nproc": True}, "number of ranks is True"),
        ({"nproc": "2"}, "number of ranks is '2'"),
        ({"nproc": 100_000}, "100000 ranks are too many"),
    ],
)
def test_a_bad_number_of_ranks_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        run(print, **arguments)


def test_an_object_that_is_not_callable_is_refused():
    with pytest.raises(UserError, match=r"'train\.py', which cannot be called"):
        run("train.py")


def test_a_call_of_run_inside_a_rank_of_a_larger_job_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="rank 1 of 2, started by environment, and run"):
        run(print)


def test_horovods_own_backend_is_refused(monkeypatch):
    monkeypatch.setenv("DUALTRAIN_BACKEND", "horovod")
    with pytest.raises(UserError, match="DUALTRAIN_BACKEND=horovod requests Horovod itself"):
        run(print)


def test_an_interpreter_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match=r"rank 0 of 1 could not be started .*no-python"):
        horovod_run(print, executable="/no-python")


def test_a_rank_that_cannot_be_observed_is_ended(monkeypatch):
    pids = []

    def too_many_files(pid):
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", too_many_files)
    with pytest.raises(UserError, match=r"rank 0 of 2 could not be started .*Too many open files"):
        run(world_and_arguments, nproc=2)
    assert [Path(f"/proc/{pid}").exists() for pid in pids] == [False]


def test_an_interpreter_that_starts_no_rank_is_refused_after_a_timeout(monkeypatch, tmp_path):
    monkeypatch.setattr(children, "START_SECONDS", 0.5)
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 600\n")
    waits.chmod(0o755)
    with pytest.raises(UserError, match=r"rank 0 of 1 did not start within 0.5 s: .*or check the interpreter"):
        horovod_run(print, executable=str(waits))


def test_horovods_arguments_are_accepted():
    with pytest.warns(DeprecationWarning, match="np is deprecated"):
        assert horovod_run(os.getenv, ("RANK",), np=2, use_gloo=True, verbose=1, hosts="localhost:2") == ["0", "1"]
    assert horovod_run(os.getenv, ["GLOO_SOCKET_IFNAME"], None, 1, network_interface="lo,eth0") == ["lo"]
    assert horovod_run(os.getenv, ["GLOO_SOCKET_IFNAME"], network_interfaces=["lo"]) == ["lo"]
    assert next(iter(inspect.signature(horovod_run).parameters)) == "func"


@pytest.mark.parametrize("arguments", [{"hosts": "a:1,b:1"}, {"min_np": 1}, {"host_discovery_script": "x"}])
def test_other_hosts_and_elastic_training_are_refused(arguments):
    with pytest.raises(UserError, match=rf"horovod.run\({next(iter(arguments))}=.*torchrun"):
        horovod_run(print, **arguments)


def test_an_unknown_argument_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'nprocs'"):
        horovod_run(print, nprocs=2)
