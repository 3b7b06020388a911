"""What this machine's processors can do, as far as the choice of number format needs it."""

from __future__ import annotations

import os
from pathlib import Path

BF16_CPU_FLAGS = ("avx512_bf16", "amx_bf16")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's feature flags, empty where the system does not list them."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def best_dtype(num_gpus: float) -> str:
    """Return "bfloat16" where it is native on the device that computes, else "float32".

    Args:
        num_gpus: GPUs given to the process; 0 asks about the CPU.
    """
    if num_gpus > 0:
        return "bfloat16"  # every GPU vLLM 0.32 supports well (compute capability 8.0 and up) has it
    return "bfloat16" if cpu_flags().intersection(BF16_CPU_FLAGS) else "float32"


def engine_threads(num_engines: int) -> int:
    """Return how many threads one of several engines on this machine computes with.

    OMP_NUM_THREADS decides where it is set, as Ray does in a Tune trial. Else engines get all cores, and so does a
    learner in the main process: they take turns, and their threads sleep while they wait.

    Args:
        num_engines: that share the cores; 0 counts as 1.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, (os.cpu_count() or 1) // max(1, num_engines))
