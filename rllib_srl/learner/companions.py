"""Learner mixin for the critic, the moving reference model and the whole-batch statistics.

    before the update    `_mark`         adds episode keys, and whether hidden states are needed, to a micro-batch
    first pass           `_take_values`  turns returns into token advantages (advantage "gae")
    before a gradient    `_look`         `survey`: BAPO's bounds, the covariance clip
    after a loss         `_add_value_loss`; with the optimiser step `_step_critic`
    between updates      `follow_policy` moves the reference

Each method does nothing if the loss settings do not need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.learner.batch_statistics import gathered, looked_at, survey
from rllib_srl.learner.critic import Critic, first_values
from rllib_srl.learner.gradients import norm, summed
from rllib_srl.learner.reference import follow, set_weights, weights_of
from rllib_srl.losses.covariance import key_of_episode
from rllib_srl.types import Group

COMPANIONS = "companions"  # key of critic and reference in the learner's state


class Companions:
    """Critic and reference model of a learner (mixin). Invariant: both are equal on all learners."""

    config: Any
    model: Any
    module: Any
    _device: torch.device
    _reference: torch.nn.Module | None
    _critic: Critic | None = None
    _episode_keys: Sequence[int] = ()

    def _build_critic(self) -> None:
        settings = self.config.loss_settings()
        if settings.use_critic:
            self._critic = Critic(int(self.model.config.hidden_size), settings.critic_lr, self._device)

    def _name_episodes(self, groups: Sequence[Group]) -> None:
        if self.config.loss_settings().cov_clip_ratio:
            self._episode_keys = [key_of_episode(group.group_id, g) for group in groups for g in range(group.size)]

    def _mark(self, batch: dict[str, Any]) -> None:
        batch["episode_keys"] = self._episode_keys
        batch["with_embedding"] = batch["with_hidden"]
        batch["with_hidden"] = batch["with_hidden"] or self._critic is not None

    def _take_values(self, batch: dict[str, Any], fwd_out: dict[str, torch.Tensor]) -> None:
        settings = self.config.loss_settings()
        if settings.advantage == "gae":
            first_values(batch, fwd_out, self._critic, settings.gae_lambda)

    def _look(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Compute the whole-batch statistics and set them on the micro-batches; a collective."""
        settings = self.config.loss_settings()
        if not settings.needs_batch_statistics:
            return {}
        num_learners = self.config.num_learners
        return survey(
            looked_at(micro_batches, self._logp_without_gradient),
            settings,
            lambda total: summed([total.to(self._device)], num_learners)[0].cpu(),
            lambda own: gathered(own, num_learners, self._device).cpu(),
        )

    def _logp_without_gradient(self, one: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad(), self._autocast():  # type: ignore[attr-defined]
            fwd_out = self.module[DEFAULT_MODULE_ID](one)
        if "prox_logp" not in one:
            self._take_first_pass(one, fwd_out)  # type: ignore[attr-defined]
        return fwd_out["logp"]

    def _add_value_loss(self, loss: torch.Tensor, batch: dict[str, Any], fwd_out: dict[str, Any]) -> torch.Tensor:
        if self._critic is None:
            return loss
        value_loss, batch["stats"]["value_loss"] = self._critic.loss(batch, fwd_out)
        return loss + value_loss

    def _step_critic(self, is_finite: bool) -> None:
        """Step the value head only when the policy steps and its own gradient is finite; a collective."""
        if self._critic is None:
            return
        gradients = summed(self._critic.gradients(), self.config.num_learners)
        if is_finite and bool(torch.isfinite(norm(gradients))):
            self._critic.step(gradients)
        self._critic.forget()

    def follow_policy(self, rate: float) -> None:
        """Move the reference towards the policy; see `reference.follow`."""
        if self._reference is not None:
            follow(self._reference, self.model, rate)

    def _companions_state(self) -> dict[str, Any]:
        """Return the state of the value head and of a moving reference; "base" is reloaded from the model's files."""
        state: dict[str, Any] = {}
        if self._critic is not None:
            state["critic"] = self._critic.get_state()
        if self._reference is not None and self.config.loss_settings().kl_reference != "base":
            state["reference"] = weights_of(self._reference)
        return {COMPANIONS: state} if state else {}

    def _set_companions(self, state: Mapping[str, Any]) -> None:
        own = state.get(COMPANIONS, {})
        if "critic" in own and self._critic is not None:
            self._critic.set_state(own["critic"])
        if "reference" in own and self._reference is not None:
            set_weights(self._reference, own["reference"])
