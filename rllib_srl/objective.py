"""The tensors of one micro-batch -> its share of the loss and the sums its statistics are made of: torch in, torch out.

    played    sum_N scale * (correction * surrogate + kl_coeff * kl)      scale = 1 / num_tokens
    reused    sum_N scale * weight * kept * surrogate                     scale = reuse_coeff / num_reused_tokens

Statistics are kept as sums until all micro-batches of all learners are added up (`statistics`): the effective
sample size is not a mean of anything. An episode of a micro-batch is always whole, so it is judged here.
Dividing by all reused tokens, those of episodes left out too, keeps the weight of each token known beforehand.

Source: Li et al. 2025 (RePO), arXiv 2506.09340 (loss of replayed groups apart, KL on played ones alone).
"""

from __future__ import annotations

from typing import Any

import torch

from rllib_srl.losses import (
    KL_LOSSES,
    MAX_LOG_RATIO,
    REUSE_CORRECTIONS,
    clipped_policy_loss,
    importance_correction,
    k1,
)

Sums = dict[str, Any]  # name -> number or tensor of one; a sum over tokens or episodes
PLAYED_MEANS = ("loss", "policy_loss", "kl", "entropy", "clipped", "correction", "mismatch")
PLAYED_COUNTS = ("num_tokens", "num_computed_tokens")
REUSED_MEANS = ("reuse/clipped", "reuse/ratio")  # over tokens of episodes that are not left out
REUSED_COUNTS = ("reuse/num_tokens", "reuse/num_computed_tokens", "reuse/num_episodes", "reuse/num_left_out")
OTHER_SUMS = ("reuse/loss", "reuse/drift", "reuse/kept", "reuse/weight", "reuse/squared_weight", "total_loss")
SUMS = (*PLAYED_MEANS, *PLAYED_COUNTS, *REUSED_MEANS, *REUSED_COUNTS, *OTHER_SUMS)


def first_pass(batch: dict[str, Any], logp_N: torch.Tensor, max_drift: float | None) -> None:
    """Note what holds for the whole update: `prox_logp` and, of a reused micro-batch, `is_kept` of each token.

    Args:
        batch: as of `reused_loss`; changed in place.
        logp_N: log-probs under the weights at the start of the update, nats.
        max_drift: mean |prox_logp - behaviour_logp| of an episode, in nats, above which it is left out; None: never.
    """
    batch["prox_logp"] = logp_N.detach()
    if batch["is_reused"]:
        drift_N = episode_drift(batch["prox_logp"], batch["behaviour_logp"], batch["episode"])
        # A drift that is not a number stays in: the gradient then is none either, and the step is skipped and counted.
        batch["is_kept"] = ~(drift_N > (float("inf") if max_drift is None else max_drift))


def episode_drift(prox_logp_N: torch.Tensor, behaviour_logp_N: torch.Tensor, episode_N: torch.Tensor) -> torch.Tensor:
    """Return for each token the mean |prox_logp - behaviour_logp| over the tokens of its episode, nats.

    Args:
        prox_logp_N: log-probs under the learner at the start of the update, nats.
        behaviour_logp_N: log-probs under the engine that wrote the tokens, nats.
        episode_N: which episode a token belongs to; all tokens of an episode are here.
    """
    _, at_N, count_B = torch.unique(episode_N, return_inverse=True, return_counts=True)
    gap_N = (prox_logp_N - behaviour_logp_N).abs()
    sum_B = torch.zeros(len(count_B), dtype=gap_N.dtype, device=gap_N.device).index_add_(0, at_N, gap_N)
    return (sum_B / count_B)[at_N]


def played_loss(batch: dict[str, Any], fwd_out: dict[str, torch.Tensor], config: Any) -> tuple[torch.Tensor, Sums]:
    """Return the loss of a micro-batch of episodes played in this iteration, and its sums.

    Args:
        batch: `advantage`, `scale`, `behaviour_logp`, `prox_logp`, with a KL `ref_logp` [N]; `token_ids`.
        fwd_out: `logp` with gradient and `entropy` [N].
        config: the settings `is_truncation`, `clip_low`, `clip_high`, `kl_coeff`, `kl_estimator`.
    """
    logp_N, prox_logp_N = fwd_out["logp"], batch["prox_logp"]
    correction_N = torch.ones_like(prox_logp_N)
    if config.is_truncation is not None:
        correction_N = importance_correction(prox_logp_N, batch["behaviour_logp"], config.is_truncation)
    surrogate_N, is_clipped_N = clipped_policy_loss(
        logp_N, prox_logp_N, batch["advantage"], config.clip_low, config.clip_high
    )
    policy_loss_N = loss_N = correction_N * surrogate_N
    kl_N = torch.zeros_like(prox_logp_N)
    if config.kl_coeff:
        kl_N = {**KL_LOSSES, "k1": k1}[config.kl_estimator](logp_N, batch["ref_logp"])
        if config.kl_estimator in KL_LOSSES:
            loss_N = loss_N + config.kl_coeff * kl_N
    loss = (batch["scale"] * loss_N).sum()
    return loss, {
        "total_loss": loss.detach(),
        "loss": loss_N.detach().sum(),
        "policy_loss": policy_loss_N.detach().sum(),
        "kl": kl_N.detach().sum(),
        "entropy": fwd_out["entropy"].sum(),
        "clipped": is_clipped_N.sum(),
        "correction": correction_N.sum(),
        "mismatch": (prox_logp_N - batch["behaviour_logp"]).abs().sum(),
        "num_tokens": len(prox_logp_N),
        "num_computed_tokens": batch["token_ids"].numel(),
    }


