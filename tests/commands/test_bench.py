"""The bench: statistics, tables, charts, plans and the start of contenders. No test depends on the machine's speed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualtrain.bench import __main__ as bench
from dualtrain.bench import measure, pace, result_files, scale, scale_page, start_contender, timed_steps, worker
from dualtrain.bench import virtual_nodes as nodes_of_bench
from dualtrain.bench.__main__ import main
from dualtrain.bench.bench_charts import NARROW, WIDE, chart, chart_groups, picture
from dualtrain.bench.bench_page import page
from dualtrain.bench.contenders import Contender, alone, dualtrain_hvd, ours, trainers
from dualtrain.bench.forked_ranks import run_forked
from dualtrain.bench.measure import Plan, Results, Sample, sample_of
from dualtrain.bench.meet import meet
from dualtrain.bench.mnist_files import write_mnist
from dualtrain.bench.plan import (
    ABOUT,
    BESIDE_DDP,
    COMPARISONS,
    COSTS,
    ENTRIES,
    FALLBACKS,
    GLOO,
    GROUPS,
    JOBS,
    LENGTHS,
    MPI,
    QUICK,
    ROUNDS,
    SIDE_STEPS,
    SIZES,
    TUNED,
    VIRTUAL,
    jobs_of,
)
from dualtrain.bench.rows import MET, NOT_MET, NOT_SHOWN, rows_of, sweep_of
from dualtrain.bench.scale_plan import (
    CONTENDERS,
    LAYOUTS,
    MEASURES,
    Layout,
    expected_seconds,
    layouts_of,
    rounds_with,
    times_of,
)
from dualtrain.bench.start_contender import LaunchError, LaunchSpec, reason_in, results_in, run_program
from dualtrain.bench.statistics import estimate, level_of
from dualtrain.bench.table import answer, bytes_of, text
from dualtrain.bench.timed_steps import TimedSteps, run_steps
from dualtrain.bench.virtual_nodes import NodesError, virtual_nodes
from dualtrain.bench.worker import MARK
from dualtrain.bench.workloads import DISTINCT, WORKLOADS, Task, resnet18
from dualtrain.errors import UserError
from dualtrain.launchers import detect_world
from tests import forked
from tests.commands.test_report import Page
from tests.conftest import require_horovod
from tests.launch.hosts import require_hosts
from tests.pool import ROOT

CPU = torch.device("cpu")


# -- statistics ---------------------------------------------------------------------------------------------------


def test_equal_values_have_an_interval_without_width():
    found = estimate([1.5] * 7)
    assert (found.value, found.low, found.high, found.pairs) == (1.5, 1.5, 1.5, 7)


def test_the_interval_holds_the_median_and_lies_within_the_values():
    values = [0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 9.0]
    found = estimate(values)
    assert found.value == 1.2
    assert min(values) <= found.low < 1.2 < found.high <= max(values)
    # The interval reaches from the smallest to the largest of seven values. In 2 of 2⁷ cases, all seven values are on one
    # side of the true median.
    assert (found.low, found.high, found.level) == (0.9, 9.0, 1 - 2 / 2**7)


@pytest.mark.parametrize(
    ("count", "k", "level"), [(1, 1, 0.0), (2, 1, 0.5), (6, 1, 0.96875), (10, 1, 0.998), (11, 2, 0.988), (15, 3, 0.993)]
)
def test_the_interval_is_the_narrowest_with_98_percent_confidence_or_the_whole_range(count, k, level):
    found = estimate([float(n) for n in range(count, 0, -1)])
    assert (found.low, found.high) == (k, count + 1 - k)
    assert found.level == pytest.approx(level, abs=5e-4)
    assert level_of(count, k) == found.level
    if k < (count + 1) // 2:
        assert level_of(count, k + 1) < 0.98


def test_at_least_94_of_100_intervals_contain_the_true_median():
    drawn = random.Random(1)
    samples = [[drawn.gauss(1.0, 0.05) for _ in range(ROUNDS)] for _ in range(100)]
    covered = sum(one.low <= 1.0 <= one.high for one in map(estimate, samples))
    assert covered >= 94
    assert abs(sum(estimate(one).value for one in samples) / 100 - 1.0) < 0.01


def test_the_interval_of_one_pair_has_no_width():
    assert estimate([2.0]).low == estimate([2.0]).high == 2.0


# -- rows, the table and the answer -------------------------------------------------------------------------------

MACHINE = {"measured": "today", "ranks": "two <ranks>"}


def text_of(measured: Results) -> str:
    return text(measured, rows_of(measured), MACHINE, targets=True)


def results(weights: dict[str, str] | None = None, missing: dict[str, str] | None = None, **seconds: float) -> Results:
    """Return the results of seven rounds. ``seconds`` has each contender's time for a step of resnet18 in round 0.

    A step of ``small`` takes a tenth of this time. In round ``n``, all steps take ``1 + 0.1 * n`` times as long.
    """
    found = Results(missing=missing or {}, step_fractions=[1.0] * ROUNDS)
    for name, value in seconds.items():
        name = name.replace("_", "-")
        sha = (weights or {}).get(name, "alone" if name == "alone" else "raw")
        jobs = {"resnet18": value, "small": value / 10}
        found.samples[name] = [
            Sample({job: s * (1 + 0.1 * number) for job, s in jobs.items()}, dict.fromkeys(jobs, sha), None, 2)
            for number in range(ROUNDS)
        ]
    return found


def row(rows, one, other, job="resnet18"):
    (found,) = [r for r in rows if (r.one, r.other, r.job) == (one, other, job)]
    return found


def test_ratios_are_computed_within_each_round_so_that_drift_cancels_out():
    rows = rows_of(results(shm=0.1, alone=0.08, ddp_tuned=0.15))
    found = row(rows, "shm", TUNED)
    assert found.found.value == pytest.approx(1.5)
    assert found.found.high - found.found.low < 1e-9
    assert found.found.pairs == ROUNDS
    assert (found.weights, found.verdict, found.target) == ("same", MET, 1.3)
    assert row(rows, "shm", "alone").weights == "same"
    assert row(rows, "shm", "alone").verdict == NOT_MET


def test_an_interval_around_the_target_shows_neither_success_nor_failure(tmp_path):
    found = results(shm=0.1, ddp_tuned=0.15)
    found.samples["shm"][2].seconds["resnet18"] *= 1.4  # one slow round: a ratio of 1.07 beside six of 1.5
    for number, sample in enumerate(found.samples["shm"]):
        sample.seconds["trainer"] = (35 + 2 * number) * 1e-6  # the target, 40 µs, is inside the interval
    rows = rows_of(found)
    ratio, cost = row(rows, "shm", TUNED), next(r for r in rows if "trainer" in r.job)
    assert ratio.found.value == pytest.approx(1.5)
    assert ratio.found.low < 1.3 < ratio.found.high
    assert (ratio.verdict, cost.verdict) == (NOT_SHOWN, NOT_SHOWN)
    said = text_of(found)
    assert f"targets that are not shown: {ratio.group}: resnet18; costs: {cost.job}\n" in said
    assert "targets that are not met" not in said


def test_targets_are_shown_on_request_and_a_missed_target_gives_exit_status_1(tmp_path, capsys):
    missed, met = results(shm=0.1, alone=0.08, ddp_tuned=0.15), results(shm=0.1, ddp_tuned=0.15)
    for found, targets, status in ((missed, True, 1), (missed, False, 0), (met, True, 0)):
        assert bench._conclude(tmp_path, found, MACHINE, targets=targets) == status
        said = capsys.readouterr().out
        for shown in (said, (tmp_path / "bench.html").read_text()):
            assert ("1.30" in shown) == targets
            assert (NOT_MET in shown) == targets
    assert bench._parse(["--targets"]).targets
    assert not bench._parse([]).targets


def test_targets_that_were_not_measured_give_exit_status_1(tmp_path):
    met = results(shm=0.1, ddp_tuned=0.15)
    failed = results(shm=0.1, ddp_tuned=0.15, missing={"hvd-gloo": "it ended with status 1"})
    beside = results(shm=0.1, ddp_tuned=0.15, missing={BESIDE_DDP: "it ended with status 1"})
    nothing = Results(samples={"shm": [None]}, missing={"shm": "it ended with status 1"})
    for found, status, plain in ((met, 0, 0), (failed, 1, 0), (beside, 1, 0), (nothing, 1, 1), (Results(), 1, 1)):
        assert bench._conclude(tmp_path, found, MACHINE, targets=True) == status
        assert bench._conclude(tmp_path, found, MACHINE, targets=False) == plain
        assert (tmp_path / "bench.svg").exists() != found.is_empty  # no chart of earlier results stays


def test_targets_that_are_not_judged_give_exit_status_1(tmp_path, capsys):
    found = results(shm=0.1, ddp_tuned=0.15)
    found.step_fractions = found.step_fractions[:3]
    found.samples = {name: column[:3] for name, column in found.samples.items()}
    assert bench._conclude(tmp_path, found, MACHINE, targets=True) == 1
    assert "3 rounds: not judged" in capsys.readouterr().out
    assert bench._conclude(tmp_path, found, MACHINE, targets=False) == 0


@pytest.mark.parametrize(("installed", "status"), [(False, 0), (True, 1)])
def test_an_optional_contender_that_is_not_installed_need_not_be_measured(installed, status, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    found = results(shm=0.1, ddp_tuned=0.15, missing={"accelerate": "the reason"})
    assert bench._conclude(tmp_path, found, MACHINE, targets=True) == status


def test_the_table_is_printed_even_if_no_file_can_be_written(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(result_files, "write_whole", fail)
    with pytest.raises(UserError, match=r"the results cannot be written to .*No space left on device"):
        bench._conclude(tmp_path, results(shm=0.1, ddp_tuned=0.15), MACHINE, targets=False)
    assert "1.50" in capsys.readouterr().out


def test_a_disk_that_is_too_small_for_the_generated_images_causes_a_one_line_error(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dualtrain.bench.mnist_files._write", fail)
    monkeypatch.setattr(bench, "EPOCH_SAMPLES", 6)
    assert main(["--jobs", "epoch", "--out", str(tmp_path / "out")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"--out '{tmp_path / 'out'}' cannot be written (No space left on device): name another folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "reason"),
    [("print('loading')", "it printed 'loading"), ("import time; time.sleep(100)", "it did not end within 0 s")],
)
def test_an_import_that_prints_no_time_or_hangs_raises_a_launch_error(program, reason, monkeypatch):
    monkeypatch.setattr(measure, "_IMPORT", program)
    with pytest.raises(LaunchError, match=reason):
        measure._import_seconds(20.0 if "print" in program else 0.4)


def test_a_number_that_an_import_prints_is_not_read_as_the_measured_time(monkeypatch):
    monkeypatch.setattr(measure, "_IMPORT", "print(7); print(0.25)")
    assert measure._import_seconds(20.0) == 0.25


def test_main_returns_1_if_requested_targets_are_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda *_: results(shm=0.1, alone=0.08))
    flags = ["--quick", "--out", str(tmp_path), "--contenders", f"alone,{TUNED}"]
    assert [main([*flags, *more]) for more in ([], ["--targets"])] == [0, 1]


def test_an_interrupted_benchmark_writes_the_results_of_the_starts_that_have_ended(tmp_path, monkeypatch, capsys):
    starts = []

    def run_entry(entry, *_):
        starts.append(entry.title)
        if len(starts) in (1, 4):
            raise KeyboardInterrupt
        return [{"rank": 0, "size": 2, "job": "tiny", "seconds": 1.0, "first": 1.0, "sha256": "a"}]

    monkeypatch.setattr(measure, "run_entry", run_entry)
    flags = ["--out", str(tmp_path / "out"), "--contenders", f"shm,{TUNED}", "--jobs", "tiny"]
    assert main(flags) == 130
    assert list(tmp_path.iterdir()) == []
    assert main(flags) == 130
    assert "1.00 to 1.00" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert found["samples"].keys() == {"shm", TUNED}
    assert "interrupted" not in found


def test_equal_contenders_have_a_ratio_of_one():
    rows = rows_of(results(ddp_tuned=0.1, ddp_tuned_again=0.1))
    assert row(rows, "ddp-tuned-again", TUNED).found.value == 1.0


def test_a_contender_with_different_weights_meets_no_speed_target():
    rows = rows_of(results({"shm": "other"}, shm=0.1, ddp_tuned=0.9))
    found = row(rows, "shm", TUNED)
    assert (found.weights, found.verdict) == ("other numerics", NOT_MET)
    assert "meets no target" in text_of(results({"shm": "other"}, shm=0.1, ddp_tuned=0.9))


def test_different_weights_of_horovod_mpi_do_not_affect_the_comparison_with_ddp():
    """With 3 ranks or more, MPI adds gradients in a different order than the other contenders."""
    rows = rows_of(results({"hvd-mpi": "in another order"}, shm=0.1, ddp_tuned=0.9, hvd_mpi=0.9))
    assert row(rows, "shm", TUNED).weights == "same"
    assert row(rows, "shm", "hvd-mpi").weights == "other numerics"


def test_fewer_than_seven_rounds_give_no_verdict_on_targets():
    found = results(shm=0.1, ddp_tuned=0.15, hvd_gloo=0.2)
    found.samples["shm"][0] = None
    for sample in found.samples["shm"][1:]:
        sample.seconds["trainer"] = 15e-6
    rows = rows_of(found)
    ratio, cost = row(rows, "shm", TUNED), next(r for r in rows if r.one == "shm" and r.unit == "µs" and not r.other)
    for one in (ratio, cost):
        assert (one.target is not None, one.verdict, one.note) == (True, "", "6 rounds: not judged")
    assert ratio.found.pairs == dataclasses.asdict(ratio)["found"]["pairs"] == ROUNDS - 1
    said = text_of(found)
    unjudged = sum(r.target is not None for r in rows if r.found.pairs < ROUNDS)
    assert f"targets that are not judged: {unjudged}; a verdict needs 7 rounds" in said
    assert said.endswith("This is based on only 6 rounds: a verdict needs 7.")


def test_after_seven_rounds_no_remark_says_that_rounds_are_missing():
    found = results(shm=0.1, ddp_tuned=0.15, hvd_gloo=0.2)
    said = text_of(found)
    assert "not judged" not in said
    assert "only" not in said.splitlines()[-1]


def test_a_target_that_allows_noise_is_lowered_by_the_noise_floor():
    quiet = results(native=0.1010, ddp_tuned=0.1, ddp_tuned_again=0.1)
    assert row(rows_of(quiet), "native", TUNED).verdict == NOT_MET
    noisy = results(native=0.1010, ddp_tuned=0.1, ddp_tuned_again=0.103)
    found = row(rows_of(noisy), "native", TUNED)
    assert found.verdict == MET
    assert "noise" in found.note


def test_a_cost_must_stay_below_its_target():
    found = results(shm=0.1, ddp_tuned=0.1)
    for number, sample in enumerate(found.samples["shm"]):
        sample.seconds.update({"trainer": 15e-6, "start": 3.5 + number, "sweep/4096": 50e-6})
        found.samples[TUNED][number].seconds["start"] = 3.45 + number
    costs = {r.job: r for r in rows_of(found) if r.group == "costs"}
    assert {title: r.verdict for title, r in costs.items()} == {
        "allreduce of 4 KB, shared memory": NOT_MET,
        "time that the trainer adds to a step (empty model)": MET,
        "launch to first step, minus raw DDP tuned": MET,
    }
    assert costs["launch to first step, minus raw DDP tuned"].found.value == pytest.approx(50)


@pytest.mark.parametrize(
    ("seconds", "word"),
    [
        ({"shm": 0.1, "hvd_gloo": 0.2, "ddp_tuned": 0.15}, "Yes: with 2 ranks here"),
        ({"shm": 0.1, "hvd_gloo": 0.2, "hvd_mpi": 0.05}, "Not for speed (torch is slower or not measurably different"),
        ({"native": 0.2, "hvd_gloo": 0.1}, "No: "),
        ({"shm": 0.1, "hvd_gloo": 0.1}, "No measurable difference in speed: "),
        ({"shm": 0.1}, "Not answered: Horovod or dualtrain was not among"),
    ],
)
def test_the_answer_depends_on_the_measured_speeds(seconds, word):
    found = results(**seconds)
    said = answer(found, rows_of(found))
    assert word in said
    assert "\n" not in said
    assert text_of(found).splitlines()[-1] == said


@pytest.mark.parametrize(("seconds", "word"), [(0.01, "Yes, except for small: "), (0.005, "Not for speed (torch is")])
def test_the_answer_is_yes_only_if_torch_is_faster_in_more_jobs_than_horovod(seconds, word):
    found = results(shm=0.1, hvd_gloo=0.2)
    for number, sample in enumerate(found.samples["hvd-gloo"]):
        sample.seconds["small"] = seconds * (1 + 0.1 * number)
    assert word in answer(found, rows_of(found))


def test_a_single_round_has_no_interval():
    found = results(shm=0.1, hvd_gloo=0.2)
    for name in found.samples:
        found.samples[name] = found.samples[name][:1]
    assert "probability" not in text_of(found)
    assert "the median over the rounds\n" in text_of(found)


def test_the_answer_names_the_ratios_and_the_weights():
    found = results(shm=0.1, hvd_gloo=0.2, ddp_tuned=0.16)
    said = answer(found, rows_of(found))
    assert "2.00 (resnet18)" in said
    assert "the same weights" in said
    assert "raw DDP runs 1.25 (resnet18) times as many steps as Horovod" in said
    found = results({"hvd-gloo": "other"}, shm=0.1, hvd_gloo=0.2, ddp_tuned=0.16)
    assert ", and ends with different weights; " in answer(found, rows_of(found))


def test_a_missing_contender_is_reported_with_its_cure():
    reason = "horovod is not installed: bash launch/setup.sh"
    found = results(shm=0.1, missing={"hvd-gloo": reason, "fabric": "it broke"})
    said = text_of(found)
    assert "Lightning Fabric: not measured: it broke" in said
    assert said.splitlines()[-1].endswith(f" did not run ({reason}).")


def test_the_report_of_an_installed_contender_that_failed_has_no_advice_to_install_it():
    said = text_of(results(shm=0.1, missing={"hvd-gloo": "it ended with status 1"}))
    assert said.splitlines()[-1].endswith(" did not run (it ended with status 1).")


def test_the_page_has_the_answer_the_chart_the_workloads_the_machine_and_the_tables():
    found = results(shm=0.1, alone=0.09, ddp_tuned=0.15, hvd_gloo=0.2)
    for sample in found.samples["shm"]:
        sample.seconds.update({"sweep/4": 1e-5, "sweep/4/tensor": 2e-5})
    shown = Page(page(found, rows_of(found), MACHINE, targets=False))
    assert answer(found, rows_of(found)) in shown.text
    for words in (
        "two <ranks>",
        "dualtrain torch, shared memory / raw DDP tuned",
        "Steps per second, relative to raw Horovod Gloo",
        ABOUT["resnet18"],
        ABOUT["sweep"],
        "98.4 % (7 rounds)",
        "All-reduce by size, ms",
        "0.010",
    ):
        assert words in shown.text
    assert ABOUT["mlp"] not in shown.text
    assert "target" not in shown.text
    assert "svg" in shown.tags
    parts = {"native": Sample({"transformer": 0.1}, ranks=2), "ddp-tuned": Sample({"transformer": 0.1}, ranks=2)}
    side_by_side = Results({"beside-ddp": [Sample({}, ranks=2, parts=parts)]}, step_fractions=[1.0])
    assert ABOUT["transformer"] in Page(page(side_by_side, [], MACHINE, targets=False)).text
    assert not {"img", "script"} & {*shown.tags}
    assert set(sweep_of(found)) == {"dualtrain torch, shared memory", "dualtrain torch, shared memory, its buffers"}


def test_the_chart_has_one_reference_and_only_contenders_that_are_comparable_with_it():
    found = results(shm=0.1, alone=0.09, ddp_tuned=0.15, ddp_tuned_again=0.15, hvd_mpi=0.3, plain_3=0.1)
    reference, groups = chart_groups(found)
    assert reference == "raw Horovod MPI"
    assert list(groups) == ["small", "resnet18"]
    marks = {mark.label: mark for mark in groups["resnet18"]}
    assert {label: round(mark.found.value, 2) for label, mark in marks.items()} == {
        "dualtrain torch, shared memory": 3.0,
        "raw DDP tuned": 2.0,
    }
    assert [mark.is_dualtrain for mark in marks.values()] == [True, False]
    assert "130.00 ms against 390.00 ms" in marks["dualtrain torch, shared memory"].tip
    assert chart_groups(results(shm=0.1)) == ("", {})
    wide, narrow = (Page(chart(reference, groups, width)) for width in (WIDE, NARROW))
    for shown in (wide, narrow):
        assert shown.tags.count("circle") == 4
        assert shown.tags.count("title") == 4
        assert "3.00 (3.00–3.00)" in shown.text
    assert ElementTree.fromstring(picture(reference, groups)).tag == "{http://www.w3.org/2000/svg}svg"


def test_long_names_do_not_cover_the_intervals():
    found = Results(step_fractions=[1.0])
    for name in ("plain", "virtual"):
        found.samples[name] = [Sample({"virtual-mlp": 1.0})]
    [(name, start)] = re.findall(r'<text x="12"[^>]*>([^<]+)</text><line x1="([\d.]+)"', chart(*chart_groups(found), WIDE))
    assert name == ENTRIES["virtual"].title
    assert float(start) > 12 + 7 * len(name)


def test_ratios_of_any_size_have_a_place_in_the_chart():
    for fast, slow in ((1e-5, 100.0), (100.0, 1e-5), (1.0, 1.0)):
        reference, groups = chart_groups(results(shm=fast, hvd_gloo=slow))
        places = [float(x) for x in re.findall(r'cx="([^"]+)"', chart(reference, groups, WIDE))]
        assert len(places) == 2
        assert all(0 < x < WIDE for x in places)


def test_every_job_has_a_description_and_described_sizes_are_those_of_the_models():
    assert set(ABOUT) == set(JOBS) - {"large"}
    sizes = {"empty": "2 weights", "small": "465,198 weights", "convnet": "29,034 weights"}
    sizes |= {"resnet18": "11.2 M weights", "mlp": "20.0 M weights", "transformer": "4.7 M weights"}
    sizes |= {
        "layers20": "20,394 weights",
        "vgg": "8.7 M weights",
        "mlp33m": "33.6 M weights",
        "layers250": "263,274 weights",
        "linear": "8.4 M weights",
    }
    for name, size in sizes.items():
        count = sum(p.numel() for p in WORKLOADS[name].build().parameters())
        assert size == f"{count / 1e6:.1f} M weights" if " M " in size else f"{count:,} weights"
        assert size in ABOUT[name]


def test_sizes_are_formatted_in_readable_units():
    assert [bytes_of(size) for size in (4, 4096, 1 << 20, 256 << 20, 100_000_000)] == [
        "4 B",
        "4 KB",
        "1 MB",
        "256 MB",
        "100 MB (10⁶)",
    ]


# -- the plan and the workloads -----------------------------------------------------------------------------------


def _job_of(target: str) -> str:
    size = target.partition("/")[2]
    return next((job for job, sizes in SIZES.items() if size and int(size) in sizes), target)


def test_contenders_run_the_jobs_in_which_they_are_compared_and_every_contender_file_is_in_the_plan():
    assert set(LENGTHS) == set(WORKLOADS)
    for comparison in COMPARISONS:
        names = (comparison.one, comparison.other)
        entries = [ENTRIES[comparison.shared_entry or name] for name in names]
        assert not comparison.shared_entry or set(names) <= set(entries[0].option.split(","))
        one, other = ({job.partition("/")[0] for job in jobs_of(entry, JOBS)} for entry in entries)
        needed = {_job_of(target) for target in comparison.targets} - {"*"}
        assert needed <= one & other, comparison
    assert all(_job_of(cost.job) in jobs_of(ENTRIES[cost.one], JOBS) for cost in COSTS if cost.job != "start")
    assert {cost.one for cost in COSTS} | {c.other for c in COSTS} <= {*ENTRIES, ""}
    modules = {entry.module for entry in (*ENTRIES.values(), *CONTENDERS.values()) if " " not in entry.module}
    files = {path.stem for path in (ROOT / "dualtrain" / "bench" / "contenders").glob("[!_]*.py")}
    assert modules == files


def test_a_contender_that_was_left_out_early_is_not_in_the_answer():
    found = results(shm=1.0, native=2.0, hvd_gloo=3.0, hvd_mpi=3.0)
    for name in ("shm", "hvd-gloo"):
        found.samples[name][1:] = [None] * (ROUNDS - 1)
    said = answer(found, rows_of(found))
    assert ENTRIES["native"].title in said
    assert ENTRIES["hvd-gloo"].title not in said
    assert "This is based on" not in said


def test_a_fallback_contender_has_the_comparisons_and_jobs_of_the_original():
    compared = {(comparison.one, comparison.other) for comparison in COMPARISONS}
    for horovod in ("hvd-gloo", FALLBACKS["hvd-gloo"]):
        assert {("shm", horovod), (FALLBACKS["shm"], horovod)} <= compared
    for name, fallback in FALLBACKS.items():
        assert ENTRIES[name].quick
        assert {"small", "convnet"} <= set(jobs_of(ENTRIES[fallback], QUICK))


def test_the_contender_without_communication_has_a_barrier_before_the_first_batch(monkeypatch):
    happened = []
    monkeypatch.setattr(alone, "dist", SimpleNamespace(barrier=lambda: happened.append("barrier")))
    task = Task("tiny", CPU, 0.5)
    batches = task.batches(0)
    monkeypatch.setattr(task, "batches", lambda _: (happened.append("batch") or batch for batch in batches))
    contender = object.__new__(alone.Alone)
    contender.rank = 0
    list(contender.train(task))
    assert happened == ["barrier", *["batch"] * (task.warmup + task.steps)]


def test_resnet18_has_the_weights_and_outputs_of_torchvisions_model():
    from dualtrain.torchvision_shim import torchvision

    ours, theirs = resnet18().eval(), torchvision().models.resnet18(num_classes=10).eval()
    shapes = [[tuple(t.shape) for t in model.state_dict().values()] for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    images = torch.randn(2, 3, 32, 32)
    assert torch.allclose(ours(images), theirs(images), atol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "small", "convnet"])
def test_all_contenders_get_the_same_task(name):
    tasks = [Task(name, CPU, 0.5) for _ in range(2)]
    weights = [[p.detach().clone() for p in task.model().parameters()] for task in tasks]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    first, same, other = (
        list(task.batches(rank)) for task, rank in ((tasks[0], 0), (tasks[1], 0), (Task(name, CPU, 0.5), 1))
    )
    assert len(first) == sum((tasks[0].warmup, tasks[0].steps))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    assert len({id(inputs) for inputs, _ in first}) == DISTINCT


def test_the_generated_samples_are_in_mnists_format(tmp_path):
    from dualtrain.data.mnist import read_mnist

    write_mnist(tmp_path, 50, 20)
    (train, labels), (val, _) = read_mnist("mnist", str(tmp_path))
    assert train.shape == (50, 1, 28, 28)
    assert train.dtype == torch.uint8
    assert val.shape == (20, 1, 28, 28)
    assert set(labels.tolist()) <= set(range(10))
    before = (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes()
    write_mnist(tmp_path, 50, 20)
    assert (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").read_bytes() == before


@pytest.mark.parametrize("option", ["local/native//2", "local/native/virtual/2"])
def test_the_trainer_runs_the_steps_of_a_task(option):
    contender = trainers.start(option, CPU)
    assert (contender.size, contender.parts, contender.virtual_ranks) == (1, 2, 2 if "virtual" in option else None)
    task = Task("tiny", CPU, 0.5)
    before = [p.detach().clone() for p in task.model().parameters()]
    steps = TimedSteps(contender, task)
    run_steps([steps])
    model = steps.finish()
    contender.close()
    assert steps.seconds() > 0
    assert steps.first_step_ended > 0
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Recorded(Contender):
    """Contender that records its steps in ``happened``. On ``clock``, its first step takes 1 s, and each later one 1 ms."""

    def __init__(self, name, happened, clock):
        self.name, self.happened, self.clock = name, happened, clock

    def train(self, task):
        for number in range(task.warmup + task.steps):
            self.happened.append(self.name)
            self.clock[0] += 1.0 if number == 0 else 1e-3
            yield
        return self.name


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timed_steps, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))
    return now


def test_contenders_side_by_side_run_in_turns_of_four_steps_after_their_warm_up(clock):
    happened = []
    task = Task("small", CPU, 0.25)  # 4 warm-up steps and 8 timed ones
    both = [TimedSteps(Recorded(name, happened, clock), task) for name in "AB"]
    run_steps(both)
    assert "".join(happened) == "AAAABBBB" + "AAAABBBB" + "BBBBAAAA"
    assert [steps.finish() for steps in both] == ["A", "B"]
    assert [steps.seconds() for steps in both] == pytest.approx([1e-3, 1e-3])


def test_a_single_contender_runs_all_steps_in_one_turn_and_the_first_step_is_not_timed(clock):
    happened = []
    steps = TimedSteps(Recorded("A", happened, clock), Task("tiny", CPU, 1.0))
    run_steps([steps])
    assert (len(happened), steps.first_step_ended) == (sum(LENGTHS["tiny"]), 1.0)
    assert steps.seconds() == pytest.approx(1e-3)


def test_a_loop_that_goes_on_after_the_last_step_is_an_error(clock):
    steps = TimedSteps(Recorded("A", [], clock), Task("tiny", CPU, 1.0))
    steps.warm_up()
    with pytest.raises(RuntimeError, match="goes on"):
        steps.finish()


def test_times_of_contenders_side_by_side_are_compared_with_each_other_and_not_with_separate_processes():
    lines = [
        {"rank": rank, "size": 2, "part": name, "job": "vgg", "seconds": seconds + rank, "first": 1.0, "sha256": sha256}
        for name, seconds, sha256 in ((TUNED, 1.0, "x"), ("native", 3.0, "y"))
        for rank, sha256 in ((0, sha256), (1, None))
    ]
    sample = sample_of(lines)
    assert sample.step_seconds() == {"vgg": SIDE_STEPS * (2.0 + 4.0)}
    found = Results({BESIDE_DDP: [sample] * ROUNDS, TUNED: [Sample({"vgg": 8.0})] * ROUNDS}, step_fractions=[1.0] * ROUNDS)
    [row] = rows_of(found)
    assert (row.one, row.other, row.job, row.found.value) == ("native", TUNED, "vgg", 0.5)
    assert (row.weights, row.verdict) == ("other numerics", NOT_MET)
    assert row.group.endswith(", in the same processes")
    assert row.group in text(found, [row], {}, targets=True)


@pytest.mark.parametrize("module", [ours, dualtrain_hvd])
def test_the_scale_benchmark_measures_the_time_of_calls_and_steps(module, monkeypatch):
    # Set the variable first, so that monkeypatch removes it after the test.
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    contender = module.start("local/native", CPU)
    # The script on dualtrain.hvd requests huge pages, as under horovodize. A script on dualtrain's own interface does not.
    assert ("THP_MEM_ALLOC_ENABLE" in os.environ) == (module is dualtrain_hvd)
    found = worker._scale(contender, "scale", SimpleNamespace(start=2.0))
    list(contender.train(Task("tiny", CPU, 0.5)))
    assert contender.metric(torch.tensor(2.5)).item() == 2.5
    contender.close()
    times = times_of(found)
    assert {*times, "layers20"} == set(MEASURES)
    assert min(times.values()) > 0


# -- growth with the number of ranks ------------------------------------------------------------------------------


TWO, FOUR = Layout(1, 2), Layout(1, 4)


def results_of(monkeypatch, tmp_path, layouts=(TWO, FOUR)):
    """Measure with simulated contenders; return the results, the specs of the starts, and the log.

    ``shm`` fails with 4 ranks. Rank 0 takes 1 ms for each rank of the world, or 2 ms with Horovod. Rank 1 takes twice as
    long as rank 0.
    """
    specs = []

    def run_forked(context, entry, jobs, spec, step_fraction):
        specs.append(spec)
        if entry is CONTENDERS["shm"] and spec.ranks == 4:
            raise LaunchError("no <memory>")
        seconds = spec.ranks * (2e-3 if entry is CONTENDERS["horovod"] else 1e-3)
        return [{"job": name, "seconds": seconds * (1 + rank)} for name in MEASURES for rank in range(2)]

    monkeypatch.setattr(scale, "run_forked", run_forked)
    monkeypatch.setattr(scale, "fork_server", lambda modules, threads: None)
    said: list[str] = []
    results = scale.ScaleResults(layouts)
    scale.measure_layouts(results, list(CONTENDERS), 2, LaunchSpec(2, "cpu", tmp_path), said.append)
    return results, specs, said


def test_a_contender_that_fails_with_4_ranks_is_reported_and_the_rest_is_measured(monkeypatch, tmp_path):
    results, specs, said = results_of(monkeypatch, tmp_path)
    assert [spec.ranks for spec in specs] == [2] * 10 + [4] * 10
    assert all(0 < spec.timeout < 1000 for spec in specs)
    assert results.failures == {(FOUR, "shm"): "no <memory>"}
    assert results.seconds("barrier", "native", FOUR).value == 8e-3  # the time of the slowest rank
    assert results.ratio("metric", "hvd", "horovod", TWO).value == 0.5
    assert results.ratio("metric", "shm", "torch", FOUR) is None
    assert scale_page.milliseconds_of(results)["barrier"]["shm"] == {"2": 4.0, "4": "no <memory>"}
    assert said[0].startswith("this will take roughly 1 minute on ")
    assert said[-1].startswith("4 ranks, round 2 of 2: raw torch, ")
    assert len([line for line in said if "failed: no <memory>" in line]) == 2


def test_the_results_of_the_scale_benchmark_have_times_ratios_and_a_chart(monkeypatch, tmp_path):
    results, _, _ = results_of(monkeypatch, tmp_path)
    results.missing = {"horovod": "it is not installed"}
    said, shown = scale_page.text(results, MACHINE), Page(scale_page.page(results, MACHINE))
    for words in (
        "barrier, ms",
        "4.000",
        "× 0.50",
        "with 4 ranks: failed: no <memory>",
        "not measured: it is not",
        "two <ranks>",
    ):
        assert words in said
        assert words in shown.text
    assert said.splitlines()[-1] == "dualtrain, shared memory with 4 ranks: failed: no <memory>"
    figure = ElementTree.fromstring(scale_page.picture(results))
    circles = figure.iter("{http://www.w3.org/2000/svg}circle")
    assert len([one for one in circles if len(one)]) == len(MEASURES) * (2 * len(CONTENDERS) - 1)
    assert not {"img", "script"} & {*shown.tags}
    empty = scale.ScaleResults(LAYOUTS, failures={(TWO, "torch"): "no luck"})
    assert "raw torch with 2 ranks: failed: no luck" in Page(scale_page.page(empty, MACHINE)).text


def test_a_ratio_whose_interval_contains_1_shows_no_difference():
    times = {"native": (1.0, 2.0, 3.0), "torch": (2.0, 2.0, 2.0), "hvd": (0.1, 0.2, 0.3), "horovod": (1.0, 1.0)}
    results = scale.ScaleResults((TWO,))
    for name, values in times.items():
        results.rounds[TWO, name] = {number: {"barrier": seconds} for number, seconds in enumerate(values)}
    cells = {row[0]: row[1:] for row in scale_page.rows_of(results)}
    assert cells["dualtrain, native / raw torch"] == ["not shown (0.50–1.50)"]
    assert cells["dualtrain.hvd / raw torch"] == ["× 0.10 (0.05–0.15)"]
    ratios = scale_page.ratios_of(results)["barrier"]
    assert ratios["native / torch"]["2"] == {"value": 1, "low": 0.5, "high": 1.5, "pairs": 3, "level": 0.75, "shown": False}
    assert ratios["hvd / horovod"]["2"]["pairs"] == 2  # the rounds that both contenders completed
    assert "probability of 75.0 % (3 rounds), 50.0 % (2 rounds)" in scale_page.text(results, MACHINE)
    assert "2 ranks: 2000.0 ms (1000.0–3000.0)" in scale_page.chart(results)


def test_intervals_and_labels_of_the_scale_chart_do_not_cover_each_other():
    ranks = (2, 30, 31, 32)
    results = scale.ScaleResults(tuple(Layout(1, count) for count in ranks))
    for layout in results.layouts:
        for name in ("torch", "native"):
            results.rounds[layout, name] = {number: {"start": float(number + 1)} for number in range(3)}
    figure = scale_page.chart(results)
    intervals = re.findall(r'<line x1="([\d.]+)" y1="[\d.]+" x2="\1"', figure)
    assert len(intervals) == len(set(intervals)) == 2 * len(ranks)
    assert re.findall(r">(\d+)</text>", figure) == ["2", "30"]
    assert re.findall(r">(\d+ m?s)</text>", figure) == ["1 s", "10 s"]


def test_there_are_fewer_rounds_with_more_ranks():
    assert [rounds_with(ranks) for ranks in (2, 4, 8, 16, 32)] == [7, 7, 6, 3, 1]
    assert expected_seconds(32, 5, 1, 2) > expected_seconds(2, 5, 1, 2)


def test_ranks_are_forked_and_their_results_are_collected(tmp_path):
    spec = LaunchSpec(2, "cpu", tmp_path)
    before = set(multiprocessing.active_children())  # the processes of other tests' worlds
    found = run_forked(forked.server(), CONTENDERS["native"], ["scale"], spec, 1.0)
    assert len(found) == 2 * len(set(MEASURES) - {"layers20"})
    assert {one["size"] for one in found} == {2}
    with pytest.raises(LaunchError, match="no backend is called"):
        run_forked(
            forked.server(), dataclasses.replace(CONTENDERS["native"], option="unknown/native"), ["scale"], spec, 1.0
        )
    with pytest.raises(LaunchError, match="did not end within 0 s"):
        run_forked(forked.server(), CONTENDERS["native"], ["scale"], dataclasses.replace(spec, timeout=0.0), 1.0)
    assert set(multiprocessing.active_children()) <= before


def test_an_interrupted_scale_benchmark_writes_its_results_and_one_without_results_returns_1(monkeypatch, tmp_path, capsys):
    calls = []

    def measure_layouts(results, names, rounds, spec, log):
        calls.append((results.layouts, rounds))
        if rounds != 3:
            results.rounds[TWO, "torch"] = {0: dict.fromkeys(MEASURES, 0.5)}
        if rounds == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(scale, "measure_layouts", measure_layouts)
    measured, interrupted, nothing = [], ["--ranks", "4,2", "--pairs", "2"], ["--pairs", "3"]
    for flags, status, shown in ((measured, 0, "500.0"), (interrupted, 130, "500.0"), (nothing, 1, "")):
        assert main(["--scale", "--out", str(tmp_path), *flags]) == status
        assert shown in capsys.readouterr().out
    assert calls == [(LAYOUTS, None), ((TWO, FOUR), 2), (LAYOUTS, 3)]
    # The last benchmark has no results, and removes the chart of the previous one.
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.html"}


def test_the_ranks_flag_accepts_numbers_of_ranks_and_nodes_x_ranks():
    assert layouts_of("4x2,8, 2,2x4,8") == (Layout(1, 2), Layout(1, 8), Layout(2, 4), Layout(4, 2))
    assert [str(layout) for layout in LAYOUTS] == ["2", "4", "8", "16", "32", "2x4", "4x4"]
    assert [layout.ranks for layout in LAYOUTS] == [2, 4, 8, 16, 32, 8, 16]
    for value in ("", "2,", "1", "1x1", "0x4", "65x2", "64x17", "2x", "-2", "2x2x2", "²"):
        with pytest.raises(UserError, match="--ranks must be"):
            layouts_of(value)


def test_virtual_nodes_that_cannot_be_made_are_reported_and_the_rest_is_measured(monkeypatch, tmp_path):
    @contextlib.contextmanager
    def refused(count, folder):
        raise NodesError("not permitted")
        yield

    monkeypatch.setattr(scale, "virtual_nodes", refused)
    results, specs, said = results_of(monkeypatch, tmp_path, (TWO, Layout(2, 4)))
    assert [spec.ranks for spec in specs] == [2] * 10
    assert results.unavailable == {Layout(2, 4): "not permitted"}
    assert said[-1] == "2 × 4 ranks: not measured: not permitted"
    assert said[-1] in scale_page.text(results, MACHINE)
    assert json.loads(dict(scale._files(results, MACHINE))["bench.json"])["unavailable"] == {"2x4": "not permitted"}
    assert scale_page.charted_layouts(results) == [TWO]
    only_nodes = scale.ScaleResults((Layout(2, 4),), rounds={(Layout(2, 4), "torch"): {0: dict.fromkeys(MEASURES, 0.5)}})
    assert "500.0" in scale_page.page(only_nodes, MACHINE)
    assert [name for name, _ in scale._files(only_nodes, MACHINE)] == ["bench.json", "bench.html"]


@pytest.mark.parametrize("name", ["native", "horovod"])
def test_ranks_on_two_virtual_nodes_connect_and_the_nodes_end_afterwards(name, tmp_path):
    require_hosts()
    if name == "horovod":
        require_horovod()
    with virtual_nodes(2, tmp_path) as nodes:
        spec = LaunchSpec(2, "cpu", tmp_path, nodes=tuple(nodes))
        found = run_forked(forked.server(), CONTENDERS[name], ["scale"], spec, 1.0)
        assert {one["rank"] for one in found} == {0, 1}
        nodes[1].call_on_network(lambda: socket.create_server((nodes[1].address, 0))).close()
        with pytest.raises(OSError, match="assign"):
            socket.create_server((nodes[1].address, 0))  # this thread is not on the node's network
    assert not any(Path(f"/proc/{node.pid}").exists() for node in nodes)


def test_a_node_that_cannot_mount_a_file_or_hangs_is_an_error(tmp_path, monkeypatch):
    require_hosts()
    (tmp_path / "mount").write_text("#!/bin/sh\necho refused >&2\nexit 1\n")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(NodesError, match=r"virtual nodes need root .*: refused"), virtual_nodes(1, tmp_path):
        pass
    (tmp_path / "unshare").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr(nodes_of_bench, "_SECONDS", 0.0)
    with pytest.raises(NodesError, match="'unshare --net' is not ready after 0 s"), virtual_nodes(1, tmp_path):
        pass


# -- launching ----------------------------------------------------------------------------------------------------


def test_lines_of_ranks_are_found_behind_a_launchers_prefix():
    said = f'[1]<stdout>:{MARK}{{"rank": 1}}\nnoise\n{MARK}{{"rank": 0}}\n'
    assert results_in(said) == [{"rank": 1}, {"rank": 0}]
    for mixed in (f'{MARK}{{"rank": {MARK}{{"rank": 0}}\n1}}\n', f'{MARK}{{"rank"\n', f"{MARK}{{1}}\n"):
        with pytest.raises(LaunchError, match="incomplete lines"):
            results_in(mixed)


def test_a_sample_has_the_time_of_the_slowest_rank_and_the_weights_of_rank_0():
    lines = [
        {"rank": 0, "size": 2, "job": "small", "seconds": 1.0, "first": 5.0, "sha256": "a"},
        {"rank": 1, "size": 2, "job": "small", "seconds": 2.0, "first": 6.0, "sha256": None},
        {"rank": 0, "size": 2, "job": "trainer", "trainer": 3.0, "by hand": 2.0},
        {"rank": 0, "size": 2, "job": "sweep", "bytes": 4, "way": "tensor", "seconds": 0.5},
    ]
    found = sample_of(lines)
    assert found.seconds == {"small": 2.0, "trainer": 1.0, "sweep/4/tensor": 0.5, "start": 5.0}
    assert (found.sha256, found.ranks) == ({"small": "a"}, 2)


@pytest.mark.parametrize("version", ["mpirun (Open MPI) 4.1.8", "HYDRA build details"])
def test_ranks_over_mpi_are_started_by_open_mpis_mpirun_or_else_by_horovodrun(version, tmp_path, monkeypatch):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o755)
    started = []
    monkeypatch.setattr(start_contender, "_program_path", lambda name: str(mpirun) if name == "mpirun" else name)
    monkeypatch.setattr(start_contender, "_run_commands", lambda commands, spec: started.extend(commands) or "")
    start_contender._open_mpi.cache_clear()
    try:
        run_program(["python", "x.py"], MPI, LaunchSpec(3, "cpu", tmp_path))
    finally:
        start_contender._open_mpi.cache_clear()
    ((command, _),) = started
    assert Path(command[0]).name == ("mpirun" if "Open MPI" in version else "horovodrun")
    assert command[-2:] == ["python", "x.py"]
    expected = ["-H", "localhost:3"] if "Open MPI" in version else ["-np", "3"]
    assert expected in [command[at : at + 2] for at in range(len(command))]


def test_gloos_ranks_have_the_variables_that_horovodrun_sets(tmp_path):
    program = f"import json, os; os.write(1, ({MARK!r} + json.dumps(dict(os.environ)) + chr(10)).encode())"
    said = results_in(run_program([sys.executable, "-c", program], GLOO, LaunchSpec(2, "cpu", tmp_path)))
    worlds = [detect_world(env) for env in said]
    assert sorted((w.rank, w.local_rank, w.size, w.local_size) for w in worlds) == [(0, 0, 2, 2), (1, 1, 2, 2)]
    assert {w.launcher for w in worlds} == {"horovodrun --gloo"}
    assert {env["HOROVOD_CONTROLLER"] for env in said} == {"gloo"}


def test_the_port_of_the_rendezvous_is_not_one_that_linux_gives_to_other_sockets(tmp_path, monkeypatch):
    with start_contender.rank_environments("ranks", LaunchSpec(2, "cpu", tmp_path)) as ranks:
        ports = {env["MASTER_PORT"] for env in ranks}
    monkeypatch.setattr(os, "environ", {})
    meet(tmp_path / "meet")
    assert len(ports) == 1
    assert all(20000 <= int(port) < 32768 for port in (*ports, os.environ["MASTER_PORT"]))


def test_the_error_of_a_failed_rank_is_reported(tmp_path):
    program = "import os, time; os.environ['RANK'] == '1' and 1 / 0; time.sleep(100)"
    with pytest.raises(LaunchError, match="ZeroDivisionError: division by zero"):
        run_program([sys.executable, "-c", program], "ranks", LaunchSpec(2, "cpu", tmp_path))


def test_processes_that_outlive_their_leader_are_ended(tmp_path):
    program = "import os, time\nif os.fork() == 0:\n    open('pid', 'w').write(str(os.getpid()))\n"
    program += "    time.sleep(100)\n    os._exit(0)\n"
    program += "while not os.path.exists('pid') or not open('pid').read(): time.sleep(0.01)\n"
    run_program(
        [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{program}"],
        "ranks",
        LaunchSpec(1, "cpu", tmp_path),
    )
    assert forked.has_ended(int((tmp_path / "pid").read_text()))


def test_if_a_rank_cannot_be_started_the_started_ranks_are_ended(tmp_path, monkeypatch):
    started, start = [], start_contender.subprocess.Popen

    def start_one(*args, **options):
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start(*args, **options))
        return started[0]

    monkeypatch.setattr(start_contender.subprocess, "Popen", start_one)
    with pytest.raises(LaunchError, match=r"cannot be started \(Resource temporarily unavailable"):
        run_program([sys.executable, "-c", "import time; time.sleep(100)"], "ranks", LaunchSpec(2, "cpu", tmp_path))
    assert started[0].poll() is not None


def test_a_contender_that_fails_twice_is_left_out_of_later_rounds(tmp_path, monkeypatch):
    calls = []

    def run_entry(entry, jobs, spec, step_fraction):
        calls.append(entry.title)
        if entry.module == "alone":
            raise LaunchError("no luck")
        return [{"rank": 0, "size": 2, "job": "tiny", "seconds": 1.0, "first": 1.0, "sha256": "a"}]

    monkeypatch.setattr(measure, "run_entry", run_entry)
    said: list[str] = []
    plan = Plan(["alone", TUNED], ("tiny",), 3, 0.5, 1000)
    found = measure.measure(plan, LaunchSpec(2, "cpu", tmp_path), said.append)
    assert calls.count("no communication") == 2
    assert calls.count("raw DDP tuned") == 3
    assert found.missing == {"alone": "no luck"}
    assert found.failures == {"alone": ["no luck", "no luck"]}
    assert any("failed, left out: no luck" in line for line in said)
    assert len(found.pairs(TUNED, TUNED)) == 3


def run_with(monkeypatch, tmp_path, plan, good_starts=None):
    """Run ``plan`` without processes; return the started modules with their options, in order, and the results.

    ``good_starts`` maps a module with its option to the number of starts after which it fails. The others never fail.
    """
    calls = []

    def run_entry(entry, *_):
        calls.append(f"{entry.module} {entry.option}".strip())
        if calls.count(calls[-1]) > (good_starts or {}).get(calls[-1], len(calls)):
            raise LaunchError("no luck")
        return [{"rank": 0, "size": 2, "job": "tiny", "seconds": 1.0, "first": 1.0, "sha256": "a"}]

    monkeypatch.setattr(measure, "run_entry", run_entry)
    return calls, measure.measure(plan, LaunchSpec(2, "cpu", tmp_path), lambda _: None)


def test_the_order_of_contenders_alternates_between_rounds(tmp_path, monkeypatch):
    calls, _ = run_with(monkeypatch, tmp_path, Plan(["alone", TUNED], ("tiny",), 3, 0.5, 1000))
    assert calls == ["alone", "ddp tuned", "ddp tuned", "alone", "alone", "ddp tuned"]


@pytest.mark.parametrize(
    ("good_starts", "expected"),
    [
        (0, ["ours torch/shm", "ours torch/shm", "ours torch/native", "ddp tuned", "ddp tuned", "ours torch/native"]),
        (1, ["ours torch/shm", "ddp tuned", "ddp tuned", "ours torch/shm", "ours torch/shm", "ours torch/native"]),
    ],
)
def test_a_fallback_takes_the_place_of_a_contender_that_cannot_run(good_starts, expected, tmp_path, monkeypatch):
    plan = Plan(["shm", TUNED], ("tiny",), 2, 0.5, 1000, {"shm": "native"})
    calls, found = run_with(monkeypatch, tmp_path, plan, good_starts={"ours torch/shm": good_starts})
    assert calls == expected
    assert len(found.pairs("native", TUNED)) == 2 - good_starts


def test_horovod_is_measured_over_mpi_if_it_cannot_run_over_gloo(tmp_path, monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "_missing", lambda names, _: {name: "no" for name in names if name == "hvd-gloo"})
    monkeypatch.setattr(bench, "measure", lambda one, *_: plans.append(one) or Results())
    monkeypatch.setattr(bench, "_conclude", lambda *_, targets: 0)
    for flags, there in (([], True), (["--contenders", f"hvd-gloo,{TUNED}"], False)):
        assert main(["--quick", "--out", str(tmp_path), *flags]) == 0
        assert ("hvd-mpi" in plans[-1].entries) == there
        assert "hvd-gloo" not in plans[-1].entries
        assert plans[-1].rounds == ROUNDS


def test_the_error_of_jobs_without_contenders_names_the_jobs(tmp_path, capsys):
    assert main(["--quick", "--jobs", "epoch", "--out", str(tmp_path / "out")]) == 2
    assert "has any of the chosen jobs (epoch)" in capsys.readouterr().err


def test_the_error_names_the_reasons_if_no_contender_can_be_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "missing_package", lambda entry: "")
    # Not mpirun: --launch refuses a program that is not installed, and Open MPI is optional.
    flags = ["--contenders", "hvd-gloo", "--jobs", "tiny", "--launch", "env"]
    assert main([*flags, "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "can be started (raw Horovod Gloo: env cannot start it" in errors[0]


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("horovodrun --gloo -np 2", {"hvd-mpi": "horovodrun without --mpi may use another controller"}),
        ("horovodrun --mpi -np 2", {"hvd-gloo": "horovodrun without --gloo may use another controller"}),
        ("horovodrun -np 2", {"hvd-gloo": "horovodrun without --gloo", "hvd-mpi": "horovodrun without --mpi"}),
        ("mpirun -np 2", {"hvd-gloo": "mpirun cannot start it"}),
        ("srun", {"hvd-gloo": "srun cannot start it", "hvd-mpi": "srun cannot start it"}),
    ],
)
def test_a_launch_command_starts_only_the_horovod_that_it_names(command, missing, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "missing_package", lambda entry: "")
    found = bench._missing(["hvd-gloo", "hvd-mpi", TUNED], LaunchSpec(2, "cpu", tmp_path, tuple(command.split())))
    assert found.keys() == missing.keys()
    for name, reason in missing.items():
        assert found[name].startswith(reason)
        assert found[name].endswith(f": give --launch '{ENTRIES[name].starter} …'")


def test_the_cost_of_virtual_ranks_is_measured_only_on_request(tmp_path, monkeypatch, capsys):
    plans = []
    monkeypatch.setattr(bench, "measure", lambda one, *_: plans.append(one) or Results())
    monkeypatch.setattr(bench, "_conclude", lambda *_, targets: 0)
    for flags in ([], ["--quick"], ["--jobs", "virtual"], ["--jobs", "virtual", "--launch", "env"]):
        assert main(["--out", str(tmp_path), *flags]) == 0
    ordinary, quick, virtual, launched = plans
    virtual_only = {name for name, entry in ENTRIES.items() if entry.workloads == VIRTUAL}
    assert not virtual_only & {*ordinary.entries, *quick.entries}
    here = {name for name in virtual_only if not ENTRIES[name].needs or find_spec(ENTRIES[name].needs)}
    assert (set(virtual.entries), virtual.jobs) == (here, VIRTUAL)
    assert launched.entries == ["plain", "virtual"]
    said = capsys.readouterr().err
    assert "4 virtual ranks: left out: its number of ranks is 1, but --launch sets the number for all" in said


def test_a_contender_may_have_its_own_number_of_ranks(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        start_contender, "run_program", lambda program, starter, spec, meet: started.append(spec.ranks) or ""
    )
    for name in ("virtual-1", "virtual", "virtual-3"):
        start_contender.run_entry(ENTRIES[name], ["virtual-mlp"], LaunchSpec(2, "cpu", tmp_path), 1.0)
    assert started == [1, 2, 3]


@pytest.mark.parametrize("error", [LaunchError("no luck"), OSError("no luck")])
def test_a_contender_that_fails_once_is_started_again(error, tmp_path, monkeypatch):
    line = {"rank": 0, "size": 2, "job": "tiny", "seconds": 1.0, "first": 1.0, "sha256": "a"}
    ends: list[object] = [error, [line]]

    def run_entry(*_):
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(measure, "run_entry", run_entry)
    found = measure.measure(Plan([TUNED], ("tiny",), 1, 0.5, 1000), LaunchSpec(2, "cpu", tmp_path), lambda _: None)
    assert found.missing == {}
    assert found.samples[TUNED][0] is not None
    assert "failed in 1 of its starts: no luck" in text_of(found)


def test_a_round_that_would_not_end_in_time_is_not_begun(tmp_path, monkeypatch):
    line = {"rank": 0, "size": 2, "job": "tiny", "seconds": 1.0, "first": 1.0, "sha256": "a"}
    monkeypatch.setattr(measure, "run_entry", lambda *_: [line])
    said: list[str] = []
    found = measure.measure(Plan([TUNED], ("tiny",), 7, 0.5, 0.0), LaunchSpec(2, "cpu", tmp_path), said.append)
    assert found.rounds == 1
    assert "1 of 7 rounds" in said[-1]


def rounds_at(monkeypatch, tmp_path, start_seconds, times, limit, max_fraction=1.0):
    """Run rounds of three contenders on a simulated clock; return the results, sample counts, the end time and the log.

    Each start of a contender takes ``start_seconds``, plus the time of its steps. ``times`` lists the seconds of one step
    of ``resnet18``, one value per round; its last value is used for all later rounds. ``limit`` is the time limit for all
    rounds in seconds, and ``max_fraction`` the largest fraction of the steps that a round takes.
    """
    clock = [0.0]
    said: list[str] = []
    names = ["alone", TUNED, "ddp"]
    calls = []

    def run_entry(entry, jobs, spec, step_fraction):
        step_seconds = times[min(len(calls) // len(names), len(times) - 1)]
        calls.append(entry.title)
        clock[0] += start_seconds + step_seconds * Task("resnet18", CPU, step_fraction).steps
        return [{"rank": 0, "size": 2, "job": "resnet18", "seconds": step_seconds, "first": -60.0, "sha256": "a"}]

    for one in (pace, measure):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(measure, "run_entry", run_entry)
    plan = Plan(names, ("resnet18",), ROUNDS, max_fraction, limit)
    found = measure.measure(plan, LaunchSpec(2, "cpu", tmp_path), said.append)
    return found, [found.count(name) for name in names], clock[0], said


def test_a_fast_machine_takes_all_steps_in_all_rounds_but_the_first(monkeypatch, tmp_path):
    found, counts, _, _ = rounds_at(monkeypatch, tmp_path, 10, [3], 1140)
    assert found.step_fractions == [0.125, *[1.0] * 6]
    assert counts == [7, 7, 7]
    assert rounds_at(monkeypatch, tmp_path, 2, [0.5], 170, max_fraction=0.5)[0].step_fractions == [0.125, *[0.5] * 6]


def test_a_slow_machine_takes_fewer_steps_but_all_rounds(monkeypatch, tmp_path):
    found, counts, ended, _ = rounds_at(monkeypatch, tmp_path, 30, [8], 1140)
    assert found.step_fractions[0] == 0.125 <= found.step_fractions[1] < 1
    assert counts == [7, 7, 7]
    assert 900 < ended <= 1140


def test_rounding_of_steps_does_not_drop_the_last_round(monkeypatch, tmp_path):
    for tenths in range(300, 500):
        _, counts, ended, _ = rounds_at(monkeypatch, tmp_path, tenths / 10, [0.9], 1140)
        assert counts == [7, 7, 7], tenths
        assert ended <= 1140


def test_a_contender_that_hangs_is_ended_when_the_time_is_up(monkeypatch, tmp_path):
    clock, timeouts = [0.0], []

    def run_entry(entry, jobs, spec, step_fraction):
        timeouts.append(spec.timeout)
        clock[0] += 40 if len(timeouts) < 3 else spec.timeout
        if len(timeouts) == 3:
            raise LaunchError("it did not end")
        return [{"rank": 0, "size": 2, "job": "tiny", "seconds": 0.0, "first": 1.0, "sha256": "a"}]

    for one in (pace, measure):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(measure, "run_entry", run_entry)
    said: list[str] = []
    found = measure.measure(Plan([TUNED], ("tiny",), 7, 0.5, 170), LaunchSpec(2, "cpu", tmp_path), said.append)
    assert timeouts == [240, 130, 90]
    assert (clock[0], found.count(TUNED), found.missing) == (170, 2, {})
    assert "no time is left for another start: it did not end" in said[-2]
    assert "failed in 1 of its starts: it did not end" in text_of(found)


def test_a_machine_that_was_slow_in_the_first_round_completes_all_rounds(monkeypatch, tmp_path):
    found, counts, ended, _ = rounds_at(monkeypatch, tmp_path, 20, [30, 10, 3], 1140)
    assert found.step_fractions[0] == 0.125 < found.step_fractions[-1]
    assert counts == [7, 7, 7]
    assert ended <= 1140


def test_a_very_slow_machine_takes_fewer_rounds(monkeypatch, tmp_path):
    found, counts, ended, said = rounds_at(monkeypatch, tmp_path, 60, [40], 1140)
    assert found.step_fractions == [0.125] * 2
    assert (counts, ended <= 1140) == ([2, 2, 2], True)
    assert said[-1] == "2 of 7 rounds were run: another round would not end within 19 minutes"


def test_a_round_ends_when_no_time_is_left_for_the_next_contender(monkeypatch, tmp_path):
    found, counts, _, said = rounds_at(monkeypatch, tmp_path, 10, [1, 30], 185)
    assert (found.rounds, counts) == (2, [1, 2, 2])
    assert said[-1] == "round 2 of 7 ends: no time is left for 'no communication'"


def test_a_single_round_takes_the_largest_fraction_of_the_steps():
    assert pace.Pace(1, 170.0, 0.5).step_fraction == 0.5


def test_the_weights_are_compared_in_each_round_separately():
    found = results(shm=0.1, ddp_tuned=0.15, hvd_gloo=0.2)
    for column in found.samples.values():
        column[3].sha256["resnet18"] = "after fewer steps"
    assert row(rows_of(found), "shm", TUNED).weights == "same"
    found.samples["shm"][3].sha256["resnet18"] = "raw"
    assert row(rows_of(found), "shm", TUNED).weights == "other numerics"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0"], "--nproc"),
        (["--nproc", "9999"], "9999 ranks are too many for this host"),
        (["--pairs", "few"], "--pairs"),
        (["--contenders", "ddp,fsdp"], "--contenders: 'fsdp' is not known: choose from alone"),
        (["--jobs", "lenet"], f"--jobs: 'lenet' is not known: choose from {', '.join((*JOBS, *GROUPS))}"),
        (
            ["--jobs", "stall", "--contenders", "alone"],
            "none of the chosen contenders (alone) has any of the chosen jobs (stall)",
        ),
        (["--out", "/dev/null/bench"], "cannot be written (Not a directory)"),
        (["--out", "x" * 300], "cannot be written (File name too long)"),
        (["--out", f"new/folder/{'x' * 300}"], "cannot be written (File name too long)"),
        (["--device", "tpu"], "--device"),
        (["--launch", "mpirun 'open"], "--launch"),
        (["--launch", " "], "--launch has no command"),
        (["extra"], "unrecognized"),
        (["--ranks", "2"], "--ranks has no effect without --scale"),
        (["--nproc", "3", "--launch", "mpirun -np 4"], "--nproc has no effect with --launch"),
        (["--scale", "--ranks", "2,1"], "--ranks must be numbers of ranks from 2 to 1024"),
        (["--scale", "--quick"], "--scale cannot be combined with --quick"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().err
    assert said.startswith("dualtrain: error: ")
    assert words in said
    assert said.count("\n") == 1


def test_the_users_own_files_in_the_folder_of_results_stay(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".bench.json.tmp").symlink_to(target)
    used = []
    monkeypatch.setattr(bench, "measure", lambda plan, spec, log: used.append(spec.folder) or Results())
    monkeypatch.setattr(
        bench, "_conclude", lambda folder, *_, targets: result_files.write_whole(folder / "bench.json", b"{}") or 0
    )
    assert main(["--quick", "--out", str(tmp_path), "--contenders", f"alone,{TUNED}"]) == 0
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years"
    assert target.read_text() == "mine"
    assert used[0].parent == tmp_path
    assert not used[0].exists()


def test_the_bench_refuses_to_run_as_a_rank(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    assert "run it once, without a launcher" in capsys.readouterr().err


def test_wait_for_gpu_synchronizes_only_on_cuda(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronized"))
    contender = Contender()
    for device in ("cpu", "cuda"):
        contender.device = torch.device(device)
        contender.wait_for_gpu()
    assert calls == ["synchronized"]


def test_the_reason_of_a_framed_message_of_mpirun_is_its_first_line() -> None:
    rule = "-" * 74
    message = f"{rule}\nmpirun has detected an attempt to run as root.\n\nUse another user.\n{rule}\n"
    assert reason_in(f"a line\n{message}") == "mpirun has detected an attempt to run as root."
    assert reason_in(f"{message}ValueError: wrong\n") == "ValueError: wrong"
    trace = "Traceback (most recent call last):\nValueError: wrong\n"
    assert reason_in(f"{rule}\n{trace}{message}") == reason_in(f"{rule}\na title\n{trace}{message}") == "ValueError: wrong"
