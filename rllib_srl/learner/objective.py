"""Compute the loss of one micro-batch and the sums for its metrics.

    played    sum_N scale * (correction * surrogate + kl_coeff * kl - entropy_coeff * entropy)
    reused    sum_N scale * kept * (surrogate + kl_coeff * ratio * kl, if kl_on_reused)

`losses` provides surrogate and correction by name; `batch/shard.py` provides `scale`.

- Metrics stay sums until all micro-batches of all learners are added up (`statistics`), because the effective sample
  size is not a mean over micro-batches.
- A micro-batch holds whole episodes only, so per-episode masks are computed here.
- The reused loss is divided by all reused tokens, including those of left-out episodes, so the weight of each token is
  fixed before the update.
- A log-prob that is not finite makes the whole loss NaN, so that the step is skipped and counted. Masks and windows
  would otherwise turn it into a silent zero.

Source: Li et al. 2025 (RePO), arXiv 2506.09340 (separate loss for replayed groups, KL on played groups only).
"""

from __future__ import annotations

from typing import Any

import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.losses.kl import KL_ESTIMATORS, KL_LOSSES
from rllib_srl.losses.policy import CLIP_RULES, Surrogate, Tokens, correction_of, episode_mean, ratio_of
from rllib_srl.losses.settings import LossSettings

Sums = dict[str, Any]  # name -> number or scalar tensor; a sum over tokens or episodes
PLAYED_MEANS = (
    *("loss", "policy_loss", "kl", "entropy"),
    *("clip_fraction", "correction", "masked", "rollout_logp_abs_diff"),
)
PLAYED_COUNTS = ("num_tokens", "num_computed_tokens")
REUSED_MEANS = ("reuse/clip_fraction", "reuse/ratio")  # over tokens that are kept
REUSED_COUNTS = ("reuse/num_tokens", "reuse/num_computed_tokens", "reuse/num_episodes", "reuse/num_left_out")
OTHER_SUMS = ("reuse/loss", "reuse/drift", "reuse/kept", "reuse/weight", "reuse/squared_weight", "reuse/kl")
TOTALS = ("total_loss", "num_nonfinite_logps")
SUMS = (*PLAYED_MEANS, *PLAYED_COUNTS, *REUSED_MEANS, *REUSED_COUNTS, *OTHER_SUMS, *TOTALS)


def first_pass(batch: MicroBatch[torch.Tensor], logp_N: torch.Tensor, max_logp_gap: float | None) -> None:
    """Set the values that stay fixed for the whole update: `prox_logp` and, for a reused micro-batch, `is_kept` [N].

    Args:
        batch: as in `reused_loss`; changed in place.
        logp_N: log-probs under the weights at the start of the update, nats.
        max_logp_gap: an episode is left out if its mean |prox_logp - behaviour_logp| is above this, nats; None: any.

    Source of the bound: OER, arXiv 2305.13804; docs/memory.md names the differences.
    """
    batch["prox_logp"] = logp_N.detach()
    if batch["is_reused"]:
        drift_N = episode_drift(batch["prox_logp"], batch["behaviour_logp"], batch["episode"])
        # A NaN drift is kept: it makes the gradient NaN too, so the step is skipped and counted.
        batch["is_kept"] = ~(drift_N > (float("inf") if max_logp_gap is None else max_logp_gap))


