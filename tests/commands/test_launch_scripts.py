"""launch/torchrun.sh, horovodrun.sh and mpirun.sh turn the same variables into their launchers' options.

demo.sh runs two launchers one after the other. At SIGTERM, it waits until the running launcher has ended, and then exits.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import ROOT

SCRIPTS = ["torchrun", "horovodrun", "mpirun"]


def start(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # The scripts use the virtual environment of this interpreter.
    env = {**os.environ, "DUALTRAIN_VENV": str(Path(sys.executable).parent.parent), **variables}
    command = ["bash", str(ROOT / "launch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


def make_environment(folder: Path, name: str, program: str = 'echo "$*"') -> None:
    """Make a virtual environment whose launcher ``name`` is the shell script ``program`` (default: print the arguments)."""
    launcher = folder / "bin" / name
    launcher.parent.mkdir()
    launcher.write_text(f"#!/bin/sh\n{program}\n")
    launcher.chmod(0o755)
    (launcher.parent / "activate").write_text(f'PATH="{launcher.parent}:$PATH"\n')


def copy_script(name: str, folder: Path) -> list[str]:
    """Copy a script of launch/ beside an empty setup.sh; return the command that starts the copy."""
    copy = folder / "launch" / f"{name}.sh"
    copy.parent.mkdir()
    shutil.copy(ROOT / "launch" / copy.name, copy)
    (copy.parent / "setup.sh").touch()
    return ["bash", str(copy)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_prints_the_comment_at_the_top_of_the_script(name):
    end = start(name, "--help")
    assert end.returncode == 0, end.stderr
    variables = [line.split()[0] for line in end.stdout.splitlines() if line[:1].isupper() and line.split()[0].isupper()]
    assert [variable for variable in variables if variable != "PORT"] == ["NPROC", "HOSTS", "IFACE"]
    assert "set -e" not in end.stdout


@pytest.mark.parametrize("name", ["demo", "ways"])
def test_help_of_the_comparison_scripts_starts_no_run(name, tmp_path):
    end = start(name, "--help", DUALTRAIN_VENV=str(tmp_path), RUNS=str(tmp_path / "runs"))
    assert (end.returncode, end.stderr) == (0, "")
    assert f"  bash launch/{name}.sh [flags of dualtrain train, for " in end.stdout
    assert "RUNS " in end.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["demo", "ways", "one_result"])
def test_the_comparison_scripts_refuse_a_folder_that_cannot_be_made(name, tmp_path):
    make_environment(tmp_path, "horovodrun")
    command = copy_script(name, tmp_path)
    env = {**os.environ, "DUALTRAIN_VENV": str(tmp_path), "RUNS": "/dev/null/runs", "LC_ALL": "C"}
    end = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    reason = "/dev/null/runs cannot be made (Not a directory)"
    message = f"{name}.sh: error: {reason}: set RUNS to a folder that you may write\n"
    assert (end.returncode, end.stdout, end.stderr) == (2, "", message)


def test_the_demo_ends_after_its_launcher_if_both_get_sigterm(tmp_path):
    program = "trap 'sleep 1; echo saved; exit 1' TERM; echo started; while :; do sleep 0.1; done"
    make_environment(tmp_path, "horovodrun", program)
    command = copy_script("demo", tmp_path)
    env = {**os.environ, "DUALTRAIN_VENV": str(tmp_path), "RUNS": str(tmp_path / "runs")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line == "started\n":
                break
        os.killpg(demo.pid, signal.SIGTERM)
        status = demo.wait(timeout=60)
        assert (status, demo.stdout.read()) == (143, "saved\n")  # and not "== torchrun"


def test_setup_has_help_and_refuses_unknown_arguments():
    end = start("setup", "--help")
    assert end.returncode == 0, end.stderr
    assert {line.split()[0] for line in end.stdout.splitlines() if line.startswith("DUALTRAIN_")} == {
        *("DUALTRAIN_VENV", "DUALTRAIN_CACHE", "DUALTRAIN_WITH", "DUALTRAIN_GPU", "DUALTRAIN_TORCH")
    }
    end = start("setup", "--gpu")
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr.startswith("setup: error: '--gpu' is not known: ")


def test_several_hosts_of_torchrun_need_a_port():
    end = start("torchrun", HOSTS="one,two", PORT="99999")
    assert (end.returncode, end.stdout, end.stderr.count("\n")) == (2, "", 1)
    assert "PORT=99999 is not a port: set it to a free port of one" in end.stderr
    end = start("torchrun", HOSTS="one,two:2", PORT="")
    assert end.returncode == 2
    assert "PORT is not set, but the rendezvous of 2 hosts needs a port: set it to a free port of one" in end.stderr


def test_torchrun_reads_this_hosts_number_of_ranks_from_the_variable_hosts(tmp_path):
    make_environment(tmp_path, "torchrun")
    variables = {"DUALTRAIN_VENV": str(tmp_path), "PORT": "7", "NPROC": "2"}
    name = os.uname().nodename
    alias = f"{name.partition('.')[0]}.example"  # another host with the same short name
    known = [(f"one:4,{name}:3", 3), (f"one:4,{alias}:3", 3), ("one:4,two:4", 4), (f"{name}:3,{alias}:4", 3)]
    for hosts, count in [*known, (f"{alias}:4,{name}:3", 3)]:
        end = start("torchrun", HOSTS=hosts, **variables)
        assert (end.returncode, end.stderr) == (0, "")
        assert f"--nproc-per-node={count} " in end.stdout
    end = start("torchrun", HOSTS="one:4,two", **variables)
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr == (
        "torchrun.sh: error: HOSTS=one:4,two has different numbers of ranks, and none of its names is this "
        f"host's: use the name {name} for this host\n"
    )


@pytest.mark.parametrize(
    ("hosts", "reason"),
    [
        ("one:1,two,one:1", "has the host one twice: name each host once, with all of its ranks, such as one:4"),
        (
            "localhost,two",
            "has several hosts, and localhost is another host on each of them: use the name HERE for this host",
        ),
        (
            "one,127.0.1.1",
            "has several hosts, and 127.0.1.1 is another host on each of them: use the name HERE for this host",
        ),
    ],
)
def test_hosts_that_torchrun_would_wait_for_are_refused(hosts, reason):
    end = start("torchrun", HOSTS=hosts, PORT="7")
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr == f"torchrun.sh: error: HOSTS={hosts} {reason.replace('HERE', os.uname().nodename)}\n"


def test_the_first_host_refuses_a_port_in_use(tmp_path):
    make_environment(tmp_path, "torchrun")
    name = os.uname().nodename
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        first, second = (
            start("torchrun", HOSTS=hosts, PORT=port, DUALTRAIN_VENV=str(tmp_path))
            for hosts in (f"{name},two", f"two,{name}")
        )
    cure = "set it to a free port, the same on all hosts"
    assert (first.returncode, first.stderr) == (2, f"torchrun.sh: error: PORT={port} is in use on this host: {cure}\n")
    assert (second.returncode, second.stderr) == (0, "")


#: The ends of the commands that each script starts: for NPROC=3, and for NPROC=2 HOSTS="one:2,two" IFACE="lo" PORT=7.
STARTS = {
    "torchrun": (
        "torchrun --standalone --local-addr=localhost --nproc-per-node=3 -m dualtrain.main --lr 1",
        "torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=one:7 --rdzv-id=dualtrain-7 --nproc-per-node=2"
        " -m dualtrain.main --lr 1",
    ),
    "horovodrun": (
        "horovodrun --gloo -np 3 --hosts localhost:3 python -m dualtrain.main --lr 1",
        "horovodrun --gloo -np 4 --hosts one:2,two:2 --network-interfaces lo python -m dualtrain.main --lr 1",
    ),
    "mpirun": (
        "-np 3 --host localhost:3 python -m dualtrain.main --lr 1",
        "--mca btl_tcp_if_include lo --mca oob_tcp_if_include lo -x GLOO_SOCKET_IFNAME -x NCCL_SOCKET_IFNAME"
        " -x HOROVOD_GLOO_IFACE -np 4 --host one:2,two:2 python -m dualtrain.main --lr 1",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_variables_become_the_launchers_options(name, tmp_path):
    variables_too = 'echo "${0##*/} $*"\necho "$OMP_NUM_THREADS ${GLOO_SOCKET_IFNAME-} ${HOROVOD_GLOO_IFACE-}"'
    make_environment(tmp_path, name, variables_too)
    plain = {"DUALTRAIN_VENV": str(tmp_path), "OMP_NUM_THREADS": "", "NPROC": "3"}
    several = {"NPROC": "2", "HOSTS": "one:2,two", "IFACE": "lo", "PORT": "7"}
    for variables, started, expected in zip((plain, plain | several), STARTS[name], ("1  ", "1 lo lo"), strict=True):
        end = start(name, "--lr", "1", **variables)
        assert end.returncode == 0, end.stderr
        command, environment = end.stdout.splitlines()
        assert command.startswith(f"{name} ")
        assert command.endswith(started)
        assert environment == expected


def test_mpirun_sends_the_other_hosts_the_variables_that_change_results(tmp_path):
    make_environment(tmp_path, "mpirun")
    variables = {"PYTHONPATH": "/code", "MKL_CBWR": "COMPATIBLE", "DUALTRAIN_JOB": "one", "ONEDNN_MAX_CPU_ISA": ""}
    end = start("mpirun", DUALTRAIN_VENV=str(tmp_path), **variables)
    words = end.stdout.split()
    passed = {words[number + 1] for number, word in enumerate(words) if word == "-x"}
    assert passed >= {"PATH", "OMP_NUM_THREADS", "PYTHONPATH", "MKL_CBWR", "DUALTRAIN_JOB"}, end.stderr
    assert "ONEDNN_MAX_CPU_ISA" not in passed  # an empty variable counts as not set


@pytest.mark.parametrize("name", SCRIPTS)
def test_wrong_variables_and_a_missing_launcher_are_refused_in_one_line(name, tmp_path):
    for program in ("bash", "dirname", "hostname", "id"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    cases = [
        ("NPROC=two is not a number of ranks: set it to a number from 1 to 99999", {"NPROC": "two"}),
        ("HOSTS=one:x,two has the entry 'one:x': write each host as a name, or as name:ranks", {"HOSTS": "one:x,two"}),
        ("HOSTS=one,,two has the entry ':2'", {"HOSTS": "one,,two"}),
        ("HOSTS=one two has the entry 'one two:2'", {"HOSTS": "one two"}),
        ("HOSTS=one two has the entry 'one two:2'", {"HOSTS": "one\ntwo"}),  # a file of hosts has one host per line
        (f"no {name} found: run bash launch/setup.sh", {"DUALTRAIN_VENV": "/nowhere", "PATH": str(tmp_path)}),
    ]
    for message, variables in cases:
        end = start(name, **variables)
        assert (end.returncode, end.stdout, len(end.stderr.splitlines())) == (2, "", 1), end.stderr
        assert end.stderr.startswith(f"{name}.sh: error: {message}")
