"""The rules without a forgetting curve, against their golden schedules and values worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing


def schedule(rule, grades) -> tuple[list[float], SpacingState]:
    """Return the interval after each grade, each review on its due date, and the last state."""
    state, intervals = SpacingState.new(1), []
    for grade in grades:
        state = rule.review(state, np.array([grade]), state.interval_N)
        intervals.append(float(state.interval_N[0]))
    return intervals, state


def test_sm2_easiness_by_hand() -> None:
    rule, easiness = make_spacing("sm2"), []
    grades = [3, 3, 3, 4, 2, 1, 3, 3]  # q = 4, 4, 4, 5, 3, 2, 4, 4
    for n in range(1, 9):
        easiness.append(float(schedule(rule, grades[:n])[1].difficulty_N[0]))
    np.testing.assert_allclose(easiness, [2.5, 2.5, 2.5, 2.6, 2.46, 2.46, 2.46, 2.46])


def test_sm2_without_rounding_and_its_floor() -> None:
    # 6 * 2.5 = 15, 15 * 2.5 = 37.5, 37.5 * 2.6 = 97.5
    assert schedule(make_spacing("sm2"), [3, 3, 3, 4, 2])[0] == pytest.approx([1, 6, 15, 37.5, 97.5])
    # Hard takes .14 off 2.5 each time: after 9 of them 2.5 - 1.26 = 1.24 is below the floor
    assert schedule(make_spacing("sm2"), [2] * 9)[1].difficulty_N == 1.3


def test_sm2_starts_again_after_failing_at_first() -> None:
    assert schedule(make_spacing("sm2"), [1, 3, 3, 3])[0] == [1, 1, 6, 15]


def test_leitner_moves_by_boxes() -> None:
    rule = make_spacing("leitner", boxes=(1, 3, 9))
    assert schedule(rule, [3, 2, 4, 3, 1, 3])[0] == [3, 9, 9, 9, 1, 3]
    assert schedule(rule, [1, 1, 3])[0] == [1, 1, 3]
    # recall falls to the desired one at the interval: .7 takes ln .7 / ln .9 = 3.385281 times as long as .9
    assert schedule(make_spacing("leitner", 0.7, boxes=(1, 3, 9)), [3])[0] == pytest.approx([3 * 3.385281])


def test_leitner_takes_items_of_other_boxes() -> None:
    _, state = schedule(make_spacing("leitner", boxes=(1, 20)), [3])
    visit = np.array([3]), np.array([20.0])
    assert make_spacing("leitner", boxes=(1, 3, 9)).review(state, *visit).interval_N == 20  # success never shortens
    assert make_spacing("leitner", boxes=(1, 3, 30)).review(state, *visit).interval_N == 30


def test_fixed_and_none() -> None:
    assert schedule(make_spacing("fixed", 0.5, interval=2.5), [1, 4, 3])[0] == [2.5, 2.5, 2.5]
    rule = make_spacing("none", 0.6)
    intervals, state = schedule(rule, [1, 4, 3])
    assert intervals == [0, 0, 0]
    assert rule.retrievability(state, np.array([1e9])) == 0.6


def test_expanding_by_hand() -> None:
    assert schedule(make_spacing("expanding"), [3] * 4)[0] == [1.5, 2.25, 3.375, 5.0625]
    assert schedule(make_spacing("expanding"), [1] * 5)[0] == [1] * 5  # never passing: every day
    assert schedule(make_spacing("expanding"), [3, 3, 1, 3])[0] == [1.5, 2.25, 1, 1.5]
