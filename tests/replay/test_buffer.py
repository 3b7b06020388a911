"""SRLReplayBuffer: its calls, and that each happens once or not at all.

The source system's five defects (a diversity that has no bound and is flat, intervals that compound, successes that
shorten, batches that are short, numbers that are never refreshed and state that is lost) are
each shown impossible: below where "the source" is named, in test_diversity and test_recall.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rllib_srl.replay.items import key_of
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, fingerprint
from tests.replay.groups import (
    a_buffer,
    a_group,
    a_prompt,
    drawn_groups,
    everything,
    journalled,
    rewards_of,
)
from tests.replay.stored import assert_same
from tests.replay.validity import check_valid


def row_of(buffer, prompt):
    return buffer.tables.items[buffer.tables.slot_of(key_of(prompt))]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


# --- the source's defects -------------------------------------------------------------------------


def test_a_batch_is_full_though_nothing_is_due_and_it_is_not_always_the_same():
    # The source drew due items only, the hardest first: a batch could be short or empty, and knew no chance.
    def drawn(seed, now=3):
        buffer = a_buffer(seed=seed, spacing="fixed", spacing_config={"interval": 500.0})
        buffer.add([a_group(i, 1, i, (1.0, 0.0)) for i in range(20)], 1)
        prompts = buffer.draw_prompts(8, now)
        assert buffer.stats(now)["num_due"] == 0
        return ids(prompts)

    assert len(set(drawn(0))) == 8 and drawn(0) != drawn(1)
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(3)], 1)
    assert len(buffer.draw_prompts(8, 2)) == 3 and buffer.draw_prompts(8, 1) == []  # each at most once


def test_a_stored_group_comes_back_with_ids_log_probs_and_versions():
    # The source kept neither.
    buffer = a_buffer()
    group = a_group(a_prompt(0, history=("a", "b")), 7, 3, versions_G2=np.array([[5, 6]] * 4))
    buffer.add([group], 7)
    (drawn,) = drawn_groups(buffer, 1, 8)
    assert_same(replace(drawn, origin="fresh"), group)
    assert drawn.origin == "reuse" and row_of(buffer, group.prompt)["version"] == 5


# --- once or not at all ---------------------------------------------------------------------------

CALLS = {
    "add": lambda buffer, name: buffer.add(played(range(8, 20), 5), 5, name),
    "draw_prompts": lambda buffer, name: buffer.draw_prompts(3, 5, name),
    "draw_groups": lambda buffer, name: drawn_groups(buffer, 3, 5, name),
    "rate_answers": lambda buffer, name: buffer.rate_answers([rating()], "file", 1, 5, name),
    "drop": lambda buffer, name: buffer.drop([*sorted(buffer.tables.group_ids.values())[1:4], "unknown"], name),
}


def rating():
    """Return a person's rating of the first answer that `begun` has stored."""
    group = a_group(0, 1, 0, rewards_of(a_prompt(0), 1), num_turns=2)
    return RatedGroup(group.group_id, group.prompt.key, (RatedAnswer(0, fingerprint(group, 0), 0.25),))


def played(indices, now, **group):
    return [a_group(i, now, i, rewards_of(a_prompt(i), now), **group) for i in indices]


ON_GROUP = "tests.replay.test_on_group:continued"
TIGHT = {"capacity": 30, "on_group": ON_GROUP}


def begun(directory=None, **given):
    """Return a buffer with a past: items, some in the schedule, groups drawn."""
    buffer = a_buffer(directory, run="a", **{**TIGHT, **given})
    buffer.add(played(range(12), 1, num_turns=2), 1)
    buffer.draw_prompts(4, 2)
    drawn_groups(buffer, 4, 3)
    return buffer


def plain(answer):
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    is_plain = hasattr(answer, "prompt_id") or hasattr(answer, "refused")
    return vars(answer) if is_plain else getattr(answer, "group_id", answer)


@pytest.mark.parametrize("call", CALLS)
def test_a_repeated_request_is_answered_the_same_and_changes_nothing(call, tmp_path):
    buffer = begun(tmp_path)
    answer = plain(CALLS[call](buffer, f"5.{call}"))
    assert answer
    state, stored = everything(buffer), journalled(buffer)
    assert plain(CALLS[call](buffer, f"5.{call}")) == answer
    assert (everything(buffer), journalled(buffer)) == (state, stored)
    buffer.close()
    buffer = a_buffer(tmp_path, run="a", **TIGHT)
    assert plain(CALLS[call](buffer, f"5.{call}")) == answer
    assert (everything(buffer), journalled(buffer)) == (state, stored)
    CALLS[call](buffer, f"6.{call}")  # another one is done
    assert journalled(buffer)["position"] == stored["position"] + 1
    assert everything(buffer) != state or call in ("drop", "rate_answers")  # nothing is left to do
    check_valid(buffer)


# --- what learners say -----------------------------------------------------------------


def test_dropped_groups_are_gone():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    first = [group.group_id for group in drawn_groups(buffer, 4, 2)]
    assert buffer.drop([*first[:2], "none"]) == 2
    assert buffer.tables.num_groups == 2 and buffer.stats(2)["num_dropped_drifted"] == 2
    assert buffer.drop(first[:2]) == 0
    last = [group.group_id for group in drawn_groups(buffer, 4, 3)]
    assert sorted(last) == sorted(first[2:])
    # A group that has been replaced since was not dropped.
    buffer.add([a_group(int(i.split(".")[1]), 4, salt=s) for s in (1, 2) for i in last], 4)
    assert buffer.drop(last) == 0 and buffer.stats(4)["num_dropped_drifted"] == 2
    check_valid(buffer)


def test_a_batch_is_drawn_in_parts_without_what_it_has():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(6)], 1)
    first = buffer.draw_prompts(4, 3)
    more = buffer.draw_prompts(4, 3, without=[prompt.key for prompt in first])
    assert len(more) == 2 and set(ids(first)) | set(ids(more)) == {f"p{i}" for i in range(6)}


# --- on disk --------------------------------------------------------------------------------------


def test_stats_name_every_count_from_the_beginning():
    empty, later = a_buffer().stats(0), begun().stats(5)
    assert set(empty) == {name for name in later if not name.startswith("domains/")}
    assert all(isinstance(value, int | float) for value in later.values())
    zeros = Counter(name for name, value in empty.items() if value == 0)
    assert {"num_items", "num_refused", "num_evicted", "num_revisits", "num_reuses"} <= set(zeros)
    assert later["num_items"] == 12 + later["num_grown"] and later["num_reuses"] == 4
