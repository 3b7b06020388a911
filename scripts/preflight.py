"""Report whether this machine can run rllib_srl, and with which set of packages.

    gather() -> Facts --check(facts)--> [Finding, ...]     "missing" stops the set-up, "warning" and "note" do not

    python3 scripts/preflight.py               print every finding; exit code 1 if something is missing
    python3 scripts/preflight.py --print-set   print "cpu", "gpu" or "plain" and nothing else

Standard library only, and valid syntax for Python 3.7, so that an old Python gets a message and not a syntax error.
`scripts/setup.sh` calls it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
DISK_GIB = {"cpu": 8.0, "gpu": 20.0, "plain": 6.0}
DISK_INSTALLED_GIB = 2.0  # checkpoints, model cache and logs of the quick start
LEAST_MEMORY_GIB, WANTED_MEMORY_GIB = 5.5, 11.0
WANTED_SHM_GIB = 2.0
OLDEST_DRIVER = 580  # NVIDIA's, for the CUDA 13 builds of torch 2.13 and vLLM 0.32
SETS = ("cpu", "gpu", "plain")


@dataclass(frozen=True)
class Facts:
    """The properties of one machine; `gather` fills it, tests construct it."""

    python: tuple[int, int, int]
    python_path: str
    has_ensurepip: bool
    has_compiler: bool  # a C compiler and Python's headers
    has_libnuma: bool
    system: str  # "Linux", "Darwin", "Windows"
    machine: str  # "x86_64", "aarch64", "arm64"
    cpu_flags: frozenset[str]
    num_cores: int
    memory_gib: float
    disk_gib: float  # free
    shm_gib: float | None  # None where there is no /dev/shm
    gpu: str  # "name, driver version" of the first NVIDIA GPU; empty if nvidia-smi shows none
    is_installed: bool = False  # the packages are there already


@dataclass(frozen=True)
class Finding:
    """One line for the user; `level` is "ok", "note", "warning" or "missing"."""

    level: str
    text: str


def choose_set(facts: Facts) -> str:
    """Return the package set that fits: "gpu", "cpu", or "plain" where vLLM cannot be installed."""
    if facts.system == "Linux" and facts.machine == "x86_64":
        if facts.gpu:
            return "gpu"
        if "avx2" in facts.cpu_flags:
            return "cpu"
    return "plain"


def check_python(facts: Facts) -> Finding:
    """Check that the interpreter is one of those the pinned packages have wheels for."""
    version = ".".join(map(str, facts.python))
    if OLDEST_PYTHON <= facts.python[:2] <= NEWEST_PYTHON:
        return Finding("ok", f"Python {version} ({facts.python_path})")
    return Finding(
        "missing",
        f"Python {version} ({facts.python_path}) does not fit; expected 3.11, 3.12 or 3.13. Install one "
        "(Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv) or name one: "
        "PYTHON=/path/to/python3.11 bash scripts/setup.sh",
    )


def check_venv(facts: Facts) -> Finding:
    """Check that `python -m venv` can make an environment with pip in it."""
    if facts.is_installed or facts.has_ensurepip:
        return Finding("ok", "venv module")
    version = "python{}.{}".format(*facts.python[:2])
    mend = f"Debian, Ubuntu: apt-get install python3-venv (or {version}-venv)"
    return Finding("missing", f"the venv module of {version}. {mend}")


def check_system(facts: Facts) -> Finding:
    """Report the engine that this platform supports."""
    where = f"{facts.system} {facts.machine}"
    if facts.system != "Linux" or facts.machine != "x86_64":
        return Finding("note", f"{where}: the TransformersEngine samples text (slower); vLLM needs Linux on x86-64")
    return Finding("ok", f"{where}, {facts.num_cores} cores")


def check_gpu(facts: Facts, package_set: str) -> Finding:
    """Report whether the GPU packages are used, and whether the driver can run them."""
    if not facts.gpu and package_set == "gpu":
        mend = "Install NVIDIA's driver, or use the CPU: bash scripts/setup.sh --set cpu"
        return Finding("missing", f"an NVIDIA GPU for the package set 'gpu' (nvidia-smi shows none). {mend}")
    if not facts.gpu:
        return Finding("note", "no NVIDIA GPU (nvidia-smi shows none): everything runs on the CPU")
    if package_set != "gpu":
        return Finding("note", f"NVIDIA GPU: {facts.gpu}; not used, because the package set is '{package_set}'")
    driver = facts.gpu.rsplit(",", 1)[-1].strip()
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < OLDEST_DRIVER:
        return Finding(
            "missing",
            f"NVIDIA driver {driver} is too old; expected {OLDEST_DRIVER} or newer (CUDA 13). "
            "Update the driver, or use the CPU: bash scripts/setup.sh --set cpu",
        )
    return Finding("ok", f"NVIDIA GPU: {facts.gpu}")


def check_cpu_flags(facts: Facts) -> Finding:
    """Report what the CPU supports for vLLM and for the learner's number format."""
    if facts.system != "Linux" or facts.machine != "x86_64":
        return Finding("note", "CPU flags are read on Linux x86-64 only: training uses fp32 unless told otherwise")
    if "avx2" not in facts.cpu_flags:
        return Finding("note", "no AVX2, which vLLM needs: the TransformersEngine samples text (slower), in fp32")
    if "amx_bf16" in facts.cpu_flags:
        return Finding("ok", "bf16 arithmetic (amx_bf16): training on the CPU uses bf16 autocast, weights in fp32")
    return Finding("note", "no fast bf16 arithmetic (amx_bf16): everything on the CPU is fp32")


