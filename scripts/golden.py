#!/usr/bin/env python3
"""Compare the results of this checkout with those of a commit: metrics, transcripts and weights must be equal.

    python scripts/golden.py --against main                    the short set
    python scripts/golden.py --against 9ffec21 --cases all     every case
    python scripts/golden.py --against main --keep DIRECTORY   keep the commit's results there, and read them next time
    python scripts/golden.py --record FILE --cases default     run here, and write the results

Both sides run on this machine, one after the other, in separate processes: another processor rounds differently.
The commit is checked out into a temporary directory. Both use this checkout's tiny model, in fp32, and the settings
below, which must be valid on both sides. Compared are every metric that is not a time, the texts and rewards of each
episode, and a digest of the weights. Metrics that only one side has are listed and are not a difference. With vLLM the
weights are compared by sums within 1e-9, and a run that plays ahead (`max_lag`) by the invariants of `broken`, as the
clock decides what it plays. A known change of numbers is a line of EXPECTED. Exit status: 0 if all agree, 1 if
something differs.

The cases: CASES
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "rllib_srl" / "engine" / "tiny"
SECTIONS = ("env_runners", "learners", "replay", "planner", "ratings", "rollout", "weight_sync", "evaluation")
COUNTS = ("num_empty_batches", "num_prompts_resampled", "num_runner_restarts", "num_env_steps_sampled_lifetime")
NOT_COMPARED = re.compile(r"(?<!life)time|seconds|throughput|bytes|_s$")  # names of metrics that differ in every run
TOLERANCE = 1e-9  # of numbers: thread timing decides which turns share a vLLM batch, which changes the last bit
SHOWN = 12  # differences printed for a case
TIMEOUT_S = 1200
P, G = 6, 4  # prompts of an iteration, episodes of a prompt


class Expected(NamedTuple):
    """A known change of numbers: the cases and places (regular expressions) where it shows, and its reason."""

    case: str
    place: str
    reason: str


EXPECTED: tuple[Expected, ...] = (  # at most six
    Expected(".*", r".*replay/num_due", "items are due from their first visit on, not from a draw"),
)

SETTINGS: dict[str, Any] = {
    "envs": {"compare": {"num_shots": 0}, "registers": {"num_shots": 0}},
    "seed": 1,
    "engine": "transformers",
    "num_env_runners": 0,
    "num_learners": 0,
    "compute_dtype": "float32",
    "max_turns": 4,
    "max_turn_tokens": 14,
    "max_episode_tokens": 160,
    "num_prompts_per_batch": P,
    "group_size": G,
    "lr": 3e-4,
    "num_transcripts": 100,
    "checkpoint_every": 0,
}
DRAWN = {"replay_revisit_fraction": 0.4, "replay_min_buffer_size": 4}  # from the second iteration
REUSED = {**DRAWN, "replay_reuse_fraction": 0.3}
STREAM = [
    {"env": "compare", "domain": "one", "env_config": {"num_shots": 0}, "iterations": 2},
    {"env": "registers", "domain": "two", "env_config": {"num_shots": 0}},
]
CASES: dict[str, dict[str, Any]] = {
    "default": {"iterations": 6, "replay_revisit_fraction": 0.5, "evaluation_duration": 8, "evaluation_pass_k": 2},
    **{rule: {"iterations": 4, **DRAWN, "replay_selection": rule} for rule in ("high_reward", "recent", "balanced")},
    "per": {"iterations": 4, **REUSED, "replay_selection": "per", "replay_reuse_selection": "per"},
    "srl": {"iterations": 5, **DRAWN, "replay_selection": "srl", "replay_spacing": "fsrs"},
    "reuse": {"iterations": 5, **REUSED},
    "full": {"iterations": 4, **DRAWN, "replay_capacity": 10, "replay_eviction": "fifo"},
    "stage_end": {"iterations": 4, **DRAWN, "envs": None, "stream": STREAM, "regularisers": {"lwf": 0.5}},
    "rating": {"iterations": 4, **REUSED, "rate_at": 2},
    "two_learners": {"iterations": 3, **DRAWN, "num_env_runners": 1, "num_learners": 2},
    "resumed": {"iterations": 5, **REUSED, "seed": 2, "resume_at": 3},
    "vllm": {"iterations": 3, **DRAWN, "engine": "vllm", "engine_kv_cache_gib": 0.125, "num_env_runners": 1},
    "lag": {"iterations": 4, **DRAWN, "num_env_runners": 1, "max_lag": 1, "slice_s": 0.05},
}
SHORT = ("default", "reuse")
BY_SUMS = ("vllm",)  # cases whose weights agree within TOLERANCE
BY_INVARIANTS = ("lag",)  # cases whose numbers depend on the clock


# --- one side ---------------------------------------------------------------------------------------


def recorded(case: Mapping[str, Any], model: str, directory: Path) -> dict[str, Any]:
    """Run a case with the package that is imported here, and return its results."""
    settings = {**SETTINGS, **case, "log_directory": str(directory / "run")}
    num_iterations = settings.pop("iterations")
    resume_at, rate_at = settings.pop("resume_at", 0), settings.pop("rate_at", 0)
    algo = built(settings, model)
    results = [comparable(algo.evaluate())] if "evaluation_duration" in case else []
    for number in range(1, num_iterations + 1):
        results.append(comparable(algo.train()))
        if number == rate_at:
            rate(directory / "run", model)
        if number == resume_at:
            algo.save_to_path(str(directory / "saved"))
            algo.stop()
            algo = built({**settings, "log_directory": str(directory / "again")}, model)
            algo.restore_from_path(str(directory / "saved"))
    algo.export_to_huggingface(directory / "model")
    algo.stop()
    said = [line for name in ("run", "again") for line in transcripts(directory / name)]
    path = directory / "model" / "model.safetensors"
    return {"results": results, "said": said, "weights": digest(path), "sums": sums(path)}


def built(settings: Mapping[str, Any], model: str) -> Any:
    """Return an algorithm built from settings by their names in SRLConfig."""
    from rllib_srl import SRLConfig

    return SRLConfig().rl_module(model_config={"model": model}).update_from_dict(dict(settings)).build_algo()


def rate(run: Path, model: str) -> None:
    """Rate answers of a run with the command for it."""
    from rllib_srl.cli.main import main as srl

    for answer, value in (("1.0/0", "good"), ("1.0/1", "bad"), ("2.1/2", "4")):
        if srl(["rate", str(run), "--model", model, "--set", answer, value]):
            raise RuntimeError(f"answer {answer} is not rated")


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


def sums(path: Path) -> dict[str, list[float]]:
    """Return the sum and the sum of squares of each tensor of a safetensors file."""
    from safetensors.torch import load_file

    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    return {name: [float(tensor.sum()), float((tensor**2).sum())] for name, tensor in tensors.items()}


# --- both sides -------------------------------------------------------------------------------------


def run_side(root: Path, name: str, scratch: Path) -> dict[str, Any]:
    """Run a case with the package of a checkout, in a process for it; return its results.

    Raises:
        RuntimeError: the run failed; the message holds the end of its output.
    """
    target = scratch / f"{name}.json"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(target), "--cases", name]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"case {name} failed in {root}:\n{done.stderr[-2000:]}")
    record: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))[name]
    return record


def one_sided(one: Any, other: Any) -> Iterator[tuple[str, str]]:
    """Yield ("here" or "there", key) for each key of a mapping that the other side does not have."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() ^ other.keys():
            yield ("here" if key in one else "there"), key
        for key in one.keys() & other.keys():
            yield from one_sided(one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list):
        for pair in zip(one, other, strict=False):
            yield from one_sided(*pair)


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield a line for each place that both sides have and where they differ; nan equals nan."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() & other.keys()):
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


