#!/usr/bin/env python3
"""One rating is enough: how many ratings of single answers until a served model's answers are good?

    python scripts/one_rating.py DIRECTORY                   runs what is missing; goes on where it was ended
    python scripts/one_rating.py DIRECTORY --seeds 0         a pilot; its seed is not among those of the study
    python scripts/one_rating.py DIRECTORY --table           prints the table of what has ended, and runs nothing

Fixed before the first run of the study (docs/design/0014-serving.md):

- *Requests.* The tiny model is asked for the smallest of 2 to 6 numbers, so prompts differ in difficulty. Each request
  is one of 60 prompts, 12 of each length, drawn at random: people ask the same things again. It gets one answer.
- *Raters.* Three, who take turns at random. A right answer is good, any other bad; each flips 10 % of the ratings.
- *Training.* Versions of 16 ratings, by the trainer's own run (`RatedRun`), without gates. 480 ratings at most.
- *Level.* .85 of 200 held-out questions (40 of each length, other numbers) answered right, greedily, after a version.
  What counts is the number of ratings at the first version that reaches it, 480 if none does.
- *Arms.* raw: the advantage is the reward. batch: less the mean of the other answers of the update. posterior: less
  the baseline from prompt, rater and all ratings. retained: posterior with retention (weight 1), and 4 revisits of
  `compare` (which is largest) an update. All else is equal.
- *Decision.* Eight seeds, paired. Two-sided exact tests of the differences in ratings, posterior against raw and
  against batch, and retained against posterior, corrected for three by Holm; an arm is ahead below .05.

Each trial adds one row to DIRECTORY/trials.jsonl. It computes in one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

import numpy as np

from rllib_srl.cli.serving.job import Job, KeptDomain, RatedTokens, TrainingSettings
from rllib_srl.cli.serving.trainer.rated_baseline import Rated, RatedEstimator, histories_of
from rllib_srl.cli.serving.trainer.rated_run import RatedRun
from rllib_srl.cli.shared.cluster import start_ray
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.json_lines import json_lines
from rllib_srl.engine import Sampling
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.studies.seeds import bootstrap_interval, holm, paired_test
from rllib_srl.types import History

SEEDS = tuple(range(1, 9))
LENGTHS, NUM_ASKED, NUM_HELD_OUT = (2, 3, 4, 5, 6), 12, 40  # numbers in a question; questions of each length
RATERS, NOISE = ("ann", "bob", "cem"), 0.1
PER_VERSION, MOST = 16, 480  # ratings
LEVEL = 0.85
LR, PASSES, MAX_TOKENS = 2e-3, 4, 6
KEEP = KeptDomain("compare", "compare", {"num_shots": 0})  # which is largest
ARMS: dict[str, dict[str, Any]] = {"raw": {}, "batch": {}, "posterior": {}, "retained": {"retain": 1.0, "revisits": 4}}
PAIRS = (("posterior", "raw"), ("posterior", "batch"), ("retained", "posterior"))


def question_of(numbers: Sequence[int]) -> str:
    """Return a question as a client's request becomes a prompt."""
    listed = f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
    return f"Question: Which is {'smaller' if len(numbers) == 2 else 'smallest'}: {listed}?\nAnswer:"


def questions(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Return the numbers of the questions that are asked, and of those that are held out: none is in both."""
    asked: list[list[int]] = []
    held_out: list[list[int]] = []
    for length in LENGTHS:
        found: dict[frozenset[int], list[int]] = {}
        while len(found) < NUM_ASKED + NUM_HELD_OUT:
            numbers = rng.sample(range(10, 100), length)
            found.setdefault(frozenset(numbers), numbers)
        asked += list(found.values())[:NUM_ASKED]
        held_out += list(found.values())[NUM_ASKED:]
    return asked, held_out


def is_right(numbers: Sequence[int], text: str) -> bool:
    """Return whether an answer is the smallest number."""
    return text.strip() == str(min(numbers))


def no_baseline(names: Sequence[str], ratings: Mapping[str, Rated]) -> list[History]:
    """Return histories with which the advantage is the reward."""
    return [History(domain_mean=0.0)] * len(names)


def batch_mean(names: Sequence[str], ratings: Mapping[str, Rated]) -> list[History]:
    """Return histories with which the baseline is the mean of the other answers."""
    rewards = [ratings[name].reward for name in names]
    return [History(domain_mean=(sum(rewards) - own) / max(1, len(names) - 1)) for own in rewards]


class Policy:
    """Asks and trains the model of a trial."""

    def __init__(self, arm: str, seed: int, directory: Path) -> None:
        """Build the run of a trial."""
        settings = TrainingSettings(lr=LR, passes=PASSES, **ARMS[arm])
        self.job = Job(0, str(local_model("tiny")), "", 256, 1.0, seed, settings, [KEEP], [])
        self.run, self._seed = RatedRun(self.job, directory), seed
        loss = self.run.algo.config.loss_settings()
        posterior = partial(histories_of, prior_weight=loss.prior_weight, neutral=self.job.neutral)
        histories = {"raw": no_baseline, "batch": batch_mean}.get(arm, posterior)
        self.run.algo.advantage_estimator = RatedEstimator(loss, self.run.ratings, histories)
        self._tokenizer = load_tokenizer(local_model("tiny"))

    def ask(self, asked: Sequence[Sequence[int]], temperature: float, version: int) -> list[tuple[list[int], Any]]:
        """Return the prompt's tokens and the turn of each question."""
        prompts = [list(self._tokenizer.encode(question_of(numbers))) for numbers in asked]
        self.run.engine.reseed(1000 * self._seed + version)
        sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, stop=("\n",))
        return list(zip(prompts, self.run.engine.generate(prompts, sampling), strict=True))

    def accuracy(self, held_out: Sequence[Sequence[int]]) -> float:
        """Return the share of held-out questions that are answered right."""
        turns = self.ask(held_out, 0.0, 0)
        return float(np.mean([is_right(one, turn.text) for one, (_, turn) in zip(held_out, turns, strict=True)]))

    def train(self, job: Job) -> None:
        """Train a version."""
        self.run.remember(job)
        while self.run.num_done < self.run.num_slices:
            self.run.step()


