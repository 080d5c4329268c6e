"""Rules of ``horovodize --check``, applied to correct scripts (no finding) and to methods that write files."""

import pytest

from dualtrain.horovodize import gradient_changes
from dualtrain.horovodize.gradient_changes import changing_functions
from dualtrain.horovodize.rules import RULES
from dualtrain.horovodize.source import Source, connect

BY_NAME = {rule.__name__: rule for rule in RULES}
START = "import torch\nimport horovod.torch as hvd\nhvd.init()\n"
SENT = "hvd.broadcast_parameters({}.state_dict(), root_rank=0)\n"
WRAP = "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters())\n"
NET = "net = torch.nn.Linear(4, 2)\n"

BROADCAST = {
    "method": "class Trainer:\n    def __init__(self, model):\n        self.model = model\n    def start(self):\n        "
    f"{SENT.format('self.model')}{NET}{WRAP}Trainer(net).start()",
    "factory": f"def build():\n    model = torch.nn.Linear(4, 2)\n    {SENT.format('model')}    return model\n"
    f"net = build()\n{WRAP}",
    "constructor": "class Net(torch.nn.Module):\n    def __init__(self):\n        self.a = torch.nn.Linear(4, 2)\n        "
    f"{SENT.format('self.a')}net = Net()\n{WRAP}",
    "alias": f"def setup(given):\n    model = given\n    {SENT.format('model')}{NET}{WRAP}setup(net)",
    "loop": f"{NET}other = torch.nn.Linear(2, 1)\nm = torch.nn.Linear(1, 1)\n"
    f"for m in (net, other):\n    {SENT.format('m')}{WRAP}",
    "caller": "def main():\n    model = torch.nn.Linear(4, 2)\n    " + SENT.format("model") + "    run(model)\n"
    "def run(base):\n    net = torch.jit.script(base)\n    " + WRAP + "main()",
    "element": "nets = {}\ng = torch.nn.Linear(4, 2)\nnets['g'] = g\n"
    + SENT.format("g")
    + "net = torch.nn.ModuleDict(nets)\n"
    + WRAP,
    "third model": "base = torch.nn.Linear(4, 2)\none = torch.nn.Sequential(base)\nnet = torch.nn.Sequential(base)\n"
    + SENT.format("one")
    + WRAP,
    "copy": f"{NET}one = torch.nn.Linear(4, 2)\n{SENT.format('one')}"
    "for p, q in zip(net.parameters(), one.parameters()):\n    p.data.copy_(q.data)\n" + WRAP,
}

CONSTANT = {
    "loop": f"{NET}{WRAP}for p in net.parameters():\n    p.data.fill_(0.1)",
    "no_grad": f"{NET}{WRAP}for name, p in net.named_parameters():\n    with torch.no_grad():\n        p.zero_()",
    "weight and bias": f"{NET}{WRAP}torch.nn.init.zeros_(net.weight)\ntorch.nn.init.constant_(net.bias, 1)",
    "no bias": f"net = torch.nn.Linear(4, 2, bias=False)\n{WRAP}with torch.no_grad():\n    net.weight.fill_(1.0)",
}

