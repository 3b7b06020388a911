"""Compute the policy loss of tokens, in fp32 log space: ratio levels, clip rules, off-policy corrections.

    d_t = logp_t - anchor_logp_t                                value at token t          factor of grad(logp_t)
    token         ratio of the token                            exp(d_t)                  exp(d_t)
    sequence      product over the episode's tokens             exp(sum_t d_t)            the same
    geometric     geometric mean over the episode's tokens      exp(mean_t d_t)           the same

With "sequence" and "geometric" each token carries the episode's ratio with the gradient of its own log-prob only. The
mean over the tokens then has the gradient of the geometric ratio, and the sum that of the product.

    clip rule    loss                                                    bounds
    symmetric    -min(r A, clip(r) A)                                    1 -+ clip_low
    higher       the same                                                1 - clip_low, 1 + clip_high
    dual         higher, and with A < 0 at most -dual_clip A
    two_sided    higher of min(r, clip_delta)
    cispo        -sg(clip(r)) A logp                                     cispo_bounds (absolute)
    sapo         -4/t sigmoid(t (r - 1)) A                               soft; t = TAUS by the sign of A
    none         -r A

A rule also gives the gradient weight, the factor of -A grad(logp); it is 0 where the rule removes the gradient. sg =
stop gradient.

A correction is the importance weight of a token that another policy wrote, without gradient:
rho_t = exp(prox_logp_t - behaviour_logp_t); for an episode R = prod_t rho_t and M = geometric mean of rho_t

    played           weight of a token
    none             1
    tis              min(rho_t, tis_clip_max)
    sequence_tis     min(R, tis_clip_max)
    mis              rho_t where it lies in correction_window, else 0            (IcePop: window [0.5, 5])
    sequence_mask    R where it lies in correction_window, else 0
    geometric_mask   as tis where M lies in sequence_window, else 0
    mis_po           1 where rho_t lies in correction_window and M in sequence_window, else 0

    reused           the ratio is taken to behaviour_logp, and clipped there: no weight

prox = the learner at the start of the update, behaviour = the engine that wrote the token. A micro-batch holds whole
episodes only, so sums and means over an episode are exact.
To add a rule, register a function, `CLIP_RULES["mine"] = rule` or `CORRECTIONS["mine"] = rule`, or name its import
path, `clip_rule="module:rule"` or `correction="module:rule"`.

Sources: Schulman et al. 2017, arXiv 1707.06347 eq. 7 (symmetric);
Yu et al. 2025 (DAPO), arXiv 2503.14476 section 3.1 (higher); Ye et al. 2020, arXiv 1912.09729 eq. 4 (dual);
Prime Intellect 2025 (INTELLECT-2), arXiv 2505.07291 section 3.4 (two_sided);
MiniMax 2025 (CISPO), arXiv 2506.13585 section 3.1; Khatri et al. 2025 (ScaleRL), arXiv 2510.13786 (bound 5);
Gao et al. 2025 (SAPO), arXiv 2511.20347;
Zheng et al. 2025 (GSPO), arXiv 2507.18071 section 4 (geometric, and its token form GSPO-token);
Ahmadian et al. 2024 (RLOO), arXiv 2402.14740 section 2 (the whole answer as one action);
Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (tis);
Ling Team 2025 (IcePop), arXiv 2510.18855 (mis); TRL's `vllm_importance_sampling_mode` (sequence_mask);
OpenRLHF's seq-mask-tis (geometric_mask); StepFun 2026 (Step 3.5 Flash), arXiv 2602.10604 (mis_po);
Fu et al. 2025 (AReaL), arXiv 2505.24298 section 5.2 (decoupled objective);
Li et al. 2025 (RePO), arXiv 2506.09340 (clip around stored log-probs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from rllib_srl.common.rules import Rules
from rllib_srl.losses.settings import LossSettings

MAX_LOG_RATIO = 20.0  # exp stays finite in fp32; verl's bound
TAUS = (1.0, 1.05)  # temperatures of sapo, as published: for A > 0 and for A < 0


def episode_sum(value_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the sum over the tokens of its episode, without gradient."""
    value_N = value_N.detach()
    episode_B, at_N = torch.unique(episode_N, return_inverse=True)
    sum_B = torch.zeros(len(episode_B), dtype=value_N.dtype, device=value_N.device).index_add_(0, at_N, value_N)
    return sum_B[at_N]


