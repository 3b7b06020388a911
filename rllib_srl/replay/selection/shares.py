"""Divides draws from the memory among domains, and within one among bands of pass rates, with lending between bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LOW, MEDIUM, HIGH = range(3)
NUM_BANDS = 3


@dataclass(frozen=True)
class DomainShares:
    """Shares of a draw from the memory by domain, and within a domain by band of an item's pass rate.

    Invariant: shares are at least 0 and sum to 1; with `only`, the draw is from that domain alone.
    """

    shares: Mapping[str, float]
    bands: Mapping[str, int]  # accuracy band of each domain, for lending
    item_bands: tuple[float, ...] | None
    bounds: tuple[float, float]
    only: str | None = None

    def divided(
        self, domains: Sequence[str], domain_N: np.ndarray, pass_rate_N: np.ndarray, num: int
    ) -> tuple[np.ndarray, dict[int, float]]:
        """Return the class (domain and band) of each candidate, and the weight of each class.

        Args:
            domains: domain names by number; the number of a name never changes.
            domain_N: domain number of each candidate.
            pass_rate_N: pass rate of each candidate's last visit, in [0, 1].
            num: number of candidates to draw.
        """
        names = [*domains, *sorted(set(self.shares) - set(domains))]
        band_N = bands(pass_rate_N, self.bounds) if self.item_bands else np.full(len(domain_N), MEDIUM)
        class_N = NUM_BANDS * np.asarray(domain_N, np.int64) + band_N
        room_KC = np.bincount(class_N, minlength=NUM_BANDS * len(names)).reshape(len(names), NUM_BANDS)
        share_K = np.array([self.shares.get(name, 0.0) for name in names])
        band_K = np.array([self.bands.get(name, MEDIUM) for name in names])
        num_KC = class_shares(share_K, band_K, self.item_bands or (0.0, 1.0, 0.0), room_KC, num)
        return class_N, dict(enumerate(num_KC.ravel().tolist()))


def bands(acc_K: np.ndarray, bounds: Sequence[float]) -> np.ndarray:
    """Return the band of each accuracy: 0 below bounds[0], 2 above bounds[1], 1 in between (inclusive)."""
    acc_K = np.asarray(acc_K, float)
    return np.where(acc_K < bounds[0], LOW, np.where(acc_K > bounds[1], HIGH, MEDIUM))


def lent(share_K: np.ndarray, room_K: np.ndarray, distance_KK: np.ndarray) -> np.ndarray:
    """Lend the shares of classes without enough room to the nearest classes with room.

    Nearest first; at equal distance in proportion to shares (equally where these are 0), each up to its room.

    Args:
        share_K: intended amount of each class, >= 0.
        room_K: capacity of each class, in the same unit.
        distance_KK: distance from lender to borrower: 0 for the same band, 1 for an adjacent one, ...

    Returns:
        Amount of each class; the sum is that of the shares, or the total room if that is less.
    """
    share_K, room_K = np.asarray(share_K, float), np.asarray(room_K, float)
    taken_K: np.ndarray = np.minimum(share_K, room_K)
    for lender in np.flatnonzero(share_K > room_K):
        left = share_K[lender] - room_K[lender]
        for distance in np.unique(distance_KK[lender]):
            ring_K = (distance_KK[lender] == distance) & (np.arange(len(share_K)) != lender)
            while left > 1e-12 and (open_K := ring_K & (room_K - taken_K > 1e-12)).any():
                weight_K = np.where(open_K, share_K, 0.0)
                weight_K = weight_K if weight_K.sum() else open_K.astype(float)
                given_K = np.minimum(left * (weight_K / weight_K.sum()), room_K - taken_K)
                taken_K += given_K
                left -= given_K.sum()
    return taken_K


def class_shares(
    domain_share_K: np.ndarray, domain_band_K: np.ndarray, item_bands: Sequence[float], room_KC: np.ndarray, num: float
) -> np.ndarray:
    """Divide `num` revisits among the item bands of each domain, lending where there are too few items.

    A domain first fills its own item bands, nearest band first. Only what exceeds all its items is lent to other
    domains: those of the same band first, then of adjacent ones.

    Args:
        domain_share_K: share of each domain.
        domain_band_K: band of each domain.
        item_bands: share of each item band C within a domain.
        room_KC: number of playable items, by domain and band.
        num: number of revisits.

    Returns:
        [K, C] unrounded numbers; their sum is `num`, or the number of items if that is less.
    """
    room_KC = np.asarray(room_KC, float)
    within_C = np.asarray(item_bands, float) / np.sum(item_bands)
    steps_KK = np.abs(np.subtract.outer(domain_band_K, domain_band_K))
    domain_K = lent(num * np.asarray(domain_share_K, float), room_KC.sum(1), steps_KK)
    steps_CC = np.abs(np.subtract.outer(np.arange(NUM_BANDS), np.arange(NUM_BANDS)))
    return np.stack([lent(of * within_C, room_C, steps_CC) for of, room_C in zip(domain_K, room_KC, strict=True)])
