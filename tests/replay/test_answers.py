"""Right answers that a buffer draws to be held, and those whose grading has changed."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.answers import PER_DOMAIN, draw_answers
from rllib_srl.replay.history import MOST_ANSWERS, right_answers
from rllib_srl.replay.items import Tables
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, fingerprint
from rllib_srl.types import Prompt
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt, everything


def with_groups(tmp_path=None, num: int = 6, **settings):
    """Return a buffer of groups of four episodes, of which 0 and 2 are right, and the groups."""
    buffer = a_buffer(tmp_path, **settings)
    groups = [a_group(a_prompt(i, "ab"[i % 2]), 1, i) for i in range(num)]
    buffer.add(groups, 1)
    return buffer, groups


def test_a_drawn_answer_is_a_right_episode_and_a_repeated_call_returns_the_same(tmp_path):
    buffer, groups = with_groups(tmp_path)
    drawn = buffer.draw_answers(12, 2, "2.retain")
    found = {(one.group_id, one.token_ids_N.tobytes()) for one in drawn}
    assert found == {(group.group_id, group.stream(g).tobytes()) for group in groups for g in (0, 2)}
    for one in drawn:
        assert (one.origin, one.size, one.rewards_G.tolist()) == ("retain", 1, [1.0])
        one.check_valid()
    again = buffer.draw_answers(12, 2, "2.retain")
    assert [one.token_ids_N.tolist() for one in again] == [one.token_ids_N.tolist() for one in drawn]
    assert buffer.stats(2)["num_retained"] == 12
    check_valid(buffer)
    state = everything(buffer)
    buffer.close()
    buffer = a_buffer(tmp_path)
    assert everything(buffer) == state
    buffer.close()


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("draw_answers", {"num": 1, "now": 2, "without_domains": "sums"}), ("drop", {"group_ids": "1.0"}),
     ("draw_answers", {"num": 1, "now": 2, "without_keys": "sums"}), ("remove", {"keys": "sums"}),
     ("draw_prompts", {"num": 1, "now": 2, "without": "sums"}), ("drop_answers", {"env_ids": "sums"})],
)  # fmt: skip
def test_a_string_is_not_a_list_of_names(method, arguments):
    *_, (name, value) = arguments.items()
    with pytest.raises(ValueError, match=rf"{name} = '{value}'; expected a list, such as \['{value}'\]"):
        getattr(a_buffer(), method)(**arguments)


def test_some_prompts_and_domains_are_left_out():
    buffer, groups = with_groups()
    assert {one.prompt.domain for one in buffer.draw_answers(12, 2, without_domains=["a", "none"])} == {"b"}
    keys = [group.prompt.key for group in groups[:4]]
    assert {one.prompt for one in buffer.draw_answers(12, 2, without_keys=keys)} == {g.prompt for g in groups[4:]}
    counts = Counter(one.prompt.prompt_id for now in range(300) for one in buffer.draw_answers(2, now))
    assert len(counts) == 6 and min(counts.values()) > 65 and sum(counts.values()) == 600  # each 100 times, deviation 8


def test_answers_of_an_environment_whose_grading_changed_are_not_held_any_more(tmp_path):
    buffer = a_buffer(tmp_path)
    prompts = [Prompt(env_id, f"p{i}", "a") for i, env_id in enumerate(("one", "other", "one"))]
    buffer.add([a_group(prompt, 1, i) for i, prompt in enumerate(prompts)], 1)
    assert buffer.drop_answers(["one", "unknown"], "1.drop") == buffer.drop_answers(["one"], "1.drop") == 4
    assert [one.group_id for one in buffer.draw_answers(9, 2)] == ["1.1", "1.1"]
    assert (buffer.stats(2)["num_stored_groups"], buffer.stats(2)["num_answers_outdated"]) == (3, 4)
    buffer.add([a_group(prompts[0], 3, 0, salt=1)], 3)  # graded anew
    assert sorted(one.group_id for one in buffer.draw_answers(9, 4)) == ["1.1", "1.1", "3.0", "3.0"]
    check_valid(buffer)
    buffer.close()


def test_a_rating_makes_an_answer_right():
    buffer, (group, *_) = with_groups(num=1)
    ratings = tuple(RatedAnswer(g, fingerprint(group, g), reward) for g, reward in ((0, 0.0), (1, 1.0)))
    buffer.rate_answers([RatedGroup(group.group_id, group.prompt.key, ratings)], "file", 1, 2)
    drawn = buffer.draw_answers(9, 3)
    assert {one.token_ids_N.tobytes() for one in drawn} == {group.stream(g).tobytes() for g in (1, 2)}
    check_valid(buffer)


def test_an_answer_without_a_token_or_below_a_raised_pass_reward_is_not_held(tmp_path):
    group = a_group(1, 1, 0, (0.95, 1.0, 1.0, 0.0))
    silent = replace(group, loss_mask_N=group.loss_mask_N.copy(), behaviour_logp_N=group.behaviour_logp_N.copy())
    for values_N in (silent.loss_mask_N, silent.behaviour_logp_N):
        values_N[silent.offsets[1] : silent.offsets[2]] = 0
    assert right_answers(silent, 0.9) == [0, 2] and right_answers(silent, 0.97) == [2]
    buffer = a_buffer(tmp_path)
    buffer.add([silent], 1)
    assert len(buffer.draw_answers(9, 2)) == 2
    buffer.close()
    buffer = a_buffer(tmp_path, pass_reward=0.97)
    assert [one.token_ids_N.tolist() for one in buffer.draw_answers(9, 3)] == [silent.stream(2).tolist()]
    buffer.close()


def test_an_environment_may_define_what_is_right_and_unrated_answers_are_not():
    assert right_answers(a_group(1, rewards=(2 / 3, 0.5, 2 / 3, 2 / 3), extra={"pass_reward": 2 / 3}), 0.9) == [0, 2]
    unpaid = a_group(1, rewards=(1.0,) * 4, extra={"is_unpaid": True, "people": {"rated": {"3": 1.0}}})
    assert right_answers(unpaid, 0.9) == [3]


def test_answers_leave_with_their_group_and_item():
    buffer, groups = with_groups(capacity=6, groups_per_item=1, eviction="fifo")
    buffer.add([a_group(groups[0].prompt, 2, 0, salt=1)], 2)  # replaces the group
    assert sorted({one.group_id for one in buffer.draw_answers(99, 2)}) == ["1.1", "1.2", "1.3", "1.4", "1.5", "2.0"]
    buffer.add([a_group(9, 3, 0)], 3)  # evicts the first item
    assert len(buffer.draw_answers(99, 4)) == 12
    buffer.drop([groups[3].group_id])
    assert len(buffer.draw_answers(99, 5)) == 10
    check_valid(buffer)


def tables_of(*answers):
    """Return tables with an item and a group for each tuple (domain, item, number of answers that may be held)."""
    store = Tables()
    for domain, number, num in answers:
        slot = store.slot_of(number)
        slot = store.add_item(number, a_prompt(number), domain, 0) if slot is None else slot
        store.add_group(slot, f"g{store.next_group_seq}", 9, size=8, num_answers=num)
    return store


def test_every_item_comes_once_before_any_comes_twice_and_domains_take_turns():
    store = tables_of(("a", 0, 2), ("a", 0, 2), ("a", 1, 1), ("a", 2, 1), ("b", 3, 2), ("b", 4, 0))
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = draw_answers(store, 99, rng)
        assert len(set(drawn)) == len(drawn) == 8 and {number for _, number in drawn} == {0, 1}
        items = [{0: 0, 1: 0, 2: 1, 3: 2, 4: 3}[seq] for seq, _ in drawn]
        assert set(items[:4]) == {0, 1, 2, 3} and 3 in items[:2]  # one of b among the first of each domain
        assert set(items[4:6]) == {0, 3} and items[6:] == [0, 0]
    assert draw_answers(store, 0, rng) == [] == draw_answers(Tables(), 3, rng)


def test_domains_then_items_then_answers_are_drawn_equally_often():
    store, rng = tables_of(("a", 0, 2), ("a", 1, 1), ("b", 2, 1)), np.random.default_rng(1)
    counts = Counter(place for _ in range(4000) for place in draw_answers(store, 1, rng))
    want = {(0, 0): 500, (0, 1): 500, (1, 0): 1000, (2, 0): 2000}
    assert sum((counts[place] - num) ** 2 / num for place, num in want.items()) < 16.3  # chi-square, 3 df, p = .001


def test_only_the_newest_answers_of_a_domain_are_drawn():
    num = PER_DOMAIN // MOST_ANSWERS
    store = tables_of(("b", 0, 1), *(("a", 1 + i, MOST_ANSWERS) for i in range(num + 3)), ("b", 0, 1))
    seqs = {seq for seq, _ in draw_answers(store, 999, np.random.default_rng(0))}
    assert seqs == {0, *range(4, num + 5)}  # of a not the first three
    slots = [store.slot_of(1 + i) for i in range(3, num + 3)]
    assert {seq for seq, _ in draw_answers(store, 999, np.random.default_rng(0), slots)} == {0, num + 4}
