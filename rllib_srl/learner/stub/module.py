"""The module of the stub: one skill per domain in place of a language model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rllib_srl.engine.stub.law import NUM_SLOTS, canary_logps
from rllib_srl.learner.rl_module import CausalLMModule


class Skills(torch.nn.Module):
    """One number per slot, 0 at the start. Invariant: float32 on the CPU."""

    def __init__(self) -> None:
        """Set all skills to 0."""
        super().__init__()
        self.skills = torch.nn.Parameter(torch.zeros(NUM_SLOTS))


class StubModule(CausalLMModule):
    """Holds `Skills` in place of a model. Invariant: its state has the one array "model.skills"."""

    def setup(self) -> None:
        """Make the skills; no model is loaded."""
        self.model = Skills()


class SkillScorer:
    """Scores the canary, in place of `learner.scoring.Scorer`."""

    def __init__(self, model: Skills) -> None:
        """Set the skills."""
        self._model = model

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return what an engine with these skills scores."""
        return canary_logps(self._model.skills.detach().numpy(), sequences)
