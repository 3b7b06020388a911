"""When a domain's recall is probed: at growing gaps while it is mastered, at once again while it is not.

    probed at `due`;  mastered: gap x growth, due += round(gap);  not: gap = first, due += first
    first 1, growth 1.5, always mastered:  1 3 5 8 13       (1.5, 2.25, 3.375, 5.06 rounded to even)

A probe plays held-out prompts greedily and changes nothing but what is known: no generator of training moves, no item
is graded, its tokens are counted apart. The published gain of this schedule came from replay in both arms; it is a
way to measure, and what it changes here is what follows from the measurement.

Source: task-focused consolidation with spaced recall (TFC-SR) 2025, arXiv 2507.21109.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Probe:
    """The schedule of one domain. Invariant: `due` is after every probe that was made."""

    due: int
    gap: float

    @classmethod
    def first(cls, now: int, gap: int) -> Probe:
        """Return the schedule of a domain that is met in iteration `now`: probed `gap - 1` iterations later."""
        return cls(now + gap - 1, float(gap))

    def after(self, recall: float, now: int, first_gap: int, mastery: float, growth: float) -> Probe:
        """Return the schedule after a probe.

        Args:
            recall: share of right answers.
            now: iteration of the probe.
            first_gap: gap to which failure returns, in iterations.
            mastery: recall from which the gap grows.
            growth: its factor.
        """
        if recall < mastery:
            return Probe(now + first_gap, float(first_gap))
        gap = self.gap * growth
        return Probe(now + max(1, round(gap)), gap)
