"""What this machine's processors can do, as far as the choice of number format needs it."""

from __future__ import annotations

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
