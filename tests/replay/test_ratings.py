"""People's ratings of stored answers: rewards, grades, history and records by hand; nothing twice, nothing lost."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from rllib_srl.replay.payloads import decode
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, fingerprint
from rllib_srl.types import Group, GroupMeta
from scripts.memory_laws import check_valid
from tests.small_buffer import a_group, by_hand


def rated(group: Group, ratings: dict[int, float | None], is_binary: bool = False) -> RatedGroup:
    """Return ratings of some episodes of a group."""
    answers = [RatedAnswer(g, fingerprint(group, g), reward, is_binary) for g, reward in ratings.items()]
    return RatedGroup(group.group_id, group.prompt.key, tuple(answers), 0.75)


def apply(buffer, *groups: RatedGroup, now: int = 1, position: int = 1, request: str = "") -> dict[str, int]:
    return buffer.rate_answers(groups, "file", position, now, request)


def stored(buffer, number: int = 0) -> list[Group]:
    """Return the groups of prompt `number`, oldest first, as their payloads have them."""
    slot = buffer.tables.slot_of(int(a_group(number, (0.0,), 1).prompt.key, 16))
    seqs = [int(buffer.tables.groups["seq"][at]) for at in buffer.tables.groups_of(slot)]
    return [decode(buffer.store.payload(seq)) for seq in seqs]


def item(buffer, number: int = 0) -> np.void:
    return buffer.tables.items[buffer.tables.slot_of(int(a_group(number, (0.0,), 1).prompt.key, 16))]


@pytest.fixture
def buffer(tmp_path):
    """Return a buffer with a zero-variance group of 4 answers; its journal is checked at the end."""
    buffer = by_hand(tmp_path, max_age=8, max_uses=2)
    buffer.add([a_group(0, (0, 0, 0, 0), 1)], 1)
    yield buffer
    check_valid(buffer)
    buffer.close()


def test_ratings_replace_rewards_and_the_group_becomes_drawable_under_its_own_version(buffer):
    group = a_group(0, (0, 0, 0, 0), 1)
    assert buffer.draw_groups(1, 2) == []  # no signal
    counts = apply(buffer, rated(group, {0: 1.0, 2: 0.75}))
    assert counts == {"num_applied": 2, "num_changed": 0, "num_graded": 1, "num_too_old": 0}
    (one,) = buffer.draw_groups(1, 2)
    assert one.rewards_G.tolist() == [1.0, 0.0, 0.75, 0.0] and one.rewards_G.dtype == np.float32
    assert one.versions_G2.tolist() == group.versions_G2.tolist() and one.origin == "reuse"
    assert np.array_equal(one.token_ids_N, group.token_ids_N)
    (row,) = buffer.tables.groups[buffer.tables.groups["size"] > 0]
    assert (row["born"], row["uses"], row["num_success"], row["size"]) == (1, 1, 1, 4)
    assert row["reward"] == np.float32(0.4375) and row["variance"] == np.float32(np.var([1, 0, 0.75, 0]))
    assert item(buffer)["variance"] == row["variance"] and item(buffer)["pass_rate"] == 0.25
    assert item(buffer)["num_zero_variance"] == 0 and len(buffer.tables.groups_of(0)) == 1


@pytest.mark.parametrize(("ratings", "is_binary", "grade"), [
    ({0: 1.0}, True, 3),  # one bit cannot tell Good from Easy
    ({0: 1.0, 1: 1.0}, True, 3),
    ({0: 0.0}, True, 1),
    ({0: 1.0, 1: 0.0}, True, 2),
    ({0: 1.0}, False, 4),
    ({0: 0.75}, False, 3),
    ({0: 0.5}, False, 2),
    ({0: 0.25}, False, 1),
    ({0: 1.0, 1: 0.5}, False, 3),
])  # fmt: skip
def test_the_item_is_graded_by_the_mean_of_its_ratings(buffer, ratings, is_binary, grade):
    with mock.patch.object(buffer.recall, "review", wraps=buffer.recall.review) as review:
        apply(buffer, rated(a_group(0, (0, 0, 0, 0), 1), ratings, is_binary), now=3)
    assert [(one.args[1].tolist(), one.args[2]) for one in review.call_args_list] == [([grade], 3)]
    assert item(buffer)["last_review"] == 3 and buffer.stats(3)["num_rated"] == 1


def test_the_same_ratings_again_change_nothing(buffer):
    group = a_group(0, (0, 0, 0, 0), 1)
    first = apply(buffer, rated(group, {0: 1.0}), request="1.ratings")
    seq, reps = buffer.tables.next_group_seq, int(item(buffer)["reps"])
    assert apply(buffer, rated(group, {0: 1.0}), request="1.ratings") == first  # the same call
    nothing = {"num_applied": 0, "num_changed": 0, "num_graded": 0, "num_too_old": 0}
    assert apply(buffer, rated(group, {0: 1.0}), position=2) == nothing  # another call
    assert (seq, reps) == (buffer.tables.next_group_seq, item(buffer)["reps"])


def test_a_changed_rating_is_applied_anew(buffer):
    group = a_group(0, (0, 0, 0, 0), 1)
    apply(buffer, rated(group, {0: 1.0}))
    apply(buffer, rated(group, {0: 1.0, 1: 0.5}), position=2)
    counts = apply(buffer, rated(group, {0: 0.0, 1: 0.5}), position=3, now=2)
    assert counts == {"num_applied": 0, "num_changed": 1, "num_graded": 1, "num_too_old": 0}
    assert stored(buffer)[0].rewards_G.tolist() == [0, 0.5, 0, 0]
    stats = buffer.stats(2)
    assert [stats[f"ratings/{name}"] for name in ("num_applied", "num_changed", "num_unused")] == [2, 1, 0]


def test_a_rating_that_is_taken_back_restores_the_group_byte_for_byte(buffer):
    group = a_group(0, (0, 0, 0, 0), 1)
    before = buffer.store.payload(0)
    apply(buffer, rated(group, {0: 1.0}))
    history = item(buffer)["history_sum"]
    reps = int(item(buffer)["reps"])
    assert apply(buffer, rated(group, {0: None}), position=2)["num_changed"] == 1
    assert buffer.store.payload(0) == before and item(buffer)["history_sum"] == history - 1
    assert item(buffer)["reps"] == reps  # nothing to grade
    assert item(buffer)["pass_rate"] == 0 and buffer.draw_groups(1, 2) == []


def test_the_history_of_the_prompt_is_corrected_with_the_discount_of_the_visit(tmp_path):
    buffer, share = by_hand(tmp_path), 0.5 ** (4 / 11)
    old, new = a_group(0, (0, 0), 1), a_group(0, (1, 0), 5, ids=[3])  # versions 0 and 4
    buffer.add([old], 1)
    buffer.add([new], 5)
    assert item(buffer)["history_sum"] == 1.0 and item(buffer)["history_count"] == pytest.approx(2 + 2 * share)
    apply(buffer, rated(old, {0: 1.0, 1: 0.5}), rated(new, {0: 0.25}), now=5)
    assert item(buffer)["history_sum"] == pytest.approx(0.25 + 1.5 * share)
    assert item(buffer)["history_count"] == pytest.approx(2 + 2 * share)
    # and what the next visit would have as its history: as if the ratings had been the rewards
    twin = by_hand(tmp_path / "twin")
    twin.add([a_group(0, (1.0, 0.5), 1)], 1)
    twin.add([a_group(0, (0.25, 0.0), 5, ids=[3])], 5)
    third = a_group(0, (1, 1), 9, ids=[4])
    (one,), (other,) = (each.add([third], 9) for each in (buffer, twin))
    assert one.history[:2] == pytest.approx(other.history[:2])
    for each in (buffer, twin):
        check_valid(each)
        each.close()


def test_another_answer_under_the_same_id_is_not_rated(buffer):
    other = a_group(0, (0, 0, 0, 0), 1, ids=[99])
    assert other.group_id == "1.0"
    assert apply(buffer, rated(other, {0: 1.0}))["num_applied"] == 0
    too_far = replace(rated(a_group(0, (0, 0, 0, 0), 1), {3: 1.0}).answers[0], episode=4)
    assert apply(buffer, RatedGroup("1.0", other.prompt.key, (too_far,)), position=2)["num_applied"] == 0
    assert stored(buffer)[0].rewards_G.tolist() == [0, 0, 0, 0] and buffer.rated.num_unused == 1


def test_a_rating_that_changes_after_the_group_has_left_is_unused(tmp_path):
    buffer = by_hand(tmp_path, groups_per_item=1)
    old = a_group(0, (0, 0), 1)
    buffer.add([old], 1)
    apply(buffer, rated(old, {0: 1.0}))
    buffer.add([a_group(0, (1, 0), 5, ids=[3])], 5)  # replaces it
    apply(buffer, rated(old, {0: 1.0}), position=2)  # as it was: not unused, it has been applied
    assert buffer.rated.num_unused == 0
    for position in (3, 4):  # once or twice
        apply(buffer, rated(old, {0: 0.0}), position=position)
        assert buffer.rated.num_unused == 1
    buffer.close()


def unpaid(number: int, size: int, now: int) -> Group:
    return replace(a_group(number, (0.0,) * size, now), extra={"is_unpaid": True})


def test_without_rewards_only_rated_episodes_count(tmp_path):
    buffer = by_hand(tmp_path, max_age=6)
    group = unpaid(0, 4, 1)
    visit, refused = buffer.add([group, unpaid(1, 1, 1)], 1)
    assert (visit.refused, visit.grade, refused.refused) == ("", 0, "ungraded")  # no test of anything
    assert (item(buffer)["visits"], item(buffer)["history_count"]) == (0, 0)
    assert buffer.domain_statistics.mean("sums") == 0.5 and buffer.draw_groups(1, 2, version=2) == []
    assert buffer.draw_prompts(1, 7) == [] and buffer.draw_prompts(1, 8) == [group.prompt]  # older than `max_age`
    apply(buffer, rated(group, {1: 1.0, 3: 0.75}))
    assert buffer.draw_prompts(1, 7) == [group.prompt]
    (one,) = buffer.draw_groups(1, 2)
    assert one.has_reward_G.tolist() == [False, True, False, True]
    meta = GroupMeta.of(one, None)
    assert meta.has_reward_G.tolist() == [False, True, False, True] and meta.pass_reward == 0.75
    (row,) = buffer.tables.groups[buffer.tables.groups["size"] > 0]
    assert (row["size"], row["num_success"], row["reward"]) == (4, 2, 0.875)
    assert row["variance"] == np.float32(np.var([1, 0.75]))
    assert (item(buffer)["history_sum"], item(buffer)["history_count"]) == (1.75, 2.0)
    apply(buffer, rated(group, {1: None, 3: None}), position=2)
    assert buffer.draw_groups(1, 2, version=2) == [] and item(buffer)["history_count"] == 0
    check_valid(buffer)
    buffer.close()
