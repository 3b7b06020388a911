"""Settings of the planner: default, meaning and validation; SRLConfig has them with the prefix `planner_`.

    PlannerSettings(adapt="both").faults() -> ["name = value; expected ...", ...]

Two parts, each off by default: loss weights of domains (`objective`) and adaptive replay fractions (`adapt`). Changing
a setting of a part that is off is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rllib_srl.common.setting_checks import are_numbers, of_choices, of_integers, of_ranges
from rllib_srl.common.setting_tables import setting, table_of

OBJECTIVES = ("uniform", "recap")
ADAPTED = ("none", "revisit", "reuse", "both")


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of the planner. Invariant: plain values only."""

    objective: str = setting(
        "uniform",
        '"recap" (domains with slow or unstable progress weigh more) or "uniform"',
        of="objective.name", is_head=True,
    )
    recap_window: int = setting(
        10, "results of a domain in each of the two windows compared (W)", of="objective.window", rules="recap"
    )
    recap_temperature: float = setting(
        5.0,
        "temperature of the softmax over scores, above 0; at 5 weights stay near 1",
        of="objective.temperature", rules="recap",
    )
    recap_mix: float = setting(
        0.5, "weight of convergence in a score, in [0, 1]; the rest is instability", of="objective.mix", rules="recap"
    )
    adapt: str = setting(
        "none",
        'replay fractions that adapt to forgetting: "none", "revisit", "reuse" or "both"',
        of="adapt.name", is_head=True,
    )
    fraction_bounds: tuple[float, float] = setting(
        (0.05, 0.5), "lowest and highest value of an adapted fraction", of="adapt.bounds", rules="revisit reuse both"
    )
    forgetting_threshold: float = setting(
        0.1,
        "mean forgetting above which fractions rise; otherwise they fall",
        of="adapt.forgetting_threshold", rules="revisit reuse both",
    )
    adapt_rate: float = setting(
        0.1,
        "step of a fraction per iteration, as a share of its range, in (0, 1]",
        of="adapt.rate", rules="revisit reuse both",
    )
    min_ess: float = setting(
        0.0,
        "effective sample size of reused tokens below which reuse falls, a share; 0: off",
        of="adapt.min_ess", rules="reuse both",
    )
    ema_rate: float = setting(
        0.05,
        "weight of a group's pass rate in the average accuracy of its domain, in (0, 1]",
        of="adapt.ema_rate", rules="revisit reuse both",
    )

    @property
    def is_on(self) -> bool:
        """Whether any part of the planner is on."""
        return self.objective != "uniform" or self.adapt != "none"

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return the names of the fractions that adapt to forgetting."""
        return {"none": (), "both": ("revisit", "reuse")}.get(self.adapt, (self.adapt,))

    def faults(self, prefix: str = "") -> list[str]:
        """Validate the settings; return error messages "name = value; expected ...", [] if there are none."""
        if not (lines := list(of_integers(self, {"recap_window": 2}))):
            lines = [*of_ranges(self, _WITHIN), *of_choices(self, _CHOICES), *_bounds(self)]
        return [f"{prefix}{line}" for line in lines or _idle(self, prefix)]


TABLE = table_of(PlannerSettings)

_CHOICES = {"objective": OBJECTIVES, "adapt": ADAPTED}
_WITHIN: dict[str, tuple[float, float, str]] = {
    "ema_rate": (1e-9, 1, "a number in (0, 1]"),
    "recap_temperature": (1e-3, math.inf, "a number of at least 0.001"),
    "recap_mix": (0, 1, "a number in [0, 1]"),
    "forgetting_threshold": (0, 1, "a number in [0, 1]"),
    "adapt_rate": (1e-9, 1, "a number in (0, 1]"),
    "min_ess": (0, 1, "a number in [0, 1]"),
}
# What must be on for a setting to act.
_ACTS: dict[str, tuple[Callable[[PlannerSettings], bool], str]] = {
    **dict.fromkeys(
        ("recap_window", "recap_temperature", "recap_mix"), (lambda s: s.objective == "recap", "objective = 'recap'")
    ),
    **dict.fromkeys(
        ("fraction_bounds", "forgetting_threshold", "adapt_rate", "ema_rate"),
        (lambda s: s.adapt != "none", "adapt other than 'none'"),
    ),
    "min_ess": (lambda s: s.adapt in ("reuse", "both"), "adapt = 'reuse' or 'both'"),
}


def _bounds(settings: PlannerSettings) -> Iterator[str]:
    fractions = settings.fraction_bounds
    if not are_numbers(fractions, 2) or not 0 <= fractions[0] < fractions[1] < 1:
        yield f"fraction_bounds = {fractions!r}; expected 0 <= lowest < highest < 1"


def _idle(settings: PlannerSettings, prefix: str) -> Iterator[str]:
    """Yield an error message for each changed setting that has no effect."""
    for name, (acts, needed) in _ACTS.items():
        default = TABLE[name].default
        if _plain(getattr(settings, name)) != _plain(default) and not acts(settings):
            yield f"{name} = {getattr(settings, name)!r}; expected {default!r} without {prefix}{needed}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
