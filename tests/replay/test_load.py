"""Shares against exact arithmetic, the running load against a sum made afresh, and 500 iterations of a busy memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.replay.schedule.load import LoadControl, Share, reuse_share, whole
from rllib_srl.replay.schedule.spacing import SpacingState, make_spacing
from rllib_srl.replay.selection.candidates import Candidates, SelectionSettings
from rllib_srl.replay.selection.rules import select

# Shares


def test_a_share_by_hand():
    share = Share(0.2)
    assert [share.owed(4) for _ in range(10)] == [0, 1, 1, 1, 1] * 2  # .8, 1.6, 1.4, 1.2, 1.0
    assert [Share(1.0).owed(4), Share(0.0).owed(4)] == [4, 0]
    third = Share(1 / 3)
    assert sum(third.owed(1) for _ in range(30_000)) == 9_999  # .3333333333333333 is less than a third


def test_the_long_run_share_is_what_it_says():
    """The source system replayed int(4 * 0.2) = 0 prompts."""
    share = Share(0.2)
    assert sum(share.owed(4) for _ in range(1000)) == 800


@given(fraction=st.integers(0, 1000).map(lambda k: k / 1000), nums=st.lists(st.integers(0, 64), max_size=60))
def test_owed_is_the_exact_share_rounded_down(fraction, nums):
    share, total = Share(fraction), 0
    for done in range(len(nums)):
        total += share.owed(nums[done])
        assert total == Fraction(str(fraction)) * sum(nums[: done + 1]) // 1


def test_a_share_that_is_tiny_is_not_floored_away():
    share = Share(1e-7)
    assert share.owed(9_999_999) == 0
    assert share.owed(1) == 1


def test_reuse_is_a_share_of_the_whole_batch():
    # P = 6, fraction .25: R = 2, 2 / 8 = .25; P = 16 at .2: R = 4
    assert reuse_share(0.25).owed(6) == 2 and reuse_share(0.2).owed(16) == 4
    share = reuse_share(0.3)
    reused = sum(share.owed(4) for _ in range(700))  # 2,800 * 3 / 7
    assert reused == 1200 and reused / (2800 + reused) == 0.3


def test_a_share_resumes_where_it_was():
    share = reuse_share(0.3)
    for _ in range(5):
        share.owed(4)
    state = json.loads(json.dumps(share.get_state()))
    other = reuse_share(0.3)
    other.set_state(state)
    assert [share.owed(5) for _ in range(20)] == [other.owed(5) for _ in range(20)]


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), "half", True, None])
def test_bad_fractions_are_named(bad):
    with pytest.raises(ValueError, match="fraction = .*; expected a number in"):
        Share(bad)
    with pytest.raises(ValueError, match="fraction = 1.0; expected less than 1"):
        reuse_share(1.0)
    with pytest.raises(ValueError, match="num = -1; expected at least 0"):
        Share(0.5).owed(-1)


def test_whole_forgives_rounding():
    assert whole(0.7 + 0.1 + 0.1 + 0.1) == (1, 0.0)  # .9999999999999999
    part, rest = whole(2.4)
    assert part == 2 and rest == pytest.approx(0.4)


# Load


def test_load_by_hand():
    control = LoadControl("throttle_new")
    control.add(np.array([1, 2, 4, 0.5]))  # 1 + .5 + .25 + 1: at most one visit an iteration
    assert control.load == 2.75 and control.num_items == 4
    # slots 4: 1.25 left; .5 + .5 fit, .25 fits exactly, the next does not
    assert control.admit(np.array([2, 2, 4, 100]), 4.0) == 3
    assert control.admit(np.array([2, 2, 4]), 2.0) == 0
    control.remove(np.array([1.0]))
    assert control.load == 1.75
    metrics = control.metrics(4.0, num_due=9, num_waiting=7)
    assert metrics == {"load": 1.75, "load_ratio": 0.4375, "backlog": 5.0, "num_waiting": 7.0, "stretch": 1.0}


def test_stretch_makes_the_load_fit():
    control = LoadControl("stretch")
    control.add(np.full(16, 2.0))  # 8 reviews an iteration
    assert control.stretch(4.0) == pytest.approx(2.0) and control.stretch(9.0) == 1.0 and control.stretch(0.0) == 1.0
    assert control.admit(np.ones(100), 4.0) == 100
    none = LoadControl("none")
    none.add(np.ones(50))
    assert none.stretch(4.0) == 1.0 and none.admit(np.ones(9), 4.0) == 9


@given(
    moves=st.lists(st.lists(st.floats(0, 1e6), min_size=1, max_size=5), max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_the_running_sum_is_that_of_the_schedule(moves, order):
    control, inside = LoadControl("throttle_new"), []
    for intervals in moves:
        control.add(np.array(intervals))
        inside.append(intervals)
        if len(inside) > 3:
            control.remove(np.array(inside.pop(order.randrange(len(inside)))))
        control.check(np.array([each for intervals in inside for each in intervals]))
    for intervals in inside:
        control.remove(np.array(intervals))
    assert control.load == 0.0 and control.num_items == 0


def test_a_million_changes_leave_no_drift():
    rng, control = np.random.default_rng(0), LoadControl("throttle_new")
    interval_N = rng.uniform(1, 300, 1000)
    control.add(interval_N)
    for _ in range(1000):
        new_N = interval_N * rng.uniform(0.5, 2, 1000)
        control.remove(interval_N)
        control.add(new_N)
        interval_N = new_N
    control.check(interval_N)
    assert control.load == pytest.approx((1 / np.maximum(interval_N, 1)).sum(), rel=1e-9)


def test_load_state_survives_json():
    control, other = LoadControl("throttle_new"), LoadControl("throttle_new")
    control.add(np.array([3.0, 7.0]))
    other.set_state(json.loads(json.dumps(control.get_state())))
    other.check(np.array([7.0, 3.0]))


def test_bad_load_is_named():
    with pytest.raises(ValueError, match="load_control = 'brake'; expected one of"):
        LoadControl("brake")
    control = LoadControl("none")
    with pytest.raises(ValueError, match="expected finite numbers of at least 0"):
        control.add(np.array([np.nan]))
    control.add(np.array([2.0]))
    with pytest.raises(ValueError, match=r"removing 1 items of load 1; expected at most the 1 items of load 0.5"):
        control.remove(np.array([1.0]))
    with pytest.raises(ValueError, match=r"load = 0.5 of 1 items; expected 0.25 of 1"):
        control.check(np.array([4.0]))


def test_no_more_enter_at_once_than_there_are_slots():
    # 160 items of interval 40 would fit a load of 4, and 12 a time would all be due in 14 iterations
    control = LoadControl("throttle_new")
    assert control.admit(np.full(160, 40.0), 4.0) == 4
    assert control.admit(np.full(160, 40.0), 0.8) == 1  # a share below one slot still lets items in


# 500 iterations of 16 prompts: 12 are new, 4 are revisits

NUM_NEW, SLOTS, NUM_ITERATIONS = 12, 4, 500
SPACINGS = ("expanding", "fixed", "fsrs", "leitner", "sm2")


@dataclass
class Trace:
    """What happened in each iteration; `late` holds the relative lateness of each visit."""

    draws: list[set[int]] = field(default_factory=list)
    backlog: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)


@cache
def simulate(spacing: str, mode: str) -> Trace:
    """Run a memory whose items are recalled with a chance that falls with the time since the last visit."""
    rng, control, rule, size = (
        np.random.default_rng(0),
        LoadControl(mode),
        make_spacing(spacing),
        NUM_NEW * NUM_ITERATIONS,
    )
    state = SpacingState.new(size).columns()
    interval, due, last, num_in, trace = np.ones(size), np.zeros(size), np.zeros(size), 0, Trace()
    skill = rng.uniform(0.3, 0.95, size)

    def review(slots: np.ndarray, success: np.ndarray, now: int) -> None:
        before = SpacingState(**{f"{name}_N": column[slots] for name, column in state.items()})
        grade, elapsed = np.where(success, 3, 1), now - last[slots]
        after = rule.review(before, grade, elapsed, np.ones(len(slots), bool)).columns()
        for name, column in state.items():
            column[slots] = after[name]
        interval[slots], last[slots] = np.maximum(after["interval"], 1.0), now

    for now in range(NUM_ITERATIONS):
        played = np.arange(NUM_NEW * now, NUM_NEW * (now + 1))
        review(played, rng.random(NUM_NEW) < skill[played], now)
        entering = np.arange(num_in, num_in + control.admit(interval[num_in : played[-1] + 1], SLOTS))
        control.add(interval[entering])
        due[entering], num_in = now + interval[entering] * control.stretch(SLOTS), num_in + len(entering)

        is_due = np.flatnonzero(due[:num_in] <= now)
        overdue = (now - due[is_due]) / interval[is_due]
        drawn = select("srl", Candidates.of(len(is_due), overdue=overdue), SLOTS, rng, SelectionSettings(temperature=0))
        chosen = is_due[drawn.indices]
        metrics = control.metrics(SLOTS, len(is_due), played[-1] + 1 - num_in)
        trace.draws.append(set(chosen.tolist()))
        trace.backlog.append(metrics["backlog"])
        trace.ratio.append(metrics["load_ratio"])
        trace.late += overdue[drawn.indices].tolist()

        control.remove(interval[chosen])
        review(chosen, rng.random(len(chosen)) < skill[chosen] ** ((now - last[chosen]) / (4 * interval[chosen])), now)
        control.add(interval[chosen])
        due[chosen] = now + interval[chosen] * control.stretch(SLOTS)
    control.check(interval[:num_in])
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("spacing", SPACINGS)
def test_intake_bounds_backlog_load_and_lateness(spacing):
    trace = simulate(spacing, "throttle_new")
    assert max(trace.backlog) <= 5 * SLOTS
    assert max(trace.ratio) <= 2.5 and np.mean(trace.ratio[100:]) <= 1.25  # lapses shorten intervals behind admission
    assert np.median(trace.late) < 0.5
    assert np.mean([len(each) for each in trace.draws[20:]]) > 0.75 * SLOTS  # and the slots are used


@pytest.mark.slow
@pytest.mark.parametrize("spacing", SPACINGS)
def test_stretch_bounds_the_backlog(spacing):
    trace = simulate(spacing, "stretch")
    assert max(trace.backlog) <= 30 * SLOTS
    assert max(trace.backlog[250:]) <= max(trace.backlog[:250]) + 10 * SLOTS  # while 3,000 items come


@pytest.mark.slow
@pytest.mark.parametrize("spacing", ["fsrs", "leitner"])
def test_without_control_everything_is_soon_overdue(spacing):
    trace = simulate(spacing, "none")
    assert trace.backlog[-1] > 0.8 * (NUM_NEW - SLOTS) * NUM_ITERATIONS
    assert np.median(trace.late[-400:]) > 5 * max(np.median(simulate(spacing, "throttle_new").late), 0.1)


@pytest.mark.parametrize("mode", ["throttle_new", "stretch"])
@pytest.mark.parametrize("one, other", combinations(SPACINGS, 2))
def test_spacing_rules_draw_different_items_under_control(mode, one, other):
    pairs = zip(simulate(one, mode).draws[50:], simulate(other, mode).draws[50:])
    assert np.mean([len(a & b) / SLOTS for a, b in pairs]) < 0.25
