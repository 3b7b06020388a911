"""Compare two measurements of the health battery, question by question, and judge them by gates.

    Measured before, Measured after  ->  Change of each task and domain, Shift of each measure of degeneration
                                     ->  Verdict of each (gates.py): passed, bad or harmful

Intervals are paired: both models answered the same questions. They are not corrected for their number: of 20 measures
without a change, one excludes 0 by chance. A gate needs more than that: the estimate beyond its limit as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rllib_srl.studies import gates
from rllib_srl.studies.gates import Change, Shift, Verdict
from rllib_srl.studies.health.battery import Measured
from rllib_srl.studies.health.degeneration import healthy_range

FORMAT = "format"  # the share of answers that the environments could read, beside tasks and domains
MAX_DROP = 0.05  # default: share of right answers that may be lost
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Comparison:
    """Changes from one model to another. Invariant: at least one of the two has an entry."""

    changes: dict[str, Change]  # task, domain or "format"
    shifts: dict[str, Shift]  # measure of degeneration
    num_lost: tuple[int, int] = (0, 0)  # held-out episodes that infrastructure ended, of both models

    @classmethod
    def of(cls, before: Measured, after: Measured, confidence: float = CONFIDENCE) -> Comparison:
        """Compare two measurements by the same battery.

        Raises:
            ValueError: they have other tasks or domains, or no question in common.
        """
        one, two = _shares(before), _shares(after)
        if one.keys() != two.keys() or before.numbers.keys() != after.numbers.keys():
            raise ValueError(f"measured {sorted(one)} before and {sorted(two)} after; expected the same")
        changes = {name: gates.paired_change(one[name], two[name], confidence) for name in one}
        pairs = {name: (before.numbers[name], after.numbers[name]) for name in before.numbers}
        shifts = {name: gates.paired_shift(*pair, confidence) for name, pair in pairs.items()}
        return cls(changes, shifts, (before.num_lost, after.num_lost))

    def verdicts(self, max_drop: float = MAX_DROP) -> list[Verdict]:
        """Return the verdict of each measure.

        Args:
            max_drop: share of right or readable answers that may be lost, in [0, 1).
        """
        kept = [gates.retention(name, change, max_drop) for name, change in self.changes.items()]
        ranges = {name: healthy_range(name, shift.before) for name, shift in self.shifts.items()}
        return kept + [gates.degeneration(name, shift, *ranges[name]) for name, shift in self.shifts.items()]

    def as_json(self) -> dict[str, Any]:
        """Return all changes in JSON types."""
        return {
            "accuracy": {name: {"change": change.change, **asdict(change)} for name, change in self.changes.items()},
            "degeneration": {name: {"change": shift.change, **asdict(shift)} for name, shift in self.shifts.items()},
            "num_lost": list(self.num_lost),
        }


def _shares(measured: Measured) -> Mapping[str, Mapping[str, bool]]:
    return {**measured.is_right, FORMAT: measured.is_readable} if measured.is_readable else measured.is_right
