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


_RANGES = {"": (10, 99), "_digits": (0, 9), "_low": (10, 39), "_near": (40, 49), "_hundreds": (100, 999)}
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
        for task in ("read", "larger", "smaller")
    },
    "registers_2_follow": _kind("registers", num_registers=2, task="follow"),
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

NUM_KINDS = 25  # of a pool
NUM_SEEDS = 16  # of a confirmation
NUM_LOTS = 3  # ideas that may be confirmed
LOT_SEED = 701


@dataclass(frozen=True)
class Lot:
    """What a confirmation runs on. Invariant: no two lots share a seed, and none a kind with development."""

    kinds: tuple[str, ...]
    seeds: tuple[int, ...]
    pool_seed: int  # of the choice of prompts and of wrong answers


def _drawn() -> tuple[tuple[str, ...], list[Lot]]:
    """Draw the development kinds, then the kinds and seeds of each lot, all from one generator.

    The kinds of a lot are in no earlier one as long as there are enough; after that they come from all earlier lots.
    The seed of the pool makes their prompts new.
    """
    draw, left = random.Random(LOT_SEED), sorted(KINDS)
    draw.shuffle(left)
    development, left = left[:NUM_KINDS], left[NUM_KINDS:]
    used: list[str] = []
    lots = []
    for _ in range(NUM_LOTS):
        kinds = left[:NUM_KINDS] if len(left) >= NUM_KINDS else draw.sample(sorted(used), NUM_KINDS)
        used, left = [*used, *(kind for kind in kinds if kind in left)], left[NUM_KINDS:]
        number = len(lots) + 1
        seeds = draw.sample(range(1_000 * number, 1_000 * (number + 1)), NUM_SEEDS + 1)
        lots.append(Lot(tuple(sorted(kinds)), tuple(sorted(seeds[1:])), seeds[0]))
    return tuple(sorted(development)), lots


DEVELOPMENT, LOTS = _drawn()
