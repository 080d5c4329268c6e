"""The rule on random numbers that are the same on every rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.edits import Edit
from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.nodes import argument_at, calls_in, first_argument, given_values, last_name, names_in
from dualtrain.horovodize.order import arguments, runs_on_driver
from dualtrain.horovodize.rules.sent_models import are_related, owner_of
from dualtrain.horovodize.source import Finding, Function, Source

_SEEDS = {"torch.manual_seed": "torch", "numpy.random.seed": "numpy", "random.seed": "random"}
_AUGMENTATIONS = re.compile(r"^torchvision\.transforms\.(v2\.)?(Random|ColorJitter|AutoAugment|RandAugment|TrivialAugment)")
_DRAWN_IN_DATA = {
    "torch": re.compile(r"\btorch\.(rand|randn|randint|randperm|bernoulli|normal)\("),
    "numpy": re.compile(r"\b(np|numpy)\.random\.\w+\("),
    "random": re.compile(r"(?<![.\w])random\.\w+\("),
}
#: Random choices that must be equal on all ranks: splits and orders of the data.
_COMMON_DRAWS = re.compile(
    r"random_split|randperm|SubsetRandomSampler|WeightedRandomSampler|train_test_split|KFold|\.shuffle\(|permutation\(|"
    r"random\.sample\(|\.choice\(|\.choices\(|worker_init_fn"
)


def same_random_numbers(source: Source) -> Iterator[Finding]:
    """A seed that is the same on every rank, in a script that augments its samples."""
    if not _trains(source) or source.uses_elastic:
        return
    guards = Guards.of(source)
    drawn = _drawn_for_samples(source)
    if drawn and _draws_in_workers(source):
        drawn = {"torch"}
    seed_calls = [call for call in source.calls if source.name(call.func) in _SEEDS and given_values(call)]
    drawn -= {
        _SEEDS[source.name(call.func)] for call in seed_calls if _depends_on_rank(source, guards, given_values(call)[0])
    }
    if "worker_init_fn" in source.code:
        return
    for call in source.calls:
        if _SEEDS.get(source.name(call.func)) not in drawn or len(given_values(call)) != 1:
            continue
        if any(word.arg is None for word in call.keywords):
            continue  # **options
        if runs_on_driver(source, call) or _depends_on_rank(source, guards, given_values(call)[0]):
            continue
        message = (
            "all ranks start with the same random numbers, so the samples of different ranks may be augmented in the same "
            "way; add hvd.rank() to the seed, after hvd.init()"
        )
        yield Finding(call.lineno, "trap", message, tuple(_per_rank(source, call)))


def _draws_in_workers(source: Source) -> bool:
    """Return whether loaders may have worker processes, in which torch also chooses the seeds of numpy and random."""
    calls = ((call, 5 if last_name(call.func) == "DataLoader" else len(call.args)) for call in source.calls)
    given = (value for call, position in calls if (value := argument_at(call, position, "num_workers")) is not None)
    by_dict = (
        value
        for node in source.nodes
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "num_workers"
    )
    return any(not (isinstance(value, ast.Constant) and value.value == 0) for value in (*given, *by_dict))


#: Names, or parts of names, of functions that seed all generators.
_SEEDS_ALL = re.compile(r"seed_everything|set_seed|fix_seed|seed_all")
#: Names of functions that seed generators, such as set_random_seed and init_seeds.
_SEEDING_FUNCTIONS = re.compile(
    r"(set|setup|init|fix|make|apply|configure|manual|seed)_?\w*seed|^seed_\w+|^seed$|(make|set)_\w*determinis|reproduc"
)


def seeds_torch(source: Source) -> bool:
    """Return whether the script may seed torch's default generator.

    It may do so itself, or by a function whose name or argument suggests it.
    """
    return _seeds_by_name(source) or any(True for _ in _manual_seed_uses(source))


def _manual_seed_uses(source: Source) -> Iterator[ast.AST]:
    """Yield the uses of manual_seed and manual_seed_all, except those of a torch.Generator."""
    for node in source.nodes:
        if last_name(node) in ("manual_seed", "manual_seed_all"):
            of_generator = isinstance(node, ast.Attribute) and _is_generator(source, node.value)
            yield from () if of_generator else (node,)


def seeds_ranks_alike(source: Source) -> bool:
    """Return whether the script may seed torch's default generator with a seed that does not contain the rank."""
    guards = Guards.of(source)
    calls = [
        call for call in source.calls if last_name(call.func) in ("manual_seed", "manual_seed_all") and given_values(call)
    ]
    ranked = [call.func for call in calls if any(guards.kinds.rank(part) for part in _expressions(given_values(call)[0]))]
    return _seeds_by_name(source) or any(node not in ranked for node in _manual_seed_uses(source))


