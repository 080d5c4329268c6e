"""What is measured, against what, and what it should come to. Numbers that a run finds are nowhere in here.

A round starts every contender once, in fresh processes, and each measures its whole list of jobs in one go: starting
takes longer than the steps. A row compares two contenders of the same round, and has one pair a round. Rounds go forth and
back in turns, A B, B A, A B …: on a machine that gets steadily slower, the later one of a pair loses in every round, which
is B in one and A in the next. So the pairs err to both sides by as much: a linear drift is gone from their middle, and
shows in the interval's width. The reference of most rows, tuned DDP, runs twice a round: the two are equal, and what they
differ by is the noise.

What a contender measures is what a row or the table of allreduces needs of it, with as few steps as a median takes: the
interval comes from the number of rounds, and every second of a round counts seven times.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Steps of each workload: discarded, timed. The first is slower; DDP's second, in which it lays its buckets out anew, is
#: not. A round takes a share of the timed ones (``pace.py``), with --quick half at most.
LENGTHS = {
    "tiny": (2, 4),
    "empty": (20, 200),
    "small": (4, 32),
    "convnet": (2, 12),
    "resnet18": (2, 6),
    "mlp": (1, 4),
    "resnet18-cl": (1, 4),
    "resnet18-bf16-cl": (1, 4),
}
LAYOUTS = ("resnet18-cl", "resnet18-bf16-cl")
STEPS = tuple(job for job in LENGTHS if job not in LAYOUTS)
MODELS = tuple(job for job in STEPS if job != "empty")
#: Bytes of the allreduces. Those of "large" are for the contenders that a target or the answer rests on.
SIZES = {"sweep": (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20), "large": (100_000_000, 256 << 20)}
JOBS = (*LENGTHS, *SIZES, "trainer", "stall", "feed", "epoch", "import")
DEFAULT = tuple(job for job in JOBS if job != "tiny")
QUICK = ("empty", "small", "convnet", "sweep", "trainer")
#: Rounds to aim at, and the pairs that a verdict takes.
ROUNDS = 7
TRAINER_STEPS = 250
STALL_STEPS = 2
EPOCH_SAMPLES, EPOCH_BATCH, EPOCH_LR = 12_000, 100, 0.05  # so many that both end with one accuracy


@dataclass(frozen=True)
class Entry:
    """A contender: which file it is in, what starts it, and what else it measures beside the steps.

    ``starter`` is ``"ranks"`` for the variables that torchrun sets, else the command of Horovod's that starts it, or whose
    part ``start_contender.py`` takes. The workloads of ``steps`` come first.
    """

    title: str
    module: str
    option: str = ""
    starter: str = "ranks"
    jobs: tuple[str, ...] = ()
    needs: str = ""
    quick: bool = True
    steps: tuple[str, ...] = STEPS


GLOO, MPI = "horovodrun --gloo", "horovodrun --mpi"
TUNED, AGAIN = "ddp-tuned", "ddp-tuned-again"
OURS = "ours"
MAIN, IMPORT = "the command line", "an import"  # in place of a module: no contender's file

#: In the order of a round: neighbours are compared with each other.
ENTRIES = {
    "alone": Entry("no communication", "alone", quick=False),
    "shm": Entry(
        "dualtrain torch, shared memory",
        OURS,
        "torch/shm",
        jobs=(*LAYOUTS, "sweep", "large", "trainer", "stall", "feed"),
    ),
    TUNED: Entry("raw DDP tuned", "ddp", "tuned", jobs=(*LAYOUTS, "sweep", "large")),
    "native": Entry("dualtrain torch, native", OURS, "torch/native", jobs=("sweep",), quick=False),
    AGAIN: Entry("raw DDP tuned, again", "ddp", "tuned"),
    "ddp": Entry("raw DDP", "ddp", "plain", jobs=("stall",), quick=False),
    "hvd-gloo": Entry("raw Horovod Gloo", "raw_horovod", "", GLOO, ("sweep", "large"), "horovod"),
    "ours-gloo": Entry("dualtrain horovod Gloo", OURS, "horovod/native", GLOO, ("sweep",), "horovod", quick=False),
    "hvd-mpi": Entry("raw Horovod MPI", "raw_horovod", "", MPI, ("sweep",), "horovod", quick=False),
    "ours-mpi": Entry("dualtrain horovod MPI", OURS, "horovod/native", MPI, ("sweep",), "horovod", quick=False),
    "accelerate": Entry("Accelerate", "with_accelerate", needs="accelerate", quick=False, steps=MODELS),
    "fabric": Entry("Lightning Fabric", "with_fabric", needs="lightning_fabric", quick=False, steps=MODELS),
    "ignite": Entry("ignite.distributed", "with_ignite", needs="ignite", quick=False, steps=MODELS),
    "tutorial": Entry("tutorial script", "tutorial", jobs=("feed", "epoch"), quick=False, steps=()),
    "main": Entry("dualtrain.main", MAIN, jobs=("epoch",), quick=False, steps=()),
    "main-bf16": Entry(
        "dualtrain.main, bf16 + channels_last",
        MAIN,
        "--amp bf16 --channels-last",
        jobs=("epoch",),
        quick=False,
        steps=(),
    ),
    "import": Entry("import dualtrain", IMPORT, jobs=("import",), steps=()),
}
#: Who answers with --quick in place of one that cannot run here: some ranks share no memory, mpirun starts no Gloo.
SPARES = {"shm": "native", "hvd-gloo": "hvd-mpi"}
#: How a contender is got that is missing.
CURES = {"horovod": "bash launch/setup.sh", "": "pip install 'dualtrain[bench]'"}


@dataclass(frozen=True)
class Comparison:
    """Rows of throughput, one for each job that both have: ``one`` over ``other``.

    ``targets`` are what the lower end of a job's interval should reach, ``"*"`` that of the other workloads. ``aside``
    leaves the noise floor out of it: then an interval may lie below by what two equal contenders differ.
    """

    one: str
    other: str
    targets: dict[str, float]
    aside: bool = False


COMPARISONS = (
    Comparison(AGAIN, TUNED, {}),
    Comparison("shm", TUNED, {"resnet18": 1.30, "mlp": 1.15, "small": 1.40, "sweep/100000000": 5.0}),
    Comparison("shm", "alone", {"resnet18": 0.95, "mlp": 0.90, "convnet": 0.97}),
    Comparison("native", TUNED, {"*": 1.00}, aside=True),
    Comparison("ours-gloo", "hvd-gloo", {"*": 1.00, "small": 1.30}),
    Comparison("ours-mpi", "hvd-mpi", {"*": 1.00}),
    Comparison("shm", "ddp", {}),
    Comparison("shm", "hvd-gloo", {}),
    Comparison("shm", "hvd-mpi", {}),
    Comparison("native", "hvd-gloo", {}),
    Comparison("native", "hvd-mpi", {}),
    Comparison(TUNED, "hvd-gloo", {}),
    Comparison(TUNED, "hvd-mpi", {}),
    *(Comparison("shm", peer, {"*": 1.00}) for peer in ("accelerate", "fabric", "ignite")),
    Comparison("shm", "tutorial", {"feed": 30.0}),
    Comparison("main", "tutorial", {"epoch": 1.6}),
    Comparison("main-bf16", "tutorial", {"epoch": 2.5}),
)


@dataclass(frozen=True)
class Cost:
    """A row of a time: what ``job`` takes ``one``, beyond what it takes ``other`` if there is one; at most ``target``."""

    title: str
    one: str
    job: str
    unit: str
    target: float | None
    other: str = ""


COSTS = (
    Cost("allreduce of 4 KB, shared memory", "shm", "sweep/4096", "µs", 30.0),
    Cost("allreduce of 4 KB, native", "native", "sweep/4096", "µs", None),
    Cost("allreduce of 4 KB, raw Gloo", TUNED, "sweep/4096", "µs", None),
    Cost("a step of the trainer, beyond one by hand (empty model)", "shm", "trainer", "µs", 20.0),
    Cost("import dualtrain, beyond import torch", "import", "import", "ms", 50.0),
    Cost("launch to first step, beyond raw DDP tuned", "shm", "start", "ms", 100.0, TUNED),
    Cost("stall of a checkpoint (ResNet-18)", "shm", "stall", "ms", None),
    Cost("stall of torch.save in a raw DDP script", "ddp", "stall", "ms", None),
)


def steps_of(job: str, effort: float) -> int:
    """How many steps of a workload are timed at this effort; two at least."""
    return max(2, round(LENGTHS[job][1] * effort))


def jobs_of(entry: Entry, chosen: Collection[str]) -> tuple[str, ...]:
    """What this contender measures, in order. The first one also gives the time from launch to the first step."""
    return tuple(job for job in entry.steps + entry.jobs if job in chosen)