def broken(side: Mapping[str, Any], max_lag: int) -> Iterator[str]:
    """Yield a line for each invariant that a run does not keep whose runners play ahead of training."""
    played = [(line["group_id"], line["index"]) for line in side["said"]]
    if len(set(played)) != len(played):
        yield f"{len(played) - len(set(played))} episodes were trained on twice"
    num_groups = 0
    for number, result in enumerate(side["results"], 1):
        num_here = result["env_runners/num_groups"]
        num_groups += num_here
        if num_here + result["env_runners/num_groups_dropped"] != P:
            yield f"iteration {number}: {num_here:g} groups and the dropped ones are not {P}"
        if (result["rollout/lag_max"] > max_lag) != (result["rollout/late_share"] > 0):
            yield f"iteration {number}: a lag of {result['rollout/lag_max']:g} and a late share that disagrees"
    num_sampled = side["results"][-1]["env_runners/num_episodes_lifetime"]
    if not len(played) == num_sampled == num_groups * G:
        yield f"{len(played)} transcripts, {num_sampled:g} episodes, {num_groups:g} groups of {G}"


def verdict(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return how a case ended in a line, and a line for each difference that is not expected."""
    if name in BY_INVARIANTS:
        lines = [f"here: {line}" for line in broken(here, 1)] + [f"there: {line}" for line in broken(there, 1)]
        return f"{len(lines)} invariants broken" if lines else f"invariants kept ({len(here['said'])} episodes)", lines
    left_out = {"weights"} if name in BY_SUMS else {"sums"}
    one, other = ({part: value for part, value in side.items() if part not in left_out} for side in (here, there))
    known: dict[str, int] = {}
    lines = []
    for line in differences(one, other):
        reasons = [e.reason for e in EXPECTED if re.fullmatch(e.case, name) and re.match(e.place, line)]
        if reasons:
            known[reasons[0]] = known.get(reasons[0], 0) + 1
        else:
            lines.append(line)
    num = sum(len(mine.keys() & its.keys()) for mine, its in zip(one["results"], other["results"], strict=False))
    state = f"{len(lines)} differences" if lines else "equal"
    about = [f"{num} metrics", f"{len(here['said'])} episodes", f"weights {here['weights'][:12]}"]
    about += [f"{count} expected differences: {reason}" for reason, count in known.items()]
    names = set(one_sided(one, other))
    for side in ("here", "there"):
        if mine := sorted(name for where, name in names if where == side):
            about.append(f"only {side}: {' '.join(mine)}")
    return f"{state} ({'; '.join(about)})", lines


@contextlib.contextmanager
def checked_out(commit: str, scratch: Path) -> Iterator[Path]:
    """Yield a directory with the files of a commit."""
    there = scratch / "there"
    subprocess.run(["git", "worktree", "add", "--detach", str(there), commit], cwd=ROOT, check=True, timeout=120)
    try:
        # The commit's own entry points may name other modules than the installed package's.
        metadata = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "egg_info"]
        subprocess.run(metadata, cwd=there, check=True, capture_output=True, timeout=120)
        yield there
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=ROOT, check=False, timeout=120)


def compare(commit: str, names: Sequence[str], keep: Path | None = None) -> int:
    """Run cases here and at a commit; print the differences; return the exit status."""
    revision = ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"]
    full = subprocess.run(revision, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    num_different = 0
    with tempfile.TemporaryDirectory(prefix="golden-") as directory, contextlib.ExitStack() as stack:
        scratch, there = Path(directory), None
        for name in names:
            here = run_side(ROOT, name, scratch)
            what = json.dumps([full, SETTINGS, CASES[name], os.path.realpath(sys.prefix)], sort_keys=True)
            kept = keep / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json" if keep else None
            if kept is not None and kept.is_file():
                other = json.loads(kept.read_text(encoding="utf-8"))
            else:
                there = there or stack.enter_context(checked_out(full, scratch))
                other = run_side(there, name, scratch)
            if kept is not None and not kept.is_file():
                kept.parent.mkdir(parents=True, exist_ok=True)
                partial = kept.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(other), encoding="utf-8")
                partial.replace(kept)
            state, lines = verdict(name, here, other)
            num_different += bool(lines)
            print(f"{name}: {state}", flush=True)
            print("".join(f"    {line}\n" for line in lines[:SHOWN]), end="", flush=True)
    return int(bool(num_different))


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    summary, _, details = (__doc__ or "").replace("CASES", " ".join(CASES)).partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=details, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="commit to compare with")
    parser.add_argument("--record", type=Path, metavar="FILE", help="only run here, and write the results to FILE")
    parser.add_argument("--cases", nargs="+", default=list(SHORT), choices=(*CASES, "all"), metavar="CASE")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="for the commit's results")
    arguments = parser.parse_args(argv)
    names = list(CASES) if "all" in arguments.cases else arguments.cases
    if bool(arguments.against) == bool(arguments.record):
        parser.error("expected --against COMMIT or --record FILE")
    if arguments.against:
        return compare(arguments.against, names, arguments.keep)
    sys.path[0] = os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] or str(ROOT)
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="golden-run-") as scratch:
        records = {name: recorded(CASES[name], str(TINY), Path(scratch) / name) for name in names}
    arguments.record.write_text(json.dumps(records, indent=1, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
