"""Repairs of Horovod scripts: changed lines, unchanged bytes, and remaining findings."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from dualtrain.horovodize.__main__ import main
from dualtrain.horovodize.check import findings
from dualtrain.horovodize.edits import Layout
from dualtrain.horovodize.fix import repair
from dualtrain.horovodize.source import Source

HEAD = "import torch\nimport dualtrain.hvd as hvd\nhvd.init()\n"
WRAP = "optimizer = hvd.DistributedOptimizer(base, model.named_parameters())\n"
BROADCAST = "hvd.broadcast_parameters(model.state_dict(), 0)"
MODELS = "d, model = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
START = f"{HEAD}{WRAP}hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"

#: (script, script after --fix or None if nothing is repaired). Both scripts are appended to START.
REPAIRS = [
    (
        "for x in data:\n    loss(x).backward()\n    # Clip.\n    clip_grad_norm_(p, 1)\n    optimizer.step()  # go\n",
        "for x in data:\n    loss(x).backward()\n    optimizer.synchronize()\n    # Clip.\n    clip_grad_norm_(p, 1)\n"
        "    with optimizer.skip_synchronize():\n        optimizer.step()  # go\n",
    ),
    (
        "def step(self):\n  loss.backward()\n  if clip:\n    for g in groups:\n      clip_grad_norm_(g, 1)\n"
        "  return self.optimizer.step()\n",
        None,  # not repaired: the step is part of another statement
    ),
    (
        "for x in data:\n\tscaler.scale(loss).backward()\n\tscaler.unscale_(optimizer)\n\tif clip: clip_grad_norm_(p, 1)\n"
        "\tscaler.step(optimizer)\n",
        "for x in data:\n\tscaler.scale(loss).backward()\n\toptimizer.synchronize()\n\tscaler.unscale_(optimizer)\n"
        "\tif clip: clip_grad_norm_(p, 1)\n\twith optimizer.skip_synchronize():\n\t\tscaler.step(optimizer)\n",
    ),
    (
        "for x in data:\n    loss(x).backward()\n    for p in params:\n        p.grad.mul_(2)\n    optimizer.step()\n",
        "for x in data:\n    loss(x).backward()\n    optimizer.synchronize()\n    for p in params:\n"
        "        p.grad.mul_(2)\n    with optimizer.skip_synchronize():\n        optimizer.step()\n",
    ),
    (
        "for x in data:\n    loss(x).backward()\n    with optimizer.skip_synchronize():  # go\n        optimizer.step()\n",
        "for x in data:\n    loss(x).backward()\n    optimizer.synchronize()\n"
        "    with optimizer.skip_synchronize():  # go\n        optimizer.step()\n",
    ),
    (
        "for x in data:\n    loss(x).backward()\n    clip_grad_norm_(p, 1)\n    with optimizer.skip_synchronize():\n"
        "        optimizer.step()\n",
        "for x in data:\n    loss(x).backward()\n    optimizer.synchronize()\n    clip_grad_norm_(p, 1)\n"
        "    with optimizer.skip_synchronize():\n        optimizer.step()\n",
    ),
    (
        "loss.backward()\nwith optimizer.skip_synchronize():\n    clip_grad_norm_(p, 1)\n    optimizer.step()\n",
        "loss.backward()\nwith optimizer.skip_synchronize():\n    optimizer.synchronize()\n    clip_grad_norm_(p, 1)\n"
        "    optimizer.step()\n",
    ),
    (
        "loss.backward()\nclip_grad_norm_(p, 1)\nwith other.skip_synchronize():\n    optimizer.step()\n",
        None,  # not repaired: the block is of another optimizer, so this step averages gradients
    ),
    (
        "loss.backward()\nclip_grad_norm_(p, 1)\noptimizer.synchronize()\nwith optimizer.skip_synchronize():\n"
        "    optimizer.step()\n",
        None,  # not repaired: a second synchronize() would average again
    ),
    (
        "def average():\n    optimizer.synchronize()\nloss.backward()\nclip_grad_norm_(p, 1)\naverage()\n"
        "with optimizer.skip_synchronize():\n    optimizer.step()\n",
        None,  # not repaired: average() calls synchronize()
    ),
    (
        "loss.backward()\nclip_grad_norm_(p, 1)\nwith optimizer.skip_synchronize():\n    optimizer.step(closure)\n",
        None,  # not repaired: the closure makes new gradients
    ),
    ("loss.backward()\nwith optimizer.skip_synchronize():\n    optimizer.step(closure)\n", None),  # likewise
    ("for x in data: loss.backward(); clip_grad_norm_(p, 1); optimizer.step()\n", None),
    *(  # not repaired: another call passes an optimizer that is not wrapped
        (
            "def fit(optimizer):\n    loss.backward()\n    clip_grad_norm_(p, 1)\n    optimizer.step()\n"
            f"fit(optimizer)\nfit({other})\n",
            None,
        )
        for other in ("plain", "optimizer=plain", "optimizers[0]", "torch.optim.SGD(p, lr=1)")
    ),
    (
        "loss.backward()\noptimizer.synchronize()\nnorm = (\n    optimizer.step())\n",
        "loss.backward()\noptimizer.synchronize()\nwith optimizer.skip_synchronize():\n    norm = (\n"
        "        optimizer.step())\n",
    ),
    (
        "my_optimizer = hvd.DistributedOptimizer(other, others)\nloss.backward()\nclip_grad_norm_(p, 1)\n"
        "optimizer.step()\nmy_optimizer.step()\n",
        "my_optimizer = hvd.DistributedOptimizer(other, others)\nloss.backward()\nmy_optimizer.synchronize()\n"
        "optimizer.synchronize()\nclip_grad_norm_(p, 1)\nwith optimizer.skip_synchronize():\n    optimizer.step()\n"
        "with my_optimizer.skip_synchronize():\n    my_optimizer.step()\n",
    ),
    (
        "with amp():\n    loss.backward()\n    clip_grad_norm_(p, 1)\noptimizer.step()\n",
        None,  # not repaired: synchronize() before the block would come before backward
    ),
    ("torch.cuda.set_device( hvd.rank() )\n", "torch.cuda.set_device( hvd.local_rank() )\n"),
    (  # the function returns dualtrain.hvd, which is not a stub
        "def get():\n    import dualtrain.hvd as hvd\n    return hvd\nhvd = get()\ntorch.cuda.set_device(hvd.rank())\n",
        "def get():\n    import dualtrain.hvd as hvd\n    return hvd\nhvd = get()\n"
        "torch.cuda.set_device(hvd.local_rank())\n",
    ),
    ("r = hvd.rank()\nd = 'cuda:%d' % r\n", "r = hvd.rank()\nd = 'cuda:%d' % hvd.local_rank()\n"),
    ("device = hvd.rank()\nm = Net(device=device)\nm.to(device)\n", None),
    (
        "s = torch.utils.data.DistributedSampler(\n    data,  # all\n    shuffle=False,\n)\n",
        "s = torch.utils.data.DistributedSampler(\n    data,  # all\n    shuffle=False,\n    num_replicas=hvd.size(),\n"
        "    rank=hvd.rank(),\n)\n",
    ),
    ("s = torch.utils.data.DistributedSampler((data))\n", None),
    (
        "s = torch.utils.data.DistributedSampler(data, 2, rank=hvd.local_rank(), shuffle=False)\n",
        "s = torch.utils.data.DistributedSampler(data, 2, rank=hvd.rank(), shuffle=False)\n",
    ),
    (
        "train = torch.utils.data.DataLoader(data, shuffle=True)\nfor epoch in range(9):\n    for x in train:\n"
        "        pass\n",
        "train_sampler = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())\n"
        "train = torch.utils.data.DataLoader(data, sampler=train_sampler)\nfor epoch in range(9):\n"
        "    train_sampler.set_epoch(epoch)\n    for x in train:\n        pass\n",
    ),
    (
        "def load():\n    return torch.utils.data.DataLoader(data, shuffle=True)\n",
        None,  # not repaired: the loop over epochs cannot use a sampler that is local to this function
    ),
    (
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\ndef run():\n    for e in range(3): go()\n",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\ndef run():\n    for e in range(3): s.set_epoch(e); go()\n",
    ),
    *(
        (
            f"s = torch.utils.data.DistributedSampler(d, 2, r)\nfor {loop}:\n    go()\n",
            f"s = torch.utils.data.DistributedSampler(d, 2, r)\nfor {loop}:\n    s.set_epoch({epoch})\n    go()\n",
        )
        for loop, epoch in (("i, e in enumerate(range(2, 9))", "e"), ("_ in range(args.epochs)", "_"))
    ),
    (  # a loop that does not train does not count as a loop over epochs
        "s = torch.utils.data.DistributedSampler(d, 2, r)\nfor e in range(EPOCHS):\n    go()\n"
        "for i in range(EPOCHS): print(i)\n",
        "s = torch.utils.data.DistributedSampler(d, 2, r)\nfor e in range(EPOCHS):\n    s.set_epoch(e)\n    go()\n"
        "for i in range(EPOCHS): print(i)\n",
    ),
    ("s = torch.utils.data.DistributedSampler(d, 2, r)\nfor e in range(3): go()\ns = None\n", None),
    (  # not repaired: ``for e`` is not the loop over epochs, since the ``while`` loop reads the samples
        "s = torch.utils.data.DistributedSampler(d, 2, r)\nl = torch.utils.data.DataLoader(d, sampler=s)\n"
        "def show(e):\n    print(e)\nfor e in range(3):\n    show(e)\nwhile go():\n    for x in l:\n        step(x)\n",
        None,
    ),
    (
        "a, b = torch.utils.data.random_split(data, [9, 1])\n",
        "a, b = torch.utils.data.random_split(data, [9, 1], generator=torch.Generator().manual_seed(0))\n",
    ),
    ("for fold in range(5):\n    a, b = torch.utils.data.random_split(data, [9, 1])\n", None),  # the splits must differ
    (
        "def split():\n    return torch.utils.data.random_split(data, [9, 1])\nfor fold in range(5):\n    fit(split())\n",
        None,
    ),
    (
        "for e in range(2):\n  torch.save({'a': 1,\n    'b': '''x\ny'''}, 'file')\n",
        "for e in range(2):\n  if hvd.rank() == 0:\n    torch.save({'a': 1,\n    'b': '''x\ny'''}, 'file')\n",
    ),
    ("torch.save(x, best)\nx = torch.load(best)\n", None),  # not repaired: every rank reads the file
    *(
        (f"import os, shutil\ntorch.save(x, best)\n{line}\n", None)
        for line in (
            "shutil.copyfile(best, 'x')",
            "os.replace(best, 'x')",
            "best.rename('x')",
            "best.replace('x')",
            "model.load(best)",
            "model = load_model(best)",
            "model = Net.from_pretrained(best)",
        )
    ),
    (
        "torch.save(x, best)\nprint(best.replace('a', 'b'))\n",
        "if hvd.rank() == 0:\n    torch.save(x, best)\nprint(best.replace('a', 'b'))\n",
    ),
    (
        "model.load_state_dict(torch.load('old'))\ntorch.save(x, best)\n",
        "model.load_state_dict(torch.load('old'))\nif hvd.rank() == 0:\n    torch.save(x, best)\n",
    ),
    (  # the file that every rank loads is not the file that is saved
        "opt = parser.parse_args()\ny = torch.load(opt.old)\ntorch.save(x, opt.new)\n",
        "opt = parser.parse_args()\ny = torch.load(opt.old)\nif hvd.rank() == 0:\n    torch.save(x, opt.new)\n",
    ),
    ("ok = torch.save(x, 'x')\n", None),
    ("def save(path, hvd=False):\n    torch.save(x, path)\nsave('x', hvd=True)\n", None),  # hvd is not the module
    (  # the condition includes open(): otherwise, another rank's open() may erase what rank 0 has written
        "with open(p, 'wb') as f:  # best\n    torch.save(x, f)\n",
        "if hvd.rank() == 0:\n    with open(p, 'wb') as f:  # best\n        torch.save(x, f)\n",
    ),
    ("with open(p, 'wb') as f:\n    f.write(x)\n    torch.save(x, f)\n", None),
    ("f = open(p, 'wb')\ntorch.save(x, f)\n", None),
    ("hvd.allreduce(total, name='t')\n", "hvd.allreduce_(total, name='t')\n"),
    ("def f(value):\n    hvd.allreduce(value)\n", None),  # not repaired: the tensor is the caller's
    ("hvd.allgather(total, name='t')\n", None),
    *(  # not repaired: the gradient of the loss would change
        (f"{before}loss = model(x).sqrt()\nhvd.{call}\n{after}\noptimizer.step()\n", None)
        for before, call, after in (
            ("", "allreduce(loss)", "loss.backward()"),
            ("", "allreduce(loss)", "scaler.scale(loss).backward()"),
            ("", "allreduce(loss)", "total = loss + other\n(total / 4).backward()"),
            ("def learn(loss):\n    loss.backward()\n", "allreduce(loss)", "learn(loss)"),
            ("", "broadcast(loss, 0)", "loss.backward()"),
        )
    ),
    (
        "hvd.broadcast(w, 0)\nloss = model(w)\nloss.backward()\noptimizer.step()\n",
        "hvd.broadcast_(w, 0)\nloss = model(w)\nloss.backward()\noptimizer.step()\n",
    ),
    (
        "loss.backward()\noptimizer.step()\nhvd.allreduce(loss)\nprint(loss)\n",
        "loss.backward()\noptimizer.step()\nhvd.allreduce_(loss)\nprint(loss)\n",
    ),
    ("hvd.allreduce_async_(x.grad)\n", "hvd.synchronize(hvd.allreduce_async_(x.grad))\n"),
    (
        "if args.clip:\n    hvd.shutdown()\ntorch.save(x, 'x')\n",
        None,  # not repaired: rank() after shutdown() would be a new finding
    ),
]


@pytest.mark.parametrize(("before", "after"), REPAIRS)
def test_a_script_is_repaired_as_expected_or_keeps_its_text_and_a_trap(before, after):
    result = repair(Source(START + before))
    assert result.source.text == START + (before if after is None else after)
    assert bool(result.fixed) == (after is not None)
    traps = [finding for finding in result.left if finding.level == "trap"]
    assert bool(traps) == (after is None)


ACCUMULATE = "    if i % args.n == 0: optimizer.step()\nargs = parse()\nf(args)\n"
WHOLE = [
    (f"{HEAD}{WRAP}", f"{HEAD}{WRAP}hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"),
    (
        f"{HEAD}from torchvision import transforms\ntorch.manual_seed(args.seed)\ntransforms.RandomCrop(3)\n"
        f"{START[len(HEAD) :]}",
        f"{HEAD}from torchvision import transforms\ntorch.manual_seed(args.seed + hvd.rank())\ntransforms.RandomCrop(3)\n"
        f"{START[len(HEAD) :]}",
    ),
    (  # the parameter ``args`` of ``f`` is not the module's variable ``args``
        f"{HEAD}def f(args):\n  {WRAP}  resume(model)\n  for i, x in d:\n    x.backward()\n{ACCUMULATE}",
        f"{HEAD}def f(args):\n  {WRAP[:-2]}, backward_passes_per_step=args.n)\n  resume(model)\n  for i, x in d:\n"
        f"    x.backward()\n{ACCUMULATE}",
    ),
    (  # the weights of both models are broadcast
        f"{HEAD}{MODELS}{WRAP}other = hvd.DistributedOptimizer(o, d.named_parameters())\n",
        f"{HEAD}{MODELS}{START[len(HEAD) :]}other = hvd.DistributedOptimizer(o, d.named_parameters())\n"
        "hvd.broadcast_parameters(d.state_dict(), root_rank=0)\n",
    ),
    (
        f"{START}def f(args):\n  for i, x in d:\n    x.backward()\n    if i % 4 == 0: optimizer.step()\n",
        f"{START.replace('())', '(), backward_passes_per_step=4)', 1)}def f(args):\n  for i, x in d:\n    x.backward()\n"
        "    if i % 4 == 0: optimizer.step()\n".replace("hvd.init(), backward_passes_per_step=4)", "hvd.init()"),
    ),
]


@pytest.mark.parametrize(("before", "after"), WHOLE)
def test_repairs_outside_of_the_training_step(before, after):
    assert repair(Source(before)).source.text == after


@pytest.mark.parametrize(
    "start",
    [
        f"{HEAD}if args.many:\n    {WRAP}",
        f"{HEAD}optimizer = hvd.DistributedOptimizer(base, op=hvd.Adasum)\n",
        f"{HEAD}if not args.horovod:\n    sys.exit(plain())\n{WRAP}",
        f"{HEAD}def wrap(optimizer):\n    if args.many:\n        {WRAP}    return optimizer\n",
        *(
            f"try:\n    import dualtrain.hvd as hvd\nexcept ImportError:\n    {stub}\nhvd.init()\n{WRAP}"
            for stub in ("import stub as hvd", "class hvd: ...", "hvd = Stub()", "hvd = stub")
        ),
        *(
            f"import dualtrain.hvd as h\n{assignment}\nhvd.init()\n{WRAP}"
            for assignment in ("hvd = h if many else Stub()", "hvd = h if many else stub", "hvd = stub if one else h")
        ),
        f"import dualtrain.hvd as h\nif many:\n    hvd = h\nelse:\n    hvd = stub\nhvd.init()\n{WRAP}",
    ],
)
def test_a_step_is_not_repaired_if_its_optimizer_may_lack_synchronize(start):
    text = f"{start}def step():\n    loss.backward()\n    clip_grad_norm_(p, 1)\n    optimizer.step()\n"
    result = repair(Source(text))
    assert result.source.text == text
    assert any("clipped" in finding.message for finding in result.left)


GUARDED = "try:\n        import horovod.keras\n    except ImportError:\n        pass\n"
#: (imports, imports after --fix). If --fix changes nothing, the second item is None if a finding says why,
#: and "" if Horovod is not imported.
IMPORTS = [
    (
        "try:\n    import horovod.torch as hvd\n    from horovod.common.util import gpu_available\nexcept: pass",
        "try:\n    import dualtrain.hvd as hvd\n    from dualtrain.hvd.util import gpu_available\nexcept: pass",
    ),
    ("try:\n    import horovod.torch as hvd\n    import horovod.tensorflow as tf\nexcept ImportError:\n    pass", None),
    *(
        (f"try:\n    {torch}{other}{end}", f"try:\n    {torch.replace('horovod.torch', 'dualtrain.hvd')}{other}{end}")
        for torch, other, end in (
            ("import horovod.torch as hvd\n    ", GUARDED, "finally:\n    pass"),
            ("import horovod.torch as hvd\n    ", GUARDED, "except ImportError:\n    pass"),
            ("import horovod.torch as hvd\n", "except ImportError:\n    raise\nelse:\n    ", GUARDED),
        )
    ),
    ("import os, horovod.torch as hvd  # é", "import os, dualtrain.hvd as hvd  # é"),
    ("from horovod.torch import (allreduce,\n  rank as r)", "from dualtrain.hvd import (allreduce,\n  rank as r)"),
    ("from horovod import torch as hvd", "from dualtrain import hvd as hvd"),
    ("from horovod import torch", "from dualtrain import hvd as torch"),
    (
        "import horovod.torch as hvd\nfrom horovod.torch.elastic import run\nfrom horovod.common.exceptions import E",
        "import dualtrain.hvd as hvd\nfrom dualtrain.hvd.elastic import run\nfrom dualtrain.hvd.exceptions import E",
    ),
    (  # the import in ``try`` is not changed, and the other import is changed nevertheless
        "try:\n    import horovod.tensorflow as x\nexcept ImportError: x = None\nimport horovod.torch as hvd",
        "try:\n    import horovod.tensorflow as x\nexcept ImportError: x = None\nimport dualtrain.hvd as hvd",
    ),
    ("import horovod.torch as hvd\nimport horovod.spark.keras", None),
    ("import horovod.torch as hvd\nfrom horovod.spark import run_elastic", None),
    (
        "import horovod.torch as hvd\nfrom horovod.spark import run\nfrom horovod.ray import RayExecutor",
        "import dualtrain.hvd as hvd\nfrom dualtrain.spark import run\nfrom dualtrain.ray import RayExecutor",
    ),
    *(  # not changed: without Horovod, the script might not call hvd.init(), so each rank would train alone
        (f"{check}\nimport horovod.torch as hvd", None)
        for check in (
            "try:\n    import horovod\nexcept ImportError: x = None",
            "x = importlib.util.find_spec('horovod') is not None",
            "x = importlib.util.find_spec(name='horovod') is not None",
            "x = is_package_available('horovod.torch')",
            "x = 'horovod' in sys.modules",
        )
    ),
    ("import horovod.torch\nhorovod.torch.rank()", None),
    ("import horovod . torch as hvd", None),
    ("import horovod \\\n  .torch as hvd", None),
    ("import horovod.torch as hvd\nimport ignite.metrics", None),
    (
        "parser.add_argument('horovod')\n"
        "hvd = importlib.import_module('horovod.torch')\nself.hvd = import_module(\"horovod.torch\")",
        "parser.add_argument('horovod')\n"
        "hvd = importlib.import_module('dualtrain.hvd')\nself.hvd = import_module(\"dualtrain.hvd\")",
    ),
    ('import importlib\nhvd = importlib.import_module("horovod" ".torch")', None),
    ("from .horovod import torch", ""),
]


@pytest.mark.parametrize(("before", "after"), IMPORTS)
def test_either_all_imports_of_horovod_change_or_none(before, after):
    result = repair(Source(before))
    assert result.source.text == (after or before)
    stays = [finding for finding in result.left if "import of Horovod is not changed" in finding.message]
    assert len(stays) == (after is None)


@pytest.mark.parametrize(
    ("imports", "words"),
    [
        ("import horovod.torch as hvd", "start the script with plain torchrun"),
        ("import horovod.torch as hvd\nfrom horovod.ray import RayExecutor", "start the script as one process"),
        ("import horovod.torch as hvd\nimport horovod.spark\nhorovod.spark.run(f)", "start the script as one process"),
        ("import horovod.torch as hvd\nimport ignite.metrics", "start the script with torchrun -m dualtrain.horovodize"),
        ("import horovod\nimport horovod.torch as hvd\nhorovod.run(f)", "one process: python -m dualtrain.horovodize"),
    ],
)
def test_the_findings_on_imports_say_how_the_script_is_started(imports, words):
    result = repair(Source(imports))
    found = [one.message for one in (*result.fixed, *result.left) if "import" in one.message and "script" in one.message]
    assert found
    assert all(words in message for message in found)


def test_a_file_that_another_file_of_the_program_loads_is_saved_by_every_rank(tmp_path):
    script, other = tmp_path / "script.py", tmp_path / "other.py"
    script.write_text(f"{START}torch.save(x, args.best)\n")
    other.write_text("import torch\ndef last(args):\n    return torch.load(args.best)\n")
    main(["--fix", str(script), str(other)])
    assert script.read_text() == f"{START}torch.save(x, args.best)\n"


@pytest.mark.parametrize(
    ("models", "broadcast", "repaired"),
    [
        ("model = torch.nn.Linear(1, 1).cuda()", BROADCAST, True),
        ("model = Net()\nloss = torch.nn.MSELoss()", BROADCAST, True),
        ("model = Net()\nteacher = Net().cuda()", BROADCAST, False),
        ("model, loader = timm.create_model(x), make()", BROADCAST, True),
        ("model = Net()\nold = timm.create_model(x)\nold.eval()", BROADCAST, False),
        ("model, other = Net(), torch.nn.Linear(1, 1)", BROADCAST, False),
        ("model = Net()\nprojection = torch.randn(3, 2)", BROADCAST, False),
        ("model = Net()\nnoise = torch.empty(3).normal_()", BROADCAST, False),
        ("model = Net()\nw = torch.empty(3)\nw.normal_()", BROADCAST, False),
        ("model = Net()\nw = torch.zeros(3)\ntorch.nn.init.normal_(w)", BROADCAST, False),
        ("model = Net()\nw = torch.nn.init.orthogonal_(torch.zeros(3, 3))", BROADCAST, False),
        ("model = Net()\nfor i in n:\n    w.append(torch.rand(1))", BROADCAST, False),
        ("model = Net()\nw = model.w\nw.normal_()\ntorch.nn.init.normal_(w)", BROADCAST, True),
        ("model = Net()\nfor x in d:\n    y = torch.rand(1)", BROADCAST, True),
        ("import numpy\nmodel = Net()\ny = numpy.random.rand(1)", BROADCAST, True),
        ("from a import L\nmodel = Net()\nloss = L(3).cuda()", BROADCAST, False),
        ("model = Net()", "if resume:\n    hvd.broadcast_parameters(model.state_dict(), 0)", False),
        ("model = Net()", "def f():\n    hvd.broadcast_parameters(model.state_dict(), 0)\nf()", True),
        (
            "model = Net()",
            "def f():\n    try: g()\n    except KeyError:\n        hvd.broadcast_parameters(model.state_dict(), 0)\nf()",
            False,
        ),
    ],
)
def test_seeds_stay_equal_if_they_make_the_weights_of_a_model_equal(models, broadcast, repaired):
    start = f"{HEAD}from torchvision import transforms\nclass Net(torch.nn.Module):\n    pass\ntorch.manual_seed(1)\n"
    text = repair(Source(f"{start}transforms.RandomCrop(3)\n{models}\n{WRAP}{broadcast}\n")).source.text
    assert ("torch.manual_seed(1 + hvd.rank())\n" in text) is repaired


@pytest.mark.parametrize(("line", "repaired"), [("", True), ("rank = rank()\n", False), ("for rank in n: go()\n", False)])
def test_no_repair_calls_a_name_that_may_hold_a_number(line, repaired):
    start = START.replace("import dualtrain.hvd as hvd", "from dualtrain.hvd import *").replace("hvd.", "")
    text = repair(Source(f"{start}{line}torch.save(x, 'x')\n")).source.text
    assert text.endswith("if rank() == 0:\n    torch.save(x, 'x')\n") is repaired


def test_no_repair_is_offered_for_a_block_with_lines_that_cannot_be_indented():
    block = "with open('x', 'wb') as f:\n    torch.save({'note': '''two\nlines'''}, f)\n"
    found = [one for one in findings(Source(START + block)) if "all ranks write" in one.message]
    assert found
    assert not any(one.edits for one in found)


def test_a_device_from_the_programs_own_rank_function_becomes_the_local_rank(tmp_path):
    (tmp_path / "ranks.py").write_text(f"{HEAD}def get_rank():\n    return hvd.rank()\n")
    script = tmp_path / "script.py"
    script.write_text(f"import ranks\n{HEAD}torch.cuda.set_device(ranks.get_rank())\n")
    assert main(["--fix", str(script), str(tmp_path / "ranks.py")]) == 0
    assert script.read_text().endswith("torch.cuda.set_device(hvd.local_rank())\n")


def test_a_change_of_the_imports_changes_no_other_finding():
    driver = (
        "import horovod.torch as hvd\nfrom horovod.ray import RayExecutor\ndef train(rate):\n    hvd.init()\n"
        "    base = torch.optim.SGD(model.parameters(), lr=rate)\n    hvd.DistributedOptimizer(base)\n"
        "rate = 0.1 * workers.size()\nRayExecutor(settings, min_workers=2).run(train, [rate])\n"
    )
    for text in (driver, "from horovod.ray import RayExecutor\nRayExecutor(settings, max_workers=4)\n"):
        source = Source(text)
        before = [finding for finding in findings(source) if not finding.edits]
        result = repair(source)
        assert "from dualtrain.ray import RayExecutor" in result.source.text
        assert result.left == before
        assert [finding.level for finding in before].count("unsupported") == 1


SCRIPT = f"""#!/usr/bin/env python
{HEAD.replace("dualtrain.hvd", "horovod.torch")}
torch.cuda.set_device(hvd.rank())
sampler = torch.utils.data.DistributedSampler(größe)
{WRAP}
for epoch in range(3):

    for x in torch.utils.data.DataLoader(größe, sampler=sampler):
        optimizer.zero_grad(); loss = "ü"
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # ß\f
        optimizer.step()
    torch.save(model.state_dict(), "päth")"""

FORMS = {
    "lf": SCRIPT.encode(),
    "crlf": SCRIPT.replace("\n", "\r\n").encode(),
    "cr": SCRIPT.replace("\n", "\r").encode(),
    "tabs": SCRIPT.replace("    ", "\t").encode(),
    "bom": b"\xef\xbb\xbf" + SCRIPT.encode(),
    "latin-1": SCRIPT.replace("python\n", "python\n# -*- coding: latin-1 -*-\n").encode("latin-1"),
    "two spaces": SCRIPT.replace("    ", "  ").encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_repairs_leave_all_other_bytes_of_a_script_unchanged(tmp_path, form, capsys):
    script = tmp_path / "script.py"
    data = FORMS[form]
    script.write_bytes(data)
    script.chmod(0o750)
    (tmp_path / "link.py").symlink_to("script.py")
    assert main(["--fix", str(tmp_path / "link.py")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 file read: nothing found; 7 fixed"
    fixed = script.read_bytes()
    end = b"\r\n" if form == "crlf" else b"\r" if form == "cr" else b"\n"
    unit = {"tabs": b"\t", "two spaces": b"  "}.get(form, b"    ")
    expected = (
        data.replace(b"horovod.torch", b"dualtrain.hvd")
        .replace(b"device(hvd.rank", b"device(hvd.local_rank")
        .replace(b"e)" + end + b"opt", b"e, num_replicas=hvd.size(), rank=hvd.rank())" + end + b"opt")
        .replace(b"rs())" + end, b"rs())" + end + b"hvd.broadcast_parameters(model.state_dict(), root_rank=0)" + end)
        .replace(end + end + unit, end + end + unit + b"sampler.set_epoch(epoch)" + end + unit)
        .replace(unit * 2 + b"torch.nn", unit * 2 + b"optimizer.synchronize()" + end + unit * 2 + b"torch.nn")
        .replace(
            unit * 2 + b"optimizer.step",
            unit * 2 + b"with optimizer.skip_synchronize():" + end + unit * 3 + b"optimizer.step",
        )
        .replace(unit + b"torch.save", unit + b"if hvd.rank() == 0:" + end + unit * 2 + b"torch.save")
    )
    assert fixed == expected
    assert (tmp_path / "link.py").is_symlink()
    assert script.stat().st_mode & 0o777 == 0o750
    assert main(["--fix", str(script)]) == 0
    assert capsys.readouterr().out == "1 file read: nothing found; 0 fixed\n"
    assert script.read_bytes() == fixed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "script.py"]


def test_pythons_warnings_about_a_script_are_not_printed(tmp_path, recwarn, capsys):
    script = tmp_path / "script.py"
    # Python 3.12 and newer warn about the escape sequence, too.
    script.write_text("import horovod.torch as hvd\nhvd.init()\nx = y()\nx is 1, '\\d'\nhvd.allreduce(x, name='x')\n")
    assert main(["--check", str(script)]) == 1
    assert main(["--fix", str(script)]) == 0
    assert capsys.readouterr().err == ""
    assert [each for each in recwarn if each.category is SyntaxWarning] == []


@pytest.mark.parametrize("form", ["lf", "crlf", "latin-1"])
def test_diff_prints_a_patch_and_writes_nothing(tmp_path, form, capfdbinary, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("needs git, which the Docker image of the tests does not have")
    script = tmp_path / "script.py"
    script.write_bytes(FORMS[form])
    monkeypatch.chdir(tmp_path)
    assert main(["--fix", "--diff", "script.py"]) == 0
    diff, report = capfdbinary.readouterr()
    assert script.read_bytes() == FORMS[form]
    assert b"7 would be fixed" in report
    subprocess.run(["git", "apply", "-p0", "--whitespace=nowarn", "-"], input=diff, check=True, timeout=60)
    patched = script.read_bytes()
    script.write_bytes(FORMS[form])
    main(["--fix", "script.py"])
    assert script.read_bytes() == patched


def test_lines_that_a_repair_removes_count_in_the_original_line_numbers(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(f"{START}torch.cuda.set_device(hvd.rank(\n\n))\ntorch.save(x, 'x')\nhvd.nothing()\n")
    assert main(["--fix", "--diff", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("] ")[0] for line in lines[:2]] == [f"{script}:6: [fixable", f"{script}:9: [fixable"]
    assert lines[2].startswith(f"{script}:10: [unsupported]")


def test_repairs_are_listed_with_the_original_line_numbers(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        f"{START}loss.backward()\nclip_grad_norm_(p, 1)\noptimizer.step()\ntorch.save(x, 'x')\nhvd.nothing()\n"
    )
    assert main(["--fix", "--diff", str(script)]) == 1
    assert f"\n{script}:10: [unsupported]" in capsys.readouterr().err  # the file is unchanged
    assert main(["--fix", str(script)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("] ")[0] for line in lines[:2]] == [f"{script}:7: [fixed", f"{script}:9: [fixed"]
    assert lines[2].startswith(f"{script}:13: [unsupported]")  # the line number in the repaired file
    assert lines[3] == "1 file read: 1 unsupported; 2 fixed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--fix was given no script"),
        (["--wrong", "good.py"], "unknown option '--wrong'"),
        (["good.py", "bad.py"], "bad.py:1 is not valid Python"),
        (["good.py", "none.py"], "cannot read the script 'none.py'"),
        (["good.py", "binary.py"], "is not text in UTF-8"),
        (["good.py", "hex.py"], "is not text in UTF-8, or in the encoding that its first lines declare"),
        (["good.py", "undefined.py"], "is not text in UTF-8, or in the encoding that its first lines declare"),
        (["good.py", "folder"], "cannot read the script 'folder'"),
        (["good.py", "deep.py"], "is not valid Python"),
        (["good.py", "iso.py"], "cannot be written again byte for byte in iso2022_jp"),
        (["good.py", "idna.py"], "cannot be written again byte for byte in idna"),
    ],
)
def test_bad_input_gives_an_error_of_one_line_and_changes_nothing(tmp_path, monkeypatch, arguments, words, capsys):
    monkeypatch.chdir(tmp_path)
    good = f"{START}torch.save(x, 'x')\n"
    Path("good.py").write_text(good)
    Path("bad.py").write_text("%matplotlib inline\n")
    Path("deep.py").write_text("(" * 5000)
    Path("binary.py").write_bytes(b"\x00\xff")
    Path("iso.py").write_bytes(b"# coding: iso2022_jp\nx = '\x1b(B'\n")
    for encoding in ("hex", "undefined", "idna"):
        Path(f"{encoding}.py").write_text(f"# coding: {encoding}\n{'x' * 64} = 1\n")
    Path("folder").mkdir()
    assert main(["--fix", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert Path("good.py").read_text() == good


def test_a_read_only_script_is_not_changed(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text(f"{START}torch.save(x, 'x')\n")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # chmod is not enough: root may write it
    assert main(["--fix", str(script)]) == 2
    assert "Permission denied" in capsys.readouterr().err
    assert script.read_text() == f"{START}torch.save(x, 'x')\n"


def test_imports_change_only_if_all_files_of_the_program_are_given(tmp_path, capsys):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("import horovod.torch as hvd\nhvd.init()\n")
    other.write_text("import horovod.torch as hvd\nx = hvd.rank()\n")
    assert main(["--fix", str(other)]) == 0
    assert "give all files of the program at once" in capsys.readouterr().out
    assert main(["--fix", str(one), str(other)]) == 0
    assert "dualtrain.hvd" in one.read_text()
    assert "dualtrain.hvd" in other.read_text()


def test_repaired_scripts_of_random_parts_compile():
    """Repair scripts that join four random parts of REPAIRS: they still compile, and keep their imports.

    A second repair changes nothing.
    """
    random_order = random.Random(0)
    parts = [before for before, _ in REPAIRS]
    for _ in range(12):
        text = START + "".join(random_order.sample(parts, 4))
        once = repair(Source(text))
        compile(once.source.text, "script", "exec")
        again = repair(Source(once.source.text))
        assert again.source.text == once.source.text
        kept = [line for line in text.splitlines() if line.startswith(("#", "import"))]
        assert [line for line in once.source.text.splitlines() if line.startswith(("#", "import"))] == kept


def test_positions_are_right_with_non_ascii_text_and_all_line_endings():
    text = "é = 'ü\u2028'; f(\f'ä', x)\r\nß = (1,\r 2)\n"
    source = Source(text)
    layout = Layout(text, source.tree)
    assert [layout.segment(statement) for statement in source.tree.body] == ["é = 'ü\u2028'", "f(\f'ä', x)", "ß = (1,\r 2)"]


def test_an_error_while_files_are_written_names_those_that_were_repaired_before(tmp_path, monkeypatch, capsys):
    script = HEAD + "x = torch.tensor(float(input()))\ny = x * 2\nhvd.allreduce(y)\nprint(y)\n"
    names = [str(tmp_path / name) for name in ("a.py", "b.py")]
    for name in names:
        Path(name).write_text(script)

    def rewrite_until_full(path, data):
        if path.name == "b.py":
            raise OSError(28, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr("dualtrain.horovodize.fix.rewrite", rewrite_until_full)
    assert main(["--fix", *names]) == 2
    assert (
        f"cannot write {names[1]!r} (No space left on device): it is unchanged (repaired already: {names[0]!r}); free"
        in (capsys.readouterr().err)
    )
    assert [Path(name).read_text() == script for name in names] == [False, True]
