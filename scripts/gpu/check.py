"""Run the GPU checks, one process per step, and keep the result of each as a JSON line.

A step is a program with arguments, a time limit and a number of GPUs. Lines of its output that are JSON objects are its
figures, the last one those of the table. While it runs, `nvidia-smi` is sampled for the utilisation and memory of the
GPUs. Steps of call 1 need torch and transformers, those of call 2 also Ray and vLLM; both end within `CALL_S`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.run_log import json_lines

CALL_S = 360.0  # of a call; a step that does not fit into what is left waits for the next one
LIMIT_S = 590.0  # of a step of call 3
LEAST_S = 15.0  # that a step is started with
NO_GPU = 3  # exit status
LEARNER, ENGINE, RUN = "scripts.gpu.learner", "scripts.gpu.engine", "scripts.gpu.run"
PYTEST = ("-q", "-p", "no:cacheprovider")
CARD_TESTS = (*PYTEST, "-c", os.devnull, "--rootdir", ".", "--noconftest", "tests/learner/test_card.py")
ENGINES = ("ray", "vllm")


@dataclass(frozen=True)
class Step:
    """One check. Invariant: `module` runs with `python -m` from the root of the repository."""

    name: str
    module: str
    args: tuple[str, ...] = ()
    short: tuple[str, ...] | None = ("--short",)  # more of them, for a CPU; None: it needs a GPU
    call: int = 3
    limit_s: float = LIMIT_S
    needs: tuple[str, ...] = ENGINES  # modules
    num_gpus: int = 1


def _first(name: str, module: str, args: tuple[str, ...], limit_s: float, *needs: str) -> Step:
    return Step(name, module, args, call=1, limit_s=limit_s, needs=("torch", "transformers", *needs))


STEPS = (
    _first("learner_1.5b", LEARNER, ("train", "1.5B"), 80),
    _first("learner_8b_lora", LEARNER, ("train", "8B", "--lora"), 80, "peft"),
    _first("retention_1.5b", LEARNER, ("retention", "1.5B"), 60),
    _first("packing_1.5b", LEARNER, ("packing", "1.5B"), 40),
    _first("search", "scripts.gpu.search", (), 40, "faiss"),
    Step("tests", "pytest", CARD_TESTS, (), 1, 60, ("torch", "transformers", "pytest")),
    Step("quickstart", "scripts.gpu.start", call=2, limit_s=110),
    Step("beside_trl", "scripts.gpu.beside_trl", call=2, limit_s=130),
    Step("serve", "scripts.gpu.serve", ("--model", "tiny"), call=2, limit_s=120 + 60),
    Step("learner_135m", LEARNER, ("train", "0.1B", "--tokens", "16384"), needs=("torch", "transformers")),
    Step("engine_contract", "pytest", (*PYTEST, "tests/engine/test_contract.py"), None),
    Step("engine_requests", "pytest", (*PYTEST, "tests/engine/test_gpu_requests.py"), None),
    Step("engine_135m", ENGINE, ("0.1B",)),
    Step("engine_float32", ENGINE, ("0.1B", "--dtype", "float32")),
    Step("defaults", RUN, ("--model", "tiny")),
    Step("float32", RUN, ("--model", "tiny", "--dtype", "float32")),
    Step("colocated", RUN, ("--model", "tiny", "--shares", "0.6", "0.4", "--colocate")),
    Step("split", RUN, ("--model", "tiny", "--shares", "1", "1"), num_gpus=2),
    Step("adapters", RUN, ("--model", "tiny", "--lora")),
    Step("max_lag", RUN, ("--model", "tiny", "--shares", "0.6", "0.4", "--max-lag", "1", "--iterations", "4")),
    Step("fsdp", RUN, ("--model", "tiny", "--shares", "1", "1", "--fsdp", "2"), num_gpus=3),
    Step("fsdp_bf16", RUN, ("--model", "tiny", "--shares", "1", "1", "--fsdp", "2", "--gather-bf16"), num_gpus=3),
    Step("engine_parallel", RUN, ("--model", "tiny", "--shares", "2", "1", "--engine-parallel", "2"), num_gpus=3),
    Step("engine_1.5b", ENGINE, ("1.5B",)),
    Step("engine_8b", ENGINE, ("8B",)),
    Step("run_1.5b", RUN, ("--random", "1.5B", "--iterations", "3")),
    Step("turns_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--shares", "0.6", "0.4", "--colocate")),
    Step("lora_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--lora")),
    Step("offload_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--offload")),
    Step("adamw_8bit_1.5b", RUN, ("--random", "1.5B", "--iterations", "3", "--optimizer", "adamw_8bit")),
    Step(
        "paged_1.5b",
        RUN,
        ("--random", "1.5B", "--iterations", "3", "--optimizer", "paged_adamw_8bit"),
        None,
    ),
)


def num_gpus_here() -> int:
    """Return how many GPUs torch can use."""
    import torch

    return torch.cuda.device_count()


def command_of(step: Step, is_short: bool) -> list[str]:
    """Return the command of a step."""
    return [sys.executable, "-m", step.module, *step.args, *((step.short or ()) if is_short else ())]


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


def run(step: Step, out: Path, is_short: bool, limit_s: float) -> dict[str, Any]:
    """Run a step; return its line of results, and write its output to STEP.log."""
    start, sampler = time.monotonic(), Sampler()
    log = out / f"{step.name}.log"
    device = {"SRL_TEST_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""} if is_short else {}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command_of(step, is_short), stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **device},
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its children, such as Ray's and vLLM's workers
                process.wait(timeout=30)
    seconds = round(time.monotonic() - start, 1)
    text = log.read_text(encoding="utf-8", errors="replace")
    result = {"step": step.name, "passed": status == 0, "seconds": seconds, **sampler.stop()}
    if status is None:
        result["error"] = f"no end within {limit_s:.0f} s"
    elif status:
        result["error"] = error_of(text) or f"exit status {status}"
    return {**result, "figures": figures_of(text)}


def figures_of(text: str) -> list[dict[str, Any]]:
    """Return the lines of an output that are JSON objects; of pytest its last line."""
    lines = text.splitlines()
    figures = []
    for line in lines:
        if line.startswith("{") and line.rstrip().endswith("}"):
            try:
                figures.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return figures or [{"output": line} for line in lines[-1:]]


def error_of(text: str) -> str:
    """Return the last line of an output that tells an error, "" if there is none."""
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*(error: |[\w.]*(Error|Exception)\b)", line)]
    if not lines:
        return ""
    if "OutOfMemoryError" in lines[-1]:
        size = re.search(r"total capacity of ([\d.]+ \w+)", lines[-1])
        return f"the card is too small{f': it has {size[1]}' if size else ''}"
    return lines[-1]


def lines_of(results: Path) -> dict[str, dict[str, Any]]:
    """Return the last line of each step in a file of results."""
    return {line["step"]: line for line in json_lines(results, dict) if line is not None}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Return a Markdown table of results."""
    return "\n".join(["| step | seconds | figures |", "|---|---|---|", *map(row_of, lines)])


