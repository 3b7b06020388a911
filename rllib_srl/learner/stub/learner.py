"""The Learner of the stub: sums the gains of the shard's domains and moves their skills by the law.

It is a learner of the ordinary group: weights travel, are verified, checkpointed and restored as those of a model. The
loss, the optimiser and the learning rate do not act; advantages, loss weights and reuse do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.shard import TrainingShard
from rllib_srl.engine.stub.law import Gains, Law
from rllib_srl.learner.diagnostics import GroupDiagnostics
from rllib_srl.learner.gradients import summed
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.learner.stub.module import SkillScorer


class StubLearner(GRPOTorchLearner):
    """Trains one `StubModule`. Invariant: after `update` all learners have equal skills."""

    def build(self) -> None:
        """Build module and weight sender."""
        self._gains = Gains()
        super().build()
        self._law = Law.of(self.config.flat())

    def _make_scorer(self) -> Any:
        return SkillScorer(self.model)

    def _shares_prefixes(self) -> bool:
        return False

    def _create_iterator_if_necessary(
        self, *, training_data: Any, num_epochs: int = 1, **kwargs: Any
    ) -> Iterable[TrainingShard]:
        """Sum the gains of the shard; each epoch is one `_update`."""
        shard: TrainingShard = training_data.batch
        self._gains.clear()
        groups = shard.groups()
        self._diagnostics = GroupDiagnostics(groups, self.config.replay_pass_reward)
        for group, advantages_G, scale in zip(groups, shard.advantages, shard.scales, strict=True):
            self._gains.add(group, advantages_G, scale)
        (gains,) = summed([torch.from_numpy(self._gains.gains_S)], self.config.num_learners)
        self._gains_S = gains.numpy()
        self._has_reused = shard.num_reused_tokens > 0
        return [shard] * num_epochs

    def _update(self, batch: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        skills = self.model.skills
        before_S = skills.detach().numpy()
        new_S = self._law.moved(before_S, self._gains_S)
        step = float(np.linalg.norm(new_S - before_S))
        skills.data.copy_(torch.from_numpy(new_S))
        self._log("stub/step_norm", step)
        self._log("stub/gain", float(self._gains_S.sum()))
        if self._has_reused:
            self._log("reuse/ess", 1.0)  # the planner reads it; stored answers do not age in the law
        self._log("num_nonfinite_gradients", 0.0 if np.isfinite(step) else 1.0)
        return {}, {DEFAULT_MODULE_ID: -float(self._gains_S.sum())}, {}

    def export(self, directory: str) -> None:
        """Refuse: there is no model.

        Raises:
            ValueError: always.
        """
        raise ValueError("engine = 'stub' has trained skills of a law, no model; there is nothing to export")
