"""The report: the contents of the page, from complete and from broken run folders."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualtrain.compare import COLUMNS, table
from dualtrain.errors import UserError
from dualtrain.report.__main__ import main
from dualtrain.report.document import asset
from dualtrain.report.report_charts import MOST_DOTS, MOST_POINTS, PANELS, charts, thinned
from dualtrain.report.report_page import page
from dualtrain.report.runs import COLORS, RANKS, differing_settings, read_runs, results, same_weights
from dualtrain.run_folder.attempt_events import Death, as_event
from dualtrain.run_table import read_summary

SUMMARY = {
    "backend": "torch",
    "transport": "gloo",
    "launcher": "torchrun",
    "world_size": 2,
    "device": "cpu",
    "steps": 40,
    "train_loss": 0.5,
    "val_loss": 0.4,
    "val_accuracy": 0.91,
    "samples_per_second": 1234.5,
    "seconds": 3.21,
    "weights_sha256": "0123456789abcdef0123",
}


def lines(steps: int = 40) -> list[dict[str, Any]]:
    speed = {"samples_per_second": 1000.0}
    logged = [{"step": n, "epoch": 0, "kind": "step", "loss": 1 / n, "lr": 0.1, **speed} for n in range(10, steps + 1, 10)]
    ends = {"train_loss": 0.5, "train_accuracy": 0.8, "val_loss": 0.4, "val_accuracy": 0.9, "val_top5": 1.0}
    return [*logged, {"step": steps, "epoch": 1, "kind": "epoch", **ends, **speed}]


def make(folder: Path, summary: dict[str, Any] | None = SUMMARY, *, metrics: str | None = None, **config: Any) -> str:
    """Make the folder of a run; return its path. A run whose ``summary`` is None has not finished."""
    folder.mkdir(parents=True)
    written = "".join(json.dumps(line) + "\n" for line in lines())
    (folder / "metrics.jsonl").write_text(written if metrics is None else metrics)
    (folder / "config.json").write_text(json.dumps({"dataset": "digits", "run_dir": str(folder), "lr": 0.1, **config}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


class Page(html.parser.HTMLParser):
    """Parser of a page's tags, attributes, text, style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.text = self.style = self.script = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("style", "script") and data.strip():
            setattr(self, self.tags[-1], getattr(self, self.tags[-1]) or data)
        else:
            self.text += data

    def all(self, name: str) -> list[str]:
        """Return all values of an attribute."""
        return [attributes[name] for _, attributes in self.attributes if name in attributes]


def page_of(path: Path) -> Page:
    return Page(path.read_text())


def test_the_report_of_one_run_is_written_to_the_runs_folder(tmp_path, capsys):
    folder = Path(make(tmp_path / "run"))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html")]
    shown = page_of(folder / "report.html")
    for cell in ("torchrun", "gloo", "0.5000", "0.9100", "1234", "3.2", "0123456789abcdef", "finished"):
        assert cell in shown.text
    assert "0123456789abcdef0" not in shown.text


def test_the_page_is_one_file_for_any_screen_and_allows_only_its_own_script(tmp_path):
    shown = Page(page(read_runs([make(tmp_path / "run")])))
    assert [*shown.all("src"), *shown.all("href"), *shown.all("xlink:href")] == ["data:,"]
    assert "@import" not in shown.style
    assert "url(" not in shown.style
    assert "prefers-color-scheme: dark" in shown.style
    metas = {
        attributes.get("name"): attributes["content"] for tag, attributes in shown.attributes if "content" in attributes
    }
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    digest = base64.b64encode(hashlib.sha256(shown.script.encode()).digest()).decode()
    assert metas[None].startswith("default-src 'none';")
    assert metas[None].endswith(f"; script-src 'sha256-{digest}'")
    assert shown.tags.count("script") == 1
    assert all(f"--c{number}:" in shown.style for number in range(COLORS))


