"""Retention curves and costs, worked by hand; areas also against a fine sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.studies.retention import Decay, cost_to_reach, retention_area, time_to_decay

TIME = np.array([10.0, 20.0, 40.0])
ACCURACY = np.array([0.8, 0.6, 0.4])


def test_area_is_the_mean_height():
    # (10 * (.8 + .6) / 2 + 20 * (.6 + .4) / 2) / 30 = (7 + 10) / 30
    assert retention_area(TIME, ACCURACY) == pytest.approx(17 / 30)
    assert retention_area(TIME, ACCURACY, relative=True) == pytest.approx(17 / 30 / 0.8)


def test_area_of_what_is_kept_is_its_height_and_relative_is_one():
    flat = np.full(3, 0.3)
    assert retention_area(TIME, flat) == pytest.approx(0.3) and retention_area(TIME, flat, relative=True) == 1


def test_no_span_and_nothing_learned_have_no_area():
    assert np.isnan(retention_area(TIME[:1], ACCURACY[:1]))
    assert np.isnan(retention_area(TIME, np.array([0.0, 0.1, 0.2]), relative=True))


def test_decay_is_where_the_line_crosses_the_level():
    # .8 of .8 is .64: between .8 at 10 and .6 at 20 at a share (.8 - .64) / .2 = .8, 8 after the start
    assert time_to_decay(TIME, ACCURACY) == Decay(pytest.approx(8.0), False)
    # half of .8 is .4, which is reached and not gone below
    assert time_to_decay(TIME, ACCURACY, kept=0.5) == Decay(30.0, True)
    # .6 of .8 is .48: between .6 at 20 and .4 at 40 at .6: 20 + 12 - 10
    assert time_to_decay(TIME, ACCURACY, kept=0.6) == Decay(pytest.approx(22.0), False)


def test_the_first_fall_counts_even_if_it_recovers():
    assert time_to_decay(np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.5, 1.0])) == Decay(pytest.approx(0.4), False)


def test_a_curve_that_only_touches_the_level_never_fell_below_it():
    """The level is .4 * .75, which is above .3 in floating point."""
    assert time_to_decay(np.array([0.0, 1.0, 2.0]), np.array([0.75, 0.3, 0.3]), 0.4) == Decay(2.0, is_censored=True)


def test_cost_to_reach():
    cost, rising = np.array([0.0, 100.0, 200.0]), np.array([0.1, 0.5, 0.4])
    assert cost_to_reach(cost, rising, 0.3) == pytest.approx(50)  # half way from .1 to .5
    assert cost_to_reach(cost, rising, 0.5) == 100
    assert cost_to_reach(cost, rising, 0.05) == 0
    assert cost_to_reach(cost, rising, 0.6) == float("inf")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=2, max_size=8), st.integers(1, 9))
@settings(max_examples=40)
def test_a_fine_grid_finds_the_same_area_and_crossing(steps, kept):
    time, accuracy = np.cumsum([step for step, _ in steps]), np.array([height / 20 for _, height in steps])
    kept = kept / 10
    grid = np.linspace(time[0], time[-1], 20_001)
    line = np.interp(grid, time, accuracy)
    assert retention_area(time, accuracy) == pytest.approx(line.mean(), abs=1e-3)
    found = time_to_decay(time, accuracy, kept)
    below = grid[line < kept * accuracy[0] - 1e-12] - time[0]
    assert found.time == pytest.approx(below[0] if len(below) else time[-1] - time[0], abs=2 * (grid[1] - grid[0]))


@pytest.mark.parametrize("function", [retention_area, time_to_decay, lambda t, a: cost_to_reach(t, a, 0.5)])
def test_what_is_no_curve_is_refused(function):
    with pytest.raises(ValueError, match="expected one length"):
        function(TIME, ACCURACY[:2])
    with pytest.raises(ValueError, match="do not fall"):
        function(TIME[::-1], ACCURACY)


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match="kept = 1"):
        time_to_decay(TIME, ACCURACY, kept=1.0)
