"""The runner for unmodified Horovod scripts: import hook, start and exit."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dualtrain.errors import UserError
from dualtrain.horovodize import imports, names, recorder, run_script
from dualtrain.horovodize.__main__ import main
from tests.conftest import NAMES, PREFIXES, require_horovod
from tests.pool import ROOT

MODULES = ("mpi_ops", "functions", "optimizer", "compression", "sync_batch_norm", "elastic.state", "elastic.sampler")
CLEAN_ENV = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES) and name not in NAMES}


def python(*command: object) -> subprocess.CompletedProcess[str]:
    env = {**CLEAN_ENV, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


# -- the import hook --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [*imports.REPLACEMENTS.items(), *((f"horovod.torch.{name}", f"dualtrain.hvd.{name}") for name in MODULES)],
)
@pytest.mark.usefixtures("import_hook")
def test_horovod_torch_is_the_module_dualtrain_hvd(old, new):
    module = importlib.import_module(old)
    assert module is importlib.import_module(new) is sys.modules[old]
    assert module.__name__ == module.__spec__.name == new


@pytest.mark.usefixtures("import_hook")
def test_packages_of_horovod_contain_their_modules():
    horovod = importlib.import_module("horovod.common.exceptions") and sys.modules["horovod"]
    assert horovod.__version__ == "0.28.1"
    assert horovod.common.exceptions is importlib.import_module("dualtrain.hvd.exceptions")
    assert importlib.import_module("horovod.runner").run is horovod.run
    assert horovod.run(os.getenv, ("RANK",), num_proc=2) == ["0", "1"]


@pytest.mark.parametrize(("module", "library"), [("horovod.spark", "pyspark"), ("horovod.ray", "ray")])
@pytest.mark.usefixtures("import_hook")
def test_importing_horovod_spark_or_ray_names_the_missing_library(module, library, monkeypatch):
    for name in [name for name in sys.modules if name.startswith((f"dualtrain.{module[8:]}", f"{library}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"dualtrain\.\w+ needs {library}, .* pip install 'dualtrain\["):
        importlib.import_module(module)


@pytest.mark.parametrize("name", ["tensorflow", "keras", "mxnet.x", "data", "common.basics", "torch.mpi_lib_v2", "nothing"])
@pytest.mark.usefixtures("import_hook")
def test_a_module_without_counterpart_raises_import_error(name):
    with pytest.raises(
        ModuleNotFoundError, match=r"No module named 'horovod\.\S+': dualtrain covers .*horovod\.torch"
    ) as seen:
        importlib.import_module(f"horovod.{name}")
    assert "\n" not in str(seen.value)
    assert seen.value.name.startswith("horovod.")


@pytest.mark.usefixtures("import_hook")
def test_every_public_name_exists():
    hvd = importlib.import_module("horovod.torch")
    assert [
        name for name in sorted(names.PUBLIC) if not hasattr(hvd, name) and not find_spec(f"horovod.torch.{name}")
    ] == []


@pytest.mark.usefixtures("import_hook")
def test_programs_can_use_horovods_helper_functions():
    seen: list[int] = []
    once = importlib.import_module("horovod.common.util")._cache(seen.append)
    in_thread = importlib.import_module("horovod.runner.util.threads").in_thread
    once(1)
    once(1)
    thread = in_thread(seen.append, (2,), name="second")
    thread.join(60)
    in_thread(int, ("no number",), silent=True).join(60)
    assert (seen, thread.name, thread.daemon) == ([1, 2], "second", True)
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(seen.append, 3)


@pytest.mark.usefixtures("import_hook")
def test_programs_can_query_which_libraries_horovod_was_built_with():
    util, hvd = importlib.import_module("horovod.common.util"), importlib.import_module("horovod.torch")
    assert [util.extension_available(name) for name in ("torch", "tensorflow", "mxnet")] == [True, False, False]
    for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"):
        assert getattr(util, name)() == getattr(hvd, name)()


@pytest.mark.usefixtures("import_hook")
def test_env_ignores_variables_that_are_none(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with importlib.import_module("horovod.common.util").env(KEPT=None, NEW="1"):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("before", "1")
    assert (os.environ["KEPT"], os.environ.get("NEW")) == ("before", None)


@pytest.mark.usefixtures("import_hook")
def test_exceptions_survive_pickling():
    error = importlib.import_module("horovod.torch").HorovodInternalError("lost")
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_the_hook_can_be_installed_twice_and_uninstalled(import_hook):
    before = list(sys.meta_path)
    imports.install()
    assert sys.meta_path == before
    imports.uninstall()
    imports.uninstall()
    assert "horovod" not in sys.modules
    assert imports._CHILDREN not in sys.path


def test_an_imported_horovod_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", os)
    with pytest.raises(UserError, match="already imported"):
        imports.install()


def test_the_list_of_public_names_matches_the_names_in_horovod():
    require_horovod()
    tree = ast.parse((Path(find_spec("horovod").origin).parent / "torch" / "__init__.py").read_text())
    nodes = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("horovod.torch")
    ]
    public = {alias.asname or alias.name for node in nodes for alias in node.names if not alias.name.startswith("_")}
    assert public <= names.PUBLIC
    assert names.PUBLIC - public <= names._MODULES | {"is_homogeneous"}


# -- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def unprepared(monkeypatch):
    """Skip the preparation of scripts, select the backend torch, and unset the variables of launchers.

    Afterwards, restore arguments, path, main module, sys.excepthook and variables.
    """
    monkeypatch.setattr(run_script, "_prepare", lambda: None)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("DUALTRAIN_BACKEND", "torch")
    for name in os.environ:
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script was given"),
        (["{tmp}/nothing.py"], "cannot read the script"),
        (["{tmp}"], "is a folder"),
        (["{tmp}/train.ipynb"], "is a notebook: convert it"),
        (["--fast", "x.py"], "unknown option '--fast'"),
        (["-m"], "-m was given without a module"),
        (["-m", "dualtrain_nothing"], "no module named 'dualtrain_nothing'"),
        (["-m", "json.nothing"], "no module named 'json.nothing'"),
        (["-m", "..script"], "no module named '..script'"),
        (["-m", "script.py"], "leave out .py"),
        (["-m", "math"], "not a Python source"),
        (["--check"], "--check was given no script"),
        (["--check", "--fast"], "unknown option '--fast'"),
        (["--check", "{tmp}/nothing.py"], "cannot read the script"),
        (["--check", "{tmp}/train.ipynb"], "is a notebook: convert it"),
        (["--recorder", "x.py"], "--recorder only prints a program, and takes no argument 'x.py'"),
    ],
)
@pytest.mark.usefixtures("unprepared")
def test_refusals_are_one_line(arguments, message, tmp_path, capsys):
    assert main([word.format(tmp=tmp_path) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("dualtrain: error: ")
    assert message in err


@pytest.mark.usefixtures("unprepared")
def test_the_backend_horovod_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("DUALTRAIN_BACKEND", "horovod")
    assert main(["script.py"]) == 2
    assert "unset the variable" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "", "auto"])
@pytest.mark.usefixtures("unprepared")
def test_scripts_run_on_the_torch_backend(monkeypatch, tmp_path, value):
    monkeypatch.delenv("DUALTRAIN_BACKEND")
    if value is not None:
        monkeypatch.setenv("DUALTRAIN_BACKEND", value)
    script = tmp_path / "script.py"
    script.write_text("")
    assert main([str(script)]) == 0
    assert os.environ["DUALTRAIN_BACKEND"] == "torch"


@pytest.mark.usefixtures("unprepared")
def test_ranks_other_than_0_wait_and_print_the_error_with_their_rank(monkeypatch, capsys):
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([]) == 2
    assert waits == [3.0]  # seconds for rank 0 to print the error, and for the launcher to end this process
    assert capsys.readouterr().err.startswith("dualtrain: error (rank 1 of 2): no script was given")


@pytest.mark.parametrize("words", ["--help", "--check --help", "--fix --diff -h", "--recorder --help"])
def test_help_shows_the_command_lines(capsys, words):
    assert main(words.split()) == 0
    assert "--check SCRIPT" in capsys.readouterr().out


def test_a_help_text_removed_by_python_oo_is_not_an_error(capsys, monkeypatch):
    monkeypatch.setitem(main.__globals__, "__doc__", None)
    assert main(["--help"]) == 0
    assert "-OO" in capsys.readouterr().out
    monkeypatch.setattr(recorder, "__doc__", None)
    assert recorder._parse(["--record", "folder", __file__])[1].script == __file__


@pytest.mark.parametrize(
    ("end", "status"), [("pass", None), ("sys.exit(7)", 7), ("sys.exit('why')", "why"), ("raise SystemExit", None)]
)
@pytest.mark.usefixtures("unprepared")
def test_a_script_gets_its_arguments_and_exits_with_its_own_status(tmp_path, end, status):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.modules['__main__'].seen = __name__, __file__, __spec__, sys.argv, sys.path[0]\n{end}\n"
    )
    if end == "pass":
        assert main([str(script), "-x", "--help"]) == 0
    else:
        with pytest.raises(SystemExit) as ended:
            main([str(script), "-x", "--help"])
        assert ended.value.code == status
    seen = sys.modules["__main__"].seen
    assert seen == ("__main__", str(script), None, [str(script), "-x", "--help"], str(tmp_path))


@pytest.mark.usefixtures("unprepared")
def test_a_module_runs_with_its_package(tmp_path):
    package = tmp_path / "hz_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 3\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .part import value\nseen = __package__, __spec__.name, sys.argv\n"
    )
    sys.path.insert(0, str(tmp_path))
    assert main(["-m", "hz_package", "x"]) == 0
    main_file = str(package / "__main__.py")
    assert sys.modules["__main__"].seen == ("hz_package", "hz_package.__main__", [main_file, "x"])


FAILING = "def fail():\n    raise RuntimeError('on purpose')\n\nfail()\n"


@pytest.mark.parametrize("source", [FAILING, "fail(\n", "import nothing_at_all\n"], ids=["run", "syntax", "import"])
@pytest.mark.usefixtures("unprepared")
def test_a_traceback_starts_in_the_script(tmp_path, source, capsys):
    script = tmp_path / "script.py"
    script.write_text(source)
    with pytest.raises((RuntimeError, SyntaxError, ImportError)) as raised:
        main([str(script)])
    sys.excepthook(raised.type, raised.value, raised.value.__traceback__)
    shown = capsys.readouterr().err
    assert shown == python(script).stderr


CHILDREN = """
import os, sys
from importlib.util import find_spec
from multiprocessing import get_context

