"""Corrects predicted recall in a run, from the reviews so far: a logistic line, and the rule's own parameters.

    reviews --every `recalibrate_every` iterations--> intercept a, slope b:  p' = sigmoid(a + b logit p), p of the rule
            --every `refit_every` iterations--------> parameters of the rule (spacing/fitting.py)

Both are fitted before the visits of an iteration are graded, so a prediction in the review log was always made with
parameters fitted to earlier reviews only. The fits use the newest `RECENT` reviews of `review_log.py`, of items whose
first visit is among these, and predictions that are made anew with the rule in use. The prior of a refit is centred at
the rule as set, not at the last fit, so that no review counts twice. A line takes milliseconds, a refit of FSRS a few
seconds of one core.

What a correction changes:
    predicted recall    at once, for all items
    intervals           a line: from an item's next review on, so that p' is the desired retention when it is due
                        a refit: at once; states are recomputed where the whole history is in the log

Sources: Cox 1958, Biometrika 45, "Two further applications of a model for binary regression" (the line); Platt 1999,
"Probabilistic outputs for support vector machines"; Ye et al., FSRS optimiser, github.com/open-spaced-repetition
(refits from the log of reviews, and recomputes states). The prior on the line is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.replay.schedule.calibration import SURE, ReviewLog, cross_entropy_N
from rllib_srl.replay.schedule.spacing import SpacingRule, SpacingState, make_spacing
from rllib_srl.replay.schedule.spacing.fitting import Histories
from rllib_srl.replay.settings import ReplaySettings

MIN_RECALIBRATED, MIN_REFITTED = 16, 32  # fewest reviews with a prediction for a line, and for a refit
MAX_VISITS = 32  # of an item that a refit reads, from its first: its time grows with the longest history
PRIOR_WIDTH = 1.0  # standard deviation of the prior on intercept (around 0) and slope (around 1)
LOWEST_SLOPE = 0.05  # keeps the order of predictions, and intervals finite
RETENTIONS = (0.01, 0.999)  # range of the rule's recall at which an item may become due
NEWTON_STEPS = 25


def _logit(p_N: np.ndarray) -> np.ndarray:
    p_N = np.clip(p_N, SURE, 1 - SURE)
    x_N: np.ndarray = np.log(p_N) - np.log1p(-p_N)
    return x_N


def _sigmoid(x_N: np.ndarray) -> np.ndarray:
    p_N: np.ndarray = 1 / (1 + np.exp(-np.clip(x_N, -500, 500)))
    return p_N


@dataclass(frozen=True)
class Line:
    """p' = sigmoid(intercept + slope logit p). Invariant: slope > 0, so the order of predictions stays."""

    intercept: float = 0.0
    slope: float = 1.0

    def __call__(self, recall_N: np.ndarray) -> np.ndarray:
        """Return corrected predictions; with the identity the predictions themselves."""
        return recall_N if self == Line() else _sigmoid(self.intercept + self.slope * _logit(recall_N))

    def inverse(self, recall: float) -> float:
        """Return the prediction that the line maps to `recall`, within `RETENTIONS`."""
        if self == Line():
            return recall
        x = (math.log(recall / (1 - recall)) - self.intercept) / self.slope
        return min(max(float(_sigmoid(np.array(x))), RETENTIONS[0]), RETENTIONS[1])

    @classmethod
    def fitted(cls, predicted_N: np.ndarray, num_success_N: np.ndarray, n_N: np.ndarray) -> Line:
        """Return the line of least log loss over all episodes, under the prior.

        Minimises -sum [s log p' + (n - s) log(1 - p')] + (a^2 + (b - 1)^2) / (2 width^2), by Newton's method.

        Args:
            predicted_N: recall, in [0, 1].
            num_success_N: successes of each visit.
            n_N: episodes of each visit.
        """
        columns = (_logit(predicted_N), np.asarray(num_success_N, float), np.asarray(n_N, float))
        a, b = _minimum(*columns, np.array([0.0, 1.0]), np.array([True, True]))
        if b < LOWEST_SLOPE:
            a, b = _minimum(*columns, np.array([0.0, LOWEST_SLOPE]), np.array([True, False]))
        return cls(float(a), float(b))


def _minimum(
    x_N: np.ndarray, success_N: np.ndarray, n_N: np.ndarray, start: np.ndarray, is_free: np.ndarray
) -> np.ndarray:
    """Return intercept and slope of least loss; those that are not free stay at `start`. The loss is convex."""
    centre, design_N2 = np.array([0.0, 1.0]), np.stack([np.ones_like(x_N), x_N], axis=1)

    def loss(point: np.ndarray) -> float:
        nats = cross_entropy_N(_sigmoid(design_N2 @ point), success_N, n_N).sum()
        return float(nats + ((point - centre) ** 2).sum() / (2 * PRIOR_WIDTH**2))

    point, best = start, loss(start)
    for _ in range(NEWTON_STEPS):
        p_N = _sigmoid(design_N2 @ point)
        slope = design_N2.T @ (n_N * p_N - success_N) + (point - centre) / PRIOR_WIDTH**2
        curvature = (design_N2.T * (n_N * p_N * (1 - p_N))) @ design_N2 + np.eye(2) / PRIOR_WIDTH**2
        step = np.zeros(2)
        step[is_free] = np.linalg.solve(curvature[np.ix_(is_free, is_free)], slope[is_free])
        while (found := loss(point - step)) > best and np.abs(step).max() > 1e-9:
            step = step / 2
        if found > best or best - found < 1e-9:
            break
        point, best = point - step, found
    return point


