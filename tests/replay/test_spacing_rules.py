"""The rules without a forgetting curve, against their golden schedules and values worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing
from rllib_srl.replay.schedule.spacing.srl1 import source_diversity


def schedule(rule, grades, diversity: float | None = None) -> tuple[list[float], SpacingState]:
    """Return the interval after each grade, each review on its due date, and the last state."""
    state, intervals = SpacingState.new(1), []
    for grade in grades:
        diversity_N = None if diversity is None else np.array([diversity])
        state = rule.review(state, np.array([grade]), state.interval_N, np.array([True]), diversity_N)
        intervals.append(float(state.interval_N[0]))
    return intervals, state


def test_sm2_golden() -> None:
    rule, easiness = make_spacing("sm2", whole_days=True), []
    grades = [3, 3, 3, 4, 2, 1, 3, 3]  # q = 4, 4, 4, 5, 3, 2, 4, 4
    for n in range(1, 9):
        intervals, state = schedule(rule, grades[:n])
        easiness.append(float(state.difficulty_N[0]))
    assert intervals == [1, 6, 15, 38, 99, 1, 1, 6]
    np.testing.assert_allclose(easiness, [2.5, 2.5, 2.5, 2.6, 2.46, 2.46, 2.46, 2.46])


def test_sm2_without_rounding_and_its_floor() -> None:
    # 6 * 2.5 = 15, 15 * 2.5 = 37.5, 37.5 * 2.6 = 97.5
    assert schedule(make_spacing("sm2"), [3, 3, 3, 4, 2])[0] == pytest.approx([1, 6, 15, 37.5, 97.5])
    # Hard takes .14 off 2.5 each time: after 9 of them 2.5 - 1.26 = 1.24 is below the floor
    assert schedule(make_spacing("sm2"), [2] * 9)[1].difficulty_N == 1.3


def test_sm2_rounds_up() -> None:
    # Hard at first: EF 2.36, 6 * 2.36 = 14.16
    assert schedule(make_spacing("sm2", whole_days=True), [2, 3, 3])[0] == [1, 6, 15]


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
    visit = np.array([3]), np.array([20.0]), np.array([True])
    assert make_spacing("leitner", boxes=(1, 3, 9)).review(state, *visit).interval_N == 20  # success never shortens
    assert make_spacing("leitner", boxes=(1, 3, 30)).review(state, *visit).interval_N == 30


def test_fixed_and_none() -> None:
    assert schedule(make_spacing("fixed", 0.5, interval=2.5), [1, 4, 3])[0] == [2.5, 2.5, 2.5]
    rule = make_spacing("none", 0.6)
    intervals, state = schedule(rule, [1, 4, 3])
    assert intervals == [0, 0, 0]
    assert rule.retrievability(state, np.array([1e9])) == 0.6


def test_expanding_golden() -> None:
    # Always passing, 20 epochs: probes at 1, 3, 5, 8, 13 (gap 1.5, 2.25, 3.375, 5.0625, halves to even); 21 is too late
    rule = make_spacing("expanding", whole_days=True)
    intervals, _ = schedule(rule, [3] * 5)
    assert (1 + np.cumsum([0, *intervals])).tolist() == [1, 3, 5, 8, 13, 21]
    assert schedule(rule, [1] * 5)[0] == [1] * 5  # never passing: every epoch
    assert schedule(make_spacing("expanding"), [3, 3, 1, 3])[0] == [1.5, 2.25, 1, 1.5]


def test_srl1_by_hand() -> None:
    # e = 2.1: 1.5 * 1.1 = 1.65; e = 2.2: * 1.8 = 2.97; failure: e = 2.0, 1; e = 2.1: 1.65
    intervals, state = schedule(make_spacing("srl1"), [3, 4, 1, 2])
    assert intervals == pytest.approx([1.65, 2.97, 1, 1.65])
    np.testing.assert_allclose(state.difficulty_N, 2.1)
    # e stays in [1.3, 2.5]; six failures: 2.0 - 1.2 = .8 is below it
    assert schedule(make_spacing("srl1"), [1] * 6)[1].difficulty_N == 1.3
    assert schedule(make_spacing("srl1"), [4] * 9)[1].difficulty_N == 2.5


def test_srl1_success_with_low_easiness_no_longer_shortens() -> None:
    # after four failures e = 1.3 (floored at 1.3 from 1.2), then 1.4: 1.5 * .4 = .6 < 1
    assert schedule(make_spacing("srl1"), [1, 1, 1, 1, 4])[0][-1] == 1.0
    assert schedule(make_spacing("srl1", faithful=True), [1, 1, 1, 1, 4], 0.0)[0][-1] == pytest.approx(0.6)


def test_srl1_faithful_compounds_as_the_source_did() -> None:
    # The product of 1.65 1.8 1.95 2.1 2.25^6 over 34.6^10, D = 33.6: 6e-13 after ten successes in a row
    intervals, _ = schedule(make_spacing("srl1", faithful=True), [4] * 10, 33.6)
    assert intervals[-1] == pytest.approx(12.1621500 * 129.7463379 / 34.6**10, rel=1e-6)
    assert f"{intervals[-1]:.0e}" == "6e-13"
    # alpha scales D: after one success 1.65 / (1 + .5 * 2)
    assert schedule(make_spacing("srl1", faithful=True, alpha=0.5), [4], 2.0)[0] == pytest.approx([1.65 / 2])
    assert schedule(make_spacing("srl1", faithful=True), [1], 3.0)[0] == [0.25]
    # and never quite reaches 0: 2.25 / 34.6 to the 400th is below the least float
    intervals, state = schedule(make_spacing("srl1", faithful=True), [4] * 400, 33.6)
    assert intervals[-1] > 0
    assert make_spacing("srl1", faithful=True).retrievability(state, np.array([1.0])) == 0.0
    # mended, ten successes grow whatever the diversity
    assert schedule(make_spacing("srl1"), [4] * 10, 33.6)[0][-1] == pytest.approx(12.1621500 * 129.7463379, rel=1e-6)


def test_srl1_counts_success_from_the_grade_it_is_told() -> None:
    # e = 1.8 after what counts as a failure, 1.9 after the success: 1.5 * .9 = 1.35
    assert schedule(make_spacing("srl1", success_grade=4), [3, 4])[0] == pytest.approx([1, 1.35])


def test_the_sources_diversity_has_its_flaws() -> None:
    # Two items lie equally far from their centroid: the range is 0, D = .5 * .7071 / 1e-6
    two = source_diversity(np.zeros(2), np.full(2, np.sqrt(0.5)))
    assert two == pytest.approx([353_553] * 2, rel=1e-4)
    # Distances .98 to 1 among many: all near .5 * 1 / .02 = 25, and flat, because the least is not taken off
    many = source_diversity(np.zeros(5), np.linspace(0.98, 1.0, 5))
    assert many.min() > 24 and np.ptp(many) < 0.6
