"""The driver's end of the memory: exact shares, requests never mixed up, failures that are named."""

import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.common.remote_calls import ActorFailure, Call
from rllib_srl.replay.client import COUNTS, BufferProcess, ReplayClient, Slots
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta
from scripts.memory_laws import check_valid
from tests.replay.groups import a_group

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


def test_slots_by_hand():
    slots = Slots(0.2)
    assert [slots.owed(4) for _ in range(10)] == [0, 1, 1, 1, 1] * 2  # .8, 1.6, 1.4, 1.2, 1.0
    assert [Slots(1.0).owed(4), Slots(0.0).owed(4)] == [4, 0]
    third = Slots(1 / 3)
    assert sum(third.owed(1) for _ in range(30_000)) == 9_999  # .3333333333333333 is less than a third
    tiny = Slots(1e-7)
    assert [tiny.owed(9_999_999), tiny.owed(1)] == [0, 1]


@given(fraction=st.integers(0, 1000).map(lambda k: k / 1000), nums=st.lists(st.integers(0, 64), max_size=60))
def test_owed_is_the_exact_fraction_rounded_down(fraction, nums):
    slots, total = Slots(fraction), 0
    for done in range(len(nums)):
        total += slots.owed(nums[done])
        assert total == Fraction(str(fraction)) * sum(nums[: done + 1]) // 1


def test_reuse_is_a_fraction_of_the_whole_batch():
    # P = 6, fraction .25: R = 2, 2 / 8 = .25; P = 16 at .2: R = 4
    assert Slots(0.25, is_added=True).owed(6) == 2 and Slots(0.2, is_added=True).owed(16) == 4
    slots = Slots(0.3, is_added=True)
    reused = sum(slots.owed(4) for _ in range(700))  # 2,800 * 3 / 7
    assert reused == 1200 and reused / (2800 + reused) == 0.3


def test_a_changed_fraction_keeps_what_is_carried():
    slots = Slots(0.4, is_added=True)
    assert slots.owed(8) == 5  # 5.33
    slots.change(0.25)
    assert slots.owed(8) == 3  # .33 + 2.67


def test_slots_resume_where_they_were():
    slots, other = Slots(0.3, is_added=True), Slots(0.3, is_added=True)
    for _ in range(5):
        slots.owed(4)
    other.carry = Fraction(str(slots.carry))
    assert [slots.owed(5) for _ in range(20)] == [other.owed(5) for _ in range(20)]


def test_nothing_is_owed_below_the_smallest_size(start):
    memory = start(min_buffer_size=5)
    played(memory, range(4), 1)
    assert memory.draw_prompts(8, 2) == [] == memory.draw_groups(8, 2)
    assert {name: memory.counts[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    played(memory, [4], 2)
    assert len(memory.draw_prompts(8, 3)) == 4 and memory.counts["num_revisits_owed"] == 4


def test_a_full_memory_smaller_than_the_smallest_size_is_drawn_from(start):
    memory = start(min_buffer_size=16, capacity=4)
    played(memory, range(3), 1)
    assert memory.draw_prompts(4, 2) == []
    played(memory, range(3, 6), 2)
    assert memory.num_items == 4 and len(memory.draw_prompts(4, 3)) == 2


def test_a_planned_fraction_holds_for_its_plan_alone(start):
    memory = start(revisit_fraction=0.25)
    played(memory, range(8), 1)
    nums = []
    for now, planned in enumerate((0.75, None), 2):
        memory.set_fractions(planned, None)
        nums.append(len(memory.draw_prompts(4, now)))
    assert nums == [3, 1]


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
    groups[2] = replace(groups[2], has_reward_G=np.zeros(4, bool))  # its rating was taken back: nothing was left out
    memory.look_back(groups, {groups[0].group_id: 3, groups[1].group_id: 4}, 2)
    assert memory.stats(2)["num_dropped_drifted"] == 1


def test_a_checkpoint_with_a_memory_needs_one_and_one_without_needs_none(start):
    start().check_fits(True)
    NO_MEMORY.check_fits(False)
    for memory, has_memory in ((start(), False), (NO_MEMORY, True)):
        with pytest.raises(ValueError, match="^the checkpoint has (a|no) memory, this run has (none|one); expected"):
            memory.check_fits(has_memory)


def test_no_memory_keeps_and_draws_nothing(tmp_path):
    none, groups = NO_MEMORY, metas(range(3), 1)
    none.set_fractions(0.9, 0.5)
    assert (none.draw_prompts(9, 1), none.add(groups, 1), none.draw_groups(9, 1)) == ([], {}, [])
    assert not none.is_on and not any(none.counts.values())
    none.snapshot(tmp_path / "copy")
    assert none.restore(tmp_path / "copy") == 0 and not (tmp_path / "copy").exists()
    none.set_state(none.get_state())
    none.stop()


@pytest.mark.slow
def test_a_buffer_that_stays_silent_is_reported(ray_here, tmp_path):
    class Stub:  # here, or no other process could import it
        def call(self, method: str) -> None:
            time.sleep(600)

    actor = ray.remote(Stub).options(num_cpus=0, max_restarts=-1).remote()
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=60)
        with pytest.raises(ActorFailure, match=r"^the memory gave no answer within 3 s while running 'len'$"):
            BufferProcess(actor, False, tmp_path / "memory.db", 3.0).call(Call.of(len))
    finally:
        ray.kill(actor)
