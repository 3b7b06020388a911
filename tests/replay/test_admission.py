"""Admission: every reason by a group made for it, the edges of every bound, what is stored of a group with secrets."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.common.rules import RuleError
from rllib_srl.replay import admission
from rllib_srl.replay.admission import Refusal, admit, is_degenerate, longest_loop, malformed
from rllib_srl.types import Group, StopReason
from tests.replay import groups

VARIED = list(range(40))


def group_of(*written: list[int]) -> Group:
    """Return a group whose episodes are the prompt [900, 901] and what is written."""
    return groups.group_of(*(([900, 901], ids) for ids in written))


GOOD = group_of(VARIED, VARIED[::-1])


def admitted(group, decode=None, **checks):
    """Return the refusal of a group; no hook unless one is named."""
    values = {"max_episode_tokens": None, "degenerate_share": 0.5, "admit": None}
    return admit(group, SimpleNamespace(**values | checks), decode)


def reason_of(group, **checks):
    refusal = malformed(group) or admitted(group, **checks)
    if refusal is None:
        return None
    assert refusal.episodes == tuple(range(group.size)) and refusal.train == (malformed(group) is None)
    return refusal.reason


def test_a_group_of_one_is_enough_and_an_empty_one_is_not():
    assert reason_of(group_of(VARIED)) is None
    assert reason_of(replace(GOOD, rewards_G=np.zeros(0, np.float32))) == "too_few"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.01])
def test_log_probs_of_foreign_groups_are_checked_again(value):
    logp_N = GOOD.behaviour_logp_N.copy()
    logp_N[5] = value
    assert reason_of(replace(GOOD, behaviour_logp_N=logp_N)) == "bad_logp"
    logp_N[5] = 1e-5  # a certain token, and rounding
    assert reason_of(replace(GOOD, behaviour_logp_N=logp_N)) is None


@pytest.mark.parametrize("changes", [
    {"behaviour_logp_N": np.where(GOOD.loss_mask_N, GOOD.behaviour_logp_N, -1)},
    {"behaviour_logp_N": GOOD.behaviour_logp_N[1:]},
    {"loss_mask_N": np.ones_like(GOOD.loss_mask_N)},
    {"loss_mask_N": GOOD.loss_mask_N.astype(np.int8)},
    {"rewards_G": np.array([np.nan, 1], np.float32)},
    {"stop_reasons": (StopReason.ABORTED, StopReason.TERMINATED)},
    {"offsets": np.array([0, 5], np.int64)},
    {"offsets": np.array([], np.int64)},
])  # fmt: skip
def test_any_other_broken_invariant_is_invalid(changes):
    assert reason_of(replace(GOOD, **changes)) == "invalid"


def test_the_longest_episode_decides():
    group = group_of(VARIED, [1, 2, 3])  # 42 and 5 tokens
    assert reason_of(group, max_episode_tokens=42) is None
    assert reason_of(group, max_episode_tokens=41) == "too_long"


STUCK = [7] * 21 + list(range(100, 119))  # 21 of 40 are one token
EVEN = [7, 8] * 20  # no token has more than half, but a loop has all
HALF = [7] * 20 + list(range(100, 120))
PHRASE = list(range(50, 60)) * 3 + list(range(100, 110))  # said three times: 30 of 40
TWICE = list(range(50, 70)) * 2  # said twice: no loop


@pytest.mark.parametrize(
    ("written", "is_degenerate"),
    [(VARIED, False), (STUCK, True), (HALF, False), (EVEN, True), (PHRASE, True), (TWICE, False), ([7] * 31, False)],
)
def test_degenerate_episodes_by_hand(written, is_degenerate):
    group = group_of(written, VARIED)
    assert [admission.is_degenerate(group, g, 0.5) for g in range(2)] == [is_degenerate, False]


def test_only_what_the_policy_wrote_is_judged(monkeypatch):
    mask_N = GOOD.loss_mask_N.copy()
    ids_N = GOOD.token_ids_N.copy()
    ids_N[2:20], mask_N[2:20] = 7, False  # a tool that repeats itself
    logp_N = np.where(mask_N, GOOD.behaviour_logp_N, 0)
    group = replace(GOOD, token_ids_N=ids_N, loss_mask_N=mask_N, behaviour_logp_N=logp_N)
    monkeypatch.setattr(admission, "MIN_TOKENS", 8)
    assert not is_degenerate(group, 0, 0.3)
    assert is_degenerate(replace(group, loss_mask_N=GOOD.loss_mask_N), 0, 0.3)


def test_a_group_is_degenerate_when_more_than_half_of_it_is():
    assert reason_of(group_of(STUCK, VARIED)) is None
    assert reason_of(group_of(STUCK, EVEN, VARIED, VARIED)) is None
    assert reason_of(group_of(STUCK, EVEN, VARIED)) == "degenerate"
    assert reason_of(group_of(STUCK, EVEN), degenerate_share=None) is None


def naive_loop(ids, max_period):
    """Return the longest stretch that is a phrase repeated at least three times, the last one perhaps cut."""
    longest = 0
    for start in range(len(ids)):
        for end in range(start + 3, len(ids) + 1):
            stretch = ids[start:end]
            for period in range(1, min(max_period, len(stretch) // 3) + 1):
                if all(token == stretch[i % period] for i, token in enumerate(stretch)):
                    longest = max(longest, len(stretch))
    return longest


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 6))
def test_loops_agree_with_naive_ones(ids, max_period):
    assert longest_loop(np.array(ids, np.int32), max_period) == naive_loop(ids, max_period)


def decode(ids):
    """Return one letter a token; 1 to 3 spell a password."""
    return "".join({1: "password=", 2: "hun", 3: "ter2", 4: " "}.get(int(i), "x") for i in ids)


LEAKY = group_of([5, 4, 1, 2, 3, 4, 5], [5, 5])


def test_a_secret_comes_before_what_is_trained_on():
    assert admitted(LEAKY, max_episode_tokens=3, admit="secrets", decode=decode).reason == "secret"
    assert admitted(LEAKY, max_episode_tokens=3) == Refusal("too_long", (0, 1), train=True)


def fives(group, decode):
    """Refuse a group with a token 5 that is written first: a hook that settings can name."""
    found = tuple(g for g in range(group.size) if group.stream(g)[2] == 5)
    return Refusal("five", found) if found else None


def kept_out(group, decode):
    return Refusal("mine", (1,), train=True)


def failing(group, decode):
    raise KeyError("x")


def bare(group, decode):
    return "no"


def beyond(group, decode):
    return Refusal("far", (2,))


def test_every_hook_is_asked_and_the_first_gives_the_reason():
    name, kept = f"{__name__}:fives", f"{__name__}:kept_out"
    assert admitted(LEAKY, admit=name, decode=decode) == Refusal("five", (0, 1))
    assert admitted(LEAKY, admit=["secrets", name], decode=decode) == Refusal("secret", (0, 1))
    assert admitted(LEAKY, admit=[kept, "secrets"], decode=decode) == Refusal("mine", (0,))
    assert admitted(LEAKY, admit=kept, decode=decode) == Refusal("mine")  # and all of it is trained on
    assert admitted(GOOD, admit=["secrets", name], decode=decode) is None


@pytest.mark.parametrize(("hook", "line"), [
    (failing, r"raised KeyError: 'x'"),
    (bare, r"returned str; expected None or Refusal\('lower_case', episodes\), episodes from 0 to 1"),
    (beyond, r"returned Refusal; expected None or Refusal\('lower_case', episodes\), episodes from 0 to 1"),
])  # fmt: skip
def test_a_hook_that_fails_is_named(hook, line):
    name = f"{__name__}:{hook.__name__}"
    with pytest.raises(RuleError, match=f"^replay_admit = '{name}' {line}$"):
        admitted(GOOD, admit=name, decode=decode)
