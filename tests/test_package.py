"""The published package: files of wheel and sdist, metadata, and the dependencies of an installation without extras."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.pool import ROOT

# One build at a time: tests/launch/test_examples_types.py builds the package too.
pytestmark = pytest.mark.xdist_group("package")

REQUIRED = {"numpy", "safetensors", "torch", "torchvision", "tqdm"}
#: Distributions and modules that an installation without extras must not need.
HEAVY = {"matplotlib", "pyyaml", "scikit-learn", "scipy", "torchinfo"}
HEAVY_MODULES = ["matplotlib", "scipy", "sklearn", "torchinfo", "yaml"]
BUILD = "import sys; out = sys.argv[1]; from setuptools import build_meta as b; b.build_sdist(out); b.build_wheel(out)"


@dataclass(frozen=True)
class Built:
    """Wheel and sdist with the names of their files; names in the sdist are relative to ``dualtrain-VERSION/``."""

    wheel: Path
    in_wheel: set[str]
    in_sdist: set[str]
    metadata: email.message.Message


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build from a copy, because setuptools writes into the source tree."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77: pip install -U setuptools")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    for folder in ("dualtrain", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, tree)
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, out], cwd=tree, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        (name,) = (name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.BytesParser().parsebytes(archive.read(name))
    with tarfile.open(sdist) as files:
        in_sdist = {member.name.partition("/")[2] for member in files if member.isfile()}
    return Built(wheel, in_wheel, in_sdist, metadata)


def test_wheel_and_sdist_contain_every_file_of_the_package(built):
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dualtrain").rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name and not name.endswith(".md")}
    assert {"dualtrain/py.typed", "dualtrain/data/digits.npz", "dualtrain/recipes/digits-convnet.toml"} <= ours
    assert ours - built.in_wheel == set()
    assert ours - built.in_sdist == set()
    assert {name for name in built.in_wheel if not name.startswith(("dualtrain/", "dualtrain-"))} == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.cfg"} <= built.in_sdist
    assert {name for name in built.in_sdist if name.startswith("tests/")} == set()


def test_the_licenses_of_code_and_data_are_named_and_included(built):
    assert built.metadata["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"
    files = built.metadata.get_all("License-File")
    assert files == ["LICENSE", "dualtrain/data/digits.LICENSE"]
    for file in files:
        assert sum(name.endswith(f".dist-info/licenses/{file}") for name in built.in_wheel) == 1
        assert file in built.in_sdist


def test_the_metadata_contain_the_platform_and_the_python_versions(built):
    assert built.metadata["Requires-Python"] == ">=3.11"
    assert built.metadata["Platform"] == "Linux"
    assert built.metadata["Keywords"]
    classifiers = built.metadata.get_all("Classifier")
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(classifiers)
    assert "Programming Language :: Python :: 3.11" in classifiers


def requirements(lines: list[str] | None) -> set[str]:
    """Return the distributions that the ``Requires-Dist`` lines require on this platform if no extra is chosen."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in lines or []]
    needed = (one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""}))
    return {re.sub("[-_.]+", "-", one.name).lower() for one in needed}


def test_an_installation_without_extras_needs_no_heavy_distributions(built):
    todo = requirements(built.metadata.get_all("Requires-Dist"))
    assert todo == REQUIRED
    needed: set[str] = set()
    while todo:
        name = todo.pop()
        needed.add(name)
        try:
            todo |= requirements(importlib.metadata.requires(name)) - needed
        except importlib.metadata.PackageNotFoundError:
            continue  # a dependency of a different build of torch
    assert needed & HEAVY == set()


def test_optional_packages_are_required_only_by_extras(built):
    assert {"bench", "dev", "functions", "horovod", "ray", "spark", "summary", "tensorboard"} == set(
        built.metadata.get_all("Provides-Extra")
    )
    extra = {line.partition(";")[0].strip().lower(): line for line in built.metadata.get_all("Requires-Dist")}
    assert extra["scikit-learn"].endswith('extra == "dev"')
    assert "extra ==" in extra["torchinfo"]
    assert "extra ==" not in extra["numpy"]


def test_the_wheel_trains_predicts_and_reports_without_optional_modules(built, tmp_path):
    """Use the wheel outside the source tree. The report page must contain its style sheet and script.

    First, the program reads the digits. Reading them must not import scikit-learn, scipy or torchvision.
    """
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import sys; from dualtrain.data.digits import read_digits; read_digits()\n"
        "print('loaded:', *sorted({'sklearn', 'scipy', 'torchvision'} & set(sys.modules)))\n"
        f"sys.modules.update(dict.fromkeys({HEAVY_MODULES}))\n"
        "import dualtrain.main, dualtrain.predict, dualtrain.report.__main__ as report\n"
        "from PIL import Image\n"
        "Image.new('L', (8, 8)).save('digit.png')\n"
        "train = ['--max-steps', '2', '--run-dir', 'run', '--log-every', '1', '--optimizer-options', 'nesterov=yes']\n"
        "print(dualtrain.__file__, dualtrain.main.main(train), dualtrain.predict.main(['run', 'digit.png', '--json']))\n"
        "print(report.main(['run']))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "loaded:"
    assert lines[-3:] == [f"{tmp_path / 'site' / 'dualtrain' / '__init__.py'} 0 0", "run/report.html", "0"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "prefers-color-scheme" in page
    assert "createElementNS" in page
    (answer,) = (json.loads(line) for line in lines if line.startswith("{"))
    assert len(answer["classes"]) == 5
    assert "dualtrain:" not in done.stderr
    assert "torchinfo" not in done.stdout + done.stderr
