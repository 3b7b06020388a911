"""Settings of the planner: default, meaning and validation; SRLConfig has them with the prefix `planner_`.

    PlannerSettings(mode="bands").faults() -> ["name = value; expected ...", ...]

Four parts, each off by default: shares of domains (`mode`), loss weights of domains (`objective`), adaptive replay
fractions (`adapt`), and probes of recall (`probe_every`). Changing a setting of a part that is off is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rllib_srl.common.setting_checks import are_numbers, of_choices, of_integers, of_ranges, of_switches
from rllib_srl.common.setting_tables import setting, table_of

MODES = ("off", "bands", "softmax", "sec")
OBJECTIVES = ("uniform", "recap")
REHEARSED = ("failing", "forgotten")
ADAPTED = ("none", "revisit", "reuse", "both")


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of the planner. Invariant: plain values only."""

    mode: str = setting(
        "off",
        'shares of domains: "bands" (by accuracy band), "softmax" (by failure rate), "sec" (bandit) or "off"',
        of="mode.name", is_head=True,
    )
    acc_init: float = setting(0.5, "initial accuracy of a domain, in [0, 1]", of="mode.acc_init", rules="bands softmax")
    probe_first: bool = setting(False, "measure a domain's initial accuracy by a probe, before its first iteration")
    ema_rate: float = setting(0.05, "weight of a group's pass rate in the average accuracy of its domain, in (0, 1]")
    band_bounds: tuple[float, float] = setting(
        (0.4, 0.8),
        "lower bounds of the medium and the high accuracy band",
        of="mode.band_bounds", rules="bands softmax",
    )
    band_weights: tuple[float, float, float] = setting(
        (0.6, 0.3, 0.1), "priority of the low, medium and high band", of="mode.band_weights", rules="bands"
    )
    item_bands: tuple[float, ...] | None = setting(
        (0.6, 0.3, 0.1),
        "shares of a domain's replay by the item's pass rate: low, medium, high; None: not divided",
        of="mode.item_bands", rules="bands softmax",
    )
    staleness_coeff: float = setting(
        0.1, "added priority of a domain not played for staleness_horizon", of="mode.staleness_coeff", rules="bands"
    )
    staleness_horizon: int = setting(
        50, "iterations without play at which staleness is at its maximum", of="mode.staleness_horizon", rules="bands"
    )
    uncertainty_coeff: float = setting(
        0.05,
        "added priority of a domain without results; falls with results",
        of="mode.uncertainty_coeff", rules="bands",
    )
    temperature: float = setting(
        1.0, "temperature of the softmax over priorities, > 0", of="mode.temperature", rules="bands sec"
    )
    sec_rate: float = setting(
        0.5,
        "weight of an iteration's mean |advantage| in the value of its domain, in (0, 1]",
        of="mode.rate", rules="sec",
    )
    sharpness: float = setting(
        3.0, "share ~ exp(sharpness * (1 - accuracy)) of a domain", of="mode.sharpness", rules="softmax"
    )
    rehearse: str = setting(
        "failing", 'replay: by "failing" or "forgotten" (best - current accuracy)', of="mode.rehearse", rules="softmax"
    )
    floor: float | None = setting(
        None,
        "minimum share of each domain; None: 0.02 with bands, 0.001 with softmax, 0 with sec",
        of="mode.floor", rules="bands softmax sec",
    )
    single_every: int = setting(
        10, "every n-th iteration plays one domain only; 0: never", of="mode.single_every", rules="bands softmax"
    )
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
    plasticity_signal: str | None = setting(
        None,
        "learner metric that must settle before fractions rise; None: fractions do not wait",
        of="adapt.plasticity_signal", rules="revisit reuse both",
    )
    plasticity_every: int = setting(
        10, "iterations between checks of plasticity_signal", of="adapt.plasticity_every", rules="revisit reuse both"
    )
    plasticity_tolerance: float = setting(
        0.001,
        "largest change between checks of a signal that has settled",
        of="adapt.plasticity_tolerance", rules="revisit reuse both",
    )
    probe_every: int = setting(
        0, "initial gap between recall probes of a domain, iterations; 0: no probes", of="probe.every", is_head=True
    )
    probe_prompts: int = setting(16, "held-out prompts per probe; not those of evaluation", of="probe.prompts")
    probe_mastery: float = setting(
        0.5,
        "least recall at which the gap grows, in [0, 1]; below it the gap returns to its initial value",
        of="probe.mastery",
    )
    probe_growth: float = setting(1.5, "factor of the gap after a successful probe, at least 1", of="probe.growth")

    @property
    def is_on(self) -> bool:
        """Whether any part of the planner is on."""
        parts = (self.mode != "off", self.objective != "uniform", self.adapt != "none", self.probe_every > 0)
        return any(parts)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return the names of the fractions that adapt to forgetting."""
        return {"none": (), "both": ("revisit", "reuse")}.get(self.adapt, (self.adapt,))

    @property
    def least_share(self) -> float:
        """Return the minimum share of each domain."""
        if self.floor is not None:
            return self.floor
        return {"bands": 0.02, "sec": 0.0}.get(self.mode, 0.001)

    def faults(self, prefix: str = "") -> list[str]:
        """Validate the settings; return error messages "name = value; expected ...", [] if there are none."""
        if not (lines := list(_types(self))):
            lines = [*of_ranges(self, _WITHIN), *of_choices(self, _CHOICES), *_tuples(self)]
        return [f"{prefix}{line}" for line in lines or _idle(self, prefix)]


TABLE = table_of(PlannerSettings)

_CHOICES = {"mode": MODES, "rehearse": REHEARSED, "objective": OBJECTIVES, "adapt": ADAPTED}
_INTEGERS = {"staleness_horizon": 1, "single_every": 0, "recap_window": 2, "plasticity_every": 1, "probe_every": 0}
_INTEGERS |= {"probe_prompts": 1}
_WITHIN: dict[str, tuple[float, float, str]] = {
    "acc_init": (0, 1, "a number in [0, 1]"),
    "ema_rate": (1e-9, 1, "a number in (0, 1]"),
    "staleness_coeff": (0, math.inf, "a number of at least 0"),
    "uncertainty_coeff": (0, math.inf, "a number of at least 0"),
    "temperature": (1e-3, math.inf, "a number of at least 0.001"),
    "sharpness": (0, 100, "a number from 0 to 100"),
    "sec_rate": (1e-9, 1, "a number in (0, 1]"),
    "floor": (0, 1, "a number in [0, 1], or None"),
    "recap_temperature": (1e-3, math.inf, "a number of at least 0.001"),
    "recap_mix": (0, 1, "a number in [0, 1]"),
    "forgetting_threshold": (0, 1, "a number in [0, 1]"),
    "adapt_rate": (1e-9, 1, "a number in (0, 1]"),
    "min_ess": (0, 1, "a number in [0, 1]"),
    "plasticity_tolerance": (0, math.inf, "a number of at least 0"),
    "probe_mastery": (0, 1, "a number in [0, 1]"),
    "probe_growth": (1, 100, "a number from 1 to 100"),
}
# What must be on for a setting to act.
_ACTS: dict[str, tuple[Callable[[PlannerSettings], bool], str]] = {
    **dict.fromkeys(
        ("band_weights", "staleness_coeff", "staleness_horizon", "uncertainty_coeff"),
        (lambda s: s.mode == "bands", "mode = 'bands'"),
    ),
    "temperature": (lambda s: s.mode in ("bands", "sec"), "mode = 'bands' or 'sec'"),
    "sec_rate": (lambda s: s.mode == "sec", "mode = 'sec'"),
    "floor": (lambda s: s.mode != "off", "mode other than 'off'"),
    **dict.fromkeys(
        ("single_every", "item_bands"), (lambda s: s.mode in ("bands", "softmax"), "mode = 'bands' or 'softmax'")
    ),
    **dict.fromkeys(("sharpness", "rehearse"), (lambda s: s.mode == "softmax", "mode = 'softmax'")),
    **dict.fromkeys(
        ("probe_first", "ema_rate"),
        (
            lambda s: s.mode in ("bands", "softmax") or s.adapt != "none",
            "mode = 'bands' or 'softmax', or adapt other than 'none'",
        ),
    ),
    "acc_init": (
        lambda s: s.mode in ("bands", "softmax") and not s.probe_first,
        "mode = 'bands' or 'softmax', and probe_first = False",
    ),
    "band_bounds": (lambda s: s.mode == "bands" or _has_item_bands(s), "mode = 'bands' or item_bands"),
    **dict.fromkeys(
        ("recap_window", "recap_temperature", "recap_mix"), (lambda s: s.objective == "recap", "objective = 'recap'")
    ),
    **dict.fromkeys(
        ("fraction_bounds", "forgetting_threshold", "adapt_rate", "plasticity_signal"),
        (lambda s: s.adapt != "none", "adapt other than 'none'"),
    ),
    "min_ess": (lambda s: s.adapt in ("reuse", "both"), "adapt = 'reuse' or 'both'"),
    **dict.fromkeys(
        ("plasticity_every", "plasticity_tolerance"),
        (lambda s: s.plasticity_signal is not None, "a plasticity_signal"),
    ),
    "probe_prompts": (lambda s: s.probe_every > 0 or s.probe_first, "probe_every above 0"),
    **dict.fromkeys(("probe_mastery", "probe_growth"), (lambda s: s.probe_every > 0, "probe_every above 0")),
}


def _has_item_bands(settings: PlannerSettings) -> bool:
    return settings.mode in ("bands", "softmax") and settings.item_bands is not None


def _types(settings: PlannerSettings) -> Iterator[str]:
    yield from of_integers(settings, _INTEGERS)
    yield from of_switches(settings, ("probe_first",))
    if settings.plasticity_signal is not None and not isinstance(settings.plasticity_signal, str):
        yield f"plasticity_signal = {settings.plasticity_signal!r}; expected the name of a learner metric, or None"


def _tuples(settings: PlannerSettings) -> Iterator[str]:
    for name in ("band_weights", "item_bands"):
        value = getattr(settings, name)
        is_none = name == "item_bands" and value is None
        if not is_none and (not are_numbers(value, 3) or min(value) < 0 or sum(value) <= 0):
            yield f"{name} = {value!r}; expected three numbers of at least 0, not all 0"
    bounds = settings.band_bounds
    if not are_numbers(bounds, 2) or not 0 < bounds[0] < bounds[1] <= 1:
        yield f"band_bounds = {bounds!r}; expected 0 < medium < high <= 1"
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

