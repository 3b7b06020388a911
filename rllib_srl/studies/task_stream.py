"""Measures of the stream protocol: tasks one after another, in several orders, each learner paired by order and seed.

    one study per order of the tasks; its arms are the learners
      order_0   compare, registers, lookup     seed 1: memory, no_memory      seed 2: ...
      order_1   lookup, compare, registers     the same seeds
      ...

Of a trial (an arm with a seed in an order), A being the mean accuracy over the tasks on held-out prompts:

    online accuracy      mean over tasks of the share of right answers to prompts at their first play (`online.py`)
    final accuracy       A after the last task
    forgetting           how far earlier tasks fell from their best (`accuracy.forgetting`)
    step efficiency      (A at the end - A before training) / generated tokens x 1000, and / iterations

Of an arm with a seed over the orders, a_or = final accuracy of task o in order r:

    order disparity      mean over tasks of max_r a_or - min_r a_or        (AOPD)
    worst disparity      max over tasks of the same                        (MOPD)

A disparity is not 0 for a learner that ignores the order: evaluations are noisy, and more orders widen the range. It
compares arms on the same orders and prompts.

Source of the disparities: Yoon et al. 2020, arXiv 1902.09432, section 4 (order-normalised performance disparity).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from rllib_srl.studies import accuracy
from rllib_srl.studies.contrasts import curves_of
from rllib_srl.studies.curves import Curve
from rllib_srl.studies.online import ONLINE_ACCURACY
from rllib_srl.studies.results import Results
from rllib_srl.studies.seeds import Interval, bootstrap_interval, paired_test

FORMAT = "rllib_srl.stream/1"
OF_TRIAL = {  # measure of a trial -> title
    "online_accuracy": "online accuracy",
    "final_accuracy": "final accuracy",
    "forgetting": "forgetting",
    "gain_per_1000_tokens": "gain per 1,000 tokens",
    "gain_per_iteration": "gain per iteration",
}
OF_ORDERS = {"order_disparity": "order disparity", "worst_disparity": "worst disparity"}
TITLES = OF_TRIAL | OF_ORDERS
MOST_LISTED = 7  # tasks up to which all orders are listed to draw from


@dataclass(frozen=True)
class Trial:
    """One arm with one seed in one order of the tasks."""

    order: int
    arm: str
    seed: int
    measures: dict[str, float]  # by the names of `OF_TRIAL`
    final_of: dict[str, float]  # task -> final accuracy
    online_of: dict[str, float]  # task -> online accuracy; a task without a first play is missing


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval over trials or seeds; NaN if unknown."""

    mean: float
    interval: Interval
    num: int
    p: float = math.nan  # of a paired difference: two-sided, by exact sign flips, not corrected


def orders_of(tasks: Sequence[str], num_orders: int, seed: int) -> list[tuple[int, ...]]:
    """Return distinct orders of the tasks, as positions: the given one first, the others drawn by `seed`.

    Raises:
        ValueError: there are not as many.
    """
    num = len(tasks)
    if not 1 <= num_orders <= math.factorial(num):
        raise ValueError(f"orders = {num_orders}; expected 1 to {math.factorial(num)}, the orders of {num} tasks")
    draw = np.random.default_rng(np.random.SeedSequence([seed, sum(b"orders")]))
    if num <= MOST_LISTED:
        listed = list(permutations(range(num)))[1:]
        return [tuple(range(num)), *(listed[at] for at in draw.permutation(len(listed))[: num_orders - 1])]
    found = {tuple(range(num)): None}
    while len(found) < num_orders:
        found[tuple(draw.permutation(num).tolist())] = None
    return list(found)


def trials_of(order: int, results: Results) -> list[Trial]:
    """Return the finished trials of one order.

    Raises:
        ValueError: a trial lacks the evaluation of a stage.
    """
    curves = curves_of(results)
    tasks = [domain.name for domain in results.study.domains]
    found = []
    for arm, of_seed in curves.items():
        rows = {trial.header.seed: trial.rows[-len(tasks) :] for trial in results.of(arm)}
        for seed, curve in of_seed.items():
            online_of = {r.domain: r.measures[ONLINE_ACCURACY] for r in rows[seed] if ONLINE_ACCURACY in r.measures}
            final_of = dict(zip(tasks, curve.accuracy_SC[-1].tolist(), strict=True))
            found.append(Trial(order, arm, seed, measures_of(curve, online_of), final_of, online_of))
    return found


