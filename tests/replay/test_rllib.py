"""The buffer with RLlib's interface: its contract, what it fetches and hands out, and why it could not start."""

import inspect
import pickle
import platform
from dataclasses import replace

import pytest
import ray
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface

from rllib_srl.replay.rllib import RLlibReplayBuffer
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import StoreError
from rllib_srl.types import Group, ListedRef
from scripts.memory_laws import check_valid
from tests.replay.groups import a_group
from tests.replay.stored import assert_same


@pytest.fixture
def open_buffer():
    """Return a function that opens a buffer; all are closed afterwards."""
    opened = []

    def of(**settings) -> RLlibReplayBuffer:
        opened.append(RLlibReplayBuffer(**{"capacity": 50, "admit": None, **settings}))
        return opened[-1]

    yield of
    for buffer in opened:
        check_valid(buffer)
        buffer.close()


def test_it_is_one_of_rllibs_buffers(open_buffer):
    from rllib_srl import SRL  # registers it

    buffer = open_buffer()
    assert SRL and isinstance(buffer, ReplayBufferInterface) and issubclass(RLlibReplayBuffer, ReplayBufferInterface)
    for name, theirs in inspect.getmembers(ReplayBufferInterface, inspect.isfunction):
        expected = [one.name for one in inspect.signature(theirs).parameters.values() if one.kind != one.VAR_KEYWORD]
        assert list(inspect.signature(getattr(RLlibReplayBuffer, name)).parameters)[: len(expected)] == expected


def test_it_counts_adds_and_samples(open_buffer):
    """`len` is the number of stored items; `add(batch)` adds data; `sample(num_items)` returns a batch of items."""
    buffer = open_buffer()
    assert len(buffer) == 0 and bool(buffer)
    groups = [a_group(index, 1, index) for index in range(3)]
    buffer.add(batch=groups)
    assert len(buffer) == 3
    drawn = buffer.sample(num_items=2)
    assert len(drawn) == len({group.group_id for group in drawn}) == 2
    assert all(isinstance(group, Group) and group.origin == "reuse" for group in drawn)
    assert len(buffer.sample()) == 1 and buffer.sample(0) == []
    assert buffer.get_host() == platform.node()


def test_its_state_is_serialisable_and_makes_another_buffer_draw_the_same(open_buffer):
    """`get_state` returns all local state; `set_state` restores it."""
    buffer, other = open_buffer(), open_buffer()
    buffer.add([a_group(index, 1, index) for index in range(6)], 1, "1.add")
    state = pickle.loads(pickle.dumps(buffer.get_state()))
    other.set_state(state)
    assert len(other) == 6
    for now in (2, 3, 4):
        drawn = [[prompt.key for prompt in one.draw_prompts(2, now)] for one in (buffer, other)]
        reused = [[group.group_id for group in one.sample(2, now)] for one in (buffer, other)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 2
        assert reused[0] == reused[1] and len(reused[0]) == 2
    buffer.add([a_group(9, 5, 9)], 5, "5.add")
    buffer.set_state(state)  # back to before: the added item and its group are gone
    assert len(buffer) == 6 and buffer.stats(5)["num_stored_groups"] == 6
    with pytest.raises(ValueError, match="expected what get_state returned"):
        buffer.set_state({"position": 3})
    with pytest.raises(StoreError):
        buffer.set_state({"snapshot": b"no journal"})
    assert len(buffer) == 6


def test_why_it_did_not_start_is_told_whatever_is_asked():
    """Ray shows a constructor's error nowhere, and a restart happens in the middle of a run."""
    settings = ReplaySettings(capacity=0)
    with pytest.raises(ValueError, match="capacity = 0"):
        RLlibReplayBuffer(settings)
    actor = RLlibReplayBuffer(settings, is_actor=True)
    for call in (("__len__",), ("add", []), ("draw_prompts", 1, 1), ("stats", 1)):
        with pytest.raises(ValueError, match="capacity = 0"):
            actor.call(*call)
    assert bool(actor)


def test_a_draw_is_metadata_and_apart_from_it_the_groups(open_buffer):
    buffer = open_buffer()
    groups = [a_group(index, 1, index) for index in range(4)]
    visits = buffer.add(groups, 1, "1.add")
    assert [visit.group_id for visit in visits] == ["1.0", "1.1", "1.2", "1.3"]
    metas, drawn = buffer.draw_apart("draw_groups", 3, 2, "2.draw_groups")
    assert len({meta.group_id for meta in metas}) == 3 and {meta.origin for meta in metas} == {"reuse"}
    for meta, group in zip(metas, drawn, strict=True):
        assert meta.ref is None and group.group_id == meta.group_id
        assert_same(replace(group, origin="fresh"), groups[int(meta.group_id.split(".")[1])])
    again, _ = buffer.draw_apart("draw_groups", 3, 2, "2.draw_groups")  # the same request, the same answer
    assert [meta.group_id for meta in again] == [meta.group_id for meta in metas]


@pytest.mark.slow
def test_groups_that_share_an_object_are_fetched_once_and_lost_together(ray_here, monkeypatch, open_buffer):
    groups, buffer, get, asked = [a_group(index, 1, index) for index in range(4)], open_buffer(), ray.get, []
    objects = [ray.put(groups[:2]), ray.put(groups[2:])]
    refs = [ListedRef(objects[index // 2], index % 2) for index in (3, 0, 2, 1)]

    def losing(wanted, timeout):
        asked.append(wanted)
        assert timeout <= buffer.settings.timeout_s / 2  # after all of it the caller ends the process
        if objects[0] in (wanted if isinstance(wanted, list) else [wanted]):
            raise ray.exceptions.OwnerDiedError("00", "", "")
        return get(wanted, timeout=timeout)

    monkeypatch.setattr(ray, "get", losing)
    visits = buffer.add(refs, 1, "1.add")
    assert [visit.group_id for visit in visits] == ["1.3", "1.2"]
    assert asked == [[objects[1], objects[0]], objects[1], objects[0]]
