"""Refitting a rule: the simulated truth is found again, nothing gets worse, and too little is refused."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl.replay.schedule.calibration import ReviewLog, log_loss, report
from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing
from rllib_srl.replay.schedule.spacing.fitting import Histories, minimise, predict


def simulated(truth, num_items: int, num_visits: int, seed: int = 0, n: int = 8, spread: float = 1.0) -> ReviewLog:
    """Let items be visited at random times and pass with the recall that `truth` predicts."""
    generator = np.random.default_rng(seed)
    state, now_N, rows = SpacingState.new(num_items), np.zeros(num_items), []
    for t in range(num_visits):
        gap_N = np.exp(generator.normal(1.0, spread, num_items)) if t else np.zeros(num_items)
        recall_N = truth.retrievability(state, gap_N) if t else generator.uniform(0.2, 1.0, num_items)
        success_N = generator.binomial(n, recall_N)
        grade_N = np.select([success_N < n * 0.4, success_N < n * 0.7, success_N < n], [1, 2, 3], 4)
        trained_N = (success_N > 0) & (success_N < n)
        now_N = now_N + gap_N
        rows.append((np.arange(num_items), now_N, gap_N, grade_N, success_N, trained_N, t))
        state = truth.review(state, grade_N, gap_N, trained_N)
    return log_of(rows, n)


def log_of(rows, n: int) -> ReviewLog:
    key, now, gap, grade, success, trained = (np.concatenate([row[i] for row in rows]) for i in range(6))
    first = np.concatenate([np.full(len(row[0]), row[6] == 0) for row in rows])
    num = len(key)
    return ReviewLog(
        key=key, now=np.rint(now * 10), elapsed_days=gap, grade=grade, num_success=success, n=np.full(num, n),
        predicted=np.where(first, np.nan, 0.5), trained=trained, version=np.zeros(num), temperature=np.ones(num),
        trained_tokens=np.where(trained, 100, 0),
    )  # fmt: skip


def loss_of(rule, log: ReviewLog) -> float:
    known = predict(rule, log).predictable()
    return log_loss(known.predicted, known.num_success, known.n)


def test_a_prediction_is_what_reviewing_one_by_one_gives() -> None:
    rule, log = make_spacing("fsrs", 0.6), simulated(make_spacing("fsrs"), 7, 5)
    shuffled = log[np.random.default_rng(1).permutation(len(log))]
    for given in (log, shuffled[np.argsort(shuffled.now, kind="stable")]):
        found = predict(rule, given)
        for key in range(7):
            state = SpacingState.new(1)
            for row in np.flatnonzero(found.key == key):
                expected = rule.retrievability(state, found.elapsed_days[[row]])
                if state.reps_N[0] == 0:
                    assert np.isnan(found.predicted[row])
                else:
                    np.testing.assert_allclose(found.predicted[row], expected)
                visit = (found.grade[[row]], found.elapsed_days[[row]], found.trained[[row]])
                state = rule.review(state, *visit)


def test_histories_begin_at_a_first_visit() -> None:
    log = simulated(make_spacing("fsrs"), 3, 4)
    # Item 0 lost its first visit, item 1 was evicted and met anew at its third.
    rows = log.to_arrays()
    rows["predicted"] = np.where((log.key == 1) & (np.arange(len(log)) == 7), np.nan, log.predicted)
    log = ReviewLog(**rows)[np.arange(len(log)) != 0]
    histories = Histories(log)
    assert histories.num_items == 3  # item 1 twice, item 2 once
    assert histories.num_reviews == 1 + 1 + 3
    assert set(predict(make_spacing("fsrs"), log).key.tolist()) == {1, 2}


@pytest.mark.parametrize("name", ["sm2", "leitner", "fixed", "expanding", "srl1"])
def test_the_scale_of_a_simple_rule_is_found(name) -> None:
    log = simulated(make_spacing(name, scale=5.0), num_items=150, num_visits=5)
    start = make_spacing(name, 0.8, scale=1.0)
    fitted = start.fit(log)
    assert type(fitted) is type(start)
    assert fitted.desired_retention == 0.8 and start.scale == 1.0  # a copy
    assert fitted.scale == pytest.approx(5.0 if name != "fixed" else 5.0 * np.log(0.8) / np.log(0.9), rel=0.1)
    assert loss_of(fitted, log) < loss_of(start, log)


def test_fsrs_is_as_good_as_the_truth_it_was_not_told() -> None:
    w = list(make_spacing("fsrs").w)
    w[:4], w[20] = [2.0, 5.0, 9.0, 20.0], 0.4
    truth, start = make_spacing("fsrs", w=w), make_spacing("fsrs", 0.5)
    log, unseen = simulated(truth, 250, 6, spread=1.5), simulated(truth, 250, 6, seed=1, spread=1.5)
    fitted = start.fit(log)
    assert loss_of(fitted, log) < loss_of(start, log) - 0.01
    assert loss_of(fitted, unseen) < loss_of(truth, unseen) + 0.003
    assert loss_of(start, unseen) > loss_of(truth, unseen) + 0.01
    np.testing.assert_allclose(np.log(fitted.w[:4]), np.log(w[:4]), atol=0.5)
    assert fitted.w[20] == pytest.approx(0.4, rel=0.25)
    assert report(predict(fitted, unseen)).beats_constant


def test_the_gain_of_untrained_visits_is_found() -> None:
    truth, start = make_spacing("expanding", factor=3.0, untrained_gain=0.0), make_spacing("expanding", factor=3.0)
    log = simulated(truth, 200, 6)
    assert not log.trained.all()
    assert start.fit(log).untrained_gain < 0.2
    trained = ReviewLog(**{**log.to_arrays(), "trained": np.ones(len(log))})
    assert start.fit(trained).untrained_gain == 1.0  # nothing to learn it from


def test_what_the_log_says_nothing_about_stays() -> None:
    log = simulated(make_spacing("fsrs"), 60, 3)
    never_easy = log[~np.isin(log.key, log.key[log.grade == 4])]
    assert make_spacing("fsrs").fit(never_easy, min_reviews=8).w[3] == pytest.approx(8.2956, rel=1e-3)


def test_little_evidence_moves_little() -> None:
    log = simulated(make_spacing("fixed", scale=1e6), num_items=3, num_visits=3)  # everything is always recalled
    fitted = make_spacing("fixed").fit(log, min_reviews=6)
    assert (fitted.scale > 2) and (fitted.scale < 1e3)  # without a prior it would run to its bound, 1e6


def test_too_few_reviews_are_refused() -> None:
    log = simulated(make_spacing("fsrs"), 10, 4)
    with pytest.raises(ValueError, match="has 30 reviews that follow an item's first visit; expected at least 64"):
        make_spacing("fsrs").fit(log)
    assert make_spacing("fsrs").fit(log, min_reviews=30).w != make_spacing("fsrs").w
    for rule in (make_spacing("none"), make_spacing("srl1", faithful=True)):
        with pytest.raises(ValueError, match=f"spacing '{rule.name}' has no parameter to fit"):
            rule.fit(log, min_reviews=30)
    with pytest.raises(ValueError, match="has 0 reviews"):
        make_spacing("sm2").fit(log[:0])


def test_the_search_finds_a_minimum_and_keeps_within_bounds() -> None:
    def bowl(u: np.ndarray) -> float:  # two knobs that trade against each other; least at (4, -1)
        return 100 * float((u[0] + u[1] - 3) ** 2 + 0.3 * (u[0] - u[1] - 5) ** 2)

    found = minimise(bowl, np.zeros(2), np.full(2, -6.0), np.full(2, 6.0), np.ones(2))
    np.testing.assert_allclose(found, [4, -1], atol=0.02)
    at_bound = minimise(bowl, np.zeros(2), np.full(2, -6.0), np.full(2, 2.0), np.ones(2))
    # at u0 = 2: the least over u1 of (u1 - 1)^2 + .3 (u1 + 3)^2 is at (1 - .9) / 1.3
    np.testing.assert_allclose(at_bound, [2, 0.0769], atol=0.02)


def test_the_search_never_ends_above_its_start() -> None:
    def wavy(u: np.ndarray) -> float:
        return float(np.sin(3 * u[0]) + 0.01 * (u[0] - 7 * np.pi / 6) ** 2)

    start = np.array([7 * np.pi / 6])  # the least of all its valleys
    assert wavy(minimise(wavy, start, np.array([-9.0]), np.array([9.0]), np.array([2.3]))) <= wavy(start)


def test_a_fit_does_not_ask_in_which_order_items_stand() -> None:
    log = simulated(make_spacing("leitner"), 40, 4)
    by_item = log[np.lexsort((log.now, -log.key.astype(int)))]
    assert make_spacing("leitner").fit(by_item).scale == pytest.approx(make_spacing("leitner").fit(log).scale)
