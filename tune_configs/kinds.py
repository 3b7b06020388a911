"""The kinds of prompts that studies are made of, and how well the tiny model does on each before any training.

    KINDS["compare_3_largest"]      kind -> its environment with settings
    UNTRAINED["compare_3_largest"]  its pass rate, and its share of zero-variance groups

A kind is a skill: a task with a size and a range of numbers. All are played without shots. The candidates were played
by the tiny model before any training, and kinds were kept by that alone, never by how a method does on them
(docs/LOG.md).
"""

from __future__ import annotations

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
# Of the tiny model before any training, 32 prompts x 8 answers a kind: pass rate, share of zero-variance groups.
UNTRAINED = {
    "compare_2_largest": (0.195, 0.38), "compare_2_largest_digits": (0.668, 0.94),
    "compare_2_largest_low": (0.301, 0.41), "compare_2_largest_near": (0.410, 0.44),
    "compare_2_largest_hundreds": (0.000, 1.00), "compare_2_smallest": (0.645, 0.19),
    "compare_2_smallest_digits": (0.289, 0.78), "compare_2_smallest_low": (0.539, 0.28),
    "compare_2_smallest_near": (0.477, 0.31), "compare_2_smallest_hundreds": (0.000, 1.00),
    "compare_3_largest": (0.410, 0.19), "compare_3_largest_digits": (0.102, 0.50),
    "compare_3_largest_low": (0.273, 0.41), "compare_3_largest_near": (0.535, 0.28),
    "compare_3_largest_hundreds": (0.000, 1.00), "compare_3_smallest": (0.527, 0.22),
    "compare_3_smallest_digits": (0.066, 0.84), "compare_3_smallest_low": (0.535, 0.31),
    "compare_3_smallest_near": (0.391, 0.25), "compare_3_smallest_hundreds": (0.000, 1.00),
    "compare_4_largest": (0.406, 0.28), "compare_4_largest_digits": (0.020, 0.88),
    "compare_4_largest_low": (0.180, 0.50), "compare_4_largest_near": (0.395, 0.28),
    "compare_4_largest_hundreds": (0.000, 1.00), "compare_4_smallest": (0.309, 0.22),
    "compare_4_smallest_digits": (0.000, 1.00), "compare_4_smallest_low": (0.477, 0.38),
    "compare_4_smallest_near": (0.387, 0.38), "compare_4_smallest_hundreds": (0.000, 1.00),
    "compare_5_largest": (0.449, 0.16), "compare_5_largest_digits": (0.070, 0.94),
    "compare_5_largest_low": (0.133, 0.53), "compare_5_largest_near": (0.332, 0.34),
    "compare_5_largest_hundreds": (0.000, 1.00), "compare_5_smallest": (0.254, 0.41),
    "compare_5_smallest_digits": (0.027, 0.94), "compare_5_smallest_low": (0.332, 0.44),
    "compare_5_smallest_near": (0.309, 0.44), "compare_5_smallest_hundreds": (0.000, 1.00),
    "compare_6_largest": (0.434, 0.25), "compare_6_largest_digits": (0.301, 0.88),
    "compare_6_largest_low": (0.094, 0.72), "compare_6_largest_near": (0.270, 0.28),
    "compare_6_largest_hundreds": (0.000, 1.00), "compare_6_smallest": (0.305, 0.44),
    "compare_6_smallest_digits": (0.004, 0.97), "compare_6_smallest_low": (0.340, 0.25),
    "compare_6_smallest_near": (0.234, 0.41), "compare_6_smallest_hundreds": (0.000, 1.00), "lookup_2": (0.355, 0.34),
    "lookup_3": (0.250, 0.44), "lookup_4": (0.191, 0.56), "lookup_5": (0.160, 0.69), "registers_2_read": (0.602, 0.09),
    "registers_2_larger": (0.496, 0.22), "registers_2_smaller": (0.461, 0.28), "registers_3_read": (0.539, 0.00),
    "registers_3_larger": (0.426, 0.22), "registers_3_smaller": (0.516, 0.16), "registers_4_read": (0.516, 0.03),
    "registers_4_larger": (0.492, 0.28), "registers_4_smaller": (0.477, 0.19), "registers_5_read": (0.562, 0.03),
    "registers_5_larger": (0.457, 0.25), "registers_5_smaller": (0.430, 0.31), "registers_6_read": (0.008, 0.97),
    "registers_6_larger": (0.441, 0.38), "registers_6_smaller": (0.500, 0.31), "registers_7_read": (0.414, 0.03),
    "registers_7_larger": (0.547, 0.31), "registers_7_smaller": (0.430, 0.28), "registers_8_read": (0.348, 0.22),
    "registers_8_larger": (0.516, 0.22), "registers_8_smaller": (0.410, 0.25), "registers_2_follow": (0.000, 1.00),
    "copy_2_forwards": (0.457, 0.16), "copy_2_backwards": (0.301, 0.25), "copy_3_forwards": (0.418, 0.19),
    "copy_3_backwards": (0.219, 0.31), "copy_4_forwards": (0.000, 1.00), "copy_4_backwards": (0.000, 1.00),
    "copy_5_forwards": (0.000, 1.00), "copy_5_backwards": (0.000, 1.00), "copy_6_forwards": (0.000, 1.00),
    "copy_6_backwards": (0.000, 1.00), "problem_1": (0.535, 0.06), "problem_2": (0.004, 0.97),
    "chain_sum": (0.254, 0.84), "products": (0.211, 0.84), "gcd": (0.000, 1.00), "lcm": (0.000, 1.00),
    "count_bits": (0.027, 0.94), "bitwise_arithmetic": (0.000, 1.00),
}  # fmt: skip
# Never solved, a twentieth of the kinds: real sets have such prompts as well.
HOPELESS = ("copy_4_forwards", "copy_4_backwards", "problem_2", "registers_2_follow")
KINDS = {name: kind for name, kind in CANDIDATES.items() if 0.005 <= UNTRAINED[name][0] <= 0.98 or name in HOPELESS}
