"""Targets of right answers in a buffer, and items that leave without a byte."""

from collections import Counter

import numpy as np
import pytest

from rllib_srl.replay.items import Tables
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, fingerprint
from rllib_srl.replay.targets import draw_targets
from rllib_srl.types import TARGET, Group, Prompt, Target
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt, everything


def target_of(group: Group, episode: int, num: float = 0.0, k: int = 2) -> Target:
    """Return a target of an answer, whose log-probs say `num`."""
    length = int(group.num_loss_tokens_G()[episode])
    logp_Tk = np.full((length, k), -num, np.float16)
    return Target(group.group_id, episode, np.full((length, k), 7, np.int32), logp_Tk, logp_Tk[:, 0])


def with_targets(tmp_path=None, num: int = 6, **settings):
    """Return a buffer of groups whose episodes 0 and 2 are right and have targets, and the groups."""
    buffer = a_buffer(tmp_path, **settings)
    groups = [a_group(a_prompt(i, "ab"[i % 2]), 1, i) for i in range(num)]
    buffer.add(groups, 1)
    targets = [target_of(group, episode, i + 0.25 * episode) for i, group in enumerate(groups) for episode in (0, 2)]
    assert buffer.add_targets(targets, 1, "1.targets") == 2 * num
    return buffer, groups


def test_a_drawn_answer_is_the_episode_with_its_target(tmp_path):
    buffer, groups = with_targets(tmp_path)
    drawn = buffer.draw_targets(12, 2, "2.retain")
    assert len({(one.group_id, one.extra[TARGET].episode) for one in drawn}) == 12
    for one in drawn:
        target, whole = one.extra[TARGET], groups[int(one.group_id.split(".")[1])]
        assert (one.origin, one.size) == ("retain", 1)
        assert one.token_ids_N.tolist() == whole.stream(target.episode).tolist()
        assert target.logp_Tk[0, 0] == -(groups.index(whole) + 0.25 * target.episode)
        one.check_valid()
    again = buffer.draw_targets(12, 2, "2.retain")
    assert [one.extra[TARGET].episode for one in again] == [one.extra[TARGET].episode for one in drawn]
    size = sum(target_of(group, episode).num_bytes for group in groups for episode in (0, 2))
    stats = buffer.stats(2)
    assert (stats["num_targets"], stats["num_retained"]) == (12, 12)
    assert stats["num_bytes_stored"] > int(buffer.tables.groups["num_bytes"].sum()) + size
    check_valid(buffer)
    state = everything(buffer)
    buffer.close()
    buffer = a_buffer(tmp_path)
    assert everything(buffer) == state
    buffer.close()


def test_some_prompts_and_domains_are_left_out():
    buffer, groups = with_targets()
    assert {one.prompt.domain for one in buffer.draw_targets(12, 2, without_domains=["a", "none"])} == {"b"}
    keys = [group.prompt.key for group in groups[:4]]
    assert {one.prompt for one in buffer.draw_targets(12, 2, without_keys=keys)} == {g.prompt for g in groups[4:]}
    counts = Counter(one.prompt.prompt_id for now in range(300) for one in buffer.draw_targets(2, now))
    assert min(counts.values()) > 65 and sum(counts.values()) == 600  # each 100 times, deviation 8


def test_a_limit_of_a_domain_drops_the_oldest_groups():
    buffer, _ = with_targets()
    assert buffer.add_targets([], 2, per_domain=4) == 0 and buffer.stats(2)["num_targets"] == 8
    assert buffer.add_targets([], 2, per_domain=2) == 0
    assert sorted(one.group_id for one in buffer.draw_targets(99, 2)) == ["1.4", "1.4", "1.5", "1.5"]
    assert buffer.stats(2)["num_targets_replaced"] == 8
    check_valid(buffer)


