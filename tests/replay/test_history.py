"""The history of prompts and domains: by hand, beside a naive twin, and after errors."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.history import DomainStatistics, discount
from rllib_srl.types import HISTORY, History
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, row_of

FIELDS = ("history_sum", "history_count", "num_zero_variance")


def played(index, now, rewards, version=None, **fields):
    """Return a group by policy version `version`, the iteration if it is None."""
    size = len(rewards)
    versions = np.full((size, 2), now if version is None else version)
    return a_group(index, now, rewards=rewards, versions_G2=versions, **fields)


def add(buffer, now, *groups, **arguments):
    return [visit.history for visit in buffer.add(list(groups), now, **arguments)]


def test_the_history_of_a_prompt_by_hand():
    buffer = a_buffer(history_half_life=2.0)
    assert add(buffer, 1, played(0, 1, (1, 0, 1, 1))) == [History(0.0, 0.0, 0.5)]  # nothing was ever played
    # two versions later half of 3 of 4 is left; the domain has one group with mean .75
    assert add(buffer, 3, played(0, 3, (0, 0, 0, 1))) == [History(1.5, 2.0, 0.75)]
    assert (row_of(buffer, 0)["history_sum"], row_of(buffer, 0)["history_count"]) == (2.5, 6.0)
    domain = (0.97 * 0.75 + 0.25) / 1.97
    assert add(buffer, 3, played(0, 3, (1, 1))) == [History(2.5, 6.0, pytest.approx(domain))]  # no version later
    assert (row_of(buffer, 0)["history_sum"], row_of(buffer, 0)["history_count"]) == (4.5, 8.0)


@pytest.mark.parametrize(
    "half_life, versions, rho",
    [(2.0, (3, 7), 0.25), (11.0, (3, 14), 0.5), (2.0, (7, 3), 1.0)],  # the last by an older policy
)
def test_what_discounts_a_history(half_life, versions, rho):
    assert discount(half_life, versions[1] - versions[0]) == pytest.approx(rho, rel=1e-12)
    buffer = a_buffer(history_half_life=half_life)
    add(buffer, 1, played(0, 1, (1, 1), versions[0]))
    (history,) = add(buffer, 9, played(0, 9, (0, 0), versions[1]))
    assert history == (pytest.approx(2 * rho), pytest.approx(2 * rho), 1.0)
    (history,) = add(buffer, 9, played(0, 9, (0, 0), max(versions), salt=1))
    assert history[:2] == (pytest.approx(2 * rho), pytest.approx(2 * rho + 2))  # counted from the newest version


def test_silence_by_hand():
    buffer = a_buffer()
    # equal rewards are counted, whatever they are; the count ends at 8
    rewards = [(0,) * 4, (0,) * 4, (1, 0, 0, 0), (1,) * 4, (1, 0, 0, 0), *[(0.5,) * 4] * 9]
    for now, (one, expected) in enumerate(zip(rewards, [1, 2, 0, 1, 0, *range(1, 9), 8], strict=True), start=1):
        add(buffer, now, played(0, now, one))
        assert row_of(buffer, 0)["num_zero_variance"] == expected


def test_groups_of_another_policy_change_no_history_of_a_known_item():
    buffer = a_buffer()
    add(buffer, 1, played(0, 1, (1, 0)))
    before = [row_of(buffer, 0)[name] for name in FIELDS], dict(buffer.domain_statistics.sums)
    buffer.add([played(0, 2, (0, 0))], 2, is_played=False)
    assert ([row_of(buffer, 0)[name] for name in FIELDS], buffer.domain_statistics.sums) == before


def test_the_mean_of_a_domain_by_hand():
    domains = DomainStatistics()
    assert domains.mean("a") == 0.5
    domains.note("a", 0.25)
    assert (domains.mean("a"), domains.mean("b")) == (0.25, 0.25)  # an unknown domain is like all of them
    domains.note("a", 0.0)
    assert domains.mean("a") == pytest.approx(0.97 * 0.25 / 1.97)
    assert DomainStatistics(json.loads(json.dumps(domains.sums))).sums == domains.sums


def test_a_stored_group_is_no_part_of_its_own_history():
    # Visits at versions 1, 3 and 5 with sums 3, 1 and 2 of 4 episodes each; found by version 7, half-life 2.
    buffer = a_buffer(history_half_life=2.0, groups_per_item=3)
    for now, rewards in ((1, (1, 1, 1, 0)), (3, (1, 0, 0, 0)), (5, (1, 1, 0, 0))):
        add(buffer, now, played(0, now, rewards))
    drawn = {one.group_id: one.extra[HISTORY] for one in buffer.draw_groups(3, 6, version=7)}
    found = [drawn[f"{now}.0"] for now in (1, 3, 5)]
    sums = [3 / 8, 1 / 4, 2 / 2]  # discounted until version 7
    assert [one.reward_sum for one in found] == pytest.approx([sum(sums) - own for own in sums])
    assert [one.num_episodes for one in found] == pytest.approx([1 + 2, 0.5 + 2, 0.5 + 1])
    assert [one.domain_mean for one in found] == [buffer.domain_statistics.mean("sums")] * 3
    assert all(HISTORY not in one.extra for one in buffer.draw_groups(3, 6))


def test_a_group_of_another_policy_is_not_taken_out_of_a_history_that_it_is_not_in():
    buffer = a_buffer()
    add(buffer, 1, played(0, 1, (1, 0)))
    buffer.add([played(0, 1, (1, 1, 0), salt=1, group_id="1.1")], 1, is_played=False)
    drawn = {one.group_id: one.extra[HISTORY][:2] for one in buffer.draw_groups(2, 2, version=1)}
    assert drawn == {"1.0": (0.0, 0.0), "1.1": (1.0, 2.0)}


KINDS = [(1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1), (1,), (0,), (0.5, 0.25, 0.5), (1, 1)]
PLAYS = st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.booleans())  # prompt, rewards, whether it is refused
CALLS = st.lists(st.lists(PLAYS, min_size=1, max_size=5), max_size=8)


@given(calls=CALLS)
@settings(max_examples=40, deadline=None)
def test_histories_agree_with_a_list_of_all_visits(calls):
    limits = {"min_graded": 1, "groups_per_item": 1, "max_episode_tokens": 10}
    buffer = a_buffer(history_half_life=2.0, **limits)
    visits: dict[int, list] = {}  # prompt -> (version, rewards) of its visits
    means: list[float] = []

    def past(index, version):
        """Return s and n: each reward is halved once for two versions since then."""
        weights = [(0.5 ** ((version - then) / 2), rewards) for then, rewards in visits.get(index, [])]
        return sum(w * sum(rewards) for w, rewards in weights), sum(w * len(rewards) for w, rewards in weights)

    for now, call in enumerate(calls, start=1):
        groups = [
            played(index, now, rewards, salt=at, num_turns=1 + is_refused)
            for at, (index, rewards, is_refused) in enumerate(call)
        ]
        weight = sum(0.97**k for k in range(len(means)))
        mean = sum(0.97**k * one for k, one in enumerate(reversed(means))) / weight if means else 0.5
        expected = [History(*past(index, now), mean) for index, *_ in call]
        for history, one in zip(add(buffer, now, *groups), expected, strict=True):
            assert history == pytest.approx(one)
        for index, rewards, is_refused in call:
            if index in visits or not is_refused:  # a refused group makes no item
                visits.setdefault(index, []).append((now, rewards))
            means.append(sum(rewards) / len(rewards))
    for index, of in visits.items():
        row, last = row_of(buffer, index), of[-1][0]
        assert (row["history_sum"], row["history_count"]) == pytest.approx(past(index, last))
        silent = 0
        for _, rewards in of:
            silent = 0 if len(set(rewards)) > 1 else min(8, silent + 1)
        assert row["num_zero_variance"] == silent
    check_valid(buffer)
    buffer.close()
