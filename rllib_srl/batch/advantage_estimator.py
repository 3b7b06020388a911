"""Estimate advantages from the rewards of a batch and select the groups to train on.

    played groups   shaped rewards ── rule ──> advantages
    reused groups   their rewards  ── rule ──> advantages

With "posterior" the history has raw rewards and the group's other episodes have shaped ones; a group is trained on if
its largest advantage without the KL penalty reaches `min_surprise`. Reused groups are judged in the same way, by the
history of their prompts as the policy in training finds it, without themselves, and in units of the groups just played.

Pure NumPy on the driver, before any sharding. It uses metadata only, never tokens.

Source: Li et al. 2025 (RePO), arXiv 2506.09340 (separate advantages for played and reused groups).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.batch.estimators import group_relative, trains
from rllib_srl.batch.parts import part_meta, rewarded_part
from rllib_srl.batch.posterior import NO_HISTORY, Scale, posterior, scale_of, scaled, surprises
from rllib_srl.batch.shaping import overlong
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import GroupMeta, History

OVERLONG_SHARE = 0.2  # of longest_answer, over which the length penalty rises, as in DAPO


@dataclass(frozen=True)
class AdvantageBatch:
    """Groups to train on, with their advantages.

    Invariant: `advantages[i]` has one entry per episode of `groups[i]`. `played` has one array per played group, even
    if it is not trained on, with one entry per episode.
    """

    groups: list[GroupMeta]
    advantages: list[np.ndarray]
    played: list[np.ndarray]
    counts: Mapping[str, int]

    def without(self, left_out: Mapping[str, Collection[int]]) -> AdvantageBatch:
        """Return the batch without some episodes, given by group id; the others keep their advantages."""
        pairs = []
        for group, advantage_G in zip(self.groups, self.advantages, strict=True):
            gone = left_out.get(group.group_id, ()) if group.origin != "reuse" else ()
            stays = [g for g in range(len(advantage_G)) if g not in gone]
            if len(stays) == len(advantage_G):
                pairs.append((group, advantage_G))
            elif stays:
                pairs.append((part_meta(group, stays), advantage_G[stays]))
        return replace(self, groups=[group for group, _ in pairs], advantages=[a for _, a in pairs])


class AdvantageEstimator:
    """Advantage estimator of a run. Invariant: it has no state."""

    def __init__(self, settings: LossSettings, trains_all: bool = False) -> None:
        """Set the loss settings, and whether played groups without a signal are trained on, too."""
        self.settings, self._trains_all = settings, trains_all

    @property
    def uses_history(self) -> bool:
        """Return whether the baseline is that of `posterior.py`."""
        return bool(self.settings.advantage == "posterior")

    @property
    def min_episodes(self) -> int:
        """Return the least valid episodes of a group that can be trained on: 1 with a baseline from history or none."""
        has_baseline = self.uses_history and self.settings.prior_weight > 0
        return 1 if has_baseline or self.settings.advantage == "none" else 2

    def shaped_rewards(self, groups: Sequence[GroupMeta]) -> list[np.ndarray]:
        """Return the rewards of played groups plus the length penalty, float64 [G] per group."""
        settings = self.settings
        rewards = [group.rewards_G.astype(np.float64) for group in groups]
        if not settings.overlong_penalty:
            return rewards
        limits = (settings.longest_answer, OVERLONG_SHARE, settings.overlong_penalty)
        pairs = zip(groups, rewards, strict=True)
        return [rewards_G + overlong(group.num_loss_tokens_G, *limits) for group, rewards_G in pairs]

    def scale(self, rewards: Sequence[np.ndarray], histories: Sequence[History]) -> Scale:
        """Return the scale of played groups' advantages by "posterior", which reused groups share.

        Args:
            rewards: shaped rewards of the played groups, without a KL penalty.
            histories: of their prompts before this batch.
        """
        settings = self.settings
        return scale_of(surprises(rewards, histories, settings.prior_weight), settings.surprise_scale)

    def estimate(
        self,
        groups: Sequence[GroupMeta],
        rewards: Sequence[np.ndarray],
        kl: Sequence[np.ndarray] | None,
        reused: Sequence[GroupMeta],
        histories: Sequence[History] = (),
    ) -> AdvantageBatch:
        """Return the groups to train on, with their advantages.

        Args:
            groups: played groups.
            rewards: shaped rewards of the played groups; they decide which groups are trained on.
            kl: KL penalty of each episode, subtracted from the rewards; None: no penalty. It does not decide which
                groups are trained on: a KL of rounding errors, divided by its own spread, would look like a signal.
            reused: stored groups to train on again; their episodes without a reward are left out. For "posterior" each
                has its `history`.
            histories: of the played groups' prompts before this batch, for "posterior"; () means none.
        """
        histories = histories or [NO_HISTORY] * len(groups)
        less_kl = [r - k for r, k in zip(rewards, kl, strict=True)] if kl is not None else rewards
        played = self._played(less_kl, histories)
        is_live_P = self._live(rewards, histories)
        trained = [(group, a) for group, a, is_live in zip(groups, played, is_live_P, strict=True) if is_live]
        scale = self.scale(rewards, histories) if self.uses_history and groups else None
        rewarded = [whole for group in reused if (whole := rewarded_part(group)) is not None]
        again = self._reused(rewarded, scale)
        trained += again
        num = (is_live_P.count(False), len(rewarded) - len(again)) if self.uses_history else (0, 0)
        counts = dict(zip(("num_groups_unsurprising", "num_reuses_unsurprising"), num, strict=True))
        return AdvantageBatch([group for group, _ in trained], [a for _, a in trained], played, counts)

    def _reused(self, reused: Sequence[GroupMeta], scale: Scale | None) -> list[tuple[GroupMeta, np.ndarray]]:
        """Return the stored groups to train on, with their advantages; `scale` is None if nothing was played."""
        settings = self.settings
        rewards = [group.rewards_G.astype(np.float64) for group in reused]
        if self.uses_history:
            histories = [group.history or NO_HISTORY for group in reused]
            found = surprises(rewards, histories, settings.prior_weight)
            advantages = scaled(found, scale or scale_of(found, settings.surprise_scale))
            return [pair for pair in zip(reused, advantages, strict=True) if self._is_surprise(pair[1])]
        rule = settings.advantage
        pairs = zip(reused, group_relative(rewards, rule), strict=True)
        return [(group, a) for group, a in pairs if trains(group.rewards_G, rule)]

    def _played(self, rewards: Sequence[np.ndarray], histories: Sequence[History]) -> list[np.ndarray]:
        """Return the advantages of played groups from their rewards."""
        settings = self.settings
        if self.uses_history:
            return posterior(rewards, histories, settings.prior_weight, settings.surprise_scale)
        return group_relative(rewards, settings.advantage)

    def _live(self, rewards: Sequence[np.ndarray], histories: Sequence[History]) -> list[bool]:
        """Return which played groups are trained on."""
        if self._trains_all:
            return [True] * len(rewards)
        if not self.uses_history:
            return [trains(rewards_G, self.settings.advantage) for rewards_G in rewards]
        return [self._is_surprise(advantage_G) for advantage_G in self._played(rewards, histories)]

    def _is_surprise(self, advantage_G: np.ndarray) -> bool:
        return bool(np.abs(advantage_G).max() >= self.settings.min_surprise and np.any(advantage_G))
