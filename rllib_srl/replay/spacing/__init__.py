"""Spacing: the rules that say when an item is due again.

    rule = make_spacing("fsrs", desired_retention=0.9)
    state = rule.review(SpacingState.new(2), grade_N, elapsed_N, trained_N)      days, vectorised
    recall_N = rule.retrievability(state, elapsed_N)

A user's own rule is one registered class: `SPACINGS["mine"] = Mine`, a subclass of `SpacingRule` or anything else
that is called with keywords and has its methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rllib_srl.replay.spacing.fsrs import FSRS
from rllib_srl.replay.spacing.rule import SpacingRule
from rllib_srl.replay.spacing.simple import Expanding, Fixed, Leitner, NoSpacing
from rllib_srl.replay.spacing.sm2 import SM2
from rllib_srl.replay.spacing.srl1 import SRL1
from rllib_srl.replay.spacing.state import SpacingState

__all__ = ["SPACINGS", "SpacingRule", "SpacingState", "make_spacing"]

SPACINGS: dict[str, Callable[..., SpacingRule]] = {
    rule.name: rule for rule in (FSRS, SM2, Leitner, Fixed, Expanding, SRL1, NoSpacing)
}


def make_spacing(name: str, desired_retention: float = 0.9, **parameters: Any) -> SpacingRule:
    """Build a spacing rule.

    Args:
        name: a key of `SPACINGS`.
        desired_retention: recall at which an item becomes due, in (0, 1).
        parameters: of the rule, by the names of its fields.

    Raises:
        ValueError: an unknown name or parameter, or values outside their range, all at once.
    """
    if name not in SPACINGS:
        raise ValueError(f"spacing = {name!r}; expected one of {sorted(SPACINGS)}")
    known = inspect.signature(SPACINGS[name]).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    if (unknown := sorted(set(parameters) - set(known))) and not takes_any:
        raise ValueError(f"spacing {name!r} has no parameters {unknown}; expected some of {sorted(known)}")
    return SPACINGS[name](desired_retention=desired_retention, **parameters)
