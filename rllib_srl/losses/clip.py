"""Clip rules: compute the loss and the gradient weight of each token from its ratio and advantage.

    rule         loss                                                    bounds
    symmetric    -min(r A, clip(r) A)                                    1 -+ clip_low
    higher       the same                                                1 - clip_low, 1 + clip_high
    dual         higher, and with A < 0 at most -dual_clip A
    two_sided    higher of min(r, clip_delta)
    cispo        -sg(clip(r)) A logp                                     cispo_bounds (absolute)
    sapo         -4/t sigmoid(t (r - 1)) A                               soft; t = TAUS by the sign of A
    none         -r A

The gradient weight is the factor of -A grad(logp); it is 0 where the rule removes the gradient. sg = stop gradient.
To add a rule, register a function, `CLIP_RULES["mine"] = rule`, or name its import path, `clip_rule="module:rule"`.

Sources: Schulman et al. 2017, arXiv 1707.06347 eq. 7 (symmetric);
Yu et al. 2025 (DAPO), arXiv 2503.14476 section 3.1 (higher);
Ye et al. 2020, arXiv 1912.09729 eq. 4 (dual);
Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291 section 3.4 (two_sided);
MiniMax 2025 (CISPO), arXiv 2506.13585 section 3.1; Khatri et al. 2025 (ScaleRL), arXiv 2510.13786 (bound 5);
Gao et al. 2025 (SAPO), arXiv 2511.20347.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from rllib_srl.common.rules import Rules
from rllib_srl.losses.settings import LossSettings

TAUS = (1.0, 1.05)  # of sapo, as published: for A > 0 and for A < 0


@dataclass(frozen=True)
class Tokens:
    """Inputs of a clip rule for N tokens. Invariant: `ratio_N` and `logp_N` carry the gradient."""

    ratio_N: torch.Tensor
    advantage_N: torch.Tensor
    logp_N: torch.Tensor


Surrogate = tuple[torch.Tensor, torch.Tensor]  # loss_N with gradient, weight_N without


def _held(ratio_N: torch.Tensor, advantage_N: torch.Tensor, low: float, high: float) -> Surrogate:
    free_N, held_N = ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N
    return -torch.minimum(free_N, held_N), torch.where(held_N < free_N, 0.0, ratio_N).detach()


def _symmetric(tokens: Tokens, settings: LossSettings) -> Surrogate:
    return _held(tokens.ratio_N, tokens.advantage_N, 1 - settings.clip_low, 1 + settings.clip_low)


def _higher(tokens: Tokens, settings: LossSettings) -> Surrogate:
    return _held(tokens.ratio_N, tokens.advantage_N, 1 - settings.clip_low, 1 + settings.clip_high)


def _dual(tokens: Tokens, settings: LossSettings) -> Surrogate:
    loss_N, weight_N = _higher(tokens, settings)
    most_N = -settings.dual_clip * tokens.advantage_N
    is_over_N = (tokens.advantage_N < 0) & (loss_N > most_N)
    return torch.where(is_over_N, most_N, loss_N), torch.where(is_over_N, 0.0, weight_N)


def _two_sided(tokens: Tokens, settings: LossSettings) -> Surrogate:
    is_over_N = tokens.ratio_N.detach() > settings.clip_delta
    ratio_N = tokens.ratio_N.clamp(max=settings.clip_delta)
    loss_N, weight_N = _held(ratio_N, tokens.advantage_N, 1 - settings.clip_low, 1 + settings.clip_high)
    return loss_N, torch.where(is_over_N, 0.0, weight_N)


def _cispo(tokens: Tokens, settings: LossSettings) -> Surrogate:
    weight_N = tokens.ratio_N.detach().clamp(*settings.cispo_bounds)
    return -weight_N * tokens.advantage_N * tokens.logp_N, weight_N


def _sapo(tokens: Tokens, settings: LossSettings) -> Surrogate:
    tau_N = torch.where(tokens.advantage_N > 0, *TAUS)
    gate_N = torch.sigmoid(tau_N * (tokens.ratio_N - 1))
    return -4 / tau_N * gate_N * tokens.advantage_N, (4 * gate_N * (1 - gate_N) * tokens.ratio_N).detach()


def _none(tokens: Tokens, settings: LossSettings) -> Surrogate:
    return -tokens.ratio_N * tokens.advantage_N, tokens.ratio_N.detach()


CLIP_RULES: Rules[Callable[[Tokens, LossSettings], Surrogate]] = Rules(
    "clip_rule",
    {
        "symmetric": _symmetric,
        "higher": _higher,
        "dual": _dual,
        "two_sided": _two_sided,
        "cispo": _cispo,
        "sapo": _sapo,
        "none": _none,
    },
    inputs=f"Tokens has {', '.join(field.name for field in fields(Tokens))}",
)
