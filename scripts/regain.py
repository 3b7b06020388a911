#!/usr/bin/env python3
"""Does a policy that has lost a skill regain it from its own checkpoint in fewer generated tokens than by GRPO?

    python scripts/regain.py --out results/regain                 eight seeds; a kill costs the seed that was running
    python scripts/regain.py --out results/regain --seeds 1

    1  the tiny model learns the largest of numbers                  the teacher
    2  it learns the smallest of numbers, without replay             the student, which answers both alike
    3  the student trains on the first task again, in two arms       grpo: 16 prompts x 8 answers, rewards
                                                                     distill: 128 prompts, one answer each, no rewards

Both arms make equally many answers an iteration, with the same seed and learning rate. An arm has regained the skill at
the first of its evaluations (every iteration, the same 256 held-out prompts, greedy) at which its accuracy is at least
student + .9 (teacher - student); one that never is counts with all its tokens. Fixed beforehand: distillation is ahead
if it needs fewer generated tokens in so many of the seeds that a two-sided sign test is below .05 (8 of 8). A seed
whose student lost less than .1 does not count, and is shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

from scipy.stats import binomtest

from rllib_srl import SRL, SRLConfig
from rllib_srl.algorithm.checkpointing import export_checkpoint
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.tune_configs.arms import COMMON

SEEDS = tuple(range(1, 9))
TOKENS = 40_000  # generated in a stage
MOST = 40_000  # in an arm
NUM_HELD_OUT, LEAST_LOSS, GOAL = 256, 0.1, 0.9
ASK = {"old": "largest", "new": "smallest"}
TEACHER, STUDENT = "teacher", "student"


def config_of(model: str, ask: str, seed: int, directory: Path) -> SRLConfig:
    """Return the settings of a stage or an arm."""
    plain = {name: value for name, value in COMMON.items() if name not in ("model", "evaluation_duration")}
    config = SRLConfig().environment("compare", env_config={"num_shots": 0, "ask": ask})
    config.rl_module(model_config={"model": model}).evaluation(evaluation_duration=NUM_HELD_OUT)
    config.update_from_dict({**plain, "checkpoint_every": 0, "log_directory": str(directory), "seed": seed})
    return config.replay("none")


def accuracy(algo: SRL) -> float:
    """Return the accuracy on held-out prompts."""
    return float(algo.evaluate()["accuracy"])


def learn(model: str, ask: str, seed: int, directory: Path, name: str) -> None:
    """Train a stage and write its model."""
    config = config_of(model, ask, seed, directory / f"{name}_run")
    algo = config.build_algo()
    try:
        tokens = 0
        while tokens < TOKENS:
            tokens += algo.train()["env_runners"]["num_generated_tokens"]
        algo.save_to_path(directory / f"{name}_checkpoint")
    finally:
        algo.stop()
    export_checkpoint(directory / f"{name}_checkpoint", config, directory / name)


def regain(config: SRLConfig, goal: float) -> dict[str, Any]:
    """Train an arm until it has regained the skill; return its tokens and the curve of its accuracy."""
    algo = config.build_algo()
    try:
        curve = [(0, accuracy(algo))]
        while curve[-1][1] < goal and curve[-1][0] < MOST:
            tokens = curve[-1][0] + int(algo.train()["env_runners"]["num_generated_tokens"])
            curve.append((tokens, accuracy(algo)))
    finally:
        algo.stop()
    return {"tokens": curve[-1][0], "regained": curve[-1][1] >= goal, "curve": curve}


def run(seed: int, directory: Path) -> dict[str, Any]:
    """Return the result of a seed; models that are written already are used again."""
    teacher, student = directory / TEACHER, directory / STUDENT
    for name, model, ask in ((TEACHER, "tiny", ASK["old"]), (STUDENT, str(teacher), ASK["new"])):
        if not (directory / name / "config.json").is_file():
            learn(model, ask, seed, directory, name)
    before = {}
    for path in (teacher, student):
        algo = config_of(str(path), ASK["old"], seed, directory / "evaluation").build_algo()
        before[path.name] = accuracy(algo)
        algo.stop()
    goal = before[STUDENT] + GOAL * (before[TEACHER] - before[STUDENT])
    grpo, distilled = (config_of(str(student), ASK["old"], seed, directory / arm) for arm in ("grpo", "distill"))
    size = grpo.num_prompts_per_batch * grpo.group_size
    distilled.distill(str(teacher)).training(advantage="none", group_size=1, num_prompts_per_batch=size)
    return {**before, "grpo": regain(grpo, goal), "distill": regain(distilled, goal)}


def table(results: dict[int, dict[str, Any]]) -> str:
    """Return the table of all seeds and the verdict."""
    lines, wins, num = ["seed  teacher  student  grpo tokens  distill tokens"], 0, 0
    for seed, one in results.items():
        shown = [f"{one[arm]['tokens']:,}{'' if one[arm]['regained'] else ' (never)'}" for arm in ("grpo", "distill")]
        counts = one[TEACHER] - one[STUDENT] >= LEAST_LOSS
        row = f"{seed:4}  {one[TEACHER]:.3f}  {one[STUDENT]:.3f}  {'  '.join(shown)}"
        lines.append(row + ("" if counts else "  no loss"))
        num += counts
        wins += counts and one["distill"]["tokens"] < one["grpo"]["tokens"]
    p = binomtest(wins, num).pvalue if num else 1.0
    return "\n".join([*lines, f"distillation is ahead in {wins} of {num} seeds, p = {p:.3f}"])


def main(argv: list[str] | None = None) -> None:
    """Run the seeds that have no result yet, and print the table."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    arguments, results = parser.parse_args(argv), {}
    for seed in arguments.seeds:
        directory = arguments.out.absolute() / str(seed)
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "result.json"
        if not file.is_file():
            file.write_text(json.dumps(run(seed, directory), indent=1), encoding="utf-8")
        results[seed] = json.loads(file.read_text(encoding="utf-8"))
        print(table(results), flush=True)


if __name__ == "__main__":
    main()
