"""Warn, with numbers, when nearly all groups of a run have equal rewards.

A group whose rewards are all equal has zero variance: GRPO has no gradient from it (`TAUGHT` lists the other rules). If
nearly all groups are like this, the prompts are too easy or too hard: too few groups remain to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_srl.batch.advantages import has_variance
from rllib_srl.types import GroupMeta

NUM_JUDGED = 256  # groups before a warning: a measured share of .1 then has a standard error of .02
MANY = 0.75
GRPO = "GRPO learns nothing from equal rewards"
TAUGHT = {  # rule -> what equal rewards teach; any other rule: `GRPO`
    "posterior": "The baseline from history trains on these only where a result differs from what is predicted",
    "none": "Distillation learns from them as from others",
}


@dataclass
class ZeroVarianceGroups:
    """Counts the first groups of at least two episodes. Invariant: num_solved + num_failed <= num_equal <= num."""

    num: int = 0
    num_equal: int = 0
    num_solved: int = 0  # equal rewards, all episodes successful
    num_failed: int = 0  # equal rewards, none successful
    is_judged: bool = False

    def count(self, groups: Sequence[GroupMeta], pass_reward: float) -> None:
        """Count groups, until they are judged."""
        for group in [] if self.is_judged else groups:
            if len(group.rewards_G) < 2:
                continue
            success_G = group.is_success_G(pass_reward)
            is_zero_variance = not has_variance(group.rewards_G)
            self.num += 1
            self.num_equal += is_zero_variance
            self.num_solved += bool(is_zero_variance and success_G.all())
            self.num_failed += bool(is_zero_variance and not success_G.any())

    def warning(self, rule: str) -> str | None:
        """Return the warning once, after `NUM_JUDGED` groups; None before and later, and if few have zero variance.

        Args:
            rule: the advantage rule.
        """
        if self.is_judged or self.num < NUM_JUDGED:
            return None
        self.is_judged = True
        share, solved, failed = (count / self.num for count in (self.num_equal, self.num_solved, self.num_failed))
        if share >= MANY:
            remedy = "harder" if solved > failed else "easier"
            return (
                f"{share:.0%} of the first {self.num} groups had equal rewards ({solved:.0%} all right, {failed:.0%} "
                f"all wrong). {TAUGHT.get(rule, GRPO)}: use {remedy} prompts. See docs/does-memory-help.md."
            )
        return None
