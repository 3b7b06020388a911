"""Replay BFCL's ground truth, and a policy of empty turns, in the environment `bfcl`: expects 200 and 0 of 200 passed.

    python scripts/check_bfcl.py
    category       ground truth   empty policy   ms an episode
    base                200/200          0/200             2.9

Needs the package bfcl-eval without its dependencies: pip install --no-deps bfcl-eval==2026.3.23.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rllib_srl.envs.functions.bfcl import Bfcl
from rllib_srl.envs.functions.simulators import CATEGORIES

MOST_TURNS = 200


def played(world: Bfcl, prompt_id: str, turns: list[str] | None) -> float:
    """Return the reward of an episode of `turns`, or of empty turns to its end."""
    world.reset(options={"prompt_id": prompt_id})
    reward, is_over = 0.0, False
    for turn in turns if turns is not None else [""] * MOST_TURNS:
        _, reward, terminated, truncated, _ = world.step(turn)
        is_over = terminated or truncated
        if is_over:
            break
    return reward if is_over else 0.0


def replayed(category: str, call_format: str = "python") -> tuple[int, int, int, float]:
    """Return numbers of tasks, passed ground truths and passed empty policies, and milliseconds a replayed episode."""
    world = Bfcl({"category": category, "call_format": call_format})
    ids = [prompt_id for split in ("train", "heldout") for prompt_id in world.prompt_ids(split, 0)]
    start = time.perf_counter()
    num_gold = sum(played(world, prompt_id, world.gold_turns(prompt_id)) == 1.0 for prompt_id in ids)
    milliseconds = 1000 * (time.perf_counter() - start) / len(ids)
    num_empty = sum(played(world, prompt_id, None) == 1.0 for prompt_id in ids)
    return len(ids), num_gold, num_empty, milliseconds


def main() -> int:
    """Print a row per category; fail unless every ground truth passes and no empty policy does."""
    print(f"{'category':<14}{'ground truth':>15}{'empty policy':>15}{'ms an episode':>16}")
    is_right = True
    for category in CATEGORIES:
        num_tasks, num_gold, num_empty, milliseconds = replayed(category)
        gold, empty = f"{num_gold}/{num_tasks}", f"{num_empty}/{num_tasks}"
        print(f"{category:<14}{gold:>15}{empty:>15}{milliseconds:>16.1f}")
        is_right &= num_gold == num_tasks and num_empty == 0
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
