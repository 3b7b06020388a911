"""Grades by hand; due dates and the way into the schedule, through the buffer."""

import numpy as np
import pytest

from rllib_srl.replay.items import ITEM, filled
from rllib_srl.replay.schedule.recall import grades_of, posterior
from rllib_srl.replay.schedule.spacing import SPACINGS, make_spacing
from tests.replay.groups import a_buffer, a_group, row_of


def graded(num_success, size, alpha=0.5, beta=0.5):
    """Return alpha, beta and grade after a visit of one item."""
    alpha_N, beta_N = posterior(np.array([num_success]), np.array([size]), alpha, beta)
    return float(alpha_N[0]), float(beta_N[0]), int(grades_of(alpha_N / (alpha_N + beta_N))[0])


@pytest.mark.parametrize(("size", "grades"), [
    # Jeffreys' mean (s + .5) / (n + 1), cut at .35, .65, .9
    (8, [1, 1, 1, 2, 2, 2, 3, 3, 4]),  # .06 .17 .28 | .39 .5 .61 | .72 .83 | .94
    (4, [1, 1, 2, 3, 4]),  # .1 .3 | .5 | .7 | .9
    (2, [1, 2, 3]),  # .17 | .5 | .83: two are too few for Easy
])  # fmt: skip
def test_pass_rates_of_new_items(size, grades):
    assert [graded(s, size)[2] for s in range(size + 1)] == grades


def test_a_quarter_of_earlier_visits_counts():
    assert graded(8, 8) == (8.5, 0.5, 4)
    # a quarter of 8 earlier successes is 2: (.5 + 2 + 2) / (1 + 2 + 8) = .409, where 2 of 8 alone were .278
    assert graded(2, 8, 8.5, 0.5) == (4.5, 6.5, 2)
    assert graded(0, 8, 8.5, 0.5)[2] == 1  # 2.5 / 11: forgetting shows at once
    assert posterior(8, 8, alpha_N=0.5, beta_N=8.5) == (8.5, 2.5)  # failures are forgotten as successes are


def test_ratings_by_hand():
    assert grades_of(np.array([0, 0.349, 0.35, 0.65, 0.9, 1])).tolist() == [1, 1, 2, 3, 4, 4]


ALL, HALF, NONE = (1.0,) * 8, (1.0, 0.0) * 4, (0.0,) * 8


def visit(buffer, now, rewards=ALL, index=0):
    """Play one prompt and return its visit."""
    return buffer.add([a_group(index, now, rewards=rewards)], now)[0]


def test_a_visit_by_hand():
    # FSRS, 8 of 8 right and no earlier visit: alpha 8.5, beta 0.5, recall 0.944 -> Easy.
    buffer = a_buffer(iterations_per_day=4.0, diversity_coeff=0.5, desired_retention=0.8)
    first = visit(buffer, 3)
    assert first.grade == 4
    rule = make_spacing("fsrs", 0.8)
    state = rule.review(np.zeros(1, ITEM), np.array([4]), np.array([0.0]))
    row = row_of(buffer, 0)
    assert (row["alpha"], row["beta"]) == (8.5, 0.5)
    assert row["interval"] == state["interval"][0] and row["last_review"] == 3
    # No variance, novelty 1: D = 0.5, so the effective interval is 4 * interval / 1.25.
    assert row["diversity"] == 0.5
    assert row["due"] == pytest.approx(3 + 4 * state["interval"][0] / 1.25)
    second = visit(buffer, 9, HALF)
    after = rule.review(filled(np.zeros(1, ITEM), state), np.array([second.grade]), np.array([6 / 4]))
    assert row_of(buffer, 0)["interval"] == pytest.approx(after["interval"][0])
    alpha_N, beta_N = posterior(np.array([4]), np.array([8]), 8.5, 0.5)
    assert (row_of(buffer, 0)["alpha"], row_of(buffer, 0)["beta"]) == (np.float32(alpha_N[0]), np.float32(beta_N[0]))


@pytest.mark.parametrize("spacing", [name for name in SPACINGS if name not in ("fixed", "none")])
def test_ten_successes_lengthen_the_base_interval_as_if_there_were_no_diversity(spacing):
    with_diversity = a_buffer(spacing=spacing, diversity_coeff=5.0)
    without = a_buffer(spacing=spacing, diversity_coeff=0.0)
    intervals, waits, now = [], [], 1
    for _ in range(10):
        for buffer in (with_diversity, without):
            buffer.add([a_group(i, now, rewards=HALF if i else ALL) for i in range(4)], now)
        row, plain = row_of(with_diversity, 0), row_of(without, 0)
        assert row["interval"] == plain["interval"]
        intervals.append(float(row["interval"]))
        waits.append(float((row["due"] - row["last_review"]) / max(1.0, plain["due"] - plain["last_review"])))
        assert row["due"] - row["last_review"] >= 1 and max(1.0, row["interval"]) / 6 <= row["due"] - row["last_review"]
        now = int(np.ceil(max(row["due"], plain["due"])))
    assert intervals == sorted(intervals) and intervals[-1] > 5 * intervals[0]
    assert all(wait <= 1 for wait in waits) and min(waits) < 0.7  # diversity did act, on the due date


def test_a_failure_after_a_success_is_a_lapse():
    buffer = a_buffer(spacing="fixed", spacing_config={"interval": 8.0}, diversity_coeff=0.0)
    assert not any(visit(buffer, now).is_lapse for now in (1, 4, 12, 23))
    lapse = visit(buffer, 31, NONE)
    assert lapse.is_lapse and row_of(buffer, 0)["lapses"] == 1 and not visit(buffer, 39, NONE).is_lapse


def test_what_passes_is_the_settings_to_say():
    rewards = (0.7,) * 8
    assert visit(a_buffer(), 1, rewards).grade == 1
    assert visit(a_buffer(pass_reward=0.7), 1, np.float32(rewards)).grade == 4  # as float32 a little less
    assert visit(a_buffer(pass_reward=0.71), 1, rewards).grade == 1