def episode_mean(value_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean over the tokens of its episode, without gradient."""
    return episode_sum(value_N, episode_N) / episode_sum(torch.ones_like(value_N), episode_N)


def _sequence(difference_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    return episode_sum(difference_N, episode_N) + (difference_N - difference_N.detach())


def _geometric(difference_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    return episode_mean(difference_N, episode_N) + (difference_N - difference_N.detach())


RATIO_LEVELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": lambda difference_N, episode_N: difference_N,
    "sequence": _sequence,
    "geometric": _geometric,
}


def ratio_of(level: str, logp_N: torch.Tensor, anchor_logp_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return the ratio of each token [N], with gradient if `logp_N` has one.

    The log ratio is clamped to +-`MAX_LOG_RATIO`.

    Args:
        level: a key of `RATIO_LEVELS`.
        logp_N: log-probs under the policy in training, nats.
        anchor_logp_N: log-probs in the denominator, nats.
        episode_N: episode of each token; episodes must be whole.
    """
    log_ratio_N = RATIO_LEVELS[level](logp_N.float() - anchor_logp_N.float(), episode_N)
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# --- clip rules -----------------------------------------------------------------------------------


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


# --- corrections -----------------------------------------------------------------

Ratio = Callable[[str], torch.Tensor]  # level -> rho_N


def _within(value_N: torch.Tensor, window: tuple[float, float]) -> torch.Tensor:
    """Return which values lie in the closed window; NaN counts as inside.

    A masked NaN would get weight 0 and pass unnoticed. Kept, it makes the gradient NaN, so the step is skipped and
    counted.
    """
    return ~((value_N < window[0]) | (value_N > window[1]))


def _capped(rho_N: torch.Tensor, settings: LossSettings) -> torch.Tensor:
    return rho_N.clamp(max=settings.tis_clip_max)


def _mis(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    return torch.where(_within(rho("token"), settings.correction_window), rho("token"), 0.0)


def _sequence_mask(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    return torch.where(_within(rho("sequence"), settings.correction_window), rho("sequence"), 0.0)


def _geometric_mask(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    is_kept_N = _within(rho("geometric"), settings.sequence_window)
    return torch.where(is_kept_N, _capped(rho("token"), settings), 0.0)


def _mis_po(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    is_kept_N = _within(rho("token"), settings.correction_window)
    return (is_kept_N & _within(rho("geometric"), settings.sequence_window)).float()


CORRECTIONS: Rules[Callable[[Ratio, LossSettings], torch.Tensor]] = Rules(
    "correction",
    {
        "none": lambda rho, settings: torch.ones_like(rho("token")),
        "tis": lambda rho, settings: _capped(rho("token"), settings),
        "sequence_tis": lambda rho, settings: _capped(rho("sequence"), settings),
        "mis": _mis,
        "sequence_mask": _sequence_mask,
        "geometric_mask": _geometric_mask,
        "mis_po": _mis_po,
    },
)


def correction_of(
    settings: LossSettings, prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, episode_N: torch.Tensor
) -> torch.Tensor:
    """Return the weight of each played token, without gradient.

    Args:
        settings: loss settings; `correction` names the rule, see the module's table.
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: log-probs reported by the engine, nats.
        episode_N: episode of each token; episodes must be whole.
    """
    prox_logp_N = prox_logp_N.detach()

    def check(result: Any) -> str:
        is_usable = getattr(result, "shape", None) == prox_logp_N.shape
        return "" if is_usable else f"expected a tensor of shape {tuple(prox_logp_N.shape)}"

    def rho(level: str) -> torch.Tensor:
        return ratio_of(level, prox_logp_N, behaviour_logp_N, episode_N)

    weight_N: torch.Tensor = CORRECTIONS.call(settings.correction, rho, settings, check=check)
    return weight_N
