"""Whether a domain is remembered as well as the schedules of its items expect: one lapse says something of all others.

    review of an item ──> observed and predicted recall of its domain, fading with a half-life
                          factor of a domain = (sum of observed + 1) / (sum of predicted + 1), at most 1

A spacing rule keeps items apart, as if each were forgotten by itself. A policy forgets whole skills: where training on
something else has spoilt one item, it has most likely spoilt those like it, months before each would find out at its
own review. The factor carries the news: recall that an item's rule predicts is multiplied by its domain's, and an item
whose product lies below the desired retention is due. The 1 is one review as predicted, so that one lapse is no alarm.

Source: Lindsey, Shroyer, Pashler and Mozer 2014, Psychological Science 25(3), "Improving students' long-term knowledge
retention through personalized review": recall of an item from its own past and that of all items of its kind. The
factor and its half-life are ours: theirs is a fitted logistic regression.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PRIOR = 1.0  # reviews that went as predicted, which every domain starts with


def overdue_by_recall(recall_N: np.ndarray, desired_retention: float) -> np.ndarray:
    """Return how far recall has fallen below the one desired: 0 at it, as an item is overdue by 0 when it falls due."""
    return (1 - recall_N) / (1 - desired_retention) - 1


class DomainRecall:
    """Fading sums of observed and predicted recall by domain.

    Invariant: sums are those of all reviews noted, each halved for every `half_life` iterations since it was; with a
    half-life of 0 nothing is noted, and every factor is 1.
    """

    def __init__(self, half_life: float) -> None:
        """Start with nothing noted; `half_life` is in iterations."""
        self._half_life = half_life
        self._sums: dict[int, tuple[float, float, int]] = {}  # domain -> observed, predicted, as of which iteration

    def note(self, domain_N: np.ndarray, observed_N: np.ndarray, predicted_N: np.ndarray, now: int) -> None:
        """Take in reviews; those without a prediction (nan) say nothing.

        Args:
            domain_N: number of each item's domain.
            observed_N: share of episodes that recalled.
            predicted_N: recall that was predicted, or nan.
            now: the training iteration.
        """
        if self._half_life <= 0:
            return
        is_told_N = ~np.isnan(predicted_N)
        for domain in np.unique(domain_N[is_told_N]).tolist():
            is_here_N = is_told_N & (domain_N == domain)
            observed, predicted = self._faded(domain, now)
            observed += float(observed_N[is_here_N].sum())
            predicted += float(predicted_N[is_here_N].sum())
            self._sums[domain] = (observed, predicted, now)

    def factor(self, domain_N: np.ndarray, now: int) -> np.ndarray:
        """Return what predicted recall is multiplied by, in (0, 1], for items of these domains."""
        factor_N = np.ones(len(domain_N))
        for domain in self._sums:
            observed, predicted = self._faded(domain, now)
            factor_N[domain_N == domain] = min(1.0, (observed + PRIOR) / (predicted + PRIOR))
        return factor_N

    def get_state(self) -> list[list[float]]:
        """Return the sums, as JSON types."""
        return [[domain, *sums] for domain, sums in self._sums.items()]

    def set_state(self, state: list[list[Any]]) -> None:
        """Continue where `get_state` was called."""
        self._sums = {int(domain): (float(seen), float(told), int(at)) for domain, seen, told, at in state}

    def _faded(self, domain: int, now: int) -> tuple[float, float]:
        observed, predicted, at = self._sums.get(domain, (0.0, 0.0, now))
        left = 0.5 ** (max(0, now - at) / self._half_life)
        return observed * left, predicted * left