def test_targets_of_an_environment_leave_and_its_groups_stay(tmp_path):
    buffer = a_buffer(tmp_path)
    prompts = [Prompt(env_id, f"p{i}", "a") for i, env_id in enumerate(("one", "other", "one"))]
    groups = [a_group(prompt, 1, i) for i, prompt in enumerate(prompts)]
    buffer.add(groups, 1)
    buffer.add_targets([target_of(group, episode) for group in groups for episode in (0, 2)], 1)
    assert buffer.drop_targets(["one", "unknown"], "1.drop") == buffer.drop_targets(["one"], "1.drop") == 4
    assert [one.group_id for one in buffer.draw_targets(9, 2)] == ["1.1", "1.1"]
    assert buffer.stats(2)["num_stored_groups"] == 3
    check_valid(buffer)
    buffer.close()


def test_a_target_is_replaced_and_survives_a_rating_of_its_group():
    buffer, (group, *_) = with_targets(num=1)
    assert buffer.add_targets([target_of(group, 0, 50.0)], 2) == 1
    rating = RatedAnswer(1, fingerprint(group, 1), 1.0)
    buffer.rate_answers([RatedGroup(group.group_id, group.prompt.key, (rating,))], "file", 1, 2)
    drawn = buffer.draw_targets(9, 3)
    assert sorted(float(one.extra[TARGET].logp_Tk[0, 0]) for one in drawn) == [-50.0, -0.5]
    check_valid(buffer)


def test_a_wrong_target_changes_nothing():
    buffer, (group, *_) = with_targets(num=2)
    state = everything(buffer)
    with pytest.raises(ValueError, match=r"target of group 1.0: it has no episode 4"):
        buffer.add_targets([target_of(group, 0, 9.0), Target("1.0", 4, *[np.zeros((1, 1))] * 2, np.zeros(1))], 2)
    assert everything(buffer) == state
    check_valid(buffer)


def tables_with_targets(*answers):
    """Return tables with an item and a group for each tuple (domain, item, number of its answers with a target)."""
    store = Tables()
    for domain, number, num in answers:
        slot = store.add_item(number, a_prompt(number), domain, 0)
        store.add_group(slot, f"g{number}", 2, size=8)
        store.targets |= {(store.next_group_seq - 1, episode): 10 for episode in range(num)}
    return store


def test_every_item_comes_once_before_any_comes_twice_and_domains_take_turns():
    store, rng = tables_with_targets(("a", 0, 4), ("a", 1, 1), ("a", 2, 1), ("b", 3, 3)), np.random.default_rng(0)
    for _ in range(50):
        drawn = draw_targets(store, 99, rng)
        assert len(set(drawn)) == len(drawn) == 9
        seqs = [seq for seq, _ in drawn]
        assert set(seqs[:4]) == {0, 1, 2, 3} and 3 in seqs[:2]  # one of b among the first of each domain
        assert set(seqs[4:6]) == {0, 3} and set(seqs[6:8]) == {0, 3} and seqs[8] == 0
    assert draw_targets(store, 0, rng) == [] == draw_targets(Tables(), 3, rng)


def test_domains_then_items_then_answers_are_drawn_equally_often():
    store, rng = tables_with_targets(("a", 0, 2), ("a", 1, 1), ("b", 2, 1)), np.random.default_rng(1)
    counts = Counter(place for _ in range(4000) for place in draw_targets(store, 1, rng))
    want = {(0, 0): 500, (0, 1): 500, (1, 0): 1000, (2, 0): 2000}
    assert sum((counts[place] - num) ** 2 / num for place, num in want.items()) < 16.3  # chi-square, 3 df, p = .001


def test_targets_leave_with_their_group_and_item():
    buffer, groups = with_targets(capacity=6, groups_per_item=1, eviction="fifo")
    newer = a_group(groups[0].prompt, 2, 0, salt=1)
    buffer.add([newer], 2)  # replaces the group
    assert buffer.stats(2)["num_targets"] == 10 and buffer.add_targets([target_of(groups[0], 0)], 2) == 0
    buffer.add([a_group(9, 3, 0)], 3)  # evicts the item of the first group, which has no target left
    buffer.add([a_group(10, 4, 0)], 4)  # and the next
    assert buffer.stats(4)["num_targets"] == 8
    buffer.draw_groups(6, 5)
    buffer.drop([groups[3].group_id])
    assert len(buffer.draw_targets(99, 6)) == 6
    check_valid(buffer)
