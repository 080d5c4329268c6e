"""The report: what is in the page and the picture, from whole and from broken run folders."""

from __future__ import annotations

import html.parser
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from dualtrain.compare import COLUMNS, table
from dualtrain.report.__main__ import main
from dualtrain.report.runs import differing_settings, read_runs, results, same_weights
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


def make(folder: Path, summary: dict[str, Any] | None = SUMMARY, **config: Any) -> str:
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    (folder / "config.json").write_text(json.dumps({"dataset": "digits", "run_dir": str(folder), "lr": 0.1, **config}))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


class Page(html.parser.HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_one_run_gets_its_report_into_its_folder(tmp_path, capsys):
    folder = Path(make(tmp_path / "run"))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html"), str(folder / "report.png")]
    page = Page(folder / "report.html")
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert len(page.sources) == 1
    for cell in ("torchrun", "gloo", "0.5000", "0.9100", "1234", "3.2", "0123456789abcdef", "finished"):
        assert cell in page.text
    assert "0123456789abcdef0" not in page.text
    with Image.open(folder / "report.png") as picture:
        assert min(picture.size) > 900


def test_several_runs_get_one_report_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run", {**SUMMARY, "backend": "horovod"}, lr=0.2)]
    assert main(runs) == 0
    assert capsys.readouterr().out.split() == ["report.html", "report.png"]
    page = Page(tmp_path / "report.html")
    for word in ("a/run", "b/run", "horovod", "Same weights: yes", "Settings that differ", "0.2"):
        assert word in page.text


def test_out_names_the_page_and_its_picture(tmp_path):
    assert main([make(tmp_path / "run"), "--out", str(tmp_path / "mine.html")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine.html", "mine.png"}


def test_only_settings_that_differ_are_listed(tmp_path):
    runs = read_runs([make(tmp_path / "a", seed=0), make(tmp_path / "b", seed=1, new=True), make(tmp_path / "c", seed=1)])
    table = differing_settings(runs)
    assert table is not None
    assert table.rows == [["setting", "a", "b", "c"], ["seed", "0", "1", "1"], ["new", "–", "True", "–"]]
    assert differing_settings(runs[:1]) is None


def test_what_differs_between_the_machines_is_listed_too(tmp_path):
    here, there = {"torch": "2.13.0", "GPU": None}, {"torch": "2.13.0", "GPU": "H200"}
    folders = [make(tmp_path / name, platform=facts) for name, facts in (("a", here), ("b", there), ("c", "odd"))]
    table = differing_settings(read_runs(folders[:2]))
    assert table is not None
    assert table.rows == [["setting", "a", "b"], ["GPU", "–", "H200"]]
    assert main([*folders, "--out", str(tmp_path / "r.html")]) == 0


def test_whether_the_weights_are_the_same_is_said_of_finished_runs(tmp_path):
    a, b = make(tmp_path / "a"), make(tmp_path / "b")
    c, going = make(tmp_path / "c", {**SUMMARY, "weights_sha256": "ff"}), make(tmp_path / "going", None)
    assert "yes" in same_weights(read_runs([a, b, going]))
    assert "no, the 3 finished runs ended with 2 different models" in same_weights(read_runs([a, b, c]))
    assert "not known" in same_weights(read_runs([a, going]))


def test_a_run_that_has_not_finished_shows_how_far_it_has_come(tmp_path):
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


def test_a_run_that_was_gone_on_with_is_not_finished(tmp_path):
    folder = Path(make(tmp_path / "run", {**SUMMARY, "steps": 20}))
    assert results(read_runs([str(folder)])).rows[1][1] == "not finished"


def test_runs_with_one_name_are_told_apart_and_a_run_named_twice_is_one(tmp_path):
    paths = [make(tmp_path / name) for name in ("x/p/run", "y/p/run", "other")]
    runs = read_runs([*paths, str(tmp_path / "x" / ".." / "other")])
    assert [run.label for run in runs] == ["x/p/run", "y/p/run", "other"]
    assert len({run.color for run in runs}) == 3


def test_names_of_any_kind_are_shown_as_they_are(tmp_path):
    names = ["<script>alert(1)", "$\\bad{", "_hidden", "日本語", "long-" * 40]
    runs = [make(tmp_path / name, data_dir=name) for name in names]
    assert main([*runs, make(tmp_path / "torch"), "--out", str(tmp_path / "r.html")]) == 0
    page = Page(tmp_path / "r.html")
    assert "script" not in page.tags
    for name in names:
        assert name in page.text


def test_values_that_are_missing_or_no_numbers_are_left_out(tmp_path):
    folder = Path(make(tmp_path / "run", {"steps": 1}))
    odd = [{"kind": "step", "step": 1, "loss": float("nan")}, {"kind": "step", "loss": 1}, {"step": 1}, {"kind": "epoch"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd) + "[1]\n7\n")
    (folder / "config.json").write_text("cut o")
    (run,) = read_runs([str(folder)])
    assert run.curve("step", "loss") == ([], [])
    assert main([str(folder)]) == 0


def test_what_is_wrong_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    good, new = make(tmp_path / "run"), tmp_path / "new"
    new.mkdir()
    (new / "metrics.jsonl").write_text("")
    cases = [([], "RUN"), ([str(tmp_path / "gone")], "holds no run"), ([str(new)], "has no metrics yet")]
    cases += [([good, "--out", str(tmp_path / "gone" / "r.html")], "cannot be written (No such file or directory)")]
    cases += [([good, "--out", "r.pdf"], "must end in .html"), ([good, "--ou", "r.html"], "unrecognized")]
    for arguments, words in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("dualtrain: error: ")
        assert words in error
        assert error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([good]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_compare_and_report_show_the_same_cells(tmp_path):
    folder = Path(make(tmp_path / "run", {**SUMMARY, "amp": "bf16"}))
    head, cells = results(read_runs([str(folder)])).rows
    shown = dict(zip(head, cells, strict=True))
    lines = table([("run", read_summary(folder))]).splitlines()
    assert [cell.strip() for cell in lines[2].split("  ") if cell] == ["run", *(shown[name] for name in COLUMNS)]
    assert (shown["backend"], shown["precision"]) == ("torch (gloo)", "bf16")