AGAIN = "optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())\n"
PLAIN = (
    f"{NET}{WRAP}{SENT.format('net')}d = torch.nn.Linear(2, 2)\n{SENT.format('d')}o = torch.optim.Adam(d.parameters())\n"
)
STEP = "for x in data:\n    d(x).sum().backward()\n"
AVERAGED = {
    "helper": f"{PLAIN}def average(tensors):\n    for p in tensors:\n        g = p.grad.data\n        hvd.allreduce_(g)\n"
    f"{STEP}    average(d.parameters())\n    o.step()",
    "flat buffer": f"{PLAIN}def merge(tensors):\n    flat = torch.cat([p.grad.view(-1) for p in tensors])\n"
    f"    flat = hvd.allreduce(flat)\n"
    f"    for p in tensors:\n        p.grad.copy_(flat[: p.numel()])\n{STEP}    merge(list(d.parameters()))\n    o.step()",
    "two functions": f"{PLAIN}def mean(t):\n    return hvd.allreduce(t)\n"
    f"{STEP}    for p in d.parameters():\n        p.grad = mean(p.grad)\n    o.step()",
    "hooks": f"{PLAIN}for p in d.parameters():\n    p.register_hook(lambda g: hvd.allreduce(g))\n{STEP}    o.step()",
    "weights": f"{PLAIN}{STEP}    o.step()\n    for p in d.parameters():\n        p.data = hvd.allreduce(p.data)",
    "rank 0": f"{PLAIN}if hvd.rank() == 0:\n    for x in data:\n        d(x).sum().backward()\n        o.step()\n"
    f"{SENT.format('d')}",
    "rank 0 calls": f"{PLAIN}def train():\n    d(1).sum().backward()\n    o.step()\nif hvd.rank() == 0:\n    train()",
    "broadcast later": f"{PLAIN}{STEP}    o.step()\n{SENT.format('d')}",
    "DDP": f"{PLAIN}e = torch.nn.parallel.DistributedDataParallel(d)\n{STEP.replace('d(', 'e(')}    o.step()",
    "FSDP": f"{PLAIN}torch.distributed.fsdp.fully_shard(d)\n{STEP}    o.step()",
    "one rank": f"{PLAIN}if hvd.size() == 1:\n    for x in data:\n        d(x).sum().backward()\n        o.step()",
}
OTHER_MODEL = {"DDP of another model": f"{PLAIN}d = torch.nn.parallel.DistributedDataParallel(d)\n{STEP}    o.step()"}

WRAPPED = {
    "tuple": f"net, optimizer = build()\n{AGAIN}net, optimizer = build()\n{AGAIN}",
    "for": f"{AGAIN}for optimizer in build():\n    {AGAIN}",
    "with": f"{AGAIN}with build() as optimizer:\n    {AGAIN}",
    "walrus": f"{AGAIN}(optimizer := build())\n{AGAIN}",
    "global": f"def start():\n    global optimizer\n    optimizer = build()\n{AGAIN}start()\n{AGAIN}",
    "try": f"try:\n    {AGAIN}except TypeError:\n    {AGAIN}",
}

