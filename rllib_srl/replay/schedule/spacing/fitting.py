"""Fits a rule's parameters to the review log: coordinate search on the log loss of predicted recall.

    log -> Histories (visits of each item, position by position) -> predict(rule) -> loss -> coordinate search

Only the rule's `review` and `retrievability` are called, so a user-defined rule is fitted like any other. The loss is
the sum over episodes of the cross-entropy, plus a Gaussian prior ((u - u_start) / width)^2 / 2 for each parameter
(`Knob`), u its (log) value. Parameters that the log does not determine stay at their start.

Each sweep runs a golden-section search along every parameter in turn; the fit ends when a sweep gains less than
`TOLERANCE` nats. A fit of FSRS to 10 000 reviews takes seconds.

Source: Kiefer 1953, Proc. AMS 4, "Sequential minimax search for a maximum".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rllib_srl.replay.schedule.calibration import ReviewLog, cross_entropy_N
from rllib_srl.replay.schedule.spacing.state import SpacingState

if TYPE_CHECKING:
    from rllib_srl.replay.schedule.spacing.rule import SpacingRule

Rule = TypeVar("Rule", bound="SpacingRule")

GOLDEN = (math.sqrt(5) - 1) / 2
NUM_CUTS = 14  # steps of a golden-section search, which shrink the bracket to 0.1 % of its width
MAX_SWEEPS = 8
TOLERANCE = 0.01  # nats over the whole log


@dataclass(frozen=True)
class Knob:
    """A parameter that `fit` may change. Invariant: low <= value <= high; low > 0 if its logarithm is searched."""

    value: float
    low: float
    high: float
    is_log: bool = True
    width: float = 1.0  # standard deviation of the prior on the (log) value

    def to_u(self, value: float) -> float:
        """Return the search coordinate of a value."""
        return math.log(value) if self.is_log else value

    def from_u(self, u: float) -> float:
        """Return the value at a coordinate, within the bounds."""
        return min(self.high, max(self.low, math.exp(u) if self.is_log else u))


class Histories:
    """The visits of a log, item by item, from each item's first visit on.

    Invariant: `rows[t]` are the log's rows of the t-th visits of all histories longer than t, longest history first.
    Items whose first visit is not in the log are left out, because their state is unknown.
    """

    def __init__(self, log: ReviewLog) -> None:
        """Sort the visits; an item that was evicted and added again starts a second history."""
        order_N = np.lexsort((log.now, log.key))  # stable: visits of one iteration keep their order
        key_N, is_first_N = log.key[order_N], np.isnan(log.predicted[order_N])
        starts_N = is_first_N | np.concatenate([[True], key_N[1:] != key_N[:-1]])[: len(key_N)]
        start_H = np.flatnonzero(starts_N)
        length_H = np.diff(np.append(start_H, len(key_N)))
        start_H, length_H = start_H[is_first_N[start_H]], length_H[is_first_N[start_H]]
        longest_H = np.argsort(-length_H, kind="stable")
        start_H, length_H = start_H[longest_H], length_H[longest_H]
        self.num_items = len(start_H)
        self.rows: list[np.ndarray] = []  # of the log, step by step
        for t in range(int(length_H.max(initial=0))):
            self.rows.append(order_N[start_H[: np.count_nonzero(length_H > t)] + t])
        self.num_reviews = sum(len(rows) for rows in self.rows[1:])

    def predict(self, rule: SpacingRule, log: ReviewLog) -> np.ndarray:
        """Return the recall that `rule` predicts for each visit; nan for first visits and unknown histories."""
        predicted_N = np.full(len(log), np.nan)
        for t, (rows, state, _) in enumerate(self._replayed(rule, log)):
            if t:
                predicted_N[rows] = rule.retrievability(state, log.elapsed_days[rows])
        return predicted_N

    def states(self, rule: SpacingRule, log: ReviewLog) -> tuple[np.ndarray, np.ndarray, SpacingState]:
        """Return keys, iterations of the last visit and states after it, one row for each item's newest history."""
        last_H, columns = np.zeros(self.num_items, np.int64), SpacingState.new(self.num_items).columns()
        for rows, _, after in self._replayed(rule, log):
            last_H[: len(rows)] = rows
            for name, column in after.columns().items():
                columns[name][: len(rows)] = column
        order_H = np.argsort(log.now[last_H], kind="stable")
        _, newest_K = np.unique(log.key[last_H][order_H][::-1], return_index=True)
        at_K = order_H[::-1][newest_K]
        return log.key[last_H][at_K], log.now[last_H][at_K], SpacingState.of(columns)[at_K]

    def _replayed(self, rule: SpacingRule, log: ReviewLog) -> Iterator[tuple[np.ndarray, SpacingState, SpacingState]]:
        """Yield the rows of each visit, and the states of their items before and after it."""
        state = SpacingState.new(self.num_items)
        for rows in self.rows:
            before = state[: len(rows)]
            state = rule.review(before, log.grade[rows], log.elapsed_days[rows], log.trained[rows])
            yield rows, before, state


