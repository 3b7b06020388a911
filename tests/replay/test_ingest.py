"""What becomes of a played group: refused with a counted reason, graded, stored, masked, or grown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.buffer_metrics import REASONS
from rllib_srl.replay.store.records import key_of
from tests.replay.groups import a_buffer, a_group, a_prompt, everything

SECRET = "AKIAQWERTYUIOPASDFGH"


def row_of(buffer, prompt):
    return buffer.store.items[buffer.store.slot_of(key_of(prompt))]


def words(ids):
    """Show token 7 as a key of Amazon's, and every other as itself."""
    return " ".join(SECRET if token == 7 else f"w{token}" for token in ids)


def long_group(now, salt=0, token=None, length=40):
    """Return a group of long episodes, of one token alone if it is given."""
    group = a_group(0, now)
    generator = np.random.default_rng([now, salt])
    ids = generator.integers(10, 9000, 4 * length) if token is None else np.full(4 * length, token)
    mask_N = np.tile(np.arange(length) > 0, 4)
    return replace(
        group,
        token_ids_N=ids.astype(np.int32),
        loss_mask_N=mask_N,
        behaviour_logp_N=np.where(mask_N, -0.5 - salt, 0).astype(np.float32),
        offsets=np.arange(5) * length,
    )


def secret_group(now):
    group = a_group(0, now)
    ids = group.token_ids_N.copy()
    ids[np.flatnonzero(group.loss_mask_N)[0]] = 7
    return replace(group, token_ids_N=ids)


