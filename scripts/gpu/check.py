"""Run the GPU checks, one process per step, and keep the result of each as a JSON line.

A step is a program with arguments, a time limit and a number of GPUs. Its last lines that are JSON objects are its
figures. While it runs, `nvidia-smi` is sampled for the utilisation and memory of the GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 590.0
NO_GPU = 3  # exit status
LEARNER, ENGINE, RUN = "scripts.gpu.learner", "scripts.gpu.engine", "scripts.gpu.run"
PYTEST = ("pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Step:
    """One check. Invariant: `module` runs with `python -m` from the root of the repository."""

    name: str
    module: str
    args: tuple[str, ...] = ()
    num_gpus: int = 1
    has_short: bool = True  # whether `--short` lets it run on a CPU in seconds


STEPS = (
    Step("machine", "rllib_srl.cli", ("doctor",), has_short=False),
    Step("exact", LEARNER, ("exact",)),
    Step("mask", LEARNER, ("mask",)),
    Step("learner_135m", LEARNER, ("speed", "0.1B", "16384")),
    Step("learner_1.5b", LEARNER, ("speed", "1.5B", "16384", "--checkpoint")),
    Step("learner_8b", LEARNER, ("speed", "8B", "8192", "--checkpoint")),
    Step("engine_contract", PYTEST[0], (*PYTEST[1:], "tests/engine/test_contract.py"), has_short=False),
    Step("engine_requests", PYTEST[0], (*PYTEST[1:], "tests/engine/test_gpu_requests.py"), has_short=False),
    Step("engine_135m", ENGINE, ("0.1B",)),
    Step("engine_float32", ENGINE, ("0.1B", "--dtype", "float32")),
    Step("defaults", RUN, ("--model", "tiny")),
    Step("float32", RUN, ("--model", "tiny", "--dtype", "float32")),
    Step("colocated", RUN, ("--model", "tiny", "--shares", "0.6", "0.4", "--colocate")),
    Step("ipc", RUN, ("--model", "tiny", "--shares", "0.6", "0.4", "--transfer", "ipc")),
    Step("split", RUN, ("--model", "tiny", "--shares", "1", "1"), num_gpus=2),
    Step("nccl", RUN, ("--model", "tiny", "--shares", "1", "1", "--transfer", "nccl"), num_gpus=2),
    Step("adapters", RUN, ("--model", "tiny", "--lora")),
    Step("max_lag", RUN, ("--model", "tiny", "--shares", "0.6", "0.4", "--max-lag", "1", "--iterations", "4")),
    Step("fsdp", RUN, ("--model", "tiny", "--shares", "1", "1", "--fsdp", "2"), num_gpus=3),
    Step("fsdp_bf16", RUN, ("--model", "tiny", "--shares", "1", "1", "--fsdp", "2", "--gather-bf16"), num_gpus=3),
    Step(
        "learner_parallel",
        RUN,
        ("--model", "tiny", "--shares", "1", "1", "--fsdp", "2", "--tensor-parallel", "2"),
        num_gpus=3,
    ),
    Step("engine_parallel", RUN, ("--model", "tiny", "--shares", "2", "1", "--engine-parallel", "2"), num_gpus=3),
    Step("engine_1.5b", ENGINE, ("1.5B",)),
    Step("engine_8b", ENGINE, ("8B",)),
    Step("run_1.5b", RUN, ("--random", "1.5B", "--iterations", "3")),
    Step("turns_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--shares", "0.6", "0.4", "--colocate")),
    Step("ipc_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--shares", "0.6", "0.4", "--transfer", "ipc")),
    Step("lora_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--lora")),
    Step("offload_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--offload")),
    Step("adamw_8bit_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--optimizer", "adamw_8bit")),
    Step(
        "paged_1.5b",
        RUN,
        ("--random", "1.5B", "--iterations", "3", "--optimizer", "paged_adamw_8bit"),
        has_short=False,
    ),
    Step("quickstart", "rllib_srl.cli", ("quickstart",), has_short=False),
)


def num_gpus_here() -> int:
    """Return how many GPUs torch can use."""
    import torch

    return torch.cuda.device_count()


def command_of(step: Step, is_short: bool) -> list[str]:
    """Return the command of a step."""
    return [sys.executable, "-m", step.module, *step.args, *(["--short"] if is_short else [])]


class Sampler:
    """Samples `nvidia-smi` while a step runs."""

    def __init__(self) -> None:
        """Start to sample every half second."""
        self._rows: list[tuple[float, float]] = []
        query = ("--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-lms", "500")
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(
                ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            try:
                used, memory = line.split(",")
                self._rows.append((float(used), float(memory)))
            except ValueError:  # "[N/A]"
                continue

    def stop(self) -> dict[str, float]:
        """Return mean utilisation in percent and maximum memory in GiB, {} without nvidia-smi."""
        if self._process is None:
            return {}
        self._process.terminate()
        self._process.wait(timeout=10)
        if not self._rows:
            return {}
        used, memory = zip(*self._rows, strict=True)
        return {"gpu_percent": round(sum(used) / len(used), 1), "gpu_memory_gib": round(max(memory) / 1024, 2)}


def run(step: Step, out: Path, is_short: bool, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a step; return its line of results, and write its output to STEP.log."""
    start, sampler = time.monotonic(), Sampler()
    log = out / f"{step.name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command_of(step, is_short), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its children, such as Ray's and vLLM's workers
            status = process.wait(timeout=30)
    seconds = round(time.monotonic() - start, 1)
    result = {"step": step.name, "passed": status == 0, "status": status, "seconds": seconds, **sampler.stop()}
    return {**result, "figures": figures_of(log.read_text(encoding="utf-8", errors="replace"))}


def figures_of(text: str) -> list[dict[str, Any]]:
    """Return the lines of an output that are JSON objects."""
    found = []
    for line in text.splitlines():
        if line.startswith("{") and line.rstrip().endswith("}"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check this project on a machine with a GPU.")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="directory of the results")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS], help="some steps")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--short", action="store_true", help="each program in its short form on the CPU")
    args = parser.parse_args(argv)
    steps = [step for step in STEPS if not args.only or step.name in args.only]
    if args.list:
        for step in steps:
            print(f"{step.name:<16} {step.num_gpus} GPU  python -m {step.module} {' '.join(step.args)}")
        return 0
    num_gpus = 0 if args.short else num_gpus_here()
    if not num_gpus and not args.short:
        print("error: no GPU: torch finds none on this machine, nvidia-smi shows the driver's; nothing was run")
        return NO_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    num_failed = num_run = 0
    with (args.out / "results.jsonl").open("a", encoding="utf-8") as results:
        for step in steps:
            if args.short and not step.has_short:
                continue
            if step.num_gpus > num_gpus and not args.short:
                why = f"needs {step.num_gpus} GPUs, here are {num_gpus}"
                line: dict[str, Any] = {"step": step.name, "skipped": why}
            else:
                line = run(step, args.out, args.short)
                num_run += 1
                num_failed += not line["passed"]
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(json.dumps(line), flush=True)
    print(f"{num_failed} of {num_run} steps failed; results in {args.out / 'results.jsonl'}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
