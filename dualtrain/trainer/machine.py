"""Properties of a machine that the bits of a result depend on: intra-op threads, kind of processor, build of torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import torch

from dualtrain.backends import Backend
from dualtrain.config import MOST_THREADS
from dualtrain.console import show_progress
from dualtrain.cores import cpu_quota, threads_per_rank
from dualtrain.rendezvous.hosts import identity

log = logging.getLogger("dualtrain")

Facts = dict[str, str | None]

CAPABILITY, ONEDNN, MKL, GPU = "CPU capability", "oneDNN instruction set", "MKL kernels", "GPU"
#: The names of the facts about a processor.
PROCESSOR = (CAPABILITY, ONEDNN, MKL, GPU)
#: oneDNN's instruction sets on x86, each with the flags in /proc/cpuinfo that show it.
_SETS = {
    "SSE41": {"sse4_1"},
    "AVX": {"avx"},
    "AVX2": {"avx2"},
    "AVX2_VNNI": {"avx2", "avx_vnni"},
    "AVX2_VNNI_2": {"avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"},
    "AVX512_CORE": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "AVX512_CORE_VNNI": {"avx512bw", "avx512_vnni"},
    "AVX512_CORE_BF16": {"avx512_vnni", "avx512_bf16"},
    "AVX512_CORE_FP16": {"avx512_bf16", "avx512_fp16"},
    "AVX512_CORE_AMX": {"avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"},
    "AVX512_CORE_AMX_FP16": {"amx_tile", "amx_fp16"},
}
#: Other names that oneDNN accepts.
_ALIASES = {
    "AVX10_1_512": "AVX512_CORE_FP16",
    "AVX10_1_512_AMX": "AVX512_CORE_AMX",
    "AVX10_1_512_AMX_FP16": "AVX512_CORE_AMX_FP16",
}


def threads(backend: Backend) -> int:
    """Return the default of ``--threads`` without virtual ranks. Collective; blocks.

    Each rank has a share of its host's cores (see :func:`dualtrain.cores.threads_per_rank`). The default is the smallest of
    these shares, and at most ``MOST_THREADS``.
    """
    mine = identity(), sorted(os.sched_getaffinity(0)), cpu_quota()
    return min(MOST_THREADS, threads_per_rank(backend.allgather_object(mine, name="default number of intra-op threads")))


def use_threads(number: int, backend: Backend) -> None:
    """Set the number of intra-op threads of this process, and print a line on rank 0 if OMP_NUM_THREADS differs."""
    torch.set_num_threads(number)
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    # torchrun may set the variable to 1. The message below must be true, whether the user or torchrun has set it.
    if backend.rank == 0 and text and text.partition(",")[0].strip() != str(number):
        show_progress(
            f"OMP_NUM_THREADS={text} has no effect: the number of intra-op threads of a rank is {number}, "
            "and --threads sets this number when a run starts"
        )


def processor(backend: Backend) -> Facts:
    """Return facts about this rank's processor, by the names in ``PROCESSOR``; ``None`` if unknown or not applicable."""
    described = _described(Path("/proc/cpuinfo"))
    # MKL chooses its kernels by the vendor of the CPU, unless MKL_CBWR names the kernels.
    mkl = os.environ.get("MKL_CBWR") or described.get("vendor_id")
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    return {
        CAPABILITY: torch.backends.cpu.get_cpu_capability(),
        ONEDNN: onednn_set(described.get("flags", "").split(), limit),
        MKL: mkl if torch.backends.mkl.is_available() else None,
        GPU: torch.cuda.get_device_name(backend.device) if backend.device.type == "cuda" else None,
    }


def platform_of(backend: Backend) -> Facts:
    """Return the build of torch and this rank's processor, as config.json and checkpoints hold them."""
    return {"torch": str(torch.__version__), **processor(backend)}


def onednn_set(flags: Collection[str], limit: str) -> str | None:
    """Return the largest instruction set that oneDNN uses on an x86 processor; ``None`` if it uses none of ``_SETS``.

    Args:
        flags: the processor's flags, as in /proc/cpuinfo.
        limit: the value of ONEDNN_MAX_CPU_ISA. An unknown value limits nothing, as in oneDNN.
    """
    limit = _ALIASES.get(limit.upper(), limit.upper())
    order = list(_SETS)
    allowed = order[: order.index(limit) + 1] if limit in order else order
    return next((name for name in reversed(allowed) if _SETS[name] <= {*flags}), None)


def warn_of_other_platform(saved_platform: Mapping[str, str | None], platform: Facts) -> None:
    """Log one warning if a checkpoint was made on a different kind of processor, or with a different build of torch.

    Args:
        saved_platform: the checkpoint's :func:`platform_of`; facts that it lacks are not compared.
        platform: this rank's :func:`platform_of`.
    """
    names = [name for name, value in platform.items() if name in saved_platform and saved_platform[name] != value]
    if names:
        both = "; ".join(f"{name} was {saved_platform[name] or 'none'} and is {platform[name] or 'none'}" for name in names)
        log.warning(f"results may differ in the last digits from those before the checkpoint: {both}{cpu_advice(names)}")


def cpu_advice(names: Collection[str]) -> str:
    """Return advice for a warning that the facts with these ``names`` differ; "" if no CPU fact is among them."""
    if {CAPABILITY, ONEDNN, MKL} & {*names}:
        return "; ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_CBWR let different CPUs use the same instructions"
    return ""


@cache
def warn_once(text: str) -> None:
    """Log a warning. Later calls with the same text do nothing."""
    log.warning(text)


@cache
def _described(file: Path) -> dict[str, str]:
    """Return the fields of the first processor in ``/proc/cpuinfo`` by name; empty if the file cannot be read."""
    found: dict[str, str] = {}
    try:
        with file.open(errors="replace") as lines:
            for line in lines:
                name, colon, value = line.partition(":")
                if not colon:
                    break  # the empty line after the first processor
                found[name.strip()] = value.strip()
    except OSError:
        pass
    return found
