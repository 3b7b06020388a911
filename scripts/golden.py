#!/usr/bin/env python3
"""Compare the results of this checkout with those of a commit: metrics, transcripts and weights must be equal.

    python scripts/golden.py --against main                   the short set: one seed, about a minute a side
    python scripts/golden.py --against v1 --cases all         three seeds, vLLM, a study's trial, a resumed run
    python scripts/golden.py --record FILE --cases seed_1     run here, and write the results

Both sides run on this machine, one after the other, in separate processes: another processor rounds differently.
The commit is checked out into a temporary directory. Both use this checkout's tiny model, in fp32. Compared are every
metric that is not a time, the texts and rewards of each episode, and a digest of the weights. Exit status: 0 if all
agree, 1 if something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "rllib_srl" / "engine" / "tiny"
SECTIONS = ("env_runners", "learners", "replay", "planner", "weight_sync", "evaluation")  # of a result
COUNTS = ("num_empty_batches", "num_prompts_resampled", "num_runner_restarts", "num_env_steps_sampled_lifetime")
NOT_COMPARED = re.compile(r"time|seconds|throughput|bytes|_s$")  # names of metrics that differ in every run
TOLERANCE = 1e-9  # of numbers: thread timing decides which turns share a vLLM batch, which changes the last bit
SHOWN = 12  # differences printed for a case
TIMEOUT_S = 1200

# Memory, schedule, planner and reuse are on, so that a change in any draw becomes visible.
SETTINGS: dict[str, Any] = {
    "worlds": {"compare": {"num_shots": 0}, "registers": {"num_shots": 0}},
    "engine": "transformers",
    "num_env_runners": 0,
    "num_learners": 0,
    "compute_dtype": "float32",
    "max_turns": 4,
    "max_turn_tokens": 14,
    "max_episode_tokens": 160,
    "num_prompts_per_batch": 6,
    "group_size": 4,
    "lr": 3e-4,
    "num_transcripts": 100,
    "checkpoint_every": 0,
    "evaluation_duration": 8,
    "evaluation_pass_k": 2,
    "replay_revisit_fraction": 0.4,
    "replay_reuse_fraction": 0.3,
    "replay_diversity_coeff": 0.5,
    "replay_spacing": "fsrs",
    "replay_selection": "srl",
    "replay_reuse_selection": "srl",
    "replay_load_control": "throttle_new",
    "replay_capacity": 64,
    "planner_mode": "softmax",
    "planner_adapt": "revisit",
}
STUDY_STREAM = [
    {"world": "compare", "domain": "one", "env_config": {"num_shots": 0}, "tokens": 300},
    {"world": "registers", "domain": "two", "env_config": {"num_shots": 0}, "tokens": 300},
]
CASES: dict[str, dict[str, Any]] = {
    "seed_1": {"seed": 1, "iterations": 4},
    "seed_2": {"seed": 2, "iterations": 8},
    "seed_3": {"seed": 3, "iterations": 8},
    "resumed": {"seed": 1, "iterations": 6, "resume_at": 3},
    "stream": {"seed": 4, "iterations": 6, "worlds": None, "stream": STUDY_STREAM},
    "vllm": {"seed": 1, "iterations": 3, "engine": "vllm", "num_env_runners": 1, "engine_kv_cache_gib": 0.125},
}
SHORT = ("seed_1",)


# --- one side ---------------------------------------------------------------------------------------


def recorded(case: Mapping[str, Any], model: str, directory: Path) -> dict[str, Any]:
    """Run a case with the package that is imported here, and return its results."""
    settings = {**SETTINGS, **case, "log_directory": str(directory / "run")}
    num_iterations, resume_at = settings.pop("iterations"), settings.pop("resume_at", 0)
    algo = built(settings, model)
    results = [comparable(algo.evaluate())]
    for number in range(1, num_iterations + 1):
        results.append(comparable(algo.train()))
        if number == resume_at:
            algo.save_to_path(str(directory / "saved"))
            algo.stop()
            algo = built({**settings, "log_directory": str(directory / "again")}, model)
            algo.restore_from_path(str(directory / "saved"))
    algo.export_to_huggingface(directory / "model")
    algo.stop()
    said = [line for name in ("run", "again") for line in transcripts(directory / name)]
    return {"results": results, "said": said, "weights": digest(directory / "model" / "model.safetensors")}


def built(settings: Mapping[str, Any], model: str) -> Any:
    """Return an algorithm built from settings by their names in SRLConfig."""
    from rllib_srl import SRLConfig

    return SRLConfig().rl_module(model_config={"model": model}).update_from_dict(dict(settings)).build_algo()


def comparable(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a result that do not depend on the clock, as "section/name" -> number."""
    kept = {name: result[name] for name in (*SECTIONS, *COUNTS) if name in result}
    if not kept:  # of an evaluation
        kept = dict(result)
    return {name: value for name, value in flat(kept) if name in COUNTS or not NOT_COMPARED.search(name)}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a/b", number) for the numbers of nested mappings."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) or hasattr(value, "item"):
            yield f"{prefix}{name}", float(value)


