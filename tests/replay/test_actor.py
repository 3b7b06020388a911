"""The buffer as an actor: it fetches and hands out, says what is lost, and never hides why it could not start."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import ray
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface

from rllib_srl.replay.actor import ReplayBufferActor
from rllib_srl.replay.journal.journal import JournalError
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import ListedRef
from tests.conftest import ROOT
from tests.replay.groups import a_group, a_prompt
from tests.replay.stored import assert_same


def an_actor(**settings) -> ReplayBufferActor:
    given = {"capacity": 50, "admit": None, **settings}
    return ReplayBufferActor(ReplaySettings(**given))


def test_it_is_one_of_rllibs_buffers():
    from rllib_srl import SRL  # registers it

    assert SRL and not {name for name in vars(ReplayBufferInterface) if name[0] != "_"} - set(dir(ReplayBufferActor))
    actor = an_actor()
    assert isinstance(actor, ReplayBufferInterface) and len(actor) == actor.size() == 0
    actor.add([a_group(1)], now=1)
    assert len(actor) == actor.size() == 1
    actor.close()


def test_its_state_makes_another_actor_draw_the_same():
    actor, other = an_actor(), an_actor()
    actor.add([a_group(index, 1, index) for index in range(6)], 1, "1.add")
    state = pickle.loads(pickle.dumps(actor.get_state()))
    assert state["position"] == 1 and isinstance(state["snapshot"], bytes)
    other.set_state(state)
    assert len(other) == 6
    for now in (2, 3, 4):
        drawn = [[prompt.key for prompt in one.draw_prompts(2, now, f"{now}.draw_prompts")] for one in (actor, other)]
        reused = [[meta.group_id for meta in one.sample(2, now, f"{now}.draw_groups")] for one in (actor, other)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 2
        assert reused[0] == reused[1] and len(reused[0]) == 2
    actor.add([a_group(9, 5, 9)], 5, "5.add")
    actor.set_state(state)  # back to before: the added item and its group are gone
    assert len(actor) == 6 and actor.stats(5)["num_stored_groups"] == 6
    actor.check_valid()
    with pytest.raises(ValueError, match="expected what get_state returned"):
        actor.set_state({"position": 3})
    with pytest.raises(JournalError):
        actor.set_state({"snapshot": b"no journal"})
    actor.check_valid()
    assert len(actor) == 6
    for one in (actor, other):
        one.close()


def test_its_process_loads_neither_torch_nor_rllib():
    """A buffer that was killed is back sooner, and takes less memory."""
    code = "import sys, rllib_srl.replay.actor; print({'torch', 'ray.rllib', 'pandas'}.intersection(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (found.returncode, found.stdout.strip()) == (0, "set()"), found.stderr


def test_why_it_did_not_start_is_told_whatever_is_asked():
    """Ray shows a constructor's error nowhere, and a restart happens in the middle of a run."""
    actor = an_actor(capacity=0)
    calls = [actor.check_started, actor.size, lambda: actor.add([]), lambda: actor.stats(1)]
    calls.append(lambda: actor.draw_prompts(1, 1))
    for call in calls:
        with pytest.raises(ValueError, match="capacity = 0"):
            call()
    actor.close()


def test_a_draw_is_metadata_and_apart_from_it_the_groups():
    actor = an_actor()
    groups = [a_group(index, 1, index) for index in range(4)]
    visits, lost = actor.add(groups, 1, "1.add")
    assert [visit.group_id for visit in visits] == ["1.0", "1.1", "1.2", "1.3"] and lost == []
    metas, drawn = actor.draw_groups(3, 2, "2.draw_groups")
    assert len({meta.group_id for meta in metas}) == 3 and {meta.origin for meta in metas} == {"reuse"}
    for meta, group in zip(metas, drawn, strict=True):
        assert meta.ref is None and group.group_id == meta.group_id
        assert_same(replace(group, origin="fresh"), groups[int(meta.group_id.split(".")[1])])
    again = actor.sample(3, 2, "2.draw_groups")  # the same request, the same answer
    assert [meta.ref.group_id for meta in again] == [meta.group_id for meta in metas]
    prompts = actor.draw_prompts(2, 2, "2.draw_prompts")
    rest = actor.draw_prompts(4, 2, "2.draw_prompts.more", without=[prompt.key for prompt in prompts])
    assert {p.key for p in prompts + rest} == {a_prompt(i).key for i in range(4)} and len(rest) == 2
    actor.check_valid()
    actor.close()


@pytest.mark.slow
def test_groups_whose_owner_died_are_lost_and_the_others_stored(ray_here, monkeypatch):
    refs, actor, get = [ray.put(a_group(index, 1, index)) for index in range(4)], an_actor(), ray.get

    def losing(asked, timeout):
        if not {refs[0], refs[3]}.isdisjoint(asked if isinstance(asked, list) else [asked]):
            raise (ray.exceptions.OwnerDiedError if asked == refs[0] else ray.exceptions.ObjectLostError)("00", "", "")
        return get(asked, timeout=timeout)

    monkeypatch.setattr(ray, "get", losing)
    visits, lost = actor.add(refs, 1, "1.add", 20.0)
    assert [visit.group_id for visit in visits] == ["1.1", "1.2"] and lost == [0, 3] and len(actor) == 2
    actor.check_valid()
    actor.close()


@pytest.mark.slow
def test_groups_that_share_an_object_are_fetched_once_and_lost_together(ray_here, monkeypatch):
    groups, actor, get, asked = [a_group(index, 1, index) for index in range(4)], an_actor(), ray.get, []
    objects = [ray.put(groups[:2]), ray.put(groups[2:])]
    refs = [ListedRef(objects[index // 2], index % 2) for index in (3, 0, 2, 1)]

    def losing(wanted, timeout):
        asked.append(wanted)
        if objects[0] in (wanted if isinstance(wanted, list) else [wanted]):
            raise ray.exceptions.ObjectLostError("00", "", "")
        return get(wanted, timeout=timeout)

    monkeypatch.setattr(ray, "get", losing)
    visits, lost = actor.add(refs, 1, "1.add", 20.0)
    assert [visit.group_id for visit in visits] == ["1.3", "1.2"] and lost == [1, 3]
    assert asked == [[objects[1], objects[0]], objects[1], objects[0]]
    actor.close()


def test_embeddings_come_by_group_and_go_to_items():
    actor = an_actor(embedding="policy")
    groups = [a_group(index, 1, index) for index in range(3)]
    actor.add(groups, 1, "1.add")
    vectors = [{"1.0": np.ones((4, 8), np.float32)}, {"1.2": np.eye(4, 8, dtype=np.float32), "9.9": np.ones((4, 8))}]
    keys = {group.group_id: group.prompt.key for group in groups}
    assert actor.embed(vectors, keys, 1, "1.embed") == 2
    store = actor.buffer.store
    has_vector = [bool(store.items[store.slot_of(int(g.prompt.key, 16))]["has_vector"]) for g in groups]
    assert has_vector == [True, False, True]
    actor.close()


def test_seconds_at_work_are_those_since_the_last_look():
    actor = an_actor()
    actor.add([a_group(index, 1, index) for index in range(30)], 1)
    first, second = actor.stats(1)["busy_s"], actor.stats(1)["busy_s"]
    assert first > 0 and second < first
    actor.close()
