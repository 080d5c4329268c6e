"""Benchmark plan: workloads, comparisons and targets. It contains no measured numbers.

A round starts every contender once, in fresh processes. Each contender measures all its jobs in one start, because starting
takes longer than the steps. A row of the table compares two contenders or shows a cost; each
round gives the row one value.

The order alternates between rounds: A B, B A, A B, … On a machine that becomes steadily slower, the later of two
contenders is at a disadvantage: B in one round, A in the next. The errors therefore cancel in the median, and a linear
drift only widens the interval. Tuned DDP is listed as two contenders, whose ratio gives the noise floor.

A contender measures only values that a row or the table of allreduces needs, with just enough steps for a median. More
steps would take time without narrowing the intervals, which depend on the number of rounds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass

#: Steps of each workload: (discarded, timed). At least the first step is discarded, because it is slower than the others.
#: The second step, in which DDP rebuilds its buckets, may count: it is not slower. A round runs a fraction of the timed
#: steps (``pace.py``), at most half of them with --quick.
LENGTHS = {
    "tiny": (2, 4),
    "layers20": (4, 32),
    "empty": (20, 200),
    "small": (4, 32),
    "convnet": (2, 12),
    "resnet18": (2, 6),
    "mlp": (1, 4),
    "resnet18-cl": (1, 4),
    "resnet18-bf16-cl": (1, 4),
    "virtual-convnet": (2, 12),
    "virtual-resnet18": (2, 6),
    "virtual-mlp": (1, 4),
    "transformer": (2, 6),
    "vgg": (2, 6),
    "mlp33m": (2, 8),
    "layers250": (4, 32),
    "linear": (2, 16),
}
LAYOUTS = ("resnet18-cl", "resnet18-bf16-cl")
VIRTUAL = tuple(job for job in LENGTHS if job.startswith("virtual-"))  # cost of --virtual-ranks; not measured by default
SHAPES = ("transformer", "vgg", "mlp33m", "layers250", "linear")  # other gradient sizes; not measured by default
#: Workloads of a contender, unless its entry has a different value of ``workloads``.
WORKLOADS = tuple(job for job in LENGTHS if job not in LAYOUTS + VIRTUAL)
MODELS = tuple(job for job in WORKLOADS if job not in ("empty", "layers20", *SHAPES))
#: Bytes of the allreduces. "large" is measured only for the contenders that a target compares, and for raw Horovod over
#: Gloo.
SIZES = {"sweep": (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20), "large": (100_000_000, 256 << 20)}
JOBS = (*LENGTHS, *SIZES, "trainer", "stall", "feed", "epoch", "import")
DEFAULT = tuple(job for job in JOBS if job not in ("tiny", "layers20", *VIRTUAL, *SHAPES))
GROUPS = {"virtual": VIRTUAL, "shapes": SHAPES}  # names for several jobs
QUICK = ("empty", "small", "convnet", "sweep", "trainer")
#: Description of what each job measures. "large" has none: its sizes are part of "sweep" in the results.
ABOUT = {
    "tiny": "a step of a model of 18 weights; for tests",
    "layers20": "a step of 20 linear layers of 32 × 32 (20,394 weights), batch 16",
    "empty": "a step of a model of 2 weights, batch 1: the cost of a step without computation",
    "small": "a step of 100 linear layers of 68 × 68 (465,198 weights), batch 32: many small gradients",
    "convnet": "a step of the MNIST ConvNet (29,034 weights), batch 100 images of 28 × 28",
    "resnet18": "a step of ResNet-18 (11.2 M weights), batch 32 images of 3 × 32 × 32",
    "mlp": "a step of an MLP of 784-4096-4096-10 (20.0 M weights), batch 128: large gradients, little computation",
    "resnet18-cl": "a step of resnet18 in the channels_last layout",
    "resnet18-bf16-cl": "a step of resnet18 under bf16 autocast, in the channels_last layout",
    "virtual-convnet": "a step of the trainer on the ConvNet, with virtual ranks and without",
    "virtual-resnet18": "a step of the trainer on ResNet-18, with virtual ranks and without",
    "virtual-mlp": "a step of the trainer on the MLP, with virtual ranks and without",
    "transformer": "a step of 6 transformer layers of width 256 (4.7 M weights), batch 8 sequences of 64",
    "vgg": "a step of a VGG-like network (8.7 M weights), batch 16 images of 3 × 32 × 32",
    "mlp33m": "a step of an MLP of 4096-4096-4096 (33.6 M weights), batch 32",
    "layers250": "a step of 250 linear layers of 32 × 32 (263,274 weights), batch 16",
    "linear": "a step of one linear layer of 4096 × 2048 (8.4 M weights), batch 4: nearly only communication",
    "sweep": "an all-reduce of 4 B to 256 MB, of a plain tensor and of the library's own buffer",
    "trainer": "the time that dualtrain's trainer adds to a step of a plain loop, on the empty model",
    "stall": "the time for which a checkpoint of ResNet-18 stops training",
    "feed": "the loading of one MNIST sample, in batches of 100",
    "epoch": "an epoch of mnist-convnet on 12,000 images, with reading, without evaluation",
    "import": "the time that import dualtrain adds to import torch",
}
#: Number of rounds, if time permits. A verdict needs this number of rounds.
ROUNDS = 7
TRAINER_STEPS = 250
STALL_STEPS = 2
EPOCH_SAMPLES, EPOCH_BATCH, EPOCH_LR = 12_000, 100, 0.05  # with these, the tutorial script is as accurate as dualtrain


@dataclass(frozen=True)
class Entry:
    """A contender.

    Attributes:
        title: its name in tables.
        module: its module in ``contenders``, or ``MAIN`` or ``IMPORT``.
        option: argument of the module's ``start``; for ``MAIN``, more flags; for ``SIDE``, the names of the contenders that
            run side by side.
        starter: "ranks" for ranks as torchrun starts them, or a Horovod command for ranks as this command starts them.
            ``start_contender.py`` starts the ranks in a faster way if possible, or with the user's --launch.
        jobs: jobs that the contender measures after the workloads in ``workloads``.
        needs: package that the contender imports; if it is missing, the contender is left out.
        quick: whether the contender runs with --quick.
        workloads: workloads whose steps the contender measures.
        ranks: the number of ranks on this host, if the contender does not use --nproc.
    """

    title: str
    module: str
    option: str = ""
    starter: str = "ranks"
    jobs: tuple[str, ...] = ()
    needs: str = ""
    quick: bool = True
    workloads: tuple[str, ...] = WORKLOADS
    ranks: int | None = None


GLOO, MPI = "horovodrun --gloo", "horovodrun --mpi"
TUNED, AGAIN = "ddp-tuned", "ddp-tuned-again"
OURS = "ours"
TRAINER = "trainers"
SIDE = "side_by_side"
BESIDE_DDP, BESIDE_ALONE, BESIDE_HVD = "beside-ddp", "beside-alone", "beside-hvd"
SIDE_WORKLOADS = ("tiny", *SHAPES)  # workloads of contenders side by side
#: Contenders side by side run this multiple of the usual number of steps, which takes less time than their start.
SIDE_STEPS = 4
MAIN, IMPORT = "the command line", "an import"  # values of Entry.module that are not modules in contenders/

#: The contenders in the order of a round; compared contenders are close to each other.
ENTRIES = {
    "alone": Entry("no communication", "alone", quick=False),
    "one-number": Entry(
        "no communication but a sum of one number per step", "one_number", "torch/shm", quick=False, workloads=()
    ),
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
    "hvd": Entry("a Horovod script on dualtrain.hvd", "dualtrain_hvd", quick=False, workloads=()),
    "hvd-gloo": Entry("raw Horovod Gloo", "raw_horovod", "", GLOO, ("sweep", "large"), "horovod"),
    "ours-gloo": Entry("dualtrain horovod Gloo", OURS, "horovod/native", GLOO, ("sweep",), "horovod", quick=False),
    "hvd-mpi": Entry("raw Horovod MPI", "raw_horovod", "", MPI, ("sweep",), "horovod", quick=False),
    "ours-mpi": Entry("dualtrain horovod MPI", OURS, "horovod/native", MPI, ("sweep",), "horovod", quick=False),
    "accelerate": Entry("Accelerate", "with_accelerate", needs="accelerate", quick=False, workloads=MODELS),
    "fabric": Entry("Lightning Fabric", "with_fabric", needs="lightning_fabric", quick=False, workloads=MODELS),
    "ignite": Entry("ignite.distributed", "with_ignite", needs="ignite", quick=False, workloads=MODELS),
    "tutorial": Entry("tutorial script", "tutorial", jobs=("feed", "epoch"), quick=False, workloads=()),
    "main": Entry("dualtrain.main", MAIN, jobs=("epoch",), quick=False, workloads=()),
    "main-bf16": Entry(
        "dualtrain.main, bf16 + channels_last",
        MAIN,
        "--amp bf16 --channels-last",
        jobs=("epoch",),
        quick=False,
        workloads=(),
    ),
    "import": Entry("import dualtrain", IMPORT, jobs=("import",), workloads=()),
    BESIDE_DDP: Entry(
        "raw DDP tuned and dualtrain, side by side", SIDE, f"{TUNED},native", quick=False, workloads=SIDE_WORKLOADS
    ),
    BESIDE_ALONE: Entry(
        "dualtrain and no communication, side by side", SIDE, "alone,one-number,shm", quick=False, workloads=SIDE_WORKLOADS
    ),
    BESIDE_HVD: Entry(
        "a Horovod script and dualtrain, side by side", SIDE, "hvd,shm", quick=False, workloads=SIDE_WORKLOADS
    ),
    "plain": Entry("the trainer, shared memory", TRAINER, "torch/shm", workloads=VIRTUAL),
    "virtual": Entry("the trainer, shared memory, virtual ranks", TRAINER, "torch/shm/virtual", workloads=VIRTUAL),
    "accumulate": Entry("the trainer on 1 rank, accumulate 4", TRAINER, "local/native//4", workloads=VIRTUAL, ranks=1),
    "virtual-1": Entry(
        "the trainer on 1 rank, 4 virtual ranks", TRAINER, "local/native/virtual/4", workloads=VIRTUAL, ranks=1
    ),
    "plain-3": Entry("the trainer on 3 ranks, native", TRAINER, "torch/native", workloads=VIRTUAL, ranks=3),
    "virtual-3": Entry(
        "the trainer on 3 ranks, native, virtual ranks", TRAINER, "torch/native/virtual", workloads=VIRTUAL, ranks=3
    ),
    "plain-3-gloo": Entry(
        "the trainer on 3 ranks, Horovod Gloo", TRAINER, "horovod/native", GLOO, (), "horovod", workloads=VIRTUAL, ranks=3
    ),
    "virtual-3-gloo": Entry(
        "the trainer on 3 ranks, Horovod Gloo, virtual ranks",
        TRAINER,
        "horovod/native/virtual",
        GLOO,
        (),
        "horovod",
        workloads=VIRTUAL,
        ranks=3,
    ),
}
#: Replacement for each contender that may be unable to run: "shm" cannot run if ranks cannot share memory, "hvd-gloo" if
#: mpirun starts the ranks.
FALLBACKS = {"shm": "native", "hvd-gloo": "hvd-mpi"}


def missing_package(entry: Entry) -> str:
    """Return an error, with its cure, if the package that the contender imports is not installed; otherwise ""."""
    if not entry.needs or importlib.util.find_spec(entry.needs) is not None:
        return ""
    cure = "bash launch/setup.sh" if entry.needs == "horovod" else "pip install 'dualtrain[bench]'"
    return f"{entry.needs} is not installed: {cure}"


@dataclass(frozen=True)
class Comparison:
    """Rows with the throughput of ``one`` divided by that of ``other``.

    There is one row for each job that both contenders measure, except for costs, and for allreduces without a target.

    Attributes:
        shared_entry: the entry that runs both contenders in turns in the same processes; empty for separate processes.
        targets: for each job, the ratio that the lower end of the interval should reach; "*" is for all other
            workloads whose final weights are compared.
        allow_noise: whether to lower the targets by the noise floor, the difference between two equal contenders.
    """

    one: str
    other: str
    targets: dict[str, float]
    allow_noise: bool = False
    shared_entry: str = ""

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the entries that are started for this comparison."""
        return (self.shared_entry,) if self.shared_entry else (self.one, self.other)


