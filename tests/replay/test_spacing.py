"""The laws of every spacing rule, how rules are made, and the fixed one by hand."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.items import ITEM, filled
from rllib_srl.replay.schedule.spacing import MAXIMUM_INTERVAL, SPACINGS, make_spacing

OPTIONAL = [f"contrib.spacings:{name}" for name in ("SM2", "Leitner", "Expanding")]
RULES = [*((name, {}) for name in (*sorted(SPACINGS), *OPTIONAL)), ("fixed", {"interval": 2.5})]
EVERY = pytest.mark.parametrize("name, parameters", RULES, ids=str)
# Visits of 3 items: grade, days since the last one.
ONE = st.tuples(st.integers(1, 4), st.one_of(st.floats(0, 3), st.floats(0, 1e5)))
VISITS = st.lists(st.tuples(ONE, ONE, ONE), min_size=1, max_size=12)
RETENTIONS = st.floats(0.05, 0.99)
LAWS = settings(max_examples=12)


def reviewed(rule, items, *visit) -> np.ndarray:
    """Return the rows of items after a visit."""
    return filled(items.copy(), rule.review(items, *visit))


def after(rule, visits, num: int = 3) -> list[np.ndarray]:
    """Return the rows of items before the first visit and after each."""
    states = [np.zeros(num, ITEM)]
    for visit in visits:
        states.append(reviewed(rule, states[-1], *map(np.array, zip(*visit))))
    return states


@EVERY
@LAWS
@given(visits=VISITS, retention=RETENTIONS)
def test_success_never_shortens(name, parameters, visits, retention) -> None:
    rule = make_spacing(name, retention, **parameters)
    states = after(rule, visits)
    for before, state in itertools.pairwise(states):
        succeeded_N = state["streak"] > 0
        assert (state["interval"] >= before["interval"] * (1 - 1e-12))[succeeded_N].all()


@EVERY
@LAWS
@given(visits=VISITS, retention=RETENTIONS, elapsed=st.lists(st.floats(0, 1e6), min_size=2, max_size=6))
def test_recall_falls_with_time(name, parameters, visits, retention, elapsed) -> None:
    rule = make_spacing(name, retention, **parameters)
    state = after(rule, visits)[-1]
    recalls = np.array([rule.retrievability(state, np.full(3, days)) for days in sorted(elapsed)])
    assert (np.diff(recalls, axis=0) <= 1e-15).all() and (recalls >= 0).all() and (recalls <= 1).all()
    if name != "none":
        np.testing.assert_array_equal(rule.retrievability(state, np.zeros(3)), 1.0)


@EVERY
@LAWS
@given(visits=VISITS, retention=RETENTIONS)
def test_recall_at_the_interval_is_the_desired_one(name, parameters, visits, retention) -> None:
    rule = make_spacing(name, retention, **parameters)
    with patch("rllib_srl.replay.schedule.spacing.MAXIMUM_INTERVAL", np.inf):
        state = after(rule, visits)[-1]
    np.testing.assert_allclose(rule.retrievability(state, state["interval"]), retention, rtol=1e-6)


@pytest.mark.parametrize("name", ["fsrs", *OPTIONAL])
@LAWS
@given(visits=VISITS, retention=RETENTIONS)
def test_recall_after_the_stability_is_nine_tenths(name, visits, retention) -> None:
    rule = make_spacing(name, retention)
    state = after(rule, visits)[-1]
    np.testing.assert_allclose(rule.retrievability(state, state["stability"]), 0.9, rtol=1e-6)


@pytest.mark.slow
@EVERY
@LAWS
@given(visits=VISITS, order=st.permutations(range(3)))
def test_items_do_not_see_each_other(name, parameters, visits, order) -> None:
    rule = make_spacing(name, **parameters)
    together = after(rule, visits)[-1]
    turned = after(rule, [[visit[i] for i in order] for visit in visits])[-1]
    np.testing.assert_array_equal(turned, together[list(order)])
    for i in range(3):
        alone = after(rule, [[visit[i]] for visit in visits], num=1)[-1]
        for column in ITEM.names:  # a vector and a scalar may take different paths through the power function
            np.testing.assert_allclose(alone[column], together[column][[i]], rtol=1e-12, err_msg=column)


def test_lapses_and_streaks() -> None:
    rule, state, seen = make_spacing("fixed"), np.zeros(1, ITEM), []
    for grade in (1, 3, 2, 1, 1, 4):
        state = reviewed(rule, state, [grade], [1.0])
        seen.append((int(state["streak"][0]), int(state["lapses"][0])))
    # Failing at first, or again, forgets nothing that was known.
    assert seen == [(-1, 0), (1, 0), (2, 0), (-1, 1), (-2, 1), (1, 1)]


def test_hundreds_of_successes_stay_finite_and_below_the_maximum() -> None:
    for name in ("fsrs", OPTIONAL[0]):  # 2.25^900 is beyond float64
        state = after(make_spacing(name, 0.2), [[(4, 50.0)]] * 900, num=1)[-1]
        assert np.isfinite(state["stability"]).all() and np.isfinite(state["difficulty"]).all(), name
        assert state["interval"] == MAXIMUM_INTERVAL


def test_errors_are_named_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"spacing = 'anki'; expected one of 'fixed', 'fsrs', 'none'"):
        make_spacing("anki")
    error = r"desired_retention = 1\.0; expected a number in \(0, 1\); interval = 0; expected a number in"
    with pytest.raises(ValueError, match=error):
        make_spacing("fixed", 1.0, interval=0)


def schedule(rule, grades) -> tuple[list[float], np.ndarray]:
    """Return the interval after each grade, each review on its due date, and the row in the end."""
    state, intervals = np.zeros(1, ITEM), []
    for grade in grades:
        state = reviewed(rule, state, np.array([grade]), state["interval"])
        intervals.append(float(state["interval"][0]))
    return intervals, state


def test_fixed_and_none() -> None:
    assert schedule(make_spacing("fixed", 0.5, interval=2.5), [1, 4, 3])[0] == [2.5, 2.5, 2.5]
    rule = make_spacing("none", 0.6)
    intervals, state = schedule(rule, [1, 4, 3])
    assert intervals == [0, 0, 0]
    assert rule.retrievability(state, np.array([1e9])) == 0.6