BACKWARD = NET + WRAP + "for x in data:\n    net(x).sum().backward()\n"
SKIP = "    with optimizer.skip_synchronize():\n        optimizer.step()"
SKIPPED = {
    "allreduce": f"{BACKWARD}    for p in net.parameters():\n        hvd.allreduce_(p.grad)\n{SKIP}",
    "function": f"def mean(module):\n    for p in module.parameters():\n        hvd.allreduce_(p.grad)\n"
    f"{BACKWARD}    mean(net)\n{SKIP}",
    "imported": f"from lib import mean\n{BACKWARD}    mean(net)\n{SKIP}",
    "hook": f"{NET}for p in net.parameters():\n    p.register_hook(hvd.allreduce)\n{BACKWARD}{SKIP}",
}
OTHER = (
    f"{NET}{WRAP}d = torch.nn.Linear(2, 2)\n"
    "o = torch.optim.Adam(d.parameters())\nfor x in data:\n    d(net(x)).sum().backward()\n"
)
CHANGED = {
    "sum": f"{OTHER}    for p in d.parameters():\n        hvd.allreduce_(p.grad, op=hvd.Sum)\n"
    "        p.grad /= hvd.size()\n    o.step()\n    optimizer.step()",
    "scale first": f"{BACKWARD}    for p in net.parameters():\n        p.grad /= hvd.size()\n"
    f"        hvd.allreduce_(p.grad, op=hvd.Sum)\n{SKIP}",
    "other": f"{OTHER}    for p in d.parameters():\n        p.grad.mul_(2)\n    o.step()\n    optimizer.step()",
    "clip": f"{BACKWARD}    for p in net.parameters():\n        hvd.allreduce_(p.grad)\n"
    f"    torch.nn.utils.clip_grad_norm_(net.parameters(), 1)\n{SKIP}",
}
SCALED = BACKWARD.replace("net(x).sum().backward()", "scaler.scale(net(x).sum()).backward()")
BY_IMPORT = {
    "scaler": f"from lib import avg_grads\nscaler = torch.amp.GradScaler()\n{SCALED}    avg_grads(net)\n"
    f"{SKIP.replace('optimizer.step()', 'scaler.step(optimizer)')}",
    "change": "from lib import average_gradients\ndef limit(m):\n    average_gradients(m)\n"
    f"    for p in m.parameters():\n        p.grad.clamp_(-1, 1)\n{BACKWARD}    limit(net)\n{SKIP}",
}
RATES = {
    "step size": f"{NET}{WRAP}a = torch.optim.lr_scheduler.StepLR(optimizer, 30 * hvd.size())\n"
    "b = torch.optim.swa_utils.AveragedModel(net, hvd.size())",
}
EPOCH = (
    BACKWARD.replace("for x", "for e in range(3):\n    for x").replace("    net(x)", "        net(x)")
    + "        optimizer.step()\n"
)
LOGGED = {
    "entry": f"{EPOCH}    if hvd.rank() == 0:\n        logs['lr'] = optimizer.param_groups[0]['lr']",
    "entry in a loop": f"{EPOCH}    if hvd.rank() == 0:\n        for g in optimizer.param_groups:\n"
    "            logs['lr'] = g['lr']",
    "entry of a tuple": f"{EPOCH}    if hvd.rank() == 0:\n        logs['lr'], n = optimizer.param_groups[0]['lr'], 1",
    "entry of a history": f"{EPOCH}    if hvd.rank() == 0:\n"
    "        logs['lr'] += [g['lr'] for g in optimizer.param_groups]",
    "rate after training": f"{EPOCH}if hvd.rank() == 0:\n    for g in optimizer.param_groups:\n        g['lr'] = 1.0",
}
METHOD = {
    "argument of a method": "class T:\n    def load(self, optimizer, net):\n"
    "        optimizer.load_state_dict(torch.load('o.pt'))\n"
    f"{NET}{WRAP}{SENT.format('net')}t = T()\nif hvd.rank() == 0:\n    t.load(optimizer, net)\n"
    "hvd.broadcast_optimizer_state(optimizer, 0)\nfor x in data:\n    net(x).sum().backward()\n    optimizer.step()",
}
THREADS = {
    "if": "if hvd.mpi_built():\n    print(hvd.mpi_threads_supported())",
    "and": "x = hvd.mpi_enabled() and hvd.mpi_threads_supported()",
    "early return": "def f():\n    if not hvd.mpi_built():\n        return\n    hvd.mpi_threads_supported()",
}
LEAVE = "    if hvd.rank() == 0:\n        print(x)\n        break\n"
LOOP = "for i in range(9):\n    x = hvd.allreduce(torch.ones(1))\n"
LEFT = {
    "raise": f"{LOOP}{LEAVE}    raise SystemExit",
    "exit": f"import sys\n{LOOP}    if hvd.rank() != 0:\n        break\n    print(x)\n    sys.exit(0)",
    "outer block": f"{LOOP}    if x > 3:\n        if hvd.rank() == 0:\n            break\n    if x > 3:\n        break",
    "last iteration": f"{LOOP}    if i == 8:\n        if hvd.rank() == 0:\n            break",
    "condition of while": "x = 0\nwhile x < 9:\n    x += hvd.allreduce(torch.ones(1))\n"
    "    if hvd.rank() == 0 and x >= 9:\n        break",
}
TESTED = {
    "else of try": "try:\n    hvd.new\nexcept AttributeError:\n    pass\nelse:\n    hvd.new()",
    "is True": "if hasattr(hvd, 'new') is True:\n    hvd.new()\nif hasattr(hvd, 'new') == True:\n    hvd.new()",
    "compression": "c = hvd.Compression.new if hasattr(hvd.Compression, 'new') else hvd.Compression.none",
    "private": "hvd.Compression.__dict__",
    "assigned": "hvd.Compression.new = Mine\nhvd.Compression.new.compress(x)",
    "is False": "if hasattr(hvd, 'new') is False:\n    pass\nelse:\n    hvd.new()",
}
EPOCHS = {
    "epoch": "s = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())\n"
    "loader = torch.utils.data.DataLoader(data, sampler=s)\ns.set_epoch(0)\n"
    f"{NET}{WRAP}for epoch in range(3):\n    s.epoch = epoch\n    for x in loader:\n        net(x).sum().backward()\n"
    "        optimizer.step()",
}