def transcripts(directory: Path) -> list[Any]:
    """Return the content of a run's transcripts, without times."""
    path = directory / "transcripts.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    return [{name: value for name, value in line.items() if not name.endswith("_s")} for line in lines]


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def with_current_metrics(value: Any) -> Any:
    """Return results with the present names of metrics, so that they compare with those of earlier commits."""
    from rllib_srl.common.metric_names import current_metric  # not in earlier commits, which `--record` runs

    if isinstance(value, Mapping):
        return {current_metric(name): with_current_metrics(one) for name, one in value.items()}
    return [with_current_metrics(one) for one in value] if isinstance(value, list) else value


# --- both sides -------------------------------------------------------------------------------------


def run_side(root: Path, names: Sequence[str], scratch: Path) -> dict[str, Any]:
    """Run cases with the package of a checkout, each in a process of its own; return case -> results.

    Raises:
        RuntimeError: a run failed; the message holds the end of its output.
    """
    found = {}
    for name in names:
        target = scratch / f"{name}.json"
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, str(Path(__file__).resolve()), "--record", str(target), "--cases", name]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"case {name} failed in {root}:\n{done.stderr[-2000:]}")
        found[name] = with_current_metrics(json.loads(target.read_text(encoding="utf-8"))[name])
    return found


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each place where two recordings differ; nan equals nan."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other:
                yield f"{where}/{name}: only {'here' if name in one else 'there'}"
            else:
                yield from differences(one[name], other[name], f"{where}/{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for at, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{at}]")
    elif one != other and not _are_close(one, other):
        yield f"{where}: {str(one)[:80]!s} here, {str(other)[:80]!s} there"


def _are_close(one: Any, other: Any) -> bool:
    if not isinstance(one, float) or not isinstance(other, float):
        return False
    return math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))


def compare(commit: str, names: Sequence[str]) -> int:
    """Run cases here and at a commit; print the differences; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch:
        there = Path(scratch) / "there"
        subprocess.run(["git", "worktree", "add", "--detach", str(there), commit], cwd=ROOT, check=True, timeout=120)
        # The commit's own entry points may name other modules than the installed package's.
        metadata = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "egg_info"]
        subprocess.run(metadata, cwd=there, check=True, capture_output=True, timeout=120)
        try:
            num_different = 0
            for name in names:
                sides = []
                for at, root in enumerate((ROOT, there)):
                    (Path(scratch) / str(at)).mkdir(exist_ok=True)
                    sides.append(run_side(root, [name], Path(scratch) / str(at))[name])
                found = list(differences(*sides))
                num_different += bool(found)
                lines = len(sides[0]["said"])
                state = f"{len(found)} differences" if found else "equal"
                print(f"{name}: {state} ({lines} episodes, weights {sides[0]['weights'][:12]})", flush=True)
                print("".join(f"    {line}\n" for line in found[:SHOWN]), end="", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=ROOT, check=False, timeout=120)
    return int(bool(num_different))


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="commit to compare with")
    parser.add_argument("--record", type=Path, metavar="FILE", help="only run here, and write the results to FILE")
    parser.add_argument("--cases", nargs="+", default=list(SHORT), choices=(*CASES, "all"), metavar="CASE")
    arguments = parser.parse_args(argv)
    names = list(CASES) if "all" in arguments.cases else arguments.cases
    if bool(arguments.against) == bool(arguments.record):
        parser.error("expected --against COMMIT or --record FILE")
    if arguments.against:
        return compare(arguments.against, names)
    sys.path[0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] or str(ROOT)
    import ray

    if any("engine" in CASES[name] for name in names):
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="golden-run-") as scratch:
        found = {name: recorded(CASES[name], str(TINY), Path(scratch) / name) for name in names}
    arguments.record.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
