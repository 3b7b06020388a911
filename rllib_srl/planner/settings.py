"""Every setting of the planner, its default and its meaning; SRLConfig has them with the prefix `planner_`.

    PlannerSettings(mode="bands").faults() -> ["name = value; expected ...", ...]

Four parts, each off by default: shares of domains (`mode`), the weight of each domain's loss (`objective`), replay
fractions that adapt (`adapt`), and probes of recall (`probe_every`). A setting of a part that is off is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rllib_srl.setting_tables import setting, table_of

MODES = ("off", "bands", "softmax")
OBJECTIVES = ("uniform", "recap")
REHEARSED = ("failing", "forgotten")
ADAPTED = ("none", "revisit", "reuse", "both")


@dataclass(frozen=True)
class PlannerSettings:
    """Settings of the planner. Invariant: plain values only."""

    mode: str = setting("off", '"bands" (priority by accuracy band), "softmax" (of the failure rate) or "off"')
    acc_init: float = setting(0.5, "accuracy that a domain starts from, in [0, 1]")
    probe_first: bool = setting(False, "a domain's accuracy starts from a probe, made before it is first played")
    ema_rate: float = setting(0.05, "weight of a new group's pass rate in a domain's accuracy, in (0, 1]")
    band_bounds: tuple[float, float] = setting((0.4, 0.8), "accuracies at which the medium and high bands begin")
    band_weights: tuple[float, float, float] = setting((0.6, 0.3, 0.1), "priority of the low, medium and high band")
    item_bands: tuple[float, ...] | None = setting(
        (0.6, 0.3, 0.1), "share of a domain's revisits and reuses by band of the item's pass rate, or None"
    )
    staleness_coeff: float = setting(0.1, "priority of a domain that has not been played for staleness_horizon")
    staleness_horizon: int = setting(50, "iterations after which a domain is as stale as can be")
    uncertainty_coeff: float = setting(0.05, "priority of a domain of which nothing is known")
    temperature: float = setting(1.0, "bands: of the softmax over priorities, above 0")
    sharpness: float = setting(3.0, "softmax: share of a domain is exp(sharpness (1 - accuracy)), normalised")
    rehearse: str = setting("failing", 'softmax of what is stored: by "failing", or by "forgotten" (best - accuracy)')
    floor: float | None = setting(None, "share of each domain, at least; None: 0.02 with bands, 0.001 with softmax")
    single_every: int = setting(10, "every n-th iteration plays one domain alone; 0: never")
    objective: str = setting("uniform", '"recap" (loss of a domain weighted by its progress) or "uniform"')
    recap_window: int = setting(10, "W: two windows of W results of a domain are compared")
    recap_temperature: float = setting(5.0, "of the softmax over scores, above 0; at 5 weights stay near 1")
    recap_mix: float = setting(0.5, "weight of convergence in a score, the rest is instability, in [0, 1]")
    adapt: str = setting("none", '"revisit", "reuse" or "both": the fraction of replay that follows forgetting')
    fraction_bounds: tuple[float, float] = setting((0.05, 0.5), "lowest and highest fraction it may take")
    forgetting_threshold: float = setting(0.1, "mean forgetting above which the fraction rises; else it falls")
    adapt_rate: float = setting(0.1, "step of the fraction an iteration, as a share of its range, in (0, 1]")
    min_ess: float = setting(0.0, "effective sample size of reused tokens below which reuse falls; 0: off")
    plasticity_signal: str | None = setting(None, "learner metric that must settle before fractions rise")
    plasticity_every: int = setting(10, "iterations between two looks at that metric")
    plasticity_tolerance: float = setting(0.001, "change between two looks below which it has settled")
    probe_every: int = setting(0, "first gap between two probes of a domain's recall, in iterations; 0: no probes")
    probe_prompts: int = setting(16, "held-out prompts of a probe, apart from those of evaluation")
    probe_mastery: float = setting(0.5, "recall from which the next gap is longer, else it starts afresh, in [0, 1]")
    probe_growth: float = setting(1.5, "factor of the gap after a mastered probe, at least 1")

    @property
    def is_on(self) -> bool:
        """Say whether anything is planned at all."""
        parts = (self.mode != "off", self.objective != "uniform", self.adapt != "none", self.probe_every > 0)
        return any(parts)

    @property
    def adapted(self) -> tuple[str, ...]:
        """Return which of the fractions follow forgetting."""
        return {"none": (), "both": ("revisit", "reuse")}.get(self.adapt, (self.adapt,))

    @property
    def least_share(self) -> float:
        """Return the share that each domain gets at least."""
        if self.floor is not None:
            return self.floor
        return 0.02 if self.mode == "bands" else 0.001

    def faults(self, prefix: str = "") -> list[str]:
        """Return every fault as "name = value; expected ...", [] if there is none."""
        checks = (_numbers, _choices, _tuples) if not (lines := list(_types(self))) else ()
        lines += [line for check in checks for line in check(self)]
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
        ("band_weights", "staleness_coeff", "staleness_horizon", "uncertainty_coeff", "temperature"),
        (lambda s: s.mode == "bands", "mode = 'bands'"),
    ),
    **dict.fromkeys(("floor", "single_every", "item_bands"), (lambda s: s.mode != "off", "mode other than 'off'")),
    **dict.fromkeys(("sharpness", "rehearse"), (lambda s: s.mode == "softmax", "mode = 'softmax'")),
    **dict.fromkeys(
        ("probe_first", "ema_rate"), (lambda s: s.mode != "off" or s.adapt != "none", "mode or adapt switched on")
    ),
    "acc_init": (lambda s: s.mode != "off" and not s.probe_first, "mode other than 'off' and probe_first = False"),
    **dict.fromkeys(("band_bounds",), (lambda s: s.mode == "bands" or _has_item_bands(s), "bands to bound")),
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
    return settings.mode != "off" and settings.item_bands is not None


def _types(settings: PlannerSettings) -> Iterator[str]:
    for name, least in _INTEGERS.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            yield f"{name} = {value!r}; expected an integer of at least {least}"
    if not isinstance(settings.probe_first, bool):
        yield f"probe_first = {settings.probe_first!r}; expected True or False"
    if settings.plasticity_signal is not None and not isinstance(settings.plasticity_signal, str):
        yield f"plasticity_signal = {settings.plasticity_signal!r}; expected the name of a learner metric, or None"


def _numbers(settings: PlannerSettings) -> Iterator[str]:
    for name, (low, high, expected) in _WITHIN.items():
        value = getattr(settings, name)
        if value is None and expected.endswith("None"):
            continue
        if not _is_number(value) or not low <= value <= high:
            yield f"{name} = {value!r}; expected {expected}"


def _choices(settings: PlannerSettings) -> Iterator[str]:
    for name, allowed in _CHOICES.items():
        if getattr(settings, name) not in allowed:
            yield f"{name} = {getattr(settings, name)!r}; expected one of {', '.join(map(repr, allowed))}"


def _tuples(settings: PlannerSettings) -> Iterator[str]:
    for name in ("band_weights", "item_bands"):
        value = getattr(settings, name)
        is_none = name == "item_bands" and value is None
        if not is_none and (not _are_numbers(value, 3) or min(value) < 0 or sum(value) <= 0):
            yield f"{name} = {value!r}; expected three numbers of at least 0, not all 0"
    bounds = settings.band_bounds
    if not _are_numbers(bounds, 2) or not 0 < bounds[0] < bounds[1] <= 1:
        yield f"band_bounds = {bounds!r}; expected 0 < medium < high <= 1"
    fractions = settings.fraction_bounds
    if not _are_numbers(fractions, 2) or not 0 <= fractions[0] < fractions[1] < 1:
        yield f"fraction_bounds = {fractions!r}; expected 0 <= lowest < highest < 1"


def _idle(settings: PlannerSettings, prefix: str) -> Iterator[str]:
    """Yield the settings that were changed and would do nothing."""
    for name, (acts, needed) in _ACTS.items():
        default, _ = TABLE[name]
        if _plain(getattr(settings, name)) != _plain(default) and not acts(settings):
            yield f"{name} = {getattr(settings, name)!r}; expected {default!r} without {prefix}{needed}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _are_numbers(value: Any, num: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == num and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
