"""Record the weights and the speed of a Horovod script's optimizer steps.

usage: horovodrun -np N python record.py --record FOLDER [--steps STEPS] [--seed SEED] SCRIPT [ARGUMENT...]

Run the unmodified SCRIPT (or -m MODULE) until each optimizer that has taken a step has taken STEPS steps, one optimizer
has taken more than STEPS, or all together have taken 4 * STEPS. Then end the script on all ranks.
Rank R writes FOLDER/rank-R.jsonl: names, numbers, and the norm, hash and a few values of each weight tensor. The record has
lines of code only in the traceback of an error. To compare, run where dualtrain is installed: dualtrain horovodize --prove
--against FOLDER SCRIPT ...

This file is a complete program: copy it to the cluster that has Horovod. It needs only Python 3.8, torch 1.13 and Horovod,
or newer versions.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.abc
import json
import math
import multiprocessing
import os
import platform
import random
import resource
import runpy
import sys
import threading
import time
import traceback
from typing import Any

FORMAT = 1
#: Steps after which the weights are summarized; 0 is before the first step. ``marks`` adds two that depend on STEPS.
MARKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
SAMPLES = 64  # recorded values of each tensor
#: Elements of a tensor that are converted to float64 at once. A copy of a whole large layer might not fit on the GPU.
PART = 1 << 24
#: End after 4 * STEPS steps in total: if a script makes a new optimizer in each epoch, perhaps none reaches STEPS.
TOTAL_FACTOR = 4
#: How many optimizers, and how many broadcast tensors of each name, are kept and summarized at the end; later ones replace
#: earlier ones. A script that makes models in a loop would otherwise fill the memory.
KEPT = 8
END_SECONDS = 30.0  # longest wait for the other ranks after the last step, and for the library's shutdown
#: Variables with this process's rank: those of torchrun, Horovod, Open MPI, MPICH and Slurm.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")
LIBRARIES = ("horovod.torch", "dualtrain.hvd")


class Record:
    """The file of one rank: a JSON object on each line. The constructor raises FileExistsError if the file exists."""

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank-{rank}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def write(self, kind: str, **facts: Any) -> None:
        """Append one line, without buffering."""
        data = (json.dumps(dict(facts, kind=kind)) + "\n").encode()
        while data:  # a nearly full disk may store only a part of the data; the next write then raises the error
            data = data[os.write(self._file, data) :]

    def note(self, error: Exception) -> None:
        """Append an error that does not change the result."""
        self.write("note", text=f"{type(error).__name__}: {error}")


class Recorder:
    """Records the steps of the optimizers, and ends the process after the last step.

    Args:
        record: the file to write to.
        steps: the number of steps of each optimizer.
    """

    def __init__(self, record: Record, steps: int) -> None:
        self.record, self.steps = record, steps
        self.library: Any = None
        self.counts: list[int] = []  # steps of each optimizer
        self._marks = marks(steps)
        self._first_defect = 0  # the first step after which ``_defects()`` was not empty; 0 until then
        self._join: Any = None  # the library's join() before ``patch`` replaced it
        # Whether the script has called join(). From then on, the ranks may have taken different numbers of steps.
        self._joined = False
        # The parameters of the optimizers that were made last. The optimizers themselves must not be kept: Horovod fails
        # if an earlier optimizer of the same parameters still exists.
        self._latest: dict[int, list[Any]] = {}
        self._names: list[list[str]] = []  # names of the parameters of each optimizer; empty before its first step
        # The tensors that the script has passed to broadcast_parameters, keyed by name and then by address.
        self._sent: dict[str, dict[int, Any]] = {}
        self._resumed = 0.0  # the time from which the next step is timed; 0 before the first step or join()
        self._world_written = False  # whether rank, size and versions are written

    def patch(self, library: Any) -> None:
        """Replace ``DistributedOptimizer``, ``join`` and ``broadcast_parameters`` of ``library`` by recording wrappers.

        Do nothing if they have been replaced before.
        """
        original = library.DistributedOptimizer
        if hasattr(original, "recorded"):
            return

        @functools.wraps(original)
        def distributed_optimizer(optimizer: Any, named_parameters: Any = None, *args: Any, **kwargs: Any) -> Any:
            if named_parameters is not None:
                # The library and the recorder both read it, and it may be a generator.
                named_parameters = list(named_parameters)
            made = original(optimizer, named_parameters, *args, **kwargs)
            self._observe(made, named_parameters or ())
            return made

        distributed_optimizer.recorded = True  # type: ignore[attr-defined]
        self.library = library
        library.DistributedOptimizer = distributed_optimizer
        home: Any = sys.modules[original.__module__]
        home.DistributedOptimizer = distributed_optimizer
        self._join = library.join

        @functools.wraps(library.join)
        def join(*args: Any, **kwargs: Any) -> Any:
            self._joined = True
            last = self._join(*args, **kwargs)
            if self._is_end_of_any_rank():
                self._leave()
            self._resumed = time.perf_counter()
            return last

        library.join = join
        broadcast = library.broadcast_parameters

        @functools.wraps(broadcast)
        def broadcast_parameters(params: Any, *args: Any, **kwargs: Any) -> Any:
            self._keep_sent(params)
            return broadcast(params, *args, **kwargs)

        library.broadcast_parameters = broadcast_parameters

    def _keep_sent(self, params: Any) -> None:
        """Keep the tensors that the script broadcasts: they are the model, with its buffers."""
        import torch

        pairs = params.items() if isinstance(params, dict) else params if isinstance(params, list) else ()
        for name, value in [pair for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]:
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                same = self._sent.setdefault(str(name), {})  # several models may have tensors of this name
                same[value.data_ptr()] = value
                if len(same) > KEPT:
                    del same[next(iter(same))]

    def _observe(self, optimizer: Any, named_parameters: Any) -> None:
        """Replace the optimizer's ``step`` by one that records."""
        number = len(self.counts)
        self.counts.append(0)
        self._names.append([])
        names = {id(pair[1]): pair[0] for pair in named_parameters if isinstance(pair, tuple)}
        cls = type(optimizer)  # both libraries create a new class for each optimizer, so the patch affects only this one
        original = cls.step

        @functools.wraps(original)
        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            if this is not optimizer:  # a copy of the optimizer
                return original(this, *args, **kwargs)
            if not self.counts[number]:
                self._begin(number, optimizer, names)
            result = original(this, *args, **kwargs)
            self._end_step(number, optimizer, names)
            return result

        cls.step = step

    def _begin(self, number: int, optimizer: Any, names: dict[int, str]) -> None:
        """Write the optimizer and its initial weights; before the first recorded step, also rank, size and versions."""
        if not self._world_written:
            import torch

            self._world_written = True
            facts = {"rank": self.library.rank(), "size": self.library.size(), "torch": torch.__version__}
            facts["threads"] = torch.get_num_threads()
            facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
            self.record.write("world", library=_version(self.library), **facts)
        self._describe(number, optimizer, names)
        self._write_weights(number, optimizer)
        self._resumed = time.perf_counter()

    def _describe(self, number: int, optimizer: Any, names: dict[int, str]) -> None:
        """Write an optimizer's type, and the names and shapes of its parameters."""
        tensors: list[list[Any]] = []
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                name = names.get(id(p), f"group {i} parameter {j}")
                tensors.append([name, str(p.dtype).replace("torch.", ""), list(p.shape)])
        self._names[number] = [name for name, _, _ in tensors]
        self.record.write("optimizer", optimizer=number, type=type(optimizer).__name__, tensors=tensors)

    def _end_step(self, number: int, optimizer: Any, names: dict[int, str]) -> None:
        """Write the step. If it was the last one, end this process."""
        _wait_for_gpu()
        seconds = time.perf_counter() - self._resumed
        params = self._latest[number] = _params(optimizer)
        self._latest.pop(number - KEPT, None)
        if len(params) != len(self._names[number]):  # the script has added or removed parameters
            self._describe(number, optimizer, names)
        self.counts[number] += 1
        step = self.counts[number]
        sums = checksums(params)
        self.record.write("step", optimizer=number, step=step, seconds=seconds, sums=sums, time=time.time())
        if step in self._marks:
            self._write_weights(number, optimizer)
        if not self._first_defect and _defects():
            self._first_defect = max(self.counts)
        if self._is_end() and not self._joined:  # after a join(), all ranks leave at the end of the next join()
            self._meet()
            self._leave()
        self._resumed = time.perf_counter()

    def _is_end(self) -> bool:
        """Return whether this rank has taken all steps that are to be recorded."""
        counts = [count for count in self.counts if count]
        enough = bool(counts) and (min(counts) >= self.steps or max(counts) > self.steps)
        return enough or sum(counts) >= TOTAL_FACTOR * self.steps

    def _is_end_of_any_rank(self) -> bool:
        """Return whether any rank has taken all steps that are to be recorded. All ranks call this at the same time."""
        import torch

        ended = torch.ones(1) if self._is_end() else torch.zeros(1)
        return bool(self.library.allreduce(ended, name="end of a rank", op=self.library.Sum) > 0)

    def _write_weights(self, number: int, optimizer: Any) -> None:
        tensors = [summary(p) for p in _params(optimizer)]
        options = [{k: v for k, v in group.items() if _is_plain(v)} for group in optimizer.param_groups]
        step = self.counts[number]
        self.record.write("weights", optimizer=number, step=step, tensors=tensors, options=options)

    def _write_state(self) -> None:
        """Write the weights again, and the other broadcast tensors.

        The script may have changed the weights after the last step. The other tensors are the model's buffers, and weights
        that no recorded optimizer updates.
        """
        found = []
        for number, params in self._latest.items():
            found += [("weights", self._names[number][i], p) for i, p in enumerate(params)]
        known = {p.data_ptr() for _, _, p in found}
        for name, p in [(name, p) for name, same in self._sent.items() for p in same.values()]:
            if p.data_ptr() not in known:
                real = p.is_floating_point() or p.is_complex()
                found.append(("buffers" if real else "integers", name, p))
        tensors = [[group, name, p.numel(), summary(p)] for group, name, p in found]
        self.record.write("state", tensors=tensors)

    def end(self, reason: str, status: int, **texts: Any) -> None:
        """Write the last lines: the weights, unless ``reason`` is "error" or there was no step; peak memory; the end."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        torch = sys.modules.get("torch")
        gpu = torch.cuda.max_memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0
        if reason != "error" and any(self.counts):
            self._write_state()  # after the peak memory was read, because the summaries may increase it
        facts = {"steps": self.counts, "memory": memory, "gpu_memory": gpu, "defects": _defects()}
        self.record.write("end", reason=reason, status=status, first_defect=self._first_defect, **dict(facts, **texts))

    def _leave(self) -> None:
        """End this process, and so the script. All ranks call this at the same time.

        SystemExit is not used: a script may catch it, and ``finally`` blocks may wait for other ranks or write files.
        """
        self.end("steps", 0)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a closed pipe, or a closed file
                pass
        for child in multiprocessing.active_children():
            child.terminate()
        leaving = threading.Thread(target=_shut_down, args=(self.library, self.record), daemon=True)
        leaving.start()
        leaving.join(END_SECONDS)
        os._exit(0)

    def _meet(self) -> None:
        """Wait until all ranks have reached this point: if this rank exits earlier, the last step of others may fail.

        Wait for at most ``END_SECONDS``; if another rank has ended, don't wait. Each rank adds 1 to a sum. If the sum is
        below the size, a rank waits in join(), and has added zero. Then join too, so that the waiting rank goes on to
        ``_is_end_of_any_rank``.
        """
        import torch

        try:
            handle = self.library.allreduce_async(torch.ones(1), name="end of the record", op=self.library.Sum)
            deadline = time.monotonic() + END_SECONDS
            while not self.library.poll(handle):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.001)
            if self.library.synchronize(handle) < self.library.size():
                self._join()
                self._is_end_of_any_rank()
        except Exception as error:
            # Another rank has ended, or the library was shut down: nothing is left to wait for.
            self.record.note(error)


def marks(steps: int) -> set[int]:
    """Return the steps after which the weights are summarized: MARKS, three quarters of ``steps``, and ``steps``."""
    return {*MARKS, 3 * steps // 4, steps}


def _defects() -> list[list[Any]]:
    """Return the defects of Horovod that dualtrain has reproduced in this process: [defect, file, line]."""
    compat = sys.modules.get("dualtrain.hvd.compat")
    return [list(each) for each in compat.reproduced()] if compat is not None else []


def summary(p: Any) -> list[Any]:
    """Return a tensor's hash, its norm, and its values at fixed positions."""
    import torch

    flat = _flat(p)
    data = flat.cpu().view(torch.uint8).numpy()
    count = min(SAMPLES, flat.numel())
    places = torch.arange(count, device=flat.device) * flat.numel() // max(count, 1)
    norm = math.hypot(*(float(part.double().norm()) for part in flat.split(PART))) if count else 0.0
    return [hashlib.sha256(memoryview(data)).hexdigest(), norm, flat[places].double().tolist()]


