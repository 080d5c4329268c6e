"""Rules of the source code: imports follow ``TOP_LEVEL`` and ``LAYERS``; some libraries and calls are in one file only."""

from __future__ import annotations

import ast
import builtins
import graphlib
import inspect
import re
import subprocess
import sys
from functools import cache

import pytest

import dualtrain
from dualtrain.__main__ import COMMANDS
from tests.pool import ROOT

PACKAGE = ROOT / "dualtrain"
#: The modules and packages of dualtrain. Each imports only from itself and from earlier names of this list.
TOP_LEVEL = [
    "version",
    "errors",
    "files",
    "launchers",
    "horovod_variables",
    "processes",
    "cores",
    "differences",
    "rendezvous",
    "torch_versions",
    "backends",
    # heap changes a setting of the whole process. It comes after backends, so that connect() cannot use it.
    "heap",
    "gradients",
    "buckets",
    "wrapped_steps",
    "optimizer",
    "state",
    "functional",
    "batchnorm",
    "on_ranks",
    # Modules after console may print with console.show. Modules before console only log messages.
    "console",
]
TOP_LEVEL += ["torchvision_shim", "user_code"]
TOP_LEVEL += ["config", "models", "data", "run_folder", "trainer", "training", "hvd", "spawn", "main"]
TOP_LEVEL += ["run_table", "compare", "report", "predict", "doctor", "drill", "bench", "horovodize"]
TOP_LEVEL += ["functions", "spark", "ray"]
#: The files of some packages by layer, from bottom to top. Each file imports from lower layers only.
LAYERS = {
    "rendezvous": [
        {"hosts", "http_store", "connection", "key_value_store", "horovodrun_server"},
        {"store", "reachability", "left_over"},
        {"meeting_point", "placement", "session"},
    ],
    "backends": [
        {"compilation", "watch", "inference", "dtensor", "subnormals", "horovod_start"},
        {"objects"},
        {"waits"},
        {"base"},
        {"wire", "serial", "agreement", "sum_order", "ring_order", "call_channel", "shm.semaphores", "shm.short"},
        {"shm.segment", "shm.shards", "tree_sum", "short_calls", "host_cores"},
        {"shm.buffers", "shm.operation"},
        {"shm.reductions", "calls"},
        {"movement"},
        {"reductions", "object_calls"},
        {"collectives"},
        {"comparison", "local", "torch", "horovod", "shm.backend"},
        {"shm"},
        {"factory", "job"},
    ],
    "functions": [
        {"link", "payload"},
        {"outcome"},
        {"children", "rank"},
        {"local"},
    ],
    "spark": [{"barrier"}, {"runner"}],
    "ray": [{"settings"}, {"actors"}, {"executor"}],
    "run_folder": [
        {"generation", "save_clock", "structure"},
        {"folder_lock"},
        {"checkpoint", "last_step"},
        {"attempt_events", "run_dir"},
        {"attempts", "checkpoint_writer"},
        {"restarts"},
    ],
    "trainer": [
        {"common_buffers", "description", "machine", "modes", "objective", "optimizer_state", "precision", "rank_state"},
        {"arguments", "averaged_weights", "data_parallel", "same_run", "same_weights", "step", "torch_losses"},
        {"fixed_state", "passes"},
        {"parts"},
        {"virtual_ranks"},
        {"trainer"},
    ],
    "training": [
        {"batch_plan", "cursor", "optimizers", "origin", "progress", "saveable", "signals"},
        {"assemble"},
        {"one_sample", "records", "results"},
        {"resume"},
        {"opening", "start"},
        {"loop"},
    ],
    "gradients": [
        {"parameters", "parameter_order", "turns", "deprecated", "shard_sums", "late_flag"},
        {"layout", "passes"},
        {"slots", "wire_format"},
        {"exposed", "frozen", "sparse", "packed", "refused_slots", "scaling", "changed_parameters"},
        {"bucket_memory", "drift"},
        {"buckets"},
        {"schedule", "hooks"},
        {"refusals", "step_check"},
        {"exchange"},
        {"reducer"},
    ],
}
#: Modules that ``import dualtrain`` must not load, because they are optional or their import takes long.
HEAVY = [
    "cloudpickle",
    "horovod",
    "pyspark",
    "ray",
    "torchvision",
    "sklearn",
    "tensorboard",
    "matplotlib",
    "mpi4py",
    "yaml",
    "tqdm",
]
FILES = sorted(PACKAGE.rglob("*.py"))
#: Folder of training scripts that the bench measures, written as users of other libraries write them.
SCRIPTS = PACKAGE / "bench" / "contenders"


def files_of(package):
    return sorted((PACKAGE / package).rglob("*.py"))


