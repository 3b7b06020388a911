"""Measures of the stream protocol by hand: orders, disparities, step efficiency, paired differences."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rllib_srl.studies.curves import Curve
from rllib_srl.studies.task_stream import OF_TRIAL, StreamResults, Trial, disparities, measures_of, orders_of


def trial(order: int, arm: str, seed: int, **final: float) -> Trial:
    mean = float(np.mean(list(final.values())))
    measures = {**dict.fromkeys(OF_TRIAL, math.nan), "online_accuracy": mean / 2, "final_accuracy": mean}
    return Trial(order, arm, seed, measures, final, dict(final))


def curve(accuracy_IC: list[list[float]], tokens: list[int], iterations: list[int]) -> Curve:
    counts = np.array(tokens)
    zeros = np.zeros(len(tokens))
    stage_I = np.arange(len(tokens)) - 1
    return Curve(
        np.array(accuracy_IC), stage_I, np.array(iterations), counts,
        counts, zeros, zeros, zeros, 0, np.arange(len(accuracy_IC[0])), counts, {},
    )  # fmt: skip


def test_the_first_order_is_the_given_one_and_the_others_are_drawn_without_repeats() -> None:
    orders = orders_of(["a", "b", "c"], 6, 1)
    assert orders[0] == (0, 1, 2) and len(set(orders)) == 6
    assert orders_of(["a", "b", "c"], 3, 1) == orders[:3] != orders_of(["a", "b", "c"], 3, 2)
    many = orders_of([str(number) for number in range(12)], 5, 1)  # too many to list
    assert len(set(many)) == 5 and many[0] == tuple(range(12)) and sorted(many[4]) == list(range(12))
    with pytest.raises(ValueError, match="orders = 7; expected 1 to 6, the orders of 3 tasks"):
        orders_of(["a", "b", "c"], 7, 1)


def test_measures_of_a_trial_by_hand() -> None:
    found = measures_of(curve([[0.2, 0.0], [0.8, 0.2], [0.5, 0.7]], [0, 900, 2000], [0, 5, 10]), {"x": 0.4, "y": 0.6})
    assert found["online_accuracy"] == pytest.approx(0.5)
    assert found["final_accuracy"] == pytest.approx(0.6)
    assert found["forgetting"] == pytest.approx(0.3)  # .8 -> .5 of the first task
    assert found["gain_per_1000_tokens"] == pytest.approx((0.6 - 0.1) / 2)
    assert found["gain_per_iteration"] == pytest.approx((0.6 - 0.1) / 10)


def test_disparities_are_ranges_over_orders() -> None:
    finals = [(0.9, 0.5), (0.6, 0.5), (0.7, 0.4)]
    found = disparities([trial(order, "a", 1, x=x, y=y) for order, (x, y) in enumerate(finals)])
    assert found == {"order_disparity": pytest.approx((0.3 + 0.1) / 2), "worst_disparity": pytest.approx(0.3)}
    assert all(map(math.isnan, disparities([trial(0, "a", 1, x=1.0, y=0.5)]).values()))


def test_differences_are_paired_by_order_and_seed_and_unfinished_trials_are_left_out() -> None:
    trials = [
        trial(0, "memory", 1, x=0.9, y=0.7), trial(0, "no_memory", 1, x=0.5, y=0.7),
        trial(1, "memory", 1, x=0.7, y=0.7), trial(1, "no_memory", 1, x=0.3, y=0.7),
        trial(0, "memory", 2, x=0.1, y=0.1),  # its pair is missing
    ]  # fmt: skip
    results = StreamResults(("x", "y"), (("x", "y"), ("y", "x")), ("memory", "no_memory"), (1, 2), tuple(trials))
    gap = results.difference("memory", "no_memory", "final_accuracy")
    assert (gap.num, gap.mean, gap.p) == (2, pytest.approx(0.2), 0.5)
    assert results.estimate("memory", "final_accuracy").num == 3
    spread = results.difference("memory", "no_memory", "worst_disparity")  # .2 and .2, of seed 1 alone
    assert (spread.num, spread.mean) == (1, pytest.approx(0.0))
    text = json.dumps(results.as_json(), allow_nan=False)
    assert json.loads(text)["arms"]["no_memory"]["final_accuracy"]["mean"] == pytest.approx(0.55)