def predict(rule: SpacingRule, log: ReviewLog) -> ReviewLog:
    """Return the log with the predictions of `rule`, for `calibration.report`.

    Visits of items whose first visit is not in the log are left out.
    """
    histories = Histories(log)
    known = np.sort(np.concatenate([np.zeros(0, np.int64), *histories.rows]))
    arrays = {**log.to_arrays(), "predicted": histories.predict(rule, log)}
    return ReviewLog.from_arrays({name: column[known] for name, column in arrays.items()})


def fit(rule: Rule, log: ReviewLog, min_reviews: int) -> Rule:
    """Return a copy of `rule` with fitted parameters; see `SpacingRule.fit` for the contract.

    Raises:
        ValueError: too few reviews, or no parameter to fit.
    """
    histories = Histories(log)
    if histories.num_reviews < min_reviews:
        raise ValueError(
            f"the review log has {histories.num_reviews} reviews that follow an item's first visit; "
            f"expected at least {min_reviews}"
        )
    knobs = rule.knobs()
    if not knobs:
        raise ValueError(f"spacing {rule.name!r} has no parameter to fit")
    known = np.sort(np.concatenate(histories.rows[1:]))

    def turned(u: np.ndarray) -> Rule:
        return rule.turned({name: knob.from_u(x) for (name, knob), x in zip(knobs.items(), u)})

    start = np.array([knob.to_u(knob.value) for knob in knobs.values()])
    width = np.array([knob.width for knob in knobs.values()])

    def loss(u: np.ndarray) -> float:
        predicted_N = histories.predict(turned(u), log)[known]
        nats = cross_entropy_N(predicted_N, log.num_success[known], log.n[known]).sum()
        return float(nats + (((u - start) / width) ** 2).sum() / 2)

    low = np.array([knob.to_u(knob.low) for knob in knobs.values()])
    high = np.array([knob.to_u(knob.high) for knob in knobs.values()])
    return turned(minimise(loss, start, low, high, width))


def minimise(
    loss: Callable[[np.ndarray], float], start: np.ndarray, low: np.ndarray, high: np.ndarray, width: np.ndarray
) -> np.ndarray:
    """Minimise by sweeps of line searches within the bounds; the loss at the result is at most that of `start`.

    Args:
        width: scale of each coordinate; the first sweep searches 2 widths in both directions.
    """
    point, best, reach = start.copy(), loss(start), 2.0
    for _ in range(MAX_SWEEPS):
        loss_before = best
        for line in np.diag(width):
            point, best = _line_search(loss, point, best, line * reach, low, high)
        if loss_before - best < TOLERANCE:
            break
        reach = max(reach / 2, 0.25)
    return point


def _line_search(
    loss: Callable[[np.ndarray], float],
    point: np.ndarray,
    best: float,
    line: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Return the better of `point` and the golden-section minimum between point - line and point + line."""

    def at(s: float) -> np.ndarray:
        return np.clip(point + s * line, low, high)

    a, b = -1.0, 1.0
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    loss_c, loss_d = loss(at(c)), loss(at(d))
    for _ in range(NUM_CUTS):
        if loss_c < loss_d:
            b, d, loss_d = d, c, loss_c
            c = b - GOLDEN * (b - a)
            loss_c = loss(at(c))
        else:
            a, c, loss_c = c, d, loss_d
            d = a + GOLDEN * (b - a)
            loss_d = loss(at(d))
    s, found = (c, loss_c) if loss_c < loss_d else (d, loss_d)
    return (at(s), found) if found < best else (point, best)
