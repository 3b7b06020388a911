"""Compute advantages from the rewards of a batch and select the groups to train on: pure NumPy, before any sharding.

    played groups   shaped rewards ── rule ──> advantages
    reused groups   their rewards  ── rule ──> advantages

    rule             advantage                                       sums to 0 over the group
    group            (r - mean) / (std + 1e-4), unbiased std         yes
    mean_only        r - mean                                        yes
    batch            (r - mean) / (std of the whole batch + 1e-4)    yes
    leave_one_out    r - mean of the others                          yes
    posterior        r - mean of history, domain and the others      no: see `posterior.py`
    none             0: rewards do not count                         yes; for distillation

With "posterior" the history has raw rewards and the group's other episodes have shaped ones; a group is trained on if
its largest advantage without the KL penalty reaches `min_surprise`. Reused groups are judged in the same way, in
units of the groups just played: by the history of their prompts for the policy in training, without the group itself.

To add a rule that needs one group only, register a function, `ADVANTAGES["mine"] = rule`, or name its import path,
`advantage="module:rule"`; it is called with the rewards of a group, float64 [G], and returns as many advantages.

Sources: Shao et al. 2024, arXiv 2402.03300 section 4.1.2 (group); Liu et al. 2025 (Dr.GRPO), arXiv 2503.20783 section
3.2 (mean_only); Liu et al. 2025 (Lite-PPO), arXiv 2508.08221 (batch); Ahmadian et al. 2024, arXiv 2402.14740 section 3
(leave_one_out); Li et al. 2025 (RePO), arXiv 2506.09340 (separate advantages for played and reused groups);
Yu et al. 2025 (DAPO), arXiv 2503.14476 eq. 13 (length penalty).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.batch.parts import part_meta, rewarded_part
from rllib_srl.batch.posterior import NO_HISTORY, Scale, posterior, scale_of, scaled, surprises
from rllib_srl.common.rules import Rules
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import GroupMeta, History

EPSILON = 1e-4  # TRL's value; verl uses 1e-6
OVERLONG_SHARE = 0.2  # fraction of longest_answer over which the length penalty rises, as in DAPO


def group(rewards_G: np.ndarray) -> np.ndarray:
    """Return (r - mean) / (std + 1e-4), with the unbiased standard deviation of the group."""
    advantage_G: np.ndarray = (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + EPSILON)
    return advantage_G


def mean_only(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean, without division: a prompt weighs by the spread of its rewards."""
    advantage_G: np.ndarray = rewards_G - rewards_G.mean()
    return advantage_G


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """Return r - mean of the other episodes = (r - mean) G / (G - 1): the baseline excludes the episode itself."""
    return mean_only(rewards_G) * (len(rewards_G) / (len(rewards_G) - 1))


# "batch" needs more than the group; `group_relative` adds that part. So does "posterior", which `posterior.py`
# computes; without history and scale it is "leave_one_out".
ADVANTAGES: Rules[Callable[[np.ndarray], np.ndarray]] = Rules(
    "advantage",
    {
        "group": group,
        "mean_only": mean_only,
        "batch": mean_only,
        "leave_one_out": leave_one_out,
        "posterior": leave_one_out,
        "none": lambda rewards_G: np.zeros(len(rewards_G)),
    },
)
GROUP_NORMALISED = ("group", "batch", "mean_only", "leave_one_out")


def has_variance(rewards_G: np.ndarray) -> bool:
    """Return whether the rewards of a group differ; equal rewards give zero advantages and no gradient."""
    return bool(np.ptp(rewards_G) > 1e-8)


def _sized(rewards_G: np.ndarray) -> Callable[[Any], str]:
    """Return the check of a rule's result for these rewards."""
    shape = rewards_G.shape
    return lambda values: "" if np.shape(values) == shape else f"expected {len(rewards_G)} numbers, one a reward"


def group_relative(
    rewards_PG: Sequence[np.ndarray],
    rule: str = "group",
    *,
    batch_rewards: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Return the advantages of each group.

    Args:
        rewards_PG: rewards of each group; groups may differ in size, each has at least 2 episodes.
        rule: a name of `ADVANTAGES`.
        batch_rewards: rewards whose standard deviation "batch" divides by; None: `rewards_PG`.

    Raises:
        ValueError: an unknown rule, a user's rule that raises an exception, or a group of fewer than two episodes.
    """
    for rewards_G in rewards_PG:
        if len(rewards_G) < 2 and rule != "none":
            raise ValueError(f"a group of {len(rewards_G)} episode has no baseline; expected at least 2")
    rewards_PG = [np.asarray(rewards_G, np.float64) for rewards_G in rewards_PG]
    advantages = [ADVANTAGES.call(rule, rewards_G, check=_sized(rewards_G)) for rewards_G in rewards_PG]
    if not rewards_PG:
        return []
    if rule == "batch":
        spread = np.concatenate([np.asarray(row, np.float64) for row in batch_rewards or rewards_PG]).std(ddof=1)
        return [advantage_G / (spread + EPSILON) for advantage_G in advantages]
    return advantages


def overlong(num_tokens_G: np.ndarray, longest: int, share: float, factor: float) -> np.ndarray:
    """Return min(0, (longest - cache - n) / cache) * factor for n written tokens, cache = share * longest.

    The penalty does not grow beyond `longest`, the maximum tokens an episode may write.
    """
    cache = share * longest
    return factor * np.clip((longest - cache - np.asarray(num_tokens_G, np.float64)) / cache, -1.0, 0.0)


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
        """Set the loss settings, and whether played zero-variance groups are also trained on."""
        self.settings, self._trains_all = settings, trains_all

    @property
    def uses_history(self) -> bool:
        """Return whether the baseline is that of `posterior.py`."""
        return bool(self.settings.advantage == "posterior")

    @property
    def min_episodes(self) -> int:
        """Return the minimum of valid episodes of a trainable group: 1 with a baseline from history or without one."""
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
            reused: stored groups to train on again; their episodes without a reward are left out, and groups with fewer
                than `min_episodes` others. For "posterior" each has its `history`.
            histories: histories of the played groups' prompts before this batch, for "posterior"; () means none.
        """
        histories = histories or [NO_HISTORY] * len(groups)
        less_kl = [r - k for r, k in zip(rewards, kl, strict=True)] if kl is not None else rewards
        played = self._played(less_kl, histories)
        is_live_P = self._live(rewards, histories)
        trained = [(group, a) for group, a, is_live in zip(groups, played, is_live_P, strict=True) if is_live]
        scale, of = None, self.settings
        if self.uses_history and groups:  # the scale of rewards without a KL penalty
            scale = scale_of(surprises(rewards, histories, of.prior_weight), of.surprise_scale)
        parts = [part for group in reused if (part := rewarded_part(group)) is not None]
        rewarded = [part for part in parts if len(part.rewards_G) >= self.min_episodes]
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
            surprises_PG = surprises(rewards, histories, settings.prior_weight)
            advantages = scaled(surprises_PG, scale or scale_of(surprises_PG, settings.surprise_scale))
            return [pair for pair in zip(reused, advantages, strict=True) if self._is_surprise(pair[1])]
        rule = settings.advantage
        pairs = zip(reused, group_relative(rewards, rule), strict=True)
        return [(group, a) for group, a in pairs if has_variance(group.rewards_G)]

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
            return [has_variance(rewards_G) for rewards_G in rewards]
        return [self._is_surprise(advantage_G) for advantage_G in self._played(rewards, histories)]

    def _is_surprise(self, advantage_G: np.ndarray) -> bool:
        return bool(np.abs(advantage_G).max() >= self.settings.min_surprise and np.any(advantage_G))
