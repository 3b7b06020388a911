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
        for name in ("gcd", "lcm", "leg_counting", "count_bits", "number_sorting", "letter_counting", "bitwise_arithmetic")
    },
}
