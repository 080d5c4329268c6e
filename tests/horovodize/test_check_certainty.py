"""Pairs of scripts for the rules of ``--check``: one script shows a mistake, which a rule must find; the other does not.

The tests after the pairs are about keyword arguments, programs of several files, messages, unreachable code and speed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dualtrain.horovodize.check import check, findings
from dualtrain.horovodize.script_file import parse_scripts
from dualtrain.horovodize.source import Source
from tests.horovodize.test_horovodize_check import BY_NAME, WRAP, source

SAMPLER = "torch.utils.data.DistributedSampler(test_data, num_replicas=hvd.size(), rank=hvd.rank())"
LOADERS = (
    "def loaders():\n"
    f"    test_sampler = {SAMPLER}\n"
    "    test_loader = torch.utils.data.DataLoader(test_data, sampler=test_sampler)\n"
    "    return train_loader, test_loader\n"
)
TRAIN = "for x in train_loader:\n    model(x).backward()\n"
BASE = "class Base:\n    def save(self):\n        torch.save(self.model, 'x')\n    def fit(self):\n        self.save()\n"
INIT = "hvd.init()\n"
STEPPED = "s = torch.optim.lr_scheduler.StepLR(o, 1)\n"
EPOCH_STEP = "    if hvd.rank() == 0:\n        s.step()\n"
LOADER = "torch.utils.data.DataLoader(data, shuffle=True)"
CLIP = "loss.backward()\ntorch.nn.utils.clip_grad_norm_(q, 1)\n"
STEP = "    loss.backward()\n    optimizer.step()\n"
LOSS = f"{WRAP}for x in data:\n    loss = model(x)\n"
STOPPER = f"{WRAP}stopper = EarlyStopping()\nfor epoch in range(9):\n{STEP}"
FIRST = "class T:\n    @property\n    def first(self):\n        return hvd.rank() == 0\n"
CRITICS = "first = torch.nn.Linear(1, 1)\nsecond = torch.nn.Linear(1, 1)\nfirst.train()\nsecond.train()\n"
AUGMENTED = "class Data:\n    def __getitem__(self, i):\n        return numpy.random.rand(3)\n"

PLATEAU = (
    f"{WRAP}s = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
    "d = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())\n"
)
EPOCH = (
    "def fit():\n    total = 0\n    for x in data:\n        loss = model(x)\n        loss.backward()\n"
    "        optimizer.step()\n"
    "        total += loss.item() / 2\n    total /= len(data)\n"
)
DDP = "class T:\n    def __init__(self):\n        self.m = torch.nn.parallel.DistributedDataParallel(model)\n"
WRAP_METHOD = (
    "    def wrap(self):\n        o = torch.optim.SGD(self.m.parameters(), lr=1)\n"
    "        self.o = hvd.DistributedOptimizer(o)\n"
)
AVERAGE = "def average(x):\n    return hvd.allreduce(x)\n"
TEST_SAMPLER = f"{WRAP}s = {SAMPLER}\n"
TRAIN_SAMPLER = TEST_SAMPLER.replace("test", "train")
DATA_LOADER = "torch.utils.data.DataLoader"
TEST = f"test_loader = {DATA_LOADER}"
DATA_SAMPLER = SAMPLER.replace("test_data", "d")
SAMPLED = f"x = {DATA_LOADER}(d, sampler={DATA_SAMPLER})\n"
RANDOM = "torch.utils.data.RandomSampler(d)"
EPOCHS = "for epoch in range(9):\n    for y in x: loss.backward()"
FITS = (
    "class Fit:\n    def run(self, given):\n        for self.epoch in range(9):\n            for x in given:\n"
    "                model(x).backward()\n"
)
WRAP_CRITIC = "o = hvd.DistributedOptimizer(torch.optim.SGD(first.parameters(), 1))\n"
MNIST = "from torchvision.datasets import MNIST\n"
DISTRIBUTED_OPTIMIZER = "hvd.DistributedOptimizer"
BROADCAST_STATE = "hvd.broadcast_optimizer_state"
CYCLIC = "torch.optim.lr_scheduler.CyclicLR"
AUGMENTS = "import torchvision\ntorchvision.transforms.RandomCrop(3)\n"
HALF = "hvd.Compression.fp16"

#: (rule, script with a finding, script without a finding). A comment names the subject of the scripts, or gives the
#: reason for a finding or for none.
CASES = [
    (
        "padded_evaluation",  # the test loader that a function returns
        f"{LOADERS}train_loader, test_loader = loaders()\n{TRAIN}for x in test_loader:\n    model(x)",
        f"{LOADERS}train_loader, test_loader = loaders()\n{TRAIN}",
    ),
    (
        "padded_evaluation",  # no finding if the function that gets the loader reads no batch
        f"test_loader = torch.utils.data.DataLoader(test_data, sampler={SAMPLER})\n"
        f"def run(loader):\n    for x in loader:\n        model(x)\nrun(test_loader)\n{TRAIN}",
        f"test_loader = torch.utils.data.DataLoader(test_data, sampler={SAMPLER})\n"
        f"def run(loader):\n    print(len(loader))\nrun(test_loader)\n{TRAIN}",
    ),
    (
        "padded_evaluation",  # no finding if loaders leave out an incomplete last batch, and a call combines the results
        f"test_sampler = {SAMPLER}\nl = torch.utils.data.DataLoader(d, sampler=test_sampler, drop_last=True)\n"
        "hvd.allreduce_(torch.Tensor(0), name='barrier')\nfor x in l:\n    total += model(x)",
        f"test_sampler = {SAMPLER}\n"
        "l = torch.utils.data.DataLoader(d, sampler=test_sampler if many else None, drop_last=True)\n"
        "for x in l:\n    total += model(x)\nt = torch.zeros(2)\nt[0] = total\nhvd.allreduce_(t)",
    ),
    (
        "padded_evaluation",
        f"test_sampler = {SAMPLER}\nl = torch.utils.data.DataLoader(d, sampler=test_sampler)\nfor x in l:\n    model(x)",
        f"test_sampler = {SAMPLER}\nl = torch.utils.data.DataLoader(d, sampler=test_sampler, drop_last=True)\n"
        "for x in l:\n    total += model(x)\nmean = hvd.allreduce(torch.tensor([total, 1]))",
    ),
    (
        "padded_evaluation",  # no finding if the function that evaluates gets another loader
        f"{SAMPLED}def run(x):\n    model.eval()\n    for y in x:\n        model(y)\nrun(x)",
        f"def main():\n    {SAMPLED}    for y in x:\n        model(y).backward()\n    run(other)\n"
        "def run(x):\n    model.eval()\n    for y in x:\n        model(y)",
    ),
    (
        "padded_evaluation",  # no finding if a function trains in the loop
        f"{SAMPLED}def run(y):\n    model.eval()\n    for z in y: fit(z)\ndef fit(z): model(z)\nrun(x)",
        f"{SAMPLED}def run(y):\n    model.eval()\n    for z in y: fit(z)\ndef fit(z): model(z).backward()\nrun(x)",
    ),
    (
        "padded_evaluation",  # no finding for a sampler of training, if the calls of the function are unknown
        f"def main():\n    s = {DATA_SAMPLER}\n    x = {DATA_LOADER}(d, sampler=s)\n    judge().run(x)\n"
        "class Judge:\n    def run(self, x):\n        model.eval()\n        for y in x: model(y)",
        f"def main():\n    s = {DATA_SAMPLER}\n    s.set_epoch(1)\n    x = {DATA_LOADER}(d, sampler=s)\n"
        "    judge().run(other)\n"
        "class Judge:\n    def run(self, x):\n        model.eval()\n        for y in x: model(y)",
    ),
    ("padded_evaluation", f"test_sampler = {SAMPLER}", f"test_data.sampler = {SAMPLER}\nlearn(test_data.sampler)"),
    (
        "same_order_every_epoch",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nfor epoch in range(3): pass",
        "d.sampler = torch.utils.data.DistributedSampler(d, 2, 0)\nfor epoch in range(3):\n    print(d.sampler)",
    ),
    *(
        (
            "same_order_every_epoch",  # no finding if other code gets the loader through another variable
            f"s = torch.utils.data.DistributedSampler(d, 2, 0)\nl = torch.utils.data.DataLoader(d, sampler=s)\n{copy}\n"
            "for epoch in range(3):\n    for x in l: pass",
            f"s = torch.utils.data.DistributedSampler(d, 2, 0)\nl = torch.utils.data.DataLoader(d, sampler=s)\n{copy}\n"
            "for epoch in range(3):\n    lib.fit(all)",
        )
        for copy in ("all = l", "all = {'train': l}", "all = [(l, 1)]")
    ),
    (
        "same_order_every_epoch",  # no finding if other code gets the loader in a dict
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nl = torch.utils.data.DataLoader(d, sampler=s)\n"
        "for epoch in range(3):\n    for x in l: pass",
        "s = torch.utils.data.DistributedSampler(d, 2, 0)\nl = torch.utils.data.DataLoader(d, sampler=s)\n"
        "for epoch in range(3):\n    lib.fit(loaders={'train': l})",
    ),
    (
        "saved_by_all_ranks",  # no finding if a subclass that uses Horovod overrides the method
        f"{BASE}class Own(Base):\n    def load(self):\n        pass\n{INIT}Base().fit()",
        f"{BASE}class Own(Base):\n    def save(self):\n        if hvd.rank() == 0:\n            super().save()\n{INIT}"
        "Base().fit()\nOwn().fit()",
    ),
    (
        "saved_by_all_ranks",  # no finding if an unpacked argument depends on the rank
        f"{INIT}def save(path):\n    torch.save(x, path)\nsave(**{{'path': 'x'}})",
        f"{INIT}def save(path):\n    torch.save(x, path)\nsave(**{{'path': str(hvd.rank())}})",
    ),
    *(
        (
            "saved_by_all_ranks",  # no finding if a keyword argument after an unpacked one depends on the rank
            f"{INIT}def save({parameters}):\n    torch.save(x, path)\nsave(*states, path='x')",
            f"{INIT}def save({parameters}):\n    torch.save(x, path)\nsave(*states, path=str(hvd.rank()))",
        )
        for parameters in ("*states, path", "folder, path")
    ),
    (
        "saved_by_all_ranks",  # no finding if the condition has a name like save_logs: it may be true on one rank only
        f"{INIT}if args.epochs:\n    torch.save(x, 'x')",
        f"{INIT}if args.save_logs:\n    torch.save(x, 'x')",
    ),
    (
        "accumulation_without_passes",  # no finding for the losses of two models
        f"{CRITICS}{WRAP}first(x).backward()\nfirst(y).backward()\noptimizer.step()",
        f"{CRITICS}{WRAP}first(x).backward()\nsecond(y).backward()\noptimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if one of the model's calls is in no_grad()
        f"{CRITICS}{WRAP}z = first(x)\n(z + y).backward()\nfirst(y).backward()\noptimizer.step()",
        f"{CRITICS}{WRAP}with torch.no_grad():\n    z = first(x)\n"
        "second(z).backward()\nfirst(y).backward()\noptimizer.step()",
    ),
    (
        "accumulation_without_passes",  # no finding if each iteration uses another model
        f"{WRAP}for x in parts:\n    model(x).backward()\noptimizer.step()",
        f"{WRAP}for net in nets:\n    net(x).backward()\noptimizer.step()",
    ),
    (
        "collective_on_some_ranks",  # no finding if the other ranks make the same call
        "if hvd.rank() < 1:\n    hvd.barrier()",
        "if hvd.rank() <= 0:\n    hvd.barrier()\nif hvd.rank() >= 1:\n    hvd.barrier()",
    ),
    (
        "unknown_name",  # no finding if h is a hidden state, and not the module
        "def train(hvd):\n    hvd.timeline.start()",
        "import horovod.torch as h\ndef forward(x, h):\n    return h.view(-1)",
    ),
    (
        "frozen_after_wrapping",  # no finding if the frozen variable is not the variable of the loop
        f"{WRAP}for group in model.parameters():\n    group.requires_grad = False",
        f"{WRAP}for group in model.parameters():\n    p.requires_grad = False\n    masks[0].requires_grad = False",
    ),
    (
        "frozen_after_wrapping",  # no finding for a target network, whose parameters the optimizer does not have
        f"{WRAP}for p in model.parameters():\n    p.requires_grad = False",
        f"{WRAP}for p in target.parameters():\n    p.requires_grad = False",
    ),
    (
        "clip_before_synchronize",  # no finding if another function may have synchronized
        f"def clip():\n    torch.nn.utils.clip_grad_norm_(p, 1)\n    optimizer.step()\n{WRAP}",
        f"def clip():\n    torch.nn.utils.clip_grad_norm_(p, 1)\n    optimizer.step()\n{WRAP}def other():\n"
        "    loss.backward()\n    optimizer.synchronize()",
    ),
    (
        "clip_before_synchronize",
        f"{WRAP}loss.backward()\nlog(loss)\ntorch.nn.utils.clip_grad_norm_(p, 1)\noptimizer.step()",
        f"{WRAP}loss.backward()\nsync_gradients(model)\ntorch.nn.utils.clip_grad_norm_(p, 1)\noptimizer.step()",
    ),
    (
        "clip_before_synchronize",  # no finding if the next step is that of an optimizer that is not wrapped
        f"plain = torch.optim.SGD(q)\n{WRAP}{CLIP}optimizer.step()\nplain.step()",
        f"plain = torch.optim.SGD(q)\n{WRAP}{CLIP}plain.step()\noptimizer.step()",
    ),
    (
        "clip_before_synchronize",  # s.step() is the step of a schedule, not of another optimizer
        f"{WRAP}s = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n{CLIP}s.step()\noptimizer.step()",
        f"plain = torch.optim.SGD(q)\n{WRAP}s = torch.optim.lr_scheduler.StepLR(plain, 1)\n{CLIP}plain.step()\ns.step()",
    ),
    (
        "averaged_twice",  # no finding if DDP wraps another model than the optimizer's
        "net = torch.nn.parallel.DistributedDataParallel(model)\no = hvd.DistributedOptimizer(a, net.named_parameters())",
        f"net = torch.nn.parallel.DistributedDataParallel(other)\n{WRAP}",
    ),
    (
        "never_broadcast",  # gradients or single parameters that are set to constants do not make the weights equal
        f"{WRAP}{INIT}for p in model.parameters():\n    p.grad.zero_()\ntorch.nn.init.zeros_(model.bias)\n"
        "for p in model.parameters():\n    if p.dim() == 1:\n        p.data.zero_()\n    p.data.fill_(x)",
        f"{WRAP}{INIT}for p in model.parameters():\n    p.data.zero_()",
    ),
    (
        "clip_before_synchronize",  # no finding if synchronize() has run under a condition with the same text
        f"{WRAP}loss.backward()\nif half:\n    torch.nn.utils.clip_grad_norm_(p, 1)\noptimizer.step()",
        f"{WRAP}if half:\n    scaled.backward()\n    optimizer.synchronize()\nelse:\n    loss.backward()\n"
        "if half:\n    torch.nn.utils.clip_grad_norm_(p, 1)\nelse:\n    optimizer.synchronize()\noptimizer.step()",
    ),
    (
        "scaler_before_synchronize",
        f"def run():\n    scaler.step(optimizer)\n{WRAP}",
        f"def run():\n    scaler.step(optimizer)\n{WRAP}def other():\n    optimizer.synchronize()",
    ),
    (
        "same_random_numbers",  # no finding for unpacked options
        f"{AUGMENTS}torch.manual_seed(4)\n{WRAP}{TRAIN}",
        f"{AUGMENTS}torch.manual_seed(**options)\n{WRAP}{TRAIN}",
    ),
    (
        "same_random_numbers",  # in worker processes torch seeds numpy, so that the script's seed of numpy has no effect
        f"import numpy\n{AUGMENTED}{WRAP}numpy.random.seed(1)\ntorch.utils.data.DataLoader(d, num_workers=0)",
        f"import numpy\n{AUGMENTED}{WRAP}numpy.random.seed(1)\ntorch.utils.data.DataLoader(d, num_workers=4)",
    ),
    (
        "different_splits",  # no finding if a function of another file gets the seed
        f"{WRAP}a, b = torch.utils.data.random_split(d, [1, 2])",
        f"from lib import start\n{WRAP}start(args.seed)\na, b = torch.utils.data.random_split(d, [1, 2])",
    ),
    ("every_rank_reads_all", f"{WRAP}loader = {LOADER}", f"{WRAP}data = agent.rollout(env)\nloader = {LOADER}"),
    (
        "every_rank_reads_all",  # no finding if each rank makes its own data from random numbers, without a common seed
        f"{WRAP}torch.manual_seed(1)\ndata = Pairs(torch.randn(9))\nloader = {LOADER}",
        f"{WRAP}data = Pairs(torch.randn(9))\nloader = {LOADER}",
    ),
    (
        "every_rank_reads_all",  # a generator with a seed
        f"{WRAP}data = Pairs(torch.randn(9, generator=torch.Generator().manual_seed(1)))\nloader = {LOADER}",
        f"{WRAP}data = Pairs(torch.randn(9, generator=torch.Generator()))\nloader = {LOADER}",
    ),
    (
        "every_rank_reads_all",  # no finding if only a split has a generator with a seed
        f"{WRAP}data, _ = random_split(Pairs(x), [8, 1], generator=torch.Generator().manual_seed(1))\nloader = {LOADER}",
        f"{WRAP}data, _ = random_split(Pairs(torch.randn(9)), [8, 1], generator=torch.Generator().manual_seed(1))\n"
        f"loader = {LOADER}",
    ),
    (
        "events_of_all_ranks",  # a writer in a constructor; no finding if the object is made before hvd.init()
        f"from torch.utils.tensorboard import SummaryWriter\nclass T:\n    def __init__(self):\n"
        f"        self.w = SummaryWriter('runs')\n        {WRAP}        self.w.add_scalar('x', 1)\n{INIT}T()",
        f"from torch.utils.tensorboard import SummaryWriter\nclass T:\n    def __init__(self):\n"
        f"        self.w = SummaryWriter('runs')\n        {WRAP}        self.w.add_scalar('x', 1)\nT()\n{INIT}",
    ),
    (
        "sampler_without_ranks",
        f"if args.train:\n    s = torch.utils.data.DistributedSampler(d)\n{WRAP}",
        f"if args.ddp:\n    s = torch.utils.data.DistributedSampler(d)\n{WRAP}",
    ),
    (
        "collective_on_some_ranks",  # no finding if rank 0 may make the same call, under a further condition
        "if hvd.rank() != 0:\n    hvd.barrier()",
        "if hvd.rank() != 0:\n    hvd.barrier()\nload()\nif hvd.rank() == 0 and args.many:\n    hvd.barrier()",
    ),
    ("use_after_shutdown", "hvd.shutdown()\nhvd.rank()", "if done:\n    hvd.shutdown()\nhvd.rank()"),
    (
        "use_after_shutdown",  # a finding if run() may return before both calls; none if stop() may skip shutdown()
        "def stop():\n    hvd.shutdown()\ndef run():\n    if args.test:\n        return\n    stop()\n    hvd.rank()\n"
        "if __name__ == '__main__':\n    run()\n",
        "def stop():\n    if args.test:\n        return\n    hvd.shutdown()\ndef run():\n    stop()\n    hvd.rank()\n"
        "if __name__ == '__main__':\n    run()\n",
    ),
    (
        "padded_evaluation",  # a loader in a dict
        f"loaders = {{'test': torch.utils.data.DataLoader(test_data, sampler={SAMPLER})}}\n"
        f"{TRAIN}for x in loaders['test']:\n    model(x)",
        f"loaders = {{'test': torch.utils.data.DataLoader(test_data, sampler={SAMPLER})}}\n"
        f"{TRAIN}for x in loaders['train']:\n    model(x)",
    ),
    (
        "padded_evaluation",  # a loader that is assigned to an entry of a dict
        f"test_sampler = {SAMPLER}\nd = {{}}\nd['test'] = torch.utils.data.DataLoader(test_data, sampler=test_sampler)\n"
        f"{TRAIN}for name in ['train', 'test']:\n    run(d[name])",
        f"test_sampler = {SAMPLER}\nd = {{}}\nd['test'] = torch.utils.data.DataLoader(test_data, sampler=test_sampler)\n"
        f"{TRAIN}run(d['train'])",
    ),
    (
        "branch_on_build",
        "use_adasum = args.adasum\nif use_adasum and hvd.nccl_built():\n    rate = 1",
        "use_adasum = 0\nif use_adasum and hvd.nccl_built():\n    rate = 1",
    ),
    (
        "scaler_before_synchronize",  # no finding if a function of the script shows that the code runs with one rank only
        f"{WRAP}scaler = GradScaler()\ndef parallel():\n    return hvd.rank() == 0\nif not parallel():\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)",
        f"{WRAP}scaler = GradScaler()\ndef parallel():\n    return hvd.is_initialized() and hvd.size() > 1\n"
        "if not parallel():\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)",
    ),
    (
        "collective_on_some_ranks",  # a method that contains a collective call
        f"{INIT}class T:\n    def send(self):\n        hvd.barrier()\n    def run(self):\n"
        "        if hvd.rank() == 0:\n            self.send()",
        f"{INIT}class T:\n    def send(self):\n        hvd.barrier()\n    def run(self):\n        self.send()\n"
        "        if hvd.rank() == 0:\n            other.send()",
    ),
    (
        "collective_on_some_ranks",  # a rank from a function of a different file
        "place = setup()\nrank = place['rank']\nfirst = (rank == 0 and place['local_rank'] == 0)\n"
        "if first:\n    hvd.barrier()",
        "place = setup()\nrank = place['number']\nfirst = rank == 0\nif first:\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # no finding if the script does not show that the flag depends on the rank
        "first = hvd.rank() == 0\nif first:\n    hvd.barrier()",
        "first = first and args.log\nif first:\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # a property (with Horovod, true on rank 0 only); none if it may be true on all ranks
        "class T:\n    @property\n    def first(self):\n        return not args.horovod or hvd.rank() == 0\n"
        "    def f(self):\n        if self.first:\n            hvd.barrier()",
        "class T:\n    @property\n    def first(self):\n        return args.debug or hvd.rank() == 0\n"
        "    def f(self):\n        if self.first:\n            hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # a function (with Horovod, true on rank 0 only); none if it may be true on all ranks
        "parallel = args.mpi or args.gloo\nif parallel:\n    hvd.init()\nrank = hvd.rank() if parallel else 0\n"
        "def first():\n    if not parallel:\n        return True\n    return rank == 0\nif first():\n    hvd.barrier()",
        "parallel = args.mpi or args.gloo\nif parallel:\n    hvd.init()\nrank = hvd.rank() if parallel else 0\n"
        "def first():\n    if args.debug:\n        return True\n    return rank == 0\nif first():\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # a property of a class of the script; no finding for an attribute of another object
        f"{FIRST}t = T()\nif t.first:\n    hvd.barrier()",
        f"{FIRST}t = T()\nif args.first:\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # the root is a constant; no finding if it is the variable of a loop
        "root = 0\nif hvd.rank() == root:\n    hvd.barrier()",
        "root = 0\nfor root in range(hvd.size()):\n    if hvd.rank() == root:\n        hvd.barrier()",
    ),
    (
        "sampler_by_local_rank",  # no finding if the seed, and so the order of the samples, depends on the rank
        f"{WRAP}s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=0, seed=3)",
        f"{WRAP}s = torch.utils.data.DistributedSampler(d, hvd.size(), rank=0, seed=hvd.rank())",
    ),
    (
        "inner_given",  # no finding for a wrapper in a dictionary, because a loop over it may step the wrapper
        "base = torch.optim.SGD(p, 1)\nif args.horovod:\n    wrapper = hvd.DistributedOptimizer(base)\nregister(base)",
        "base = torch.optim.SGD(p, 1)\nif args.horovod:\n    some['a'] = hvd.DistributedOptimizer(base)\nregister(base)",
    ),
    (
        "collective_on_some_ranks",  # a named constant
        "ROOT = 0\nif hvd.rank() == ROOT:\n    hvd.barrier()",
        "ROOT = args.root\nif hvd.rank() in ROOT:\n    hvd.barrier()",
    ),
    (
        "inner_step",  # no finding if only runs without Horovod step the original optimizer
        "optimizer = torch.optim.SGD(p, 1)\nif args.mpi:\n    hvd.init()\n"
        "    wrapper = hvd.DistributedOptimizer(optimizer)\noptimizer.step()",
        "optimizer = torch.optim.SGD(p, 1)\nif args.mpi:\n    hvd.init()\n"
        "    wrapper = hvd.DistributedOptimizer(optimizer)\n    wrapper.step()\nelse:\n    optimizer.step()",
    ),
    (
        "collective_on_some_ranks",  # a flag from a conditional expression; no finding if it may be true on all ranks
        "first = hvd.rank() == 0 if args.horovod else True\nif first:\n    hvd.barrier()",
        "first = hvd.rank() == 0 if args.log else True\nif first:\n    hvd.barrier()",
    ),
    ("collective_on_some_ranks", "if hvd.rank() > 0:\n    hvd.barrier()", "if hvd.local_rank() > 1:\n    hvd.barrier()"),
    *(
        (
            "collective_on_some_ranks",  # assignment expressions
            f"if (n := {name}()) == 0:\n    print()\nif n == 0:\n    hvd.barrier()",
            f"if (n := {name}()) == 0:\n    hvd.barrier()\nelse:\n    hvd.barrier()",
        )
        for name in ("hvd.rank", "hvd.local_rank")
    ),
    (
        "collective_on_some_ranks",  # an assignment expression with a comparison; no finding for the number of ranks
        "if (first := hvd.rank() == 0) and x:\n    print()\nif first:\n    hvd.barrier()",
        "if (n := hvd.size()) > 1:\n    hvd.barrier()",
    ),
    *(
        (
            "collective_on_some_ranks",  # a case of a match statement; no finding if the other cases make the call too
            f"match {subject}:\n    case 0{guard}:\n        hvd.barrier()",
            f"match {subject}:\n    case 0{guard}:\n        hvd.barrier()\n    case _:\n        hvd.barrier()",
        )
        for subject, guard in (("hvd.rank()", ""), ("hvd.rank()", " if x"), ("hvd.rank()", " as rank"))
    ),
    *(
        (
            "collective_on_some_ranks",  # no finding if the second condition is the opposite of the first one
            "if hvd.rank() == 0:\n    hvd.barrier()\nelif hvd.rank() == 1:\n    hvd.barrier()",
            f"if hvd.rank() == 0:\n    hvd.barrier()\nelif {test}:\n    hvd.barrier()",
        )
        for test in ("hvd.rank() != 0", "hvd.rank() > 0")
    ),
    *(
        (
            # A condition after the other ranks have returned, and one in a function defined under the same condition.
            "collective_on_some_ranks",
            f"{first}\n    {second}:\n{inner}",
            f"{first}\n    {second}:\n{inner}    else:\n        hvd.barrier()",
        )
        for first, second, inner in (
            (
                "def f():\n    if hvd.is_initialized():\n        if hvd.rank() > 0:\n            return",
                "if hvd.rank() == 0",
                "        hvd.barrier()\n",
            ),
            ("if hvd.rank() == 0:\n  def f():", "if hvd.rank() == 0", "        hvd.barrier()\n"),
        )
    ),
    (
        "collective_on_some_ranks",  # the case of the other ranks; no finding if the match is not on the rank
        "rank = hvd.rank()\nmatch rank:\n    case 0:\n        print()\n    case n:\n        hvd.barrier()",
        "rank = hvd.rank()\nmatch task:\n    case 0 | 1:\n        print()\n    case n:\n        hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # no finding if the case of the other ranks makes the call too
        "match hvd.rank():\n    case 0:\n        hvd.barrier()\n    case 1 | 2 | 3:\n        print()",
        "match hvd.rank():\n    case 0:\n        hvd.barrier()\n    case 1 | 2 | 3:\n        hvd.barrier()",
    ),
    (
        "saved_by_all_ranks",  # a case for rank 0
        "hvd.init()\nmatch x:\n    case None:\n        torch.save(model, 'x')",
        "hvd.init()\nmatch hvd.rank():\n    case 0:\n        torch.save(model, 'x')",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if an in-place allreduce gives all ranks the same value
        f"{LOSS}    shown = hvd.allreduce(loss.detach())\n    if torch.isnan(loss).any().item():\n        continue\n{STEP}",
        f"{LOSS}    value = loss.detach()\n    hvd.allreduce_(value)\n    if torch.isnan(value):\n        continue\n{STEP}",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if a function of another file may combine the ranks' values
        f"{LOSS}    if bool(torch.isnan(loss)):\n        continue\n{STEP}",
        f"from utils import any_worker\n{LOSS}    if any_worker(torch.isnan(loss)):\n        continue\n{STEP}",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if a function of the script returns the average over all ranks
        f"def f(x):\n    return x\n{LOSS}    value = loss.item()\n    if value > 9:\n        continue\n{STEP}",
        f"def f(x):\n    return hvd.allreduce(x)\n{LOSS}    loss.data = f(loss.data)\n    if loss > 9:\n"
        f"        continue\n{STEP}",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if the variable holds another loss
        f"{LOSS}{STEP}    if loss < best:\n        hvd.barrier()",
        f"from utils import test\n{LOSS}{STEP}    loss, hits = test(model)\n    if loss < best:\n        hvd.barrier()",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if all ranks compute the loss of all samples
        f"{WRAP}for x in data:\n    y = model(x).gather(1, i)\n    loss = y.mean()\n    if loss > 9:\n"
        f"        continue\n{STEP}",
        f"{WRAP}for x in data:\n    y = hvd.allgather(model(x))\n    loss = y.mean()\n    if loss > 9:\n"
        f"        continue\n{STEP}",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if a function ends the script
        f"def end():\n    print('nan')\n{LOSS}    if loss > 9:\n        end()\n    else:\n        loss.backward()\n"
        "        optimizer.step()",
        f"def end():\n    raise SystemExit\n{LOSS}    if loss > 9:\n        end()\n    else:\n        loss.backward()\n"
        "        optimizer.step()",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if the program ends
        f"{WRAP}def train(x):\n    loss = model(x)\n    value = loss.item()\n    if not math.isfinite(value):\n"
        f"        return None\n{STEP}",
        f"{WRAP}def train(x):\n    loss = model(x)\n    value = loss.item()\n    if not math.isfinite(value):\n"
        f"        sys.exit(1)\n{STEP}",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if all ranks have the same norm
        f"{WRAP}for x in data:\n    loss = model(x)\n    if loss.item() < 9:\n        loss.backward()\n"
        "        optimizer.step()",
        f"{WRAP}for x in data:\n    loss = model(x)\n    loss.backward()\n    optimizer.synchronize()\n    norm = clip()\n"
        "    if norm < 9:\n        with optimizer.skip_synchronize():\n            optimizer.step()",
    ),
    (
        "step_skipped_by_own_loss",  # no finding if the value is not a loss of the same loop
        f"{WRAP}for x in data:\n    loss = model(x)\n    if loss != loss:\n        continue\n{STEP}",
        f"{WRAP}for epoch in range(3):\n    for x in data:\n        loss = model(x)\n        loss.backward()\n"
        "        optimizer.step()\n    loss = test()\n    if loss < best:\n        hvd.barrier()",
    ),
    (
        "schedule_on_some_ranks",  # no finding if rank 0 broadcasts its learning rate
        "s = torch.optim.lr_scheduler.StepLR(o, 1)\nif hvd.rank() == 0:\n    s.step()",
        "s = torch.optim.lr_scheduler.StepLR(o, 1)\nif hvd.rank() == 0:\n    s.step()\n"
        "o.param_groups[0]['lr'] = hvd.broadcast_object(o.param_groups[0]['lr'])",
    ),
    (
        "saved_by_all_ranks",  # no finding if the other ranks return in a branch that all runs with Horovod take
        f"{INIT}def run():\n    if args.horovod:\n        print()\n    torch.save(x, 'x')\nrun()",
        f"{INIT}def run():\n    if args.hvd:\n        if hvd.rank():\n            return\n    torch.save(x, 'x')\nrun()",
    ),
    (
        "variables_of_mpi",  # no finding if hvd.init() is in the branch of a different launcher
        "import os\nif args.platform == 'azure':\n    hvd.init()\nrank = os.environ['OMPI_COMM_WORLD_RANK']",
        "import os\nif args.platform == 'azure':\n    hvd.init()\nelif args.platform == 'k8s':\n"
        "    rank = os.environ['OMPI_COMM_WORLD_RANK']",
    ),
    (
        "optimizer_state",  # no finding if the variable with the weight decay is 0
        "decay = 0.1\no = torch.optim.SGD(p, 1, weight_decay=decay)\nhvd.broadcast_optimizer_state(o, 0)",
        "decay = 0\no = torch.optim.SGD(p, 1, weight_decay=decay)\nhvd.broadcast_optimizer_state(o, 0)",
    ),
    (
        "half_precision",  # an operation that may be Average, and one that cannot be Average
        "c = hvd.Compression.fp16\no = hvd.DistributedOptimizer(o, compression=c, op=hvd.Sum if args.sum else hvd.Average)",
        "c = hvd.Compression.fp16\no = hvd.DistributedOptimizer(o, compression=c, op=hvd.Sum if args.sum else hvd.Adasum)",
    ),
    (
        "collective_on_some_ranks",  # a variable that is None on all ranks but one
        "w = open() if hvd.rank() == 0 else None\nif w is not None:\n    hvd.allreduce_(x)",
        "w = open() if hvd.rank() == 0 else None\nif w is not None:\n    w.add(x)\nif x is not w:\n    hvd.allreduce_(x)",
    ),
    (
        "collective_on_some_ranks",
        "w = None if hvd.rank() else open()\nif w is None:\n    pass\nelse:\n    hvd.barrier()",
        "w = None if hvd.rank() else open()\nif w is None:\n    hvd.barrier()\nelse:\n    hvd.barrier()",
    ),
    (
        "collective_on_some_ranks",  # no finding for another variable of the same name
        "x = open() if hvd.rank() == 0 else None\ndef run(y):\n    if x is not None:\n        hvd.allreduce_(y)",
        "x = open() if hvd.rank() == 0 else None\ndef run(x):\n    if x is not None:\n        hvd.allreduce_(x)",
    ),
    *(
        (
            "collective_on_some_ranks",
            "x = open() if hvd.rank() == 0 else None\nif x is not None:\n    hvd.barrier()",
            f"{before}x = open() if hvd.rank() == 0 else None\n{other}",
        )
        for before, other in (
            ("", "f = lambda x: hvd.allreduce_(x) if x is not None else x"),
            ("", "def f(x):\n    def g():\n        if x is not None:\n            hvd.allreduce_(x)"),
            ("", "def f(**x):\n    if x is not None:\n        hvd.barrier()"),
            ("", "try:\n    pass\nexcept OSError as x:\n    if x is not None:\n        hvd.barrier()"),
            ("def f():\n    ", "from lib import *\nif x is not None:\n    hvd.barrier()"),
            (
                "class A:\n    def f(self):\n        self.",
                "class B(Fields):\n    def f(self):\n        if self.x is not None:\n            hvd.barrier()",
            ),
        )
    ),
    (
        "collective_on_some_ranks",
        "def start():\n    x = open() if hvd.rank() == 0 else None\n    if x is not None:\n        hvd.barrier()",
        "def start():\n    x = open() if hvd.rank() == 0 else None\nfor x in d:\n    if x is not None:\n        hvd.join()",
    ),
    (
        "collective_on_some_ranks",  # a property of a parameter; no finding if two classes define it
        f"{FIRST}def save(t: T):\n    if t.first:\n        hvd.barrier()",
        f"{FIRST}class U:\n    first = True\ndef save(t: T):\n    if t.first:\n        hvd.barrier()",
    ),
    *(
        (
            "collective_on_some_ranks",  # no finding if the parameter may be an object of another class
            f"{FIRST}    def run(self):\n        hook.save(self)\ndef save(t):\n    if t.first:\n        hvd.barrier()",
            f"{FIRST}def save({t}):\n    if t.first:\n        hvd.barrier()\n{calls}",
        )
        for t, calls in (("t", "save(parse())"), ("t", "save(T())\nsave(options)"), ("t", ""), ("t: Options", "save(T())"))
    ),
    (
        "discarded_result",  # a conversion of the result that nothing uses
        "hvd.broadcast(torch.tensor(start), 0).item()",
        "print(hvd.broadcast(torch.tensor(start), 0).item())\nhvd.allreduce(torch.zeros(1)).item()",
    ),
    (
        # No finding for a method that is not called here, for a method of an object that is not a tensor, and in a
        # function that measures.
        "discarded_result",
        "hvd.allreduce(loss).item()",
        "run(hvd.allreduce(loss).item)\nhvd.broadcast_object(f(), 0).to(1)\n"
        "def benchmark():\n    hvd.allreduce(loss).item()",
    ),
    (
        "discarded_result",  # an asynchronous call cannot be a barrier
        "hvd.allreduce_async(torch.zeros(1))",
        "hvd.allreduce(torch.zeros(1))\nhandle = hvd.allreduce_async(torch.zeros(1))\nhvd.synchronize(handle)",
    ),
    (
        "loaded_on_some_ranks",  # the word broadcast in a docstring does not count; in another string it does
        f'"""Load, then broadcast the step."""\n{WRAP}if hvd.rank() == 0:\n    model.load_state_dict(s)\n{TRAIN}',
        f'x = """Load, then broadcast the step."""\n{WRAP}if hvd.rank() == 0:\n    model.load_state_dict(s)\n{TRAIN}',
    ),
    (
        "step_skipped_by_own_loss",  # async for
        f"{WRAP}async def run():\n    async for x in d:\n        loss = model(x)\n        if loss.isnan():\n"
        "            continue\n        loss.backward()\n        optimizer.step()",
        f"{WRAP}async def run():\n    async for x in d:\n        loss = model(x)\n        loss.backward()",
    ),
    (
        "same_order_every_epoch",  # an attribute counts the epochs, and a method of the script gets the loader
        f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{FITS}Fit().run(loader)",
        f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{FITS}other.run(loader)",
    ),
    (
        "same_order_every_epoch",
        f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{FITS}f = Fit()\nf.run(loader)",
        f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{FITS}f = Fit()\ns.set_epoch(f.epoch)\nf.run(loader)",
    ),
    *(
        (
            "same_order_every_epoch",  # no finding if the method may pass the loader to other code
            f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{FITS}Fit().run(loader)",
            f"{TRAIN_SAMPLER}loader = {DATA_LOADER}(d, sampler=s)\n{fits}Fit().run(loader)",
        )
        for fits in (
            f"{FITS}            hook(given)\n",
            FITS.replace("Fit:", "Fit(Trainer):"),
            FITS.replace("for x in given:", "self.loader = given\n            for x in given:") + "Other().go(f.loader)\n",
        )
    ),
    (
        "accumulation_without_passes",  # no finding if one of the losses uses the model only through detach()
        f"{CRITICS}{WRAP_CRITIC}first(second(x)).backward()\nfirst(x).backward()\no.step()",
        f"{CRITICS}{WRAP_CRITIC}y = first(x).detach()\nsecond(y).backward()\nother.step()\nfirst(x).backward()\no.step()",
    ),
    *(
        (
            "schedule_on_some_ranks",  # no finding if the loop that steps the schedule contains the only broadcast
            f"{STEPPED}{before}for epoch in range(9):\n{EPOCH_STEP}",
            f"{STEPPED}for epoch in range(9):\n    {sent}\n{EPOCH_STEP}",
        )
        for before, sent in (
            ("hvd.broadcast_object(lr, 0)\n", "hvd.broadcast_optimizer_state(o, 0)"),
            ("for one in (o, p):\n    hvd.broadcast_optimizer_state(one, 0)\n", "lr = hvd.broadcast_object(lr, 0)"),
            (
                "def send():\n    hvd.broadcast_optimizer_state(o, 0)\nsend()\n",
                "send()\ndef send():\n    hvd.broadcast(lr, 0)",
            ),
        )
    ),
    *(
        (
            "schedule_on_some_ranks",  # no finding if code that is not in the script may call the broadcast repeatedly
            f"{STEPPED}def send():\n    hvd.broadcast_object(lr, 0)\nsend()\nfor epoch in range(9):\n{EPOCH_STEP}",
            f"{STEPPED}def send():\n    hvd.broadcast_object(lr, 0)\n{later}for epoch in range(9):\n{EPOCH_STEP}",
        )
        for later in (
            "send()\nengine.add_handler('epoch', send)\n",
            "class Hook(Base):\n    def on_epoch_end(self):\n        send()\n",
            "send()\nhook = lambda: send()\n",
        )
    ),
    (
        "schedule_on_some_ranks",  # no finding if a method of the trainer sends the rate at the start of each epoch
        f"class T:\n    def fit(self):\n        self.{STEPPED}        hvd.broadcast(lr, 0)\n        for e in range(9):\n"
        "            if hvd.rank() == 0:\n                self.s.step()",
        f"class T:\n    def __init__(self):\n        self.{STEPPED}    def epoch(self):\n        hvd.broadcast(lr, 0)\n"
        "        if hvd.rank() == 0:\n            self.s.step()",
    ),
    (
        "schedule_on_some_ranks",  # no finding if it is unknown when the second broadcast of optimizer state runs
        f"{STEPPED}hvd.broadcast_optimizer_state(o, 0)\nhvd.broadcast_optimizer_state(o, 0)\ndef epoch():\n{EPOCH_STEP}"
        "def send():\n    hvd.broadcast(n, 0)",
        f"{STEPPED}hvd.broadcast_optimizer_state(o, 0)\ndef epoch():\n{EPOCH_STEP}"
        "def send():\n    hvd.broadcast_optimizer_state(o, 0)",
    ),
    (
        "schedule_on_some_ranks",  # no finding for a broadcast in a loop that calls the step through several functions
        f"{STEPPED}def a():\n{EPOCH_STEP}def b():\n    a()\ndef c():\n    b()\ndef d():\n    c()\ndef e():\n    d()\n"
        "hvd.broadcast(lr, 0)\nfor x in range(9):\n    e()",
        f"{STEPPED}def a():\n{EPOCH_STEP}def b():\n    a()\ndef c():\n    b()\ndef d():\n    c()\ndef e():\n    d()\n"
        "for x in range(9):\n    hvd.broadcast(lr, 0)\n    e()",
    ),
    (
        "schedule_on_some_ranks",  # no finding if it is unknown when the function that broadcasts the rate is called
        f"def run():\n    {STEPPED}    hvd.broadcast_object(lr, 0)\n    epoch()\ndef epoch():\n{EPOCH_STEP}",
        f"{STEPPED}def send():\n    hvd.broadcast_object(lr, 0)\ndef run():\n{EPOCH_STEP}",
    ),
    (
        "schedule_on_some_ranks",  # a schedule that may be None; no finding for an unknown object
        "if args.s:\n    s = torch.optim.lr_scheduler.StepLR(o, 1)\nelse:\n    s = None\nif hvd.rank() == 0:\n    s.step()",
        "s = make(o)\nif hvd.rank() == 0:\n    s.step()",
    ),
    (
        "half_precision",  # a flag in a main guard
        "if __name__ == '__main__':\n    half = args.half\n    c = hvd.Compression.fp16 if half else hvd.Compression.none",
        "if __name__ == '__main__':\n    half = False\n    c = hvd.Compression.fp16 if half else hvd.Compression.none",
    ),
    (
        "use_after_shutdown",  # a finding if one condition is around both calls; none if only an except clause shuts down
        "if __name__ == '__main__':\n    if done:\n        hvd.shutdown()\n        hvd.rank()",
        "try:\n    train()\nexcept ValueError:\n    hvd.shutdown()\nhvd.rank()",
    ),
    (
        "scaler_before_synchronize",  # no finding if the scaler is always None
        f"{WRAP}scaler = GradScaler()\nscaler.scale(loss).backward()\nscaler.step(optimizer)",
        f"{WRAP}scaler = None\nif scaler:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)",
    ),
    (
        "variables_of_mpi",  # no finding in a branch for runs without Horovod
        "import os\nrank = int(os.environ['PMI_RANK'])",
        "import os\nif args.use_ddp:\n    rank = int(os.environ['PMI_RANK'])",
    ),
    (
        "sampler_without_ranks",  # no finding if a function of another file may create the default process group
        "def setup_distributed():\n    hvd.init()\nsetup_distributed()\n"
        "train_sampler = torch.utils.data.DistributedSampler(data)",
        "from lib import setup_distributed\nsetup_distributed()\ntrain_sampler = torch.utils.data.DistributedSampler(data)",
    ),
    ("discarded_result", "def f(x):\n    y = hvd.allreduce(x)", "def f(x):\n    _ = hvd.allreduce(x)"),
    (
        "discarded_result",  # no finding for the number of an iteration, as in a warm-up
        "for x in losses:\n    hvd.allreduce(torch.tensor(x))",
        "for i in range(9):\n    hvd.allreduce(torch.tensor(i))",
    ),
    (
        "same_gpu",
        f"{INIT}{WRAP}model.cuda()",
        f"import ray\n{INIT}{WRAP}model.cuda()",
    ),
    (
        "never_broadcast",
        WRAP + INIT,
        f"from lib import sync_parameters\n{WRAP}{INIT}sync_parameters(model)",
    ),
    (
        "clip_before_synchronize",  # no finding if init() and the clipping need different values of one variable
        f"if args.mode == 0:\n    hvd.init()\n{WRAP}{CLIP}optimizer.step()",
        f"if args.mode == 0:\n    hvd.init()\n{WRAP}loss.backward()\nif args.mode == 1:\n"
        "    clip_grad_norm_(q, 1)\noptimizer.step()",
    ),
    (
        "schedule_by_own_loss",  # no finding if the script averages the loss
        f"{PLATEAU}{EPOCH}    s.step(total)",
        f"{PLATEAU}{EPOCH}    total = hvd.allreduce(torch.tensor(total))\n    s.step(total)",
    ),
    (
        "schedule_by_own_loss",  # no finding if a function averages the loss that another function returns
        f"{PLATEAU}{EPOCH}    return total, 1\nmean, other = fit()\ns.step(mean)",
        f"{PLATEAU}{EPOCH}    return total, 1\ndef average(x):\n    return hvd.allreduce(x)\nmean, other = fit()\n"
        "mean = average(mean)\ns.step(mean)\ns.step(other)",
    ),
    (
        "schedule_by_own_loss",  # no finding for the loss of a loop without backward: it may be equal on all ranks
        f"{PLATEAU}{EPOCH}    return total\ns.step(fit())",
        f"{PLATEAU}{EPOCH}    total = 0\n    for x in test_data:\n        loss = model(x)\n"
        "        total = total + loss.item()\n    s.step(total)\n    s.step(loss)",
    ),
    (
        "schedule_by_own_loss",  # no finding if the loop also evaluates
        f"{PLATEAU}{EPOCH}    s.step(loss)",
        PLATEAU
        + EPOCH.replace("        loss.backward()", "        if training:\n            loss.backward()")
        + "    s.step(total)",
    ),
    *(
        ("schedule_by_own_loss", f"{PLATEAU}{EPOCH}    s.step(total)", PLATEAU + other)
        for other in (
            f"{EPOCH}    world_mean(total)\n    s.step(total)",  # averaged in place
            f"{EPOCH}    s.step(total)\n    share(s, optimizer)",  # other code may send the rate
            f"{EPOCH}    if many:\n        s.step(world_mean(total))\n    else:\n        s.step(total)",
            f"{EPOCH}    if alone:\n        s.step(total)",
            f"@averaged\n{EPOCH}    return total\ns.step(fit())",
            # two functions named fit
            f"{EPOCH}    return total\nclass T:\n    def fit(self):\n        return 0\ns.step(fit())",
            # averaged after the backward pass
            EPOCH.replace("        total +=", "        loss = world_mean(loss)\n        total +=") + "    s.step(total)",
            # loops for training and evaluation
            EPOCH.replace("        loss.backward()", "        if grad:\n            loss.backward()") + "    s.step(total)",
            EPOCH.replace("        loss.backward()", "        if not grad:\n            continue\n        loss.backward()")
            + "    s.step(total)",
            # without a step: the gradients may be for the inputs only
            EPOCH.replace("        optimizer.step()\n", "") + "    s.step(total)",
            # combine() may change the total: an attribute, and a global variable
            EPOCH.replace("total", "self.total") + "    combine(self)\n    s.step(self.total)",
            EPOCH.replace("    total = 0", "    global total\n    total = 0") + "    combine()\n    s.step(total)",
            # the result of a function that is not in the script
            EPOCH.replace("        loss = model(x)\n        loss.backward()", "        model(x).backward()")
            .replace("    total = 0\n", "")
            .replace("        total += loss.item() / 2\n    total /= len(data)\n", "")
            + "    s.step(evaluate())",
        )
    ),
    (
        "schedule_by_own_loss",  # no finding if the schedule may be that of an optimizer that is not wrapped
        f"{PLATEAU}{EPOCH}    s.step(total)",
        f"{PLATEAU}s = torch.optim.lr_scheduler.ReduceLROnPlateau(own)\n{EPOCH}    s.step(total)",
    ),
    (
        "schedule_by_own_loss",  # no finding if the model combines the losses of all ranks
        f"{PLATEAU}{EPOCH}    s.step(total)",
        f"{PLATEAU}class L:\n    def forward(self, x):\n        return hvd.allgather(x).sum()\n{EPOCH}    s.step(total)",
    ),
    (
        "collective_on_some_ranks",  # a method with the name of a variable; no finding if another function replaces it
        "log = logger()\nclass T:\n    def log(self):\n        hvd.barrier()\n    def fit(self):\n"
        "        if hvd.rank() == 0:\n            self.log()",
        "class T:\n    def log(self):\n        hvd.barrier()\n    def fit(self):\n        self.log = print\n"
        "        if hvd.rank() == 0:\n            self.log()",
    ),
    (
        "averaged_twice",  # two methods; no finding if the call of the second one is conditional
        f"{DDP}        self.wrap()\n{WRAP_METHOD}",
        f"{DDP}        if args.wrap:\n            self.wrap()\n{WRAP_METHOD}",
    ),
    (
        "loop_by_value_of_some_ranks",  # the result of a function; no finding if all ranks read the checkpoint
        f"{WRAP}def load():\n    first = 0\n    if hvd.rank() == 0:\n        first = torch.load('x')['epoch']\n"
        f"    return first\nbegin = load()\nfor epoch in range(begin, 9):\n{STEP}",
        f"{WRAP}def load():\n    if args.fresh:\n        return 0\n    return torch.load('x')['epoch']\n"
        f"begin = load()\nfor epoch in range(begin, 9):\n{STEP}",
    ),
    (
        "loop_by_value_of_some_ranks",  # a function that returns early; no finding if the script sends the value
        f"{WRAP}def load():\n    if hvd.rank() != 0:\n        return 0\n    return torch.load('x')['epoch']\n"
        f"begin = load()\nfor epoch in range(begin, 9):\n{STEP}",
        f"{WRAP}def load():\n    if hvd.rank() != 0:\n        return 0\n    return torch.load('x')['epoch']\n"
        f"begin = load()\nbegin = hvd.broadcast_object(begin)\nfor epoch in range(begin, 9):\n{STEP}",
    ),
    (
        "every_rank_reads_all",  # an argument that selects the rank that downloads the data does not split the data
        f"{WRAP}d = Data(download=hvd.rank() == 0)\nfor x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
        f"{WRAP}d = Data(part=hvd.rank())\nfor x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
    ),
    *(
        (
            # No finding if the data set gets all options, with the rank. The words MPI and rank in the parser's calls do
            # not show that the data is split.
            "every_rank_reads_all",
            f"{WRAP}{before}\nd = Data(args.folder)\nfor x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
            f"{WRAP}{before}\nd = Data(args)\nfor x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
        )
        for before in (
            "p = Parser('for MPI')\np.add_argument('--local_rank')\nargs = p.parse_args()\nargs.rank = hvd.rank()",
            "args.rank = hvd.rank()",
        )
    ),
    (
        "every_rank_reads_all",  # a parameter named args has settings; no finding for other names: the values are unknown
        f"def fit(args):\n    {WRAP}    d = Data(args.folder)\n"
        "    for x in torch.utils.data.DataLoader(d, shuffle=True):\n        pass\nfit(parse())",
        f"def fit(data):\n    {WRAP}    d = Data(data.folder)\n"
        "    for x in torch.utils.data.DataLoader(d, shuffle=True):\n        pass\nfit(read())",
    ),
    *(
        (
            "loop_by_value_of_some_ranks",  # an object that only rank 0 calls; no finding if other ranks may change theirs
            f"{STOPPER}    if hvd.rank() == 0:\n        stopper{call}(loss)\n    if stopper.stop:\n        break",
            f"{STOPPER}    if hvd.rank() == 0:\n        stopper{call}(loss)\n    {other}\n"
            "    if stopper.stop:\n        break",
        )
        for call in ("", ".step")
        for other in (
            f"stopper{call}(0)",
            "share(stopper)",
            "stopper.stop = hvd.broadcast_object(stopper.stop)",
            "stopper.stop = hvd.allreduce(torch.tensor(float(stopper.stop))) > 0",
        )
    ),
    (
        "loop_by_value_of_some_ranks",  # an attribute that only rank 0 sets
        f"{WRAP}class T:\n  def fit(self):\n    self.stop = False\n    for epoch in range(9):\n"
        "      loss.backward()\n      optimizer.step()\n      if hvd.rank() == 0:\n        self.stop = loss < best\n"
        "      if self.stop:\n        break",
        f"{WRAP}class T:\n  def fit(self):\n    self.stop = False\n    for epoch in range(9):\n"
        "      loss.backward()\n      optimizer.step()\n      self.stop = loss < best\n      if self.stop:\n        break",
    ),
    *(
        (
            "every_rank_reads_all",  # no finding if other code may replace the setting by this rank's part
            f"def fit(args):\n    {WRAP}    print(args)\n    d = Data(args.folder)\n"
            "    for x in torch.utils.data.DataLoader(d, shuffle=True):\n        pass\nfit(parse())",
            f"def fit(args):\n    {WRAP}    {replaces}\n    d = Data(args.folder)\n"
            "    for x in torch.utils.data.DataLoader(d, shuffle=True):\n        pass\nfit(parse())",
        )
        for replaces in ("choose(args)", "args.folder = choose(args.folder)")
    ),
    (
        "every_rank_reads_all",
        f"def part(files):\n    return files[1:]\n{WRAP}d = Data(part(FILES))\n"
        "for x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
        f"def part(files):\n    return files[hvd.rank():]\n{WRAP}d = Data(part(FILES))\n"
        "for x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
    ),
    (
        "loop_by_value_of_some_ranks",  # no finding if a decorator may send the value
        f"{WRAP}def load():\n    if hvd.rank() != 0:\n        return 0\n    return torch.load('x')['epoch']\n"
        f"begin = load()\nfor epoch in range(begin, 9):\n{STEP}",
        f"{WRAP}@from_rank_zero\ndef load():\n    if hvd.rank() != 0:\n        return 0\n"
        f"    return torch.load('x')['epoch']\nbegin = load()\nfor epoch in range(begin, 9):\n{STEP}",
    ),
    (
        "loop_by_value_of_some_ranks",  # no finding if another class has a method of this name
        f"{WRAP}class T:\n    def load(self):\n        if hvd.rank() != 0:\n            return 0\n"
        f"        return torch.load('x')['epoch']\nbegin = T().load()\nfor epoch in range(begin, 9):\n{STEP}",
        f"{WRAP}class B:\n    def load(self):\n        return 3\nclass T:\n    def load(self):\n"
        "        if hvd.rank() != 0:\n            return 0\n        return torch.load('x')['epoch']\n"
        f"class C(B):\n    def fit(self):\n        begin = self.load()\n        for epoch in range(begin, 9):\n"
        "            optimizer.step()\nC().fit()",
    ),
    *(
        (
            "every_rank_reads_all",  # no finding for data that is split in place, or by a class of the script
            f"{WRAP}d = Data(torch.ones(9))\nif hvd.rank() == 0:\n    torch.save(d, 'x')\n    d.show()\n"
            "for x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
            f"{WRAP}{split}\nfor x in torch.utils.data.DataLoader(d, shuffle=True):\n    pass",
        )
        for split in (
            "d = Data('x')\nd.data = d.data[hvd.rank() :: 2]",
            "d = Data('x')\nd.select(hvd.rank())",
            "d = []\nfor i in range(9):\n    if i % hvd.size() == hvd.rank():\n        d.append(i)",
            "class Data:\n    def __init__(self, x):\n        self.x = x[hvd.rank() :: 2]\nd = Data('x')",
        )
    ),
    (
        "every_rank_reads_all",  # an attribute of a trainer; no finding if its value is unknown
        f"{WRAP}class T:\n    def fit(self):\n        self.d = Data('x')\n"
        "        for x in torch.utils.data.DataLoader(self.d, shuffle=True):\n            pass\nT().fit()",
        f"{WRAP}class T:\n    def fit(self, d):\n        self.d = d\n"
        "        for x in torch.utils.data.DataLoader(self.d, shuffle=True):\n            pass\n"
        "        for x in torch.utils.data.DataLoader(self.e, shuffle=True):\n            pass\nT().fit(part())",
    ),
]


#: (rule, code before a call, call with positional arguments, the same call with keyword arguments, code after it).
SAME_CALLS = [
    ("data_parallel", WRAP, "torch.nn.DataParallel(model)", "torch.nn.DataParallel(module=model)", ""),
    ("discarded_result", AVERAGE, "average(loss)", "average(x=loss)", ""),
    ("discarded_result", "", "hvd.allreduce(torch.tensor(x))", "hvd.allreduce(torch.tensor(data=x))", ""),
    ("discarded_result", "", "hvd.allreduce(x)", "hvd.allreduce(tensor=x)", ""),
    (
        "padded_evaluation",
        TEST_SAMPLER,
        f"{TEST}(d, 2, None, s)",
        f"{TEST}(d, 2, sampler=s)",
        f"{TRAIN}for x in test_loader: f(x)",
    ),
    ("sampler_with_shuffle", TEST_SAMPLER, f"{TEST}(d, 2, True, s)", f"{TEST}(d, 2, shuffle=True, sampler=s)", ""),
    (
        "every_rank_reads_all",
        WRAP,
        f"x = {DATA_LOADER}(d, 2, True, None)",
        f"x = {DATA_LOADER}(d, shuffle=True, sampler=None)",
        "run(x)",
    ),
    (
        "every_rank_reads_all",
        WRAP,
        f"x = {DATA_LOADER}(d, 2, None, {RANDOM})",
        f"x = {DATA_LOADER}(d, sampler={RANDOM})",
        "run(x)",
    ),
    (
        "same_order_every_epoch",
        TRAIN_SAMPLER,
        f"x = {DATA_LOADER}(d, 2, None, s)",
        f"x = {DATA_LOADER}(d, sampler=s)",
        EPOCHS,
    ),
    ("saved_by_all_ranks", INIT, "open('x', 'w')", "open(file='x', mode='w')", ""),
    ("saved_by_all_ranks", INIT, "t.to_csv('x')", "t.to_csv(path_or_buf='x')", ""),
    (
        "downloaded_by_all_ranks",
        f"{MNIST}{INIT}{WRAP}",
        "MNIST('x', True, None, None, True)",
        "MNIST(root='x', download=True)",
        "",
    ),
    ("shard_by_local_rank", "", "d.shard(hvd.size(), hvd.local_rank())", "d.shard(hvd.size(), index=hvd.local_rank())", ""),
    ("shard_by_local_rank", "r, n = hvd.local_rank(), hvd.size()\n", "d.shard(n, r)", "d.shard(rank=r, size=n)", ""),
    ("shuffled_shards", "import random\n", "random.shuffle(d)", "random.shuffle(x=d)", "d = d[hvd.rank()::hvd.size()]"),
    (
        "predivided_groups",
        "",
        f"{DISTRIBUTED_OPTIMIZER}(o, n, c, 1, op, 2.0, 3)",
        f"{DISTRIBUTED_OPTIMIZER}(o, gradient_predivide_factor=2.0, num_groups=3)",
        "",
    ),
    (
        "adasum_skipping",
        "",
        f"o = {DISTRIBUTED_OPTIMIZER}(o, n, c, 1, hvd.Adasum)",
        f"o = {DISTRIBUTED_OPTIMIZER}(o, op=hvd.Adasum)",
        "o.skip_synchronize()",
    ),
    (
        "optimizer_state",
        "",
        "o = torch.optim.SGD(p, 1, 0, 0, 1)",
        "o = torch.optim.SGD(p, weight_decay=1)",
        f"{BROADCAST_STATE}(o, 0)",
    ),
    ("rate_times_size", "", f"{CYCLIC}(o, 1, hvd.size())", f"{CYCLIC}(o, 1, max_lr=hvd.size())", ""),
    ("same_gpu", INIT, "model.to('cuda')", "model.to(device='cuda')", WRAP),
    ("gpu_by_rank", "", "torch.device('cuda', hvd.rank())", "torch.device(type='cuda', index=hvd.rank())", ""),
    ("same_random_numbers", AUGMENTS, "torch.manual_seed(4)", "torch.manual_seed(seed=4)", f"{WRAP}{TRAIN}"),
    ("schedule_by_own_loss", f"{PLATEAU}{EPOCH}", "    s.step(loss)", "    s.step(metrics=loss)", ""),
    (
        "scaler_before_synchronize",
        f"{WRAP}loss.backward()\n",
        "scaler.step(optimizer)",
        "scaler.step(optimizer=optimizer)",
        "",
    ),
    ("half_precision", "", f"hvd.allreduce(x, 1, 'x', {HALF})", f"hvd.allreduce(x, compression={HALF})", ""),
]


@pytest.mark.parametrize(("rule", "before", "positional", "named", "after"), SAME_CALLS)
def test_keyword_arguments_have_the_findings_of_positional_ones(rule, before, positional, named, after):
    (one,), (other,) = (BY_NAME[rule](source(f"{before}{call}\n{after}")) for call in (positional, named))
    assert (one.line, one.message, bool(one.edits)) == (other.line, other.message, bool(other.edits))


@pytest.mark.parametrize(
    ("rule", "script_with_finding", "script_without_finding"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_rule_has_a_finding_only_where_the_source_shows_the_mistake(rule, script_with_finding, script_without_finding):
    assert len(list(BY_NAME[rule](source(script_with_finding)))) == 1
    assert list(BY_NAME[rule](source(script_without_finding))) == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("torch.cuda.synchronize()", 1),
        ("hvd.synchronize(hvd.allreduce_async_(x))", 1),
        ("optimizer.synchronize()\nwith optimizer.skip_synchronize():\n    optimizer.step()", 1),
        ("def step(self):\n    self.opt_g.synchronize()", 1),
        ("state.synchronize()", 0),
        ("from lib import synchronize\nsynchronize(model)", 0),
        ("stop = list(map(comm.synchronize, stops))", 0),
    ],
)
def test_a_synchronize_that_only_waits_does_not_hide_values_that_only_some_ranks_have(line, count):
    wrap = f"import torch\n{WRAP}"
    load = f"{wrap}if hvd.rank() == 0:\n    model.load_state_dict(x)\nloss.backward()\n"
    rate = f"{wrap}for e in r:\n    train(e)\n    if hvd.rank() == 0:\n        optimizer.param_groups[0]['lr'] *= 0.1\n"
    stop = f"import torch\n{STOPPER}    if hvd.rank() == 0:\n        stopper(loss)\n    if stopper.stop:\n        break\n"
    scripts = {"loaded_on_some_ranks": load, "rate_on_some_ranks": rate, "loop_by_value_of_some_ranks": stop}
    for rule, text in scripts.items():
        assert len(list(BY_NAME[rule](source(text + line)))) == count, rule


def test_a_seed_in_another_file_prevents_the_finding_on_random_splits(tmp_path):
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(f"import torch, horovod.torch as hvd\n{WRAP}a, b = torch.utils.data.random_split(d, [1, 2])\n")
    other.write_text("import torch\ntorch.manual_seed(1)\n")
    split = "each rank splits the data differently"
    one_file, both_files = parse_scripts([str(one)]), parse_scripts([str(one), str(other)])
    assert any(each.message.startswith(split) for each in findings(one_file[str(one)][1]))
    assert not any(each.message.startswith(split) for each in findings(both_files[str(one)][1]))


@pytest.mark.parametrize("call", ["main(h)", "main(h=h)", "def start(h):\n    main(h)\nstart(h)"])
def test_a_parameter_to_which_a_call_passes_the_module_is_the_module(call):
    text = f"import horovod.torch as h\ndef main(h):\n    h.init()\n{call}\n"
    assert len(Source(text).hvd_calls("init")) == 1
    assert not Source(text.replace("main(h)\n", "main(0)\n").replace("h=h", "h=0")).hvd_calls("init")
    assert not Source(text.replace("    h.init()", "    h = h.cell\n    h.init()")).hvd_calls("init")


def test_each_file_of_a_program_is_listed_once(tmp_path):
    names = [str(tmp_path / name) for name in ("one.py", "other.py")]
    for name in names:
        Path(name).write_text(f"import torch\nimport horovod.torch as hvd\n{BASE}{INIT}Base().fit()\n")
    message = "all ranks write this file"
    (source,) = [source for _, source in parse_scripts(names[:1]).values()]
    assert any(each.message.startswith(message) for each in findings(source))
    sources = [source for _, source in parse_scripts(names).values()]
    assert [len(source.files) for source in sources] == [2, 2]  # although both files have the same text
    changed = sources[0].with_text("x = 1")
    assert [[file.text for file in one.files] for one in changed.files] == [
        ["x = 1", sources[1].text],
        [sources[1].text, "x = 1"],
    ]


def test_findings_with_the_same_message_are_printed_in_one_line(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import horovod.torch as hvd\nhvd.init()\nhvd.broadcast(x, 0)\nhvd.broadcast(y, 0)\nhvd.broadcast(z, 0)\n"
    )
    assert check([str(script)]) == 1
    line, summary = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{script}:3: [trap] ")
    assert line.endswith(" (also lines 4, 5)")
    assert summary == "1 file read: 1 trap; --fix repairs 1 of them"


def test_only_the_first_of_consecutive_calls_that_raise_has_a_finding():
    text = "hvd.rank()\nhvd.size()\nhvd.init()\nhvd.shutdown()\nhvd.rank()\nhvd.size()"
    assert [each.line for each in findings(source(text)) if "raises an error" in each.message] == [3, 7]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("", "nothing combines the results;"),
        ("losses = AverageMeter()\n", "nothing combines the results;"),
        ("total = hvd.allreduce(total)\ndef test():\n    pass\nif hvd.rank() == 0:\n    test()\n", "nothing combines"),
        ("total = hvd.allreduce(total)\n", "evaluated twice"),
        ("total = mean_over_ranks(total)\n", "evaluated twice"),
        ("import torch\ntorch.cuda.synchronize()\noptimizer.synchronize()\n", "nothing combines"),
        ("with optimizer.skip_synchronize():\n    optimizer.step()\n", "nothing combines"),
        ("meter.synchronize()\n", "evaluated twice"),
        ("from lib import Metric\nloss = Metric('loss')\n", "evaluated twice"),
        ("from lib import evaluate\nevaluate(model, test_loader)\n", "evaluated twice"),
    ],
)
def test_the_finding_on_evaluation_says_whether_results_are_combined(code, words):
    loader = f"test_loader = torch.utils.data.DataLoader(test_data, sampler={SAMPLER})\n"
    script = source(f"{INIT}{loader}{TRAIN}for x in test_loader:\n    total += model(x)\n{code}")
    (finding,) = BY_NAME["padded_evaluation"](script)
    assert words in finding.message


@pytest.mark.parametrize(("step", "repaired"), [("optimizer.step()", True), ("if i % 2:\n    optimizer.step()", False)])
def test_a_clip_before_a_step_that_may_be_skipped_has_no_repair(step, repaired):
    script = source(f"import torch\n{WRAP}{CLIP}{step}\n")
    (finding,) = BY_NAME["clip_before_synchronize"](script)
    assert bool(finding.edits) is repaired


@pytest.mark.parametrize(("device", "count"), [("args.device", 1), ("torch.device('cuda')", 0)])
def test_code_under_a_comparison_that_is_never_true_has_no_findings(device, count):
    script = source(f"import torch\ndevice = {device}\nif device == 'cuda':\n    if hvd.nccl_built():\n        rate = 1")
    assert len(findings(script)) == count


@pytest.mark.parametrize(("assignments", "count"), [("", 0), ("args.mode = 1\nargs.mode = 2\n", 1)])
def test_code_that_needs_another_value_of_a_variable_than_init_has_no_findings(assignments, count):
    script = source(
        f"{assignments}if args.mode == 1:\n    hvd.init()\nif args.mode == 2:\n    if hvd.nccl_built():\n        rate = 1"
    )
    assert len(findings(script)) == count


@pytest.mark.parametrize("start", ["for mode in (1, 2):", "def start(mode):", "class T:\n  def start(self):"])
def test_code_that_may_run_after_init_with_another_value_of_a_variable_is_not_exclusive(start):
    mode = "self.mode" if "self" in start else "mode"
    body = f"    if {mode} == 1:\n        hvd.init()\n    if {mode} == 2:\n        use(hvd.nccl_built())"
    script = source(f"{start}\n{body}")
    assert not script.exclusive(script.hvd_calls("init")[0], script.hvd_calls("nccl_built")[0])


def count_profile_events(text):
    """Return the number of calls and returns of functions during a check."""
    script, events = source(text), 0

    def count(*_):
        nonlocal events
        events += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        findings(script)
    finally:
        sys.setprofile(before)
    return events


@pytest.mark.parametrize(
    "line", ["x{n} = foo(a, b[{n}], c.d({n})) if q else 3\n", "x{n} = foo(y{n}, rank=q, size=c.d({n}))\n"]
)
def test_the_work_of_a_check_grows_with_the_length_of_the_script_and_not_with_its_square(all_rules, line):
    short, long = ("".join(line.format(n=n) for n in range(count)) for count in (20, 40))
    start = "from lib import a, b, c, foo, q\nhvd.shutdown()\n"
    assert count_profile_events(start + long) < 2.5 * count_profile_events(start + short)
