"""Rules on the script's environment: launchers, environment variables, builds, other frameworks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovod_variables import HONOURED
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.imports import ENGINES, PACKAGES, replacement_of
from dualtrain.horovodize.names import BUILD, MODULE_NAMES, OTHER_FRAMEWORKS, RAY_ELASTIC, RUN_UNSUPPORTED, is_this_host
from dualtrain.horovodize.nodes import is_stored
from dualtrain.horovodize.order import calls_of
from dualtrain.horovodize.own_modules import defined_in, file_of
from dualtrain.horovodize.rules.sampling import is_for_other_launcher
from dualtrain.horovodize.rules.single_calls import is_switched_off, mpi_communicator
from dualtrain.horovodize.source import Finding, Source

#: Text in conditions and ``with`` statements around imports that are optional, or for other libraries.
_OTHER_USE = re.compile(r"suppress\(|TYPE_CHECKING|tensorflow|keras|mxnet|\b(is_?)?tf\b")
_OF_MPI = re.compile(r"OMPI_COMM_WORLD_(LOCAL_)?(RANK|SIZE)|PMI_(LOCAL_)?(RANK|SIZE)|MV2_COMM_WORLD_(LOCAL_)?(RANK|SIZE)")
#: If a script uses a name that it imports from one of these modules, the rule ``unknown_name`` checks the name.
_REPORTED_WHERE_USED = {"horovod.torch", *(f"horovod.torch.{name}" for name in MODULE_NAMES)}
_RUNNERS = ("horovod.run", "horovod.runner.run", "horovod.run.run", "horovod.run.runner.run")


def uncovered_imports(source: Source) -> Iterator[Finding]:
    """Imports of horovod.tensorflow, horovod.spark.torch and the like, and of Horovod's internal modules and names."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            reported = node.module in _REPORTED_WHERE_USED
            names = [f"{node.module}.{alias.name}" for alias in node.names if not (reported and _is_used(source, alias))]
        else:
            continue
        uncovered = [name for name in names if not _covered(name)]
        for name in uncovered if uncovered and not is_guarded(source, node) else ():
            framework = name.split(".")[1]
            what = f"horovod.{framework}" if framework in OTHER_FRAMEWORKS else name
            message = (
                f"dualtrain has nothing in place of {what}; use the public names of horovod.torch, and start the "
                "script with torchrun"
            )
            yield Finding(node.lineno, "unsupported", message)


#: Exceptions of imports that fail.
IMPORT_ERRORS = r"ImportError|ModuleNotFoundError|\bException"


def is_guarded(source: Source, node: ast.AST) -> bool:
    """Return whether the script continues if this import fails, or needs the import only for a different framework."""
    if source.is_caught(node, IMPORT_ERRORS):
        return True
    for above in source.above(node):
        if isinstance(above, ast.With | ast.If):
            condition = above.items[0] if isinstance(above, ast.With) else above.test
            if _OTHER_USE.search(ast.unparse(condition)):
                return True
    others = (other for other in source.nodes if isinstance(other, ast.Import | ast.ImportFrom) and other is not node)
    return any("horovod.torch" in ast.unparse(other) and source.exclusive(node, other) for other in others)


def _is_used(source: Source, alias: ast.alias) -> bool:
    return any(isinstance(node, ast.Name) for node in source.mentions.get(alias.asname or alias.name, ()))


def _covered(name: str) -> bool:
    package, _, last = name.rpartition(".")
    module, owner = replacement_of(name), replacement_of(package)
    inside = last == "*" or last in PACKAGES.get(package, {}) or last == ENGINES.get(package, ("", ""))[1]
    known = (module is not None and file_of(module) is not None) or (owner is not None and last in defined_in(owner))
    return not name.startswith("horovod.") or name in PACKAGES or inside or known


def horovod_run(source: Source) -> Iterator[Finding]:
    """Calls of horovod.run."""
    for call in source.calls:
        if source.name(call.func) not in _RUNNERS:
            continue
        refused = [word for word in call.keywords if word.arg in RUN_UNSUPPORTED and not _is_accepted(word)]
        if refused:
            accepted = " or names only this host" if refused[0].arg == "hosts" else ""
            here = "" if isinstance(refused[0].value, ast.Constant) else f", unless this argument is None{accepted}"
            message = (
                f"dualtrain refuses horovod.run({refused[0].arg}=…){here}: dualtrain's run() does not support other "
                "hosts, elastic training or output files; start the script with torchrun, and call the function directly"
            )
            yield Finding(call.lineno, "unsupported", message)
        else:
            message = "horovod.run() starts its ranks on this host only; start the script as one process, without torchrun"
            yield Finding(call.lineno, "differs", message)


