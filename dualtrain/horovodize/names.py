"""Names of Horovod 0.28.1, sorted by kind. They are listed here because ``--check`` does not import Horovod."""

#: Modules with the API of horovod.torch.
HOMES = ("horovod.torch", "dualtrain.hvd")

#: Collectives that return a new tensor and do not change their input.
OUT_OF_PLACE = {
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
}
IN_PLACE = {"allreduce_", "broadcast_", "grouped_allreduce_"}
#: Collectives that return a handle.
ASYNC = {
    *(f"{name}_async" for name in OUT_OF_PLACE),
    "allreduce_async_",
    "broadcast_async_",
    "grouped_allreduce_async_",
    "sparse_allreduce_async",
}
OBJECTS = {"allgather_object", "broadcast_object"}
#: Functions that all ranks must call.
COLLECTIVES = OUT_OF_PLACE | IN_PLACE | ASYNC | OBJECTS
COLLECTIVES |= {"barrier", "broadcast_optimizer_state", "broadcast_parameters", "join", "shutdown"}

#: Functions that return how Horovod was built.
BUILD = {
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
}
OPS = {"Adasum", "Average", "Max", "Min", "Product", "Sum"}
RANK_NAMES = {"rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous"}
_SETS = {"ProcessSet", "add_process_set", "global_process_set", "remove_process_set"}
_LIFECYCLE = {"init", "is_initialized", "poll", "start_timeline", "stop_timeline", "synchronize"}
_CLASSES = {"Compression", "DistributedOptimizer", "HorovodInternalError", "SyncBatchNorm", "elastic"}
_MODULES = {"compression", "functions", "mpi_ops", "optimizer", "process_sets", "sync_batch_norm"}
PUBLIC = COLLECTIVES | BUILD | OPS | RANK_NAMES | _SETS | _LIFECYCLE | _CLASSES | _MODULES

#: Names that the submodules of horovod.torch define, and that dualtrain's modules have too.
MODULE_NAMES = {
    "compression": {"Compression", "Compressor", "FP16Compressor", "NoneCompressor"},
    "functions": {
        *(*OBJECTS, "broadcast_async_", "broadcast_optimizer_state", "broadcast_parameters", "rank", "synchronize"),
        *("ProcessSet", "global_process_set"),
    },
    "mpi_ops": {
        *(OUT_OF_PLACE | IN_PLACE | ASYNC | BUILD | OPS | RANK_NAMES | _SETS | _LIFECYCLE),
        *("Compression", "HorovodInternalError", "_basics", "barrier", "join", "shutdown"),
    },
    "optimizer": {
        *("DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer", "Adasum", "Average", "Sum"),
        *("Compression", "ProcessSet", "global_process_set", "rocm_built", "size"),
    },
    "process_sets": _SETS,
    "sync_batch_norm": {"Sum", "SyncBatchNorm"},
}

#: Attributes and methods of Horovod's wrapped optimizers that dualtrain's optimizers do not have.
PRIVATE = {
    *("_allreduce_delay", "_grad_accs", "_group_counts", "_groups", "_handles", "_p_to_group", "_starting_models"),
    *("_allreduce_grad_async", "_grouped_allreduce_grad_async", "_sparse_allreduce_grad_async"),
    *("_make_hook", "_register_hooks"),
}

#: Compressions, including dualtrain's own ``bf16``.
COMPRESSIONS = {"Compression.bf16", "Compression.fp16", "Compression.none"}

#: Subpackages of horovod that dualtrain does not replace: ``data``, and those for frameworks other than torch.
OTHER_FRAMEWORKS = {"data", "keras", "mxnet", "tensorflow"}

#: Arguments of horovod.run for several hosts, elastic training and output files. They are refused unless they are None;
#: ``hosts`` may also name this host.
RUN_UNSUPPORTED = (
    *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile"),
    *("host_discovery_script", "output_filename", "min_np", "max_np"),
)


#: Arguments of RayExecutor that make it elastic. They are refused unless they are None.
RAY_ELASTIC = ("min_workers", "max_workers", "reset_limit", "cooldown_range", "elastic_timeout", "override_discovery")


def is_this_host(hosts: object) -> bool:
    """Return whether horovod.run's argument ``hosts`` names only this host, as in "localhost:2"."""
    return all(each.partition(":")[0] in ("localhost", "127.0.0.1") for each in str(hosts).split(","))
