"""Resource checks before a run starts: number format, engine threads, and whether the cluster can hold the run.

Without the cluster check, Ray would wait for missing resources without any message.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch

logger = logging.getLogger(__name__)

Given = tuple[float | None, float | None]  # GPUs per env runner and per learner

AMX = "amx_bf16"  # with avx512_bf16 alone an iteration in bfloat16 takes longer than in float32 (docs/LOG.md)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's feature flags; empty if the system does not list them."""
    if not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def best_dtype(num_gpus: float) -> str:
    """Return "bfloat16" where it is faster on the device that computes: on GPUs and with AMX, else "float32".

    Args:
        num_gpus: GPUs of the process; 0 means that it computes on the CPU.
    """
    if num_gpus > 0:
        return "bfloat16"  # every GPU vLLM 0.32 supports well (compute capability 8.0 and up) has it
    return "bfloat16" if AMX in cpu_flags() else "float32"


def engine_threads(num_engines: int) -> int:
    """Return the number of CPU threads for each engine on this machine.

    OMP_NUM_THREADS takes precedence; Ray sets it in Tune trials. Otherwise the engines share all cores. A learner in
    the main process also uses all cores: engines and learner take turns, and waiting threads sleep.

    Args:
        num_engines: engines that share the cores; 0 counts as 1.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if limit.isdecimal() and int(limit) > 0:
        return int(limit)
    return max(1, (os.cpu_count() or 1) // max(1, num_engines))


ENGINE_SHARE, LEARNER_SHARE = 0.6, 0.4  # fractions of a card; above .5, so that Ray never packs two engines onto one


def engine_memory_share(num_gpus_per_env_runner: float) -> float:
    """Return the share of a card's memory that an engine reserves: half as much if a learner shares the card."""
    return 0.45 if 0 < num_gpus_per_env_runner < 1 else 0.9


def card_bytes_here() -> float | None:
    """Return the memory of this machine's smallest GPU in bytes; None without one."""
    sizes = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return float(min(sizes)) if sizes else None


@dataclass(frozen=True)
class GpuShares:
    """GPUs of each process. Invariant: `is_colocated` if an engine and a learner have shares of one card."""

    per_env_runner: float = 0
    per_learner: float = 0
    is_colocated: bool = False


def gpu_shares(
    num_gpus: float,
    num_env_runners: int,
    num_learners: int,
    tensor_parallel_size: int = 1,
    given: Given = (None, None),
) -> GpuShares:
    """Return how many GPUs each env runner and each learner gets.

    Enough cards: whole ones for each process. One card for each pair of engine and learner: 0.6 and 0.4 of it. Shares
    that the user gave stay, and the other side gets the remaining whole cards, or none.

    Args:
        num_gpus: cards of the cluster, or of this machine.
        num_env_runners: 0 counts as 1, the main process.
        num_learners: 0 counts as 1, the main process.
        tensor_parallel_size: cards of one engine.
        given: shares per env runner and per learner; None: to be chosen.

    Raises:
        PlacementError: there are cards, but too few for the number of processes.
    """
    runners, learners, cards = max(1, num_env_runners), max(1, num_learners), int(num_gpus)
    per_env_runner, per_learner = given
    if per_env_runner is not None and per_learner is not None:
        return GpuShares(per_env_runner, per_learner)
    if not cards:
        return GpuShares(per_env_runner or 0, per_learner or 0)
    if per_env_runner is not None:
        return GpuShares(per_env_runner, 1 if cards - per_env_runner * runners >= learners else 0)
    if per_learner is not None:
        size = tensor_parallel_size
        return GpuShares(size if cards - per_learner * learners >= size * runners else 0, per_learner)
    free = cards - runners * tensor_parallel_size - learners
    if free >= 0:
        return GpuShares(tensor_parallel_size, 1)
    if tensor_parallel_size == 1 and cards >= max(runners, learners):
        return GpuShares(ENGINE_SHARE, LEARNER_SHARE, is_colocated=True)
    raise PlacementError(
        f"num_env_runners = {num_env_runners}, num_learners = {num_learners} with {cards} GPUs; expected at most one "
        f"of each per GPU (engine_tensor_parallel_size = {tensor_parallel_size}), or set num_gpus_per_env_runner "
        "and num_gpus_per_learner"
    )


