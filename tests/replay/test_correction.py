"""Corrections of predicted recall in a run: the line by hand, refits, states made anew, and a restart."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.journal.reader import reading
from rllib_srl.replay.schedule.calibration import log_loss
from rllib_srl.replay.schedule.correction import LOWEST_SLOPE, RETENTIONS, Correction, Line
from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing
from rllib_srl.replay.schedule.spacing.fitting import Histories, predict
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.groups import a_buffer, a_group, play
from tests.replay.test_spacing_fit import simulated

BOTH = {"recalibrate_every": 2, "refit_every": 6}
REVISITS = 6  # an iteration


def state_of(*stability: float) -> SpacingState:
    num = len(stability)
    new = SpacingState.new(num)
    return replace(new, stability_N=np.array(stability), difficulty_N=np.full(num, 5.0), reps_N=np.ones(num, np.int64))


def loss_of(log, line: Line | None = None) -> float:
    known = log.predictable()
    return log_loss((line or Line())(known.predicted), known.num_success, known.n)


def test_a_line_by_hand():
    """A million episodes each at .9 and .5, of which .5 and .2 succeed: a = logit .2, b = -logit .2 / logit .9."""
    line = Line.fitted(np.array([0.9, 0.5]), np.array([5e5, 2e5]), np.array([1e6, 1e6]))
    assert (line.intercept, line.slope) == pytest.approx((-1.3863, 0.63093), abs=1e-4)
    assert line(np.array([0.9, 0.5])) == pytest.approx([0.5, 0.2], abs=1e-5)
    assert line.inverse(0.5) == pytest.approx(0.9, abs=1e-5)


def test_few_reviews_move_a_line_as_far_as_the_prior_lets_them():
    """One success of four at a prediction of .5, whose logit is 0: the slope stays, 4 sigmoid(a) - 1 + a = 0."""
    line = Line.fitted(np.array([0.5]), np.array([1]), np.array([4]))
    assert (line.intercept, line.slope) == (pytest.approx(-0.5053, abs=1e-3), 1.0)
    assert Line.fitted(np.empty(0), np.empty(0), np.empty(0)) == Line()


def test_the_order_of_predictions_stays_and_the_bounds_hold():
    line = Line.fitted(np.array([0.9, 0.1]), np.array([0, 1000]), np.array([1000, 1000]))  # the wrong way round
    assert line.slope == LOWEST_SLOPE
    assert line(np.array([0.9]))[0] > line(np.array([0.1]))[0]
    assert (Line(-3.0, 0.05).inverse(0.9), Line(3.0, 0.05).inverse(0.2)) == RETENTIONS[::-1]
    recall_N = np.array([0.3, 1.0])
    assert Line()(recall_N) is recall_N and Line().inverse(0.9) == 0.9


@pytest.mark.parametrize("spacing", ["fsrs", "sm2", "leitner"])
def test_an_item_is_due_when_corrected_recall_is_the_desired_one(spacing):
    correction = Correction(ReplaySettings(spacing=spacing, recalibrate_every=1, desired_retention=0.8))
    state = state_of(2.0, 30.0)
    plain = correction.rule.interval_of(state.stability_N)
    correction.set_state({**correction.get_state(), "line": [-0.4, 0.7], "at": [0, 5]})
    interval_N = correction.interval_of(state)
    assert correction.recall(state, interval_N) == pytest.approx([0.8, 0.8])
    assert (interval_N < plain).all()
    new = SpacingState.new(1)
    assert correction.recall(new, np.array([3.0])).tolist() == [0.0]


def test_a_refit_takes_the_reviews_of_a_rule_and_starts_from_the_rule_as_set():
    """The log of a policy that forgets a thousand times faster: a refit halves the distance of its losses at least."""
    truth = make_spacing("fixed", interval=0.01)
    log = simulated(truth, 60, 6)
    settings = ReplaySettings(spacing="fixed", spacing_config={"interval": 10.0}, refit_every=3)
    correction = Correction(settings)
    assert not correction.fit(log, 2).is_refitted and correction.fit(log, 3).is_refitted
    once = correction.get_state()
    assert correction.rule.parameters()["scale"] == pytest.approx(1e-3, rel=0.1)
    assert not correction.fit(log, 5).is_refitted and correction.fit(log, 6).is_refitted
    assert correction.get_state() == {**once, "at": [6, 0]}  # from the rule as set, not from the last fit
    few = log[: 60 + 31]
    assert not correction.fit(few, 60).is_refitted


def test_held_out_loss_falls_after_a_line_and_after_a_refit():
    """Items are halved: fitted to one half, evaluated on the other; each correction beats the rule as set."""
    log = simulated(make_spacing("fsrs", w=(0.05, 0.2, 0.4, 0.9, *make_spacing("fsrs").parameters()["w"][4:])), 80, 6)
    seen, unseen = log[log.key % 2 == 0], log[log.key % 2 == 1]
    losses = []
    for every in ({}, {"recalibrate_every": 1}, {"refit_every": 1}):
        correction = Correction(ReplaySettings(spacing="fsrs", **every))
        correction.fit(seen, 1)
        losses.append(loss_of(predict(correction.rule, unseen), correction.line))
    assert losses[0] > losses[1] + 0.02 and losses[0] > losses[2] + 0.02


# --- in a buffer ----------------------------------------------------------------------------------------------


def played(num, buffer=None, start=1, **settings):
    buffer = buffer or a_buffer(seed=3, **settings)
    for now in range(start, num + 1):
        play(buffer, now, num_revisits=REVISITS)
    return buffer


def rows_of(buffer):
    slots_N = buffer.store.slots()
    return buffer.store.items[slots_N]


def test_a_log_holds_what_the_states_were_made_of():
    """Replayed from the log, every item has the state of the table, evicted ones left out."""
    buffer = played(12)
    log = buffer.reviews.log()
    key_K, last_K, state = Histories(log).states(buffer.recall.rule, log)
    place = {int(key): at for at, key in enumerate(key_K)}
    rows = rows_of(buffer)
    rows = rows[rows["reps"] > 0]
    assert len(rows) > 30
    for row in rows:
        at = place[int(row["key"])]
        assert (last_K[at], state.reps_N[at]) == (row["last_review"], row["reps"])
        assert state.stability_N[at] == pytest.approx(row["stability"], rel=1e-5)
        assert state.difficulty_N[at] == pytest.approx(row["difficulty"], rel=1e-5)


def test_a_refit_makes_states_and_intervals_anew():
    buffer = a_buffer(seed=3, refit_every=10)
    counts = []
    for now in range(1, 15):
        play(buffer, now, num_revisits=REVISITS)
        counts.append(buffer.counts["num_refits"])
    assert counts == [0] * 9 + [1] * 5  # at iteration 10, before its visits
    rule = buffer.recall.rule
    assert rule.parameters()["w"] != make_spacing("fsrs").parameters()["w"]
    log = buffer.reviews.log()
    key_K, _, state = Histories(log).states(rule, log)  # those reviewed before the refit, and after it
    place = {int(key): at for at, key in enumerate(key_K)}
    rows = rows_of(buffer)
    rows = rows[rows["reps"] > 0]
    found_N = np.array([state.stability_N[place[int(key)]] for key in rows["key"]])
    assert found_N == pytest.approx(rows["stability"].astype(float), rel=1e-4)
    assert rule.interval_of(found_N) == pytest.approx(rows["interval"].astype(float), rel=1e-4)
    buffer.check_valid()


def test_predictions_know_earlier_reviews_only():
    """Two worlds that differ in the last iteration alone: what was predicted for it is the same."""
    predictions = []
    for rewards in ((1.0,) * 4, (0.0,) * 4):
        buffer = played(7, **BOTH)
        prompts = buffer.due(4, 8)
        visits = buffer.add([a_group(p, 8, i, rewards) for i, p in enumerate(prompts)], 8)
        predictions.append([visit.predicted for visit in visits])
        assert buffer.counts["num_recalibrations"] >= 2
    assert predictions[0] == predictions[1] and len(predictions[0]) == 4


def test_recalibrated_predictions_are_those_of_the_line_and_lose_less():
    plain, buffer = played(20), played(20, recalibrate_every=2)
    line = buffer.recall.correction.line
    assert line != Line()
    slots_N = buffer.store.slots()
    slots_N = slots_N[buffer.store.items["reps"][slots_N] > 0]
    rows = buffer.store.items[slots_N]
    raw_N = make_spacing("fsrs").retrievability(SpacingState.of(rows), 21.0 - rows["last_review"])
    logit_N = np.log(raw_N / (1 - raw_N))
    expected_N = 1 / (1 + np.exp(-line.intercept - line.slope * logit_N))
    assert buffer.recall.retrievability(slots_N, 21) == pytest.approx(expected_N, rel=1e-4)
    own = buffer.reviews.log()
    assert loss_of(predict(make_spacing("fsrs"), own)) > loss_of(own) + 0.05
    assert buffer.stats(20)["recall_log_loss"] < plain.stats(20)["recall_log_loss"]


@pytest.mark.slow
def test_a_restart_goes_on_with_the_corrections_and_a_reader_shows_them(tmp_path):
    whole = played(16, **BOTH)
    first = played(11, directory=tmp_path, **BOTH)
    state = first.recall.correction.get_state()
    assert state["fitted"] and state["line"] != [0.0, 1.0] and json.loads(json.dumps(state)) == state
    first.close()
    again = a_buffer(tmp_path, **BOTH)
    assert again.recall.correction.get_state() == state
    played(16, again, start=12)
    assert rows_of(again).tobytes() == rows_of(whole).tobytes()
    assert again.reviews.rows.tobytes() == whole.reviews.rows.tobytes()
    assert again.recall.correction.get_state() == whole.recall.correction.get_state()
    slots_N = again.store.slots()
    expected_N = again.recall.retrievability(slots_N, 16)
    again.close()
    with reading(tmp_path) as read:
        known_N = ~np.isnan(read.recall)
        assert read.now == 16 and read.recall[known_N].tolist() == expected_N[known_N].tolist()
        assert read.rule == again.recall.rule
    off = a_buffer(tmp_path)  # turned off: the rule as set
    assert off.recall.correction.line == Line() and off.recall.rule == make_spacing("fsrs")
    off.close()


def fail_after_a_correction(buffer):
    with buffer._transaction(""):
        assert buffer.recall.correct(buffer.reviews.log, 30)["num_refits"] == 1
        raise ZeroDivisionError


def test_an_error_undoes_a_correction():
    buffer = played(9, **BOTH)
    state, rows = buffer.recall.correction.get_state(), rows_of(buffer).tobytes()
    with pytest.raises(ZeroDivisionError):
        fail_after_a_correction(buffer)
    assert buffer.recall.correction.get_state() == state and rows_of(buffer).tobytes() == rows
    buffer.check_valid()


def test_without_corrections_nothing_is_kept_of_them():
    assert "correction" not in played(2)._state() and "correction" in played(2, recalibrate_every=1)._state()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"spacing": "none", "refit_every": 5}, "refit_every = 5; expected 0 with spacing = 'none', which has no"),
        ({"spacing": "srl1", "spacing_config": {"faithful": True}, "refit_every": 1}, "no parameter to fit"),
        ({"refit_every": -1}, "refit_every = -1; expected an integer of at least 0"),
        ({"recalibrate_every": 0.5}, "recalibrate_every = 0.5; expected an integer of at least 0"),
    ],
)
def test_a_rule_that_cannot_be_corrected_is_refused(settings, words):
    (fault,) = ReplaySettings(**settings).faults()
    assert words in fault
