"""Stored groups under today's baseline: by hand, beside a naive twin, in draws, and after a restore."""

from __future__ import annotations

import pickle
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.batch.posterior import baseline
from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.rated import RatedAnswer, RatedGroup, fingerprint
from rllib_srl.replay.selection.today import Today
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.records import GROUP, ITEM
from rllib_srl.types import History
from tests.replay.groups import a_buffer, a_group, a_prompt, everything

NEW_FIELDS = ("history_clock", "lowest", "highest", "num_rewarded", "domain_place")
EVERYTHING = 10_000  # groups


def today(version=0, policy_kl=0.0, prior_weight=2.0, middle=0.0, least=0.0):
    return Today(version, policy_kl, prior_weight, middle, least)


def played(index, now, rewards, version=None, domain="sums", **fields):
    """Return a group by policy version `version`, the iteration if it is None."""
    versions = np.full((len(rewards), 2), now if version is None else version)
    return a_group(a_prompt(index, domain), now, rewards=rewards, versions_G2=versions, **fields)


def drawn(buffer, now, judge, **arguments):
    """Return what all groups that may be trained on again are: group id -> history."""
    return {one.group.group_id: one.history for one in buffer.draw(EVERYTHING, now, today=judge, **arguments)}


def a_memory(directory=None, **given):
    given = {"history_half_life": 2.0, "min_graded": 1, "max_uses": EVERYTHING, "groups_per_item": 20, **given}
    return a_buffer(directory, reuse_selection="uniform", **given)


# By hand


def test_groups_of_one_under_todays_baseline_by_hand():
    buffer = a_memory()
    buffer.add([played(0, 1, (1,))], 1)
    buffer.add([played(0, 3, (0,))], 3)
    # Version 5, half-life 2. Of the item: s = 1/2 at version 3, n = 1/2 + 1, and a half of both today.
    # Without the first group (weight 1/2): s = 0, n = 1, today 0 and .5; its domain without it: 0 of the second.
    # Without the second (weight 1): s = n = 1/2, today .25 and .25; its domain without it: 1 of the first.
    found = drawn(buffer, 5, today(5))
    assert found == {"1.0": History(0.0, 0.5, 0.0), "3.0": History(0.25, 0.25, 1.0)}
    # b = (2 * 0 + 0) / 2.5 = 0 and (2 * 1 + .25) / 2.25 = 1: surprises 1 and -1
    assert [baseline(np.array([r]), found[name], 2.0)[0] for name, r in (("1.0", 1.0), ("3.0", 0.0))] == [0.0, 1.0]
    assert drawn(buffer, 5, today(5, least=1.0)).keys() == found.keys()
    assert drawn(buffer, 5, today(5, least=1.01)) == {}
    assert drawn(buffer, 5, today(5, least=1.1, middle=0.2)).keys() == {"3.0"}  # |0 - 1 - .2|, |1 - 0 - .2| = .8
    assert drawn(buffer, 5, None) == {}  # by their own rewards none has a signal
    buffer.check_valid()


def test_peers_and_a_domain_of_one_group_by_hand():
    buffer = a_memory()
    buffer.add([played(0, 1, (1, 0, 1))], 1)
    # Alone in the domain and in the memory: no history, and .5 for the domain.
    assert drawn(buffer, 2, today(2)) == {"1.0": History(0.0, 0.0, 0.5)}
    # b = (2 * .5 + others) / 4: .5, .75 and .5, so the surprises are .5, -.75 and .5
    assert drawn(buffer, 2, today(2, least=0.75)).keys() == {"1.0"}
    assert drawn(buffer, 2, today(2, least=0.76)) == {}
    buffer.add([played(1, 2, (0.25, 0.75), domain="words")], 2)
    found = drawn(buffer, 3, today(3))
    assert found["1.0"] == pytest.approx((0.0, 0.0, 0.5)) and found["2.0"] == pytest.approx((0.0, 0.0, 2 / 3))


