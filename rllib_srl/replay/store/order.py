"""Select rows by their place in an order, without sorting all of them.

    earliest(num, time_N, seq_N)              positions of the `num` smallest (time, seq), ascending
    sample(num, generator, *keys_N)           positions of a uniform sample, in random order
    at_ranks(rank_K, *keys_N)                 positions at some ranks of the order by several keys

A sample is drawn as ranks in the order of the keys, so it depends on the rows and the generator alone, and not on the
places of the rows in their table. The last key is `seq`, which no two rows share.
"""

from __future__ import annotations

import math

import numpy as np


def earliest(num: int, time_N: np.ndarray, seq_N: np.ndarray) -> np.ndarray:
    """Return the positions of the `num` smallest (time, seq) in ascending order; all positions if there are fewer.

    Args:
        num: at least 0.
        time_N: numbers without NaN; exact below 2 ** 53, like `seq_N`.
        seq_N: integers >= 0 that break ties.
    """
    if not num:
        return np.empty(0, np.int64)
    key_N = np.empty(len(time_N), np.complex128)  # NumPy orders complex numbers by real and then imaginary part
    key_N.real, key_N.imag = time_N, seq_N
    if num >= len(key_N):
        return np.argsort(key_N)
    first_N = np.argpartition(key_N, num - 1)[:num]
    return first_N[np.argsort(key_N[first_N])]


def sample(num: int, generator: np.random.Generator, *keys_N: np.ndarray) -> np.ndarray:
    """Draw the positions of distinct rows uniformly, in random order.

    Args:
        num: at least 0; if there are fewer rows, all are returned.
        generator: used once, or not at all if there is nothing to draw.
        keys_N: of the order in which rows are ranked, as in `at_ranks`.
    """
    if not (num := min(num, len(keys_N[0]))):
        return np.empty(0, np.int64)
    return at_ranks(generator.choice(len(keys_N[0]), num, replace=False), *keys_N)


def at_ranks(rank_K: np.ndarray, *keys_N: np.ndarray) -> np.ndarray:
    """Return `np.lexsort(keys_N[::-1])[rank_K]`: the positions at some ranks of the order by the first key, then ...

    The keys become one integer a row. Counting these in about N equal bins gives the bin of each rank, and only rows
    in such bins are sorted: for 4,096 of a million rows, a sixth of the time of sorting all.

    Args:
        rank_K: each in [0, N).
        keys_N: integers; no two rows agree in all of them.
    """
    lows = [int(key_N.min()) for key_N in keys_N]
    spans = [int(key_N.max()) - low + 1 for key_N, low in zip(keys_N, lows)]
    if math.prod(spans) >= 1 << 63:  # no integer of 64 bits holds all keys
        sorted_K: np.ndarray = np.lexsort(keys_N[::-1])[rank_K]
        return sorted_K
    code_N = np.zeros(len(keys_N[0]), np.int64)
    for key_N, low, span in zip(keys_N, lows, spans):
        if span > 1:
            code_N *= span
            code_N += (key_N - low).astype(np.int64, copy=False)
    bin_N = code_N >> max(0, math.prod(spans).bit_length() - len(code_N).bit_length())
    size_B = np.bincount(bin_N)
    bin_K = np.searchsorted(np.cumsum(size_B), rank_K, side="right")
    is_hit_B = np.zeros(len(size_B), bool)
    is_hit_B[bin_K] = True
    near_M = np.flatnonzero(is_hit_B[bin_N])
    skipped_B = np.cumsum(size_B * ~is_hit_B)  # rows in bins up to here that are not sorted
    found_K: np.ndarray = near_M[np.argsort(code_N[near_M])][rank_K - skipped_B[bin_K]]
    return found_K
