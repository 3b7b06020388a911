"""SRLReplayBuffer: its calls; that each happens once or not at all is shown by test_buffer_twin.

The source system's five defects (a diversity that has no bound and is flat, intervals that compound, successes that
shorten, batches that are short, numbers that are never refreshed and state that is lost) are
each shown impossible: below where "the source" is named, in test_diversity and test_recall.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from rllib_srl.replay.items import key_of
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt
from tests.replay.stored import assert_same


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
    (drawn,) = buffer.draw_groups(1, 8)
    assert_same(replace(drawn, origin="fresh"), group)
    assert drawn.origin == "reuse" and row_of(buffer, group.prompt)["version"] == 5


# --- what learners say -----------------------------------------------------------------


def test_dropped_groups_are_gone():
    buffer = a_buffer()
    buffer.add([a_group(i, 1, i) for i in range(4)], 1)
    first = [group.group_id for group in buffer.draw_groups(4, 2)]
    assert buffer.drop([*first[:2], "none"]) == 2
    assert buffer.tables.num_groups == 2 and buffer.stats(2)["num_dropped_drifted"] == 2
    assert buffer.drop(first[:2]) == 0
    last = [group.group_id for group in buffer.draw_groups(4, 3)]
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
    buffer = a_buffer(on_group="tests.replay.test_on_group:continued")
    empty = buffer.stats(0)
    buffer.add([a_group(i, 1, i, num_turns=2) for i in range(12)], 1)
    buffer.draw_groups(4, 3)
    later = buffer.stats(5)
    assert set(empty) == {name for name in later if not name.startswith("domains/")}
    assert all(isinstance(value, int | float) for value in later.values())
    zeros = Counter(name for name, value in empty.items() if value == 0)
    assert {"num_items", "num_refused", "num_evicted", "num_revisits", "num_reuses"} <= set(zeros)
    assert later["num_items"] == 12 + later["num_grown"] and later["num_reuses"] == 4
