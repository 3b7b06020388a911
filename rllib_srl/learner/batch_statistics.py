"""Set BAPO's clip bounds, which need sums over the whole batch, before the gradient.

    for each micro-batch: log-probs without gradient ──> masses for every pair of bounds ──> all-reduce over learners
                                                    ──> the same batch["bapo_bounds"] everywhere

Cost: one more forward pass per step; skipped with other clip rules (`LossSettings.needs_batch_statistics`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.learner.gradients import summed
from rllib_srl.learner.objective import anchor_of
from rllib_srl.losses.bapo import bounds_of, masses
from rllib_srl.losses.ratio import ratio_of
from rllib_srl.losses.settings import LossSettings

Scored = Sequence[tuple[MicroBatch[torch.Tensor], torch.Tensor]]  # micro-batches and their log-probs


def set_batch_statistics(
    scored: Scored, settings: LossSettings, num_learners: int, device: torch.device
) -> dict[str, float]:
    """Set `bapo_bounds` on each micro-batch and return metrics by name; a collective.

    Args:
        scored: micro-batches after their first pass, with log-probs under the policy in training (nats, no gradient);
            a learner without micro-batches must call this too.
        settings: loss settings.
        num_learners: number of learners.
        device: device on which they communicate.
    """
    total_K2 = masses(settings, *(torch.zeros(0) for _ in range(3)))
    for batch, logp_N in scored:
        anchor_logp_N, _ = anchor_of(batch, settings)
        ratio_N = ratio_of(settings.ratio_level, logp_N, anchor_logp_N, batch["episode"])
        total_K2 = total_K2.to(ratio_N.device)
        total_K2 = total_K2 + masses(settings, ratio_N, batch["advantage"], batch["behaviour_logp"])
    bounds, num_steps = bounds_of(settings, summed([total_K2.to(device)], num_learners)[0].cpu())
    for batch, _ in scored:
        batch["bapo_bounds"] = bounds
    return {"bapo_low": bounds[0], "bapo_high": bounds[1], "bapo_steps": float(num_steps)}
