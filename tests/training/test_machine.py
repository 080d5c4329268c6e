"""Properties of a machine on which the bits of a result depend: intra-op threads, kind of processor, build of torch."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dualtrain.trainer.machine as machine
import dualtrain.training.loop as loop
from dualtrain.backends import connect
from dualtrain.config import MOST_THREADS, SETTINGS, Setting, parse
from dualtrain.config.fields import at_least
from dualtrain.errors import UserError
from dualtrain.run_folder import checkpoint
from dualtrain.training import resume
from dualtrain.training.resume import read_checkpoint
from tests.hvd.worlds import worlds
from tests.threads import run_threads
from tests.training.runs import train_alone

OLD = Path(__file__).parent / "run_of_0_1_0"
OLD_FLAGS = ("--max-steps", "12", "--epochs", "2", "--global-batch-size", "256", "--model", "mnist-net")
PLATFORM: machine.Facts = {"torch": "2.13.0+cpu", "CPU capability": "AVX2", "MKL kernels": "GenuineIntel", "GPU": None}


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "threads", lambda backend: 1)


def train(folder: Path, *flags: str) -> dict[str, Any]:
    return train_alone("--global-batch-size", "720", "--run-dir", str(folder), *flags)


def recorded(folder: Path, name: str) -> list[Any]:
    """Return a setting, or the platform, from config.json and from the newest checkpoint."""
    tree = checkpoint.load(checkpoint.found(folder / "checkpoints")[0])
    found = tree["platform"] if name == "platform" else tree["config"][name]
    return [json.loads((folder / "config.json").read_text())[name], found]


# ------------------------------------------------------------------------------------------------ number of threads


def test_the_default_number_of_threads_is_the_share_of_the_hosts_cores(monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    for cores, number in ((9, 3), (2, 1), (10**4, MOST_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        assert run_threads(3, machine.threads) == [number] * 3
    monkeypatch.setattr(machine, "cpu_quota", lambda: 6.5)
    assert run_threads(3, machine.threads) == [2, 2, 2]
    # Each rank is bound to two cores of its own, and uses both.
    bound = iter([{0, 1}, {2, 3}, {4, 5}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: next(bound))
    assert run_threads(3, machine.threads) == [2, 2, 2]


@pytest.mark.parametrize(("flags", "number"), [((), 2), (("--threads", "3"), 3)])
def test_the_number_of_threads_is_set_and_recorded(tmp_path, monkeypatch, flags, number):
    monkeypatch.setattr(loop, "threads", lambda backend: 2)
    summary = train(tmp_path, "--max-steps", "1", *flags)
    assert torch.get_num_threads() == summary["threads"] == number
    assert recorded(tmp_path, "threads") == [number, number]


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, one_thread_by_default):
    train(tmp_path, "--max-steps", "1", "--threads", "3")
    torch.set_num_threads(1)
    for steps, flags in (("2", ()), ("3", ("--threads", "3"))):
        assert train(tmp_path, "--max-steps", steps, "--resume", *flags)["threads"] == 3
        assert recorded(tmp_path, "threads") == [3, 3]
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(UserError) as refusal:
        train(tmp_path, "--max-steps", "4", "--resume", "--threads", "2")
    text = "the checkpoint was made with --threads 3, and this run has --threads 2: give --threads 3, or start anew"
    text += f" (with the weights of that run: --weights {tmp_path / 'model.safetensors'})"
    assert str(refusal.value) == text
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(("flags", "number"), [((), 1), (("--threads", "2"), 2)])
def test_a_checkpoint_without_a_number_of_threads_is_resumed(tmp_path, one_thread_by_default, flags, number):
    folder = shutil.copytree(OLD, tmp_path / "run", ignore=shutil.ignore_patterns("summary.json", "model.safetensors"))
    with connect("local") as backend:
        summary = loop.train(parse([*OLD_FLAGS, "--run-dir", str(folder), "--resume", *flags]), backend)
    assert summary["threads"] == number
    assert recorded(folder, "threads") == [number, number]


def test_virtual_ranks_use_one_thread_and_a_resumed_run_keeps_the_number_of_virtual_ranks(tmp_path, monkeypatch):
    def fail(backend) -> int:
        raise AssertionError("the result must not depend on the cores of a machine")

    monkeypatch.setattr(loop, "threads", fail)
    train(tmp_path, "--max-steps", "1", "--virtual-ranks", "2")
    train(tmp_path, "--max-steps", "2", "--resume")
    assert recorded(tmp_path, "virtual_ranks") == [2, 2]
    assert recorded(tmp_path, "threads") == [1, 1]
    with pytest.raises(UserError, match=r"made with --virtual-ranks 2, and this run has --virtual-ranks 3: give"):
        train(tmp_path, "--max-steps", "3", "--resume", "--virtual-ranks", "3")


PLAIN = {**parse([]).plain(), "pieces": None}  # ``pieces`` is a setting that only a test adds
MISSING = object()


def refused(folder: Path, run_settings: dict[str, Any], checkpoint_settings: dict[str, Any]) -> str:
    """Return the error of a run that resumes from a checkpoint; "" if there is none.

    The run and the checkpoint have the settings ``PLAIN`` with the given changes. The value ``MISSING`` removes a setting
    from the checkpoint.
    """
    config = {name: value for name, value in {**PLAIN, **checkpoint_settings}.items() if value is not MISSING}
    tree = {"format": checkpoint.FORMAT, "trainer": {}, "cursor": {}, "data": {"samples": 1, "classes": 1}}
    path = folder / "step-00000001.safetensors"
    checkpoint.write(path, {**tree, "config": config, "global_batch": 64})
    try:
        read_checkpoint(parse(["--resume", str(path)]).output, {**PLAIN, **run_settings})
    except UserError as refusal:
        return str(refusal)
    return ""


def test_a_resumed_setting_has_the_value_of_the_checkpoint_and_other_values_are_refused(tmp_path, monkeypatch):
    pieces = Setting("pieces", "step", "pieces", int, None, "", at_least(1), fixed=True, resumed=True)
    monkeypatch.setattr(resume, "SETTINGS", {**SETTINGS, "pieces": pieces})
    for name in ("threads", "pieces"):
        for value in (MISSING, None, 4):
            assert refused(tmp_path, {}, {name: value}) == ""
        assert refused(tmp_path, {name: 4}, {name: 4}) == ""
        text = f"the checkpoint was made with --{name} 2, and this run has --{name} 4: give --{name} 2, or start anew"
        assert refused(tmp_path, {name: 4}, {name: 2}) == text
    for value in (MISSING, None):
        assert refused(tmp_path, {"threads": 4}, {"threads": value}) == ""
        assert "made with no --pieces, and this run has --pieces 4" in refused(tmp_path, {"pieces": 4}, {"pieces": value})
    found = resume.adopted({**PLAIN, "threads": 5}, {"threads": 2, "pieces": 4, "lr": 9.0})
    assert found == {**PLAIN, "threads": 5, "pieces": 4}


@pytest.mark.parametrize(
    ("value", "line"),
    [("4", True), ("4,2", True), ("many", True), ("2", False), (" 2,4 ", False), ("", False), (None, False)],
)
def test_an_omp_num_threads_without_effect_is_noted_once_on_rank_0(monkeypatch, capsys, value, line):
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert run_threads(2, use_two) == [2, 2]
    printed = capsys.readouterr().out
    assert printed.count("\n") == int(line)
    if line:
        assert printed.startswith(f"OMP_NUM_THREADS={value} has no effect: the number of intra-op threads of a rank is 2")
        assert "--threads" in printed


def use_two(backend) -> int:
    machine.use_threads(2, backend)
    return torch.get_num_threads()


# ------------------------------------------------------------------------------------------------ kind of processor


def test_the_platform_is_recorded_and_an_equal_one_causes_no_warning(tmp_path, one_thread_by_default, caplog):
    train(tmp_path, "--max-steps", "1")
    with connect("local") as backend:
        platform = machine.platform_of(backend)
    assert recorded(tmp_path, "platform") == [platform, platform]
    assert platform["torch"] == str(torch.__version__)
    assert platform["CPU capability"] == torch.backends.cpu.get_cpu_capability()
    train(tmp_path, "--max-steps", "2", "--resume")
    assert caplog.messages == []


def resume_on_another_platform(backend, folder: str, steps: int) -> list[str]:
    """Train on a simulated platform, and resume on a different simulated one; return the warnings of this rank."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    kept = loop.platform_of, loop.threads
    loop.threads = lambda backend: 1
    log = logging.getLogger("dualtrain")
    log.addHandler(handler)
    try:
        for last, facts in ((steps, PLATFORM), (steps + 1, {**PLATFORM, "CPU capability": "AVX512", "GPU": "H200"})):
            loop.platform_of = lambda backend, facts=facts: facts
            flags = ["--global-batch-size", "720", "--run-dir", folder, "--max-steps", str(last)]
            loop.train(parse([*flags, *(["--resume"] if last > steps else [])]), backend)
    finally:
        loop.platform_of, loop.threads = kept
        log.removeHandler(handler)
    return found


