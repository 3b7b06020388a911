"""Settings of the planner; SRLConfig has them with the prefix `planner_`.

Two parts, each off by default: loss weights of domains (`objective`) and adaptive replay fractions (`adapt`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from rllib_srl.common.setting_model import Pair, Settings, setting, where

_OF_RECAP = {"rules": "recap"}
_OF_FRACTIONS = {"rules": "revisit reuse both"}


class PlannerSettings(Settings):
    """Settings of the planner. Invariant: plain values only."""

    prefix = "planner_"

    objective: Literal["uniform", "recap"] = setting(
        "uniform", '"recap" (domains with slow or unstable progress weigh more) or "uniform"', of="objective.name",
        is_head=True
    )
    recap_window: int = setting(
        10, "results of a domain in each of the two windows compared (W)", of="objective.window", ge=2, **_OF_RECAP
    )
    adapt: Literal["none", "revisit", "reuse", "both"] = setting(
        "none", 'replay fractions that adapt to forgetting: "none", "revisit", "reuse" or "both"', of="adapt.name",
        is_head=True
    )
    fraction_bounds: Annotated[Pair, where(lambda low, high: 0 <= low < high < 1)] = setting(
        (0.05, 0.5), "lowest and highest value of an adapted fraction", "two numbers, 0 <= lowest < highest < 1",
        of="adapt.bounds", **_OF_FRACTIONS
    )
    forgetting_threshold: float = setting(
        0.1, "mean forgetting above which fractions rise; otherwise they fall", of="adapt.forgetting_threshold", ge=0,
        le=1, **_OF_FRACTIONS
    )

    @property
    def is_on(self) -> bool:
        """Whether any part of the planner is on."""
        return self.objective != "uniform" or self.adapt != "none"

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return the names of the fractions that adapt to forgetting."""
        return {"none": (), "both": ("revisit", "reuse")}.get(self.adapt, (self.adapt,))