def test_what_agrees_with_its_history_is_no_candidate():
    buffer = a_memory(history_half_life=1e9)
    for now in range(1, 6):
        buffer.add([played(0, now, (1, 1)), played(1, now, (0, 0) if now < 5 else (1, 1), place=1)], now)
    # Prompt 0 was always right; prompt 1 was solved in iteration 5, and its earlier failures are a surprise since then.
    found = drawn(buffer, 6, today(6, prior_weight=0.5, least=0.15))
    assert found.keys() == {"1.1", "2.1", "3.1", "4.1", "5.1"}
    assert found["5.1"].reward_sum == pytest.approx(0) and found["1.1"].reward_sum == pytest.approx(2)
    assert found["1.1"].num_episodes == pytest.approx(8)


def test_surprise_takes_the_place_of_the_spread_in_the_priority():
    given = {"diversity_coeff": 0.0, "reuse_selection_config": {"temperature": 0.0}}
    buffer = a_buffer(history_half_life=2.0, min_graded=1, **given)
    buffer.add([played(0, 1, (1,)), played(1, 1, (1,), place=1), played(2, 1, (0,), place=2)], 1)
    (first,) = buffer.draw(1, 2, today=today(2))
    assert first.group.group_id == "1.2"  # 0 where the others had 1: the largest surprise
    groups = np.flatnonzero(buffer.store.groups["size"] > 0)
    candidates = buffer.draws.group_candidates(groups, 2, today(2))
    means = [(0.97 * 1) / (0.97 + 1), 0.97**2 / (0.97**2 + 1), 1.0]  # of the domain without each, in their order
    surprises = [1 - means[0], 1 - means[1], 0 - means[2]]
    assert candidates.variance.tolist() == pytest.approx([s * s for s in surprises])
    assert candidates.abs_advantage.tolist() == pytest.approx(np.abs(surprises))
    assert not buffer.draws.group_candidates(groups, 2).variance.any()


# Laws


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4).map(tuple)
VISIT = st.tuples(st.integers(0, 3), REWARDS, st.integers(0, 2))
CALLS = st.lists(st.lists(VISIT, min_size=1, max_size=4), min_size=1, max_size=6)


def played_calls(buffer, calls, changed=None):
    """Play calls: each visit is a prompt, its rewards, and by how many versions it lags; return all groups by id."""
    groups, kl = {}, 0.0
    for now, call in enumerate(calls, start=1):
        kl += 0.03 * now
        of_call = []
        for at, (index, rewards, lag) in enumerate(call):
            rewards = changed.get(f"{now}.{at}", rewards) if changed else rewards
            domain = "sums" if index < 2 else "words"
            of_call.append(played(index, now, rewards, version=max(0, now - lag), domain=domain, place=at, salt=at))
        groups |= {group.group_id: group for group in of_call}
        buffer.add(of_call, now, policy_kl=kl)
    return groups, kl


def naive(groups, by, version, policy_kl, half_life=2.0):
    """Return the history of each group's prompt without the group, from a list of all visits, and of its domain."""
    clocks, last, found = {}, {}, {}
    kls = np.cumsum([0.03 * now for now in range(1, 20)])
    for group_id, group in groups.items():  # in the order in which they were played
        key, now = group.prompt.key, int(group_id.partition(".")[0])
        told = {"versions": float(group.versions_G2.min()), "kl": kls[now - 1], "visits": None}[by]
        elapsed = 1.0 if by == "visits" else max(0.0, told - last.get(key, 0.0))
        clocks.setdefault(key, []).append((group_id, elapsed))
        last[key] = told
    for group_id, group in groups.items():
        key = group.prompt.key
        now_told = {"versions": version, "kl": policy_kl, "visits": None}[by]
        ending = 1.0 if by == "visits" else max(0.0, now_told - last[key])
        total = num = 0.0
        steps = [*(elapsed for _, elapsed in clocks[key]), ending]
        for nth, (other, _) in enumerate(clocks[key]):
            if other != group_id:
                rho = 0.5 ** (sum(steps[nth + 1 :]) / half_life)
                total += rho * float(groups[other].rewards_G.sum())
                num += rho * groups[other].size

        def mean_of(wanted, own=group_id):
            weights, means = [], []
            for domain in {one.prompt.domain for one in groups.values() if wanted(one)}:
                of = [one for one in groups.values() if one.prompt.domain == domain]
                for age, one in enumerate(reversed(of)):
                    if one.group_id != own:
                        weights.append(0.97**age)
                        means.append(float(one.rewards_G.mean()))
            return float(np.average(means, weights=weights)) if weights else None

        mean = mean_of(lambda one, domain=group.prompt.domain: one.prompt.domain == domain)
        mean = mean_of(lambda one, domain=group.prompt.domain: one.prompt.domain != domain) if mean is None else mean
        found[group_id] = (total, num, 0.5 if mean is None else mean)
    return found


