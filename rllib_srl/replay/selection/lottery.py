"""A pseudo-random number for each sequence number, fixed by a seed: SplitMix64.

Source: Steele, Lea and Flood 2014, OOPSLA, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import numpy as np


def lottery(seq_N: np.ndarray, seed: int) -> np.ndarray:
    """Return a number in [0, 2 ** 64) for each `seq`; equal arguments give equal numbers in every process."""
    salt = np.random.SeedSequence([seed]).generate_state(1, np.uint64)[0]
    z_N = (seq_N.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + salt
    z_N = (z_N ^ (z_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z_N = (z_N ^ (z_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    lot_N: np.ndarray = z_N ^ (z_N >> np.uint64(31))
    return lot_N
