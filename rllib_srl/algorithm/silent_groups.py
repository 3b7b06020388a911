"""Warn, with numbers, when choosing among the prompts of a run can gain little.

A group whose rewards are all equal is silent: GRPO has no gradient from it. If a share s of the groups is silent, a
perfect choice of prompts divides the tokens needed by at most 1 / (1 - s). Two pools leave little to choose:

    nearly all silent    too easy or too hard: what is left is too little to learn from; other prompts are needed
    nearly none silent   every prompt teaches, so no order of them saves more than the share s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_srl.batch.estimators import has_signal
from rllib_srl.types import GroupMeta

NUM_JUDGED = 256  # groups before the judgement: at a share of .1 its standard error is .02
MANY, FEW = 0.75, 0.1


@dataclass
class SilentGroups:
    """Counts the first groups of a run. Invariant: num_solved + num_failed <= num_silent <= num."""

    num: int = 0
    num_silent: int = 0
    num_solved: int = 0  # silent, all episodes successful
    num_failed: int = 0  # silent, none successful
    is_judged: bool = False

    def count(self, groups: Sequence[GroupMeta], pass_reward: float) -> None:
        """Count groups; those of one episode are left out, since they cannot differ."""
        for group in groups:
            if len(group.rewards_G) < 2:
                continue
            is_silent, success_G = not has_signal(group.rewards_G), group.is_success_G(pass_reward)
            self.num += 1
            self.num_silent += is_silent
            self.num_solved += bool(is_silent and success_G.all())
            self.num_failed += bool(is_silent and not success_G.any())

    def warning(self, is_chosen: bool) -> str | None:
        """Return the warning after `NUM_JUDGED` groups, None before, after the first call, and for other pools.

        Args:
            is_chosen: whether a rule chooses prompts by their history; without one, few silent groups are no concern.
        """
        if self.is_judged or self.num < NUM_JUDGED:
            return None
        self.is_judged = True
        share, solved, failed = (count / self.num for count in (self.num_silent, self.num_solved, self.num_failed))
        if share >= MANY:
            remedy = "harder" if solved > failed else "easier"
            return (
                f"{share:.0%} of the first {self.num} groups had equal rewards ({solved:.0%} all right, {failed:.0%} "
                f"all wrong). GRPO learns nothing from these: use {remedy} prompts. "
                f"See docs/does-memory-help.md."
            )
        if is_chosen and share <= FEW:
            return (
                f"only {share:.0%} of the first {self.num} groups had equal rewards: choosing prompts by their history "
                f"cannot save more than that share of the tokens. See docs/does-memory-help.md."
            )
        return None