REFUSED = {
    "too_long": ({"max_episode_tokens": 20}, lambda now: long_group(now)),
    "degenerate": ({}, lambda now: long_group(now, token=5)),
    "secret": ({"admit": "secrets", "decode": words}, secret_group),
    "duplicate": ({}, lambda now: a_group(0, 1)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_group_is_counted_and_grades_an_item_that_exists(reason):
    given, group_at = REFUSED[reason]
    buffer = a_buffer(**given)
    if reason != "duplicate":
        (visit,) = buffer.add([group_at(1)], 1)
        assert (visit.refused, visit.is_new, visit.grade, len(buffer)) == (reason, False, 0, 0)
    buffer.add([a_group(0, 1)], 1)
    (visit,) = buffer.add([group_at(5)], 5)
    assert (visit.refused, visit.is_new) == (reason, False) and visit.grade > 0
    row = row_of(buffer, a_prompt(0))
    assert (row["last_review"], row["reps"], row["visits"], row["num_groups"]) == (5, 2, 2, 1)
    stats = buffer.stats(5)
    counted = {name: stats[f"num_refused_{name}"] for name in REASONS}
    assert counted == {**dict.fromkeys(REASONS, 0), reason: 1 if reason == "duplicate" else 2}
    assert stats["num_refused"] == sum(counted.values())
    assert list(buffer.reviews.rows["now"]) == [1, 5]
    buffer.check_valid()


def nan_logp(group):
    logp_N = group.behaviour_logp_N.copy()
    logp_N[np.flatnonzero(group.loss_mask_N)[0]] = np.nan
    return replace(group, behaviour_logp_N=logp_N)


BROKEN = {
    "bad_logp": nan_logp,
    "invalid": lambda group: replace(group, rewards_G=np.array([np.nan, 1, 1, 1], np.float32)),
    "too_few": lambda group: replace(group, rewards_G=np.array([], np.float32)),
}
MORE_BROKEN = {
    "invalid": lambda group: replace(group, offsets=group.offsets[::-1]),
    "bad_logp": lambda group: replace(group, behaviour_logp_N=np.abs(group.behaviour_logp_N)),
}


@pytest.mark.parametrize("reason, breaks", [*BROKEN.items(), *MORE_BROKEN.items()])
def test_a_broken_group_says_nothing_of_its_item(reason, breaks):
    buffer = a_buffer()
    buffer.add([a_group(i, 1) for i in range(6)], 1)
    items = everything(buffer)["items"]
    visits = buffer.add([breaks(a_group(0, 3)), a_group(1, 3)], 3)
    assert [visit.refused for visit in visits] == [reason, ""]
    assert (visits[0].grade, visits[0].is_new) == (0, False)
    slot = buffer.store.slot_of(key_of(a_prompt(0)))
    assert everything(buffer)["items"][slot] == items[slot]
    assert buffer.stats(3)[f"num_refused_{reason}"] == 1
    buffer.check_valid()
    assert len(buffer.due(6, 4, slots=6.0)) == 6  # one number that is none would spoil every draw


def test_too_few_valid_episodes_grade_nothing_but_are_stored():
    buffer = a_buffer(min_graded=4)
    (new,) = buffer.add([a_group(0, 1, rewards=(1, 0))], 1)
    assert (new.refused, len(buffer), buffer.stats(1)["num_refused_ungraded"]) == ("ungraded", 0, 1)
    buffer.add([a_group(0, 2)], 2)
    before = row_of(buffer, a_prompt(0)).copy()
    (visit,) = buffer.add([a_group(0, 5, rewards=(1, 0))], 5)
    after = row_of(buffer, a_prompt(0))
    assert (visit.refused, visit.grade, visit.timing) == ("", 0, "new")
    for name in ("reps", "interval", "due", "last_review", "alpha", "beta"):
        assert before[name] == after[name], name
    assert after["num_groups"] == 2 and after["visits"] == 2


def test_the_same_tokens_are_stored_once_even_within_one_call():
    buffer = a_buffer(groups_per_item=5)
    first, other = a_group(0, 1), a_group(0, 1, salt=1)
    visits = buffer.add([first, first, other, first], 1)
    assert [visit.refused for visit in visits] == ["", "duplicate", "", "duplicate"]
    buffer.check_valid()
    # Equal numbers are not equal tokens.
    ids = first.token_ids_N.copy()
    ids[-1] += 1
    assert buffer.add([replace(first, token_ids_N=ids)], 2)[0].refused == ""
    assert row_of(buffer, a_prompt(0))["num_groups"] == 3


def test_near_duplicates_of_other_prompts_are_refused_and_later_visits_are_not():
    buffer = a_buffer(near_duplicate=0.9)
    first = a_group(0, 1)
    copied = replace(first, prompt=a_prompt(1))
    assert buffer.add([first], 1)[0].refused == ""
    assert buffer.add([copied], 2)[0].refused == "near_duplicate"
    assert buffer.add([a_group(1, 3)], 3)[0].refused == ""  # its own words are other ones
    (visit,) = buffer.add([replace(copied, group_id="4.0")], 4)  # now known: its answers have drifted to the other's
    assert (visit.refused, visit.is_new) == ("", False)
    assert a_buffer().add([first, copied], 1)[1].refused == ""


def test_what_is_nearest_may_have_been_evicted_by_the_same_call():
    # Capacity 1, two groups of one prompt: taken in apart, and the first item goes in between.
    buffer = a_buffer(capacity=1, near_duplicate=0.9, eviction="fifo")
    first = a_group(0, 1)
    buffer.add([first], 1)
    copied = replace(first, prompt=a_prompt(1), group_id="2.2")
    visits = buffer.add([a_group(2, 2), a_group(2, 2, salt=1), copied], 2)
    # The item it duplicates was evicted after the first part of the call.
    assert [visit.refused for visit in visits] == ["", "", ""]
    buffer.check_valid()


def test_a_slot_that_is_taken_anew_within_a_call_leaves_nothing_of_the_old_item(tmp_path):
    # A child without a vector takes the slot of an item with one, on disk as in memory.
    buffer = a_buffer(tmp_path, run="a", capacity=2, task_growth=True)
    buffer.add([a_group(0, 1, rewards=(1, 1, 1, 1))], 1)  # score 0: any child may replace it
    buffer.add([a_group(1, 2, num_turns=3)], 2)
    buffer.check_valid()
    kept = everything(buffer)
    buffer.close()
    buffer = a_buffer(tmp_path, run="a", capacity=2, task_growth=True)
    buffer.check_valid()
    assert everything(buffer) == kept
    histories = [len(buffer.store.prompt_of(slot).history) for slot in buffer.store.slots()]
    assert max(histories) > 0 and not buffer.store.items[buffer.store.slots()]["has_vector"].all()


def test_an_episode_with_a_secret_is_named_and_its_group_is_not_stored():
    buffer = a_buffer(admit="secrets", decode=words)
    (visit,) = buffer.add([secret_group(1)], 1)
    assert (visit.refused, visit.without_loss) == ("secret", (0,)) and len(buffer) == 0
    assert type(visit).from_dict(visit.as_dict()).as_dict() == visit.as_dict()
    stats = buffer.stats(2)
    assert (stats["num_refused_secret"], stats["num_refused"], stats["num_episodes_without_loss"]) == (1, 1, 1)


def test_secrets_cannot_be_looked_for_without_a_tokenizer():
    with pytest.raises(ValueError, match="admit = 'secrets' without a tokenizer"):
        a_buffer(admit="secrets")


def test_children_have_the_score_of_their_parent_and_wait_unvisited():
    buffer = a_buffer(task_growth=True, growth_depth=2)
    group = a_group(0, 1, num_turns=4, rewards=(1, 0, 0, 0))
    (visit,) = buffer.add([group], 1)
    # Histories of one and two turns; that of three is too deep.
    assert visit.num_grown == 2 and len(buffer) == 3
    stats = buffer.stats(1)
    assert (stats["num_grown"], stats["num_grown_too_deep"]) == (2, 1)
    rows = buffer.store.items[buffer.store.slots()]
    assert rows["score"].tolist() == [pytest.approx(0.1875)] * 3  # 1/4 * 3/4
    assert rows["visits"].tolist() == [1, 0, 0] and rows["num_groups"].tolist() == [1, 0, 0]
    depths = [len(buffer.store.prompt_of(slot).history) for slot in buffer.store.slots()]
    assert depths == [0, 1, 2]
    histories = buffer.store.prompt_of(2).history
    assert histories[:1] == buffer.store.prompt_of(1).history
    assert buffer.add([replace(a_group(0, 2, num_turns=4), extra=group.extra)], 2)[0].num_grown in (0, 2)
    buffer.check_valid()
    assert a_buffer().add([group], 1)[0].num_grown == 0


def test_a_full_memory_takes_a_child_for_the_item_of_the_lowest_score():
    buffer = a_buffer(task_growth=True, capacity=3)
    low, middle, high = (1, 0, 0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0)
    buffer.add([a_group(i, 1, rewards=rewards) for i, rewards in enumerate((low, middle, high))], 1)
    (visit,) = buffer.add([a_group(1, 2, rewards=middle, num_turns=2)], 2)
    assert visit.num_grown == 1 and buffer.stats(2)["num_evicted"] == 1
    assert sorted((p.prompt_id, len(p.history)) for p in prompts(buffer)) == [("p1", 0), ("p1", 1), ("p2", 0)]
    buffer.check_valid()


def test_a_child_of_a_lower_score_than_all_it_is_compared_with_is_left_out():
    buffer = a_buffer(task_growth=True, capacity=4, candidate_pool=1)  # it is compared with one item, by lot
    buffer.add([a_group(i, 1, rewards=(1, 0)) for i in range(4)], 1)
    # An item that always succeeds has score 0, and so has its child; what it finds is itself or one of 1/4.
    visits = [buffer.add([a_group(0, now, rewards=(1, 1), num_turns=2)], now)[0] for now in range(2, 12)]
    stats = buffer.stats(12)
    assert stats["num_grown_unfit"] > 0 and stats["num_grown"] + stats["num_grown_unfit"] == len(visits)
    assert stats["num_evicted"] == stats["num_grown"] + sum(visit.is_new for visit in visits)


def test_a_child_that_takes_the_place_of_an_item_of_the_same_call_is_not_taken_for_it():
    # The child of the first group has a score above that of the second, and takes the slot of its item.
    buffer = a_buffer(task_growth=True, capacity=2, eviction="fifo")
    buffer.add([a_group(0, 1), a_group(1, 1, rewards=(1, 1, 1, 1))], 1)
    visits = buffer.add([a_group(0, 2, num_turns=2), a_group(1, 2, rewards=(0, 0, 0, 0))], 2)
    assert visits[0].num_grown == 1 and visits[1].grade > 0
    buffer.check_valid()
    (child,) = [prompt for prompt in prompts(buffer) if prompt.history]
    row = row_of(buffer, child)
    assert (row["visits"], row["reps"], row["num_groups"], row["score"]) == (0, 0, 0, 0.25)  # nobody has played it


def test_a_history_that_leaves_no_room_for_a_turn_is_not_grown():
    group = a_group(0, 1, num_turns=3)  # turns end after 10, 17 and 24 tokens
    buffer = a_buffer(task_growth=True, max_prompt_tokens=16)
    assert buffer.add([group], 1)[0].num_grown == 1
    assert buffer.stats(1)["num_grown_too_long"] == 1


def test_a_grown_item_is_asked_from_a_random_turn_or_as_another_step():
    history = ("one", "two", "three")
    buffer = a_buffer(task_growth=True, p_div=0.5)
    buffer.add([a_group(a_prompt(0, history=history), 1), a_group(a_prompt(1, history=("x",), step="improve"), 1)], 1)
    asked = {(p.prompt_id, p.history, p.step) for now in range(2, 40) for p in buffer.due(2, now)}
    assert asked == {("p0", history[:t], "") for t in (1, 2, 3)} | {
        ("p1", ("x",), step) for step in ("improve", "diverge")
    }


def answered(i, now, *turns_G, **extra):
    """Return a group of a prompt whose environment can ask for a different answer, with these turns of its episodes."""
    rewards = tuple(float(g % 2) for g in range(len(turns_G)))
    turns = {"turns": [list(turns) for turns in turns_G], "can_iterate": True, **extra}
    return a_group(i, now, rewards=rewards, extra=turns)


@pytest.mark.parametrize("epsilon", [0.25, 1.0])
def test_a_share_of_revisits_shows_a_stored_answer_and_asks_for_a_different_one(epsilon):
    """Of n revisits a binomial number diverges; each shows an answer of one turn of the item's newest group."""
    buffer = a_buffer(self_divergence=epsilon, min_recall_interval=1, load_control="none", groups_per_item=2)
    buffer.add([answered(i, 1, ["old"], ["older"]) for i in range(8)], 1)
    buffer.add([answered(i, 2, [f"a{i}"], [f"b{i}"], ["two", "turns"]) for i in range(8)], 2)
    asked = [prompt for now in range(3, 103) for prompt in buffer.due(4, now)]
    assert len(asked) == 400 and buffer.stats(102)["num_revisits"] == 400
    diverged = [prompt for prompt in asked if prompt.step]
    assert {(prompt.prompt_id, prompt.history, prompt.step) for prompt in diverged} == {
        (f"p{i}", (f"{letter}{i}",), "diverge") for i in range(8) for letter in "ab"
    }
    assert all(prompt.history == () for prompt in asked if not prompt.step)
    assert abs(len(diverged) - 400 * epsilon) <= 4 * np.sqrt(400 * epsilon * (1 - epsilon))
    assert buffer.stats(102)["num_diverged"] == len(diverged) and buffer.stats(102)["num_diverged_unanswered"] == 0


def test_a_different_answer_is_no_review_and_no_item():
    buffer = a_buffer(self_divergence=1.0)
    buffer.add([answered(0, 1, ["x"], ["y"])], 1)
    (prompt,) = buffer.due(1, 5)
    before = row_of(buffer, a_prompt(0)).copy()
    (visit,) = buffer.add([a_group(prompt, 5, rewards=(1.0, 1.0))], 5)
    assert (visit.refused, visit.pass_rate, visit.grade) == ("diverged", 1.0, 0)
    assert buffer.stats(5)["num_items"] == 1 and buffer.stats(5)["num_refused_diverged"] == 1
    assert np.array_equal(row_of(buffer, a_prompt(0)), before)


@pytest.mark.parametrize(
    "group",
    [answered(0, 1, ["two", "turns"], ["three", "more", "turns"]), answered(0, 1, ["x"], ["y"], can_iterate=False)],
    ids=["several turns", "no further answers"],
)
def test_without_a_stored_answer_the_prompt_is_asked_as_usual(group):
    buffer = a_buffer(self_divergence=1.0)
    buffer.add([group], 1)
    (prompt,) = buffer.due(1, 5)
    assert (prompt.history, prompt.step) == ((), "") and buffer.stats(5)["num_diverged_unanswered"] == 1


def test_an_answer_that_leaves_no_room_for_another_is_not_shown():
    group = answered(0, 1, ["x"], ["y"])
    length = int(group.lengths_G()[0])
    for room, step in ((length, "diverge"), (length - 1, "")):
        buffer = a_buffer(self_divergence=1.0, max_prompt_tokens=room)
        buffer.add([group], 1)
        assert buffer.due(1, 5)[0].step == step


def test_without_the_chance_of_it_nothing_is_drawn_for_it():
    """Off, the generators stay untouched, so that a run is that without the setting, bit for bit."""
    buffer = a_buffer()
    before = buffer.generators["grow"].bit_generator.state
    buffer.add([answered(i, 1, ["x"], ["y"]) for i in range(4)], 1)
    assert all(prompt.step == "" for now in range(2, 9) for prompt in buffer.due(2, now))
    assert buffer.generators["grow"].bit_generator.state == before


def test_groups_that_nobody_played_just_now_grade_only_what_was_never_visited():
    buffer = a_buffer()
    (first,) = buffer.add([a_group(0, 1)], 1, is_played=False)
    (second,) = buffer.add([a_group(0, 2)], 2, is_played=False)
    assert first.grade > 0 and second.grade == 0
    row = row_of(buffer, a_prompt(0))
    assert (row["reps"], row["visits"], row["num_groups"]) == (1, 1, 2)


def test_more_groups_than_the_table_has_room_for_are_taken_in_in_parts():
    buffer = a_buffer(capacity=10, eviction="fifo")
    visits = buffer.add([a_group(i, 1, i) for i in range(300)], 1)
    assert [visit.group_id for visit in visits] == [f"1.{i}" for i in range(300)]
    assert sorted(int(p.prompt_id[1:]) for p in prompts(buffer)) == list(range(290, 300))
    assert buffer.stats(1)["num_evicted"] == 290
    buffer.check_valid()


def prompts(buffer):
    return [buffer.store.prompt_of(slot) for slot in buffer.store.slots()]
