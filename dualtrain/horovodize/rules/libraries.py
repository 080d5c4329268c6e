"""Rules on libraries that detect ranks or average gradients independently of the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dualtrain.horovodize.guards import Guards
from dualtrain.horovodize.names import COLLECTIVES
from dualtrain.horovodize.nodes import argument_at, calls_in, first_argument, given_values, last_name
from dualtrain.horovodize.order import calls_of
from dualtrain.horovodize.rules.losses import models_of_optimizer
from dualtrain.horovodize.rules.sent_models import are_related
from dualtrain.horovodize.source import Finding, Source

_STARTS_GROUP = "torch.distributed.init_process_group"
_LAUNCHER_READERS = r"(accelerate\.Accelerator|transformers\.(Trainer|TrainingArguments|Seq2SeqTrainer))$"


def torchmetrics(source: Source) -> Iterator[Finding]:
    """Metrics of torchmetrics, which uses torch.distributed only; one finding for all metrics."""
    if any(source.name(call.func) == _STARTS_GROUP for call in source.calls) or _combines_metrics(source):
        return
    call = _first_call(source, r"torchmetrics\.(?!functional)(\w+\.)*[A-Z]")
    if call is not None and not re.search(r"dist_sync_fn|distributed_available_fn|sync_on_compute", source.text):
        message = (
            "torchmetrics combines metrics over torch.distributed's default group, which neither Horovod nor dualtrain.hvd "
            "creates, so each rank has the metric of its own samples; pass dist_sync_fn, or gather results by allgather"
        )
        yield Finding(call.lineno, "trap", message)


def ignite(source: Source) -> Iterator[Finding]:
    """ignite, which itself imports Horovod; one finding for all uses."""
    call = _first_call(source, r"ignite\.(metrics|distributed|contrib\.metrics)\.")
    if call is not None:
        message = (
            "ignite itself imports horovod.torch to detect ranks; start the script with dualtrain horovodize, which "
            "provides this module, and do not change the script's import"
        )
        yield Finding(call.lineno, "differs", message)


def launcher_readers(source: Source) -> Iterator[Finding]:
    """Libraries that initialize torch.distributed if torchrun's variables are set; one finding for all uses."""
    call = _first_call(source, _LAUNCHER_READERS)
    if call is not None:
        name = source.name(call.func).partition(".")[0]
        message = (
            f"under torchrun, but not under horovodrun, {name} reads RANK and WORLD_SIZE and initializes "
            f"torch.distributed, so that gradients may be averaged twice; average them either with {name} or with Horovod"
        )
        yield Finding(call.lineno, "differs", message)


def averaged_twice(source: Source) -> Iterator[Finding]:
    """A model in DistributedDataParallel whose optimizer is wrapped too."""
    guards = Guards.of(source)
    wraps = [wrap for _, wrap in source.wraps if not guards.is_conditional(wrap)]
    for call in source.calls if wraps else ():
        if source.name(call.func) not in _DDP or guards.is_conditional(call):
            continue
        if not any(_share_model(source, call, wrap) for wrap in wraps):
            continue
        message = (
            "DistributedDataParallel and hvd.DistributedOptimizer both average the gradients, and the first needs a "
            "process group that Horovod does not create; use one of them"
        )
        yield Finding(call.lineno, "trap", message)


def _share_model(source: Source, ddp: ast.Call, wrap: ast.Call) -> bool:
    """Return whether the optimizer of ``wrap`` probably has parameters of the model that ``ddp`` gets.

    If the two calls are in different functions, one function must call the other in all runs, and the model must be an
    attribute of ``self``. In the same function, also return True if the source does not show what one of the models is.
    """
    models, module = models_of_optimizer(source, wrap), first_argument(ddp, "module")
    names = [target for target, value, _ in source.assignments if value is ddp]
    one, other = source.scope(ddp), source.scope(wrap)
    if one is not other:
        calls = [call for a, b in ((one, other), (other, one)) for call in calls_of(source, b) if source.scope(call) is a]
        certain = any(not Guards.of(source).is_conditional(call) for call in calls)
        return certain and any(name.startswith("self.") and name in models for name in names)
    names += [ast.unparse(module)] if isinstance(module, ast.Name | ast.Attribute) else []
    return not (models and names) or any(are_related(source, one, other) for one in names for other in models)


_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_DP = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel", "torch.nn.parallel.data_parallel.DataParallel")


def data_parallel(source: Source) -> Iterator[Finding]:
    """A model in DataParallel, which makes each rank use the GPUs of all ranks."""
    guards = Guards.of(source)
    scopes = {source.scope(wrap) for _, wrap in source.wraps}
    if any(re.search("visible_devices", file.text, re.IGNORECASE) for file in source.files):
        return  # the script may make only one GPU visible to each rank
    for call in source.calls:
        if source.name(call.func) not in _DP or source.scope(call) not in scopes or not _gets_all_gpus(source, call):
            continue
        tests = [ast.unparse(above.test) for above in source.around(call, ast.If)]
        true_with_gpus = all(re.search(r"device_count|is_available|__name__", test) for test in tests)
        if true_with_gpus and not guards.is_without_horovod(call):
            message = (
                "DataParallel makes each rank use all GPUs that it sees, and not one GPU per rank; remove it, because "
                "Horovod averages the gradients of the ranks"
            )
            yield Finding(call.lineno, "trap", message)


def _gets_all_gpus(source: Source, call: ast.Call) -> bool:
    """Return whether ``call`` has no device_ids, or ``list(range(torch.cuda.device_count()))``."""
    devices = argument_at(call, 1, "device_ids")
    if devices is None:
        return True
    words = {source.name(call.func) or ast.unparse(call.func) for call in calls_in(devices)}
    return words == {"list", "range", "torch.cuda.device_count"}


def _first_call(source: Source, pattern: str) -> ast.Call | None:
    calls = source.calls if source.uses_horovod else []
    return next((call for call in calls if re.match(pattern, source.name(call.func))), None)


def _combines_metrics(source: Source) -> bool:
    """Return whether the script itself combines the ranks' metrics."""
    combining = {
        name
        for name, function in source.functions.items()
        if any(source.hvd(call.func) in COLLECTIVES for call in calls_in(function))
    }
    computed = {target for target, value, _ in source.assignments if ".compute()" in ast.unparse(value)}
    for call in source.calls:
        if source.hvd(call.func) in COLLECTIVES or last_name(call.func) in combining:
            given = {
                ast.unparse(node) for value in given_values(call) for node in ast.walk(value) if isinstance(node, ast.expr)
            }
            if given & computed or any(".compute()" in text for text in given):
                return True
    return False
