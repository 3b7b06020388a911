"""Spacing rules: compute when an item is due again.

    rule = make_spacing("fsrs", desired_retention=0.9)
    state = rule.review(SpacingState.new(2), grade_N, elapsed_N)      days, vectorised
    recall_N = rule.retrievability(state, elapsed_N)

A user-defined rule is one registered class: `SPACINGS["mine"] = Mine`, a subclass of `SpacingRule` or any callable
that takes keyword arguments and returns an object with its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rllib_srl.common.rules import Rules
from rllib_srl.replay.schedule.spacing.fsrs import FSRS
from rllib_srl.replay.schedule.spacing.rule import SpacingRule, SpacingState
from rllib_srl.replay.schedule.spacing.simple import SM2, Expanding, Fixed, Leitner, NoSpacing

__all__ = ["SPACINGS", "NoSpacing", "SpacingRule", "SpacingState", "make_spacing"]

_OWN: dict[str, Callable[..., SpacingRule]] = {
    rule.name: rule for rule in (FSRS, SM2, Leitner, Fixed, Expanding, NoSpacing)
}
SPACINGS: Rules[Callable[..., SpacingRule]] = Rules("spacing", _OWN)


def make_spacing(name: str, desired_retention: float = 0.9, **parameters: Any) -> SpacingRule:
    """Build a spacing rule.

    Args:
        name: a key of `SPACINGS` or an import path.
        desired_retention: recall at which an item becomes due, in (0, 1).
        parameters: of the rule, by field name.

    Raises:
        ValueError: an unknown name, unknown parameters, or values outside their ranges.
    """
    rule = SPACINGS.named(name)
    known = inspect.signature(rule).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    if (unknown := sorted(set(parameters) - set(known))) and not takes_any:
        raise ValueError(f"spacing {name!r} has no parameters {unknown}; expected some of {sorted(known)}")
    return rule(desired_retention=desired_retention, **parameters)
