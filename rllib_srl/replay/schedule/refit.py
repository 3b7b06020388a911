"""Refits a spacing rule to a run's review log, and reports whether the fit improves held-out predictions.

    log of reviews -> rule.fit -> rounded -> its predictions, compared with the current rule's and a constant
                          \\-> twice, on half of the items each -> predictions for the other half (held out)

The held-out report is a two-fold cross-validation over items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.journal.reader import Reading
from rllib_srl.replay.schedule.calibration import Report, ReviewLog, report
from rllib_srl.replay.schedule.review_log import as_log
from rllib_srl.replay.schedule.spacing import SpacingRule, make_spacing
from rllib_srl.replay.schedule.spacing.fitting import predict

DECIMALS = 4  # of fitted parameters: finer digits are below what a log can determine; avoids exponent notation


@dataclass(frozen=True)
class Refit:
    """Result of a fit. Invariant: `fitted` has the rounded parameters, and `after` is computed with these."""

    fitted: SpacingRule
    turned: dict[str, tuple[float, float]]  # parameter -> before and after
    before: Report  # of the current parameters
    after: Report  # of the fitted parameters, in sample
    held_out: Report | None  # two-fold cross-validation over items; None: too few reviews


def whole_log(reading: Reading) -> ReviewLog:
    """Return the reviews of a memory in chronological order."""
    rows = reading.reviews
    return as_log(rows[np.argsort(rows["now"], kind="stable")], reading.settings.iterations_per_day)


def refit(rule: SpacingRule, log: ReviewLog, min_reviews: int) -> Refit:
    """Fit a rule to a log.

    Args:
        rule: with its current parameters, which are also the centre of the prior.
        log: of all reviews.
        min_reviews: lowest number of reviews after the items' first visits.

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
    """Return the rule with its fitted parameters rounded to `DECIMALS` decimals and clipped to their bounds."""
    values = {n: min(k.high, max(k.low, round(float(k.value), DECIMALS))) for n, k in rule.knobs().items()}
    return rule.turned(values)


def config_of(rule: SpacingRule) -> dict[str, Any]:
    """Return the `spacing_config` of this rule, in JSON types; the desired retention is a separate setting."""
    usual = make_spacing(rule.name).parameters()
    given = {n: v for n, v in rule.parameters().items() if n != "desired_retention" and v != usual[n]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _held_out(rule: SpacingRule, log: ReviewLog, min_reviews: int) -> Report | None:
    keys_K = np.unique(log.key)  # sorted by hash, so every other key is a random half
    is_even_N = np.isin(log.key, keys_K[::2])
    logs = []
    for is_seen_N in (is_even_N, ~is_even_N):
        try:
            fitted = rounded(rule.fit(log[is_seen_N], min_reviews))
        except ValueError:
            return None
        logs.append(predict(fitted, log[~is_seen_N]).to_arrays())
    return report(ReviewLog.from_arrays({name: np.concatenate([one[name] for one in logs]) for name in logs[0]}))
