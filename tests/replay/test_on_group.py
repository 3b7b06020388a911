"""The hook `replay_on_group`: which groups it sees, what becomes of its prompts, and that a copy goes on with it."""

from __future__ import annotations

from dataclasses import replace

from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group

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
