"""Table of tests/versions.sh: one row for each version of torch, made from the files that the script has written.

``python versions.py FOLDER VERSION…`` prints the table, then each version's failures and reasons for skipped tests, and,
with several versions, whether the jobs ended with the same weights. The exit status is 1 if a version failed.

For each version, FOLDER has ``facts-VERSION`` (versions of installed packages), ``results-VERSION.xml`` (pytest's
results, in JUnit's format) and ``run-VERSION/summary.json`` (of the training job).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

TITLES = ["torch", "torchvision", "Python", "passed", "failed", "skipped", "job", "weights", "result"]


@dataclass
class Tests:
    """Outcome of one test run."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # number of tests for each reason


def read_tests(path: Path) -> Tests | None:
    """Read the results of one test run; return None if the run did not end."""
    if not path.is_file():
        return None
    tests = Tests()
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            tests.failures.append(name)
        elif skip is not None:
            tests.skipped[skip.get("message", "")] += 1
        else:
            tests.passed += 1
    return tests


def read_job(path: Path) -> tuple[str, str] | None:
    """Read a job's accuracy and the beginning of its weights' hash; return None if the job did not end."""
    if not path.is_file():
        return None
    summary = json.loads(path.read_text())
    return f"{summary['val_accuracy']:.4f}", str(summary["weights_sha256"])[:16]


def row(folder: Path, version: str) -> tuple[list[str], bool, list[str]]:
    """Return the row of ``version``, whether the version passed, and its lines below the table."""
    facts = dict(line.split("=", 1) for line in (folder / f"facts-{version}").read_text().splitlines())
    tests = read_tests(folder / f"results-{version}.xml")
    job = read_job(folder / f"run-{version}" / "summary.json")
    problems, notes = [], []
    if tests is None:
        counts = ["-", "-", "-"]
        problems.append("tests did not end")
    else:
        counts = [str(tests.passed), str(len(tests.failures)), str(sum(tests.skipped.values()))]
        notes += [f"failed under torch {version}: {name}" for name in tests.failures]
        notes += [f"skipped under torch {version}: {count}, {reason}" for reason, count in tests.skipped.most_common()]
        if tests.failures:
            problems.append("tests failed")
        if not tests.passed:
            problems.append("no test passed")
    if job is None:
        problems.append("job failed")
    cells = [facts["torch"], facts["torchvision"], facts["Python"], *counts, *(job or ("-", "-"))]
    return [*cells, ", ".join(problems) or "passed"], not problems, notes


def main(folder: Path, versions: list[str]) -> int:
    """Print the table and the lines below it; return the exit status."""
    rows, passed, notes = zip(*(row(folder, version) for version in versions), strict=True)
    lines = [TITLES, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(TITLES))]
    for line in [TITLES, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
    for line in [line for lines in notes for line in lines]:
        print(line)
    print("not run: tests/launch/, and tests that need Horovod")
    hashes = [cells[TITLES.index("weights")] for cells in rows]
    found = [each for each in hashes if each != "-"]
    if len(found) > 1 and len(set(found)) == 1:
        scope = "all versions" if "-" not in hashes else "the versions whose job ended"
        print(f"same weights: yes, the job ended with the same model, bit for bit, under {scope}")
    elif len(found) > 1:
        print("same weights: no; this is not a failure, because torch's arithmetic may differ between versions")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
