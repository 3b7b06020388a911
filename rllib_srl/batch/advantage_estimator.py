"""Estimate advantages from the rewards of a batch and select the groups to train on.

    played groups   shaped rewards ─┬─ rule ──> advantages, times the diversity bonus
    stored success  its reward ─────┘           (rescue: one baseline for the composed group)
    reused groups   their rewards ──── rule ──> advantages; only positive ones with `reuse_positive_only`

With "posterior" the history has raw rewards and the group's other episodes have shaped ones; a group is trained on if
its largest advantage without the KL penalty reaches `min_surprise`. Reused groups are judged by today's history without
themselves, in units of the groups played today (`replay/selection/today.py`).

Pure NumPy on the driver, before any sharding. It uses metadata only, never tokens.

Sources: SPEAR, arXiv 2509.22601 (recalibration by the median of recent group means, positivity filter);
Li et al. 2025 (RePO), arXiv 2506.09340 (separate advantages for played and reused groups);
those of `batch/mixing.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.batch.calibration import RewardCalibration
from rllib_srl.batch.estimators import group_relative, trains
from rllib_srl.batch.mixing import (
    composed_advantages,
    composed_rewards,
    part_meta,
    positive_part,
    rescues,
    rewarded_part,
)
from rllib_srl.batch.posterior import NO_HISTORY, Scale, posterior, predicted, scale_of, scaled, surprises
from rllib_srl.batch.shaping import overlong, tool_reward
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import GroupMeta, History

COUNTS = (
    "num_groups_unsurprising",
    *("num_groups_rescued", "num_episodes_rescued", "num_episodes_not_positive"),
)


@dataclass(frozen=True)
class AdvantageBatch:
    """Groups to train on, with their advantages.

    Invariant: `advantages[i]` has one entry per episode of `groups[i]`. `played` has one array per played group, even
    if it is not trained on, with one entry per episode; 0 for an episode that a stored success replaced.
    """

    groups: list[GroupMeta]
    advantages: list[np.ndarray]
    played: list[np.ndarray]
    counts: Mapping[str, int]


class AdvantageEstimator:
    """Advantage estimator of a run. Invariant: `get_state` holds its whole state and can be stored as JSON."""

    def __init__(self, settings: LossSettings, pass_reward: float, seed: int) -> None:
        """Set loss settings, the reward from which a stored episode is a success, and the random seed."""
        self.settings, self._pass_reward = settings, pass_reward
        self._means: deque[float] = deque(maxlen=settings.recalibration_window)
        self._generator = np.random.default_rng(seed)
        self.calibration = RewardCalibration()

    @property
    def min_episodes(self) -> int:
        """Return the least valid episodes of a group that can be trained on: 1 with a baseline from history."""
        return 1 if self.settings.advantage == "posterior" and self.settings.prior_weight > 0 else 2

    def shaped_rewards(self, groups: Sequence[GroupMeta], now: int) -> list[np.ndarray]:
        """Return the rewards of played groups plus length penalty and tool reward, float64 [G] per group.

        Args:
            groups: played groups.
            now: training iteration, from 1.
        """
        settings, shaped = self.settings, []
        for group in groups:
            rewards_G = group.rewards_G.astype(np.float64)
            if settings.overlong_penalty:
                limits = (settings.longest_answer, settings.overlong_share, settings.overlong_penalty)
                rewards_G = rewards_G + overlong(group.num_loss_tokens_G, *limits)
            if settings.tool_reward:
                calls_G = group.num_turns_G - 1
                rewards_G = rewards_G + tool_reward(calls_G, settings.tool_reward, now, settings.tool_reward_iterations)
            shaped.append(rewards_G)
        return shaped

    def note_predictions(self, groups: Sequence[GroupMeta], histories: Sequence[History]) -> None:
        """Add played groups, trained on or not, to the calibration: predicted and observed mean reward.

        Args:
            groups: whose rewards are known; screened out and late ones are among them.
            histories: of their prompts before this batch.
        """
        weight = self.settings.prior_weight
        observed = [float(group.rewards_G.mean()) for group in groups]
        self.calibration.note([predicted(history, weight) for history in histories], observed)

    @property
    def judges_reused_by_history(self) -> bool:
        """Return whether today's baseline judges reused groups."""
        return (self.settings.reuse_advantage or self.settings.advantage) == "posterior"

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
        bonuses: Sequence[Sequence[float]],
        reused: Sequence[GroupMeta],
        stored: Mapping[str, GroupMeta],
        histories: Sequence[History] = (),
    ) -> AdvantageBatch:
        """Return the groups to train on, with their advantages.

        Args:
            groups: played groups.
            rewards: shaped rewards of the played groups; they decide which groups are trained on.
            kl: KL penalty of each episode, subtracted from the rewards; None: no penalty. It does not decide which
                groups are trained on: a KL of rounding errors, divided by its own spread, would look like a signal.
            bonuses: factors of each group's advantages; () means 1.
            reused: stored groups to train on again; their episodes without a reward are left out. For "posterior" each
                has its `history`.
            stored: stored groups with a success, by prompt key.
            histories: of the played groups' prompts before this batch, for "posterior"; () means none.
        """
        histories = histories or [NO_HISTORY] * len(groups)
        found = rescues(
            groups, stored, self.settings.rescue, self.settings.rescue_episodes, self._pass_reward, self._generator
        )
        self._means.extend(float(group.rewards_G.mean()) for group in groups)
        less_kl = [r - k for r, k in zip(rewards, kl, strict=True)] if kl is not None else list(rewards)
        kept, joined = composed_advantages(less_kl, found, lambda composed: self._played(composed, histories))
        bare = composed_rewards(rewards, found)
        is_live_P = self._live(bare, histories)
        trained: list[tuple[GroupMeta, np.ndarray]] = []
        played: list[np.ndarray] = []
        for p, (group, bonus) in enumerate(zip(groups, bonuses, strict=True)):
            stays = list(found[p].stays) if p in found else list(range(len(group.rewards_G)))
            advantage_G = np.zeros(len(group.rewards_G))
            advantage_G[stays] = kept[p] * (np.array(bonus)[stays] if len(bonus) else 1.0)
            played.append(advantage_G)
            if is_live_P[p]:
                is_whole = len(stays) == len(advantage_G)
                trained.append((group if is_whole else part_meta(group, stays), advantage_G[stays]))
                trained += [(found[p].meta, joined[p])] if p in found else []
        counts = Counter(dict.fromkeys(COUNTS, 0))
        if self.settings.advantage == "posterior":
            counts.update(num_groups_unsurprising=is_live_P.count(False))
        counts.update(num_groups_rescued=len(found))
        counts.update(num_episodes_rescued=sum(len(one.meta.rewards_G) for one in found.values()))
        scale = self.scale(bare, histories) if self.judges_reused_by_history and groups else None
        trained += self._reused(reused, scale, counts)
        return AdvantageBatch([group for group, _ in trained], [a for _, a in trained], played, counts)

    def _reused(
        self, reused: Sequence[GroupMeta], scale: Scale | None, counts: Counter[str]
    ) -> list[tuple[GroupMeta, np.ndarray]]:
        """Return the stored groups to train on, with their advantages; `scale` is None if nothing was played."""
        rule = self.settings.reuse_advantage or self.settings.advantage
        reused = [whole for group in reused if (whole := rewarded_part(group)) is not None]
        rewards = [group.rewards_G.astype(np.float64) for group in reused]
        if rule == "posterior":  # the draw has left out what is no surprise today
            histories = [group.history or NO_HISTORY for group in reused]
            found = surprises(rewards, histories, self.settings.prior_weight)
            pairs = list(zip(reused, scaled(found, scale or scale_of(found, self.settings.surprise_scale))))
        else:
            advantages = self._rule(rewards, rule)
            pairs = [(g, a) for g, a in zip(reused, advantages, strict=True) if trains(g.rewards_G, rule)]
        if not self.settings.reuse_positive_only:
            return pairs
        parts = [part for group, a in pairs if (part := positive_part(group, a)) is not None]
        num_before, num_after = (sum(len(a) for _, a in some) for some in (pairs, parts))
        counts["num_episodes_not_positive"] += num_before - num_after
        return parts

    def _played(self, rewards: Sequence[np.ndarray], histories: Sequence[History]) -> list[np.ndarray]:
        """Return the advantages of played groups from their rewards."""
        settings = self.settings
        if settings.advantage == "posterior":
            return posterior(rewards, histories, settings.prior_weight, settings.surprise_scale)
        return self._rule(rewards, settings.advantage)

    def _live(self, rewards: Sequence[np.ndarray], histories: Sequence[History]) -> list[bool]:
        """Return which played groups are trained on."""
        if self.settings.advantage != "posterior":
            return [trains(rewards_G, self.settings.advantage) for rewards_G in rewards]
        least = self.settings.min_surprise
        return [bool(np.abs(a).max() >= least and np.any(a)) for a in self._played(rewards, histories)]

    def _rule(self, rewards: Sequence[np.ndarray], rule: str) -> list[np.ndarray]:
        baseline = float(np.median(self._means)) if self._means else None
        return group_relative(rewards, rule, baseline=baseline)

    def get_state(self) -> dict[str, Any]:
        """Return the recent group means, the state of the random generator and the calibration."""
        return {
            "means": list(self._means),
            "generator": self._generator.bit_generator.state,
            "calibration": self.calibration.get_state(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._means = deque(state["means"], maxlen=self.settings.recalibration_window)
        self._generator.bit_generator.state = state["generator"]
        if "calibration" in state:  # earlier checkpoints have none
            self.calibration.set_state(state["calibration"])
