"""Measure what training on one task does to another: plain GRPO on A, then on B, for every ordered pair of a pool.

    python scripts/task_pairs.py DIRECTORY            goes on where it was ended; one row a pair and seed
    python scripts/task_pairs.py DIRECTORY --table    writes DIRECTORY/pairs.csv from the rows

Each task is learned alone first (`TOKENS` generated tokens, from the tiny model); its learner, optimiser included, then
goes on with every other task. A task counts as learned if that raises its accuracy by `GAIN`, and only learned tasks
are paired. A pair (A, B) is in *conflict* if B costs A at least `EFFECT`, and *shared* if B gains A at least as much,
as means over the seeds, on `NUM_PROMPTS` held-out prompts of A.

The pool leaves out every task of the pilots of retention: those of the streams `cpu`, `cpu_heldout_2`,
`cpu_pretrained`, `facts` and `skills`.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections import defaultdict
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

from rllib_srl.cli.shared.json_lines import json_lines
from rllib_srl.cli.shared.settings import build_config
from rllib_srl.tune_configs.arms import COMMON
from rllib_srl.tune_configs.kinds import KINDS

POOL = (
    *("compare_2_largest_low", "compare_2_smallest_low", "compare_2_largest_near", "compare_2_smallest_near"),
    *("compare_4_largest_near", "compare_4_smallest_near", "compare_5_largest_near", "compare_5_smallest_near"),
    *("compare_6_largest", "compare_6_smallest", "compare_6_largest_low", "compare_6_smallest_low"),
    *("registers_4_larger", "registers_4_smaller", "registers_6_larger", "registers_6_smaller"),
    *("registers_7_larger", "registers_7_smaller", "registers_4_read", "registers_7_read"),
    *("lookup_3", "lookup_4", "copy_2_backwards", "copy_3_forwards", "chain_sum", "products"),
)
TOKENS = 20_000  # generated in training on one task
NUM_PROMPTS = 768  # held-out prompts of a task
SEEDS = (1, 2)
GAIN = 0.1
EFFECT = 0.1
SETTINGS = {
    **COMMON,
    "lr": 1e-4,  # at which plain GRPO was best on stages of this length
    "replay_revisit_fraction": 0.0,
    "replay_reuse_fraction": 0.0,
    "replay_capacity": 0,
}


def trained(tasks: tuple[str, ...], seed: int, learner: Path | None = None) -> tuple[Any, dict[str, float]]:
    """Train on the first task and return the algorithm, with the accuracy at each task before training.

    Args:
        tasks: the first is trained on, the others are evaluated only.
        seed: of the run.
        learner: checkpoint whose learner goes on; None: the tiny model.
    """
    stages = [{"world": KINDS[t]["env"], "domain": t, "env_config": KINDS[t]["env_config"]} for t in tasks]
    stream = [{**stage, "tokens": TOKENS} for stage in stages]
    settings = {**SETTINGS, "stream": stream, "seed": seed, "evaluation_duration": NUM_PROMPTS * len(tasks)}
    algo = build_config(settings).build_algo()
    if learner is not None:
        algo.restore_from_path(str(learner / "learner_group"), component="learner_group")
    before = accuracies(algo) if learner is None else {}
    while algo.source.progress.tokens < TOKENS:
        algo.train()
    return algo, before


def accuracies(algo: Any) -> dict[str, float]:
    """Return the accuracy at held-out prompts of each task."""
    return {task: float(figures["accuracy"]) for task, figures in algo.evaluate()["by_domain"].items()}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows that are complete; a line that a kill cut short is left out."""
    return [row for row in json_lines(path, dict) if row is not None]


def learned(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tasks whose accuracy rises by `GAIN` in the mean of the seeds that are there, in order of the pool."""
    gains = defaultdict(list)
    for row in rows:
        gains[row["task"]].append(row["after"] - row["before"])
    return [task for task in POOL if gains[task] and fmean(gains[task]) >= GAIN]


def add(path: Path, row: dict[str, Any]) -> None:
    """Append a row."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def learn_alone(directory: Path, task: str, seed: int) -> Path:
    """Return the checkpoint after training on a task alone, which is trained unless it is there."""
    place, rows = directory / "alone" / f"{task}--{seed}", directory / "tasks.jsonl"
    if place.exists() and any((row["task"], row["seed"]) == (task, seed) for row in rows_of(rows)):
        return place
    shutil.rmtree(place, ignore_errors=True)
    start = time.perf_counter()
    algo, before = trained((task,), seed)
    after = accuracies(algo)
    algo.save_to_path(str(place))
    algo.stop()
    row = {"task": task, "seed": seed, "before": before[task], "after": after[task]}
    add(rows, row | {"seconds": round(time.perf_counter() - start, 1)})
    return place


def measure_pair(directory: Path, first: str, second: str, seed: int) -> None:
    """Train on the second task after the first, and add a row."""
    start = time.perf_counter()
    place = learn_alone(directory, first, seed)
    (learned_first,) = (r for r in rows_of(directory / "tasks.jsonl") if (r["task"], r["seed"]) == (first, seed))
    algo, _ = trained((second, first), seed, place)
    after = accuracies(algo)
    algo.stop()
    row = {"first": first, "second": second, "seed": seed, "before": learned_first["after"], "after": after[first]}
    seconds = round(time.perf_counter() - start, 1)
    add(directory / "pairs.jsonl", row | {"effect": after[first] - learned_first["after"], "seconds": seconds})


def write_table(directory: Path) -> None:
    """Write one line a pair: the mean effect of the second task on the first, and the kind of the pair."""
    effects = defaultdict(list)
    for row in rows_of(directory / "pairs.jsonl"):
        effects[row["first"], row["second"]].append(row["effect"])
    counts: dict[str, int] = defaultdict(int)
    with (directory / "pairs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "second", "num_seeds", "effect", "kind"])
        for (first, second), found in sorted(effects.items()):
            mean = fmean(found)
            kind = "conflict" if mean <= -EFFECT else "shared" if mean >= EFFECT else "neither"
            counts[kind] += 1
            writer.writerow([first, second, len(found), f"{mean:.4f}", kind])
    print(dict(counts))


def main() -> None:
    """Measure what is missing, tasks first, then the pairs of learned tasks, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--table", action="store_true", help="write pairs.csv and measure nothing")
    arguments = parser.parse_args()
    directory = arguments.directory
    if arguments.table:
        write_table(directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    for seed in SEEDS:
        for task in POOL:
            learn_alone(directory, task, seed)
    tasks = learned(rows_of(directory / "tasks.jsonl"))
    print(f"{len(tasks)} of {len(POOL)} tasks are learned: {', '.join(tasks)}", flush=True)
    for seed in SEEDS:
        done = {(r["first"], r["second"]) for r in rows_of(directory / "pairs.jsonl") if r["seed"] == seed}
        for pair in permutations(tasks, 2):
            if pair not in done:
                measure_pair(directory, *pair, seed)
    write_table(directory)


if __name__ == "__main__":
    main()
