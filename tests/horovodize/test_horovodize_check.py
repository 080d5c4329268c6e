"""The checker of Horovod scripts: each rule with and without its finding, checks of several files, checks of folders."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from itertools import permutations

import pytest

from dualtrain.horovodize import folders
from dualtrain.horovodize.__main__ import main
from dualtrain.horovodize.check import check, findings
from dualtrain.horovodize.names import MODULE_NAMES, RUN_UNSUPPORTED
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.rules.discarded import discarded_result
from dualtrain.horovodize.script_file import parse_scripts
from dualtrain.horovodize.source import Source
from tests.pool import ROOT

TWO_MODELS = (
    "import torch\nmodel, mine = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
    "base = torch.optim.SGD(model.parameters(), 1)\noptimizer = hvd.DistributedOptimizer(base, model.named_parameters())\n"
    "(model(x) + mine(x)).backward()\n"
)
SCHEDULES = (
    "from torch.optim import lr_scheduler\ndef falls(epoch):\n    return 0.1 ** (epoch // 30)\n"
    "def rises(epoch):\n    if epoch < 5:\n        return (epoch + 1) / 5\n    return 1\n"
)
WRAP = "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
SECOND_PASS = f"{WRAP}def again():\n    optimizer.zero_grad()\n    model(x).backward()\nloss.backward()\n"
DICTS = (
    "parts = ['train', 'val']\n"
    "s = {x: torch.utils.data.DistributedSampler(d[x], 2, 0) for x in parts}  # HERE\n"
    "loaders = {x: torch.utils.data.DataLoader(d[x], sampler=s[x]) for x in parts}\n"
)
LOAD = "    return torch.utils.data.DataLoader(d, sampler=s)\nfor n in range(args.epochs):\n    for x in load(n): pass"
LIMIT = "def limit(p):\n    torch.nn.utils.clip_grad_norm_(p, 1)\n"
SAVES = "hvd.init()\ndef save(on):\n    if not on:\n        return\n    torch.save(model, 'x')\n"
#: (rule, script with one finding of the rule in the line marked HERE, script without a finding of the rule). A comment
#: names the subject of the scripts, or gives the reason for a finding or for none.
CASES = [
    ("discarded_result", "hvd.allreduce(x, name='x')  # HERE", "x = hvd.allreduce(x, name='x')\nhvd.allreduce_(x)"),
    (
        "discarded_result",  # an attribute that holds the module
        "self.hvd = hvd\nself.hvd.broadcast(x, 0)  # HERE",
        "self.hvd = hvd\nself.hvd.broadcast_(x, 0)\nself.lib = hvd\nself.lib = other\nself.lib.broadcast(x, 0)",
    ),
    *(
        (
            "discarded_result",  # a module that a function imports and returns
            "def get():\n    try:\n        import horovod.torch as lib\n    except ImportError:\n        return None\n"
            "    return lib\nh = get()\nh.allreduce(x)  # HERE",
            f"def get():\n    import horovod.torch as lib\n    {other}\nh = get()\nh.allreduce(x)",
        )
        for other in (
            "return Logged(lib)",
            "lib = Logged(lib)\n    return lib",
            "return lib if x else other",
            "if x:\n        import other as lib\n    return lib",
            "return lib\ndef get():\n    return other",
        )
    ),
    (
        "discarded_result",  # a module that import_module loads
        "import importlib\nself.h = None\nself.h = importlib.import_module('horovod.torch')\nself.h.allreduce(x)  # HERE",
        "import importlib\nself.h = importlib.import_module('horovod.tensorflow')\nself.h.allreduce(x)",
    ),
    (
        "discarded_result",
        "from importlib import import_module\nh = import_module('horovod.torch')\nh.allreduce(x)  # HERE",
        "from importlib import import_module\nh = import_module('other')\nh.allreduce(x)",
    ),
    (
        "discarded_result",
        "h: object = import_module('horovod.torch')\nh.allreduce(x)  # HERE",
        "if (h := import_module('other')) is not None:\n    h.allreduce(x)",
    ),
    (
        "discarded_result",
        "if (h := import_module('horovod.torch')) is not None:\n    h.allreduce(x)  # HERE",
        "h: object\nh = import_module('other')\nh.allreduce(x)",
    ),
    (
        "discarded_result",  # a local variable hvd with an unknown module hides the import in its function only
        "import importlib\ndef load(c):\n    hvd = importlib.import_module(c.name)\n    return hvd\n"
        "def main(hvd):\n    hvd.allreduce(x)  # HERE",
        "import importlib\ndef main(c):\n    hvd = importlib.import_module(c.name)\n    hvd.allreduce(x)",
    ),
    ("discarded_result", "hvd.mpi_ops.broadcast(x, 0)  # HERE", "hvd.allreduce(torch.tensor(0), name='barrier')"),
    ("discarded_result", "hvd.allreduce_async_(x)  # HERE", "hvd.synchronize(hvd.allreduce_async_(x))"),
    ("unknown_name", "hvd.callbacks.Something()  # HERE", "hvd.elastic.run\nhvd.__name__"),
    (
        "unknown_name",  # no finding if the script checks that the name exists
        "if hasattr(hvd, 'other'):\n    hvd.timeline.start()  # HERE",
        "if x and hasattr(hvd, 'timeline'):\n    hvd.timeline.start()\ny = hasattr(hvd, 'a') and hvd.a()\n"
        "try:\n    hvd.b()\nexcept AttributeError:\n    pass",
    ),
    (
        "unknown_name",
        "if not hasattr(hvd, 'timeline'):\n    hvd.timeline.start()  # HERE",
        "if not x or not hasattr(hvd, 'timeline'):\n    pass\nelse:\n    hvd.timeline.start()\n"
        "y = not hasattr(hvd, 'a') or hvd.a()\nz = hvd.b if hasattr(hvd, 'b') else 0",
    ),
    (
        "unknown_name",
        "try:\n    x = 1\nexcept AttributeError:\n    hvd.b()  # HERE",
        "try:\n    if x:\n        hvd.b()\nexcept AttributeError:\n    pass",
    ),
    ("join_with_other_operations", "hvd.allreduce_(x, op=hvd.Max)\nhvd.join()  # HERE", "hvd.join()"),
    ("adasum", "x = hvd.allreduce(x, op=hvd.Adasum)  # HERE", "x = hvd.allreduce(x, op=hvd.Sum)"),
    (
        "half_precision",
        "c = hvd.Compression.fp16  # HERE",
        "c = hvd.Compression.none\nhvd.DistributedOptimizer(optimizer, compression=hvd.Compression.fp16, op=hvd.Adasum)",
    ),
    ("mpi_communicator", "from mpi4py import MPI\nhvd.init(comm=MPI.COMM_WORLD)  # HERE", "hvd.init(comm=[0, 1])"),
    ("mpi_communicator", "from mpi4py import MPI\nc = MPI.COMM_WORLD.Dup()\nhvd.init(c)  # HERE", "hvd.init([0, 1])"),
    ("uncovered_imports", "import horovod.spark.torch  # HERE", "import horovod.torch.elastic"),
    ("uncovered_imports", "from horovod.spark import run_elastic  # HERE", "from horovod.spark import run"),
    ("uncovered_imports", "from horovod.ray import ElasticRayExecutor  # HERE", "from horovod.ray import RayExecutor"),
    ("uncovered_imports", "from horovod import tensorflow as hvd  # HERE", "from horovod import torch as hvd"),
    (
        "uncovered_imports",
        "from horovod.common.basics import HorovodBasics  # HERE",
        "from horovod import run, __version__\nfrom horovod.common import elastic\nfrom horovod.common.util import env",
    ),
    (
        "uncovered_imports",  # names that dualtrain's replacement for the module does not have
        "from horovod.common.util import split_list, check_extension  # HERE",
        "from horovod.torch.elastic import state, TorchState\nfrom horovod.torch import *\n"
        # The rule unknown_name reports the last import.
        "from horovod.torch import Sum as S\nfrom horovod.torch.mpi_ops import AllreduceType\nAllreduceType.Sum",
    ),
    (
        "uncovered_imports",  # a name of mpi_ops that the script does not use; no finding in a try statement
        "from horovod.torch.mpi_ops import AllreduceType as T, Sum  # HERE",
        "import horovod.torch.elastic.sampler\ntry:\n    from horovod.torch.mpi_ops import AllreduceType as T\n"
        "    import horovod.torch.other\nexcept ImportError:\n    T = None",
    ),
    ("uncovered_imports", "import horovod.torch.other  # HERE", "import horovod.torch.mpi_ops as ops"),
    (
        "subclass_of_wrapper",
        "from horovod.torch.optimizer import _DistributedOptimizer as Base\nclass Mine(Base):  # HERE\n    x = 1",
        "from horovod.torch.optimizer import _DistributedOptimizer\nclass Other(torch.optim.Optimizer):\n"
        "    x = isinstance(y, _DistributedOptimizer)\nclass _DistributedAdasumOptimizer: ...\n"
        "class Mine(_DistributedAdasumOptimizer): ...",
    ),
    (
        "private_attribute",
        "o = hvd.DistributedOptimizer(o)\no._handles.clear()  # HERE",
        "o = hvd.DistributedOptimizer(o)\no._synchronized = o._compression\nother._handles.clear()\n"
        "if hasattr(o, '_handles'): o._handles.clear()\n"
        "class Mine(torch.optim.Optimizer):\n    def synchronize(self): self._handles.clear()",
    ),
    (
        "private_attribute",  # a replaced method, which dualtrain does not call
        "self.optimizer = hvd.DistributedOptimizer(o)\nself.optimizer._allreduce_grad_async = mine  # HERE",
        "self.optimizer = mine.DistributedOptimizer(o)\nself.optimizer._allreduce_grad_async = mine",
    ),
    *(
        (
            "private_attribute",  # no finding before the optimizer is wrapped, or for another object of the same name
            f"o = {made}\no = hvd.DistributedOptimizer(o)\no._groups  # HERE",
            f"{code}o = hvd.DistributedOptimizer(o)",
        )
        for made, code in (
            ("Mine(p)", "o = Mine(p)\no._groups\n"),
            ("Holder()", "def f():\n    o = Holder()\n    o._groups\n"),
            ("Holder()", "def f():\n    with Holder() as o:\n        o._groups\n"),
        )
    ),
    (
        "private_attribute",  # no finding if an optimizer class of the script has the attribute
        "class Mine(torch.optim.SGD): ...\ndef f(o): o._groups  # HERE\nf(hvd.DistributedOptimizer(o))\n"
        "o = hvd.DistributedOptimizer(o)",
        "class Mine(torch.optim.SGD):\n    def __init__(self):\n        self._groups = []\ndef f(o): o._groups\n"
        "f(Mine(p))\no = hvd.DistributedOptimizer(o)",
    ),
    ("horovod_run", "import horovod\nhorovod.run(train, np=2)  # HERE", "import horovod\nhorovod.__version__"),
    ("horovod_run", "from horovod import run\nrun(train)  # HERE", "from horovod import run"),
    ("branch_on_build", "if hvd.nccl_built():  # HERE\n    pass", "print(hvd.nccl_built())"),
    ("branch_on_build", "a = 1 if x and hvd.mpi_enabled() else 2  # HERE", "a = 1 if hvd.size() > 1 else 2"),
    ("branch_on_build", "while not hvd.mpi_enabled(): pass  # HERE", "if hvd.rank() == 0:\n    print(hvd.nccl_built())"),
    (
        "threads_of_mpi",
        "print(hvd.mpi_threads_supported())  # HERE",
        "try:\n    hvd.mpi_threads_supported()\nexcept ValueError: pass",
    ),
    ("threads_of_mpi", "print(hvd.mpi_built(), hvd.mpi_threads_supported())  # HERE", "x = hvd.size()"),
    ("unknown_name", "hvd.other.calls = 1  # HERE", "hvd.other = f\nhvd.other.calls = 1"),
    (
        "unknown_name",  # a compressor's name differs from the name of its class
        "c = hvd.Compression.FP16Compressor if half else hvd.Compression.none  # HERE",
        "c = hvd.Compression.fp16.compress(x)\nhvd.compression.Compression.bf16\nclass Mine(hvd.Compression): ...",
    ),
    (
        "discarded_result",  # an augmented assignment reads the tensor
        "def mean(x):\n    y = x.clone()\n    hvd.allreduce(y, name='barrier')  # HERE\n    y /= 2\n    return y",
        "def wait(x):\n    y = x.clone()\n    hvd.allreduce(y, name='barrier')\n    y = 2\n    return y",
    ),
    (
        "variables",
        "import os\nos.environ['HOROVOD_CYCLE_TIME'] = '1'  # HERE",
        "import os\nos.environ['HOROVOD_TIMELINE'] = 'x'",
    ),
    (
        "variables",
        "import os\nos.environ.update(HOROVOD_AUTOTUNE='1')  # HERE",
        "import os\nos.environ.get('HOROVOD_AUTOTUNE')",
    ),
    (
        "variables_of_mpi",
        "import os\non = 'OMPI_COMM_WORLD_SIZE' in os.environ  # HERE\nrank = os.getenv('PMI_RANK')",
        "import os\nprint('OMPI_COMM_WORLD_SIZE')\nrank = os.environ['HOROVOD_RANK']",
    ),
    ("elastic_run", "@hvd.elastic.run  # HERE\ndef train(state): ...", "def train(state): ..."),
    (
        "padded_evaluation",
        "test_sampler = torch.utils.data.DistributedSampler(data)  # HERE",
        "train_sampler = torch.utils.data.DistributedSampler(train_data)\n"
        "latest_sampler = torch.utils.data.DistributedSampler(data)",
    ),
    (
        "padded_evaluation",
        "sampler = hvd.elastic.ElasticSampler(valset)  # HERE",
        "valset = torch.utils.data.Subset(valset, range(hvd.rank(), len(valset), hvd.size()))",
    ),
    (
        "padded_evaluation",
        "s = torch.utils.data.DistributedSampler(d)  # HERE\nloader = DataLoader(d, sampler=s)\n"
        "model.eval()\nfor batch in tqdm(loader): pass",
        "s = torch.utils.data.DistributedSampler(d)\nloader = DataLoader(d, sampler=s)\n"
        "model.eval()\nmodel.train()\nfor batch in tqdm(loader): pass",
    ),
    ("code_in_objects", "hvd.broadcast_object([lambda x: x])  # HERE", "hvd.broadcast_object({'a': [1, x]})"),
    (
        "code_in_objects",
        "class State: pass\ns = State()\nhvd.allgather_object(s)  # HERE",
        "class State: pass\ns = State()\nhvd.allgather_object(s.__dict__)",
    ),
    (
        "code_in_objects",
        "import torch\nclass A: pass\nclass B: pass\ntorch.serialization.add_safe_globals([A])\n"
        "hvd.broadcast_object(B())  # HERE",
        "import torch\nclass A: pass\nclass B: pass\nsent = [B]\ntorch.serialization.add_safe_globals([A])\n"
        "torch.serialization.add_safe_globals(sent)\nhvd.broadcast_object([A(), B()])",
    ),
    (
        "code_in_objects",  # classes that a loop, a function, a decorator or a context manager registers
        "import torch\nclass A: pass\nclass B: pass\nfor kind in (A,):\n"
        "    torch.serialization.add_safe_globals([kind])\nhvd.broadcast_object(B())  # HERE",
        "import torch\ndef register(kind):\n    torch.serialization.add_safe_globals([kind])\n    return kind\n"
        "class A: pass\nclass B: pass\n@register\nclass C: pass\nclass D: pass\nfor one in (A,):\n"
        "    torch.serialization.add_safe_globals([one])\nregister(B)\nwith torch.serialization.safe_globals([D]):\n"
        "    hvd.broadcast_object([A(), B(), C(), D()])",
    ),
    (
        "code_in_objects",  # classes that a decorator with arguments or an __init__ registers
        "import torch\nclass A: pass\nclass R:\n    def __init__(self, kind):\n"
        "        torch.serialization.add_safe_globals([kind])\nhvd.broadcast_object(A())  # HERE",
        "import torch\nclass A: pass\nclass R:\n    def __init__(self, kind):\n"
        "        torch.serialization.add_safe_globals([kind])\nR(A)\ndef register(name):\n    def inner(kind):\n"
        "        torch.serialization.add_safe_globals([kind])\n        return kind\n    return inner\n"
        "@register('c')\nclass C: pass\nhvd.broadcast_object([A(), C()])",
    ),
    (
        "code_in_objects",
        "def f(): pass\nhvd.broadcast_object(obj=f)  # HERE",
        "def f(): pass\nhvd.broadcast_object(obj=f())",
    ),
    (
        "collective_on_some_ranks",
        "if hvd.rank() == 0:\n    hvd.barrier()  # HERE",
        "if hvd.rank() == 0:\n    print()\nhvd.barrier()",
    ),
    (
        "collective_on_some_ranks",
        "def test():\n    return hvd.allreduce(x)\nfirst = hvd.rank() == 0\nif first and x:\n    test()  # HERE",
        "def test():\n    return hvd.allreduce(x)\nfirst = hvd.rank() == 0\nx = test()\nif first and x:\n    print(x)",
    ),
    (
        "collective_on_some_ranks",
        "def save():\n    if hvd.rank() != 0:\n        return\n    hvd.join()  # HERE",
        "def save():\n    if hvd.rank() != 0:\n        return\n    print()",
    ),
    (
        "collective_on_some_ranks",
        "rank = hvd.rank()\nif not rank:\n    pass\nelse:\n    x = hvd.broadcast_object(None)  # HERE",
        "rank = hvd.rank()\nif not rank:\n    x = hvd.broadcast_object(3)\nelse:\n    x = hvd.broadcast_object(None)",
    ),
    (
        "collective_on_some_ranks",
        "if hvd.rank() is 0:\n    hvd.barrier()  # HERE",
        "if hvd.rank() is not 0:\n    hvd.barrier()\nelse:\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # comparisons with the constant on the left
        "if 0 == hvd.rank():\n    hvd.barrier()  # HERE",
        "if 0 == hvd.rank():\n    hvd.barrier()\nelse:\n    hvd.barrier()\nif 1 < hvd.size():\n    hvd.barrier()",
    ),
    (
        "loop_left_on_some_ranks",  # no finding if rank 0 may leave the loop in its last iteration
        WRAP + "for i, x in enumerate(d):\n    optimizer.step()\n    if i % 100 == 0 and hvd.rank() == 0 and bad:\n"
        "        break  # HERE",
        WRAP + "for i, x in enumerate(d):\n    optimizer.step()\n    if i == n and hvd.rank() == 0:\n        break\n"
        "for i, x in enumerate(d):\n    optimizer.step()\n    if (i + 1) % n == 0 and hvd.rank() == 0:\n        break",
    ),
    (
        "loop_left_on_some_ranks",  # a break in the `else` of an inner loop leaves the outer loop
        WRAP + "for e in r:\n    optimizer.step()\n    for x in d:\n        show(x)\n    else:\n"
        "        if hvd.rank() == 0:\n            break  # HERE",
        WRAP + "for e in r:\n    for x in d:\n        optimizer.step()\n    else:\n"
        "        if hvd.rank() == 0:\n            show()",
    ),
    (
        "loop_left_on_some_ranks",  # no finding if the other ranks may leave the loop too, or call no collective in it
        WRAP + "for e in r:\n    optimizer.step()\n    if hvd.rank() == 0:\n        if bad > 3:\n            break  # HERE",
        WRAP + "for e in r:\n    optimizer.step()\n    if hvd.rank() == 0:\n        if bad > 3:\n            break\n"
        "    elif worse():\n        break\nfor e in r:\n    if hvd.rank() == 0:\n        optimizer.step()\n        break\n"
        "for e in r:\n    optimizer.step()\n    if bad > 3:\n        break",
    ),
    (
        "loop_by_value_of_some_ranks",  # no finding if the value is sent, or if a call may send it
        WRAP
        + "start = 0\nif hvd.rank() == 0:\n    start = load()\nfor e in range(start, 9):  # HERE\n    optimizer.step()",
        WRAP + "start = 0\nif hvd.rank() == 0:\n    start = load()\nstart = hvd.broadcast_object(start)\n"
        "for e in range(start, 9):\n    optimizer.step()\nend = 0\nif hvd.rank() == 0:\n    end = load()\nsend(end)\n"
        "for e in range(end):\n    optimizer.step()\nn = 0\nif hvd.rank() == 0:\n    n = 3\n    for e in range(n): show()\n"
        "m = 0\nif hvd.rank() == 0:\n    m = load()\n    show(m + 1)\nm = 0\nfor e in range(m):\n    optimizer.step()",
    ),
    (
        "loop_by_value_of_some_ranks",  # an attribute that a different method of the class sets
        WRAP + "class T:\n    def load(self):\n        if hvd.rank() == 0:\n            self.start = load()\n"
        "    def train(self):\n        for e in range(self.start, 9):  # HERE\n            optimizer.step()",
        WRAP + "class T:\n    def load(self):\n        if hvd.rank() == 0:\n            self.start = load()\n"
        "class U:\n    def train(self):\n        for e in range(self.start, 9):\n            optimizer.step()",
    ),
    (
        "loop_by_value_of_some_ranks",  # an attribute; no finding if the program may send the object that has it
        WRAP + "if args.resume and hvd.rank() == 0:\n    args.start = load().get('start')\n    print(args.start)\n"
        "for e in range(args.start, 9):  # HERE\n    optimizer.step()",
        WRAP
        + "if args.resume and hvd.rank() == 0:\n    args.start = load().get('start')\nargs = hvd.broadcast_object(args)\n"
        "for e in range(args.start, 9):\n    optimizer.step()",
    ),
    (
        "loop_by_value_of_some_ranks",  # no finding if all ranks may leave the loop
        WRAP + "for e in r:\n    stop = False\n    if hvd.rank() == 0:\n        stop = test() > 3\n    optimizer.step()\n"
        "    if stop:  # HERE\n        break",
        WRAP + "for e in r:\n    stop = False\n    if hvd.rank() == 0:\n        stop = test() > 3\n    optimizer.step()\n"
        "    if stop:\n        break\n    if e > 7:\n        break\nfor e in r:\n    late = test() > 3\n"
        "    optimizer.step()\n    if late:\n        break",
    ),
    (
        "rate_on_some_ranks",
        WRAP + "for e in r:\n    if hvd.rank() == 0:\n        for g in optimizer.param_groups:\n"
        "            g['lr'] *= 0.1  # HERE\n    loss.backward()\n    optimizer.step()",
        WRAP + "if hvd.rank() == 0:\n    for g in optimizer.param_groups:\n        g['lr'] *= 0.1\n"
        "hvd.broadcast_optimizer_state(optimizer, 0)\nloss.backward()",
    ),
    (
        "rate_on_some_ranks",  # a finding even if the training is in a function of another file
        WRAP + "for e in r:\n    train(e)\n    if hvd.rank() == 0:\n        optimizer.param_groups[0]['lr'] *= 0.1  # HERE",
        WRAP + "train()\nif hvd.rank() == 0:\n    optimizer.param_groups[0]['lr'] *= 0.1",
    ),
    (
        "rate_on_some_ranks",  # no finding if the loop ends after the change
        WRAP + "for e in r:\n    if hvd.rank() == 0:\n        for g in optimizer.param_groups:\n"
        "            g['lr'] *= 0.1  # HERE\n            break\n    loss.backward()\n    optimizer.step()",
        WRAP + "for e in r:\n    if e == last:\n        if hvd.rank() == 0:\n            for g in optimizer.param_groups:\n"
        "                g['lr'] *= 0.1\n        break\n    loss.backward()\n    optimizer.step()",
    ),
    ("rate_times_size", "torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE", "torch.optim.SGD(p, lr=0.1)"),
    ("rate_times_size", "torch.optim.SGD(p, 0.1 * hvd.size())  # HERE", "torch.optim.SGD(p, 0.1 / hvd.size())"),
    (
        "rate_times_size",
        "scale = batch * hvd.size() / 128\ns.base_lrs = [x * scale for x in s.base_lrs]  # HERE",
        "s.base_lrs = [x * 2 for x in s.base_lrs]",
    ),
    (
        "rate_times_size",
        "scale = 1 if x else 2 * hvd.size()\nargs.lr *= scale\ntorch.optim.Adam(p, lr=args.lr)  # HERE",
        "scale = 2 * hvd.size()\nsteps = len(loader) // scale\ntorch.optim.Adam(p, lr=args.lr)",
    ),
    (
        "rate_times_size",
        "def scale():\n    return hvd.size()\nfor group in o.param_groups:\n    group['lr'] = lr * scale()  # HERE",
        "for group in o.param_groups:\n    group['lr'] = lr * factor",
    ),
    (
        "clip_before_synchronize",
        WRAP + "loss.backward()\ntorch.nn.utils.clip_grad_norm_(p, 1)  # HERE\noptimizer.step()",
        WRAP + "loss.backward()\noptimizer.synchronize()\ntorch.nn.utils.clip_grad_norm_(p, 1)\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "clip_before_synchronize",
        WRAP + "def f(self):\n    clip_grad_value_(p, 1)  # HERE\n    scaler.step(self.optimizer)",
        "def f(self):\n    clip_grad_value_(p, 1)\n    self.optimizer.step()",
    ),
    (
        "scaler_before_synchronize",
        WRAP + "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)  # HERE\nscaler.step(optimizer)",
        WRAP + "scaler.scale(loss).backward()\noptimizer.synchronize()\nscaler.unscale_(optimizer)\n"
        "with optimizer.skip_synchronize():\n    scaler.step(optimizer)",
    ),
    (
        "scaler_before_synchronize",  # no finding in the else of ``if multi_gpu:``, which runs with one process
        WRAP + "loss.backward()\nif clips:\n    if multi_gpu:\n        optimizer.synchronize()\n    else:\n"
        "        scaler.unscale_(optimizer)\nelse:\n    scaler.step(optimizer)  # HERE",
        WRAP + "loss.backward()\nif multi_gpu:\n    optimizer.synchronize()\n    with optimizer.skip_synchronize():\n"
        "        scaler.step(optimizer)\nelse:\n    scaler.step(optimizer)",
    ),
    (
        "clip_before_synchronize",
        WRAP + "loss.backward()\nif amp:\n    optimizer.synchronize()\nelse:\n    clip_grad_norm_(p, 1)  # HERE\n"
        "optimizer.step()",
        WRAP + "loss.backward()\nif multi_gpu:\n    optimizer.synchronize()\nelse:\n    clip_grad_norm_(p, 1)\n"
        "optimizer.step()",
    ),
    (
        "scaler_before_synchronize",
        WRAP + "loss.backward()\nif amp:\n    optimizer.synchronize()\nelse:\n    scaler.step(optimizer)  # HERE",
        WRAP + "for o in [1]:\n    optimizer.synchronize()\n    other.step()\n    with optimizer.skip_synchronize():\n"
        "        scaler.step(optimizer)",
    ),
    (
        "second_reduction",  # synchronize() always runs, but only one of the two steps is in skip_synchronize()
        WRAP + "loss.backward()\noptimizer.synchronize()\nif norm > 9:\n    with optimizer.skip_synchronize():\n"
        "        optimizer.step()\nelse:\n    optimizer.step()  # HERE",
        WRAP + "norm = None\nloss.backward()\nif clip:\n    optimizer.synchronize()\n    norm = shrink(model)\n"
        "if norm is not None:\n    with optimizer.skip_synchronize():\n        optimizer.step()\n"
        "else:\n    optimizer.step()",
    ),
    (
        "second_reduction",
        WRAP + "loss.backward()\noptimizer.synchronize()\noptimizer.step()  # HERE",
        WRAP + "if clip:\n    optimizer.synchronize()\n    with optimizer.skip_synchronize():\n        optimizer.step()\n"
        "else:\n    optimizer.step()",
    ),
    (
        "zero_grad_before_step",
        WRAP + "loss.backward()\noptimizer.zero_grad()  # HERE\noptimizer.step()",
        WRAP + "loss.backward()\noptimizer.step()\noptimizer.zero_grad()\nlast.backward()\noptimizer.step()",
    ),
    (
        "set_to_none",
        WRAP + "optimizer.zero_grad(set_to_none=True)  # HERE",
        WRAP + "model.zero_grad(set_to_none=True)\n"
        "try:\n    optimizer.zero_grad(set_to_none=True)\nexcept TypeError:\n    optimizer.zero_grad()",
    ),
    (
        "group_after_wrapping",
        WRAP + "optimizer.add_param_group({'params': p})  # HERE",
        "optimizer.add_param_group({'params': p})\n" + WRAP,
    ),
    (
        "predivided_groups",
        "optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=args.factor, num_groups=args.groups)  # HERE",
        "optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=1.0, groups=8)",
    ),
    (
        "predivided_groups",
        "optimizer = hvd.DistributedOptimizer(sgd, groups=[[w]], gradient_predivide_factor=2.0)  # HERE",
        "optimizer = hvd.DistributedOptimizer(sgd, groups=None, num_groups=0, gradient_predivide_factor=2.0)",
    ),
    (
        "checkpoint_before_wrapping",
        "optimizer.load_state_dict(state)  # HERE\n" + WRAP,
        "model.load_state_dict(state)\n" + WRAP + "optimizer.load_state_dict(state)",
    ),
    (
        "checkpoint_before_wrapping",  # no finding if the script wraps the optimizer only in the other branch
        f"if x:\n    optimizer.load_state_dict(state)  # HERE\n{WRAP}",
        f"if x:\n    optimizer.load_state_dict(state)\nelse:\n    {WRAP}",
    ),
    (
        "checkpoint_before_wrapping",  # a function loads the state
        "def load(model, o):\n    model.load_state_dict(a)\n    o.load_state_dict(b)\n"
        f"load(model, o=optimizer)  # HERE\n{WRAP}",
        "def load(model, o):\n    model.load_state_dict(a)\n    if o:\n        o.load_state_dict(b)\n"
        f"load(model, other)\nload(model, None)\n{WRAP}load(model, optimizer)",
    ),
    (
        "checkpoint_before_wrapping",
        "a = torch.optim.SGD(w, lr=1, momentum=0.9)\na.load_state_dict(state)  # HERE\na = hvd.DistributedOptimizer(a)",
        "sgd = torch.optim.SGD(w, lr=1)\nsgd.load_state_dict(state)\nsgd = hvd.DistributedOptimizer(sgd)",
    ),
    (
        "uncovered_imports",
        "if torch:\n    import horovod.spark.torch  # HERE",
        "try:\n    import horovod.tensorflow as tf_hvd\nexcept ImportError:\n    tf_hvd = None\n"
        "if args.framework == 'tensorflow':\n    import horovod.tensorflow.keras",
    ),
    (
        "collective_on_some_ranks",
        "if hvd.rank() != 0:\n    hvd.barrier()\nif hvd.local_rank() == 0:\n    hvd.join()  # HERE\n"
        "if hvd.rank() == 0:\n    hvd.barrier()",
        "rank = hvd.rank()\nif rank > 0 and many:\n    hvd.barrier()\nload()\nif many and rank == 0:\n    hvd.barrier()\n"
        "if rank not in (-1, 0):\n    hvd.join()\nif not rank:\n    hvd.join()\n"
        "if not rank > -1 or rank != -1:\n    hvd.join()",
    ),
    (
        "rate_times_size",
        "args.lr *= args.passes * hvd.size()  # HERE\nmodel.fit(args)",
        "args.steps *= hvd.size()\nargs.lr *= 0.1\nlr_scale = 2 * hvd.size()",
    ),
    (
        "rate_times_size",
        "config.learning_rate = config.learning_rate * hvd.size()  # HERE",
        "warm = (1 + (hvd.size() - 1) * min(1, step / warmup)) / hvd.size()\n"
        "for group in o.param_groups:\n    group['lr'] = 0.1 * warm * schedule(step * hvd.size())",
    ),
    (
        "rate_times_size",
        "def scaled(lr, ranks):\n    return lr * ranks ** 0.5\nrate = scaled(0.1, hvd.size())\n"
        "groups = [{'params': p, 'lr': rate}]  # HERE",
        "def scaled(lr, steps):\n    return lr / steps\ngroups = [{'params': p, 'lr': scaled(0.1, hvd.size())}]",
    ),
    (
        "accumulation_without_passes",
        WRAP + "for i, x in enumerate(data):\n    model(x).backward()\n    if (i + 1) % 4 == 0:\n"
        "        optimizer.step()  # HERE",
        WRAP + "for i, x in enumerate(data):\n    model(x).backward()\n    optimizer.step()\n    if i % 10 == 0:\n"
        "        other.backward()\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",
        WRAP + "for batch in data:\n    for part in batch:\n        model(part).backward()\n    optimizer.step()  # HERE",
        WRAP.replace(")\n", ", backward_passes_per_step=4)\n")
        + "for batch in data:\n    for part in batch:\n        model(part).backward()\n    optimizer.step()",
    ),
    (
        "accumulation_without_passes",
        WRAP + "for x, y in data:\n    real = loss(model(x))\n    real.backward()\n    loss(model(y)).backward()\n"
        "    optimizer.step()  # HERE",
        WRAP + "for x, y in data:\n    loss(model(x)).backward()\n    loss(model(y)).backward()\n    optimizer.step()\n"
        "    other_optimizer.step()\nmodel(x).backward()\noptimizer.synchronize()\nmodel(y).backward()\noptimizer.step()",
    ),
    (
        "frozen_after_wrapping",
        WRAP + "for p in model.parameters():\n    p.requires_grad = False  # HERE",
        "for p in model.parameters():\n    p.requires_grad = False\n" + WRAP + "x.requires_grad = False",
    ),
    (
        "frozen_after_wrapping",
        "def freeze(module):\n    module.requires_grad_(False)  # HERE\n"
        + WRAP
        + "for epoch in range(9):\n    freeze(model.a)",
        "def freeze(module):\n    module.requires_grad_(False)\nfreeze(a)\n" + WRAP + "for p in d.parameters():\n"
        "    p.requires_grad = False\nfor p in d.parameters():\n    p.requires_grad = True",
    ),
    (
        "several_evaluations",
        "base = torch.optim.LBFGS(p, line_search_fn='strong_wolfe')  # HERE\nopt = hvd.DistributedOptimizer(base)",
        "base = torch.optim.LBFGS(p)\nopt = hvd.DistributedOptimizer(torch.optim.SGD(p, 1.0))",
    ),
    (
        "never_broadcast",
        WRAP.replace("\n", "  # HERE\n"),
        WRAP + "hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
    ),
    (
        "use_after_shutdown",
        "def main():\n    hvd.shutdown()\nmain()\nif hvd.rank() == 0:  # HERE\n    print()",
        "def main():\n    if hvd.size() == 1:\n        hvd.shutdown()\n        return\n    print(hvd.rank())\n"
        "hvd.rank()\nhvd.shutdown()\nhvd.init()\nhvd.rank()",
    ),
    (
        "torchmetrics",
        "import torchmetrics\naccuracy = torchmetrics.Accuracy()  # HERE\nhvd.allreduce(x)",
        "import torchmetrics\naccuracy = torchmetrics.Accuracy()\nall = hvd.allgather(accuracy.compute())",
    ),
    (
        "torchmetrics",
        "from torchmetrics.classification import BinaryF1Score as F1\nf = F1()  # HERE\nhvd.init()",
        "import torchmetrics\nf = torchmetrics.MeanMetric(dist_sync_fn=gather)\ng = torchmetrics.functional.accuracy(x, y)",
    ),
    (
        "ignite",
        "from ignite.metrics import Accuracy\nm = {'acc': Accuracy()}  # HERE\nhvd.init()",
        "from ignite.engine import Engine\nEngine(step)\nhvd.init()",
    ),
    (
        "launcher_readers",
        "from accelerate import Accelerator\na = Accelerator()  # HERE\nhvd.init()",
        "from transformers import AutoModel\nm = AutoModel.from_pretrained('x')\nhvd.init()",
    ),
    ("gpu_by_rank", "torch.cuda.set_device(hvd.rank())  # HERE", "torch.cuda.set_device(hvd.local_rank())"),
    (
        "gpu_by_rank",
        "rank = hvd.rank()\ndevice = torch.device(f'cuda:{rank}')  # HERE",
        "rank = hvd.rank()\ndevice = f'cuda:{rank % 8}'\nprint('rank:%d' % rank)\nx.to(device)",
    ),
    (
        "saved_by_all_ranks",
        "hvd.init()\ntorch.save(model.state_dict(), 'model.pt')  # HERE",
        "hvd.init()\ntorch.save(x, f'{hvd.rank()}.pt')\nif hvd.rank() == 0:\n    torch.save(x, 'x')\n"
        "buffer = io.BytesIO()\nimport io\ntorch.save(x, buffer)\n"
        "with distributed_checkpoint_dir(step=1) as folder:\n    torch.save(x, folder + '/x')",
    ),
    (
        "saved_by_all_ranks",
        "hvd.init()\ndef save():\n    torch.save(x, 'x')  # HERE\nsave()",
        "hvd.init()\ndef save():\n    torch.save(x, 'x')\nif hvd.rank() == 0:\n    save()\n"
        "def other():\n    if not is_master():\n        return\n    torch.save(x, 'y')\nother()",
    ),
    (
        "never_broadcast",  # a torch.Generator's seed and a comment about broadcast_parameters do not hide the finding
        "g = torch.Generator()\ng.manual_seed(1)\nhvd.broadcast_optimizer_state(o, 0)  # not broadcast_parameters\n"
        + WRAP.replace("\n", "  # HERE\n")
        + f"x = {' + '.join('a' * 500)}\n",
        "torch.manual_seed(1)\n" + WRAP,
    ),
    (
        "different_splits",
        "g = torch.Generator().manual_seed(1)\n" + WRAP + "a, b = torch.utils.data.random_split(data, [9, 1])  # HERE",
        "def seed_all():\n    th.manual_seed(1)\n" + WRAP + "a, b = torch.utils.data.random_split(data, [9, 1])",
    ),
    (
        "different_splits",
        WRAP + "a, b = torch.utils.data.random_split(data, [9, 1])  # HERE",
        WRAP + "torch.manual_seed(1)\na, b = torch.utils.data.random_split(data, [9, 1])",
    ),
    *(
        (
            "every_rank_reads_all",  # no finding if each rank takes its own batches
            WRAP + "d = torchvision.datasets.MNIST(x)\nl = torch.utils.data.DataLoader(d, shuffle=True)  # HERE\n"
            "for i, x in enumerate(l):\n    print('%d ranks' % hvd.size(), i % 3 == hvd.rank(), "
            "(hvd.rank() + 1) % hvd.size() == 0)",
            WRAP + f"d = torchvision.datasets.MNIST(x)\nl = torch.utils.data.DataLoader(d, shuffle=True)\n{loop}",
        )
        for loop in (
            "for i, x in enumerate(l):\n    if i % hvd.size() != hvd.rank():\n        continue\n    model(x)",
            "rank, size = hvd.rank(), hvd.size()\nfor i, x in enumerate(l):\n    if rank == i % size:\n        model(x)",
            "for i, x in enumerate(l):\n    if (i - hvd.rank()) % hvd.size(): continue\n    model(x)",
            "for i, x in enumerate(l):\n    if (hvd.rank() + i) % hvd.size() == 0: model(x)",
            "for x in itertools.islice(l, hvd.rank(), None, hvd.size()):\n    model(x)",
        )
    ),
    (
        "every_rank_reads_all",
        WRAP + "loader = torch.utils.data.DataLoader(data, shuffle=True)  # HERE",
        WRAP + "part = Subset(data, range(hvd.rank(), len(data), hvd.size()))\n"
        "loader = torch.utils.data.DataLoader(part, shuffle=True)\ntest = torch.utils.data.DataLoader(data)",
    ),
    (
        "every_rank_reads_all",
        WRAP + "lr = 1 / hvd.size() * warm_up\nloader = torch.utils.data.DataLoader(data, shuffle=True)  # HERE",
        WRAP + "epochs = 90 // hvd.size()\nloader = torch.utils.data.DataLoader(data, shuffle=True)",
    ),
    (
        "same_order_every_epoch",  # set_epoch() with a constant gives all epochs the same order, too
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nfor epoch in range(3):\n    s.set_epoch(0)\n"
        "    for x in torch.utils.data.DataLoader(d, sampler=s): pass",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\ns.set_epoch(0)\nfor epoch in range(3):\n    s.set_epoch(epoch)\n"
        "    for x in torch.utils.data.DataLoader(d, sampler=s): pass",
    ),
    (
        "same_order_every_epoch",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nfor epoch in range(3): pass",
        "s = torch.utils.data.DistributedSampler(d, 2, 0, shuffle=False)\nfor epoch in range(3): pass",
    ),
    (
        "same_order_every_epoch",  # a script that counts steps, and reads the loader again after its last batch
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nloader = torch.utils.data.DataLoader(d, sampler=s)\n"
        "batches = iter(loader)\nfor step in range(9):\n    try:\n        x = next(batches)\n    except StopIteration:\n"
        "        batches = iter(loader)\n        x = next(batches)",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nloader = torch.utils.data.DataLoader(d, sampler=s)\n"
        "batches = iter(loader)\nwhile True:\n    try:\n        x = next(batches)\n    except StopIteration:\n"
        "        break\n    for y in test_loader: pass",
    ),
    (
        "same_order_every_epoch",
        "def endless(loader):\n    while True:\n        for batch in loader:\n            yield batch\n"
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\n"
        "for x in endless(torch.utils.data.DataLoader(d, sampler=s)): pass",
        "while step < 9:\n    d = data(step)\n    s = torch.utils.data.DistributedSampler(d, 2, 0)\n"
        "    loader = torch.utils.data.DataLoader(d, sampler=s)\n    for x in loader:\n        step += 1",
    ),
    *(
        (
            "same_order_every_epoch",  # the end of the range, or the loop variable, shows that a loop is over epochs
            f"s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nfor {loop}:\n"
            "    for x in torch.utils.data.DataLoader(d, sampler=s): pass",
            f"s = torch.utils.data.DistributedSampler(d, 2, 0)\nfor {other}:\n"
            "    for x in torch.utils.data.DataLoader(d, sampler=s): pass",
        )
        for loop, other in (
            ("_ in range(args.epochs)", "_ in range(args.steps_per_epoch)"),
            ("i in tqdm(range(1, NUM_EPOCHS + 1))", "i in tqdm(range(1, args.epochs * steps))"),
            ("i, epoch in enumerate(range(start, 9))", "i, e in enumerate(tqdm(batches))"),
            ("[i, epoch] in enumerate(range(9))", "epoch in enumerate(range(9))"),
            ("_, e in enumerate(range(9), 1)", "i, e in enumerate(iterable=range(9))"),
            ("e in range(9)", "() in enumerate(range(0))"),
        )
    ),
    (
        "same_order_every_epoch",  # no finding if the loop over epochs does not train
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nl = torch.utils.data.DataLoader(d, sampler=s)\n"
        "for i in range(EPOCHS):\n    for x in l: pass",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nl = torch.utils.data.DataLoader(d, sampler=s)\n"
        "for x in l: pass\nfor i in range(EPOCHS):\n    print(losses[i])",
    ),
    (
        "sampler_by_local_rank",
        "s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=hvd.local_rank())  # HERE",
        "s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=hvd.rank())\n"
        "t = torch.utils.data.DistributedSampler(own, args.ranks_per_host, rank=hvd.local_rank())",
    ),
    (
        "sampler_by_local_rank",  # a finding if the rank is a constant; none for a sampler of test data
        f"{WRAP}s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=0)  # HERE",
        f"{WRAP}s = torch.utils.data.DistributedSampler(d, 2, rank=hvd.rank())\n"
        "if hvd.rank() == 0:\n    s = torch.utils.data.DistributedSampler(d, 1, 0)\n"
        "test_sampler = torch.utils.data.DistributedSampler(d, num_replicas=1, rank=0)",
    ),
    (
        "sampler_without_ranks",
        "s = torch.utils.data.DistributedSampler(d)  # HERE",
        "s = torch.utils.data.DistributedSampler(d, hvd.size(), hvd.rank())",
    ),
    (
        "same_random_numbers",
        "from torchvision import transforms\n" + WRAP + "torch.manual_seed(7)  # HERE\ntransforms.RandomCrop(32)",
        "from torchvision import transforms\n" + WRAP + "torch.manual_seed(7 + hvd.rank())\ntransforms.RandomCrop(32)\n"
        "def seed_all(seed):\n    torch.manual_seed(seed)",
    ),
    (
        "same_random_numbers",  # a function sets the seed; the script averages gradients without DistributedOptimizer
        "import random\ndef seed_all(seed):\n    random.seed(seed)  # HERE\nclass Data:\n    def __getitem__(self, i):\n"
        "        return random.random()\nseed_all(7)\nloss.backward()\nhvd.allreduce_(g)",
        "import random\ndef seed_all(seed):\n    random.seed(seed)\nclass Data:\n    def __getitem__(self, i):\n"
        "        return random.random()\nseed_all(7)\nseed_all(seed=7 + hvd.rank())\nloss.backward()\nhvd.allreduce_(g)",
    ),
    (
        "same_random_numbers",  # a static method sets the seed; its first parameter is not self
        "import random\nclass Data:\n    @staticmethod\n    def start(seed, device):\n        random.seed(seed)  # HERE\n"
        "    def __getitem__(self, i):\n        return random.random()\nData.start(7, 0)\nloss.backward()\n"
        "hvd.allreduce_(g)",
        "import random\nclass Data:\n    @staticmethod\n    def start(seed, device):\n        random.seed(seed)\n"
        "    def __getitem__(self, i):\n        return random.random()\nData.start(hvd.rank(), 0)\nloss.backward()\n"
        "hvd.allreduce_(g)",
    ),
    (
        "optimizer_state",
        "hvd.broadcast_optimizer_state(o, 0)  # HERE\nhvd.broadcast_optimizer_state(o, 0)",
        "o = torch.optim.Adagrad(p)\nhvd.broadcast_optimizer_state(o, 0)",  # Adagrad has a state before its first step
    ),
    (
        "optimizer_state",  # a finding only if a step with zero gradients has an effect, here because of weight decay
        "a = torch.optim.SGD(p, 0.1)\nb = torch.optim.SGD(p, 0.1, weight_decay=wd)\nb = hvd.DistributedOptimizer(b)\n"
        "hvd.broadcast_optimizer_state(a, 0)\nhvd.broadcast_optimizer_state(b, 0)  # HERE",
        "a = torch.optim.SGD(p, 0.1, momentum=0.9)\nb = hvd.DistributedOptimizer(a)\nc = torch.optim.Adam(p)\n"
        "hvd.broadcast_optimizer_state(b, 0)",
    ),
    (
        "optimizer_state",  # an elastic state broadcasts the optimizer's state in sync()
        "o = torch.optim.Adam(p)\no = hvd.DistributedOptimizer(o)\nstate = hvd.elastic.TorchState(m, o)  # HERE",
        "o = torch.optim.SGD(p, 0.1)\no = hvd.DistributedOptimizer(o)\nhvd.elastic.TorchState(optimizer=o)\n"
        "hvd.elastic.TorchState(m, sampler=s)",
    ),
    (
        "optimizer_state",  # a function gets the optimizer
        "def wrap(o):\n    hvd.broadcast_optimizer_state(o, 0)  # HERE\n    return hvd.DistributedOptimizer(o)\n"
        "adam = torch.optim.Adam(p, weight_decay=0.1)\nwrap(adam)",
        "def wrap(o):\n    hvd.broadcast_optimizer_state(o, 0)\n    return hvd.DistributedOptimizer(o)\n"
        "wrap(torch.optim.Adam(p))\nadam = torch.optim.Adam(p, weight_decay=0.1)",
    ),
    (
        "optimizer_state",  # the finding depends on the optimizers that calls pass to the function
        "from horovod.torch.elastic.state import TorchState\ndef fit(m, o):\n    o = hvd.DistributedOptimizer(o)\n"
        "    TorchState(m, o)  # HERE\nfit(m, torch.optim.Adam(p))",
        "def fit(m, o):\n    o = hvd.DistributedOptimizer(o)\n    hvd.elastic.TorchState(m, o)\n"
        "fit(m, torch.optim.SGD(p, 0.1))\nhvd.elastic.TorchState(m, None)",
    ),
    (
        "optimizer_state",  # a call that unpacks arguments may pass any optimizer
        "def fit(o):\n    hvd.broadcast_optimizer_state(o, 0)  # HERE\nfit(torch.optim.SGD(p, 0.1))\nfit(*given)",
        "def fit(o):\n    hvd.broadcast_optimizer_state(o, 0)\nfit(torch.optim.SGD(p, 0.1))\n"
        "given = torch.optim.SGD(p, 1)\nfit(given)",
    ),
    (
        "optimizer_state",
        "o[i] = hvd.DistributedOptimizer(o[i])\nhvd.broadcast_optimizer_state(o[i], 0)  # HERE",
        "self.o = torch.optim.Adagrad(p)\nself.o = hvd.DistributedOptimizer(self.o)\n"
        "hvd.broadcast_optimizer_state(self.o, root_rank=0)",
    ),
    (
        "discarded_result",
        "hvd.broadcast_object(scheduler, root_rank=0)  # HERE",
        "epoch = hvd.broadcast_object(epoch)\nhvd.broadcast_object(0)\nhvd.allreduce(x, name='barrier 1')",
    ),
    (
        "uncalled",
        "if hvd.rank == 0:  # HERE\n    load()",
        "if hvd.rank() == 0:\n    load()\nif hvd.rank is None:\n    load()\nranks = hvd.rank",
    ),
    (
        "unknown_argument",
        "o = hvd.DistributedOptimizer(o, model.named_parameters(), grace=g)  # HERE",
        "o = hvd.DistributedOptimizer(o, named_parameters=p, process_set=even, groups=2, **more)",
    ),
    (
        "unknown_argument",
        "x = hvd.allreduce(x, mean=True)  # HERE",
        "x = hvd.allreduce(x, average=True, op=None)\nhvd.join(device=0)\nstate = hvd.elastic.TorchState(model, epoch=0)\n"
        "try:\n    hvd.init(ranks=[0])\nexcept TypeError:\n    hvd.init(comm=[0])",
    ),
    (
        "world_of_mpi",
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nhvd.init()\nx = comm.allgather(1)  # HERE\ny = comm.bcast(2)",
        "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\nhvd.init()\nif args.mode == 'horovod':\n    x = hvd.rank()\n"
        "else:\n    x = comm.Get_rank()",
    ),
    (
        "elastic_ray",
        "from horovod.ray import RayExecutor\ne = RayExecutor(s, min_workers=args.least)  # HERE",
        "from horovod.ray import RayExecutor\ne = RayExecutor(s, num_workers=2, min_workers=None)",
    ),
    (
        "same_gpu",
        "hvd.init()\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n" + WRAP + "model.to(device)  # HERE",
        "hvd.init()\ndevice = get_device()\n" + WRAP + "model.cuda()",
    ),
    (
        "same_gpu",
        WRAP + "hvd.init()\nif args.cuda:\n    model.cuda()  # HERE\nx = x.to('cuda:0')",
        WRAP + "hvd.init()\nif args.cuda:\n    torch.cuda.set_device(hvd.local_rank())\n    model.cuda()",
    ),
    (
        "shard_by_local_rank",
        "part = files[hvd.local_rank()::hvd.size()]  # HERE",
        "part = files[hvd.rank()::hvd.size()]\nhost = files[hvd.local_rank()::hvd.local_size()]\n"
        "run(local_rank=hvd.local_rank(), size=hvd.size())",
    ),
    (
        "shard_by_local_rank",
        "mine = hvd.local_rank()\nreader = make_reader(url, cur_shard=mine, shard_count=hvd.size())  # HERE",
        "reader = make_reader(url, cur_shard=hvd.cross_rank(), shard_count=hvd.cross_size())\n"
        "part = range(hvd.local_rank(), n, hvd.size())",
    ),
    (
        "shuffled_shards",
        "import numpy as np\ndef part(files, rank):\n    np.random.shuffle(files)  # HERE\n    train = files[:9]\n"
        "    return train[rank * n:(rank + 1) * n]",
        "import numpy as np, random\nmine = files[hvd.rank()::2]\nnp.random.shuffle(mine)\nrandom.shuffle(x)\ny = x[:9]",
    ),
    (
        "shuffled_shards",
        "import random\nrandom.shuffle(files)  # HERE\nfiles = files[hvd.rank()::hvd.size()]",
        "import random\nrandom.seed(1)\nrandom.shuffle(files)\nfiles = files[hvd.rank()::hvd.size()]",
    ),
    (
        "averaged_twice",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)  # HERE\n" + WRAP,
        "from torch.nn.parallel import DistributedDataParallel as DDP\nif args.ddp:\n    model = DDP(model)\n" + WRAP,
    ),
    (
        "different_splits",
        "from sklearn.model_selection import train_test_split\n" + WRAP + "a, b = train_test_split(data)  # HERE",
        "from sklearn.model_selection import train_test_split\n" + WRAP + "a, b = train_test_split(data, random_state=1)\n"
        "a, b = train_test_split(data, shuffle=False)\nmine = data[hvd.rank()]\na, b = train_test_split(mine)",
    ),
    (
        "different_splits",
        "from torch.utils.data import random_split\n" + WRAP + "a, b = random_split(data, [9, 1])  # HERE",
        "import horovod\nfrom torch.utils.data import random_split\na, b = random_split(data, [9, 1])\n"
        "def run():\n    hvd.init()\n    " + WRAP + "horovod.run(run, np=2)",
    ),
    (
        "different_splits",  # no finding if the driver splits the data before it starts the ranks
        "from sparkdl import HorovodRunner\nfrom torch.utils.data import random_split\ndef run():\n    hvd.init()\n    "
        + WRAP
        + "    a, b = random_split(data, [9, 1])  # HERE",
        "from sparkdl import HorovodRunner\nfrom torch.utils.data import random_split\na, b = random_split(data, [9, 1])\n"
        "def run():\n    hvd.init()\n    " + WRAP,
    ),
    (
        "every_rank_reads_all",
        WRAP + "train_data = torch.utils.data.TensorDataset(x)\n"
        "train_loader = torch.utils.data.DataLoader(train_data, 32)  # HERE",
        WRAP + "train_data = Stream(x)\ntrain_loader = torch.utils.data.DataLoader(train_data, 32)\n"
        "val_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 32)",
    ),
    (
        "every_rank_reads_all",
        WRAP + "class Data:\n    def __getitem__(self, i):\n        return i\ntrain_set = Data()\n"
        "trainloader = torch.utils.data.DataLoader(train_set)  # HERE",
        WRAP + "class Data:\n    def __getitem__(self, i):\n        return self.x[i * hvd.size() + hvd.rank()]\n"
        "train_set = Data()\ntrainloader = torch.utils.data.DataLoader(train_set)",
    ),
    (
        "every_rank_reads_all",  # no finding for a loader that no loop reads
        WRAP + "loader = torch.utils.data.DataLoader(data, shuffle=True)  # HERE\n"
        "mine = torch.utils.data.DataLoader(data, sampler=s)\nfor batch in loader: pass",
        WRAP + "loader = torch.utils.data.DataLoader(data, shuffle=True)\n"
        "mine = torch.utils.data.DataLoader(data, sampler=s)\nfor batch in mine: pass",
    ),
    (
        "every_rank_reads_all",
        WRAP + "loader = torch.utils.data.DataLoader(data, 32, True)  # HERE",
        WRAP + "loader = torch.utils.data.DataLoader(data, 32, args.shuffle)",
    ),
    (
        "same_order_every_epoch",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\nepochs = 2\nfor epoch in range(epochs): pass",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nepochs = 1\nfor epoch in range(epochs): pass",
    ),
    (
        "same_random_numbers",
        "from torchvision import transforms\n" + WRAP + "torch.manual_seed(args.random_seed)  # HERE\n"
        "transforms.RandomCrop(32)",
        "import random, time\nfrom torchvision import transforms\n" + WRAP + "seed = random.randint(1, 9999)\n"
        "torch.manual_seed(seed)\ntorch.manual_seed(int(time.time()))\ntransforms.RandomCrop(32)",
    ),
    (
        "padded_evaluation",
        "from torch.utils.data.distributed import DistributedSampler as Samples\ntest = Samples(d, 2, 0)  # HERE",
        "from utility.sampler import DistributedSampler\nval_sampler = DistributedSampler(val_data, 2, 0)",
    ),
    (
        "code_in_objects",
        "def seed(): pass\nhvd.broadcast_object(seed)  # HERE",
        "class Loop:\n    def seed(self):\n        seed = 3\n        hvd.broadcast_object(seed)\n"
        "def lr(): pass\ndef send(lr):\n    hvd.broadcast_object(lr)",
    ),
    (
        "accumulation_without_passes",
        WRAP + "count = 0\nfor x in data:\n    model(x).backward()\n    count += 1\n    if count % 4 == 0:\n"
        "        optimizer.step()  # HERE",
        WRAP + "for x in data:\n    model(x).backward()\n    if hvd.rank() % 2 == 0:\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # the condition is a negated variable; no finding if N is 1
        WRAP + "n = 4\nfor i, x in enumerate(data):\n    more = (i + 1) % n != 0\n    model(x).backward()\n"
        "    if not more:\n        optimizer.step()  # HERE",
        WRAP + "n = 1\nfor i, x in enumerate(data):\n    more = (i + 1) % n != 0\n    model(x).backward()\n"
        "    if not more:\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if the condition contains a loss that is computed from i % N
        WRAP + "for i in range(9):\n    count = i % 4\n    model(data[i]).backward()\n"
        "    if not (training and count < 3):\n        optimizer.step()  # HERE",
        WRAP + "for i in range(9):\n    loss = mse_loss(model(data[i % 4]), 0)\n    loss.backward()\n"
        "    if isfinite(loss) and loss < 9:\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # continue; no finding if backward comes after it
        WRAP + "for i, x in enumerate(data):\n    model(x).backward()\n    if (i + 1) % 4 != 0:\n        continue\n"
        "    optimizer.step()  # HERE",
        WRAP + "for i, x in enumerate(data):\n    if (i + 1) % 4 != 0:\n        continue\n    model(x).backward()\n"
        "    optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # a continue before the one that decides; no finding if backward is in the else
        WRAP + "for i, x in enumerate(data):\n    if i % 9 == 0:\n        continue\n    model(x).backward()\n"
        "    if (i + 1) % 4:\n        continue\n    optimizer.step()  # HERE",
        WRAP + "for i, x in enumerate(data):\n    if i % 9 == 0:\n        continue\n    else:\n"
        "        model(x).backward()\n    optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if functions that the branch calls take a step, or call backward
        WRAP + "def both():\n    optimizer.step()\n    log()\nfor i, x in enumerate(data):\n    model(x).backward()\n"
        "    if i % 9:\n        continue\n    optimizer.step()  # HERE",
        WRAP + "def both():\n    one()\n    log()\ndef one():\n    optimizer.step()\n"
        "for i, x in enumerate(data):\n    model(x).backward()\n"
        "    if i % 9 == 0:\n        both()\n        continue\n    optimizer.step()\ndef loss():\n"
        "    optimizer.zero_grad()\n    model(x).backward()\nfor i in range(9):\n    critic(x).backward()\n"
        "    if i % 4 == 0:\n        loss()\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding for another function's variable, or if i % N is an argument of a call
        WRAP + "for i in range(9):\n    model(x).backward()\n    ok = (i + 1) % 4 == 0\n    if ok and on:\n"
        "        optimizer.step()  # HERE",
        WRAP + "def log(i):\n    ok = i % 9 == 0\nfor i in range(9):\n    model(x).backward()\n    ok = good(x)\n"
        "    if not ok or isnan(model(load(i % 4))):\n        continue\n    optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if i % N selects how a compared value is computed
        WRAP + "for i in range(9):\n    model(x).backward()\n    ok = True if i % 2 else False\n    if ok and on:\n"
        "        optimizer.step()  # HERE",
        WRAP + "for i in range(9):\n    loss = one(x) if i % 2 else two(x)\n    loss.backward()\n    if loss < 9:\n"
        "        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if backward has the same condition, or if optimizers take turns
        WRAP + "for i in range(9):\n    if on:\n        model(x).backward()\n    if i % 2 == 0:\n"
        "        optimizer.step()  # HERE",
        WRAP + "other = hvd.DistributedOptimizer(other)\nfor i in range(9):\n    if i % 2 == 0:\n"
        "        model(x).backward()\n    if i % 2 == 0:\n        optimizer.step()\n    on = i % 2 == 0\n    if on:\n"
        "        model(x).backward()\n    if not on:\n        continue\n    optimizer.step()\nfor i in range(9):\n"
        "    model(x).backward()\n    if i % 2 == 0:\n        optimizer.step()\n        continue\n    other.step()",
    ),
    (
        "accumulation_without_passes",  # i % N in two variables and bool(); no finding if i % N is an index of the data
        WRAP + "for i, x in enumerate(data):\n    last = bool((i + 1) % n == 0)\n    due = last or i == end\n"
        "    model(x).backward()\n    if due and training:\n        optimizer.step()  # HERE",
        WRAP + "for i in range(9):\n    model(data[i % n]).backward()\n    ok = isfinite(model(data[i % n]))\n"
        "    if ok:\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if the condition is the same in all iterations
        WRAP + "for i, x in enumerate(data):\n    last = i % 4 == 3\n    model(x).backward()\n"
        "    if last and training:\n        optimizer.step()  # HERE",
        WRAP + "last = n % 4 == 3\nfor i, x in enumerate(data):\n    model(x).backward()\n"
        "    if last and training:\n        optimizer.step()",
    ),
    *(
        (
            "accumulation_without_passes",  # a counter that is reset, and calls that compute i % N
            f"{WRAP}import math\nfor i, x in enumerate(data):\n    model(x).backward()\n    n += 1\n    {test}"
            "    optimizer.step()  # HERE\n" + "        n = 0\n",
            f"{WRAP}for x in data:\n    critic(x).backward()\n    n += 1\n    if n == 4:\n        model(x).backward()\n"
            "        optimizer.step()\n        n = 0\n",
        )
        for test in (
            "if n == 4:\n    ",
            "if n >= 4:\n    ",
            "if divmod(i, 4)[1] == 3:\n    ",
            "if math.fmod(i, 4) == 3:\n    ",
        )
    ),
    (
        "accumulation_without_passes",  # no finding if an exception handler takes the step
        f"{WRAP}for x in data:\n    model(x).backward()\n    n += 1\n    if n < 4:\n        continue\n"
        "    optimizer.step()  # HERE\n    n = 0",
        f"{WRAP}for i, x in enumerate(data):\n    try:\n        model(x).backward()\n    except OSError:\n"
        "        if i % 3:\n            continue\n        optimizer.step()\n    else:\n        optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if synchronize() also runs between the two backward passes
        f"{WRAP}for x in data:\n    model(x).backward()\n    model(x).backward()\n    optimizer.synchronize()\n"
        "    with optimizer.skip_synchronize():\n        optimizer.step()  # HERE",
        f"{WRAP}for x in data:\n    model(x).backward()\n    optimizer.synchronize()\n    model(x).backward()\n"
        "    optimizer.synchronize()\n    with optimizer.skip_synchronize():\n        optimizer.step()",
    ),
    *(
        (
            "accumulation_without_passes",  # no finding if each iteration steps, or has its own part of the work
            f"{WRAP}for x in data:\n    loss = f(x)\n    n += 1\n    loss.backward()\n    if n == 2:\n"
            "        optimizer.step()  # HERE\n        n = 0",
            f"{WRAP}for x in data:\n    loss = f(x)\n    n += 1\n{code}",
        )
        for code in (
            "    if n == 1:\n        loss.backward()\n    if n == 2:\n        optimizer.step()\n        n = 0",
            "    loss.backward()\n    if n == 2:\n        optimizer.step(); n = 0\n    else:\n        optimizer.step()",
            "    loss = mod(x, y)\n    loss.backward()\n    if loss is not None:\n        optimizer.step()",
        )
    ),
    (
        "accumulation_without_passes",  # no finding if a function synchronizes between the backward passes
        f"def f():\n    pass\n{WRAP}model(x).backward()\nf()\nmodel(x).backward()\noptimizer.synchronize()\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()  # HERE",
        f"def f():\n    optimizer.synchronize()\n{WRAP}model(x).backward()\nf()\nmodel(x).backward()\n"
        "optimizer.synchronize()\nwith optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if a loop synchronizes between the backward passes
        f"{WRAP}model(x).backward()\nmodel(x).backward()\noptimizer.synchronize()\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()  # HERE",
        f"{WRAP}model(x).backward()\nfor o in [optimizer]:\n    o.synchronize()\nmodel(x).backward()\n"
        "optimizer.synchronize()\nwith optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "lost_wrapper",  # a step by a GradScaler; no finding for another optimizer
        "o = torch.optim.SGD(p, 1)\nhvd.DistributedOptimizer(o)  # HERE\nscaler.step(o)",
        "o = torch.optim.SGD(p, 1)\nhvd.DistributedOptimizer(o)\nscaler.step(other)",
    ),
    (
        "lost_wrapper",  # in a with statement; no finding if it expects an exception
        "o = torch.optim.SGD(p, 1)\nwith timer():\n    hvd.DistributedOptimizer(o)  # HERE\n    o.step()",
        "o = torch.optim.SGD(p, 1)\nwith pytest.raises(ValueError):\n    hvd.DistributedOptimizer(o)\no.step()",
    ),
    (
        "lost_wrapper",  # no finding in a with statement of the script's own that expects an exception
        "o = torch.optim.SGD(p, 1)\nhvd.DistributedOptimizer(o)  # HERE\no.step()",
        "o = torch.optim.SGD(p, 1)\nwith assert_fails():\n    hvd.DistributedOptimizer(o)\no.step()",
    ),
    (
        "accumulation_without_passes",  # a function of the script calls backward
        WRAP + "def backward(loss):\n    loss.backward()\nfor x in data:\n    for part in x:\n        backward(part)\n"
        "    optimizer.step()  # HERE",
        WRAP + "def backward(loss):\n    loss.backward()\nfor x in data:\n    backward(x)\n    optimizer.step()",
    ),
    (
        "variables_of_mpi",
        "import os\ndef ranks():\n    return int(os.environ['OMPI_COMM_WORLD_SIZE'])  # HERE\nx = 'WORLD_SIZE'",
        "import os\ndef ranks():\n    return os.environ.get('WORLD_SIZE', os.environ['PMI_SIZE'])\n"
        "on = 'OMPI_COMM_WORLD_RANK' in os.environ or 'HOROVOD_RANK' in os.environ",
    ),
    (
        "collective_on_some_ranks",  # the conditions are in variables
        "server = hvd.rank() == 0\nworker = not server\nif worker:\n    hvd.broadcast_(x, 0)\n    hvd.join()  # HERE\n"
        "if server:\n    hvd.broadcast_(x, 0)",
        "first = True if hvd.rank() == 0 else False\nif first:\n    hvd.barrier()\nif not first:\n    hvd.barrier()\n"
        "def f():\n    if hvd.rank() == 0:\n        return 1\n    else:\n        return 2\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",
        "def get_rank():\n    return hvd.rank() if x else 0\ndef rank():\n    if off:\n        return 0\n"
        "    return hvd.rank()\nif rank() == 0:\n    hvd.barrier()  # HERE",
        "def rank():\n    return hvd.rank() + 1\nif rank() == 0:\n    hvd.barrier()",
    ),
    (
        "saved_by_all_ranks",
        "hvd.init()\nsave = args.logs and args.save\nif save:\n    torch.save(x, 'x')  # HERE",
        "hvd.init()\nargs.save = args.logs and is_master(args)\nif args.save:\n    torch.save(x, 'x')",
    ),
    (
        "rate_times_size",
        "scale = hvd.size() if not args.adasum else 1\ntorch.optim.SGD(p, lr=0.1 * scale)  # HERE\nop = hvd.Adasum",
        "scale = hvd.local_size() if hvd.nccl_built() else 1\ntorch.optim.SGD(p, lr=0.1 * scale)\nop = hvd.Adasum",
    ),
    (
        "never_broadcast",
        "def main(model, optimizer):\n    hvd.init()\n    " + WRAP.replace("\n", "  # HERE\n"),
        "class Loop(Base):\n    def wrap(self):\n        self." + WRAP.replace("=model", "=self.model"),
    ),
    (
        "group_after_wrapping",
        WRAP + "for group in groups:\n    optimizer.add_param_group(group)  # HERE",
        WRAP + "optimizer.param_groups = []\nfor group in groups:\n    optimizer.add_param_group(group)",
    ),
    (
        "runner_of_databricks",
        "from sparkdl import HorovodRunner  # HERE",
        "from dualtrain.spark import HorovodRunner",
    ),
    (
        "padded_evaluation",
        "from horovod.torch.elastic.sampler import ElasticSampler\nval_sampler = ElasticSampler(d)  # HERE",
        "from horovod.torch.elastic.sampler import ElasticSampler\ntrain_sampler = ElasticSampler(train_data)",
    ),
    (
        "rate_times_size",  # a variable of the same name in a different function does not count
        "rate = 0.1\ndef run():\n    rate = 0.1 * hvd.size()\n    def inner():\n        SGD(p, lr=rate)  # HERE\n"
        "torch.optim.SGD(p, lr=rate)",
        "def scaled():\n    lr = 0.1 * hvd.size()\n    return lr\ndef run(lr):\n    torch.optim.SGD(p, lr=lr)",
    ),
    (
        "rate_times_size",
        "rate = 0.1\ndef main():\n    global rate\n    rate = rate * hvd.size()\ndef run():\n"
        "    torch.optim.SGD(p, lr=rate)  # HERE",
        "def main(rate=0.1):\n    torch.optim.SGD(p, lr=rate)\nrate = hvd.size()",
    ),
    (
        "rate_times_size",
        "class Plugin:\n    @property\n    def world_size(self):\n        return hvd.size()\n    def start(self):\n"
        "        group['lr'] *= self.world_size  # HERE",
        "class Plugin:\n    @property\n    def world_size(self):\n        return 1\n    def start(self):\n"
        "        group['lr'] *= self.world_size",
    ),
    (
        "lost_wrapper",
        "hvd.DistributedOptimizer(sgd)  # HERE\nsgd.step()",
        "d = hvd.DistributedOptimizer(sgd)\nsgd.step()\nhvd.DistributedOptimizer(other)\n"
        "with raises(ValueError):\n    hvd.DistributedOptimizer(sgd)",
    ),
    (
        "inner_step",
        "sgd = torch.optim.SGD(p, 1.0)\nd = hvd.DistributedOptimizer(sgd)\nd.zero_grad()\nloss.backward()\n"
        "sgd.step()  # HERE",
        "sgd = torch.optim.SGD(p, 1.0)\nd = hvd.DistributedOptimizer(sgd)\nloss.backward()\nd.synchronize()\nsgd.step()",
    ),
    (
        "inner_step",
        "def train():\n    sgd = torch.optim.SGD(p, 1.0)\n    d = hvd.DistributedOptimizer(sgd)\n"
        "    hvd.broadcast_optimizer_state(d, 0)\n    sgd.step()  # HERE",
        "def train(sgd):\n    d = hvd.DistributedOptimizer(sgd)\n    sgd.step()\nfirst = torch.optim.SGD(p, 1.0)\n"
        "o = hvd.DistributedOptimizer(first)\nfirst = o\nfirst.step()",
    ),
    (
        "data_parallel",
        WRAP + "if torch.cuda.device_count() > 1:\n    model = torch.nn.DataParallel(model)  # HERE",
        WRAP + "if args.parallel:\n    model = torch.nn.DataParallel(model)\n"
        "model = torch.nn.DataParallel(model, device_ids=[hvd.local_rank()])\n"
        "def single(model):\n    return torch.nn.DataParallel(model)",
    ),
    (
        "data_parallel",
        WRAP + "model = torch.nn.DataParallel(model, device_ids=list(range(torch.cuda.device_count())))  # HERE",
        WRAP + "model = torch.nn.DataParallel(model, device_ids=list(range(args.gpus)))",
    ),
    (
        "averaged_twice",  # no finding if DDP and Horovod's optimizer are used in different cases of a match
        WRAP + "model = torch.nn.parallel.DistributedDataParallel(model)  # HERE",
        "match args.backend:\n    case 'horovod':\n        "
        + WRAP
        + "    case 'ddp':\n        model = torch.nn.parallel.DistributedDataParallel(model)",
    ),
    (
        "averaged_twice",  # no finding if DDP is used in a try statement
        WRAP + "model = torch.nn.parallel.DistributedDataParallel(model)  # HERE",
        WRAP + "try:\n    model = torch.nn.parallel.DistributedDataParallel(model)\nexcept* OSError:\n    pass",
    ),
    (
        "averaged_twice",  # no finding if DDP and Horovod's optimizer are used by different functions
        WRAP + "model = torch.nn.parallel.DistributedDataParallel(model)  # HERE",
        "def with_hvd():\n    "
        + WRAP
        + "def with_ddp(model):\n    return torch.nn.parallel.DistributedDataParallel(model)",
    ),
    (
        "events_of_all_ranks",
        "from torch.utils.tensorboard import SummaryWriter\nhvd.init()\n" + WRAP + "writer = SummaryWriter('x')  # HERE\n"
        "writer.add_scalar('loss', 1)",
        "from torch.utils.tensorboard import SummaryWriter\nhvd.init()\n" + WRAP + "writer = SummaryWriter('x')\n"
        "if hvd.rank() == 0:\n    writer.add_scalar('loss', 1)\nmine = SummaryWriter(f'x{hvd.rank()}')\n"
        "mine.add_scalar('loss', 1)",
    ),
    (
        "downloaded_by_all_ranks",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "data = datasets.MNIST('x', download=True)  # HERE",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "data = datasets.MNIST(f'{hvd.rank()}', download=True)\n"
        "with FileLock('y'):\n    data = datasets.MNIST('x', download=True)\nother = datasets.MNIST('x', download=False)",
    ),
    (
        "downloaded_by_all_ranks",  # a variable holds the class
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "kind = datasets.CIFAR10\n"
        "data = kind('x', download=True)  # HERE",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "kind = Own\nif hvd.rank() == 0:\n"
        "    kind = datasets.CIFAR10\ndata = kind('x', download=True)",
    ),
    (
        "downloaded_by_all_ranks",  # no finding if another function's variable of the same name holds the class
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "def load(kind):\n"
        "    return kind('x', download=True)  # HERE\nload(datasets.MNIST)",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "kind = datasets.MNIST\ndef load(kind):\n"
        "    return kind('x', download=True)\ndef make():\n    kind = Own\n    return kind('x', download=True)\n"
        "def each():\n    for kind in (Own,):\n        kind('x', download=True)\nload(Own)\nmake()\neach()\n"
        "a.kind = datasets.MNIST\ndef own(a):\n    a.kind = Own\n    a.kind('x', download=True)\nown(a)",
    ),
    (
        "downloaded_by_all_ranks",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "if args.data:\n"
        "    data = datasets.MNIST('x', download=True)  # HERE",
        "from torchvision import datasets\nhvd.init()\n" + WRAP + "if hvd.local_rank() == 0:\n"
        "    datasets.MNIST('x', download=True)\nhvd.barrier()\ndata = datasets.MNIST('x', download=True)",
    ),
    (
        "saved_by_all_ranks",
        "import json\nhvd.init()\nwith open('x.json', 'w') as file:  # HERE\n    json.dump(x, file)",
        "hvd.init()\nwith open(f'{hvd.rank()}.json', 'w') as file:\n    file.write(x)\nopen('x')\nopen('x', 'a')\n"
        "with open(f'{hvd.rank()}.pt', 'wb') as file:\n    torch.save(x, file)\n"
        "def predict():\n    open('y', 'w')",
    ),
    (
        "saved_by_all_ranks",
        "import numpy as np\ndef main():\n    hvd.init()\n    np.save('x.npy', x)  # HERE\nmain()",
        "import numpy as np\nnp.save('before.npy', x)\nhvd.init()\nnp.save(buffer, x)\nframe.to_csv(path)\n"
        "frame.to_csv('log.csv', mode='a')\n"
        "stamp = time.time()\nnp.save(f'x-{stamp}.npy', x)",
    ),
    (
        "saved_by_all_ranks",  # the path depends on the caller
        "hvd.init()\ndef save(path):\n    torch.save(x, path)  # HERE\nsave('x')",
        "hvd.init()\ndef save(path):\n    torch.save(x, path)\nsave(f'x{hvd.rank()}')\n"
        "class Saver:\n    def __init__(self, path):\n        self.path = path\n    def save(self):\n"
        "        torch.save(x, self.path)\ns = Saver(f'x{hvd.rank()}')\ns.save()",
    ),
    (
        "same_gpu",  # all ranks use GPU 0: cuda:0 is the same GPU before and after set_device
        WRAP + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\ndevice = torch.device('cuda:0')  # HERE\nx.to(device)",
        WRAP + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\ndevice = torch.device('cuda:0')\n"
        "device = torch.device('cuda', hvd.local_rank())\nif args.one:\n    model.to('cuda:0')",
    ),
    (
        "same_gpu",  # no finding if nothing reads the variable
        WRAP + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\na.device = torch.device('cuda:0')  # HERE\n"
        "x.to(b.device)",
        WRAP + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\ndevice = torch.device('cuda:0')\nmodel.cuda()",
    ),
    (
        "same_gpu",  # no finding if another value of the variable may be a different GPU
        WRAP + "hvd.init()\nn = hvd.local_rank()\nd = 'cuda:0' if cuda else 'cpu'\nd = torch.device(d)\nx.to(d)  # HERE",
        WRAP + "hvd.init()\nn = hvd.local_rank()\n"
        "d = 'cuda:0'\nif hvd.size() > 1:\n    d = 'cuda:%d' % n\nx.to(d)\n"
        "e = 'cuda:0'\nif hvd.size() > 1:\n    e = torch.device('cuda', n)\nx.to(e)\n"
        "f = 'cuda:0'\nif hvd.size() > 1:\n    f = n\nx.to(f)",
    ),
    (
        "same_gpu",  # None, and devices other than GPUs, do not count as a different GPU
        WRAP + "hvd.init()\nd = None\nd = torch.device('cuda:0' if cuda else 'mps')  # HERE\nx.to(d)",
        WRAP + "hvd.init()\nd = None\nd = torch.device('cuda:0' if cuda else 'cuda:1')\nx.to(d)",
    ),
    (
        "same_gpu",
        WRAP + "hvd.init()\nd = 'cuda:0'\nx.to(d)  # HERE",
        WRAP + "hvd.init()\nd = 'cuda:0'\nif hvd.size() > 1:\n    d = 'cuda:%d' % hvd.rank()\nx.to(d)",
    ),
    (
        "same_gpu",  # the device is an element of a dict
        WRAP
        + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\na['device'] = torch.device('cuda:0')  # HERE\nlib.fit(a)",
        WRAP + "hvd.init()\ntorch.cuda.set_device(hvd.local_rank())\na['device'] = torch.device('cuda')\nlib.fit(a)",
    ),
    (
        "gpu_by_rank",
        "rank = hvd.rank()\nmodel.to('cuda:%d' % rank)  # HERE",
        "rank = hvd.rank()\nprint('model on cuda:%d' % rank)\nlog.info(f'cuda:{rank}')\nname = f'out_gpu{rank}'",
    ),
    (
        "gpu_by_rank",  # no finding if main's variable rank is the local rank; the module's variable does not count
        "def main():\n    rank = hvd.rank()\n    torch.cuda.set_device(rank)  # HERE",
        "def main():\n    rank = hvd.local_rank()\n    torch.cuda.set_device(rank)\nrank = hvd.rank()",
    ),
    (
        "discarded_result",
        "[hvd.allreduce(p.grad) for p in m.parameters()]  # HERE",
        "x = torch.zeros(0)\nhvd.allreduce(x)\nhvd.allreduce(torch.ones(1).cuda())\ndef barrier(x):\n    hvd.allreduce(x)\n"
        "[hvd.allreduce_(p.grad) for p in m.parameters()]",
    ),
    (
        "discarded_result",  # the result is in a variable that is never read
        "def average(m):\n    for p in m.parameters():\n        grad = hvd.allreduce(p.grad)  # HERE",
        "def average(m):\n    for p in m.parameters():\n        grad = hvd.allreduce(p.grad)\n        p.grad = grad\n"
        "def bench(x):\n    y = hvd.allreduce(x)",
    ),
    (
        "discarded_result",  # a function returns the result, and its caller discards this value
        "def mean(x):\n    y = hvd.allreduce(x)\n    return y\nmean(p.grad)  # HERE",
        "def mean(x):\n    y = hvd.allreduce(x)\n    x.copy_(y)\n    return y\nmean(p.grad)\n"
        "def value(x):\n    return hvd.allreduce(x)\ny = value(p.grad)",
    ),
    (
        "uncalled",  # after import *, a name that the script binds again is not Horovod's
        "from horovod.torch import *\nif rank == 0:  # HERE\n    load()",
        "from horovod.torch import *\ndef main(rank, size):\n    if rank == 0 and size == 2:\n        load()\n"
        "def other():\n    local_rank = hvd.local_rank()\n    return local_rank == 0",
    ),
    (
        "unknown_name",
        "from horovod.torch import *\nhvd.other()  # HERE",
        "from horovod.torch import *\noptimizer = torch.optim.SGD(p, 1.0)\noptimizer.step()",
    ),
    (
        "rate_times_size",  # the module hvd is an argument of a function
        "def scale(hvd, group):\n    group['lr'] = group['lr'] * hvd.size()  # HERE",
        "def scale(hvd, group):\n    group['lr'] = group['lr'] / hvd.size()",
    ),
    (
        "unknown_name",  # a replacement for hvd after a failed import does not hide the finding
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    hvd = Nothing()\nhvd.other()  # HERE\n"
        "def build():\n    import horovod.keras as hvd\n    hvd.other()",
        "hvd = Wrapper()\nhvd.other()",
    ),
    (
        "variables",
        "import os\nos.environ['HOROVOD_GLOO_IFACE'] = 'lo'  # HERE",
        "import os\nos.environ['HOROVOD_RANK'] = '1'\nos.environ['HOROVOD_GLOO_RENDEZVOUS_ADDR'] = 'a'",
    ),
    (
        "world_of_mpi",
        "from mpi4py import MPI\nhvd.init()\nx = MPI.COMM_WORLD.allreduce(1)  # HERE",
        "from mpi4py import MPI\nhvd.init()\nMPI.COMM_WORLD.Abort()",
    ),
    (
        "padded_evaluation",  # no finding for a sampler that no loader uses
        "s = torch.utils.data.DistributedSampler(test_data)  # HERE\nloss.backward()\nDataLoader(test_data, sampler=s)\n"
        "test_loader = DataLoader(test_data, sampler=s)\nfor x in test_loader: pass",
        "test_sampler = torch.utils.data.DistributedSampler(d)\nloss.backward()\ntest_sampler.set_epoch(1)\n"
        "loader = DataLoader(d)\nfor x in loader: pass",
    ),
    (
        "padded_evaluation",  # no finding if eval() is called on a second model, which is not trained
        "s = torch.utils.data.DistributedSampler(d)  # HERE\nloader = DataLoader(d, sampler=s)\nmodel.eval()\n"
        "for x in loader: model(x)",
        "s = torch.utils.data.DistributedSampler(d)\nloader = DataLoader(d, sampler=s)\nclip.eval()\n"
        "for x in loader:\n    loss(x).backward()",
    ),
    (
        "same_order_every_epoch",  # no finding if no loop, or only a loop of another file, reads the loader
        "from train import other\ns = torch.utils.data.DistributedSampler(d, 2, 0)  # HERE\n"
        "loader = DataLoader(d, sampler=s)\nfor epoch in range(3):\n    for x in loader: loss(x).backward()",
        "from train import run\ns = torch.utils.data.DistributedSampler(d, 2, 0)\nloader = DataLoader(d, sampler=s)\n"
        "t = torch.utils.data.DistributedSampler(d, 2, 0)\nunread = DataLoader(d, sampler=t)\nn = len(unread.dataset)\n"
        "for epoch in range(3):\n    run(loader)\n    loss.backward()",
    ),
    (
        "sampler_without_ranks",
        "s = torch.utils.data.DistributedSampler(d) if many else None  # HERE",
        "if args.hvd:\n    s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=hvd.rank())\nelse:\n"
        "    s = torch.utils.data.DistributedSampler(d)",
    ),
    (
        "every_rank_reads_all",
        WRAP + "def load(d):\n    data = torch.utils.data.TensorDataset(x)\n"
        "    return torch.utils.data.DataLoader(data, shuffle=True)  # HERE\nload(d)",
        WRAP + "if many:\n    loader = torch.utils.data.DataLoader(data, sampler=s)\nelse:\n"
        "    loader = torch.utils.data.DataLoader(data, shuffle=True)\nfor x in loader: pass\nif hvd.rank() == 0:\n"
        "    shown = torch.utils.data.DataLoader(data, shuffle=True)",
    ),
    (
        "collective_on_some_ranks",  # no finding if the function makes the call only sometimes
        "def mean(x):\n    return hvd.allreduce(x)\nif hvd.rank() == 0:\n    mean(x)  # HERE",
        "def mean(x, all=False):\n    if all:\n        x = hvd.allreduce(x)\n    return x\nclass Loop:\n"
        "    def test(self):\n        hvd.barrier()\nif hvd.rank() == 0:\n    mean(x)\n    test(x)\n    hvd.shutdown()",
    ),
    (
        "collective_on_some_ranks",  # no finding: the other ranks take part in rank 0's call while they wait in join()
        "if hvd.rank() == 0:\n    hvd.allreduce_(x)  # HERE",
        "if hvd.rank() == 0:\n    hvd.allreduce_(x)\nhvd.join()",
    ),
    (
        "discarded_result",  # no finding if the script expects the call to raise an error
        "try:\n    a()\n    b()\n    hvd.allreduce(x)  # HERE\nexcept OSError:\n    pass",
        "try:\n    hvd.allreduce(x)\nexcept ValueError:\n    pass\nwith pytest.raises(ValueError):\n    hvd.allreduce(x)",
    ),
    (
        "collective_on_some_ranks",  # no finding if a second function makes the other ranks' call
        "def send(x):\n    if hvd.rank() == 0:\n        hvd.broadcast_(x, 0)  # HERE",
        "def send(x):\n    if hvd.rank() == 0:\n        hvd.broadcast_(x, 0)\n"
        "def receive(x):\n    if hvd.rank() != 0:\n        hvd.broadcast_(x, 0)",
    ),
    (
        "rate_times_size",
        "scaled_lr = args.lr * hvd.size()  # HERE\nbuild(scaled_lr)",
        "lr_scale = hvd.size()\nsteps = args.lr_steps * hvd.size()\nscaled_lr = args.lr\nbuild(scaled_lr)",
    ),
    (
        "clip_before_synchronize",  # no finding if x may be no parameter, if gradients are zeroed, or after step()
        WRAP + "loss.backward()\nfor p in model.parameters():\n    p.grad.data.clamp_(-1, 1)  # HERE\noptimizer.step()",
        WRAP + "loss.backward()\nx.grad.data.clamp_(-1, 1)\nfor p in model.parameters():\n    p.grad.zero_()\n"
        "optimizer.step()\nfor p in model.parameters():\n    p.grad *= 2",
    ),
    (
        "clip_before_synchronize",  # no finding if the function that changes gradients also averages them
        WRAP + "def scale(params):\n    for p in params:\n        p.grad = p.grad / 2\nloss.backward()\n"
        "scale(params)  # HERE\noptimizer.step()",
        WRAP + "def scale(params):\n    for p in params:\n        p.grad = hvd.allreduce(p.grad) / 2\nloss.backward()\n"
        "scale(params)\noptimizer.step()",
    ),
    (
        "clip_before_synchronize",  # no finding if the value, or the argument of the method, may contain an average
        WRAP + "loss.backward()\nmodel.weight.grad += x  # HERE\noptimizer.step()",
        WRAP + "loss.backward()\nmodel.weight.grad += (\n    hvd.allreduce(model.weight.grad) - model.weight.grad\n)\n"
        "model.bias.grad.sub_(\n    model.bias.grad - hvd.allreduce(model.bias.grad)\n)\noptimizer.step()",
    ),
    (
        "clip_before_synchronize",
        WRAP + "loss.backward()\nmodel.weight.grad[:2] /= 2  # HERE\noptimizer.step()",
        WRAP + "loss.backward()\noptimizer.synchronize()\nmodel.weight.grad[:2] /= 2\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "clip_before_synchronize",  # no finding for an optimizer that the function itself makes
        WRAP + "def train(optimizer):\n    loss.backward()\n    clip_grad_norm_(p, 1)  # HERE\n    optimizer.step()",
        WRAP + "def alone():\n    optimizer = torch.optim.SGD(p, 1.0)\n    loss.backward()\n    clip_grad_norm_(p, 1)\n"
        "    optimizer.step()",
    ),
    (
        "scaler_before_synchronize",
        WRAP + "s = torch.cuda.amp.GradScaler()\nloss.backward()\ns.step(optimizer)  # HERE",
        WRAP + "loss.backward()\npreconditioner.step(optimizer)",
    ),
    (
        "second_reduction",  # old versions of Horovod had the argument synchronize
        WRAP + "loss.backward()\noptimizer.synchronize()\noptimizer.step()  # HERE",
        WRAP + "loss.backward()\noptimizer.synchronize()\noptimizer.step(synchronize=False)",
    ),
    (
        "same_random_numbers",
        "from torchvision import transforms\n" + WRAP + "torch.manual_seed(7)  # HERE\ntransforms.RandomCrop(32)",
        "from torchvision import transforms\n" + WRAP + "torch.manual_seed(7)\nmodel = Net()\n"
        "torch.manual_seed(7 + hvd.rank())\ntransforms.RandomCrop(32)",
    ),
    (
        "never_broadcast",
        "torch.backends.cudnn.deterministic = True\n" + WRAP.replace("\n", "  # HERE\n"),
        "set_random_seeds(1)\n" + WRAP,
    ),
    (
        "different_splits",
        WRAP + "a, b = torch.utils.data.random_split(data, [9, 1])  # HERE",
        WRAP + "if hvd.rank() == 0:\n    a, b = torch.utils.data.random_split(data, [9, 1])\n"
        "mine = shard(data, hvd.rank())\nc, d = torch.utils.data.random_split(mine, [9, 1])",
    ),
    (
        "use_before_init",
        "def main():\n    if hvd.rank() == 0:  # HERE\n        print(hvd.size())\n    hvd.init()",
        "def helper():\n    return hvd.rank()\ndef main():\n    show = lambda: hvd.rank()\n    if hvd.is_initialized():\n"
        "        print(hvd.rank())\n    x = many and hvd.rank()\n    hvd.init()\n    print(hvd.rank())",
    ),
    (
        "use_before_init",
        "size = hvd.size()  # HERE\nhvd.init()",
        "if many:\n    print(hvd.rank())\n    hvd.init()",
    ),
    (
        "discarded_result",  # a finding if the new tensor is read; none if the call is only a barrier
        "def mean(value):\n    t = torch.tensor(value)\n    hvd.allreduce(t)  # HERE\n    return t.item()",
        "def sync(value):\n    t = torch.tensor(value)\n    hvd.allreduce(t)\n    u = torch.tensor(1)\n"
        "    hvd.allreduce(u)\n    print(u, t.numel())\n    v = torch.tensor([0])\n    hvd.allreduce(v)\n    print(v)\n"
        "def twice(value):\n    w = torch.tensor(value)\n    hvd.allreduce(w)\n    w = torch.tensor(value)\n    print(w)",
    ),
    (
        "same_order_every_epoch",  # the sampler is made in the arguments of the loader
        "loader = DataLoader(d, sampler=torch.utils.data.DistributedSampler(d, 2, 0))  # HERE\nfor epoch in range(3):\n"
        "    for x in loader: loss(x).backward()",
        "from train import run\nloader = DataLoader(d, sampler=torch.utils.data.DistributedSampler(d, 2, 0))\n"
        "val_loader = DataLoader(d, sampler=torch.utils.data.DistributedSampler(d, 3, 0))\n"
        "other = DataLoader(d, sampler=torch.utils.data.DistributedSampler(d, 4, 0))\n"
        "for epoch in range(3):\n    run(loader)\n    model.eval()\n    for x in val_loader: model(x)\n"
        "    for x in other: model(x)",
    ),
    (
        "unknown_name",  # names of a submodule
        "import horovod.torch.compression as c\nc.FP8Compressor  # HERE",
        "import horovod.torch.compression as c\nclass Mine(c.Compressor): ...\nhvd.compression.NoneCompressor\n"
        "from horovod.torch.optimizer import _DistributedOptimizer as O, Average\n"
        "hvd.mpi_ops._basics.rank()\nO(model, op=Average)",
    ),
    (
        "optimizer_state",
        "o = torch.optim.Muon(p, lr=0.1)\nhvd.broadcast_optimizer_state(o, 0)  # HERE\no = hvd.DistributedOptimizer(o)",
        "o = torch.optim.Muon(p, weight_decay=0)\nhvd.broadcast_optimizer_state(o, 0)\no = hvd.DistributedOptimizer(o)\n",
    ),
    (
        "optimizer_state",  # before wrapping, only weight decay matters: the wrapper discards the state
        "o = torch.optim.AdamW(p, lr=0.1)\nhvd.broadcast_optimizer_state(o, 0)  # HERE\no = hvd.DistributedOptimizer(o)",
        "o = torch.optim.Adam(p, lr=0.1)\nhvd.broadcast_optimizer_state(o, 0)\no = hvd.DistributedOptimizer(o)\n"
        "def other():\n    o = load()",
    ),
    (
        "optimizer_state",  # after wrapping, Adam's count of steps matters too
        "o = torch.optim.Adam(p)\no = hvd.DistributedOptimizer(o)\nhvd.broadcast_optimizer_state(o, 0)  # HERE",
        "o = torch.optim.SparseAdam(p)\nhvd.broadcast_optimizer_state(o, 0)\nf(hvd.DistributedOptimizer(optimizer=o))",
    ),
    (
        "optimizer_state",
        "o = torch.optim.Adam(p, weight_decay=x)\nhvd.broadcast_optimizer_state(o, 0)  # HERE\n"
        "o = hvd.DistributedOptimizer(o)",
        "o = torch.optim.RMSprop(p, weight_decay=0)\nhvd.broadcast_optimizer_state(o, 0)\no = hvd.DistributedOptimizer(o)\n"
        "from transformers import AdamW\nx = AdamW(p)\nhvd.broadcast_optimizer_state(x, 0)\n"
        "x = hvd.DistributedOptimizer(x)",
    ),
    (
        "torchmetrics",
        "import torchmetrics\nm = torchmetrics.MeanMetric()  # HERE\nx = m.compute()\nhvd.init()",
        "import torchmetrics\nm = torchmetrics.MeanMetric()\ndef average(y):\n    return hvd.allreduce(y)\n"
        "x = average(m.compute())",
    ),
    (
        "lost_by_function",  # no finding if the caller assigns the wrapped optimizer
        "def wrap(opt, net):\n    opt = hvd.DistributedOptimizer(opt)\n    return opt\n"
        "optimizer = torch.optim.SGD(p)\nwrap(optimizer, net)  # HERE\noptimizer.step()",
        "def wrap(opt, net):\n    return hvd.DistributedOptimizer(opt)\n"
        "optimizer = torch.optim.SGD(p)\noptimizer = wrap(optimizer, net)\noptimizer.step()",
    ),
    (
        "not_returned",
        "def wrap(o, net):\n    if HAVE_HVD:\n        o = hvd.DistributedOptimizer(o)  # HERE\n"
        "        hvd.broadcast_optimizer_state(o, 0)\n    else:\n        return o",
        "def wrap(o, net):\n    if HAVE_HVD:\n        o = hvd.DistributedOptimizer(o)\n    return o\n"
        "def other(o):\n    if HAVE_HVD:\n        o = hvd.DistributedOptimizer(o)\n        net.o = o\n    else:\n"
        "        return o\ndef third(o):\n    o = hvd.DistributedOptimizer(o)",
    ),
    (
        "lost_by_function",  # the function's variable has the same name as the caller's, and the call has several lines
        "def wrap(optimizer, net):\n    optimizer = hvd.DistributedOptimizer(\n        optimizer, net.named_parameters()\n"
        "    )\n    return optimizer\n"
        "optimizer = torch.optim.SGD(p)\nwrap(optimizer, net)  # HERE\noptimizer.step()",
        "def wrap(optimizer, net):\n    global o\n    o = hvd.DistributedOptimizer(\n        optimizer\n    )\n"
        "optimizer = torch.optim.SGD(p)\nwrap(optimizer, net)\no.step()",
    ),
    (
        "lost_by_function",  # no finding if the function stores the wrapped optimizer
        "def start(net, opt):\n    opt = hvd.DistributedOptimizer(opt)\n    hvd.broadcast_optimizer_state(opt, 0)\n"
        "optimizer = torch.optim.SGD(p)\nstart(net, opt=optimizer)  # HERE\noptimizer.step()",
        "def start(net, opt):\n    opt = hvd.DistributedOptimizer(opt)\n    net.optimizer = opt\n"
        "optimizer = torch.optim.SGD(p)\nstart(net, opt=optimizer)\noptimizer.step()",
    ),
    (
        "collective_on_some_ranks",  # commit() of an elastic state is a collective
        "@hvd.elastic.run\ndef train(state):\n    if hvd.rank() == 0:\n        state.commit()  # HERE",
        "@hvd.elastic.run\ndef train(state):\n    if hvd.rank() == 0:\n        state.save()\n        database.commit()\n"
        "    state.commit()",
    ),
    (
        "collective_on_some_ranks",
        "state = hvd.elastic.TorchState(model)\ndef end():\n    if hvd.rank() == 0:\n        state.commit()  # HERE",
        "state = Counter()\ndef end():\n    if hvd.rank() == 0:\n        state.commit()",
    ),
    (
        "sampler_with_shuffle",
        "s = None\nif many:\n    s = torch.utils.data.DistributedSampler(d, 2, 0)\n"
        "torch.utils.data.DataLoader(d, sampler=s, shuffle=True)  # HERE",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\ntorch.utils.data.DataLoader(d, sampler=s, shuffle=s is None)\n"
        "torch.utils.data.DataLoader(d, sampler=None, shuffle=True)",
    ),
    (
        "discarded_result",  # a finding if the copy is returned, even if the call is named 'barrier'
        "def mean(x):\n    y = x.clone()\n    hvd.allreduce(y, name='barrier')  # HERE\n    return y",
        "def wait(x):\n    y = x.clone()\n    hvd.allreduce(y, name='barrier')\n    return x",
    ),
    (
        "discarded_result",
        "def mean(x):\n    y = torch.tensor(x, dtype=torch.float32).to(device)\n    hvd.allreduce(y)  # HERE\n    return y",
        "def mean():\n    y = torch.zeros(3).to(device)\n    hvd.allreduce(y)\n    return y",
    ),
    (
        "unknown_name",  # the finding is in the line of the import, which fails
        "from horovod.torch.mpi_ops import AllreduceType  # HERE\nx(AllreduceType.Adasum)",
        "from horovod.torch import mpi_ops\nmpi_ops.allreduce(x)",
    ),
    (
        "use_before_init",  # init() is in a main guard
        "hvd.size()  # HERE\nif __name__ == '__main__':\n    hvd.init()",
        "def f():\n    hvd.size()\nif __name__ == '__main__':\n    hvd.init()\n    f()",
    ),
    (
        "optimizer_state",  # a later value of the variable does not count
        "o = torch.optim.SGD(p, 1, weight_decay=1)\nhvd.broadcast_optimizer_state(o, 0)  # HERE\no = other(o)",
        "o = torch.optim.SGD(p, 1)\nhvd.broadcast_optimizer_state(o, 0)\no = other(o)",
    ),
    (
        "padded_evaluation",  # no finding if the loader drops the last batch, which has the repeated samples
        "test_sampler = torch.utils.data.DistributedSampler(test_data, 2, 0)  # HERE\n"
        "test_loader = torch.utils.data.DataLoader(test_data, sampler=test_sampler)\nfor x in test_loader: pass",
        "test_sampler = torch.utils.data.DistributedSampler(test_data, 2, 0)\n"
        "test_loader = torch.utils.data.DataLoader(test_data, sampler=test_sampler, drop_last=True)\n"
        "for x in test_loader: hvd.allreduce_(x)",
    ),
    (
        "adasum_skipping",
        "op = hvd.Adasum if args.adasum else hvd.Average\noptimizer = hvd.DistributedOptimizer(optimizer, op=op)\n"
        "with optimizer.skip_synchronize():  # HERE\n    optimizer.step()",
        f"{WRAP}with optimizer.skip_synchronize():\n    optimizer.step()\n"
        "other = hvd.DistributedOptimizer(other, op=hvd.Adasum)\nif not use_adasum:\n"
        "    with other.skip_synchronize():\n        other.step()",
    ),
    (
        "schedule_on_some_ranks",  # a function of the script makes the schedule
        "def make(o):\n    s = torch.optim.lr_scheduler.LambdaLR(o, f)\n    return s\ns = make(o)\nif hvd.rank() == 0:\n"
        "    s.step()  # HERE",
        "def make(o):\n    s = timer(o)\n    return s\ns = make(o)\nif hvd.rank() == 0:\n    s.step()",
    ),
    (
        "every_rank_reads_all",
        f"{WRAP}s = torch.utils.data.RandomSampler(d)\nx = torch.utils.data.DataLoader(d, sampler=s)  # HERE\nrun(x)",
        f"{WRAP}s = torch.utils.data.RandomSampler(d)\nif args.many:\n    s = mine(d)\n"
        "x = torch.utils.data.DataLoader(d, sampler=s)\nrun(x)",
    ),
    (
        "schedule_on_some_ranks",
        f"{WRAP}s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\nif hvd.rank() == 0:\n    s.step(x)  # HERE",
        f"{WRAP}s = torch.optim.lr_scheduler.StepLR(optimizer, 1)\ns.step()\nif hvd.rank() == 0:\n    other.step()\n"
        "t = torch.optim.lr_scheduler.StepLR(optimizer, 1)\nif hvd.rank() == 0:\n    t.step()\nelse:\n    t.step()",
    ),
    (
        "apex_before_synchronize",
        f"from apex import amp\n{WRAP}with amp.scale_loss(loss, optimizer) as scaled:  # HERE\n    scaled.backward()\n"
        "optimizer.step()",
        f"from apex import amp\n{WRAP}with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n"
        "    optimizer.synchronize()\nwith optimizer.skip_synchronize():\n    optimizer.step()\n"
        "with amp.scale_loss(loss, other) as scaled:\n    scaled.backward()\n",
    ),
    (
        "apex_before_synchronize",  # no finding if gradients are, or may be, unscaled later
        f"from apex import amp\n{WRAP}with amp.scale_loss(loss, optimizers=[optimizer], delay_unscale=0) as x:  # HERE\n"
        "    x.backward()\noptimizer.step()",
        f"from apex import amp\n{WRAP}with amp.scale_loss(loss, [optimizer], delay_unscale=late) as x:\n    x.backward()\n"
        "optimizer.step()",
    ),
    *(
        (
            "clip_before_synchronize",  # no finding for an average, an update without gradients, or before a new backward
            f"{WRAP}for x in data:\n    loss.backward()\n    for p in model.parameters():\n        {update}  # HERE\n"
            "    optimizer.step()",
            f"{WRAP}for x in data:\n    loss.backward()\n    for p in model.parameters():\n        {other}\n"
            f"{second_backward}    optimizer.step()",
        )
        for update, other, second_backward in (
            ("p.data.add_(p.grad, alpha=-0.1)", "p.data.add_(p.data, alpha=-0.1)", ""),
            ("p.data -= rate * p.grad.data", "p.data -= rate * p.grad.data", "    loss.backward()\n"),
            ("p.sub_(rate * p.grad)", "total += p.grad.norm()", ""),
            ("p.data = p - rate * p.grad", "p.data = p - rate * p.data", ""),
            ("p.data.add_(other=-0.1 * p.grad)", "p.data.add_(hvd.allreduce(p.grad))", ""),
            ("p.data.mul_(p.grad > 0)", "p.data.mul_(0.9 if p.grad is not None else 1)", ""),
            ("p.data.add_(p.grad.sign())", "p.data.add_(torch.randn_like(p.grad.data))", ""),
            ("p.data += p.grad.data.norm()", "p.data += noise.to(p.grad.data.device)", ""),
            ("p.data.copy_(p.data - 0.1 * p.grad)", "p.data.copy_(mean[p])", ""),
            ("p.data.addcdiv_(p.grad, root, value=-0.1)", "p.data.addcdiv_(momentum, root, value=-0.1)", ""),
            ("torch.mul(p.grad.data, 2, out=p.grad)", "torch.mul(mean[p], 2, out=p.grad)", ""),
        )
    ),
    *(
        (
            "clip_before_synchronize",  # no finding if the update may be temporary, for a second loss
            f"{SECOND_PASS}for p in model.parameters():\n    p.data.add_(p.grad)  # HERE\nlog(loss)\noptimizer.step()",
            f"{SECOND_PASS}for p in model.parameters():\n    p.data.add_(p.grad)\n{line}\noptimizer.step()",
        )
        for line in (
            "again()",
            "model.load_state_dict(old)",
            "for p in model.parameters():\n    p.data.sub_(p.grad)",
            "for p in model.parameters():\n    p.data = old[p]",
        )
    ),
    *(
        (
            "clip_before_synchronize",  # clipping in a function
            f"{WRAP}def limit(p):\n    torch.nn.utils.clip_grad_norm_(p, 1)\nloss.backward()\n"
            "limit(p)  # HERE\noptimizer.step()",
            f"{WRAP}def limit(p):\n    {other}torch.nn.utils.clip_grad_norm_(p, 1)\nloss.backward()\n"
            "limit(p)\noptimizer.step()",
        )
        for other in ("optimizer.synchronize()\n    ", "if hvd.size() == 1: ")
    ),
    (
        "clip_before_synchronize",  # no finding for a function that clips after a call of a function that synchronizes
        f"{WRAP}{LIMIT}loss.backward()\nlimit(p)  # HERE\noptimizer.step()",
        f"{WRAP}def finish():\n    optimizer.synchronize()\n{LIMIT.replace('torch', 'finish(); torch')}loss.backward()\n"
        "limit(p)\nwith optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "clip_before_synchronize",  # no finding after a call of a function that calls synchronize()
        f"{WRAP}def wait():\n    torch.cuda.synchronize()\nloss.backward()\nwait()\nclip_grad_norm_(p, 1)  # HERE\n"
        "optimizer.step()",
        f"{WRAP}def wait():\n    optimizer.synchronize()\nloss.backward()\nwait()\nclip_grad_norm_(p, 1)\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    (
        "clip_before_synchronize",  # one finding if the script's function has the same name as torch's
        f"{WRAP}def clip_grad_norm_(p):\n    torch.nn.utils.clip_grad_norm_(p, 1)\nloss.backward()\n"
        "clip_grad_norm_(p)  # HERE\noptimizer.step()",
        f"{WRAP}def clip_grad_norm_(p):\n    torch.nn.utils.clip_grad_norm_(p, 1)\nloss.backward()\n"
        "optimizer.synchronize()\nclip_grad_norm_(p)\nwith optimizer.skip_synchronize():\n    optimizer.step()",
    ),
    *(
        (
            "clip_before_synchronize",  # no finding for a model that no wrapped optimizer trains
            f"{TWO_MODELS}for p in model.parameters():\n    {line}  # HERE\noptimizer.step()",
            f"{TWO_MODELS}for p in mine.parameters():\n    {line}\noptimizer.step()",
        )
        for line in (
            "p.data.add_(p.grad, alpha=-0.1)",
            "p.grad.mul_(2)",
            "p.grad.nan_to_num_()",
            "torch.clamp_(p.grad, -1, 1)",
            "torch.nan_to_num(p.grad, out=p.grad)",
        )
    ),
    *(
        (
            "rate_times_size",  # no finding if the schedule starts with a lower rate, or may do so
            f"o = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE\n{SCHEDULES}s = lr_scheduler.{falls}",
            f"o = torch.optim.SGD(p, lr=0.1 * hvd.size())\n{SCHEDULES}s = lr_scheduler.{rises}",
        )
        for falls, rises in (
            ("LinearLR(o, 1.0, 0.1)", "LinearLR(o)"),
            ("ConstantLR(o, factor=1)", "ConstantLR(o, factor=0.1)"),
            ("LambdaLR(o, lambda epoch: 0.95**epoch)", "LambdaLR(o, lambda epoch: min(1, (epoch + 1) / 5))"),
            ("LambdaLR(o, lr_lambda=falls)", "LambdaLR(o, lr_lambda=rises)"),
            ("LambdaLR(o, [falls, falls])", "LambdaLR(o, [falls, rises])"),
            ("LambdaLR(o, lambda epoch: falls(epoch))", "LambdaLR(o, lambda epoch: rises(epoch))"),
            ("LambdaLR(o, self.falls)", "LambdaLR(o, self.rises)"),
        )
    ),
    (
        "rate_times_size",  # no finding if the script warms up the rate
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE\ns = torch.optim.lr_scheduler.LambdaLR(o, decay)",
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\nwarm_up = torch.optim.lr_scheduler.LambdaLR(o, f)",
    ),
    (
        "same_gpu",  # the device is in a variable that another function assigns
        "hvd.init()\n"
        + WRAP
        + "def run():\n    x.to(device)\ndef main():\n    device = torch.device('cuda')  # HERE\n    run()\n"
        "main()",
        "hvd.init()\n" + WRAP + "def run():\n    device = gpu()\n    x.to(device)\nrun()",
    ),
    (
        "undefined_names",
        "def train(optimizer):\n    if args.fp16:  # HERE\n        optimizer.step()",
        "import os as system\ndef train(args, *rest, **more):\n    global steps\n"
        "    steps = [a for a in args if rest or more]\n"
        "    with open(__file__) as f:\n        print(f, system, steps, later, display)\n    (lambda n: n)(A.b)\n"
        "def f(x: Unknown) -> Unknown:\n    try:\n        unicode\n    except NameError:\n        pass\n"
        "class A:\n    b = 1\n    c = b\nlater = [y for y in range(3) if (z := y) > 1] + [z]",
    ),
    (
        "undefined_names",  # an import in one function does not define the name in another function
        "def a():\n    import numpy as np\n    np.ones(1)\ndef b():\n    np.zeros(1)  # HERE",
        "from helpers import *\nnp.zeros(1)",
    ),
    (
        "undefined_names",  # an import in one method does not define the name in another method
        "class A:\n    def a(self):\n        import numpy as np\n    def b(self):\n        np.ones(1)  # HERE",
        "class A:\n    one = 1\n    def a(self, two=one):\n        import numpy as np\n"
        "        return [np.ones(n) for n in (three := (two,))], lambda n: np.ones(n), three",
    ),
    (
        "undefined_names",  # an import in an inner function does not define the name in the outer function
        "def a():\n    def b():\n        import numpy as np\n    np.ones(1)  # HERE",
        "def a():\n    import numpy as np\n    def b():\n        np.ones(1)\n    class B:\n        c = np.ones(1)",
    ),
    (
        "rate_times_size",  # the schedule's own rates replace the optimizer's rate
        "o = torch.optim.SGD(p, lr=0.1)\ntorch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1 * hvd.size())  # HERE",
        "lr = 0.1 * hvd.size()\no = torch.optim.SGD(p, lr=lr)\ntorch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1)",
    ),
    (
        "rate_times_size",  # no finding if a condition reads an option for warm-up; declaring it is not enough
        "parser.add_argument('--warmup-epochs', default=5)\no = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE",
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\nif epoch < args.warmup_epochs:\n    scheduler.step()",
    ),
    (
        "rate_times_size",
        "o = BertAdam(p, lr=0.1 * hvd.size(), warmup=0)  # HERE",
        "o = BertAdam(p, lr=0.1 * hvd.size(), warmup=0.1)",
    ),
    *(
        (
            "rate_times_size",
            f"{call}\no = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE",
            "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\nfit(o, warmup_epochs=5, benchmark=True)",
        )
        for call in ("timeit(model, num_warmup_batches=10)", "num_warmup_batches = int(os.environ['N'])")
    ),
    *(
        (
            "rate_times_size",  # no finding if num_warmup_batches, a usual name in benchmarks, is for a warm-up of the rate
            "o = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE\ntimeit(o, optimizer, num_warmup_batches=5)",
            f"o = optimizer = torch.optim.SGD(p, lr=0.1 * hvd.size())\n{warm_up}",
        )
        for warm_up in (
            "WarmupLR(o, num_warmup_batches=5)",
            "get_schedule(o, num_warmup_batches=5)",
            "prepare(optimizer, num_warmup_batches=5)",
            "num_warmup_batches = int(5 * len(x))\nif i < num_warmup_batches:\n    g['lr'] = i / num_warmup_batches",
        )
    ),
    (
        "rate_times_size",
        "timeit.timeit(step, number=args.num_warmup_batches)\no = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE",
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\nstart, end = init_schedules(o, warmup_epochs=5)",
    ),
    *(
        (
            "same_order_every_epoch",  # no finding if each epoch has its own seed
            f"def load(n):\n    s = torch.utils.data.DistributedSampler(d, 2, 0, seed=args.seed)  # HERE\n{LOAD}",
            f"def load(n):\n    s = torch.utils.data.DistributedSampler(d, 2, 0, {seed})\n{LOAD}",
        )
        for seed in ("seed=args.seed + epoch", "True, self.epoch", "seed=n")
    ),
    (
        "same_order_every_epoch",  # no finding if each epoch may have different data
        "for epoch in range(9):\n    s = torch.utils.data.DistributedSampler(data, 2, 0)  # HERE\n"
        "    for x in torch.utils.data.DataLoader(data, sampler=s):\n        pass",
        "for epoch in range(9):\n    data = read(epoch)\n    s = torch.utils.data.DistributedSampler(data, 2, 0)\n"
        "    for x in torch.utils.data.DataLoader(data, sampler=s):\n        pass",
    ),
    (
        "accumulation_without_passes",  # no finding if the number of passes also decides whether backward runs
        WRAP + "for i, x in enumerate(data):\n    if n > 1:\n        loss = loss / n\n    loss.backward()\n"
        "    if i % n == 0:\n        optimizer.step()  # HERE",
        WRAP + "for i, x in enumerate(data):\n    if n > 1:\n        loss = loss / n\n    else:\n        loss.backward()\n"
        "    if i % n == 0:\n        optimizer.step()",
    ),
    (
        "downloaded_by_all_ranks",  # no finding if local rank 0 calls the function first
        "import torchvision\nhvd.init()\n" + WRAP + "def load():\n"
        "    return torchvision.datasets.MNIST('data', download=True)  # HERE\nload()",
        "import torchvision\nhvd.init()\n"
        + WRAP
        + "def load():\n    return torchvision.datasets.MNIST('data', download=True)\n"
        "if hvd.local_rank() == 0:\n    load()\nhvd.join()\nload()",
    ),
    (
        "optimizer_state",  # the inner optimizer's count of steps does not matter: the wrapper has its own state
        "raw = torch.optim.Adam(p, weight_decay=0.1)\no = hvd.DistributedOptimizer(raw)\n"
        "hvd.broadcast_optimizer_state(raw, 0)  # HERE",
        "raw = torch.optim.Adam(p)\no = hvd.DistributedOptimizer(raw)\nhvd.broadcast_optimizer_state(raw, 0)",
    ),
    (
        "half_precision",
        "c = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none  # HERE",
        "args = Namespace()\nargs.fp16 = False\nc = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none",
    ),
    (
        "saved_by_all_ranks",  # no finding if the path contains the accuracy, which differs between ranks
        WRAP + "torch.save(model, f'{name}_acc.pt')  # HERE",
        WRAP + "torch.save(model, f'{name}-{val_acc:.3f}.pt')",
    ),
    (
        "rate_times_size",  # no finding if a function of another file may replace the rate
        "def adjust_lr(optimizer): ...\noptimizer = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE\nadjust_lr(optimizer)",
        "optimizer = torch.optim.SGD(p, lr=0.1 * hvd.size())\nadjust_learning_rate(optimizer, epoch)",
    ),
    (
        "padded_evaluation",  # local variables of two functions have the same names
        "def validate():\n    s = torch.utils.data.DistributedSampler(data, 2, 0)  # HERE\n"
        "    loader = torch.utils.data.DataLoader(data, sampler=s)\n    model.eval()\n    for x in loader: model(x)\n"
        "def train():\n    s = torch.utils.data.DistributedSampler(data, 2, 0)\n"
        "    loader = torch.utils.data.DataLoader(data, sampler=s)\n    for x in loader: model(x).backward()",
        "def train():\n    s = torch.utils.data.DistributedSampler(data, 2, 0)\n"
        "    loader = torch.utils.data.DataLoader(data, sampler=s)\n    for x in loader:\n        model(x).backward()\n"
        "def validate(loader):\n    model.eval()\n    for x in loader:\n        model(x).backward()",
    ),
    (
        "code_in_objects",
        "s = torch.optim.lr_scheduler.StepLR(o, 1)\ns = hvd.broadcast_object(s)  # HERE",
        "s = torch.optim.lr_scheduler.StepLR(o, 1)\ns.load_state_dict(hvd.broadcast_object(s.state_dict()))",
    ),
    (
        "collective_on_some_ranks",  # no finding if the barrier runs in the training phase only, in which no rank skips it
        "for phase in phases:\n    if phase == 'valid' and hvd.local_rank() != 0:\n        continue\n"
        "    hvd.barrier()  # HERE",
        "for phase in phases:\n    if phase == 'valid' and hvd.local_rank() != 0:\n        continue\n"
        "    for x in data:\n        if phase == 'train':\n            hvd.barrier()",
    ),
    (
        "schedule_by_own_loss",
        f"{WRAP}d = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())\n"
        "s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "for x in data:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\ns.step(loss)  # HERE",
        f"{WRAP}d = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())\n"
        "s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
        "for x in data:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\ns.step(hvd.allreduce(loss))",
    ),
    (
        "step_skipped_by_own_loss",  # the loss may be NaN on one rank only
        f"{WRAP}for x in data:\n    loss = model(x)\n    if torch.isnan(loss):  # HERE\n        continue\n"
        "    loss.backward()\n    optimizer.step()",
        f"{WRAP}for x in data:\n    loss = model(x)\n    bad = hvd.allreduce(torch.isnan(loss).float(), op=hvd.Max)\n"
        "    if bad > 0:\n        continue\n    loss.backward()\n    optimizer.step()",
    ),
    (
        "rate_times_size",  # no finding if the rate is only shown
        "o = torch.optim.SGD([{'params': p, 'lr': 0.1 * hvd.size()}])  # HERE",
        "x = 0.1 * hvd.size()\nbar.set_postfix({'lr': x})",
    ),
    (
        "rate_times_size",
        "for i in range(args.warmup_batches):\n    step()\no = torch.optim.SGD(p, lr=0.1 * hvd.size())  # HERE",
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\nf = make_schedule(hvd.size(), args.warmup_epochs)",
    ),
    (
        "shard_by_local_rank",  # blocks of samples; no finding if the number of blocks is the number of ranks on this host
        "n = len(d) // hvd.size()\nd = d[hvd.local_rank() * n : (hvd.local_rank() + 1) * n]  # HERE",
        "n = len(d) // hvd.local_size()\nd = d[hvd.local_rank() * n : (hvd.local_rank() + 1) * n]",
    ),
    (
        "shard_by_local_rank",  # no finding for init_process_group(), which reads no samples
        "reader(rank=hvd.local_rank(), world_size=hvd.size())  # HERE",
        "torch.distributed.init_process_group('gloo', rank=hvd.local_rank(), world_size=hvd.size())",
    ),
    (
        "same_order_every_epoch",  # in an evaluation, the order does not matter
        "def fit():\n    s = torch.utils.data.DistributedSampler(data, 2, 0)  # HERE\n"
        "    return torch.utils.data.DataLoader(data, sampler=s)\n"
        "for epoch in range(9):\n    for x in fit(): pass",
        "def test():\n    s = torch.utils.data.DistributedSampler(data, 2, 0)\n"
        "    return torch.utils.data.DataLoader(data, sampler=s)\n"
        "for epoch in range(9):\n    for x in test(): pass",
    ),
    (
        "discarded_result",  # the call is not only a barrier, because the new tensor has the value of a variable
        "hvd.broadcast(torch.Tensor([args.seed]), root_rank=0)  # HERE",
        "one = 1\nhvd.broadcast(torch.tensor(one), 0)\nhvd.allreduce(torch.tensor([local_rank]))\n"
        "hvd.broadcast(torch.tensor(epoch), 0, name='wait_for_data')\nepoch = hvd.broadcast(torch.tensor(epoch), 0).item()",
    ),
    (
        "discarded_result",  # other calls that make a new tensor of a variable's value
        "hvd.broadcast(torch.FloatTensor([lr]).cuda(), 0)  # HERE",
        "hvd.allreduce(torch.Tensor(n))\nhvd.allreduce(torch.zeros([n]))\nhvd.allreduce(torch.tensor(0).cuda())",
    ),
    (
        "same_order_every_epoch",  # the samplers and loaders are in dicts
        DICTS + "def fit(loaders):\n    for epoch in range(9):\n        for x in loaders['train']: pass\nfit(loaders)",
        "s = {x: torch.utils.data.DistributedSampler(d[x], 2, 0) for x in ('train', 'val')}\n"
        "l = {x: torch.utils.data.DataLoader(d[x], sampler=s[x]) for x in ('train', 'val')}\nlib.fit(l['train'])\n"
        "for epoch in range(9):\n    for x in l['train']: pass",
    ),
    (
        "same_order_every_epoch",  # no finding if the dict's loader is in another variable, which other code may get
        DICTS + "for epoch in range(9):\n    for part in parts:\n        for x in loaders[part]: pass",
        DICTS + "train = loaders['train']\nfor epoch in range(9): lib.fit(train)",
    ),
    (
        "same_order_every_epoch",  # no finding if other code gets all loaders of the dict
        DICTS + "for epoch in range(9):\n    for x in loaders['train']: pass",
        DICTS + "for epoch in range(9): lib.fit(*loaders.values())",
    ),
    (
        "same_order_every_epoch",  # no finding if no key of the dict is for training
        DICTS + "for epoch in range(9):\n    for x in loaders['train']: pass",
        DICTS.replace("'train', ", "") + "for epoch in range(9):\n    for x in loaders['val']: pass",
    ),
    (
        "undefined_names",  # names in class bodies, in match patterns and in blocks of ``suppress(NameError)``
        "class A:\n    log = getLogger(__qualname__)  # HERE",
        "def a(v):\n    match v:\n        case [first, *rest]: print(first, rest)\n"
        "        case {'k': k, **more}: print(k, more)\n"
        "try:\n    first\nexcept NameError: ...\nfrom contextlib import suppress\n"
        "with suppress(NameError):\n    rest, k, more",
    ),
    ("undefined_names", "np.ones(1)  # HERE", "get_ipython().run_line_magic('pylab', 'inline')\nnp.ones(1)"),
    ("undefined_names", "print(lr)  # HERE", "vars().update(lr=1)\nprint(lr)"),
    (
        "sampler_with_shuffle",  # no finding if the sampler is a parameter that may be None
        "s = torch.utils.data.DistributedSampler(d)\ntorch.utils.data.DataLoader(d, sampler=s, shuffle=True)  # HERE",
        "s = torch.utils.data.DistributedSampler(d)\n"
        "def small(d, s=None):\n    return torch.utils.data.DataLoader(d, sampler=s, shuffle=True)",
    ),
    (
        "saved_by_all_ranks",  # an option of the command line is the same on all ranks
        WRAP + "args = parser.parse_args()\nif args.save_model:\n    torch.save(model, 'mnist.pt')  # HERE",
        WRAP + "if save_model:\n    torch.save(model, 'mnist.pt')",
    ),
    ("saved_by_all_ranks", WRAP + "torch.save(model, '-'.join(map(str, [a, loss_name])))  # HERE", WRAP),
    (
        "scaler_before_synchronize",  # skip_synchronize() averages nothing
        WRAP + "scaler.scale(loss).backward()\nwith optimizer.skip_synchronize():\n    scaler.step(optimizer)  # HERE",
        "from utils import sync_gradients\n" + WRAP + "scaler.scale(loss).backward()\nsync_gradients(model)\n"
        "with optimizer.skip_synchronize():\n    scaler.step(optimizer)",
    ),
    (
        "never_broadcast",  # the seed of one object does not make the weights equal
        "from lib import Sampler\nSampler(data, seed=seed)\n" + WRAP.replace("\n", "  # HERE\n"),
        "from lib import seed_all\nseed_all(seed)\n" + WRAP,
    ),
    (
        "never_broadcast",  # a broadcast of one model leaves another model's weights different
        "d, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\nhvd.broadcast_parameters(model.state_dict(), 0)\n"
        + WRAP
        + "other = hvd.DistributedOptimizer(base, d.named_parameters())  # HERE",
        "d, model = torch.nn.Linear(1, 1), torch.nn.Sequential(d)\nhvd.broadcast_parameters(model.state_dict(), 0)\n"
        + WRAP
        + "other = hvd.DistributedOptimizer(base, d.named_parameters())",
    ),
    (
        "never_broadcast",  # no finding if a loop broadcasts models, which may include this one
        "torch.manual_seed(1 + hvd.rank())\n" + WRAP.replace("\n", "  # HERE\n"),
        "torch.manual_seed(1 + hvd.rank())\nfor one in models:\n    hvd.broadcast_parameters(one.state_dict(), 0)\n" + WRAP,
    ),
    (
        "never_broadcast",  # no finding if one of several seeds is the same on all ranks
        "torch.manual_seed(1 + hvd.rank())\n" + WRAP.replace("\n", "  # HERE\n"),
        "torch.manual_seed(1)\ntorch.manual_seed(1 + hvd.rank())\n" + WRAP,
    ),
    (
        "loaded_on_some_ranks",  # no finding if a broadcast follows, or if no training follows
        WRAP + "if hvd.rank() == 0:\n    optimizer.load_state_dict(x)  # HERE\nloss.backward()\noptimizer.step()",
        WRAP + "if hvd.rank() == 0:\n    optimizer.load_state_dict(x)\nhvd.broadcast_optimizer_state(optimizer, 0)\n"
        "loss.backward()\nif hvd.rank() == 0:\n    model.load_state_dict(x)\nmodel.eval()",
    ),
    (
        "loaded_on_some_ranks",
        WRAP
        + "hvd.broadcast_parameters(model.state_dict(), 0)\nif hvd.rank() == 0:\n    model.load_state_dict(x)  # HERE\n"
        "loss.backward()",
        WRAP + "def send(model):\n    hvd.broadcast_parameters(model.state_dict(), 0)\nif hvd.rank() == 0:\n"
        "    model.load_state_dict(x)\nsend(model)\nloss.backward()",
    ),
    *(
        (
            "loaded_on_some_ranks",  # no finding if a sum over all ranks sends the state
            WRAP + "if hvd.rank() == 0:\n    model.load_state_dict(x)  # HERE\nhvd.allreduce_(total)\nloss.backward()",
            WRAP + f"if hvd.rank() == 0:\n    model.load_state_dict(x)\n{sums}\nloss.backward()",
        )
        for sums in (
            "for p in model.parameters():\n    p.data.mul_(hvd.rank() == 0)\n    hvd.allreduce_(p.data, op=hvd.Sum)",
            "hvd.grouped_allreduce_([p.data for p in model.parameters()], op=hvd.Sum)",
        )
    ),
    (
        "loaded_on_some_ranks",  # a sum of gradients sends no state
        WRAP + "if hvd.rank() == 0:\n    model.load_state_dict(x)  # HERE\nloss.backward()\n"
        "for p in model.parameters():\n    hvd.allreduce_(p.grad)",
        WRAP + "if hvd.rank() == 0:\n    model.load_state_dict(x)\nloss.backward()\n"
        "for p in model.parameters():\n    hvd.allreduce_(p.data)",
    ),
    (
        "loaded_on_some_ranks",  # a helper function loads the state
        WRAP + "def load(net, path):\n    state = read(path)\n    net.load_state_dict(state)  # HERE\n"
        "if hvd.rank() == 0:\n    load(model, 'x')\nloss.backward()",
        WRAP + "def load(net):\n    net.load_state_dict(x)\nload(model)\ndef other(net):\n    net.load_state_dict(x)\n"
        "if hvd.rank() == 0:\n    other(teacher)\ndef third(net):\n    net.load_state_dict(x)\nif hvd.rank() == 0:\n"
        "    third(model)\nhvd.broadcast_parameters(model.state_dict(), 0)\nloss.backward()",
    ),
    (
        "skipped_reduction",  # no finding if another function may call synchronize()
        WRAP + "loss.backward()\nwith optimizer.skip_synchronize():\n    optimizer.step()  # HERE",
        WRAP + "loss.backward()\nhelp(optimizer)\nwith optimizer.skip_synchronize():\n    optimizer.step()\n"
        "def f(o):\n    loss.backward()\n    o.synchronize()\n    with optimizer.skip_synchronize():\n"
        "        optimizer.step()",
    ),
    (
        "inner_given",  # no finding if a schedule gets the inner optimizer, or if the wrapper may be used too
        "base = torch.optim.SGD(p, 1)\n" + WRAP.replace("r(optimizer", "r(base") + "train(base)  # HERE",
        "base = torch.optim.SGD(p, 1)\nwarm(base)\n"
        + WRAP.replace("r(optimizer", "r(base")
        + "s = torch.optim.lr_scheduler.StepLR(base, 1)\nprint(base)\n"
        "one = torch.optim.SGD(p, 1)\ntwo = hvd.DistributedOptimizer(one)\ntrain(one)\nlearn(two)",
    ),
    (
        "never_wrapped",  # no finding if the parameters are not broadcast, or if a function gets the optimizer
        WRAP + "d = torch.nn.Linear(1, 1)\nhvd.broadcast_parameters(d.state_dict(), 0)\n"
        "o = torch.optim.Adam(d.parameters())  # HERE\ns = torch.optim.lr_scheduler.StepLR(o, 1)\no.step()",
        WRAP + "d = torch.nn.Linear(1, 1)\nhvd.broadcast_parameters(d.state_dict(), 0)\n"
        "z = torch.optim.Adam([z])\nz.step()\no = torch.optim.Adam(d.parameters())\no.step()\no = wrap(o)\n"
        "x = torch.optim.Adam(d.parameters())\nwrap(x)\nx.step()",
    ),
    (
        "wrapped_twice",
        WRAP + "if args.gan:\n    other = hvd.DistributedOptimizer(optimizer, d.named_parameters())  # HERE",
        f"if args.many:\n    {WRAP}else:\n    {WRAP}optimizer = torch.optim.SGD(p, 1)\n{WRAP}"
        "def f(optimizer):\n    o = hvd.DistributedOptimizer(optimizer)",
    ),
    (
        "half_precision",
        "args = parser.parse_args()\nif not cuda:\n    args.fp16 = False\n"
        "c = hvd.Compression.fp16 if args.fp16 else hvd.Compression.none  # HERE",
        "c = hvd.Compression.none",
    ),
    (
        "padded_evaluation",  # the sampler is a variable of the module, and a function makes the loader
        "s = torch.utils.data.DistributedSampler(data, 2, 0)  # HERE\n"
        "def check():\n    loader = torch.utils.data.DataLoader(data, sampler=s)\n    model.eval()\n"
        "    for x in loader: model(x)\ncheck()",
        "s = None",
    ),
    (
        "not_returned",  # an assignment with an annotation, and keyword arguments
        "def wrap(o: O) -> O:\n    if HAVE_HVD:\n        w: O = hvd.DistributedOptimizer(optimizer=o)  # HERE\n"
        "        hvd.broadcast_optimizer_state(optimizer=w, root_rank=0)\n    else:\n        return o",
        "def wrap(o: O) -> O:\n    if HAVE_HVD:\n        w: O = hvd.DistributedOptimizer(optimizer=o)\n        keep(o=w)\n"
        "    else:\n        return o",
    ),
    (
        "shuffled_shards",
        "import random\nrandom.shuffle(a)  # HERE\nmine: list[str] = a\nmine: list[str] = mine[hvd.rank()::2]",
        "import random\nrandom.shuffle(a)\na: list[str] = a[:9]",
    ),
    (
        "checkpoint_before_wrapping",
        "optimizer.load_state_dict(state)  # HERE\noptimizer = hvd.DistributedOptimizer(optimizer=optimizer)",
        "o = torch.optim.SGD(params=w, lr=1)\no.load_state_dict(state)\no = hvd.DistributedOptimizer(optimizer=o)",
    ),
    (
        "optimizer_state",
        "o = torch.optim.Adam(p)\no = hvd.DistributedOptimizer(optimizer=o)\nhvd.broadcast_optimizer_state(o, 0)  # HERE",
        "o = torch.optim.SGD(p, 1)\no = hvd.DistributedOptimizer(optimizer=o)\nhvd.broadcast_optimizer_state(o, 0)",
    ),
    (
        "inner_step",
        "o = torch.optim.SGD(p, 1)\nd = hvd.DistributedOptimizer(o)\n"
        "hvd.broadcast_optimizer_state(optimizer=d, root_rank=0)\no.step()  # HERE",
        "o = torch.optim.SGD(p, 1)\nd = hvd.DistributedOptimizer(o)\ntrain(optimizer=d)\no.step()",
    ),
    ("gpu_by_rank", "torch.cuda.set_device(device=hvd.rank())  # HERE", "torch.cuda.set_device(device=hvd.local_rank())"),
    (
        "different_splits",
        WRAP + "a, b = torch.utils.data.random_split(dataset=data, lengths=[9, 1])  # HERE",
        WRAP + "mine = shard(data, hvd.rank())\na, b = torch.utils.data.random_split(dataset=mine, lengths=[9, 1])",
    ),
    (
        "rate_on_some_ranks",  # functions imported under another name
        "from horovod.torch import rank as r\n"
        + WRAP
        + "if r() == 0:\n    optimizer.param_groups[0]['lr'] *= 0.1  # HERE\n"
        "loss.backward()",
        "from horovod.torch import rank as r, broadcast_optimizer_state as send\n"
        + WRAP
        + "if r() == 0:\n    optimizer.param_groups[0]['lr'] *= 0.1\nsend(optimizer, 0)\nloss.backward()",
    ),
    (
        "collective_on_some_ranks",  # no finding if perhaps no rank runs the exception handler
        "def f():\n    try:\n        hvd.barrier()\n    except ValueError: ...\nif hvd.rank() == 0:\n    f()  # HERE",
        "def f():\n    try:\n        g()\n    except ValueError:\n        hvd.barrier()\nif hvd.rank() == 0:\n    f()",
    ),
    (
        "collective_on_some_ranks",  # an exit in an else
        "def f():\n    if hvd.rank() == 0:\n        print()\n    else:\n        return\n    hvd.barrier()  # HERE",
        "def f():\n    if hvd.rank() == 0:\n        return 1\n    else:\n        return 2\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # no finding if later code may run on all ranks
        "for part in parts:\n    if not (part == 'valid' and hvd.rank() != 0):\n        pass\n    else:\n        continue\n"
        "    hvd.barrier()  # HERE",
        "for part in parts:\n    if not (part == 'valid' and hvd.rank() != 0):\n        pass\n    else:\n        continue\n"
        "    if part == 'train':\n        hvd.barrier()",
    ),
    *(
        (
            "saved_by_all_ranks",  # no finding if perhaps only some ranks write, or if each rank has its own files
            SAVES + "save(hvd.rank() == 0)\ntorch.save(model, 'x')  # HERE",
            SAVES + code,
        )
        for code in (
            "save(hvd.rank() == 0)",
            "save(on=not hvd.rank())",
            "def f():\n    if hvd.rank() == 0:\n        print()\n    else:\n        return\n    torch.save(m, 'x')\nf()",
            "def a():\n    return hvd.rank() == 0\ndef f():\n    if not a():\n        return\n    torch.save(m, 'x')\nf()",
            "path = None\nif hvd.rank() == 0:\n    path = 'x'\nif path:\n    torch.save(model, path)",
            "hvd.rank() == 0 and torch.save(model, 'x')",
            "hvd.rank() or torch.save(model, 'x')",
            "def once(f):\n    return f if hvd.rank() == 0 else print\n@once\ndef f():\n    torch.save(model, 'x')\nf()",
            "mine = range(hvd.rank(), 9, hvd.size())\nfor n in mine:\n    torch.save(model, f'{n}.pt')",
            "for i, name in enumerate(names[hvd.rank() :: hvd.size()]):\n    torch.save(model, name)",
            "def mine():\n    return range(hvd.rank(), 9, hvd.size())\nfor n in mine():\n    torch.save(model, f'{n}.pt')",
            "mine = names[hvd.rank() :: 2]\n[torch.save(m, f'{n}.pt') for n, m in zip(mine, models)]",
            "mine = names[hvd.rank() :: 2]\n{n: torch.save(m, f'{n}.pt') for part in mine for n, m in part.items()}",
            "mine = dict(names[hvd.rank() :: 2])\nfor n, m in mine.items():\n    torch.save(m, f'{n}.pt')",
            "n = mine(hvd.broadcast_object(parts))\ntorch.save(model, f'{n}.pt')\n"
            "def mine(parts):\n    return parts[hvd.rank()]",
            "n = hvd.broadcast_object(parts).get(hvd.rank())\ntorch.save(model, f'{n}.pt')",
        )
    ),
    *(
        (
            "saved_by_all_ranks",  # all ranks save after the same epochs
            f"parser = ArgumentParser('training on GPUs')\nargs = parser.parse_args()\nhvd.init()\n{first}\n"
            f"for n in {epochs}:\n    torch.save(model, f'{{n}}.pt')  # HERE",
            "hvd.init()\nfirst = hvd.broadcast_object(x)[hvd.rank()]\n"
            f"for n in {epochs}:\n    torch.save(model, f'{{n}}.pt')",
        )
        for first, epochs in (
            ("first = int(hvd.broadcast(torch.tensor(0), root_rank=0).item())", "range(first, 9)"),
            ("first = hvd.broadcast_object(state, root_rank=0)['n']", "tqdm(range(first, args.n), disable=hvd.rank() > 0)"),
            ("first = args.first", "range(first, config['runtime']['epochs'])"),
        )
    ),
    (
        "saved_by_all_ranks",  # all ranks have the value of a broadcast
        "hvd.init()\nfirst = hvd.broadcast(x, root_rank=0)\ndef save(n):\n    if n > 0:\n"
        "        torch.save(model, 'x')  # HERE\nsave(first)",
        SAVES + "first = hvd.broadcast(x, root_rank=0)\nsave(root_rank == first)",
    ),
    (
        "optimizer_state",  # a constant in a with statement
        "with f:\n    d = 1\n    o = torch.optim.Adam(p, weight_decay=d)\n    hvd.broadcast_optimizer_state(o, 0)  # HERE",
        "with log:\n    d = 0\n    o = torch.optim.SGD(p, 1, weight_decay=d)\n    hvd.broadcast_optimizer_state(o, 0)",
    ),
]
BY_NAME = {rule.__name__: rule for rule in RULES}


def source(snippet: str) -> Source:
    return Source(f"import torch\nimport horovod.torch as hvd\n{snippet}\n")


@pytest.mark.parametrize(
    ("rule", "script_with_finding", "script_without_finding"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_rule_finds_only_the_marked_line(rule, script_with_finding, script_without_finding):
    (finding,) = BY_NAME[rule](source(script_with_finding))
    assert finding.line == 3 + next(i for i, line in enumerate(script_with_finding.splitlines()) if "HERE" in line)
    assert "; " in finding.message  # the part after the semicolon says what to do
    assert list(BY_NAME[rule](source(script_without_finding))) == []


def test_accumulation_is_found_if_two_branches_step_the_same_optimizer():
    loop = "for i, x in enumerate(data):\n    model(x).backward()\n    if i % 4 == 3:\n        optimizer.step()\n"
    found = BY_NAME["accumulation_without_passes"](source(f"{WRAP}{loop}    elif i == end:\n        optimizer.step()"))
    assert [finding.line for finding in found] == [7, 9]


@pytest.mark.parametrize(
    ("test", "repaired"),
    [
        ("if not i % 4:\n    ", True),
        ("if n >= 4:\n    ", True),
        ("if n < 4:\n        continue\n", True),
        ("if i % 2:\n    ", True),
        ("if i % 4:\n    ", False),
        ("if (i + 1) % 4 != 0:\n    ", False),
        ("if i % 4 > 0 and on:\n    ", False),
        ("if i % 4 == 0:\n        continue\n", False),
        ("if i % 4 >= 1:\n    ", False),
        ("if i % 4 < 3:\n    ", False),
        ("rest = i % 4\n    if rest:\n    ", False),
        ("rest = i % 4\n    if rest != 0:\n    ", False),
    ],
)
def test_accumulation_is_repaired_if_one_of_n_iterations_steps(test, repaired):
    indent = "" if "continue" in test else "    "
    loop = f"for i, x in enumerate(data):\n    model(x).backward()\n    n += 1\n    {test}    optimizer.step()\n"
    (found,) = BY_NAME["accumulation_without_passes"](source(f"{WRAP}{loop}{indent}    n = 0"))
    assert bool(found.edits) is repaired


def test_the_finding_for_a_discarded_scheduler_broadcast_recommends_its_state_dict():
    (found,) = BY_NAME["discarded_result"](source("hvd.broadcast_object(scheduler_wu)"))
    assert found.message.endswith("; broadcast its state_dict(), and load the result on all ranks")
    (found,) = BY_NAME["discarded_result"](source("hvd.broadcast_object(model_state)"))
    assert found.message.endswith("; assign the result")


@pytest.mark.parametrize("argument", ["torch.tensor(epoch)", "tensor=torch.tensor(epoch)"])
def test_the_finding_for_a_new_tensor_recommends_no_call_that_changes_the_tensor(argument):
    (found,) = BY_NAME["discarded_result"](source(f"hvd.broadcast({argument}, root_rank=0)"))
    assert found.message.endswith("; assign the result")


def test_a_state_that_one_rank_loads_must_be_broadcast():
    load = "o = torch.optim.Adam(p)\nif hvd.rank() == 0:\n    o.load_state_dict(s)\no = hvd.DistributedOptimizer(o)\n"
    (found,) = BY_NAME["checkpoint_before_wrapping"](source(load))
    assert "; only some ranks load it: call hvd.broadcast_optimizer_state" in found.message
    (found,) = BY_NAME["checkpoint_before_wrapping"](source(load + "hvd.broadcast_optimizer_state(o, 0)"))
    assert found.message.endswith("; nothing to do")


def test_the_never_broadcast_finding_is_conditional_if_a_caller_passes_the_model():
    wrap = "hvd.init()\n    o = hvd.DistributedOptimizer(o, m.named_parameters())"
    (found,) = BY_NAME["never_broadcast"](source(f"def fit(m, o):\n    {wrap}"))
    assert "unless the code that makes the model gives all ranks the same weights" in found.message
    (found,) = BY_NAME["never_broadcast"](source(f"def fit(o):\n    m = torch.nn.Linear(1, 1)\n    {wrap}"))
    assert "unless" not in found.message


def test_an_undefined_name_is_found_beside_other_findings(all_rules):
    found = findings(source("def train(x):\n    x = scale(x)\n    hvd.allreduce(x)\ntrain(torch.ones(1))"))
    assert [(finding.line, "'scale' is not defined" in finding.message) for finding in found] == [(4, True), (5, False)]


@pytest.mark.parametrize("call", ["os.environ['OMPI_COMM_WORLD_SIZE']", "mpi4py.MPI.COMM_WORLD.allgather(1)"])
def test_code_that_needs_mpirun_has_a_finding_of_level_unsupported(call):
    (found,) = findings(source(f"import os\nimport mpi4py.MPI\nhvd.init()\nx = {call}"))
    assert (found.line, found.level) == (6, "unsupported")


@pytest.mark.parametrize(
    "snippet",
    [
        "first = os.environ.get('OMPI_COMM_WORLD_RANK', '0') == '0'",
        "if 'PMI_RANK' in os.environ:\n    print(os.environ['PMI_RANK'])",
        "if args.use_mpi:\n    MPI.COMM_WORLD.Barrier()",
        "try:\n    comm = MPI.COMM_WORLD\n    comm.Barrier()\nexcept RuntimeError:\n    pass",
        "comm = MPI.COMM_WORLD if args.mpi else None\ndef barrier():\n    if comm is None:\n        return\n"
        "    MPI.COMM_WORLD.Barrier()\nbarrier()",
        "def setup():\n    return MPI.COMM_WORLD.Get_rank()\nif args.launcher == 'mpi':\n    setup()",
    ],
)
def test_code_that_also_works_without_mpirun_has_a_finding_of_level_differs(snippet):
    found = findings(source(f"import os\nfrom mpi4py import MPI\nhvd.init()\n{snippet}"))
    assert [finding.level for finding in found if "torchrun" in finding.message] == ["differs"]


def test_break_outside_of_a_loop_does_not_stop_the_check():
    assert findings(source("def f():\n    hvd.shutdown()\n    break\nf()")) == []


def test_variables_of_mpi_and_torchrun_in_two_statements_have_no_finding():
    two = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', -1))\nif rank < 0:\n    rank = int(os.environ['RANK'])"
    assert findings(source(f"import os\nhvd.init()\n{two}")) == []


def test_every_rule_has_a_case():
    assert {case[0] for case in CASES} == set(BY_NAME)


@pytest.mark.parametrize(
    "text",
    [
        "from horovod.torch import allreduce as ar\nar(x)",
        "import horovod.torch\nhorovod.torch.allreduce(x)",
        "from horovod import torch as h\nh.allreduce(x)",
        "from horovod.torch import *\nallreduce(x)",
        "import dualtrain.hvd as hvd\nhvd.allreduce(x)",
        "def f():\n  import horovod.torch as hvd; hvd.allreduce(x)",
        "hvd: Any; import horovod.torch as hvd\nhvd.allreduce(x)\nclass T:\n  hvd: Any",
        "import horovod.torch as h\ndef f(h): h: Any; h.allreduce(x)\nf(h)",
        "import horovod.torch; hvd = horovod.torch\nhvd.allreduce(x)",
        "import horovod.torch as h; b = c = h if many else None; hvd = b\nhvd.allreduce(x)",
        "import horovod.torch as h; h = h\nh.allreduce(x); x = h.cell; x.init()",
    ],
)
def test_imports_are_followed(text):
    assert [finding.line for finding in discarded_result(Source(text))] == [2]


@pytest.mark.parametrize(
    "imports",
    [
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    import stub as hvd",
        "try:\n    import horovod.torch as hvd\nexcept ImportError:\n    from stub import hvd",
        "if args.b:\n    import horovod.torch as hvd\nelse:\n    import byteps.torch as hvd\n    hvd.init(lazy=False)",
        "if args.b:\n    import byteps.torch as hvd\n    hvd.init(lazy=False)\nelse:\n    import horovod.torch as hvd",
        "import byteps.torch as hvd\nimport horovod.torch as hvd",
    ],
)
def test_an_import_of_horovod_counts_outside_of_the_block_that_imports_another_module(imports):
    found = findings(Source(f"{imports}\nhvd.allreduce(x)\n"))
    assert [finding.line for finding in found] == [imports.count("\n") + 2]


def test_the_last_import_of_a_name_counts_if_it_is_not_conditional():
    assert not Source("import horovod.torch as hvd\nimport byteps.torch as hvd\nhvd.init()\n").hvd_calls("init")


def test_an_import_in_a_function_binds_its_name_in_this_function_only():
    functions = "    import horovod.torch as hvd\n    hvd.allreduce(x)\ndef g():\n    hvd.allreduce(x)\n"
    assert [found.line for found in discarded_result(Source(f"def f():\n{functions}"))] == [3]
    assert [found.line for found in discarded_result(Source(f"def f():\n    global hvd\n{functions}"))] == [4, 6]
    inner = f"  def f():\n    nonlocal hvd\n{functions.partition('def g')[0]}"
    outer = f"def outer():\n  hvd = None\n{inner}  hvd.allreduce(x)\nhvd.allreduce(x)\n"
    assert [found.line for found in discarded_result(Source(outer))] == [6, 7]
    passed = functions.replace("g()", "g(hvd)")
    assert [found.line for found in discarded_result(Source(f"def f():\n{passed}"))] == [3, 5]


def test_every_listed_name_of_a_submodule_exists_in_dualtrain_hvd():
    for name, names in MODULE_NAMES.items():
        assert names <= set(vars(import_module(f"dualtrain.hvd.{name}"))), name


def test_unused_functions_of_a_script_have_only_findings_of_level_unsupported():
    rate = "def {}(o):\n    for group in o.param_groups:\n        group['lr'] = 0.1 * hvd.size()\n"
    pair = rate.format("first") + "def second(o):\n    first(o)\n"
    start = "if __name__ == '__main__':\n    "
    library, unused = findings(source(pair)), findings(source(f"{pair}{start}main()"))
    used, named = findings(source(f"{pair}{start}second(o)")), findings(source(f"{pair}{start}vars()['second'](o)"))
    assert ([each.line for each in library], unused) == ([5], [])
    assert used == named == library
    assert findings(source(f"{pair}hvd.init()")) == library
    assert findings(source(f"{pair}loss.backward()")) == findings(source(f"{pair}def run(): ...\nrun()")) == []
    assert findings(source(f"@register\n{pair}loss.backward()")) != []
    method = "class A{}:\n    def {}(self, o):\n        group['lr'] = 0.1 * hvd.size()\nloss.backward()"
    assert findings(source(method.format("", "first"))) == []
    assert findings(source(f"{method.format('', 'first')}\nA().first(o)")) != []
    assert findings(source(method.format("(Base)", "first"))) != []
    assert findings(source(method.format("", "__call__"))) != []
    assert findings(source(f"{rate.format('main')}loss.backward()")) != []
    assert [each.level for each in findings(source("def f():\n    hvd.nothing()\nloss.backward()"))] == ["unsupported"]


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        ("hvd.local_size()", "number of ranks per host,"),
        ("hvd.cross_size()", "number of hosts,"),
        ("hvd.size()", "number of ranks,"),
        ("hvd.local_size() * hvd.cross_size()", "number of ranks,"),
    ],
)
def test_the_finding_for_a_scaled_learning_rate_names_the_factor(factor, words):
    (found,) = BY_NAME["rate_times_size"](source(f"n = {factor}\ntorch.optim.SGD(p, lr=0.1 * n)"))
    assert words in found.message


def test_the_finding_says_whether_norms_or_values_are_clipped():
    for clip, word in [("clip_grad_norm_", "norm;"), ("clip_grad_value_", "values;")]:
        (found,) = BY_NAME["clip_before_synchronize"](source(f"{WRAP}loss.backward()\n{clip}(p, 1)\noptimizer.step()"))
        assert f"by its own {word}" in found.message


def test_only_a_broadcast_after_wrapping_has_a_finding_that_names_the_optimizer_state():
    call, wrap = "hvd.broadcast_optimizer_state(o, 0)\n", "o = hvd.DistributedOptimizer(o)\n"
    make = "o = torch.optim.AdamW(p)\n"
    in_function = f"{make}def start():\n    x = hvd.DistributedOptimizer(y)\n{call}start()"
    (unknown,) = BY_NAME["optimizer_state"](source(in_function))
    assert "may change the weights" in unknown.message
    (before,) = BY_NAME["optimizer_state"](source(make + call + wrap))
    (after,) = BY_NAME["optimizer_state"](source(make + wrap + call))
    assert "may change its state or the weights" in after.message
    assert "may change the weights" in before.message


CLEAN = """
import torch
import horovod.torch as hvd