def test_a_single_run_shows_its_origin_and_all_of_its_settings(tmp_path):
    origin = {
        "command": "python -m dualtrain.main --lr <1>",
        "commit": "0123abc-dirty",
        "started": "2030-01-02T03:04:05+00:00",
        "hosts": {"alpha": 1, "beta": 3},
        "versions": {"torch": "2.15.0", "Horovod": "0.28.1"},
        **{name: SUMMARY[name] for name in RANKS},
    }
    running = make(tmp_path / "running", None, origin=origin, weight_decay=0.25, backend="auto", device="auto")
    assert results(read_runs([running])).rows[1][1:6] == ["not finished", "torch (gloo)", "torchrun", "2", "cpu"]
    finished = make(tmp_path / "finished", {**SUMMARY, **origin, "commit": "fff"}, origin=origin)
    for folder, commit in ((running, "0123abc-dirty"), (finished, "fff")):
        shown = Page(page(read_runs([folder])))
        for words in ("--lr <1>", commit, "2030-01-02", "alpha (1 rank), beta (3 ranks)", "torch 2.15.0, Horovod 0.28.1"):
            assert words in shown.text
        assert "origin" not in shown.text
    settings = Page(page(read_runs([running])).replace("<dd>", "\n")).text
    assert all(words in settings for words in ("weight_decay\n0.25", "\nbackend\nauto: torch\n", "\ndevice\nauto: cpu\n"))
    both = differing_settings(read_runs([running, finished]))
    assert both is not None
    assert [row for row in both.rows if row[0] in ("commit", "versions", "command")] == [["commit", "0123abc-dirty", "fff"]]
    # The origin, or a part of it, may be missing or of another type.
    for odd in ({}, {"origin": 7}, {"origin": {"hosts": "one", "versions": [1], "commit": {"<b>": 1}}}):
        assert Page(page(read_runs([make(tmp_path / str(len(str(odd))), None, **odd)]))).tags.count("b") == 0


def test_recoveries_are_listed(tmp_path):
    one = {"cause": "rank 1 was killed", "rank": 1, "step": 30, "steps_repeated": 4, "seconds": 2.345}
    runs = read_runs(
        [make(tmp_path / "a", {**SUMMARY, "recoveries": [one, "odd", {"cause": "<i>"}]}), make(tmp_path / "b")]
    )
    shown = page(runs)
    assert "<td>rank 1 was killed</td><td>1</td><td>30</td><td>4</td><td>2.3</td>" in shown
    assert "<td>&lt;i&gt;</td><td>–</td><td>–</td><td>–</td><td>–</td>" in shown
    for value in ([], None, {"cause": 1}):
        odd = make(tmp_path / str(value), {**SUMMARY, "recoveries": value})
        assert "Recoveries" not in Page(page(read_runs([odd]))).text


def test_several_runs_get_one_report_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run", {**SUMMARY, "backend": "horovod"}, lr=0.2)]
    assert main(runs) == 0
    assert capsys.readouterr().out.split() == ["report.html"]
    shown = page_of(tmp_path / "report.html")
    for word in ("a/run", "b/run", "horovod", "Same weights: yes", "Settings that differ", "0.2"):
        assert word in shown.text


