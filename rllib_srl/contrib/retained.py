"""What retention is compared with: other terms on the same stored answers, and other targets for the same prompts.

    config.replay(retain=c).learners(learner_class=CrossEntropy)

    CrossEntropy    - log q of the answer's tokens: fine-tuning on the policy's own right answers
    Importance      - min(q / p, 1 + clip_high): they are trained on again, off-policy, with the advantage 1
    FromStart       the targets are those of the starting model, which is held beside the policy
    AsActed         the targets are the log-probs that the engine recorded; needs retain_top_k=0

p is the stored policy, q the policy in training. Draw, gate, weight and number of trained tokens are those of
`replay_retain`; its metrics are still those of the KL.

Sources: On-Policy Replay (fine-tuning on own right answers), arXiv 2605.29495; DPH-RL (forward KL to the initial
policy), arXiv 2509.07430; CLEAR (the policy as it acted), arXiv 1811.11682.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.engine.adapters import has_adapters
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.learner.model_setup import adapters_off
from rllib_srl.learner.retention import StoredAnswers
from rllib_srl.learner.scoring import autocast, load_causal_lm, token_logps

Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CrossEntropy(GRPOTorchLearner):
    """Trains on held answers by cross-entropy."""

    def stored_answers(self) -> type[StoredAnswers]:
        """Return answers whose loss is - log q."""

        class Answers(StoredAnswers):
            def token_loss(self, kl_N: torch.Tensor, logp_N: torch.Tensor, stored_N: torch.Tensor) -> torch.Tensor:
                return -logp_N

        return Answers


class Importance(GRPOTorchLearner):
    """Trains on held answers again, off-policy."""

    def stored_answers(self) -> type[StoredAnswers]:
        """Return answers whose loss is PPO's for the advantage 1."""
        most = 1 + self.config.loss_settings().clip_high

        class Answers(StoredAnswers):
            def token_loss(self, kl_N: torch.Tensor, logp_N: torch.Tensor, stored_N: torch.Tensor) -> torch.Tensor:
                return -(logp_N - stored_N).exp().clamp(max=most)

        return Answers


class FromStart(GRPOTorchLearner):
    """Holds answers at the starting model. Invariant: the starting model is that of the model's files."""

    def build(self) -> None:
        """Load the starting model beside the policy.

        Raises:
            ValueError: the weights are sharded.
        """
        if self.config.fsdp:
            raise ValueError("contrib.retained:FromStart with fsdp = True; expected False: it needs whole weights")
        super().build()
        policy = self.policy
        self._start = policy.model
        if not has_adapters(policy.model):
            self._start = load_causal_lm(policy.model_config["model"]).requires_grad_(False).to(self._device)

    def starting(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of the starting model."""
        context = autocast(self._device, self.config.compute_dtype)
        with torch.no_grad(), context, adapters_off(self._start):
            return token_logps(self._start, batch)

    def stored_answers(self) -> type[StoredAnswers]:
        """Return answers whose targets are computed by the starting model."""
        starting = self.starting

        class Answers(StoredAnswers):
            def stored(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Stored:
                return super().stored(batch, starting(batch))

        return Answers


class AsActed(GRPOTorchLearner):
    """Holds answers at the log-probs with which the engine sampled them."""

    def stored_answers(self) -> type[StoredAnswers]:
        """Return answers whose targets are the recorded log-probs.

        Raises:
            ValueError: log-probs of other tokens are asked for.
        """
        if top_k := self.config.replay_retain_top_k:
            raise ValueError(
                f"replay_retain_top_k = {top_k} with contrib.retained:AsActed; expected 0: the engine records the "
                "log-probs of sampled tokens alone"
            )

        class Answers(StoredAnswers):
            def stored(self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]) -> Stored:
                tokens, logp, _ = super().stored(batch, fwd_out)
                return tokens, logp, batch["behaviour_logp"][batch["top_at"]]

        return Answers
