"""Train on questions of your own with reward functions: one JSON object a line, with a question and an answer.

    python docs/examples/own_jsonl.py                   about a minute on a CPU, half of it to start Ray

    {"question": "Which is largest: 17, 93 or 40?", "answer": "93"}

The file here is made up on the spot. With your own file only PATH, the model and the limits on tokens change.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from rllib_srl import SRLConfig


def write_questions(path: Path, num_questions: int, seed: int) -> None:
    """Write questions for the largest of three numbers."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_questions):
            a, b, c = rng.sample(range(10, 100), 3)
            row = {"question": f"Which is largest: {a}, {b} or {c}?", "answer": str(max(a, b, c))}
            file.write(json.dumps(row) + "\n")


def is_right(prompt: str, answer: str, row: dict[str, Any]) -> float:
    """Return 1 for the right answer."""
    return float(answer.strip() == row["answer"])


def is_short(prompt: str, answer: str, row: dict[str, Any]) -> float:
    """Return 1 for an answer without further words."""
    return float(len(answer) <= 4)


def main(argv: list[str] | None = None) -> None:
    """Write the file, train on it, and print held-out accuracy before and after."""
    parser = argparse.ArgumentParser(description="Train on a JSONL file.")
    parser.add_argument("--iterations", type=int, default=8)
    arguments = parser.parse_args(argv)
    directory = Path(tempfile.mkdtemp(prefix="own_jsonl_"))
    write_questions(directory / "numbers.jsonl", num_questions=1000, seed=0)

    config = (
        SRLConfig()
        .data(
            directory / "numbers.jsonl",  # a fixed share of its questions is held out
            question="question",  # columns by name; these are the defaults
            answer="answer",
        )
        .reward([is_right, is_short], weights=[0.9, 0.1])  # without it, answers are graded by rule: docs/grading.md
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=12, max_episode_tokens=128)
        .training(lr=3e-4, num_prompts_per_batch=16, group_size=8, compute_dtype="float32")
        .training(log_directory=str(directory), checkpoint_every=0)
        .evaluation(evaluation_duration=128)
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        before = algo.evaluate()
        for iteration in range(1, arguments.iterations + 1):
            result = algo.train()
            played = result["env_runners"]
            parts = "  ".join(f"{name} {played[f'reward/{name}']:.3f}" for name in ("is_right", "is_short"))
            print(f"iteration {iteration}  reward {played['episode_return_mean']:.3f}  {parts}", flush=True)
        after = algo.evaluate()
    finally:
        algo.stop()
    print(f"held-out accuracy: {before['accuracy']:.3f} before, {after['accuracy']:.3f} after")
    print(f"what the policy wrote: {directory / 'transcripts.jsonl'}")


if __name__ == "__main__":
    main()