def test_the_flag_out_sets_the_path_of_the_page(tmp_path):
    assert main([make(tmp_path / "run"), "--out", str(tmp_path / "mine.html")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine.html"}


# -- charts


def paths_of(shown: Page) -> dict[tuple[str, str], list[str]]:
    """Return the path data of all curves, by run and kind of curve."""
    found: dict[tuple[str, str], list[str]] = {}
    run = ""
    for tag, attributes in shown.attributes:
        run = attributes["data-run"] if tag == "g" and "data-run" in attributes else run
        if tag == "path" and "data-name" in attributes:
            found.setdefault((run, attributes["data-kind"]), []).append(attributes["d"])
    return found


def test_charts_contain_the_curves_of_all_runs_in_data_coordinates(tmp_path):
    shown = Page(page(read_runs([make(tmp_path / "a"), make(tmp_path / "b")])))
    found = paths_of(shown)
    assert set(found) == {(run, kind) for run in "01" for kind in ("step", "train", "val", "mean")}
    assert found["0", "step"] == found["1", "step"]
    assert found["0", "step"][0] == "M10,-0.1 20,-0.05 30,-0.0333333 40,-0.025"  # -1/step: SVG's y points down
    assert found["1", "val"][0] == "M40,-0.4"
    assert shown.tags.count("figcaption") == len(PANELS)
    buttons = [attributes for tag, attributes in shown.attributes if tag == "button"]
    assert {attributes["data-run"] for attributes in buttons if "data-run" in attributes} == {"0", "1"}
    (view,) = [box for box in shown.all("viewbox") if box.startswith("10 -0.5")]  # the chart of losses; the largest is 0.5
    left, top, width, height = map(float, view.split())
    assert (left, width) == (10, 30)
    assert top < -0.5 < -0.025 < top + height


def test_a_long_curve_keeps_its_ends_and_its_extremes():
    points = [(float(n), float(n % 7)) for n in range(10_000)]
    points[5_000], points[6_001] = (5_000.0, 99.0), (6_001.0, -99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert {points[0], points[-1], (5_000.0, 99.0), (6_001.0, -99.0)} <= set(kept)
    assert kept == sorted(set(kept) & set(points))
    assert thinned(points[:MOST_POINTS]) == points[:MOST_POINTS]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1_000_000, 1_000_500, ["1M", "1.0001M", "1.0002M", "1.0003M", "1.0004M", "1.0005M"]),
        (0, 5_000_000, ["0", "1M", "2M", "3M", "4M", "5M"]),
        (0, 0.001, ["0", "0.0002", "0.0004", "0.0006", "0.0008", "0.0010"]),
    ],
)
def test_the_ticks_of_an_axis_have_different_labels(low, high, labels):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js")
    pattern = r"^  function (?:ticks|label)\(.*?^  }$"
    functions = re.findall(pattern, asset("charts.js"), re.DOTALL | re.MULTILINE)
    shown = f"const {{ step, found }} = ticks({low}, {high}, 6); for (const one of found) console.log(label(one, step));"
    command = [node, "-e", "\n".join([*functions, shown])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == labels


@pytest.mark.parametrize(("epochs", "dots"), [(1, 2), (MOST_DOTS, 2), (MOST_DOTS + 1, 0)])
def test_a_curve_with_many_epochs_has_no_dots(tmp_path, epochs, dots):
    line = {"kind": "epoch", "train_loss": 0.5, "val_loss": 0.6}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**line, "step": n}) + "\n" for n in range(epochs)))
    shown = charts(read_runs([str(tmp_path)]))
    counts = [shown.count(f'<path class="{part}') for part in ("line ", "dots ")]
    assert counts == [2 + 2, dots + 2]  # the buttons for train and val have a line and a dot each


def test_runs_share_colours_if_there_are_more_runs_than_colours(tmp_path):
    runs = read_runs([make(tmp_path / f"r{number:02}") for number in range(COLORS + 1)])
    assert [run.color for run in runs] == [*(f"c{number}" for number in range(COLORS)), "c0"]


def test_a_page_can_be_made_without_runs_or_of_a_run_that_has_not_begun(tmp_path):
    assert "no run to show" in Page(page([])).text
    (tmp_path / "new").mkdir()
    shown = Page(page(read_runs([str(tmp_path / "new"), make(tmp_path / "run")], require_metrics=False)))
    assert "new has not logged its first steps" in shown.text
    # With ``require_metrics=True`` (the default), a folder without metrics.jsonl is a run only if it has a config.json.
    (tmp_path / "new" / "config.json").write_text("{}")
    shown = Page(page(read_runs([str(tmp_path / "new"), str(tmp_path / "run")])))
    assert "new has not logged its first steps" in shown.text
    assert set(paths_of(shown)) == {("1", kind) for kind in ("step", "train", "val", "mean")}


# -- tables


def test_only_settings_that_differ_are_listed(tmp_path):
    runs = read_runs([make(tmp_path / "a", seed=0), make(tmp_path / "b", seed=1, new=True), make(tmp_path / "c", seed=1)])
    table = differing_settings(runs)
    assert table is not None
    assert table.rows == [["setting", "a", "b", "c"], ["seed", "0", "1", "1"], ["new", "–", "True", "–"]]
    assert differing_settings(runs[:1]) is None