def episode_drift(prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean |prox_logp - behaviour_logp| over the tokens of its episode, which is whole."""
    return episode_mean((prox_logp_N - behaviour_logp_N).abs(), episode_N)


def surrogate_of(
    batch: MicroBatch[torch.Tensor], logp_N: torch.Tensor, anchor_logp_N: torch.Tensor, settings: LossSettings
) -> Surrogate:
    """Return the loss of each token and its gradient weight (the factor of -A grad(logp)), before any mask.

    `anchor_logp_N` are the log-probs in the denominator of the ratio.
    """
    ratio_N = ratio_of(settings.ratio_level, logp_N, anchor_logp_N, batch["episode"])
    tokens = Tokens(ratio_N, batch["advantage"], logp_N)

    def check(result: Any) -> str:
        is_pair = isinstance(result, tuple) and len(result) == 2
        is_usable = is_pair and all(getattr(tensor, "shape", None) == ratio_N.shape for tensor in result)
        return "" if is_usable else f"expected (loss_N, weight_N), two tensors of shape {tuple(ratio_N.shape)}"

    surrogate: Surrogate = CLIP_RULES.call(settings.clip_rule, tokens, settings, check=check)
    return surrogate


def _nonfinite(batch: MicroBatch[torch.Tensor], logp_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of tokens with a non-finite log-prob, and the term to add to the loss: 0 or NaN.

    The term depends on `logp_N` so that the gradient is NaN too: a clamp or window would give a gradient of 0.
    """
    is_bad_N = ~torch.isfinite(logp_N.detach())
    for other_logp_N in (batch.get("prox_logp"), batch.get("behaviour_logp"), batch.get("ref_logp")):
        if other_logp_N is not None:
            is_bad_N |= ~torch.isfinite(other_logp_N)
    return is_bad_N.sum(), torch.where(is_bad_N.any(), float("nan"), 0.0) * logp_N.sum()


def played_loss(
    batch: MicroBatch[torch.Tensor], fwd_out: dict[str, torch.Tensor], settings: LossSettings
) -> tuple[torch.Tensor, Sums]:
    """Return the loss and the sums of a micro-batch of episodes played in this iteration.

    Args:
        batch: `advantage`, `scale`, `behaviour_logp`, `prox_logp`, `episode` [N], for a KL also `ref_logp` [N];
            `token_ids`.
        fwd_out: `logp` [N] with gradient, `entropy` [N] (with gradient if `entropy_coeff` is set).
        settings: loss settings.
    """
    logp_N, prox_logp_N, behaviour_logp_N = fwd_out["logp"], batch["prox_logp"], batch["behaviour_logp"]
    correction_N = correction_of(settings, prox_logp_N, behaviour_logp_N, batch["episode"])
    anchor_logp_N = behaviour_logp_N if settings.ratio_anchor == "bypass" else prox_logp_N
    surrogate_N, weight_N = surrogate_of(batch, logp_N, anchor_logp_N, settings)
    policy_loss_N = loss_N = correction_N * surrogate_N
    kl_N = torch.zeros_like(prox_logp_N)
    if settings.kl_coeff:
        kl_N = KL_ESTIMATORS[settings.kl_estimator](logp_N, batch["ref_logp"])
        if not settings.kl_in_reward:
            loss_N = loss_N + settings.kl_coeff * kl_N
    if settings.entropy_coeff:
        loss_N = loss_N - settings.entropy_coeff * fwd_out["entropy"]
    num_bad, nan_term = _nonfinite(batch, logp_N)
    loss = (batch["scale"] * loss_N).sum() + nan_term
    return loss, {
        "total_loss": loss.detach(),
        "loss": loss_N.detach().sum(),
        "policy_loss": policy_loss_N.detach().sum(),
        "kl": kl_N.detach().sum(),
        "entropy": fwd_out["entropy"].detach().sum(),
        "clip_fraction": (weight_N == 0).sum(),
        "correction": correction_N.sum(),
        "masked": (correction_N == 0).sum(),
        "rollout_logp_abs_diff": (prox_logp_N - behaviour_logp_N).abs().sum(),
        "num_tokens": len(prox_logp_N),
        "num_computed_tokens": batch["token_ids"].numel(),
        "num_nonfinite_logps": num_bad,
    }


def reused_loss(
    batch: MicroBatch[torch.Tensor], fwd_out: dict[str, torch.Tensor], settings: LossSettings
) -> tuple[torch.Tensor, Sums]:
    """Return the loss and the sums of a micro-batch of stored episodes.

    The KL term is present only if `kl_on_reused` is "weighted". The estimators assume tokens of the policy in training,
    so each term is weighted by exp(logp - behaviour_logp), without gradient.

    Args:
        batch: `advantage`, `scale`, `behaviour_logp`, `prox_logp`, `is_kept`, `episode` [N], for a KL also `ref_logp`
            [N]; `token_ids`.
        fwd_out: `logp` [N] with gradient.
        settings: loss settings.
    """
    logp_N, behaviour_logp_N = fwd_out["logp"], batch["behaviour_logp"]
    is_kept_N = batch["is_kept"]
    surrogate_N, weight_N = surrogate_of(batch, logp_N, behaviour_logp_N, settings)
    loss_N = torch.where(is_kept_N, surrogate_N, 0.0)
    ratio_N = ratio_of("token", logp_N.detach(), behaviour_logp_N, batch["episode"])
    kl_N = torch.zeros_like(behaviour_logp_N)
    if settings.kl_coeff and settings.kl_on_reused == "weighted":
        kl_N = torch.where(is_kept_N, ratio_N * KL_LOSSES[settings.kl_estimator](logp_N, batch["ref_logp"]), 0.0)
        loss_N = loss_N + settings.kl_coeff * kl_N
    num_bad, nan_term = _nonfinite(batch, logp_N)
    loss = (batch["scale"] * loss_N).sum() + nan_term
    # Factor of -A * grad(logp) of each token; 0 where clip or mask removed its gradient.
    weight_N = torch.where(is_kept_N, weight_N, 0.0)
    return loss, {
        "total_loss": loss.detach(),
        "reuse/loss": loss_N.detach().sum(),
        "reuse/clip_fraction": ((weight_N == 0) & is_kept_N).sum(),
        "reuse/ratio": torch.where(is_kept_N, ratio_N, 0.0).sum(),
        "reuse/kl": kl_N.detach().sum(),
        "reuse/kept": is_kept_N.sum(),
        "reuse/weight": weight_N.double().sum(),
        "reuse/squared_weight": weight_N.double().square().sum(),
        "reuse/drift": (batch["prox_logp"] - behaviour_logp_N).abs().sum(),
        "reuse/num_tokens": len(logp_N),
        "reuse/num_computed_tokens": batch["token_ids"].numel(),
        "reuse/num_episodes": len(torch.unique(batch["episode"])),
        "reuse/num_left_out": len(torch.unique(batch["episode"][~is_kept_N])),
        "num_nonfinite_logps": num_bad,
    }


def statistics(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a whole batch; a side (played or reused) without tokens gets 0 everywhere.

    Reused side, over all its tokens: `loss` (mean), `drift` (mean |prox_logp - behaviour_logp|, nats). Over its kept
    tokens: `clip_fraction` (share without gradient), `ratio` (mean exp(logp - behaviour_logp)) and
    `ess` = (sum w)^2 / (N sum w^2) in (0, 1], where w is the factor of -A grad(logp). `left_out` is the share of its
    episodes that are left out.

    Args:
        sums: one number for each of `SUMS`, summed over all micro-batches of all learners.
    """
    denominators = ("num_tokens", "reuse/num_tokens", "reuse/kept")
    num_played, num_reused, num_kept = (max(1.0, sums[name]) for name in denominators)
    squares = num_kept * sums["reuse/squared_weight"]
    return {
        **{name: sums[name] / num_played for name in PLAYED_MEANS},
        **{name: sums[name] for name in (*PLAYED_COUNTS, *REUSED_COUNTS, "total_loss", "num_nonfinite_logps")},
        **{name: sums[name] / num_kept for name in REUSED_MEANS},
        "reuse/loss": sums["reuse/loss"] / num_reused,
        "reuse/kl": sums["reuse/kl"] / num_reused,
        "reuse/drift": sums["reuse/drift"] / num_reused,
        "reuse/ess": sums["reuse/weight"] ** 2 / squares if squares > 0 else 0.0,
        "reuse/left_out": sums["reuse/num_left_out"] / max(1.0, sums["reuse/num_episodes"]),
    }
