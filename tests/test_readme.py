"""The pages: examples work, links and named files exist, and README.md stays short."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from tests.forked import ROOT, run, run_ranks, torchrun_variables

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FOLDERS = ("launch", "docker", "dualtrain", "tests")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(found for folder in FOLDERS for found in sorted((ROOT / folder).rglob("README.md"))),
    ]
}
README = PAGES["README.md"]
EXAMPLES = {
    f"{Path(page).parent.name or 'top'}-{number}": text
    for page, content in PAGES.items()
    for number, text in enumerate(re.findall(r"```python\n(.*?)```", content, re.DOTALL))
}
PROGRAMS = {name: text for name, text in EXAMPLES.items() if "print(f" in text}
#: The command for each word that follows ``dualtrain`` on a page; ``dualtrain.main`` is the module of ``train``.
NAMES = {"main": "train"} | {
    name: name for name in ("train", "compare", "report", "predict", "doctor", "bench", "drill", "horovodize")
}
#: HVD imports dualtrain.hvd; its comment contains the import of Horovod that it replaces. OWN has functions that build a
#: model and data.
HVD, OWN = EXAMPLES["hvd-0"], EXAMPLES["top-0"]


def test_every_example_is_tested():
    assert EXAMPLES.keys() - PROGRAMS.keys() == {"hvd-0", "top-0"}
    assert PROGRAMS.keys() == {"backends-0", "training-0", "training-1", "hvd-1"}


def loss_of(command, folder, ranks):
    """Run a program that prints ``loss VALUE`` on rank 0, and return the value."""
    with torchrun_variables(ranks) as variables:
        ends = run_ranks(variables if ranks > 1 else [{}], command, folder, env=ENV)
    assert [end.returncode for end in ends] == [0] * ranks, ends[0].stderr
    (loss,) = re.findall(r"loss (\S+)", "".join(end.stdout for end in ends))
    return float(loss)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks"])
def test_example_programs_reduce_the_loss(tmp_path, ranks, program):
    script = tmp_path / "example.py"
    script.write_text(program)
    assert loss_of((script,), tmp_path / "printed", ranks) < 1e-6


def test_the_script_on_the_page_of_hvd_runs_under_horovodize_with_horovods_import(tmp_path):
    new, old = re.fullmatch(r"(import .*?)  # was: (import .*)\n", HVD).groups()
    ported = PROGRAMS["hvd-1"]
    assert ported.count(f"{new}\n") == 1
    assert f"-{old}\n+{new}\n" in README
    script = tmp_path / "train.py"
    script.write_text(ported.replace(new, old))
    check = run(("-m", "dualtrain.horovodize", "--check", script), tmp_path / "check", env=ENV)
    assert check.returncode == 0
    assert f"{check.stdout.replace(f'{tmp_path}/', '')}```" in PAGES["dualtrain/hvd/README.md"]
    assert loss_of(("-m", "dualtrain.horovodize", script), tmp_path / "printed", 2) < 1e-6


def test_the_torchrun_command_of_readme_trains_and_can_be_repeated(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    (line,) = re.findall(r"^torchrun .*--model mine:model .*$", README, re.MULTILINE)
    _, nproc, *command = shlex.split(line)
    assert nproc == "--nproc_per_node=4"
    first, again = (
        run_ranks(2, command, tmp_path / name, env={**ENV, "PYTHONPATH": f"{ROOT}:{tmp_path}"}, cwd=tmp_path)
        for name in ("first", "again")
    )
    assert [end.returncode for end in first + again] == [0] * 4, first[0].stderr
    assert "nothing is left to train" in again[0].stdout
    assert json.loads((tmp_path / "runs/mine/summary.json").read_text())["val_accuracy"] > 0.9


def commands_in(page):
    """Yield the name and the flags of each command in a page's code blocks, without the flags of a user's script."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|[\s$])dualtrain[ .](\w+)\b(.*)", re.sub(r"\s#.*|'[^']*'", "", line))
            if found and found[1] in NAMES:
                yield NAMES[found[1]], re.findall(r"(?<=\s)--[a-z][\w-]*", re.split(r"\s\S+\.py\b|\s-m\s", found[2])[0])


def test_the_flags_of_all_commands_on_the_pages_exist(tmp_path):
    used = [(page, *command) for page in PAGES for command in commands_in(PAGES[page])]
    assert {name for _, name, _ in used} == set(NAMES.values())
    known = {}
    for name, *mode in [*((name,) for name in NAMES.values()), ("horovodize", "--prove")]:
        text = run(("-m", "dualtrain", name, *mode, "--help"), tmp_path, env=ENV).stdout
        known[name] = known.get(name, set()) | set(re.findall(r"--[a-z][\w-]*", text))
    known["drill"] |= known["train"]  # a drill accepts the flags of train
    assert [(page, name, flag) for page, name, flags in used for flag in flags if flag not in known[name]] == []


def anchors(page):
    """Return the anchors that GitHub creates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing(target, folder):
    """Return whether ``target``, a link relative to ``folder``, names a file or heading that does not exist."""
    path, _, anchor = target.partition("#")
    file = (folder / path).resolve()
    return not file.exists() or bool(anchor and anchor not in anchors(file.read_text()))


@pytest.mark.parametrize("name", PAGES)
def test_links_and_files_mentioned_on_pages_exist(name):
    page, folder = PAGES[name], (ROOT / name).parent
    links = [link if link[0] != "#" else Path(name).name + link for link in re.findall(r"\]\(([^)]+)\)", page)]
    assert [link for link in links if "://" not in link and missing(link, folder)] == []
    named = re.findall(r"`((?:launch|tests|docker|backends|training|config|horovodize)/[\w./-]*\w)`", page)
    folders = ROOT, ROOT / "dualtrain", folder
    assert [path for path in named if not any((each / path).exists() for each in folders)] == []


def test_the_docker_image_of_the_tests_has_all_files_that_the_top_pages_link():
    ignore = ROOT / ".dockerignore"
    if not ignore.exists():
        pytest.skip("needs .dockerignore, which the image of the tests does not have")
    links = {
        link.split("/")[0]
        for name in ("README.md", "CONTRIBUTING.md")
        for link in re.findall(r"\]\(([\w./]+)", PAGES[name])
    }
    assert "CONTRIBUTING.md" in links
    assert {f"!{name}" for name in links} - set(ignore.read_text().splitlines()) == set()


def test_pages_mentioned_in_the_code_exist():
    named = [
        (path.relative_to(ROOT).as_posix(), target)
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in (".py", ".sh", ".yaml") and path != Path(__file__)
        for target in re.findall(r"[\w./-]+\.md(?:#[\w-]+)?", path.read_text())
    ]
    assert ("tests/hvd/test_hvd_semantics_join.py", "dualtrain/hvd/README.md#join") in named
    assert [(path, target) for path, target in named if missing(target, ROOT)] == []


def test_readme_is_short_and_explains_the_move_from_horovod_first():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("## From Horovod to torchrun in three steps") < 25
    assert len(PAGES["dualtrain/README.md"].splitlines()) <= 80


def test_readme_links_all_other_pages():
    links = set(re.findall(r"\]\(([\w/]+/README\.md|CONTRIBUTING\.md)\)", README))
    assert links == PAGES.keys() - {"README.md"}