def test_differences_between_the_machines_are_listed_too(tmp_path):
    here, there = {"torch": "2.13.0", "GPU": None}, {"torch": "2.13.0", "GPU": "H200"}
    folders = [make(tmp_path / name, platform=facts) for name, facts in (("a", here), ("b", there), ("c", "odd"))]
    table = differing_settings(read_runs(folders[:2]))
    assert table is not None
    assert table.rows == [["setting", "a", "b"], ["GPU", "–", "H200"]]
    assert main([*folders, "--out", str(tmp_path / "r.html")]) == 0


def test_finished_runs_are_compared_by_their_weights(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    c, running = make(tmp_path / "c", {**SUMMARY, "weights_sha256": "ff"}), make(tmp_path / "running", None)
    assert "yes" in same_weights(read_runs([a, b, running]))
    assert "no, the 3 finished runs ended with 2 different models" in same_weights(read_runs([a, b, c]))
    assert "not known" in same_weights(read_runs([a, running]))


def test_a_run_that_has_not_finished_shows_its_last_step(tmp_path):
    folder = Path(make(tmp_path / "run", None))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "kind": "st')
    head, row = results(read_runs([str(folder)])).rows
    cells = dict(zip(head, row, strict=True))
    assert (cells["state"], cells["steps"], cells["accuracy"], cells["seconds"]) == (
        "not finished",
        "40",
        "0.9000",
        "–",
    )
    assert main([str(folder)]) == 0


def test_the_recorded_cause_is_shown_until_the_run_is_started_again(tmp_path):
    folder = Path(make(tmp_path / "run", None))
    start = {"event": "start", "attempt": "a", "time": 1.0, "step": 0}
    failed = {"event": "failure", "attempt": "a", "time": 2.0, "step": 41, "cause": "raised <KeyError>", "rank": 1}
    events = [start, {**failed, "requested": False}, {**start, "attempt": "b"}]
    death = as_event(Death("a", 2.0, "raised <KeyError>", 1, False, 41, True))
    # A refused restart records both of these events.
    events[2:2] = [death, {"event": "refusal", "reason": "the run has died 3 times in a row"}]
    shown = []
    for count in range(len(events) + 1):
        (folder / "attempts.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:count]))
        shown.append("run has stopped: rank 1 raised <KeyError>" in Page(page(read_runs([str(folder)]))).text)
    assert shown == [False, False, True, True, True, False]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events[:2]))
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="has no metrics, and has stopped: rank 1 raised <KeyError>"):
        read_runs([str(folder)])


def test_a_run_that_was_resumed_after_its_end_is_not_finished(tmp_path):
    folder = Path(make(tmp_path / "run", {**SUMMARY, "steps": 20}))
    assert results(read_runs([str(folder)])).rows[1][1] == "not finished"


def test_runs_with_equal_names_are_distinguished_and_a_repeated_run_is_shown_once(tmp_path):
    paths = [make(tmp_path / name) for name in ("x/p/run", "y/p/run", "other")]
    runs = read_runs([*paths, str(tmp_path / "x" / ".." / "other")])
    assert [run.label for run in runs] == ["x/p/run", "y/p/run", "other"]
    assert len({run.color for run in runs}) == 3


def test_names_of_any_kind_are_shown_as_they_are(tmp_path):
    names = ["<script>alert(1)", "$\\bad{", "_hidden", "日本語", "long-" * 40]
    runs = [make(tmp_path / name, data_dir=name) for name in names]
    assert main([*runs, make(tmp_path / "torch"), "--out", str(tmp_path / "r.html")]) == 0
    shown = page_of(tmp_path / "r.html")
    assert shown.tags.count("script") == 1
    assert not re.search("alert", shown.script)
    for name in names:
        assert name in shown.text
        assert name in shown.all("data-label")