def check_memory(facts: Facts) -> Finding:
    """Check memory against the needs of the quick start of the 135M model."""
    text = f"memory: {facts.memory_gib:.1f} GiB"
    if facts.memory_gib < LEAST_MEMORY_GIB:
        mend = "Use a larger machine, or raise the container's limit (docker run --memory)"
        return Finding("missing", f"{text}, the quick start needs {LEAST_MEMORY_GIB:g}. {mend}")
    if facts.memory_gib < WANTED_MEMORY_GIB:
        return Finding("warning", f"{text}: tight, {WANTED_MEMORY_GIB:g} is comfortable. Close other programs first")
    return Finding("ok", text)


def check_disk(facts: Facts, package_set: str) -> Finding:
    """Check free disk space in the repository against the files still to be written there."""
    need = DISK_INSTALLED_GIB if facts.is_installed else DISK_GIB[package_set]
    text = f"disk: {facts.disk_gib:.1f} GiB free here"
    if facts.disk_gib < need:
        return Finding("missing", f"{text}, about {need:g} needed. Free some, or clone the repository to a larger disk")
    return Finding("ok", text)


def check_shm(facts: Facts) -> Finding:
    """Check the shared memory in which Ray keeps its objects."""
    if facts.system != "Linux":
        return Finding("ok", "shared memory: Ray chooses it on this platform")
    size = 0.0 if facts.shm_gib is None else facts.shm_gib
    if size < WANTED_SHM_GIB:
        return Finding(
            "warning",
            f"/dev/shm: {size:.2f} GiB, {WANTED_SHM_GIB:g} wanted. Ray falls back to temporary files (slower). "
            "In a container: docker run --shm-size=4g; else: mount -o remount,size=4G /dev/shm",
        )
    return Finding("ok", f"/dev/shm: {size:.1f} GiB")


def check_compiler(facts: Facts) -> Finding:
    """Check that pycosat, the one package without a wheel that is not pure Python, can be built."""
    if facts.is_installed or facts.has_compiler:
        return Finding("ok", "C compiler and Python headers")
    return Finding(
        "missing",
        "a C compiler or Python's headers (reasoning-gym needs pycosat, which is compiled here in seconds). "
        "Debian, Ubuntu: apt-get install gcc libc6-dev python3-dev; macOS: xcode-select --install",
    )


def check_libnuma(facts: Facts, package_set: str) -> Finding:
    """Check for the one system library that vLLM's CPU build links to."""
    if package_set != "cpu" or facts.has_libnuma:
        return Finding("ok", "system libraries")
    return Finding("missing", "libnuma.so.1, which vLLM's CPU build needs. Debian, Ubuntu: apt-get install libnuma1")


def check(facts: Facts, package_set: str) -> list[Finding]:
    """Run every check for `package_set`, in the order a reader wants them."""
    return [
        check_python(facts),
        check_venv(facts),
        check_compiler(facts),
        check_system(facts),
        check_gpu(facts, package_set),
        check_cpu_flags(facts),
        check_libnuma(facts, package_set),
        check_memory(facts),
        check_disk(facts, package_set),
        check_shm(facts),
    ]


def report(findings: list[Finding]) -> str:
    """Return one line per finding, the missing ones last."""
    ordered = sorted(findings, key=lambda finding: finding.level == "missing")
    return "\n".join(f"  {finding.level:<8} {finding.text}" for finding in ordered)


def read_gpu() -> str:
    """Return "name, driver" of the first NVIDIA GPU, or "" if nvidia-smi is absent, fails or hangs."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = result.stdout.decode(errors="replace").strip().splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else ""


def read_cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Return the processor's feature flags, empty where the system does not list them."""
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = [line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(flags[0]) if flags else frozenset()


def read_memory_gib() -> float:
    """Return the memory this process may use: the machine's, or the container's limit if that is lower."""
    sizes = [float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = Path("/sys/fs/cgroup", name)
        if limit.exists() and limit.read_text().strip().isdigit():
            sizes.append(float(limit.read_text()))
    return min(sizes) / GIB


def has_library(name: str) -> bool:
    """Return whether the dynamic loader finds the shared library `name`."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def gather(folder: Path, is_installed: bool) -> Facts:
    """Read the facts of this machine; `folder` is where the packages go."""
    shm, headers = Path("/dev/shm"), Path(sysconfig.get_paths()["include"], "Python.h")
    compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    return Facts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        python_path=sys.executable,
        has_ensurepip=all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
        has_compiler=compiler and headers.exists(),
        has_libnuma=has_library("libnuma.so.1"),
        system=platform.system(),
        machine=platform.machine(),
        cpu_flags=read_cpu_flags(Path("/proc/cpuinfo")),
        num_cores=os.cpu_count() or 1,
        memory_gib=read_memory_gib(),
        disk_gib=shutil.disk_usage(str(folder)).free / GIB,
        shm_gib=shutil.disk_usage(str(shm)).total / GIB if shm.exists() else None,
        gpu=read_gpu(),
        is_installed=is_installed,
    )


def main() -> int:
    """Print the findings or the set; return 1 if something is missing."""
    parser = argparse.ArgumentParser(description="Check whether this machine can run rllib_srl.")
    parser.add_argument("--print-set", action="store_true", help="print only the package set that fits")
    parser.add_argument("--set", choices=SETS, help="check for this set (default: the one that fits)")
    parser.add_argument("--installed", action="store_true", help="the packages are installed: less disk is needed")
    args = parser.parse_args()
    facts = gather(Path(__file__).resolve().parent, args.installed)
    package_set = args.set or choose_set(facts)
    if args.print_set:
        print(package_set)
        return 0
    findings = check(facts, package_set)
    print(report(findings))
    return int(any(finding.level == "missing" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