CASES = [
    *(("never_broadcast", text) for text in BROADCAST.values()),
    *(("never_broadcast", text) for text in CONSTANT.values()),
    *(("never_wrapped", text) for text in AVERAGED.values()),
    *(("wrapped_twice", text) for text in WRAPPED.values()),
    *(("skipped_reduction", text) for text in SKIPPED.values()),
    *(("clip_before_synchronize", text) for text in CHANGED.values()),
    *(("averaged_twice", text) for text in OTHER_MODEL.values()),
    ("scaler_before_synchronize", BY_IMPORT["scaler"]),
    ("clip_before_synchronize", BY_IMPORT["change"]),
    ("skipped_reduction", BY_IMPORT["change"]),
    *(("rate_times_size", text) for text in RATES.values()),
    *(("loop_left_on_some_ranks", text) for text in LEFT.values()),
    *(("unknown_name", text) for text in TESTED.values()),
    *(("rate_on_some_ranks", text) for text in LOGGED.values()),
    *(("loaded_on_some_ranks", text) for text in METHOD.values()),
    *(("threads_of_mpi", text) for text in THREADS.values()),
    *(("same_order_every_epoch", text) for text in EPOCHS.values()),
]
NAMES = [
    *BROADCAST,
    *CONSTANT,
    *AVERAGED,
    *WRAPPED,
    *SKIPPED,
    *CHANGED,
    *OTHER_MODEL,
    *BY_IMPORT,
    "change, skip",
    *RATES,
    *LEFT,
    *TESTED,
    *LOGGED,
    *METHOD,
    *(f"threads, {name}" for name in THREADS),
    *EPOCHS,
]


@pytest.mark.parametrize(("rule", "text"), CASES, ids=NAMES)
def test_a_rule_reports_nothing_for_a_correct_script(rule, text):
    assert list(BY_NAME[rule](Source(START + text))) == []


SAVER = """
class Base:
    def __init__(self, out): self.out = out
    def save(self): torch.save({}, {path})
class Saver(Base):
    def fit(self): self.save()
"""


@pytest.mark.parametrize(
    ("path", "calls"),
    [
        pytest.param(
            "'x'", "saver = Base(0) if hvd.rank() == 0 else None\nif saver:\n    saver.save()", id="object-or-none"
        ),
        pytest.param(
            "'x'", "saver = None\nif hvd.rank() == 0:\n    saver = Base(0)\nif saver:\n    saver.save()", id="object"
        ),
        pytest.param(
            "'x'", "if hvd.rank() == 0:\n    saver = Base(0)\nelse:\n    saver = Other()\nsaver.save()", id="else"
        ),
        pytest.param("self.out", "Saver(f'{hvd.rank()}').fit()", id="inherited-init"),
        pytest.param("self.folder", "saver = Base(0)\nsaver.folder = f'{hvd.rank()}'\nsaver.save()", id="set-from-outside"),
        pytest.param("self.folder.format(1)", "Base(0).save()", id="unknown-attribute"),
        pytest.param("'x') if self.out else print(", "Saver(hvd.rank() == 0).fit()", id="flag"),
    ],
)
def test_a_method_that_may_write_on_one_rank_only_or_to_one_file_per_rank_has_no_finding(path, calls):
    source = Source(f"{START}{SAVER.replace('{path}', path)}{calls}\n")
    assert not list(BY_NAME["saved_by_all_ranks"](source))


@pytest.mark.parametrize("path", ["'x'", "f'{self.out}/{epoch}.pt'", "self.out.format(epoch)"])
def test_a_method_that_writes_a_file_on_all_ranks_has_a_finding(path):
    fit = "class Trainer:\n    def __init__(self, out): self.out = out\n    def save(self, epoch): "
    fit += f"torch.save({{}}, {path})\n    def fit(self):\n        for epoch in range(2):\n            self.save(epoch)\n"
    source = Source(f"{START}{fit}if __name__ == '__main__':\n    Trainer('x').fit()\n")
    assert [finding.line for finding in BY_NAME["saved_by_all_ranks"](source)] == [6]


def test_each_file_is_searched_only_once_for_changes_of_gradients(monkeypatch):
    program = [Source(f"{START}def clip{n}(m):\n    for p in m.parameters():\n        p.grad.mul_(2)\n") for n in range(3)]
    connect(program)
    assert [changing_functions(file) for file in program] == [{"clip0", "clip1", "clip2"}] * 3
    monkeypatch.setattr(gradient_changes, "is_change", None)  # a second search would call it
    assert changing_functions(program[1]) == {"clip0", "clip1", "clip2"}
