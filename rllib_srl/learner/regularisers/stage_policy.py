"""The policy at the end of the last stage, frozen: its log-probs of revisited prompts (LwF).

Its weights are a copy of the trained ones, put in their place for a forward pass without gradient. Other than
`Reference`, which loads the starting model from files, it needs no second model and works with LoRA: only adapters are
copied then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.learner.regularisers.weights import Named, as_arrays, as_tensors
from rllib_srl.learner.scoring import Scorer
from rllib_srl.losses.kl import KL_LOSSES
from rllib_srl.types import Group

REVISIT = "revisit"  # origin of a played group that the memory brought back


class StagePolicy:
    """KL to the policy at the end of the last stage, on revisited prompts of domains whose stage has ended.

    Invariant: equal on all learners; without weights until the first stage has ended.
    """

    def __init__(self, coeff: float, estimator: str) -> None:
        """Set the coefficient and the estimator of the KL, a key of `KL_LOSSES`."""
        self._coeff, self._kl = coeff, KL_LOSSES[estimator]
        self._weights: dict[str, torch.Tensor] = {}
        self._domains: set[str] = set()

    def acts_on(self, groups: Sequence[Group], origins: Sequence[str]) -> np.ndarray:
        """Return for each episode of the groups whether the KL acts on it, bool [B]."""
        flags = [
            origin == REVISIT and group.prompt.domain in self._domains
            for group, origin in zip(groups, origins, strict=True)
        ]
        return np.repeat(np.array(flags, bool), [group.size for group in groups])

    def logp(self, parameters: Named, scorer: Scorer, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
        """Return the frozen policy's log-probs of the target tokens, [N], nats, without gradient."""
        with torch.no_grad(), _in_place(parameters, self._weights):
            return scorer.forward(batch)["logp"]

    def loss(
        self, batch: MicroBatch[torch.Tensor], logp_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the scaled loss of a micro-batch, the sum of the KL over its tokens (detached) and their number.

        Args:
            batch: `scale`, `stage_logp`, `is_old` [N].
            logp_N: log-probs under the policy in training, nats, with gradient.
        """
        kl_N = torch.where(batch["is_old"], self._kl(logp_N, batch["stage_logp"]), 0.0)
        return self._coeff * (batch["scale"] * kl_N).sum(), kl_N.detach().sum(), batch["is_old"].sum()

    def end_stage(self, parameters: Named, domains: Collection[str]) -> None:
        """Freeze the present weights, and act on these domains too from now on."""
        self._weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._domains.update(domains)

    def get_state(self) -> dict[str, Any]:
        """Return weights by name and domains."""
        return {"weights": as_arrays(self._weights), "domains": sorted(self._domains)}

    def set_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Load what `get_state` returned."""
        self._weights, self._domains = as_tensors(state["weights"], device), set(state["domains"])


@contextmanager
def _in_place(parameters: Named, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other weights in the place of the parameters inside the block, without a copy."""
    kept = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = kept[name]
