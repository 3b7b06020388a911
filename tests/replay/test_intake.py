"""What becomes of a played group: refused with a counted reason, graded, stored, or grown."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.admission import ADMISSIONS, REASONS
from rllib_srl.replay.items import key_of
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt, everything, row_of

SECRET = "AKIAQWERTYUIOPASDFGH"


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
        assert visit.without_loss == ((0,) if reason == "secret" else ())
        assert type(visit).from_dict(json.loads(json.dumps(vars(visit)))) == visit
    buffer.add([a_group(0, 1)], 1)
    (visit,) = buffer.add([group_at(5)], 5)
    assert (visit.refused, visit.is_new) == (reason, False) and visit.grade > 0
    row = row_of(buffer, 0)
    assert (row["last_review"], row["reps"], row["visits"], buffer.tables.num_groups) == (5, 2, 2, 1)
    stats = buffer.stats(5)
    counted = {name: stats[f"num_refused_{name}"] for name in REASONS}
    assert counted == {**dict.fromkeys(REASONS, 0), reason: 1 if reason == "duplicate" else 2}
    assert stats["num_refused"] == sum(counted.values())
    assert stats["num_episodes_without_loss"] == (2 if reason == "secret" else 0)
    check_valid(buffer)


def nan_logp(group):
    logp_N = group.behaviour_logp_N.copy()
    logp_N[np.flatnonzero(group.loss_mask_N)[0]] = np.nan
    return replace(group, behaviour_logp_N=logp_N)


BROKEN = {
    "bad_logp": nan_logp,
    "invalid": lambda group: replace(group, rewards_G=np.array([np.nan, 1, 1, 1], np.float32)),
    "too_few": lambda group: replace(group, rewards_G=np.array([], np.float32)),
}


@pytest.mark.parametrize("reason, breaks", BROKEN.items())
def test_a_broken_group_says_nothing_of_its_item(reason, breaks):
    buffer = a_buffer()
    buffer.add([a_group(i, 1) for i in range(6)], 1)
    items = everything(buffer)["items"]
    visits = buffer.add([breaks(a_group(0, 3)), a_group(1, 3)], 3)
    assert [visit.refused for visit in visits] == [reason, ""]
    assert (visits[0].grade, visits[0].is_new) == (0, False)
    slot = buffer.tables.slot_of(key_of(a_prompt(0)))
    assert everything(buffer)["items"][slot] == items[slot]
    assert buffer.stats(3)[f"num_refused_{reason}"] == 1
    check_valid(buffer)
    assert len(buffer.draw_prompts(6, 4)) == 6  # one number that is none would spoil every draw


def test_too_few_valid_episodes_grade_nothing_but_are_stored():
    buffer = a_buffer(min_graded=4)
    (new,) = buffer.add([a_group(0, 1, rewards=(1, 0))], 1)
    assert (new.refused, len(buffer), buffer.stats(1)["num_refused_ungraded"]) == ("ungraded", 0, 1)
    buffer.add([a_group(0, 2)], 2)
    before = row_of(buffer, 0).copy()
    (visit,) = buffer.add([a_group(0, 5, rewards=(1, 0))], 5)
    after = row_of(buffer, 0)
    assert (visit.refused, visit.grade) == ("", 0)
    for name in ("reps", "interval", "due", "last_review", "alpha", "beta"):
        assert before[name] == after[name], name
    assert buffer.tables.num_groups == 2 and after["visits"] == 2


def test_the_same_tokens_are_stored_once_even_within_one_call():
    buffer = a_buffer(groups_per_item=5)
    first, other = a_group(0, 1), a_group(0, 1, salt=1)
    visits = buffer.add([first, first, other, first], 1)
    assert [visit.refused for visit in visits] == ["", "duplicate", "", "duplicate"]
    check_valid(buffer)
    # Equal numbers are not equal tokens.
    ids = first.token_ids_N.copy()
    ids[-1] += 1
    assert buffer.add([replace(first, token_ids_N=ids)], 2)[0].refused == ""
    assert buffer.tables.num_groups == 3


def test_a_hook_sees_each_well_formed_group_once(monkeypatch):
    seen = []
    monkeypatch.setitem(ADMISSIONS, "note", lambda group, decode: seen.append(group.group_id))
    buffer = a_buffer(admit=["note"], decode=words)
    broken = replace(a_group(9, 1), rewards_G=np.full(4, np.nan, np.float32))
    groups = [a_group(n, 1) for n in range(3)] + [long_group(1, token=5), broken]
    buffer.add(groups, 1)
    buffer.add([a_group(0, 1)], 2)  # a duplicate
    buffer.draw_prompts(2, 3)
    buffer.draw_groups(2, 3)
    assert seen == [group.group_id for group in [*groups[:4], groups[0]]]


def test_groups_that_nobody_played_just_now_grade_only_what_was_never_visited():
    buffer = a_buffer()
    (first,) = buffer.add([a_group(0, 1)], 1, is_played=False)
    (second,) = buffer.add([a_group(0, 2)], 2, is_played=False)
    assert first.grade > 0 and second.grade == 0
    row = row_of(buffer, 0)
    assert (row["reps"], row["visits"], buffer.tables.num_groups) == (1, 1, 2)


def test_secrets_cannot_be_looked_for_without_a_tokenizer():
    with pytest.raises(ValueError, match="admit = 'secrets' without a tokenizer"):
        a_buffer(admit="secrets")


SEEN = []


def continued(group, room, generator):
    """Return the prompt continued after the first turn of a drawn episode, twice."""
    SEEN.append((group.group_id, room))
    turns = group.extra.get("turns", ())
    if turns:
        prompt = replace(group.prompt, history=(*group.prompt.history, turns[int(generator.integers(len(turns)))][0]))
        return [prompt, prompt]
    return []


PATH = f"{__name__}:continued"


def test_its_prompts_become_items_that_wait_unvisited_and_known_ones_are_left_out():
    buffer = a_buffer(on_group=PATH, max_prompt_tokens=77)
    group = a_group(0, 1, num_turns=2)
    SEEN.clear()
    (visit,) = buffer.add([group], 1)
    assert [(group.group_id, 77)] == SEEN and visit.num_grown == 1 and len(buffer) == 2
    rows = buffer.tables.items[buffer.tables.slots()]
    assert rows["visits"].tolist() == [1, 0] and buffer.tables.groups_of(1) == []
    (child,) = [p for slot in buffer.tables.slots() if (p := buffer.tables.prompt_of(slot)).history]
    assert child.prompt_id == group.prompt.prompt_id
    assert child.history[0] in {turns[0] for turns in group.extra["turns"]}
    assert buffer.stats(1)["num_grown"] == 1
    assert {p.key for now in range(2, 12) for p in buffer.draw_prompts(2, now)} >= {child.key}
    check_valid(buffer)


def test_a_refused_group_and_one_of_another_policy_are_not_shown():
    buffer = a_buffer(on_group=PATH, max_episode_tokens=10)
    SEEN.clear()
    assert buffer.add([a_group(0, 1, num_turns=3)], 1)[0].refused
    buffer = a_buffer(on_group=PATH)
    buffer.add([a_group(0, 1, num_turns=2)], 1, is_played=False)
    assert SEEN == []