def _is_accepted(word: ast.keyword) -> bool:
    """Return whether the argument is None, or names this host as the only one."""
    if not isinstance(word.value, ast.Constant):
        return False
    return word.value.value is None or (word.arg == "hosts" and is_this_host(word.value.value))


def branch_on_build(source: Source) -> Iterator[Finding]:
    """Branches that depend on how Horovod was built."""
    for call in source.hvd_calls(*BUILD - {"mpi_threads_supported"}):
        if not _is_in_condition(source, call) or is_switched_off(source, call):
            continue
        name = source.hvd(call.func)
        if name.startswith(("ccl_", "ddl_", "mpi_")):
            answer = "is False"
        elif name.startswith("gloo_"):
            answer = "is True" if name == "gloo_built" else "is True after init()"
        else:
            answer = "describes torch's build instead of Horovod's"
        yield Finding(call.lineno, "differs", f"{name}() {answer}; check the branch that depends on it")


def threads_of_mpi(source: Source) -> Iterator[Finding]:
    """Calls of mpi_threads_supported outside of ``try``, in a script that checks neither mpi_built nor mpi_enabled."""
    if any(
        _is_in_condition(source, call) or _is_assigned_or_operand(source, call)
        for call in source.hvd_calls("mpi_built", "mpi_enabled")
    ):
        return  # with dualtrain both return False, and most likely mpi_threads_supported is then not called
    for call in source.hvd_calls("mpi_threads_supported"):
        if not any(isinstance(above, ast.Try) for above in source.above(call)) and not is_switched_off(source, call):
            message = "mpi_threads_supported() raises ValueError, as on Horovod without MPI; remove the call"
            yield Finding(call.lineno, "unsupported", message)


def _is_in_condition(source: Source, call: ast.Call) -> bool:
    below: ast.AST = call
    for above in source.above(call):
        if getattr(above, "test", None) is below:
            return True
        below = above
    return False