def row_of(line: dict[str, Any]) -> str:
    """Return a line of results as a row of the table."""
    figures = (line.get("figures") or [{}])[-1]
    shown = ", ".join(f"{name} {value}" for name, value in figures.items())
    if error := line.get("error"):
        shown = f"FAILED: {error}"
    return f"| {line['step']} | {line.get('seconds', '')} | {line.get('skipped') or shown} |"


def why_not(step: Step, num_gpus: int, is_short: bool) -> str:
    """Return why a step cannot run here, "" if it can."""
    if missing := [name for name in step.needs if find_spec(name) is None]:
        return f"needs {', '.join(missing)}"
    if is_short:
        return "" if step.short is not None else "needs a GPU"
    return "" if step.num_gpus <= num_gpus else f"needs {step.num_gpus} GPUs, here are {num_gpus}"


def run_all(steps: Sequence[Step], args: argparse.Namespace, num_gpus: int) -> int:
    """Run the steps that have not passed yet; return the number that failed."""
    path, until, num_failed = args.out / "results.jsonl", time.monotonic() + args.seconds, 0
    done = {name for name, line in lines_of(path).items() if line.get("passed")}
    with path.open("a", encoding="utf-8") as results:
        for step in steps:
            most = LIMIT_S if args.short else step.limit_s  # a CPU may be slow or busy
            left = until - time.monotonic() if args.call in (1, 2) and not args.short else most
            limit_s = min(most, left)
            if step.name in done:
                print(f"{step.name} has passed already; --out DIR for a new run", flush=True)
                continue
            if why := why_not(step, num_gpus, args.short):
                line: dict[str, Any] = {"step": step.name, "skipped": why}
            elif left < LEAST_S:
                print(f"no time is left for {step.name}: run the same call again", flush=True)
                continue
            else:
                print(f"{step.name}, at most {limit_s:.0f} s ...", flush=True)
                line = run(step, args.out, args.short, limit_s)
                num_failed += not line["passed"]
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(row_of(line), flush=True)
    wanted = {step.name for step in steps}
    print("\n" + table(line for name, line in lines_of(path).items() if name in wanted))
    return num_failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description="Check this project on a machine with a GPU.")
    parser.add_argument(
        "--out", type=Path, default=Path("results/gpu_check"), help="directory of the results (default: %(default)s)"
    )
    parser.add_argument("--call", type=int, choices=(1, 2, 3), help="the steps of one call; default: all")
    parser.add_argument("--seconds", type=float, default=CALL_S, help=f"of call 1 or 2 (default: {CALL_S:g})")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in STEPS], help="some steps")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--short", action="store_true", help="each program in its short form on the CPU")
    args = parser.parse_args(argv)
    steps = [s for s in STEPS if (not args.only or s.name in args.only) and args.call in (None, s.call)]
    if args.list:
        for step in steps:
            print(f"{step.call} {step.name:<16} {step.num_gpus} GPU  python -m {step.module} {' '.join(step.args)}")
        return 0
    num_gpus = 0 if args.short else num_gpus_here()
    if not num_gpus and not args.short:
        print("error: no GPU: torch finds none on this machine, nvidia-smi shows the driver's; nothing was run")
        return NO_GPU
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # `run` ends its step on the way
    num_failed = run_all(steps, args, num_gpus)
    print(f"{num_failed} steps failed; results in {args.out / 'results.jsonl'}")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
