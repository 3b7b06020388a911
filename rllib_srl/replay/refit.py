"""A spacing rule refitted to what a run has seen, and an honest word on whether that helps.

log of reviews -> rule.fit -> rounded -> what it would have predicted, beside the rule as it was and a constant
                          \\-> twice, on half of the items each -> predictions for the items it did not see
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.calibration import Report, ReviewLog, report
from rllib_srl.replay.readings import Reading
from rllib_srl.replay.review_log import as_log
from rllib_srl.replay.spacing import SpacingRule, make_spacing
from rllib_srl.replay.spacing.fitting import predict

DECIMALS = 4  # of fitted parameters; no finer than any log can tell, and never written with an exponent


@dataclass(frozen=True)
class Refit:
    """What a fit found. Invariant: `fitted` has the rounded parameters, and `after` is of exactly these."""

    fitted: SpacingRule
    turned: dict[str, tuple[float, float]]  # parameter -> before and after
    before: Report  # what the rule would have predicted as it is set now
    after: Report  # what the fitted rule would have predicted, for the reviews it was fitted to
    held_out: Report | None  # each item predicted by a fit to the other half; None: too few reviews for that


def whole_log(readings: Sequence[Reading]) -> ReviewLog:
    """Return the reviews of all shards in the order in which they happened.

    Raises:
        ValueError: the shards count time differently.
    """
    scales = {reading.settings.iterations_per_day for reading in readings}
    if len(scales) > 1:
        raise ValueError(f"iterations_per_day = {sorted(scales)} in different shards; expected one")
    rows = np.concatenate([reading.reviews for reading in readings])
    return as_log(rows[np.argsort(rows["now"], kind="stable")], scales.pop())


def refit(rule: SpacingRule, log: ReviewLog, min_reviews: int) -> Refit:
    """Fit a rule to a log.

    Args:
        rule: as it is set now; the fit stays near it where the log says nothing.
        log: of all reviews.
        min_reviews: reviews after an item's first visit below which nothing is fitted.

    Raises:
        ValueError: too few reviews, or a rule without parameters to fit.
    """
    fitted = rounded(rule.fit(log, min_reviews))
    knobs, after = rule.knobs(), fitted.knobs()
    return Refit(
        fitted=fitted,
        turned={name: (knob.value, after[name].value) for name, knob in knobs.items()},
        before=report(predict(rule, log)),
        after=report(predict(fitted, log)),
        held_out=_held_out(rule, log, min_reviews),
    )


def rounded(rule: SpacingRule) -> SpacingRule:
    """Return a rule whose fitted parameters have `DECIMALS` decimals, and are still within their bounds."""
    values = {n: min(k.high, max(k.low, round(float(k.value), DECIMALS))) for n, k in rule.knobs().items()}
    return rule.turned(values)


def config_of(rule: SpacingRule) -> dict[str, Any]:
    """Return the `spacing_config` that makes this rule, in JSON types; the desired retention is a setting beside it."""
    usual = make_spacing(rule.name).parameters()
    given = {n: v for n, v in rule.parameters().items() if n != "desired_retention" and v != usual[n]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _held_out(rule: SpacingRule, log: ReviewLog, min_reviews: int) -> Report | None:
    keys_K = np.unique(log.key)  # in the order of a hash: every other one is a random half
    is_even_N = np.isin(log.key, keys_K[::2])
    logs = []
    for is_seen_N in (is_even_N, ~is_even_N):
        try:
            fitted = rounded(rule.fit(log[is_seen_N], min_reviews))
        except ValueError:
            return None
        logs.append(predict(fitted, log[~is_seen_N]).to_arrays())
    return report(ReviewLog.from_arrays({name: np.concatenate([one[name] for one in logs]) for name in logs[0]}))