COMPARISONS = (
    Comparison(AGAIN, TUNED, {}),
    Comparison("shm", TUNED, {"resnet18": 1.30, "mlp": 1.15, "small": 1.40, "sweep/100000000": 5.0}),
    Comparison("shm", "alone", {"resnet18": 0.95, "mlp": 0.90, "convnet": 0.97}),
    Comparison("native", TUNED, dict.fromkeys(set(WORKLOADS) - set(SHAPES), 1.00), allow_noise=True),
    Comparison("native", TUNED, dict.fromkeys(SHAPES, 0.99), shared_entry=BESIDE_DDP),
    Comparison(
        "shm", "alone", {"transformer": 0.97, "vgg": 0.93, "mlp33m": 0.90, "layers250": 0.90}, shared_entry=BESIDE_ALONE
    ),
    Comparison("shm", "one-number", {}, shared_entry=BESIDE_ALONE),
    Comparison("hvd", "shm", {"transformer": 0.97, "layers250": 0.97}, shared_entry=BESIDE_HVD),
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
    Comparison("virtual", "plain", dict.fromkeys(VIRTUAL, 0.98)),
    Comparison("virtual-1", "accumulate", dict.fromkeys(VIRTUAL, 0.95)),
    Comparison("virtual-3", "plain-3", {}),
    Comparison("virtual-3-gloo", "plain-3-gloo", {}),
)


@dataclass(frozen=True)
class Cost:
    """Row with the time that ``one`` takes for ``job``, minus that of ``other`` if given; ``target`` is an upper limit."""

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
    Cost("time that the trainer adds to a step (empty model)", "shm", "trainer", "µs", 40.0),
    Cost("import dualtrain, minus import torch", "import", "import", "ms", 50.0),
    Cost("launch to first step, minus raw DDP tuned", "shm", "start", "ms", 100.0, TUNED),
    Cost("stall of a checkpoint (ResNet-18)", "shm", "stall", "ms", None),
    Cost("stall of torch.save in a raw DDP script", "ddp", "stall", "ms", None),
)


def steps_of(job: str, step_fraction: float) -> int:
    """Return the number of timed steps in a round: ``step_fraction`` of those in ``LENGTHS``, but at least two."""
    return max(2, round(LENGTHS[job][1] * step_fraction))


def jobs_of(entry: Entry, chosen: Collection[str]) -> tuple[str, ...]:
    """Return the contender's jobs that are in ``chosen``, in the order in which it runs them.

    The first of them, if it is a workload, also measures the time from launch to first step.
    """
    return tuple(job for job in entry.workloads + entry.jobs if job in chosen)