@given(calls=CALLS, by=st.sampled_from(["versions", "visits", "kl"]), least=st.sampled_from([0.0, 0.2, 0.5]))
@settings(max_examples=40, deadline=None)
def test_histories_and_candidates_agree_with_a_list_of_all_visits(calls, by, least):
    with closing(a_memory(history_by=by)) as buffer:
        groups, kl = played_calls(buffer, calls)
        version, now = len(calls) + 3, len(calls) + 1
        judge = today(version, kl + 0.02, prior_weight=1.5, middle=0.1, least=least)
        expected = naive(groups, by, version, kl + 0.02)
        surprise = {
            name: np.abs(group.rewards_G - baseline(group.rewards_G.astype(float), History(*expected[name]), 1.5) - 0.1)
            for name, group in groups.items()
        }
        found = drawn(buffer, now, judge)
        clear = {name: one.max() for name, one in surprise.items() if abs(one.max() - max(least, 1e-12)) > 1e-6}
        assert {name for name in found if name in clear} == {name for name, one in clear.items() if one > least}
        for name, history in found.items():
            assert history == pytest.approx(expected[name], abs=1e-6)
        buffer.check_valid()


@given(calls=CALLS, by=st.sampled_from(["versions", "visits"]), data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_reward_of_a_group_is_part_of_its_own_history(calls, by, data):
    names = [f"{now}.{at}" for now, call in enumerate(calls, 1) for at in range(len(call))]
    own = data.draw(st.sampled_from(names))
    now, at = map(int, own.split("."))
    size = len(calls[now - 1][at][1])
    changed = {own: data.draw(st.tuples(*[st.sampled_from([0.0, 0.25, 0.5, 1.0])] * size))}
    judge = today(len(calls) + 1)
    histories = []
    for rewards in (None, changed):
        with closing(a_memory(history_by=by)) as buffer:
            groups, _ = played_calls(buffer, calls, rewards)
            stored = [row for row in buffer.store.groups if row["size"] > 0]
            (row,) = [row for row in stored if buffer.ledger.payloads.get(int(row["seq"])).group_id == own]
            rows, items = np.array([row], GROUP), np.array([buffer.store.items[row["slot"]]], ITEM)
            reward_sum = np.array([groups[own].rewards_G.sum(dtype=np.float64)])
            histories.append(buffer.draws.histories(judge, rows, items, [groups[own].prompt.domain], reward_sum))
    for one, other in zip(*histories, strict=True):
        assert one == pytest.approx(other, abs=1e-9)


# Draws


def test_other_rules_draw_as_before_and_a_repeated_request_has_the_same_histories():
    buffers = [a_memory(seed=5) for _ in range(2)]
    for buffer in buffers:
        played_calls(buffer, [[(0, (1, 0), 0), (1, (0, 0), 0), (2, (1,), 0)]] * 3)
    plain = [one.group.group_id for one in buffers[0].draw(2, 4, request="4.sample")]
    assert buffers[0].ledger.journal.answer("4.sample") == [int(seq) for seq in buffers[0].drawn.values()]
    assert len(plain) == 2 and all(buffers[0].draw(2, 4, request="4.sample")[i].history is None for i in (0, 1))
    first = buffers[1].draw(3, 4, request="4.sample", today=today(4))
    buffers[1].add([played(0, 4, (1, 1, 1))], 4)  # the histories of today are others by now
    again = buffers[1].draw(3, 4, request="4.sample", today=today(9))
    assert [(one.group.group_id, one.history) for one in again] == [(one.group.group_id, one.history) for one in first]
    assert all(one.history is not None and one.meta.history == one.history for one in first)


def test_metadata_carry_the_history_out_of_the_process(tmp_path):
    settings = ReplaySettings(capacity=64, admit=None, min_graded=1)
    actor = ReplayBufferActor(settings, directory=tmp_path / "shard")
    actor.add([played(0, 1, (1,)), played(1, 1, (0,), place=1)], 1)
    metas, groups = actor.sample_apart(2, 2, "2.sample", None, today(2))
    sent = pickle.loads(pickle.dumps(metas, protocol=5))
    assert {meta.group_id: meta.history for meta in sent} == {
        "1.0": History(0.0, 0.0, 0.0),
        "1.1": History(0.0, 0.0, 1.0),
    }
    assert [group.group_id for group in groups] == [meta.group_id for meta in sent]
    actor.close()


# Durability


def test_a_restored_buffer_judges_as_before(tmp_path):
    given = {"run": "r", "seed": 3}
    with closing(a_memory(tmp_path / "a", **given)) as buffer:
        played_calls(buffer, [[(0, (1,), 0), (1, (0,), 0)], [(0, (0,), 0), (1, (1,), 0)]])
        buffer.snapshot(tmp_path / "copy")
        before = drawn(buffer, 3, today(3))
        assert len(before) == 4
        buffer.add([played(0, 3, (1,), salt=7)], 3)
        assert buffer.restore(tmp_path / "copy") == 1
        after = drawn(buffer, 4, today(3))
        assert after == before
        buffer.check_valid()
        state = everything(buffer)
    with closing(a_memory(tmp_path / "a", **given)) as again:
        assert everything(again) == state
        assert drawn(again, 4, today(3)) == after


# What is no part of a history


def test_groups_of_another_policy_and_unrated_ones():
    buffer = a_memory()
    buffer.add([played(0, 1, (1, 1))], 1)
    buffer.add([played(0, 1, (0, 0), salt=1, place=5)], 2, is_played=False)  # imported: no part of any history
    found = drawn(buffer, 3, today(1))
    assert found == {"1.0": History(0.0, 0.0, 0.5), "1.5": History(2.0, 2.0, 1.0)}


def test_ratings_are_part_of_the_history_and_leave_it_with_their_group():
    buffer = a_memory()
    unpaid = replace(played(0, 1, (0, 0, 0)), extra={"is_unpaid": True})
    buffer.add([unpaid, played(1, 1, (1, 0), place=1)], 1)
    assert "1.0" not in drawn(buffer, 2, today(1))  # nobody has rated it
    answers = tuple(RatedAnswer(g, fingerprint(unpaid, g), r) for g, r in ((0, 1.0), (2, 0.5)))
    buffer.rate_answers([RatedGroup("1.0", unpaid.prompt.key, answers, 0.75)], "file", 1, 2)
    assert drawn(buffer, 3, today(1))["1.0"] == History(pytest.approx(0), pytest.approx(0), 0.5)
    buffer.add([played(0, 3, (1,))], 3)
    found = drawn(buffer, 4, today(3))
    assert found["1.0"] == History(1.0, 1.0, pytest.approx((0.97 * 0.5 + 1) / 1.97))
    assert found["3.0"] == pytest.approx((0.75, 1.0, 0.5))  # 1.5 of 2, halved in two versions
    again = tuple(RatedAnswer(g, fingerprint(unpaid, g), r) for g, r in ((0, 0.0), (2, 0.5)))
    buffer.rate_answers([RatedGroup("1.0", unpaid.prompt.key, again, 0.75)], "file", 2, 4)
    found = drawn(buffer, 5, today(3))
    assert found["1.0"] == History(1.0, 1.0, pytest.approx((0.97 * 0.5 + 1) / 1.97))
    assert found["3.0"] == pytest.approx((0.25, 1.0, 0.5))
    buffer.check_valid()
