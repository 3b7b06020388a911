"""The kinds of prompts that pools are made of, and the kinds and seeds of each study, drawn by lot.

    KINDS["compare_3_largest"]      kind -> its environment with settings, as the environment `pool` takes them
    DEVELOPMENT                     kinds that settings are tuned on
    LOTS[0], LOTS[1], LOTS[2]       kinds and seeds of up to three confirmations

A kind is a skill: a task with a size and a range of numbers. All are played without shots. The candidates were played
by the tiny model before any training, and kinds were kept by that alone, never by how a method does on them
(scripts/pool_kinds.py, docs/LOG.md).

Kinds and seeds of a confirmation are drawn by `random.Random(LOT_SEED)`, to exclude choice by hand, from the kinds that
development does not use. A test repeats the draws.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any


def _kind(env: str, **env_config: Any) -> dict[str, Any]:
    return {"env": env, "env_config": {"num_shots": 0, **env_config}}


_RANGES = {"": (10, 99), "_digits": (0, 9), "_hundreds": (100, 999), "_thousands": (1000, 9999)}
CANDIDATES: dict[str, dict[str, Any]] = {
    **{
        f"compare_{num}_{ask}{suffix}": _kind("compare", num_numbers=num, ask=ask, lowest=low, highest=high)
        for num in (2, 3, 4, 5, 6)
        for ask in ("largest", "smallest")
        for suffix, (low, high) in _RANGES.items()
    },
    **{f"lookup_{num}": _kind("lookup", num_pairs=num) for num in (2, 3, 4, 5)},
    **{
        f"registers_{num}_{task}": _kind("registers", num_registers=num, task=task)
        for num in (2, 3, 4, 5, 6, 7, 8)
        for task in ("read", "larger", "smaller", "follow")
    },
    **{
        f"copy_{num}_{order}": _kind("copy_words", num_words=num, order=order)
        for num in (2, 3, 4, 5, 6)
        for order in ("forwards", "backwards")
    },
    **{f"problem_{num}": _kind("word_problem_tool", num_steps=num) for num in (1, 2)},
    "chain_sum": _kind("chain_sum"),
    "products": _kind("products"),
    **{
        name: _kind("reasoning_gym", dataset=name, level=0, pool_size=1024)
        for name in ("gcd", "lcm", "count_bits", "bitwise_arithmetic")
    },
}
# Pilot 0 left these out: never or nearly never solved (pass rate below .02), or always (above .98).
LEFT_OUT = {"gcd", "lcm", "count_bits", "bitwise_arithmetic", "products"}
KINDS = {name: kind for name, kind in CANDIDATES.items() if name not in LEFT_OUT}

NUM_KINDS = 28  # of a pool
NUM_SEEDS = 16  # of a confirmation
LOT_SEED = 701
NUM_LOTS = 2


@dataclass(frozen=True)
class Lot:
    """What a confirmation runs on. Invariant: no two lots share a kind or a seed, nor one with development."""

    kinds: tuple[str, ...]
    seeds: tuple[int, ...]
    pool_seed: int  # of the choice of prompts and of wrong answers


def _drawn() -> tuple[tuple[str, ...], list[Lot]]:
    """Draw the development kinds and then each lot, all from one generator."""
    draw, left = random.Random(LOT_SEED), sorted(KINDS)
    draw.shuffle(left)
    at = range(0, NUM_KINDS * (NUM_LOTS + 1), NUM_KINDS)
    development, *others = [tuple(sorted(left[start : start + NUM_KINDS])) for start in at]
    seeds = draw.sample(range(1_000, 10_000), NUM_SEEDS * NUM_LOTS + NUM_LOTS)
    lots = []
    for number, kinds in enumerate(others):
        mine = seeds[number * (NUM_SEEDS + 1) : (number + 1) * (NUM_SEEDS + 1)]
        lots.append(Lot(kinds, tuple(sorted(mine[1:])), mine[0]))
    return development, lots


DEVELOPMENT, LOTS = _drawn()
