"""How batches are divided among domains: accuracy bands, priorities, a floor under each, lending between bands.

    accuracy  0 ── low ── 0.4 ── medium ── 0.8 ── high ── 1
    priority  = band weight + 0.10 staleness + 0.05 uncertainty + base weight
    share     = floor + (1 - K floor) softmax(priority / temperature)

Where this adds to the plan it follows (of another system, never built): staleness and uncertainty are scaled to [0, 1],
and the softmax has a temperature, because at 1 priorities within [0, 2] leave shares within a factor of e^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LOW, MEDIUM, HIGH = range(3)
NUM_BANDS = 3


@dataclass(frozen=True)
class DomainShares:
    """How a draw from the memory is divided: shares by domain, and inside each by band of an item's pass rate.

    Invariant: shares are at least 0 and sum to 1; with `only` that domain alone is drawn from.
    """

    shares: Mapping[str, float]
    bands: Mapping[str, int]  # of each domain: who lends to whom
    item_bands: tuple[float, ...] | None
    bounds: tuple[float, float]
    only: str | None = None

    def divided(
        self, domains: Sequence[str], domain_N: np.ndarray, pass_rate_N: np.ndarray, num: int
    ) -> tuple[np.ndarray, dict[int, float]]:
        """Return the class of each candidate (a domain and a band in it), and the weight of each class.

        Args:
            domains: names of the domains that candidates give by number; a name keeps its number for good.
            domain_N: of the candidates, by number.
            pass_rate_N: of the last visit of each, in [0, 1].
            num: to be drawn.
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
    """Return the band of each accuracy: 0 below bounds[0], 2 above bounds[1], 1 from the one to the other."""
    acc_K = np.asarray(acc_K, float)
    return np.where(acc_K < bounds[0], LOW, np.where(acc_K > bounds[1], HIGH, MEDIUM))


def staleness(num_since_K: np.ndarray, horizon: int) -> np.ndarray:
    """Return iterations since a domain was played as a share of `horizon`, at most 1."""
    return np.minimum(1.0, np.asarray(num_since_K, float) / horizon)


def uncertainty(variance_K: np.ndarray) -> np.ndarray:
    """Return the standard error of each average in units of one observation's: 1 before any, sqrt(b / (2 - b)) at last.

    Args:
        variance_K: sum of the squared weights of what was averaged; see `averaged`.
    """
    return np.sqrt(np.asarray(variance_K, float))


def averaged(acc: float, variance: float, value: float, rate: float) -> tuple[float, float]:
    """Return a moving average and the sum of its squared weights after one more value.

    acc' = (1 - rate) acc + rate value;    variance' = (1 - rate)^2 variance + rate^2
    """
    return (1 - rate) * acc + rate * value, (1 - rate) ** 2 * variance + rate**2


def floored_softmax(score_K: np.ndarray, floor: float) -> np.ndarray:
    """Return shares that sum to 1: floor + (1 - K floor) softmax(score), all equal where K floor >= 1."""
    num = len(score_K)
    weight_K = np.exp(score_K - np.max(score_K))
    left = max(0.0, 1.0 - num * floor)
    return (1.0 - left) / num + left * weight_K / weight_K.sum()


def lent(share_K: np.ndarray, room_K: np.ndarray, distance_KK: np.ndarray) -> np.ndarray:
    """Let classes that cannot take their share lend the rest to the nearest ones that can.

    Nearest first, at equal distance in proportion to shares (equally where these are 0), each up to its room.

    Args:
        share_K: what each should take, >= 0.
        room_K: what each can take, in the same unit.
        distance_KK: steps from a lender to a borrower: 0 the same band, 1 an adjacent one, ...

    Returns:
        What each takes; the sum is that of the shares, or of all room if that is less.
    """
    share_K, room_K = np.asarray(share_K, float), np.asarray(room_K, float)
    taken_K = np.minimum(share_K, room_K)
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

    Within a domain first, to adjacent item bands; then to domains of the same band, then of adjacent ones.

    Args:
        domain_share_K: share of each domain.
        domain_band_K: band of each domain.
        item_bands: share of each item band C inside a domain.
        room_KC: items that may be played, by domain and band.
        num: revisits.

    Returns:
        [K, C] numbers, not rounded; their sum is `num`, or all items if there are fewer.
    """
    room_KC = np.asarray(room_KC, float)
    within_C = np.asarray(item_bands, float) / np.sum(item_bands)
    steps_KK = np.abs(np.subtract.outer(domain_band_K, domain_band_K))
    domain_K = lent(num * np.asarray(domain_share_K, float), room_KC.sum(1), steps_KK)
    steps_CC = np.abs(np.subtract.outer(np.arange(NUM_BANDS), np.arange(NUM_BANDS)))
    return np.stack([lent(of * within_C, room_C, steps_CC) for of, room_C in zip(domain_K, room_KC, strict=True)])