def checksums(params: list[Any]) -> list[int]:
    """Return, for each tensor, the sum of its elements' bits as integers. Changed bits change it, unless they cancel."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = [_flat(p) for p in params]
    sums = [values.view(integers[values.element_size()]).sum(dtype=torch.int64) for values in flat]
    return torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []


def _flat(p: Any) -> Any:
    import torch

    p = p.detach()
    return (torch.view_as_real(p) if p.is_complex() else p).contiguous().view(-1)


def _params(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, text or None, or a tuple of these, as Adam's betas are."""
    return all(
        isinstance(each, (bool, int, float, str, type(None))) for each in (value if isinstance(value, tuple) else [value])
    )


def _wait_for_gpu() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _version(library: Any) -> str:
    name = library.__name__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', '')}"


def _shut_down(library: Any, record: Record) -> None:
    try:
        library.shutdown()
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()  # without it, mpirun reports a failed job
    except Exception as error:
        record.note(error)


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook: patches a library as soon as the script has imported it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in LIBRARIES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, self._recorder)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, recorder: Recorder) -> None:
        self._loader, self._recorder = loader, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        library = sys.modules[module.__name__]  # a loader may have replaced this entry
        if hasattr(library, "DistributedOptimizer"):
            self._recorder.patch(library)


