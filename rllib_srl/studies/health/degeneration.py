"""Measures of degeneration: how a model writes when it may write freely.

    opening --sampled at temperature 1, up to a limit--> token ids, log-probs --> repetition, length, entropy

    repetition   1 - distinct 4-grams / 4-grams of the text's tokens, in [0, 1); 0 for fewer than 4 tokens
    length       tokens, the end-of-sequence token included
    entropy      - mean log-prob of the sampled tokens, nats per token: an unbiased estimate, token by token, of the
                 entropy of the distribution they were sampled from

A collapsed policy repeats itself and has an entropy near 0; one that unlearned language has a high entropy; one trained
on short answers stops at once.

Source of repetition: Welleck et al. 2020, arXiv 1908.04319, section 6 (seq-rep-4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NGRAM = 4
# Measure -> (lowest, highest) healthy value after training, given the one before: (factor, added) of each bound.
LIMITS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "repetition": ((0.0, 0.0), (1.0, 0.1)),  # at most .1 more
    "length": ((0.5, 0.0), (2.0, 0.0)),  # half to double
    "entropy": ((0.5, 0.0), (2.0, 0.0)),
}


def repetition(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """Return the share of n-grams that repeat an earlier one."""
    grams = [tuple(token_ids[at : at + n]) for at in range(len(token_ids) - n + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def measures_of(token_ids: Sequence[int], logp: np.ndarray) -> dict[str, float]:
    """Return the measures of one sampled text.

    Args:
        token_ids: sampled tokens, at least one.
        logp: their log-probs, nats, of the distribution they were sampled from.
    """
    ids = [int(one) for one in token_ids]
    return {"repetition": repetition(ids), "length": float(len(ids)), "entropy": -float(np.mean(logp))}


def healthy_range(measure: str, before: float) -> tuple[float, float]:
    """Return the lowest and highest healthy value of a measure after training, given its value before."""
    low, high = LIMITS[measure]
    return low[0] * before + low[1], high[0] * before + high[1]
