"""Do the gate and the pass-rate factor of retention earn their lines? Three forms on six development streams.

    python scripts/retention_parts.py DIRECTORY            runs what is missing, and prints the table
    python scripts/retention_parts.py DIRECTORY --last     the same from the end: a second process, beside the first

The forms: as the package has it; with a constant weight; and with answers of all domains, those that are being learned
too. Each trial adds one row to DIRECTORY/parts.jsonl. docs/design/0023-retention.md has the plan.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np

from rllib_srl.learner.group import retention
from rllib_srl.replay.client import ReplayClient
from scripts.retention_study import HELD, Trial, draw_stream, in_words, read_rows, run

SEEDS = range(7101, 7107)
FORMS = ("as it is", "constant weight", "all domains")


def form(name: str) -> AbstractContextManager[Any]:
    """Return a context in which retention is of this form; the trial plays and learns in this process."""
    if name == "constant weight":
        return patch.object(retention, "pass_rate", lambda groups, pass_reward: 1.0)
    if name == "all domains":
        draw = ReplayClient.draw_answers

        def of_all(self: Any, num: int, now: int, without_domains: Any, without_keys: Any) -> Any:
            return draw(self, num, now, (), without_keys)

        return patch.object(ReplayClient, "draw_answers", of_all)
    return nullcontext()


def main() -> None:
    """Run what is missing, and print the mean of each form and its differences to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--last", action="store_true", help="begin with the last of the missing trials")
    arguments = parser.parse_args()
    path = arguments.directory / "parts.jsonl"
    arguments.directory.mkdir(parents=True, exist_ok=True)
    while True:
        done = {(row["form"], row["seed"]) for row in read_rows(path)}
        todo = [(name, seed) for seed in SEEDS for name in FORMS if (name, seed) not in done]
        if not todo:
            break
        name, seed = todo[-1 if arguments.last else 0]
        with form(name):
            row = run(Trial("conflict", HELD, seed, {"replay_retain": 1.0}), draw_stream("conflict", seed))
        with path.open("a") as file:
            file.write(json.dumps({"form": name, **row}) + "\n")
        print(name, seed, f"{row['wall_seconds']} s", flush=True)
    finals = {name: {row["seed"]: row["final"] for row in read_rows(path) if row["form"] == name} for name in FORMS}
    for name, final in finals.items():
        gain = np.array([final[seed] - finals[FORMS[0]][seed] for seed in SEEDS])
        print(f"{name:16} {fmean(final.values()):.3f}  {in_words(gain)}")


if __name__ == "__main__":
    main()