def _rank() -> int:
    found = [os.environ[name] for name in RANK_VARIABLES if os.environ.get(name, "").isdigit()]
    return int(found[0]) if found else 0


def _seed(seed: int) -> None:
    """Seed random, numpy (if installed) and torch with ``seed``, which differs between ranks."""
    random.seed(seed)
    try:
        import numpy

        numpy.random.seed(seed % 2**32)
    except ImportError:
        pass
    import torch

    torch.manual_seed(seed)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            found = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        found = []
    return found[0] if found else platform.machine()


def _hash_of(args: Any) -> str:
    """Return the hash of the script's file; an empty string for a module."""
    if args.module:
        return ""
    with open(args.script, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _parse(arguments: list[str]) -> Any:
    """Return the parser and the parsed arguments. Exit with status 2 if they are invalid."""
    usage = __doc__ and __doc__.split("\n\n")[1][7:]  # python -OO removes docstrings
    parser = argparse.ArgumentParser(prog="record.py", usage=usage, allow_abbrev=False)
    parser.add_argument("--record", required=True)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int)
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER).required = False  # as in newer Pythons
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps {args.steps} is below 1")
    if not args.module and not os.path.isfile(args.script):
        parser.error(f"there is no script {args.script!r}: check its path")
    return parser, args


