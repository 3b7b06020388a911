"""Compute off-policy corrections, the importance weights of tokens that another policy wrote: torch, without gradient.

    rho_t = exp(prox_logp_t - behaviour_logp_t); for an episode R = prod_t rho_t and M = geometric mean of rho_t

    played           weight of a token
    none             1
    tis              min(rho_t, tis_clip_max)
    sequence_tis     min(R, tis_clip_max)
    mis              rho_t where it lies in correction_window, else 0            (IcePop: window [0.5, 5])
    sequence_mask    R where it lies in correction_window, else 0
    geometric_mask   as tis where M lies in sequence_window, else 0
    mis_po           1 where rho_t lies in correction_window and M in sequence_window, else 0

    reused           anchor of the ratio       weight
    clip             behaviour_logp            1
    truncate         prox_logp                 min(rho_t, upper end of the window)
    mask             prox_logp                 rho_t inside the window, else 0

prox = the learner at the start of the update, behaviour = the engine that wrote the token.
To add a correction, register a function, `CORRECTIONS["mine"] = rule`, or name its import path,
`rollout_is_correction="module:rule"`.

Sources: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (tis);
Ling Team 2025 (IcePop), arXiv 2510.18855 (mis); TRL's `vllm_importance_sampling_mode` (sequence_mask);
OpenRLHF's seq-mask-tis (geometric_mask); StepFun 2026 (Step 3.5 Flash), arXiv 2602.10604 (mis_po);
Fu et al. 2025 (AReaL), arXiv 2505.24298 section 5.2 (decoupled objective);
Li et al. 2025 (RePO), arXiv 2506.09340 (clip around stored log-probs);
DeepSeek-AI 2025 (V3.2), arXiv 2512.02556 section 3.1 (off-policy sequence mask).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rllib_srl.common.rules import Rules
from rllib_srl.losses.episodes import episode_mean, inside
from rllib_srl.losses.ratio import MAX_LOG_RATIO, ratio_of
from rllib_srl.losses.settings import LossSettings


def importance_correction(prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, truncation: float) -> torch.Tensor:
    """Return min(exp(prox_logp - behaviour_logp), truncation), without gradient.

    Args:
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: log-probs reported by the engine, nats.
        truncation: upper bound, > 0; infinity means none.
    """
    log_ratio_N = (prox_logp_N - behaviour_logp_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_N.exp().clamp(max=truncation)


Ratio = Callable[[str], torch.Tensor]  # level -> rho_N


def _where(is_inside_N: torch.Tensor, weight_N: torch.Tensor) -> torch.Tensor:
    return torch.where(is_inside_N, weight_N, 0.0)


def _mis(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    return _where(inside(rho("token"), settings.correction_window), rho("token"))


def _sequence_mask(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    return _where(inside(rho("sequence"), settings.correction_window), rho("sequence"))


def _geometric_mask(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    return _where(inside(rho("geometric"), settings.sequence_window), rho("token").clamp(max=settings.truncation))


def _mis_po(rho: Ratio, settings: LossSettings) -> torch.Tensor:
    is_kept_N = inside(rho("token"), settings.correction_window)
    return (is_kept_N & inside(rho("geometric"), settings.sequence_window)).float()


CORRECTIONS: Rules[Callable[[Ratio, LossSettings], torch.Tensor]] = Rules(
    "rollout_is_correction",
    {
        "none": lambda rho, settings: torch.ones_like(rho("token")),
        "tis": lambda rho, settings: rho("token").clamp(max=settings.truncation),
        "sequence_tis": lambda rho, settings: rho("sequence").clamp(max=settings.truncation),
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
    weight_N: torch.Tensor = CORRECTIONS.call(
        settings.correction, lambda level: ratio_of(level, prox_logp_N, behaviour_logp_N, episode_N), settings
    )
    return weight_N


# --- reused tokens --------------------------------------------------------------------------------------------

Anchored = tuple[torch.Tensor, torch.Tensor]  # anchor_logp_N, weight_N


def clip_around_behaviour(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> Anchored:
    """Return behaviour_logp as anchor and weight 1; only the clip limits the drift of a reused token.

    Args:
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: stored log-probs of the engine that wrote the tokens, nats.
        window: not used.

    Source: Li et al. 2025 (RePO), arXiv 2506.09340.
    """
    return behaviour_logp_N, torch.ones_like(prox_logp_N)


def truncated_weight(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> Anchored:
    """Return prox_logp as anchor and weight min(exp(prox_logp - behaviour_logp), window[1]), without gradient.

    Arguments as for `clip_around_behaviour`, but `window` is used.

    Source: Fu et al. 2025 (AReaL), arXiv 2505.24298 section 5.2.
    """
    return prox_logp_N, importance_correction(prox_logp_N, behaviour_logp_N, window[1])


def masked_weight(
    prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, window: tuple[float, float]
) -> Anchored:
    """Return prox_logp as anchor and weight exp(prox_logp - behaviour_logp), 0 outside the window, without gradient.

    Arguments as for `clip_around_behaviour`; `window` is closed: it includes both ends.

    Source: Ling Team 2025 (IcePop), arXiv 2510.18855.
    """
    rho_N = importance_correction(prox_logp_N, behaviour_logp_N, float("inf"))
    return prox_logp_N, _where(inside(rho_N, window), rho_N)


REUSE_CORRECTIONS: dict[str, Callable[..., Anchored]] = {
    "clip": clip_around_behaviour,
    "truncate": truncated_weight,
    "mask": masked_weight,
}


# --- whole episodes -------------------------------------------------------------------------------------------


def is_on_policy(
    threshold: float | None,
    logp_N: torch.Tensor,
    behaviour_logp_N: torch.Tensor,
    advantage_N: torch.Tensor,
    episode_N: torch.Tensor,
) -> torch.Tensor:
    """Return which tokens to keep, bool [N]; bad episodes that the policy has moved away from are masked.

        masked iff mean_t A_t < 0 and mean_t (behaviour_logp_t - logp_t) > threshold

    Args:
        threshold: nats per token, > 0; None keeps all.
        logp_N: log-probs under the policy in training, nats.
        behaviour_logp_N: log-probs reported by the engine, nats.
        advantage_N: advantage of each token.
        episode_N: episode of each token; episodes must be whole.

    Source: DeepSeek-AI 2025 (V3.2), arXiv 2512.02556 section 3.1.
    """
    if threshold is None:
        return torch.ones_like(logp_N, dtype=torch.bool)
    is_bad_N = episode_mean(advantage_N, episode_N) < 0
    return ~(is_bad_N & (episode_mean(behaviour_logp_N - logp_N, episode_N) > threshold))