def trial(arm: str, seed: int, directory: Path) -> dict[str, Any]:
    """Run one trial; return its row."""
    begun, rng = time.perf_counter(), random.Random(seed)
    asked, held_out = questions(rng)
    shutil.rmtree(directory, ignore_errors=True)
    policy = Policy(arm, seed, directory)
    curve, good = [policy.accuracy(held_out)], 0
    try:
        while curve[-1] < LEVEL and len(curve) * PER_VERSION <= MOST:
            version = len(curve)
            wanted, answers = rng.choices(asked, k=PER_VERSION), []
            for at, (prompt, turn) in enumerate(policy.ask(wanted, 1.0, version)):
                is_good, rater = is_right(wanted[at], turn.text) != (rng.random() < NOISE), rng.choice(RATERS)
                tokens = (prompt, turn.token_ids.tolist(), turn.logp.tolist())
                answers.append(RatedTokens(f"{version}.{at}", version - 1, *tokens, float(is_good), rater))
                good += is_good
            settings = {"version": version, "answers": answers}
            policy.train(Job(**{**vars(policy.job), **settings}))
            curve.append(policy.accuracy(held_out))
    finally:
        policy.run.algo.stop()
        shutil.rmtree(directory, ignore_errors=True)
    num = min(MOST, (len(curve) - 1) * PER_VERSION)
    row = {"arm": arm, "seed": seed, "ratings": num, "is_reached": curve[-1] >= LEVEL, "curve": curve}
    return {**row, "good": good, "seconds": round(time.perf_counter() - begun, 1)}


def table(rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> Iterator[str]:
    """Yield a line for each arm; then what decides, once all trials of the seeds have ended."""
    found = {(row["arm"], row["seed"]): row for row in rows if row["seed"] in seeds}
    for arm in ARMS:
        own = [found[arm, seed] for seed in seeds if (arm, seed) in found]
        if own:
            mean = np.mean([row["ratings"] for row in own])
            best = np.mean([max(row["curve"]) for row in own])
            reached = sum(row["is_reached"] for row in own)
            yield f"{arm:9}  {mean:5.0f} ratings, level reached in {reached} of {len(own)}, best share {best:.3f}"
    if len(found) < len(ARMS) * len(seeds):
        yield f"trials that are missing: {len(ARMS) * len(seeds) - len(found)}; nothing is decided"
        return
    gains = {
        (one, other): np.array([found[other, seed]["ratings"] - found[one, seed]["ratings"] for seed in seeds], float)
        for one, other in PAIRS
    }
    adjusted = holm([paired_test(gain).p for gain in gains.values()])
    for ((one, other), gain), p in zip(gains.items(), adjusted, strict=True):
        low, high = bootstrap_interval(gain)
        yield f"{one} needs {gain.mean():+.0f} [{low:+.0f}, {high:+.0f}] fewer ratings than {other}, p {p:.4f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="of trials.jsonl")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, metavar="N", help="seeds (default: 1 to 8)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms (default: all)")
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    path = arguments.directory / "trials.jsonl"
    rows = [row for row in json_lines(path, dict) if row is not None] if path.exists() else []
    done = {(row["arm"], row["seed"]) for row in rows}
    for seed in () if arguments.table else arguments.seeds:
        for arm in arguments.arms:
            if (arm, seed) in done:
                continue
            start_ray(verbose=False)
            rows.append(trial(arm, seed, arguments.directory / "trial"))
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(table(rows, arguments.seeds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