def measures_of(curve: Curve, online_of: Mapping[str, float]) -> dict[str, float]:
    """Return the measures of a trial by the names of `OF_TRIAL`; NaN if unknown.

    Args:
        curve: of the trial.
        online_of: online accuracy of each task.
    """
    average_I = curve.average_I()
    gain = float(average_I[-1] - average_I[0]) if curve.stage_I[0] < 0 else math.nan
    return {
        "online_accuracy": float(np.mean(list(online_of.values()))) if online_of else math.nan,
        "final_accuracy": float(average_I[-1]),
        "forgetting": accuracy.forgetting(curve.accuracy_SC, curve.learned_at_C),
        "gain_per_1000_tokens": gain / max(1.0, float(curve.num_generated_tokens_I[-1])) * 1000,
        "gain_per_iteration": gain / max(1.0, float(curve.iteration_I[-1])),
    }


def disparities(trials: Sequence[Trial]) -> dict[str, float]:
    """Return the disparities by the names of `OF_ORDERS`: of one arm with one seed, a trial per order; NaN for one."""
    if len(trials) < 2:
        return dict.fromkeys(OF_ORDERS, math.nan)
    final_RT = np.array([[trial.final_of[task] for task in sorted(trial.final_of)] for trial in trials])
    spread_T = final_RT.max(axis=0) - final_RT.min(axis=0)
    return {"order_disparity": float(spread_T.mean()), "worst_disparity": float(spread_T.max())}


@dataclass(frozen=True)
class StreamResults:
    """The trials of all orders. Invariant: all orders have the same tasks, arms and seeds."""

    tasks: tuple[str, ...]  # in the given order
    orders: tuple[tuple[str, ...], ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, orders: Sequence[Results]) -> StreamResults:
        """Collect the results of the orders, the given one first."""
        named = [tuple(domain.name for domain in results.study.domains) for results in orders]
        first = orders[0].study
        trials = [trial for number, results in enumerate(orders) for trial in trials_of(number, results)]
        return cls(named[0], tuple(named), tuple(arm.name for arm in first.arms), first.seeds, tuple(trials))

    def values(self, arm: str, measure: str) -> dict[tuple[int, ...], float]:
        """Return a measure of an arm: by (order, seed), a disparity by (seed,); NaN ones are left out."""
        own = [trial for trial in self.trials if trial.arm == arm]
        found: dict[tuple[int, ...], float]
        if measure in OF_TRIAL:
            found = {(trial.order, trial.seed): trial.measures[measure] for trial in own}
        else:
            of_seed = {seed: [trial for trial in own if trial.seed == seed] for seed in self.seeds}
            whole = {seed: found for seed, found in of_seed.items() if len(found) == len(self.orders)}
            found = {(seed,): disparities(trials)[measure] for seed, trials in whole.items()}
        return {key: value for key, value in found.items() if not math.isnan(value)}

    def estimate(self, arm: str, measure: str) -> Estimate:
        """Return the mean of a measure of an arm with its interval."""
        values = list(self.values(arm, measure).values())
        return Estimate(_mean(values), bootstrap_interval(np.array(values)), len(values))

    def difference(self, first: str, second: str, measure: str) -> Estimate:
        """Return the mean of `first` minus `second`, paired by order and seed, with its interval and p value."""
        one, other = self.values(first, measure), self.values(second, measure)
        gaps = np.array([one[key] - other[key] for key in one if key in other])
        p = paired_test(gaps).p if len(gaps) else math.nan
        return Estimate(_mean(gaps.tolist()), bootstrap_interval(gaps), len(gaps), p)

    def as_json(self) -> dict[str, Any]:
        """Return everything in JSON types; unknown numbers are null."""
        first, *others = self.arms
        return {
            "format": FORMAT,
            "tasks": list(self.tasks),
            "orders": [list(order) for order in self.orders],
            "seeds": list(self.seeds),
            "arms": {arm: {name: _json_of(self.estimate(arm, name)) for name in TITLES} for arm in self.arms},
            "differences": {
                f"{first} - {other}": {name: _json_of(self.difference(first, other, name)) for name in TITLES}
                for other in others
            },
            "trials": [
                {
                    "order": trial.order, "arm": trial.arm, "seed": trial.seed,
                    "measures": {name: known(value) for name, value in trial.measures.items()},
                    "final_accuracy_of": trial.final_of, "online_accuracy_of": trial.online_of,
                }
                for trial in self.trials
            ],
        }  # fmt: skip


def known(value: float) -> float | None:
    """Return a number, None for NaN."""
    return None if math.isnan(value) else value


def _json_of(found: Estimate) -> dict[str, float | None]:
    figures = {"mean": known(found.mean), "low": known(found.interval.low), "high": known(found.interval.high)}
    return {**figures, "num": found.num, **({} if math.isnan(found.p) else {"p": found.p})}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
