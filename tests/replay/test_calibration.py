"""Losses, curve and report worked by hand; predictions that know are told from those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.schedule.calibration import (
    COLUMNS,
    ReviewLog,
    brier,
    calibration_curve,
    constant,
    log_loss,
    report,
)


def log_of(predicted, num_success, n, key=None) -> ReviewLog:
    num = len(predicted)
    zeros = np.zeros(num)
    return ReviewLog(
        key=np.arange(num) if key is None else key, now=np.arange(num), elapsed_days=zeros + 1.0, grade=zeros + 3,
        num_success=num_success, n=n, predicted=predicted, trained=zeros + 1, version=zeros, temperature=zeros + 1,
        trained_tokens=zeros,
    )  # fmt: skip


def test_losses_by_hand() -> None:
    p, s, n = np.array([0.8, 0.5]), np.array([3, 0]), np.array([4, 2])
    # -(3 ln .8 + ln .2 + 2 ln .5) / 6 = (.669431 + 1.609438 + 1.386294) / 6
    assert log_loss(p, s, n) == pytest.approx(0.610861, abs=1e-6)
    assert brier(p, s, n) == pytest.approx((3 * 0.04 + 0.64 + 2 * 0.25) / 6)
    assert constant(s, n) == 0.5


def test_a_sure_error_is_dear_but_finite() -> None:
    # -ln 1e-6 = 13.8155
    assert log_loss(np.array([1.0]), np.array([0]), np.array([1])) == pytest.approx(13.8155, abs=1e-3)
    assert log_loss(np.array([0.0]), np.array([0]), np.array([1])) == pytest.approx(0.0, abs=1e-5)


def test_a_curve_by_hand() -> None:
    curve = calibration_curve(np.array([0.1, 0.3, 0.5, 1.0]), np.array([0, 1, 4, 1]), np.array([2, 2, 4, 2]), bins=2)
    # below .5: (2 * .1 + 2 * .3) / 4 = .2 against 1 / 4; from .5 on: (4 * .5 + 2 * 1) / 6 = .667 against 5 / 6
    np.testing.assert_allclose(curve.predicted, [0.2, 2 / 3])
    np.testing.assert_allclose(curve.observed, [0.25, 5 / 6])
    assert curve.num_episodes.tolist() == [4, 6]
    assert curve.error == pytest.approx((4 * 0.05 + 6 * (1 / 6)) / 10)


SCORED = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=20)


@given(SCORED, st.floats(0.001, 0.999))
def test_no_constant_beats_the_pass_rate(rows, other) -> None:
    s = np.array([row[1] for row in rows])
    n = np.array([row[1] + row[2] + 1 for row in rows])
    best = np.full(len(n), constant(s, n))
    for loss in (log_loss, brier):
        assert loss(best, s, n) <= loss(np.full(len(n), other), s, n) + 1e-5


@given(SCORED)
def test_a_visit_of_n_is_n_visits_of_one(rows) -> None:
    p, s = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    n = np.array([row[1] + row[2] + 1 for row in rows])
    outcome = np.concatenate([np.repeat([1, 0], [a, b - a]) for a, b in zip(s, n)])
    apart = np.repeat(p, n), outcome, np.ones(n.sum())
    assert log_loss(p, s, n) == pytest.approx(log_loss(*apart))
    assert brier(p, s, n) == pytest.approx(brier(*apart))
    assert calibration_curve(p, s, n).error == pytest.approx(calibration_curve(*apart).error)


def test_who_knows_beats_the_constant_and_who_guesses_does_not() -> None:
    generator = np.random.default_rng(0)
    recall, n = generator.uniform(0.1, 0.9, 300), np.full(300, 8)
    s = generator.binomial(n, recall)
    knows, guesses = report(log_of(recall, s, n)), report(log_of(generator.permutation(recall), s, n))
    assert knows.beats_constant and knows.gain > 0.05 and knows.calibration_error < 0.05
    assert not guesses.beats_constant and guesses.gain < 0
    flat = report(log_of(np.full(300, knows.observed), s, n))
    assert flat.gain == pytest.approx(0) and not flat.beats_constant
    for found in (knows, guesses):
        assert found.gain == pytest.approx(found.log_loss_constant - found.log_loss)


def test_the_error_of_the_gain_by_hand() -> None:
    # Constant .75; gains ln(.8 / .75) = .064539 twice for item 0, ln(.8 / .25) = 1.163151 for item 2, failed,
    # ln(.2 / .75) = -1.321756 for item 1. Mean -.007382. Items differ from it by .143841, 1.170533 and -1.314374:
    # sqrt(3 / 2 * (.020690 + 1.370148 + 1.727579)) / 4 = .540695
    found = report(log_of([0.8, 0.8, 0.2, 0.2], [1, 1, 0, 1], [1, 1, 1, 1], key=[0, 0, 2, 1]))
    assert found.gain == pytest.approx(-0.007382, abs=1e-6)
    assert found.gain_error == pytest.approx(0.540695, abs=1e-5)
    assert (found.num_reviews, found.num_items, found.num_episodes, found.observed) == (4, 3, 4, 0.75)
    assert report(log_of([0.9], [1], [1])).gain_error == np.inf  # one item proves nothing


def test_a_gain_within_chance_beats_nothing() -> None:
    # gains ln(.9 / .667) = .300, ln(.5 / .667) = -.288, ln(.7 / .333) = .742: mean .252 with a standard error of .298
    found = report(log_of([0.9, 0.5, 0.3], [1, 1, 0], [1, 1, 1]))
    assert found.gain == pytest.approx(0.2515, abs=1e-3) and found.gain_error == pytest.approx(0.298, abs=1e-3)
    assert not found.beats_constant


def test_first_visits_have_no_part() -> None:
    log = log_of([np.nan, 0.9, 0.8], [0, 2, 1], [2, 2, 2])
    assert report(log) == report(log[1:])
    with pytest.raises(ValueError, match="no visit has a prediction"):
        report(log[:1])


def test_a_log_is_plain_arrays_and_back() -> None:
    log = log_of([np.nan, 0.9], [0, 2], [2, 2])
    arrays = log.to_arrays()
    again = ReviewLog.from_arrays({name: column.tolist() for name, column in arrays.items()})
    for name, dtype in COLUMNS.items():
        np.testing.assert_array_equal(getattr(again, name), arrays[name])
        assert getattr(again, name).dtype == dtype
    from_sql = {**arrays, "predicted": [None, 0.9]}  # SQLite has no nan
    np.testing.assert_array_equal(ReviewLog.from_arrays(from_sql).predicted, log.predicted)
    with pytest.raises(ValueError, match=r"columns \['now', 'when'\] are missing or unknown"):
        ReviewLog.from_arrays({"when" if name == "now" else name: column for name, column in arrays.items()})


def test_bad_logs_are_named_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"1 rows break n; .*1 rows break num_success; .*1 rows break predicted"):
        log_of([1.5, 0.2], [3, 0], [2, 0])
    with pytest.raises(ValueError, match="expected one length"):
        log_of([0.5], [1, 1], [1, 1])
