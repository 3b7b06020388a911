"""The policy at the end of the last stage, frozen: its log-probs of revisited prompts (LwF).

Its weights are a copy of the trained ones, put in their place for a forward pass without gradient. Unlike
`FrozenPolicy`, which is loaded from files, it needs no second model and works with LoRA: only adapters are
copied then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch
from rllib_srl.learner.regularisers.rule import COEFF, Named, Range, Regulariser, Term, Training, bounded
from rllib_srl.learner.regularisers.weights import as_arrays, as_tensors, stage_errors
from rllib_srl.losses.kl import KL_LOSSES
from rllib_srl.types import Group

REVISIT = "revisit"  # origin of a played group that the memory brought back


@dataclass
class LwF(Regulariser):
    """KL to the policy at the end of the last stage, on revisited prompts of domains whose stage has ended.

    Invariant: it has no weights until the first stage has ended.
    """

    coeff: float = bounded(0.1, COEFF)
    estimator: str = bounded(
        "k3_k2", Range(lambda x: x in tuple(KL_LOSSES), f"one of {', '.join(map(repr, KL_LOSSES))}")
    )

    needs_stages = True
    num_copies = 1

    def errors(self, name: str, config: Any) -> Iterator[str]:
        """Yield errors: it needs stages, whole weights and revisits."""
        yield from stage_errors(name, config, "a complete second copy of the weights")
        if not config.may_draw("revisit"):
            yield f"{name} with replay_revisit_fraction = 0; expected above 0: it acts on revisited prompts"

    def start(self, training: Training) -> None:
        super().start(training)
        self._weights: dict[str, torch.Tensor] = {}
        self._domains: set[str] = set()
        self._is_old_B = np.zeros(0, bool)

    def begin(self, groups: Sequence[Group], origins: Sequence[str]) -> None:
        flags = [
            origin == REVISIT and group.prompt.domain in self._domains
            for group, origin in zip(groups, origins, strict=True)
        ]
        self._is_old_B = np.repeat(np.array(flags, bool), [group.size for group in groups])

    def prepare(self, batch: MicroBatch[torch.Tensor], is_reused: bool) -> None:
        """Add `is_old` [N] and the frozen policy's log-probs, `stage_logp` [N], to a micro-batch with such episodes."""
        if is_reused:
            return
        is_old_N = torch.from_numpy(self._is_old_B).to(self.training.device)[batch["episode"]]
        if bool(is_old_N.any()):
            batch["is_old"] = is_old_N
            with torch.no_grad(), _in_place(self.training.parameters, self._weights):
                batch["stage_logp"] = self.training.scorer.forward(batch)["logp"]

    def loss(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Term | None:
        """Return coeff times the sum of scale * KL over the tokens of such episodes."""
        if "stage_logp" not in batch:
            return None
        kl_N = torch.where(batch["is_old"], KL_LOSSES[self.estimator](fwd_out["logp"], batch["stage_logp"]), 0.0)
        return Term(self.coeff * (batch["scale"] * kl_N).sum(), kl_N.detach().sum(), batch["is_old"].sum())

    def end_stage(
        self, domains: Collection[str], episodes: Sequence[Episode], temperature: float, shares: bool
    ) -> int:
        """Freeze the present weights, and include these domains from now on."""
        parameters = self.training.parameters
        self._weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self._domains.update(domains)
        return 0

    def get_state(self) -> dict[str, Any]:
        return {"weights": as_arrays(self._weights), "domains": sorted(self._domains)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._weights, self._domains = as_tensors(state["weights"], self.training.device), set(state["domains"])


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
