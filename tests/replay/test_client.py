"""The driver's end of the memory: exact shares, requests never mixed up, failures that are named."""

from __future__ import annotations

import pytest

from rllib_srl.replay.client import COUNTS, ReplayClient
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta
from scripts.memory_laws import check_valid
from tests.replay.groups import a_group

OF_THE_PROCESS = {"busy_s", "num_bytes_in_memory", "num_read_back", "num_spilled"}
HALF = {"revisit_fraction": 0.5, "reuse_fraction": 0.5}
NO_MEMORY = ReplayClient.start(ReplaySettings(capacity=0, min_buffer_size=0))


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a memory in this process; all are stopped afterwards."""
    started = []

    def of(**given) -> ReplayClient:
        values = {"capacity": 200, "min_buffer_size": 2, "admit": None, **HALF, **given}
        where = {"directory": tmp_path / str(len(started)), "seed": 1, "run": f"run{len(started)}"}
        started.append(ReplayClient.start(ReplaySettings(**values), **where, is_local=True, timeout_s=5.0))
        return started[-1]

    yield of
    for memory in started:
        check_valid(memory.process.actor)
        memory.stop()


def metas(indices, now, **fields) -> list[GroupMeta]:
    groups = [a_group(index, now, place, **fields) for place, index in enumerate(indices)]
    return [GroupMeta.of(group, group) for group in groups]


def played(memory, indices, now, **fields):
    """Play prompts, and count as the algorithm does at the end of an iteration."""
    visits = memory.add(metas(indices, now, **fields), now)
    memory.stats(now)
    return visits


# --- slots ----------------------------------------------------------------------------------------


def test_nothing_is_owed_below_the_smallest_size(start):
    memory = start(min_buffer_size=5)
    played(memory, range(4), 1)
    assert memory.draw_prompts(8, 2) == [] == memory.draw_groups(8, 2)
    assert {name: memory.counts[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    played(memory, [4], 2)
    assert len(memory.draw_prompts(8, 3)) == 4 and memory.counts["num_revisits_owed"] == 4


def test_the_same_iteration_tried_again_asks_anew(start):
    memory = start()
    first = played(memory, range(6), 1)
    again = played(memory, range(6, 12), 1, salt=1)
    assert {visit.key for visit in first.values()}.isdisjoint(visit.key for visit in again.values())
    assert memory.num_items == 12
    one, two = memory.draw_prompts(4, 2), memory.draw_prompts(4, 2)
    assert len(one) == len(two) == 2 and memory.stats(2)["num_revisits"] == 4


def test_a_run_that_is_started_again_is_not_answered_from_the_past(tmp_path):
    """The journal of the first life has an answer for this iteration, also after its snapshot was restored."""

    def client() -> ReplayClient:
        settings = ReplaySettings(capacity=200, min_buffer_size=1, admit=None, **HALF)
        where = {"directory": tmp_path / "journal", "seed": 1, "run": "run"}
        return ReplayClient.start(settings, **where, is_local=True, timeout_s=5.0)

    first = client()
    assert set(played(first, [1], 1)) == {"1.0"}
    first.snapshot(tmp_path / "snapshot")
    first.stop()
    again = client()
    assert set(played(again, [2, 3], 1)) == {"1.0", "1.1"}
    assert again.restore(tmp_path / "snapshot") == 2
    assert set(played(again, [2, 3, 4], 1)) == {"1.0", "1.1", "1.2"}
    check_valid(again.process.actor)
    again.stop()


def test_a_group_is_dropped_once_all_of_its_episodes_have_drifted(start):
    memory = start()
    played(memory, range(6), 1)
    groups = memory.draw_groups(4, 2)
    memory.look_back(groups, {groups[0].group_id: 3, groups[1].group_id: 4}, 2)
    assert memory.stats(2)["num_dropped_drifted"] == 1


# --- states ---------------------------------------------------------------------------------------


def test_a_checkpoint_with_a_memory_needs_one_and_one_without_needs_none(start):
    start().check_fits(True)
    with pytest.raises(ValueError, match="^the checkpoint has no memory, this run has one; expected"):
        start().check_fits(False)
    with pytest.raises(ValueError, match="^the checkpoint has a memory, this run has none; expected"):
        NO_MEMORY.check_fits(True)
    NO_MEMORY.check_fits(False)


def test_no_memory_keeps_and_draws_nothing(tmp_path):
    none, groups = NO_MEMORY, metas(range(3), 1)
    none.set_fractions(0.9, 0.5)
    assert (none.draw_prompts(9, 1), none.add(groups, 1), none.draw_groups(9, 1)) == ([], {}, [])
    assert not none.is_on and not any(none.counts.values())
    none.snapshot(tmp_path / "copy")
    assert none.restore(tmp_path / "copy") == 0 and not (tmp_path / "copy").exists()
    none.set_state(none.get_state())
    none.stop()