def _expressions(value: ast.expr) -> Iterator[ast.expr]:
    return (node for node in ast.walk(value) if isinstance(node, ast.expr))


def seeds_numpy(source: Source) -> bool:
    """Return whether the script may seed numpy's global generator."""
    return _seeds_by_name(source) or _calls(source, "numpy.random.seed")


def seeds_random(source: Source) -> bool:
    """Return whether the script may seed the global generator of the module random."""
    return _seeds_by_name(source) or _calls(source, "random.seed")


def _seeds_by_name(source: Source) -> bool:
    """Return whether the script uses a function whose name or argument suggests that it seeds all generators."""
    if any(_SEEDS_ALL.search(last_name(node)) for node in source.nodes):
        return True
    if any(_gets_seed(source, call) for call in source.calls):
        return True
    named = (call for call in source.calls if _SEEDING_FUNCTIONS.search(last_name(call.func)))
    return any(
        not source.name(call.func).startswith(("torch.", "numpy.", "random.")) and _may_seed_all(call) for call in named
    )


def _gets_seed(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` passes a seed to a function of another file, as in ``init_distributed(args.seed)``."""
    name = source.name(call.func)
    known = name.startswith(("torch.", "numpy.", "random.", "sklearn."))
    if known or not isinstance(call.func, ast.Name) or call.func.id in (*source.functions, "int", "print", "str", "range"):
        return False
    if call.func.id[:1].isupper() or name.startswith(("dualtrain.", "horovod.")):
        return False  # an object with a generator of its own, or a function of a library
    return bool(name) and any("seed" in last_name(value).lower() for value in given_values(call))


def _may_seed_all(call: ast.Call) -> bool:
    """Return whether ``call`` may seed all generators. ``generator.manual_seed(1)`` and ``env.seed(1)`` seed only one."""
    return isinstance(call.func, ast.Name) or last_name(call.func) not in ("seed", "manual_seed", "initial_seed")


def _calls(source: Source, name: str) -> bool:
    return any(source.name(call.func) == name for call in source.calls)


def _is_generator(source: Source, node: ast.expr) -> bool:
    """Return whether ``node`` is a torch.Generator, whose seed does not affect other random numbers."""
    return any(source.name(call.func) == "torch.Generator" for call in calls_in(*source.possible_values(node)))


def _trains(source: Source) -> bool:
    """Return whether the script wraps an optimizer, or combines gradients by its own calls."""
    by_hand = any("allreduce" in source.hvd(call.func) for call in source.calls)
    return bool(source.wraps) or (by_hand and any(last_name(call.func) == "backward" for call in source.calls))


def _drawn_for_samples(source: Source) -> set[str]:
    """Return the libraries (torch, numpy, random) whose random numbers augment samples."""
    found = {"torch"} if any(_AUGMENTATIONS.search(source.name(call.func)) for call in source.calls) else set()
    for node in source.nodes:
        if isinstance(node, Function) and node.name == "__getitem__":
            text = ast.unparse(node)
            found |= {generator for generator, pattern in _DRAWN_IN_DATA.items() if pattern.search(text)}
    return found


#: Functions of each library that draw random numbers, and methods of tensors that do.
_DRAWS = {
    "torch": re.compile(r"torch\.(rand|normal|bernoulli|multinomial|poisson)|torch\.nn\.init\.(?!constant|eye|ones|zeros)"),
    "numpy": re.compile(r"numpy\.random\.(?!seed)"),
    "random": re.compile(r"random\.(?!seed)"),
}
_DRAWING_METHODS = ("bernoulli_", "normal_", "random_", "uniform_")
#: Functions that are called for each batch or sample.
_OF_BATCHES = ("__call__", "__getitem__", "forward")


def _keeps_random_values(source: Source, library: str) -> bool:
    """Return whether the script keeps random numbers that it draws outside of loops and ``_OF_BATCHES``.

    Parameters of models do not count. The script may assign the numbers to a variable, draw them into a new tensor, or
    append them to a list; the latter in loops too.
    """
    for _, value, at in source.assignments:
        if _draws(source, library, value) and not _is_repeated(source, at) and "Parameter(" not in ast.unparse(value):
            return True
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value
            if last_name(call.func) == "append" and any(_draws(source, library, value) for value in call.args):
                return True
            filled = call.func.value if isinstance(call.func, ast.Attribute) else None
            if source.name(call.func).startswith("torch.nn.init."):
                filled = first_argument(call, "tensor")
            made = source.values.get(ast.unparse(filled), []) if isinstance(filled, ast.Name) else []
            new = any(_NEW.match(source.name(one.func)) for one in made if isinstance(one, ast.Call))
            if new and _draws(source, library, call) and not _is_repeated(source, call):
                return True
    return False


#: Functions that make a tensor.
_NEW = re.compile(r"torch\.(empty|ones|zeros|\w*Tensor)\b")


def _draws(source: Source, library: str, value: ast.expr) -> bool:
    """Return whether ``value`` calls a function or method that draws random numbers of ``library``."""
    calls = list(calls_in(value))
    by_method = library == "torch" and any(last_name(call.func) in _DRAWING_METHODS for call in calls)
    return by_method or any(_DRAWS[library].match(source.name(call.func)) for call in calls)


def _is_repeated(source: Source, node: ast.AST) -> bool:
    """Return whether ``node`` runs for each batch or sample, as far as its file shows."""
    in_loop = any(isinstance(above, ast.For | ast.While) for above in source.above(node))
    return in_loop or getattr(source.scope(node), "name", "") in _OF_BATCHES


#: Functions whose results differ between processes.
_OF_PROCESS = re.compile(r"\brandom|rand(int|bits|bytes)|time\b|\bnow$|secrets|getpid|uuid|initial_seed|torch\.seed$")


def _depends_on_rank(source: Source, guards: Guards, value: ast.expr, depth: int = 0) -> bool:
    """Return whether the seed ``value`` contains the rank, or a random number or time that differs between processes.

    Also return True for a parameter if the file has no call that passes it: a caller in another file may add the rank.
    """
    nodes = [node for node in ast.walk(value) if isinstance(node, ast.expr)]
    if any(isinstance(node, ast.Call) and _OF_PROCESS.search(ast.unparse(node.func)) for node in nodes):
        return True
    if "rank" in ast.unparse(value).lower() or any(guards.kinds.rank(node) for node in nodes):
        return True
    if isinstance(value, ast.Name) and value.id in source.parameters(value):
        if depth > 2:  # a long chain of calls, or a method that passes the seed to a method of the same name
            return True
        found = [_depends_on_rank(source, guards, given, depth + 1) for given in _arguments(source, value)]
        return not found or any(found)
    values = [given for name in names_in(value) for given in source.values.get(name, ())]
    parameters = [node for node in nodes if isinstance(node, ast.Name) and node.id in source.parameters(node)]
    values += [given for parameter in parameters for given in _arguments(source, parameter)]
    return depth < 3 and any(_depends_on_rank(source, guards, given, depth + 1) for given in values)


def _arguments(source: Source, parameter: ast.Name) -> list[ast.expr]:
    """Return what the calls in this file pass for ``parameter`` of the function that contains it."""
    function = source.scope(parameter)
    if not isinstance(function, Function):
        return []
    calls = (call for call in source.calls if last_name(call.func) == function.name)
    return [value for call in calls for value in arguments(source, function, call, parameter.id)]


def _per_rank(source: Source, call: ast.Call) -> list[Edit]:
    """Return edits that add the rank to the seed.

    Return no edits if the ranks may need equal random numbers (for a split, the order of samples, or a value that is drawn
    once), if the seed is not a variable, an attribute or an integer, or if the call does not come after ``init`` in the
    same scope and before the broadcasts of all models.
    """
    seed, rank = given_values(call)[0], source.spell("rank", call)
    before = [init for init in source.hvd_calls("init") if init.lineno < call.lineno]
    same_place = any(source.scope(init) is source.scope(call) for init in before)
    simple = isinstance(seed, ast.Name | ast.Attribute) or (isinstance(seed, ast.Constant) and isinstance(seed.value, int))
    if not (rank and same_place and simple and _sends_all_models(source, call)) or _COMMON_DRAWS.search(source.text):
        return []
    if any("shuffle=True" in ast.unparse(other) for other in source.calls):
        return []  # a loader may draw its order from this seed
    if _keeps_random_values(source, _SEEDS[source.name(call.func)]):
        return []
    return [source.layout.replace(seed, f"{ast.unparse(seed)} + {rank}()")]


def _sends_all_models(source: Source, seeding: ast.Call) -> bool:
    """Return whether all runs broadcast each model after the call ``seeding``, so that equal seeds are not needed."""
    guards, sent = Guards.of(source), set[str]()
    for call in source.hvd_calls("broadcast_parameters"):
        owner, scope = owner_of(first_argument(call, "params"), "state_dict", "named_parameters"), source.scope(call)
        certain = guards.runs_whenever(call, seeding if source.scope(seeding) is scope else scope)
        if owner is not None and call.lineno > seeding.lineno and certain:
            sent.add(ast.unparse(owner))
    return bool(sent) and all(any(are_related(source, made, one) for one in sent) for made in _made_models(source))


#: Methods of models that optimizers and most other objects do not have.
_OF_MODELS = ("eval", "named_parameters", "parameters")
_MODELS = re.compile(r"torch\.nn\.(\w+\.)*(?!\w*Loss)[A-Z]\w*$|torchvision\.models\.")


def _made_models(source: Source) -> Iterator[str]:
    """Yield the variables to which the result of a call is assigned, if this result is a model.

    Leave out variables in classes with a base class: these are parts of models. The result of an unknown function counts as
    a model if the file calls one of the methods ``_OF_MODELS`` of the variable, or moves the result: ``build().cuda()``.
    """
    classes = [one for file in source.files for one in file.classes]
    own = {one.name for one in classes if any(re.search("Module|Model|Net", last_name(base)) for base in one.bases)}
    used = {ast.unparse(owner) for call in source.calls if (owner := owner_of(call, *_OF_MODELS)) is not None}
    for target, value, at in source.assignments:
        called = value.func if isinstance(value, ast.Call) else value
        while isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
            called = called.value.func  # Net().cuda()
        part = any(one.bases for one in source.around(at, ast.ClassDef))
        name = source.name(called)
        moved = isinstance(value, ast.Call) and called is not value.func and last_name(value.func) in ("cuda", "to")
        unknown = moved and name != "" and not name.startswith(("torch.", "numpy."))
        made = target in used or _MODELS.match(name) or last_name(called) in own or unknown
        if called is not value and not part and made:
            yield target