hvd.init()
model = Net()
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
scaler = torch.amp.GradScaler()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
sampler = torch.utils.data.DistributedSampler(train_data, num_replicas=hvd.size(), rank=hvd.rank())
loader = torch.utils.data.DataLoader(train_data, sampler=sampler)
val_loader = torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(hvd.rank(), len(data), hvd.size())))


def evaluate():
    model.eval()
    right = torch.zeros(2)
    for x, y in val_loader:
        right += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    right = hvd.allreduce(right, op=hvd.Sum, name="right")
    return right[0] / right[1]


for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(model(x, y)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    accuracy = evaluate()
    if hvd.rank() == 0:
        print(accuracy)
        torch.save(model.state_dict(), "model.pt")
"""


@pytest.mark.parametrize(
    ("test", "branch_without_horovod"),
    [
        ("args.horovod", "else"),
        ("not args.horovod", "if"),
        ("hvd.size() > 1", "else"),
        ("hvd.size() == 1", "if"),
        ("backend == 'horovod'", "else"),
        ("hvd is None or args.slow", "neither"),
        ("HAVE_HVD and args.fast", "neither"),
        ("args.no_horovod", "if"),
        ("many", "else"),
        ("(several := hvd.size() > 1)", "else"),
    ],
)
def test_code_that_runs_without_horovod_has_no_findings(test, branch_without_horovod):
    lines = ["many = hvd.size() > 1", WRAP.strip(), "def step(model):", "    model().backward()", f"    if {test}:"]
    arm = ["        clip_grad_norm_(p, 1)", "        optimizer.step()"]
    found = findings(source("\n".join([*lines, *arm, "    else:", *arm])))
    clips = [finding.line for finding in found if "clipped" in finding.message]
    assert clips == {"else": [8], "if": [11], "neither": [8, 11]}[branch_without_horovod]


def test_a_case_that_runs_without_horovod_has_no_findings():
    cases = "".join(f"    case {name}:\n        torch.save(x, 'x')\n" for name in ("'horovod'", "'ddp' | None", "_"))
    found = findings(source(f"hvd.init()\nmatch args.backend:\n{cases}"))
    assert [finding.line for finding in found] == [6]


def test_a_match_with_more_than_a_thousand_cases_is_read():
    cases = "".join(f"    case {number}:\n        print({number})\n" for number in range(1200))
    assert not findings(source(f"hvd.init()\nmatch hvd.rank():\n{cases}"))


def test_spark_driver_code_has_no_findings_about_ranks():
    template = (
        "{}data = torch.utils.data.TensorDataset(x)\n{}loader = torch.utils.data.DataLoader(data, 9, True)\n"
        "{}model.cuda()\n{}torch.save(model, 'x')\n"
    )
    driver = "from pyspark.sql import SparkSession\n" + template.format("", "", "", "")
    ranks = "def run():\n    hvd.init()\n    " + WRAP + "    hvd.broadcast_parameters(model.state_dict(), 0)\n"
    lines = [finding.line for finding in findings(source(driver + ranks + template.format(*["    "] * 4) + "run()"))]
    assert lines == [13, 14, 15]


def test_a_branch_that_returns_without_horovod_has_no_findings():
    start = "def train():\n    if not args.horovod:\n        torch.save(x, 'x')\n        return\n"
    found = findings(source(f"hvd.init()\n{start}    torch.save(x, 'x')\ntrain()"))
    assert [finding.line for finding in found] == [8]


@pytest.mark.parametrize(
    "code",
    [
        "if False:\n    torch.save(x, 'x')",
        "while True:\n    break\n    torch.save(x, 'x')",
        "def f():\n    if args.slow:\n        return 1\n    else:\n        raise ValueError\n    torch.save(x, 'x')\nf()",
        "def f():\n    with open('y') as file:\n        return 1\n    torch.save(x, 'x')\nf()",
    ],
)
def test_code_that_never_runs_has_no_findings(code):
    assert findings(source(f"hvd.init()\n{code}")) == []
    lines = code.replace("False", "x").replace("    else:\n        raise ValueError\n", "")
    lines = lines.replace("    break\n", "").replace("        return 1\n    torch", "        y = 1\n    torch")
    assert len(findings(source(f"hvd.init()\n{lines}"))) == 1


@pytest.mark.parametrize("operator", [" or ", " + "])
def test_a_condition_of_several_hundred_terms_is_read(operator):
    terms = operator.join(["x"] * 400)
    found = findings(source(f"hvd.init()\nif {terms}:\n    torch.save(x, 'x')\nelse:\n    hvd.allreduce(x, name='x')"))
    assert [finding.line for finding in found] == [5, 7]


def test_arguments_that_horovod_run_refuses_have_findings_of_level_unsupported():
    head = "import horovod\n"
    for argument in RUN_UNSUPPORTED:
        levels = [found.level for found in findings(source(f"{head}horovod.run(f, {argument}={argument})"))]
        assert levels == ["unsupported"], argument
        assert [each.level for each in findings(source(f"{head}horovod.run(f, {argument}=None)"))] == ["differs"]
    for hosts, level in [("localhost:4", "differs"), ("localhost:1,127.0.0.1:1", "differs"), ("a:2", "unsupported")]:
        assert [each.level for each in findings(source(f"{head}horovod.run(f, hosts={hosts!r})"))] == [level]


def test_a_script_without_mistakes_has_only_findings_of_level_differs(tmp_path, capsys):
    script = tmp_path / "clean.py"
    script.write_text(CLEAN)
    assert check([str(script)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 file read: 1 differs"
    assert {finding.level for finding in findings(Source(CLEAN))} == {"differs"}


def test_findings_are_printed_in_line_order(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import horovod.torch as hvd\nop = hvd.Adasum\nhvd.nothing()\nhvd.allreduce(x)\nhvd.nothing()\n")
    assert check([str(script)]) == 1
    *lines, summary = capsys.readouterr().out.splitlines()
    assert [line.partition("]")[0] + "]" for line in lines] == [
        f"{script}:{number}: [{level}]" for number, level in [(2, "differs"), (3, "unsupported"), (4, "trap")]
    ]
    assert summary == "1 file read: 1 trap, 1 unsupported, 1 differs; --fix repairs 1 of them"


def test_a_wrapped_optimizer_of_one_file_is_recognized_in_all_given_files(tmp_path, capsys):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(f"import horovod.torch as hvd\n{WRAP}")
    other.write_text("def step(optimizer):\n    loss.backward()\n    scaler.step(optimizer)\n")
    assert check([str(other)]) == 0
    assert "no use of Horovod" in capsys.readouterr().out
    assert check([str(one), str(other)]) == 1
    assert f"{other}:3: [trap]" in capsys.readouterr().out
    other.write_text("def step(optimizer):\n    for x in all: model(x).backward()\n    optimizer.step()\n")
    assert check([str(one), str(other)]) == 1
    out = capsys.readouterr().out
    assert f"{other}:3: [trap] several backward passes" in out
    assert f"{one}:2: [trap] each rank starts with its own weights" in out
    other.write_text(
        "import horovod.torch as hvd\ndef start(model):\n    hvd.broadcast_parameters(model.state_dict(), 0)\n"
    )
    assert check([str(one), str(other)]) == 0


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("ccl_built", "is False"),
        ("ddl_built", "is False"),
        ("mpi_enabled", "is False"),
        ("gloo_built", "is True"),
        ("gloo_enabled", "is True after init()"),
        ("cuda_built", "describes torch's build"),
    ],
)
def test_a_finding_on_a_build_says_what_the_function_returns(name, answer):
    (finding,) = BY_NAME["branch_on_build"](source(f"if hvd.{name}():\n    pass"))
    assert finding.message.startswith(f"{name}() {answer}")
    if answer in ("is False", "is True"):
        assert answer == f"is {getattr(import_module('dualtrain.hvd'), name)()}"


CALLS = ["train(m, optimizer)", "train(m, opt=optimizer)", "Loop(optimizer)", "copy = optimizer\ntrain(m, copy)"]


@pytest.mark.parametrize("call", CALLS)
def test_an_optimizer_is_followed_into_functions_of_other_files(call, tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(f"import horovod.torch as hvd\n{WRAP}\n{call}\n")
    other.write_text(
        "def train(model, opt):\n    loss.backward()\n    clip_grad_norm_(model)\n    opt.step()\n"
        "class Loop:\n    def __init__(self, inner):\n        self.held = inner\n"
        "    def train_held(self):\n        loss.backward()\n        clip_grad_norm_(model)\n        self.held.step()\n"
    )
    sources = [source for _, source in parse_scripts([str(one), str(other)]).values()]
    line = 10 if "Loop" in call else 3
    assert [found.line for found in BY_NAME["clip_before_synchronize"](sources[1])] == [line]


HELPERS = (
    "import horovod.torch as hvd\n"
    "def start():\n    hvd.init()\n    rank = hvd.rank()\n    return rank, hvd.size()\n"
    "def is_main():\n    return hvd.rank() == 0\n"
    "def world():\n    if lib.enabled:\n        return hvd.size()\n    return 1\n"
    "def mean(x):\n    if world() == 1:\n        return x\n    return hvd.allreduce(x)\n"
)


@pytest.mark.parametrize(
    ("rule", "code", "count"),
    [
        ("collective_on_some_ranks", "if is_main():\n    mean(x)", 1),
        ("collective_on_some_ranks", "def validate():\n    return own.mean(x)\nif own.is_main():\n    validate()", 1),
        ("collective_on_some_ranks", "if main():\n    mean(x)", 1),
        ("collective_on_some_ranks", "rank, size = start()\nif rank == 0:\n    hvd.barrier()", 1),
        ("collective_on_some_ranks", "rank, size = start()\nif size == 0:\n    hvd.barrier()", 0),
        ("collective_on_some_ranks", "rank, size = job.start()\nif rank == 0:\n    hvd.barrier()", 0),
        ("collective_on_some_ranks", "if is_main():\n    np.mean(x)", 0),
        ("rate_times_size", "rank, size = start()\no = SGD(p, lr=0.1 * size)", 1),
        ("rate_times_size", "o = SGD(p, lr=0.1 * own.world())", 1),
        ("rate_times_size", "rank, size = start()\no = SGD(p, lr=0.1 * rank)", 0),
    ],
)
def test_functions_of_other_files_that_call_horovod_are_followed(rule, code, count, tmp_path):
    imports = "import numpy as np\nfrom . import own\nfrom .own import is_main, mean, start\n"
    texts = {"train.py": f"{imports}from .own import is_main as main\n", "own.py": HELPERS}
    texts["train.py"] += f"import horovod.torch as hvd\n{WRAP}{code}\n"
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    parsed = parse_scripts([str(tmp_path / name) for name in texts])
    assert len(list(BY_NAME[rule](parsed[str(tmp_path / "train.py")][1]))) == count
    if count:  # the functions may also be in the same file
        one_file = texts["own.py"] + texts["train.py"].replace("own.mean", "mean").replace("own.world", "world")
        one_file = one_file.replace("own.is_main", "is_main").replace("if main()", "if is_main()").replace(imports, "")
        assert len(list(BY_NAME[rule](Source(one_file)))) == count


@pytest.mark.parametrize("order", list(permutations(["main.py", "util.py", "places.py"])))
def test_the_order_of_the_files_does_not_change_what_is_found(order, tmp_path):
    head = "import horovod.torch as hvd\n"
    texts = {
        "main.py": f"{head}from util import is_main\n{WRAP}if is_main():\n    hvd.allreduce(x)\n",
        "util.py": f"{head}from places import get_rank\ndef is_main():\n    return get_rank() == 0\n",
        "places.py": f"{head}def get_rank():\n    return hvd.rank()\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    parsed = parse_scripts([str(tmp_path / name) for name in order])
    found = {name: list(BY_NAME["collective_on_some_ranks"](parsed[str(tmp_path / name)][1])) for name in order}
    assert [len(found[name]) for name in texts] == [1, 0, 0]


def test_a_plain_optimizer_with_the_name_of_a_wrapped_argument_has_no_finding(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(f"import horovod.torch as hvd\n{WRAP}\ntrain(m, optimizer)\n")
    other.write_text(
        "import torch\ndef train(model, opt):\n    opt.step()\ndef pretrain(model):\n    opt = torch.optim.Adam(model)\n"
        "    loss.backward()\n    clip_grad_norm_(model)\n    opt.step()\n"
    )
    sources = [source for _, source in parse_scripts([str(one), str(other)]).values()]
    assert list(BY_NAME["clip_before_synchronize"](sources[1])) == []


@pytest.mark.parametrize("caller", ["one", "other"])
def test_a_training_loader_in_a_function_that_is_called_has_a_finding(caller, tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    loader = "def make():\n    data = Data()\n    return torch.utils.data.DataLoader(data, shuffle=True)\n"
    sampler = "s = torch.utils.data.DistributedSampler(test, hvd.size(), hvd.rank(), shuffle=False)\n"
    loop = "for batch in make():\n    pass\n"
    one.write_text(f"import torch\nimport horovod.torch as hvd\n{WRAP}\n{loader}{sampler}{loop * (caller == 'one')}")
    other.write_text(f"from one import make\n{loop * (caller == 'other')}")
    source = parse_scripts([str(one), str(other)])[str(one)][1]
    (finding,) = BY_NAME["every_rank_reads_all"](source)
    assert source.text.splitlines()[finding.line - 1].strip().startswith("return torch.utils.data.DataLoader")


AUGMENTED = "import random\nclass Data:\n    def __getitem__(self, i):\n        return random.random()\nhvd.allreduce_(g)\n"


@pytest.mark.parametrize(
    "snippet",
    [
        # A method that passes the seed on to a method of the same name.
        "class Env:\n    def seed(self, seed):\n        random.seed(seed)\n        self.inner.seed(seed)",
        "class One:\n    def __init__(self, seed):\n        random.seed(seed)\n"
        "class Two(One):\n    def __init__(self, seed):\n        super().__init__(seed=seed)\n        random.seed(seed)",
        # A caller makes the seed depend on the rank.
        "def main(offset):\n    again(1 + offset)\ndef again(seed):\n    random.seed(seed)\nmain(hvd.rank())",
        "def main(offset):\n    random.seed(1 + offset)\nmain(hvd.rank())",
    ],
)
def test_seeds_that_may_depend_on_the_rank_have_no_findings(snippet):
    assert list(BY_NAME["same_random_numbers"](source(f"{AUGMENTED}loss.backward()\n{snippet}"))) == []


def test_checking_a_folder_reads_only_its_files_that_import_horovod(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    (tmp_path / ".venv").mkdir()
    script = "import horovod.torch as hvd\nhvd.allreduce(x)\n"
    for name in ("b.py", "inner/a.py", ".venv/hidden.py"):
        (tmp_path / name).write_text(script)
    (tmp_path / "other.py").write_text("import torch\n")
    (tmp_path / "old.py").write_text("import horovod.torch\nprint 1\n")
    assert check([str(tmp_path)]) == 1
    *found, skipped, last = capsys.readouterr().out.splitlines()
    lines = [line.partition(": ")[0] for line in found if "[trap]" in line]
    assert lines == [f"{tmp_path}/b.py:2", f"{tmp_path}/inner/a.py:2"]
    assert skipped == (f"2 files skipped: 1 without an import of horovod and 1 that cannot be read ({tmp_path}/old.py)")
    assert last == "2 files read: 2 traps; --fix repairs 2 of them"


def test_a_model_is_compared_with_the_optimizers_of_all_files(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text(
        "import torch\nfrom two import wrap\nmodel = torch.nn.Linear(1, 1)\noptimizer = wrap(model)\nmodel(x).backward()\n"
        "for p in model.parameters():\n    p.grad.mul_(2)\noptimizer.step()\n"
    )
    two.write_text(f"import horovod.torch as hvd\ndef wrap(model):\n    {WRAP}    return optimizer\n")
    found = BY_NAME["clip_before_synchronize"](parse_scripts([str(one), str(two)])[str(one)][1])
    assert [finding.line for finding in found] == [7]


@pytest.mark.parametrize(
    "line",
    [
        "import torch, numpy as np, horovod.torch as hvd",
        "from dualtrain import hvd",
        "from dualtrain import hvd as torch",
        "from dualtrain import (\n    UserError,  # an error\n    hvd,\n)",
        "import os; import dualtrain.hvd as hvd",
        "try: import horovod.torch as hvd\nexcept ImportError: hvd = None",
        "import os\rimport horovod.torch as hvd\r",
        "import os, \\\n    horovod.torch as hvd",
        "def load():\n    return importlib.import_module('horovod.torch')",
        "hvd: object = import_module(\n    'horovod.torch')",
        "if hvd := import_module('horovod.torch'):\n    pass",
    ],
)
def test_checking_a_folder_reads_files_with_any_form_of_the_import(tmp_path, capsys, line):
    (tmp_path / "script.py").write_text(f"{line}\n")
    (tmp_path / "other.py").write_text("import torch, numpy  # not horovod\nfrom dualtrain import connect  # not hvd\n")
    assert check([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1 file skipped: 1 without an import of horovod",
        "1 file read: nothing found",
    ]


def test_a_file_that_is_named_and_in_a_folder_is_read_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import horovod.torch as hvd\nhvd.allreduce(x)\n")
    assert check(["script.py", ".", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 file read: 1 trap; --fix repairs 1 of them"


def test_checking_a_large_folder_prints_the_folder_that_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(folders, "_PROGRESS_PERIOD", 0)
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    assert check([str(tmp_path)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"reading {tmp_path / 'inner'}"


def test_a_folder_without_horovod_has_no_findings(tmp_path, capsys):
    (tmp_path / "other.py").write_text("import torch\n")
    assert check([str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == ["1 file skipped: 1 without an import of horovod", "0 files read: no use of Horovod found"]


def test_a_folder_without_python_files_is_refused(tmp_path, capsys):
    assert check([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{str(tmp_path)!r} has no readable Python file" in err


def test_folders_that_cannot_be_read_are_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "script.py").write_text("import horovod.torch as hvd\n")
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.scandir", refuse_to_scan(str(tmp_path / "closed"), os.scandir))
    assert check([str(tmp_path)]) == 0
    assert f"1 that cannot be read ({tmp_path}/closed)" in capsys.readouterr().out


def refuse_to_scan(folder, scandir):
    """Return a ``scandir`` that fails for ``folder``. File permissions would not stop root."""

    def scan(path):
        if path == folder:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    return scan


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a b\n", ":1 is not valid Python"),
        (b"a\0b\n", ".py is not valid Python"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_file_that_is_not_python_is_refused(tmp_path, content, words, capsys):
    script = tmp_path / "script.py"
    script.write_bytes(content)
    assert check([str(script)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize("option", ["--check", "--fix"])
def test_an_interrupt_while_scripts_are_read_prints_one_line(option, tmp_path, monkeypatch, capsys):
    def interrupt(text):
        raise KeyboardInterrupt

    (tmp_path / "script.py").write_text("import horovod.torch as hvd\n")
    monkeypatch.setattr("dualtrain.horovodize.script_file.Source", interrupt)
    assert main([option, str(tmp_path / "script.py")]) == 130
    assert capsys.readouterr() == ("", "dualtrain: error: interrupted\n")


def test_check_does_not_import_torch(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CLEAN)
    program = f"import sys; from dualtrain.horovodize.__main__ import main; main(['--check', {str(script)!r}])"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}; assert 'torch' not in sys.modules and 'dualtrain.hvd' not in sys.modules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