import horovod
spec = find_spec("horovod.torch")
assert spec.origin == "dualtrain", spec

def work(method):
    assert horovod.__version__ == "0.28.1"
    print(method, __name__, spec.origin, os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"], sys.argv[1:], flush=True)

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        child = get_context(method).Process(target=work, args=(method,))
        child.start()
        child.join()
    sys.exit(child.exitcode + 5)
"""


def test_child_processes_of_a_script_can_import_horovod(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILDREN)
    ended = python("-m", "dualtrain.horovodize", script, "a")
    assert (ended.returncode, ended.stderr) == (5, "")
    assert ended.stdout.splitlines() == [f"{way} __mp_main__ dualtrain 0 1 ['a']" for way in ("spawn", "forkserver")]


def test_a_rank_ends_if_torchruns_agent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('started', flush=True)\ntime.sleep(5)\nprint('still running')\n")
    agent = (
        "import os, subprocess, sys\nvalues = dict(TORCHELASTIC_RUN_ID='none', RANK='0', LOCAL_RANK='0', WORLD_SIZE='1',\n"
        "LOCAL_WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='29400')\n"
        "subprocess.call([sys.executable, '-m', 'dualtrain.horovodize', sys.argv[1]], env={**os.environ, **values})"
    )
    command = [sys.executable, "-c", agent, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=CLEAN_ENV) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.kill()
        assert process.stdout.read() == ""
