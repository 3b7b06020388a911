"""Gates: the arithmetic by hand, against brute force, and every verdict at its boundary."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rllib_srl.people import gates
from rllib_srl.people.gates import Change, paired_change, paired_interval, paired_score

Z = 1.959963984540054


def change(low: float, at: float, high: float) -> Change:
    """Return a change of `at` on 1000 prompts with a given interval."""
    gained = round(1000 * max(at, 0.0))
    return Change(1000, round(1000 * max(-at, 0.0)), gained, 0.5, 0.5 + at, low, high)


def test_the_score_without_a_difference_is_mcnemars() -> None:
    assert paired_score(100, 15, 5, 0.0) == pytest.approx(-10 / math.sqrt(20))
    assert paired_score(1000, 15, 5, 0.0) == pytest.approx(-10 / math.sqrt(20))  # agreeing pairs say nothing


def test_the_score_by_hand() -> None:
    # n = 10, lost 2, gained 1, d = 1/2: 20 q^2 + (21/2 - 3) q - 1/2 = 0, q = (-7.5 + sqrt(56.25 + 40)) / 40 = 0.057767
    # variance 10 (2 q + 1/4) = 3.65534, gap 1 - 2 - 5 = -6: z = -6 / 1.911894
    assert paired_score(10, 2, 1, 0.5) == pytest.approx(-3.138249, abs=1e-5)


def test_without_any_loss_or_gain_the_bound_is_that_of_one_proportion() -> None:
    # gap -n d, q = 0 for d > 0, variance n d (1 - d): z^2 = n d / (1 - d), so d = z^2 / (n + z^2), Wilson's bound
    assert paired_interval(100, 0, 0, 0.95) == pytest.approx((-(Z**2) / (100 + Z**2), Z**2 / (100 + Z**2)))


@given(st.integers(1, 400), st.data())
@settings(max_examples=150)
def test_the_interval_ends_where_the_score_rejects_and_mirrors(num: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, num))
    gained = data.draw(st.integers(0, num - lost))
    low, high = paired_interval(num, lost, gained, 0.95)
    assert -1 <= low <= (gained - lost) / num <= high <= 1
    assert low == -1 or paired_score(num, lost, gained, low) == pytest.approx(Z, abs=1e-5)
    assert high == 1 or paired_score(num, lost, gained, high) == pytest.approx(-Z, abs=1e-5)
    assert paired_interval(num, gained, lost, 0.95) == pytest.approx((-high, -low), abs=1e-9)
    inner = paired_interval(num, lost, gained, 0.8)
    assert low <= inner[0] and inner[1] <= high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Exact, over all outcomes of 60 prompts; the score may miss by about .02."""
    p_lost, p_gained = 0.1, 0.02
    num, covered, total = 60, 0.0, 0.0
    cells = [p_lost, p_gained, 1 - p_lost - p_gained]
    for lost in range(num + 1):
        for gained in range(num - lost + 1):
            chance = stats.multinomial.pmf([lost, gained, num - lost - gained], num, cells)
            if chance > 1e-6:
                low, high = paired_interval(num, lost, gained, 0.95)
                covered, total = covered + chance * (low <= p_gained - p_lost <= high), total + chance
    assert total > 0.999 and 0.93 < covered / total < 0.97


def test_only_prompts_answered_both_times_count() -> None:
    before = {"a": True, "b": True, "c": False, "d": False, "lost": True}
    after = {"a": True, "b": False, "c": True, "d": True, "new": False}
    found = paired_change(before, after, 0.9)
    assert (found.num, found.num_lost, found.num_gained) == (4, 1, 2)
    assert (found.before, found.after, found.change) == (0.5, 0.75, 0.25)
    assert (found.low, found.high) == paired_interval(4, 1, 2, 0.9)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="1 answers before and 1 after have no prompt in common"):
        paired_change({"a": True}, {"b": True}, 0.95)
    for bad in ((0, 0, 0, 0.95), (5, 3, 3, 0.95), (5, -1, 3, 0.95), (5, 1, 1, 1.0)):
        with pytest.raises(ValueError, match=r"expected lost \+ gained <= num >= 1"):
            paired_interval(*bad)


@given(st.floats(0.005, 0.9), st.floats(0.5, 0.999))
@settings(max_examples=50, deadline=None)
def test_kept_can_pass_with_just_as_many_prompts_as_it_needs(max_drop: float, confidence: float) -> None:
    least = gates.least_prompts(max_drop, confidence)
    for num in {max(1, least - 1), least}:
        same = dict.fromkeys(range(num), True)
        assert gates.kept("d", paired_change(same, same, confidence), max_drop).is_passed == (num >= least)


@pytest.mark.parametrize(
    ("low", "at", "high", "is_passed"),
    [(-0.019, 0.0, 0.02, True), (-0.02, 0.0, 0.02, False), (-0.05, 0.04, 0.13, False), (0.01, 0.04, 0.07, True)],
)
def test_kept_passes_what_is_shown_to_be_harmless(low: float, at: float, high: float, is_passed: bool) -> None:
    assert gates.kept("compare", change(low, at, high), 0.02).is_passed == is_passed


def test_sanity_and_drift_have_limits() -> None:
    assert [gates.sanity(num).is_passed for num in (0, 3)] == [True, False]
    assert [gates.drift(kl, 0.5).is_passed for kl in (0.5, 0.51, math.inf, math.nan)] == [True, False, False, False]