@worlds(("torch", 3))
def test_a_resume_on_another_platform_causes_one_warning_on_rank_0(real, tmp_path):
    (line,), *others = real(resume_on_another_platform, str(tmp_path), 1)
    assert others == [[]] * (real.size - 1)
    assert "CPU capability was AVX2 and is AVX512; GPU was none and is H200; ATEN_CPU_CAPABILITY, ONEDNN_MAX_" in line
    assert "torch was" not in line
    assert recorded(tmp_path, "platform")[1]["GPU"] == "H200"


def test_only_platform_facts_that_the_checkpoint_recorded_are_compared(caplog):
    machine.warn_of_other_platform({}, PLATFORM)
    machine.warn_of_other_platform({"CPU capability": "AVX2"}, PLATFORM)
    assert caplog.messages == []
    machine.warn_of_other_platform({**PLATFORM, "torch": "2.12.0"}, PLATFORM)
    (line,) = caplog.messages
    assert line.endswith("from those before the checkpoint: torch was 2.12.0 and is 2.13.0+cpu")


SERVER = ["sse4_1", "avx", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"]
AMX = [*SERVER, "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"]


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        (SERVER, "", "AVX512_CORE_VNNI"),
        (SERVER, "AVX2", "AVX2"),
        (SERVER, "avx512_core", "AVX512_CORE"),
        (SERVER, "AVX2_VNNI", "AVX2"),
        (SERVER, "AVX512_CORE_AMX", "AVX512_CORE_VNNI"),
        (SERVER, "nonsense", "AVX512_CORE_VNNI"),
        (AMX, "", "AVX512_CORE_AMX"),
        (AMX, "AVX10_1_512", "AVX512_CORE_FP16"),
        (["sse4_1", "avx", "avx2", "avx_vnni"], "", "AVX2_VNNI"),
        (["neon"], "", None),
        ([], "AVX2", None),
    ],
)
def test_onednn_set_returns_the_best_instruction_set_of_the_processor_within_the_limit(flags, limit, expected):
    assert machine.onednn_set(flags, limit) == expected


def test_the_variables_that_choose_instructions_are_recorded(monkeypatch):
    monkeypatch.setattr(machine, "_described", lambda file: {"vendor_id": "Vendor", "flags": " ".join(AMX)})
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for name in ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    with connect("local") as backend:
        found = machine.processor(backend)
        assert tuple(found) == machine.PROCESSOR
        assert [found["oneDNN instruction set"], found["MKL kernels"], found["GPU"]] == ["AVX512_CORE_AMX", "Vendor", None]
        for name, value in (
            ("MKL_CBWR", "COMPATIBLE"),
            ("DNNL_MAX_CPU_ISA", "AVX512_CORE"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
        ):
            monkeypatch.setenv(name, value)
            found = machine.processor(backend)
            assert value in (found["oneDNN instruction set"], found["MKL kernels"])


def test_the_processor_is_described_by_the_first_block_of_cpuinfo(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nvendor_id\t: Other\n"
    )
    assert machine._described(file) == {"processor": "0", "vendor_id": "AuthenticAMD", "flags": "fpu avx2"}
    assert machine._described(tmp_path / "missing") == {}