class Fits(NamedTuple):
    """What was fitted, and the histories of the log."""

    is_refitted: bool
    is_recalibrated: bool
    histories: Histories


class Correction:
    """The spacing rule in use and the line over its predictions.

    Invariant: with `refit_every` 0 the rule is as set; with `recalibrate_every` 0 the line is the identity.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        """Start with the rule as set and the identity."""
        self._settings = settings
        self._fitted: dict[str, float] = {}  # parameters of the rule in use by name (`SpacingRule.knobs`); {}: as set
        self._refitted_at = self._recalibrated_at = 0  # iterations
        self.line = Line()
        self._build()

    @property
    def is_on(self) -> bool:
        """Return whether anything is ever corrected."""
        return self._settings.refit_every > 0 or self._settings.recalibrate_every > 0

    def recall(self, state: SpacingState, elapsed_N: np.ndarray) -> np.ndarray:
        """Return corrected recall after `elapsed_N` days, in [0, 1]; 0 for items never reviewed."""
        recall_N = self.rule.retrievability(state, elapsed_N)
        return recall_N if self.line == Line() else np.where(state.reps_N > 0, self.line(recall_N), 0.0)

    def interval_of(self, state: SpacingState) -> np.ndarray:
        """Return the days after which corrected recall has fallen to the desired retention; the rule's own if alike."""
        return state.interval_N if self.line == Line() else self._scheduler.interval_of(state.stability_N)

    def is_due(self, now: int) -> bool:
        """Return whether a fit is due, so that the log is needed."""
        return self._is_refit_due(now) or self._is_line_due(now)

    def fit(self, log: ReviewLog, now: int) -> Fits:
        """Refit the rule and fit the line, each if its iterations have passed; a refit renews the line as well.

        With too few reviews nothing is fitted, and the next call tries again.

        Args:
            log: reviews so far.
            now: the training iteration.
        """
        histories = Histories(log)
        is_refitted = self._is_refit_due(now) and histories.num_reviews >= MIN_REFITTED
        if is_refitted:
            as_set = self._built(self._settings.desired_retention, {})
            early = np.sort(np.concatenate(histories.rows[:MAX_VISITS]))
            knobs = as_set.fit(log[early], 1).knobs()
            self._fitted = {name: float(knob.value) for name, knob in knobs.items()}
            self._refitted_at = now
            self._build()
        is_line_due = self._is_line_due(now) or (is_refitted and self._settings.recalibrate_every > 0)
        is_recalibrated = is_line_due and histories.num_reviews >= MIN_RECALIBRATED
        if is_recalibrated:
            predicted_N = histories.predict(self.rule, log)
            is_known_N = ~np.isnan(predicted_N)
            self.line = Line.fitted(predicted_N[is_known_N], log.num_success[is_known_N], log.n[is_known_N])
            self._recalibrated_at = now
            self._build()
        return Fits(is_refitted, is_recalibrated, histories)

    def get_state(self) -> dict[str, Any]:
        """Return the parameters and the iterations of the fits, as JSON types."""
        return {
            "spacing": str(self._settings.spacing),
            "fitted": dict(self._fitted),
            "line": [self.line.intercept, self.line.slope],
            "at": [self._refitted_at, self._recalibrated_at],
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `get_state`; parts that the settings do not use, or of another rule, start anew."""
        self._fitted, self.line, self._refitted_at, self._recalibrated_at = {}, Line(), 0, 0
        if state and state["spacing"] == str(self._settings.spacing):
            if self._settings.refit_every:
                self._fitted, self._refitted_at = dict(state["fitted"]), int(state["at"][0])
            if self._settings.recalibrate_every:
                self.line, self._recalibrated_at = Line(*map(float, state["line"])), int(state["at"][1])
        self._build()

    def _is_refit_due(self, now: int) -> bool:
        return 0 < self._settings.refit_every <= now - self._refitted_at

    def _is_line_due(self, now: int) -> bool:
        return 0 < self._settings.recalibrate_every <= now - self._recalibrated_at

    def _build(self) -> None:
        """Build the rule in use, and the one that sets intervals: due when corrected recall is the desired one."""
        retention = self._settings.desired_retention
        self.rule = self._built(retention, self._fitted)
        self._scheduler = self._built(self.line.inverse(retention), self._fitted)

    def _built(self, retention: float, values: Mapping[str, float]) -> SpacingRule:
        rule = make_spacing(self._settings.spacing, retention, **self._settings.spacing_config)
        return rule.turned(values) if values else rule