def module(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def nodes_of(path):
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(autouse=True, scope="module")
def no_nodes_left():
    """Free the syntax trees after these tests, because each garbage collection would visit all their objects."""
    yield
    for cached in (nodes_of, without_type_checking):
        cached.cache_clear()


def last_name(node):
    """Return the last part of a dotted name; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def without_type_checking(path):
    """Return all nodes of a file except those under ``if TYPE_CHECKING:``."""
    found, todo = [], nodes_of(path)[:1]
    while todo:
        node = todo.pop()
        found.append(node)
        guard = isinstance(node, ast.If) and last_name(node.test).endswith("TYPE_CHECKING")
        todo.extend(node.orelse if guard else ast.iter_child_nodes(node))
    return found


def imports(path):
    """Yield the full names of the file's imports, also lazy ones, except those under ``if TYPE_CHECKING:``.

    ``from a import b`` counts as ``a.b``. Fails if an import is relative.
    """
    for node in without_type_checking(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: {ast.unparse(node)} is relative"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top_level(name):
    """Return PART of the name ``dualtrain.PART.…`` if PART is in ``TOP_LEVEL``, else ``None``."""
    parts = name.split(".")
    return parts[1] if parts[0] == "dualtrain" and len(parts) > 1 and parts[1] in TOP_LEVEL else None


def layer_of(name, package):
    """Return the index of the layer of a module, or of a name imported from it; ``None`` for the package and its names."""
    inner = name.removeprefix(f"dualtrain.{package}").removeprefix(".").split(".")
    numbers = {each: number for number, names in enumerate(LAYERS[package]) for each in names}
    modules = (".".join(inner[:count]) for count in range(len(inner), 0, -1))
    return next((numbers[each] for each in modules if each in numbers), None)


def all_imports(path):
    """Yield the full names of all imports of the file, including those under ``if TYPE_CHECKING:``."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_file_is_in_the_list_of_modules_and_packages():
    unknown = [module(path) for path in FILES if module(path) != "dualtrain" and top_level(module(path)) is None]
    assert unknown in ([], ["dualtrain.__main__"])
    for package, layers in LAYERS.items():
        inside = {module(path).removeprefix(f"dualtrain.{package}").removeprefix(".") for path in files_of(package)}
        assert inside - {""} == set().union(*layers)


def test_modules_import_only_modules_and_packages_earlier_in_the_list():
    for path in FILES:
        own = top_level(module(path))
        for name in imports(path) if own else ():
            other = top_level(name)
            assert other is None or TOP_LEVEL.index(other) <= TOP_LEVEL.index(own), f"{module(path)} imports {name}"
            # Names of the package itself (``from dualtrain import connect``) load modules that may be later in the list, so
            # only these packages may use them.
            assert other or not name.startswith("dualtrain") or own in ("trainer", "training", "hvd", "main", "bench"), (
                f"{module(path)} imports {name}"
            )


@pytest.mark.parametrize("package", LAYERS)
def test_files_of_a_package_import_only_from_lower_layers(package):
    """Imports under ``if TYPE_CHECKING:`` count too, because a layer must not depend on the layers above it."""
    for path in files_of(package):
        own = layer_of(module(path), package)
        for name in all_imports(path):
            if own is not None and name.startswith(f"dualtrain.{package}."):
                assert layer_of(name, package) < own, f"{path.name} imports {name}"


def test_no_file_of_the_rendezvous_imports_torch():
    for path in files_of("rendezvous"):
        names = set(all_imports(path))
        assert not [name for name in names if name.partition(".")[0] == "torch"], path.name


def test_importing_the_rendezvous_and_the_commands_does_not_load_torch():
    # A command reports wrong arguments before the slow import of torch. It also reports a removed current folder before the
    # import, because without the folder, MKL ends the process.
    commands = [PACKAGE / f"{name}.py" for name, _ in COMMANDS.values()]
    commands = [path if path.exists() else path.with_suffix("") / "__main__.py" for path in commands]
    program = "import sys\n"
    program += "\n".join(f"import {module(path)}" for path in (*files_of("rendezvous"), *commands))
    program += "\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


#: GradScaler looks for this private name on optimizers, so dualtrain must define it.
CONVENTIONS = {"_step_supports_amp_scaling"}


def private_names(path):
    """Yield each class of a file with its private names (methods and attributes with a leading underscore)."""
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
            names |= {
                target.id
                for item in node.body
                if isinstance(item, ast.Assign | ast.AnnAssign)
                for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
                if isinstance(target, ast.Name)
            }
            yield node, {name for name in names if name.startswith("_") and not name.startswith("__")}


def overridden_privates(files):
    """Yield (class, name, base class) for each private name that a class overrides from a base class in another package."""
    classes = {}  # full name of a class: its package, the full names of its bases, its private names
    for path in files:
        known = dict(bindings(path))
        for node, names in private_names(path):
            bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
            local = {one.name for one, _ in private_names(path)}
            full = [f"{module(path)}.{base}" if base in local else imported(base, known) for base in bases]
            classes[f"{module(path)}.{node.name}"] = (path.parent, full, names)

    def ancestors(name):
        for base in classes[name][1]:
            if base in classes:
                yield base
                yield from ancestors(base)

    for name, (package, _, names) in classes.items():
        for base in ancestors(name):
            if classes[base][0] != package:
                yield from ((name, each, base) for each in sorted(names & classes[base][2]))


def imported(name, known):
    """Return the full name of a class that a file calls ``name`` (``Class`` or ``module.Class``)."""
    first, dot, rest = name.partition(".")
    return known.get(first, first) + dot + rest


def bindings(path):
    """Yield the names that a file imports by ``from … import``, each with its full name."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def test_no_class_overrides_a_private_name_of_another_package():
    found = [each for each in overridden_privates(FILES) if each[1] not in CONVENTIONS]
    assert [f"{name} overrides {each} of {base}" for name, each, base in found] == []


def test_an_overridden_private_name_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for name, text in {
        "a/base.py": "class Base:\n    _x: int = 1\n    def _f(self): ...\n    def g(self): ...\n",
        "a/same.py": "from a.base import Base\nclass Same(Base):\n    def _f(self): ...\n",
        "b/other.py": "from a.same import Same as S\nclass Other(S):\n    def _f(self): ...\n    def g(self): ...\n"
        "    _x = 2\n",
        "c/by_module.py": "from a import base\nclass Dotted(base.Base):\n    _x = 3\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(overridden_privates(sorted(tmp_path.rglob("*.py"))))
    assert found == [
        ("b.other.Other", "_f", "a.same.Same"),
        ("b.other.Other", "_f", "a.base.Base"),
        ("b.other.Other", "_x", "a.base.Base"),
        ("c.by_module.Dotted", "_x", "a.base.Base"),
    ]


def uses_of(path, library):
    """Return the uses of ``library`` in a file: imports, calls of ``import_module``, and dotted names.

    Uses under ``if TYPE_CHECKING:`` do not count.
    """
    found = [name for name in imports(path) if name == library or name.startswith(f"{library}.")]
    for node in without_type_checking(path):
        if isinstance(node, ast.Attribute) and library.endswith(f".{node.attr}") and ast.unparse(node) == library:
            found.append(f"line {node.lineno}")
        if isinstance(node, ast.Call) and last_name(node.func).endswith("import_module"):
            found += [ast.unparse(node) for value in node.args if library in ast.unparse(value)]
    return found


@pytest.mark.parametrize(
    ("library", "file"),
    [
        ("torch.distributed", "backends/torch.py"),
        ("horovod", "backends/horovod.py"),
        ("pyspark", "spark/barrier.py"),
        ("ray", "ray/actors.py"),
        ("cloudpickle", "functions/payload.py"),
    ],
)
def test_each_of_these_libraries_is_used_in_one_file_only(library, file):
    ours = [path for path in FILES if SCRIPTS not in path.parents]
    users = {path.relative_to(PACKAGE).as_posix(): uses for path in ours if (uses := uses_of(path, library))}
    assert list(users) == [file], users


def test_only_the_console_module_prints():
    """Names of data files and of image classes can contain escape sequences, which ``console.show`` escapes."""
    calls = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if SCRIPTS not in path.parents
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and last_name(node.func) in ("print", "print_exc", "write")
        if ast.unparse(node.func) in ("print", "traceback.print_exc", "sys.stdout.write", "sys.stderr.write")
    }
    assert calls == {"console.py"}


def test_importing_the_package_loads_no_heavy_module_and_its_signals_load_only_errors_and_version():
    program = f"import sys, dualtrain; print(*sorted(set({HEAVY}) & set(sys.modules)))\n"
    # The handler of Ctrl-C must be installed early, so its module may import only a few other modules.
    program += "import dualtrain.training.signals; print(*(name for name in sys.modules if name.startswith('dualtrain.')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    heavy, early = done.stdout.splitlines()
    assert heavy == ""
    assert early.split() == [f"dualtrain.{name}" for name in ("errors", "version", "training", "training.signals")]


def test_errors_named_in_docstrings_of_public_names_are_public():
    named = {
        error
        for name in dualtrain.__all__
        for _, member in [
            (name, getattr(dualtrain, name)),
            *inspect.getmembers(getattr(dualtrain, name), inspect.isfunction),
        ]
        for error in re.findall(r"^ +(\w+Error):", inspect.getdoc(member) or "", re.MULTILINE)
    }
    assert {"DivergedError", "RanksDifferError", "BackendError", "ValueError"} <= named
    assert {name for name in named if not hasattr(builtins, name)} <= set(dualtrain.__all__)


def test_only_the_loop_takes_the_whole_configuration():
    """Other functions get sections, so that their signatures show the settings on which they depend."""
    users = {
        path.name
        for package in ("run_folder", "trainer", "training")
        for path in files_of(package)
        for node in nodes_of(path)
        if isinstance(node, ast.Name | ast.alias) and "Config" in (getattr(node, "id", ""), getattr(node, "name", ""))
    }
    assert users == {"loop.py"}


def test_no_imports_are_circular():
    """Lazy imports, and imports under ``if TYPE_CHECKING:``, count too."""
    names = {module(path): path for path in FILES}
    graph = {}
    for name, path in names.items():
        # The name of an import is that of a module, or of an object in a module.
        found = {full if full in names else full.rpartition(".")[0] for full in all_imports(path)}
        graph[name] = {other for other in found & names.keys() if other != name}
    tuple(graphlib.TopologicalSorter(graph).static_order())