def _is_assigned_or_operand(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` is assigned to a variable, or is an operand of ``and`` or ``or``."""
    return isinstance(source.parents[call], ast.Assign | ast.BoolOp)


def variables(source: Source) -> Iterator[Finding]:
    """HOROVOD_… variables that the script sets, and that have no effect with dualtrain."""
    for node in source.nodes:
        for value in _set_by(source, node):
            if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
                continue
            if value.value.startswith("HOROVOD_") and value.value not in HONOURED and not _OF_LAUNCHER.match(value.value):
                yield Finding(value.lineno, "differs", f"{value.value} has no effect on torch.distributed; remove it")


#: Variables that give child processes their ranks. dualtrain reads them too.
_OF_LAUNCHER = re.compile(r"HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS_(ADDR|PORT))$")


def _set_by(source: Source, node: ast.AST) -> Iterator[ast.expr | None]:
    """Yield the names of the environment variables that ``node`` sets."""
    if isinstance(node, ast.Subscript) and is_stored(node) and source.name(node.value) == "os.environ":
        yield node.slice
    elif isinstance(node, ast.Call) and source.name(node.func) in ("os.environ.setdefault", "os.putenv"):
        yield from node.args[:1]
    elif isinstance(node, ast.Call) and source.name(node.func) == "os.environ.update":
        for value in node.args:
            yield from value.keys if isinstance(value, ast.Dict) else ()
        yield from (ast.Constant(word.arg, lineno=node.lineno) for word in node.keywords)


def variables_of_mpi(source: Source) -> Iterator[Finding]:
    """Variables of MPI launchers by which a script detects that it runs under Horovod; one finding for all."""
    inits = [(file, init) for file in source.files for init in file.hvd_calls("init")]
    # If every init() is conditional, or none is in the program's files, init() perhaps runs only if the variable is set.
    conditional = all(Guards.of(file).is_conditional(init) for file, init in inits)
    found = []
    for node in source.nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not _OF_MPI.fullmatch(node.value):
            continue
        reads = re.search("environ|getenv", ast.unparse(source.statement(node)))
        if not reads or _has_alternative(source, node) or is_for_other_launcher(source, node):
            continue
        if not Guards.of(source).is_without_horovod(node):
            message = (
                f"torchrun does not set {node.value}, so that the script fails or trains each rank alone; call "
                "hvd.init() and read hvd.rank(), hvd.size() and so on, or start the script with mpirun"
            )
            needed = conditional or (isinstance(source.parents[node], ast.Subscript) and not _is_for_mpi(source, node))
            found.append(Finding(node.lineno, "unsupported" if needed else "differs", message))
    yield from _worst(found)


def _worst(findings: list[Finding]) -> list[Finding]:
    """Return a list of the first finding of level "unsupported", or else of the first finding; empty without findings."""
    return sorted(findings, key=lambda finding: finding.level != "unsupported")[:1]


#: Words in conditions that may be true under mpirun only.
_MPI = re.compile(r"(?<![a-z])mpi|use_?mpi|OMPI|PMI_|comm\b|launcher|slurm", re.IGNORECASE)


def _is_for_mpi(source: Source, node: ast.AST, depth: int = 0) -> bool:
    """Return whether ``node``, or each call of the function around it, perhaps runs under mpirun only."""
    if any(isinstance(above, ast.Try) for above in source.above(node)):
        return True  # the script may expect an error under torchrun
    if any(_MPI.search(ast.unparse(test)) for test in Guards.of(source).tests(node)):
        return True
    calls = list(calls_of(source, source.scope(node))) if depth < 3 else []
    return bool(calls) and all(_is_for_mpi(source, call, depth + 1) for call in calls)


def _has_alternative(source: Source, node: ast.AST) -> bool:
    """Return whether the same function also reads variables of torchrun, or Horovod's variables, which horovodize sets.

    Outside functions, only the statement of ``node`` is searched, and all values of the variables that it assigns.
    """
    statement = source.statement(node)
    targets = [target for target, _, at in source.assignments if at is statement]
    values = [statement, *(value for target in targets for value in source.values[target])]
    roots = values if source.scope(node) is source.tree else [source.scope(node)]
    inside = (other for root in roots for other in ast.walk(root))
    texts = {other.value for other in inside if isinstance(other, ast.Constant) and isinstance(other.value, str)}
    return any(re.fullmatch("(HOROVOD_)?(LOCAL_)?RANK|WORLD_SIZE|HOROVOD_(LOCAL_)?SIZE", text) for text in texts)


def world_of_mpi(source: Source) -> Iterator[Finding]:
    """Calls of mpi4py's COMM_WORLD, which has one rank under torchrun; one finding for all."""
    if any(True for _ in mpi_communicator(source)):
        return
    guards, found = Guards.of(source), []
    for call in source.calls:
        if not isinstance(call.func, ast.Attribute) or guards.is_without_horovod(call) or call.func.attr in _OF_PROCESS:
            continue
        if any(source.name(owner) == "mpi4py.MPI.COMM_WORLD" for owner in source.possible_values(call.func.value)):
            message = (
                "under torchrun, but not under horovodrun with MPI, each rank has its own MPI.COMM_WORLD of size 1, so "
                f"that {call.func.attr}() reaches no other rank; use calls of hvd instead"
            )
            found.append(Finding(call.lineno, "differs" if _is_for_mpi(source, call) else "unsupported", message))
    yield from _worst(found)


#: Methods of an MPI communicator that serve their purpose even if it has only one rank.
_OF_PROCESS = ("Abort", "Get_name", "Is_inter", "Set_errhandler")


def runner_of_databricks(source: Source) -> Iterator[Finding]:
    """HorovodRunner of Databricks, which newer runtimes do not have."""
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom) or node.module != "sparkdl":
            continue
        if any(alias.name == "HorovodRunner" for alias in node.names):
            message = (
                "Databricks Runtime 16 and later have no sparkdl.HorovodRunner; import HorovodRunner from dualtrain.spark, "
                "which has the same arguments"
            )
            yield Finding(node.lineno, "differs", message)


def elastic_ray(source: Source) -> Iterator[Finding]:
    """Arguments of RayExecutor that make it elastic."""
    for call in source.calls:
        if not re.fullmatch(r"(horovod|dualtrain)\.ray\.((runner|executor)\.)?RayExecutor", source.name(call.func)):
            continue
        elastic = [word.arg for word in call.keywords if word.arg in RAY_ELASTIC and not _is_accepted(word)]
        if elastic:
            message = (
                f"RayExecutor({elastic[0]}=…) is elastic unless this argument is None, and dualtrain refuses elastic "
                "executors; give num_workers"
            )
            yield Finding(call.lineno, "unsupported", message)


def elastic_run(source: Source) -> Iterator[Finding]:
    """Elastic training: one finding for all uses."""
    for node in source.nodes:
        if source.hvd(node) == "elastic.run" and isinstance(node, ast.Attribute | ast.Name):
            message = (
                "after a failed operation the state is restored from memory, but if a process fails or is added, "
                "torchrun restarts all processes; save the state to a file too, and load it at the start"
            )
            yield Finding(node.lineno, "differs", message)
            return
