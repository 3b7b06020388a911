"""Search BAPO's clip bounds for one step, so that tokens with positive advantage keep a target share of the loss.

    bounds  first pair (low, high) on a fixed path with measure(P, N) >= target, else the last pair
            P, N = sums of token masses with positive and with negative advantage

    mode        path                            mass of a token                     measure
    paper       upper to its end, then lower    pi |min(r A, clip(r) A)|            P / |P - N|
    released    lower to its end, then upper    |min(r A, clip(r) A)|               P / N
    active      upper to its end, then lower    |r A| if it still has a gradient    P / (P + N), in [0, 1]

pi = exp(behaviour_logp). The sums for all pairs are computed in one pass and added over micro-batches and learners
before the search, so all learners get equal bounds. Bounds are first + step * count, rounded, never accumulated steps.

Differences from the paper:
1. In `paper` and `released`, raising the lower bound *adds* to N: a token held at the bound counts with the bound,
   more than r, although it has lost its gradient. That half of the search therefore runs to its end.
2. `active`, the default, counts only tokens that still have a gradient; its search does what the paper describes.

Source: Xi et al. 2025 (BAPO), arXiv 2510.18927 eq. 8 and algorithm 1, and its released code.
"""

from __future__ import annotations

import torch

from rllib_srl.losses.settings import LossSettings

BAPO_MODES = ("active", "paper", "released")
LOW, HIGH = (0.6, 0.9, 0.02), (1.2, 3.0, 0.05)  # search range of each bound: first, last, step; as published
TARGET = 0.4  # least share of tokens with a positive advantage, by the measure of the mode
Path = list[tuple[float, float]]


def path_of(settings: LossSettings) -> Path:
    """Return the pairs (low, high) in search order; at most as many as the steps of both bounds, plus one."""
    lows, highs = _grid(LOW), _grid(HIGH)
    if settings.bapo_mode == "released":
        return [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]
    return [(lows[0], high) for high in highs] + [(low, highs[-1]) for low in lows[1:]]


def _grid(bound: tuple[float, float, float]) -> list[float]:
    first, last, step = bound
    # Rounded: in floating point 1.2 + 4 * 0.05 exceeds 1.4.
    return [round(first + step * count, 10) for count in range(int((last - first) / step + 1e-9) + 1)]


def masses(
    settings: LossSettings, ratio_N: torch.Tensor, advantage_N: torch.Tensor, behaviour_logp_N: torch.Tensor
) -> torch.Tensor:
    """Return P and N over these tokens for each of the K pairs of the path, float64 [K, 2].

    Args:
        settings: loss settings.
        ratio_N: ratio of policy to anchor, without gradient.
        advantage_N: advantage of each token.
        behaviour_logp_N: log-probs reported by the engine, nats.
    """
    ratio_N, advantage_N = ratio_N.double(), advantage_N.double()
    pi_N = behaviour_logp_N.double().exp() if settings.bapo_mode == "paper" else torch.ones_like(ratio_N)
    rows = []
    for low, high in path_of(settings):
        free_N, held_N = ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N
        counted_N = pi_N * torch.minimum(free_N, held_N).abs()
        if settings.bapo_mode == "active":
            counted_N = torch.where(held_N < free_N, 0.0, free_N.abs())
        rows.append(torch.stack([counted_N[advantage_N > 0].sum(), counted_N[advantage_N < 0].sum()]))
    return torch.stack(rows)


def bounds_of(settings: LossSettings, masses_K2: torch.Tensor) -> tuple[tuple[float, float], int]:
    """Return the bounds (low, high) of this step and the number of pairs skipped before them.

    Args:
        settings: loss settings.
        masses_K2: output of `masses`, summed over the whole batch.
    """
    path = path_of(settings)
    for k, (positive, negative) in enumerate(masses_K2.tolist()):
        against = {"paper": abs(positive - negative), "released": negative, "active": positive + negative}
        if positive >= TARGET * against[settings.bapo_mode] and positive > 0:
            return path[k], k
    return path[-1], len(path) - 1