@pytest.mark.parametrize(
    "value", ["</script><script>alert(1)", "</title><svg onload=alert(1)>", '"><img src=x onerror=alert(1)>']
)
def test_html_in_settings_summary_and_metrics_is_shown_as_text(value, tmp_path):
    folder = Path(make(tmp_path / "run", {**SUMMARY, "backend": value, "launcher": value, "weights_sha256": value}))
    (folder / "config.json").write_text(
        json.dumps({"dataset": value, "model": value, value: value, "origin": {"command": value}})
    )
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": value, "step": value, value: value}) + "\n")
    other = make(tmp_path / "other", lr=value)
    for runs in ([str(folder)], [str(folder), other]):
        shown = Page(page(read_runs(runs)))
        assert (shown.tags.count("script"), shown.tags.count("img"), shown.tags.count("title")) == (1, 0, 1)
        assert not any("onload" in attributes or "onerror" in attributes for _, attributes in shown.attributes)
        assert shown.text.count(value) >= 3


def test_values_that_are_missing_or_not_numbers_are_left_out(tmp_path):
    folder = Path(make(tmp_path / "run", {"steps": 1}))
    odd = [{"kind": "step", "step": 1, "loss": float("nan")}, {"kind": "step", "loss": 1}, {"step": 1}, {"kind": "epoch"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd) + "[1]\n7\n")
    (folder / "config.json").write_text("cut o")
    (run,) = read_runs([str(folder)])
    assert run.curve("step", "loss") == ([], 1)
    assert run.unreadable == 2
    assert main([str(folder)]) == 0
    shown = page_of(folder / "report.html")
    assert "Values not drawn (too large or not a finite number): 1 of run." in shown.text
    assert "run: 2 lines of metrics.jsonl cannot be read and are left out." in shown.text
    (folder / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2}\n7\n')
    assert "run: 1 line of metrics.jsonl cannot be read and is left out." in page(read_runs([str(folder)]))
    # Four values are not drawn: two are too large, one is infinite, one is a bool. The steps are not in order.
    values = [(3, 1e300), (2, 10**400), (5, float("inf")), (4, -0.5), (1, 2), (6, True)]
    lines = (json.dumps({"kind": "step", "step": step, "loss": value}) + "\n" for step, value in values)
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"kind": "step", "st')
    (run,) = read_runs([str(folder)])
    assert run.curve("step", "loss") == ([(1, 2), (4, -0.5)], 4)
    assert run.unreadable == 0
    assert main([str(folder)]) == 0


def test_errors_are_reported_in_one_line(tmp_path, capsys):
    good, new = make(tmp_path / "run"), tmp_path / "new"
    new.mkdir()
    (new / "metrics.jsonl").write_text("")
    cases = [([], "RUN"), ([str(tmp_path / "gone")], "holds no run"), ([str(new)], "has no metrics yet: wait")]
    cases += [([str(new)], "or leave the run out if it has ended"), ([good, str(tmp_path / "gone")], "holds no run")]
    cases += [([str(new), make(tmp_path / "other", metrics="")], "each of the 2 runs has no metrics yet: wait")]
    cases += [([good, "--out", str(tmp_path / "gone" / "r.html")], "cannot be written (No such file or directory)")]
    cases += [
        ([good, "--watch", "--out", "r.html"], "leave out --watch or --out"),
        ([good, "--port", "1"], "--port needs --watch"),
    ]
    cases += [([good, "--watch", "--port", "65536"], "--port"), ([str(tmp_path / "gone"), "--watch"], "is not a folder")]
    cases += [([good, "--out", "r.pdf"], "must end in .html"), ([good, "--ou", "r.html"], "unrecognized")]
    for arguments, words in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("dualtrain: error: ")
        assert words in error
        assert error.count("\n") == 1


def test_compare_and_report_show_the_same_cells(tmp_path):
    folder = Path(make(tmp_path / "run", {**SUMMARY, "amp": "bf16"}))
    head, cells = results(read_runs([str(folder)])).rows
    shown = dict(zip(head, cells, strict=True))
    lines = table([("run", read_summary(folder))]).splitlines()
    assert [cell.strip() for cell in lines[2].split("  ") if cell] == ["run", *(shown[name] for name in COLUMNS)]
    assert (shown["backend"], shown["precision"]) == ("torch (gloo)", "bf16")