def _run(args: Any) -> None:
    """Run the script as python would."""
    sys.argv[:] = [args.script, *args.arguments]
    if args.module:
        sys.path[0] = os.getcwd()
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(args.script))
        runpy.run_path(args.script, run_name="__main__")


def main(arguments: list[str]) -> None:
    """Run and record the script of the command line. Raise what it raises, also SystemExit.

    After the last step, exit with status 0 instead. Exit with status 2 if an argument is invalid.
    """
    parser, args = _parse(arguments)
    try:
        record = Record(args.record, _rank())
    except FileExistsError:
        parser.error(f"{args.record!r} contains the record of an earlier run: name a new folder")
    except OSError as error:
        parser.error(f"cannot write to {args.record!r} ({error.strerror}): name another folder")
    python = platform.python_version()
    facts: dict[str, Any] = {"steps": args.steps, "seed": args.seed, "python": python, "time": time.time()}
    facts.update(processor=_processor(), sha256=_hash_of(args))
    record.write("start", format=FORMAT, script=args.script, arguments=args.arguments, **facts)
    recorder = Recorder(record, args.steps)
    sys.meta_path.insert(0, _Finder(recorder))
    if args.seed is not None:
        _seed(args.seed + _rank())
    try:
        _run(args)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        recorder.end("exit", status, error="" if isinstance(end.code, int) else str(end.code or ""))
        raise
    except BaseException as error:
        what = "".join(traceback.format_exception_only(type(error), error)).strip()
        recorder.end("error", 1, error=what, traceback=traceback.format_exc())
        raise
    recorder.end("return", 0)


if __name__ == "__main__":
    main(sys.argv[1:])
