"""FSRS-6 against py-fsrs under random reviews, and by hand."""

from datetime import UTC, datetime, timedelta
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.items import ITEM
from rllib_srl.replay.schedule import spacing
from rllib_srl.replay.schedule.spacing import make_spacing
from tests.replay.test_spacing import reviewed

fsrs = pytest.importorskip("fsrs", reason="py-fsrs is the oracle of these tests")

START = datetime(2024, 1, 1, tzinfo=UTC)
# Whole days between reviews, as py-fsrs counts them: the same day, and up to two years.
VISITS = st.lists(
    st.tuples(st.integers(1, 4), st.one_of(st.integers(0, 3), st.integers(0, 730))), min_size=1, max_size=14
)
RANGES = zip(fsrs.scheduler.LOWER_BOUNDS_PARAMETERS, fsrs.scheduler.UPPER_BOUNDS_PARAMETERS)
PARAMETERS = st.one_of(st.just(spacing.W), st.tuples(*(st.floats(low, high) for low, high in RANGES)))


def review(rule, state: np.ndarray, grade: int, days: float) -> np.ndarray:
    return reviewed(rule, state, np.array([grade]), np.array([days]))


@settings(max_examples=100)
@given(visits=VISITS, w=PARAMETERS, retention=st.floats(0.3, 0.97))
def test_after_whole_days_it_is_py_fsrs(visits, w, retention) -> None:
    oracle = fsrs.Scheduler(w, retention, learning_steps=(), relearning_steps=(), enable_fuzzing=False)
    with patch.object(spacing, "W", w):
        _review_both(oracle, make_spacing("fsrs", retention), visits)


def _review_both(oracle, rule, visits) -> None:
    card, state, now = fsrs.Card(card_id=1), np.zeros(1, ITEM), START
    for grade, days in visits:
        now += timedelta(days=days)
        recall_N = rule.retrievability(state, np.array([float(days)]))
        np.testing.assert_allclose(recall_N, oracle.get_card_retrievability(card, now))
        card, _ = oracle.review_card(card, fsrs.Rating(grade), now)
        state = review(rule, state, grade, days)
        np.testing.assert_allclose(state["stability"], card.stability, rtol=1e-9)
        np.testing.assert_allclose(state["difficulty"], card.difficulty, rtol=1e-9)
        if abs(state["interval"][0] % 1 - 0.5) > 1e-6:  # else the last bit decides which way a half is rounded
            assert max(1, round(state["interval"][0])) == (card.due - now).days


def test_time_is_not_truncated() -> None:
    rule = make_spacing("fsrs", 0.5)
    state = review(rule, np.zeros(1, ITEM), 3, 0)
    # S = 2.3065, F = .9^(-1/.1542) - 1 = .980346: R(1.5) = (1 + .980346 * 1.5 / 2.3065)^-.1542 = 1.637555^-.1542
    np.testing.assert_allclose(rule.retrievability(state, np.array([1.5])), 0.926768, atol=1e-6)
    # I = S / F * (.5^(-1/.1542) - 1) = 2.352740 * (89.578730 - 1)
    np.testing.assert_allclose(state["interval"], 208.402684, atol=1e-5)


def test_a_day_ends_the_same_day_branch() -> None:
    rule = make_spacing("fsrs")
    state = review(rule, np.zeros(1, ITEM), 3, 0)
    within = review(rule, state, 3, 0.999)
    # f = e^(.5425 * .0912) * 2.3065^-.0658 = 1.050720 * .946494 = .994500: a success takes at least 1
    assert within["stability"][0] == state["stability"][0]
    assert review(rule, state, 3, 1.0)["stability"][0] > 1.5 * state["stability"][0]
    # f = e^(.5425 * (-2 + .0912)) * .946494 = .355040 * .946494 = .336043
    np.testing.assert_allclose(review(rule, state, 1, 0.5)["stability"], 2.3065 * 0.336043, rtol=1e-5)