def warn_of_cpu(per_env_runner: float | None, per_learner: float | None, shares: GpuShares) -> None:
    """Warn that a process gets no GPU because the user gave only the other's share, on a machine with GPUs.

    Args:
        per_env_runner: share that the user gave; None: chosen.
        per_learner: share that the user gave; None: chosen.
        shares: those in use.
    """
    if per_env_runner and per_learner is None and not shares.per_learner:
        name, share, who, other = "num_gpus_per_env_runner", per_env_runner, "learners", "num_gpus_per_learner"
    elif per_learner and per_env_runner is None and not shares.per_env_runner:
        name, share, who, other = "num_gpus_per_learner", per_learner, "engines", "num_gpus_per_env_runner"
    else:
        return
    example = f", such as {1 - share:g}" if 0 < share < 1 else ""
    reason = f"{name} = {share:g} leaves no whole GPU for the {who}, which use the CPU"
    logger.warning("%s; to give them a GPU, set %s%s", reason, other, example)


def num_gpus_here() -> float:
    """Return the GPUs of the Ray cluster, or of this machine if Ray is not running."""
    if ray.is_initialized():
        return float(ray.cluster_resources().get("GPU", 0))
    return float(torch.cuda.device_count())


def check_build(config: Any) -> None:
    """Refuse a run on this node's GPUs if torch is built for CPUs.

    Raises:
        PlacementError: torch is built for CPUs.
    """
    if torch.version.cuda or torch.version.hip or not (config.num_gpus_per_env_runner or config.num_gpus_per_learner):
        return
    here = ray.get_runtime_context().get_node_id()
    (num_gpus,) = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["NodeID"] == here]
    if num_gpus:
        raise PlacementError(
            f"Ray finds {num_gpus:g} GPUs on this machine, but torch {torch.__version__} is built for CPUs; expected a "
            "build for CUDA (bash scripts/setup.sh --set gpu), or num_gpus_per_env_runner = 0 and num_gpus_per_learner "
            "= 0"
        )


def draining_nodes() -> set[str]:
    """Return the ids of nodes that Ray is about to lose: pre-empted, scaled down or drained by hand."""
    return set(ray._private.state.state.get_draining_nodes())  # Ray 2.60 has no public name for it


ROUNDING = 1e-6  # tolerance for sums of fractional CPUs


class PlacementError(ValueError):
    """The cluster is too small for the run; the message lists the missing resources and the settings to lower."""


def check_cluster_holds(request: Any, config: Any) -> None:
    """Refuse a request that exceeds the cluster's total resources, in use or not.

    Args:
        request: Tune's PlacementGroupFactory: one bundle of resources per process.
        config: the settings; `check_resources = False` skips the check, for clusters with an autoscaler.

    Raises:
        PlacementError: the bundles together exceed the cluster, or one bundle fits on no node.
    """
    if config.check_resources and ray.is_initialized():
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        _check(request, config, ray.cluster_resources(), nodes, "the cluster")


def check_machine_holds(request: Any, config: Any) -> None:
    """Refuse a request that exceeds this machine's resources, before Ray is started here.

    Only CPUs and GPUs are checked: other resources are declared when Ray starts.

    Args:
        request: as in `check_cluster_holds`.
        config: as in `check_cluster_holds`.

    Raises:
        PlacementError: as in `check_cluster_holds`.
    """
    if config.check_resources:
        here = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
        asked = [{name: n for name, n in bundle.items() if name in here} for bundle in request.bundles]
        _check(SimpleNamespace(bundles=asked), config, here, [here], "this machine")


def _check(
    request: Any, config: Any, total: Mapping[str, float], nodes: Sequence[Mapping[str, Any]], where: str
) -> None:
    needed: Counter[str] = Counter()
    for bundle in request.bundles:
        needed.update(bundle)
    short = [
        f"{n:g} {name} ({where} has {total.get(name, 0):g})"
        for name, n in needed.items()
        if n > total.get(name, 0) + ROUNDING
    ]
    for bundle in request.bundles:
        if not any(all(node.get(name, 0) >= n for name, n in bundle.items()) for node in nodes):
            amounts = " and ".join(f"{n:g} {name}" for name, n in sorted(bundle.items()))
            short.append(f"{amounts} in one process (no node has that)")
    if short:
        raise PlacementError(
            f"one run needs {', '.join(dict.fromkeys(short))}; expected less: "
            f"lower num_env_runners = {config.num_env_runners}, num_learners = {config.num_learners} or the CPUs and "
            "GPUs of each, or set check_resources = False if the cluster grows on demand"
        )