def reused_loss(batch: dict[str, Any], fwd_out: dict[str, torch.Tensor], config: Any) -> tuple[torch.Tensor, Sums]:
    """Return the loss of a micro-batch of stored episodes, and its sums.

    There is no KL term: the estimators are those of tokens that the policy in training wrote.

    Args:
        batch: `advantage`, `scale`, `behaviour_logp`, `prox_logp`, `is_kept`, `episode` [N]; `token_ids`.
        fwd_out: `logp` with gradient [N].
        config: the settings `replay_reuse_correction`, `replay_mask_window`, `clip_low`, `clip_high`.
    """
    logp_N, behaviour_logp_N, is_kept_N = fwd_out["logp"], batch["behaviour_logp"], batch["is_kept"]
    correct = REUSE_CORRECTIONS[config.replay_reuse_correction]
    anchor_logp_N, correction_N = correct(batch["prox_logp"], behaviour_logp_N, config.replay_mask_window)
    surrogate_N, is_clipped_N = clipped_policy_loss(
        logp_N, anchor_logp_N, batch["advantage"], config.clip_low, config.clip_high
    )
    loss_N = torch.where(is_kept_N, correction_N * surrogate_N, 0.0)
    loss = (batch["scale"] * loss_N).sum()
    # What -A * grad(logp) of each token is multiplied by: 0 where clip or mask took its gradient away.
    weight_N = torch.where(is_kept_N & ~is_clipped_N, correction_N * _ratio(logp_N, anchor_logp_N), 0.0)
    return loss, {
        "total_loss": loss.detach(),
        "reuse/loss": loss_N.detach().sum(),
        "reuse/clipped": ((weight_N == 0) & is_kept_N).sum(),
        "reuse/ratio": torch.where(is_kept_N, _ratio(logp_N, behaviour_logp_N), 0.0).sum(),
        "reuse/kept": is_kept_N.sum(),
        "reuse/weight": weight_N.double().sum(),
        "reuse/squared_weight": weight_N.double().square().sum(),
        "reuse/drift": (batch["prox_logp"] - behaviour_logp_N).abs().sum(),
        "reuse/num_tokens": len(logp_N),
        "reuse/num_computed_tokens": batch["token_ids"].numel(),
        "reuse/num_episodes": len(torch.unique(batch["episode"])),
        "reuse/num_left_out": len(torch.unique(batch["episode"][~is_kept_N])),
    }


def _ratio(logp_N: torch.Tensor, anchor_logp_N: torch.Tensor) -> torch.Tensor:
    return (logp_N.detach() - anchor_logp_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def statistics(sums: dict[str, float]) -> dict[str, float]:
    """Return the statistics of a whole batch; of a side without tokens all are 0.

    Of the reused side: `loss` (token mean), `clipped` (share without gradient), `ratio` (mean exp(logp -
    behaviour_logp)) and `ess` = (sum w)^2 / (N sum w^2) in (0, 1], w being what -A grad(logp) is multiplied by, the
    last three over tokens of episodes that are not left out; `drift` (mean |prox_logp - behaviour_logp|, nats, over
    all); `left_out`, the share of its episodes.

    Args:
        sums: one number for each of `SUMS`, over all micro-batches of all learners.
    """
    denominators = ("num_tokens", "reuse/num_tokens", "reuse/kept")
    num_played, num_reused, num_kept = (max(1.0, sums[name]) for name in denominators)
    squares = num_kept * sums["reuse/squared_weight"]
    return {
        **{name: sums[name] / num_played for name in PLAYED_MEANS},
        **{name: sums[name] for name in (*PLAYED_COUNTS, *REUSED_COUNTS, "total_loss")},
        **{name: sums[name] / num_kept for name in REUSED_MEANS},
        "reuse/loss": sums["reuse/loss"] / num_reused,
        "reuse/drift": sums["reuse/drift"] / num_reused,
        "reuse/ess": sums["reuse/weight"] ** 2 / squares if squares > 0 else 0.0,
        "reuse/left_out": sums["reuse/num_left_out"] / max(1.0, sums["reuse/num_episodes"]),
    }
