"""The driver's end of the memory: exact shares, requests never mixed up, failures that are named."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace
from subprocess import PIPE, Popen

import pytest
import ray

from rllib_srl.common.remote_calls import ActorFailure
from rllib_srl.replay.client import COUNTS, ReplayClient
from rllib_srl.replay.journal.file import holder_of
from rllib_srl.replay.no_memory import NoMemory
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta
from tests.conftest import ROOT
from tests.replay.groups import a_group, a_prompt

OF_THE_PROCESS = {"busy_s", "num_bytes_in_memory", "num_read_back", "num_spilled"}
HALF = {"revisit_fraction": 0.5, "reuse_fraction": 0.5}


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
        memory.check_valid()
        memory.stop()


def metas(indices, now, **fields) -> list[GroupMeta]:
    groups = [a_group(index, now, place, **fields) for place, index in enumerate(indices)]
    return [GroupMeta.of(group, group) for group in groups]


def played(memory, indices, now, **fields):
    """Play prompts, and count as the algorithm does at the end of an iteration."""
    visits = memory.add(metas(indices, now, **fields), now)
    memory.stats(now)
    return visits


# --- shares ---------------------------------------------------------------------------------------


def test_visits_come_back_by_id(start):
    memory = start()
    visits = played(memory, range(20), 1)
    assert [visits[f"1.{place}"].key for place in range(20)] == [a_prompt(index).key for index in range(20)]
    assert memory.num_items == 20 and memory.stats(1)["num_items"] == 20


@pytest.mark.slow
def test_shares_are_exact_over_many_iterations(start):
    memory = start(revisit_fraction=0.3, reuse_fraction=0.2, max_uses=99, capacity=1000)
    num, fresh = Counter(), iter(range(1000))
    for now in range(1, 42):
        revisits = [int(prompt.prompt_id[1:]) for prompt in memory.draw_prompts(7, now)]
        played(memory, [*revisits, *(next(fresh) for _ in range(7 - len(revisits)))], now)
        reused = memory.draw_groups(7, now)
        assert len(set(revisits)) == len(revisits) and len({g.group_id for g in reused}) == len(reused)
        num.update(revisits=len(revisits), reused=len(reused))
    # 40 iterations of due and 41 of sample have 2 items: .3 * 7 * 40 = 84, 7 / 4 * 41 = 71.75, less the first draw
    owed, short = memory.counts["num_reuses_owed"], memory.counts["num_reuses_short"]
    assert num["revisits"] == 84 and num["reused"] == owed - short and owed == 71 and short <= 1


# --- slots ----------------------------------------------------------------------------------------


def test_nothing_is_owed_below_the_smallest_size(start):
    memory = start(min_buffer_size=5)
    played(memory, range(4), 1)
    assert memory.draw_prompts(8, 2) == [] == memory.draw_groups(8, 2)
    assert {name: memory.counts[name] for name in COUNTS} == dict.fromkeys(COUNTS, 0)
    played(memory, [4], 2)
    assert len(memory.draw_prompts(8, 3)) == 4 and memory.counts["num_revisits_owed"] == 4


def test_what_is_missing_is_counted_and_never_owed(start):
    memory = start(min_recall_interval=10)
    played(memory, range(3), 1)
    assert memory.draw_prompts(4, 2) == [] and memory.draw_prompts(4, 3) == []
    assert (memory.counts["num_revisits_owed"], memory.counts["num_revisits_short"]) == (4, 4)
    assert len(memory.draw_prompts(4, 12)) == 2


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
    again.check_valid()
    again.stop()


def test_a_reuse_grades_its_item_only_if_asked_and_only_if_told(start):
    memory = start(grade_reuse=True)
    played(memory, range(6), 1)
    groups = memory.draw_groups(4, 2)
    told = {groups[0].group_id: {"num_over_gap": 0, "success_change": -2.0}}
    told[groups[1].group_id] = {"num_over_gap": 0, "success_change": float("nan")}  # no success to ask about
    memory.look_back(groups, told, 2)
    stats = memory.stats(2)
    assert (stats["num_rehearsed"], stats["num_reviews_of_nothing"], stats["num_dropped_drifted"]) == (1, 1, 0)
    quiet = start(grade_reuse=False)
    played(quiet, range(6), 1)
    groups = quiet.draw_groups(4, 2)
    quiet.look_back(groups, {groups[0].group_id: {"num_over_gap": 3, "success_change": -2.0}}, 2)
    assert quiet.stats(2)["num_rehearsed"] == quiet.stats(2)["num_dropped_drifted"] == 0  # 3 of 4 episodes are not all


def test_people_rate_items(start):
    memory = start(rating_scale="ordinal", spacing="fsrs")
    played(memory, range(6), 1)
    keys = [a_prompt(index).key for index in range(3)]
    with pytest.raises(ValueError, match=r"rating = \[6\.0\]; expected 1 to 5 \(ordinal\)"):
        memory.rate({keys[0]: 5, keys[1]: 6}, 2)
    assert memory.stats(2)["num_rated"] == 0
    assert memory.rate({keys[0]: 5, keys[1]: 1, "0" * 16: 3}, 2) == 2
    assert (memory.stats(2)["num_rated"], memory.stats(2)["num_reviews_of_nothing"]) == (2, 1)
    rows = {}
    for key in keys:
        buffer = memory._actor.buffer
        rows[key] = buffer.store.items[buffer.store.slot_of(int(key, 16))]
    assert [int(rows[key]["reps"]) for key in keys] == [2, 2, 1]
    assert rows[keys[0]]["interval"] > rows[keys[2]]["interval"] > rows[keys[1]]["interval"]
    with pytest.raises(ValueError, match="this run has no memory to rate items of"):
        NoMemory().rate({keys[0]: 5}, 2)


# --- states ---------------------------------------------------------------------------------------


def test_a_memory_goes_on_from_state_and_snapshots(start, tmp_path):
    memory = start(revisit_fraction=0.3, reuse_fraction=0.3)
    for now in range(1, 5):
        memory.draw_prompts(5, now)
        played(memory, range(5 * now, 5 * now + 5), now)
        memory.draw_groups(5, now)
    state = memory.get_state()
    memory.snapshot(tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["snapshot.db"]
    again = start(revisit_fraction=0.3, reuse_fraction=0.3)
    again.set_state(state)
    assert again.restore(tmp_path / "copy") == 0 and again.num_items == memory.num_items == 20
    for now in range(5, 9):
        pairs = [(one.draw_prompts(5, now), [g.group_id for g in one.draw_groups(5, now)]) for one in (memory, again)]
        assert pairs[0] == pairs[1]
        for one in (memory, again):
            played(one, range(5 * now, 5 * now + 5), now)
    stats = [{k: repr(v) for k, v in one.stats(9).items() if k not in OF_THE_PROCESS} for one in (memory, again)]
    assert stats[0] == stats[1]


def test_a_checkpoint_with_a_memory_needs_one_and_one_without_needs_none(start):
    start().check_fits(True)
    with pytest.raises(ValueError, match="^the checkpoint has no memory, this run has one; expected"):
        start().check_fits(False)
    with pytest.raises(ValueError, match="^the checkpoint has a memory, this run has none; expected"):
        NoMemory().check_fits(True)
    NoMemory().check_fits(False)


def test_no_memory_keeps_and_draws_nothing(tmp_path):
    none, groups = NoMemory(), metas(range(3), 1)
    assert (none.draw_prompts(9, 1), none.add(groups, 1), none.draw_groups(9, 1), none.stats(1)) == ([], {}, [], {})
    none.snapshot(tmp_path / "copy")
    assert none.restore(tmp_path / "copy") == 0 and not (tmp_path / "copy").exists()
    none.set_state(none.get_state())


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def stubs(ray_here, tmp_path):
    """Return a function that makes a memory of such an actor; all are ended afterwards."""
    made = []

    class Stub:  # here, or no other process could import it
        """Answers, dies, falls silent or fails, as it is told."""

        def __init__(self, ways: dict[str, int], flag: str):
            self.ways, self.flag = ways, flag

        def size(self) -> int:
            way = self.ways["size"]
            if way == "dies once" and not os.path.exists(self.flag):
                open(self.flag, "w").close()
                os._exit(1)
            if way == "silent":
                time.sleep(600)
            if way == "dies":
                os._exit(1)
            if way == "fails":
                raise ValueError("size = -1; expected more")
            return 7

    def of(way: str, timeout_s: float) -> ReplayClient:
        cls = ray.remote(Stub).options(num_cpus=0, max_restarts=-1)
        made.append(cls.remote({"size": way}, str(tmp_path / f"flag{len(made)}")))
        ray.get(made[-1].__ray_ready__.remote(), timeout=60)
        settings = replace(ReplaySettings(), timeout_s=timeout_s)
        return ReplayClient(settings, made[-1], is_local=False, journal=tmp_path / "journal.db")

    yield of
    for actor in made:
        ray.kill(actor)


@pytest.mark.slow
def test_a_buffer_that_died_is_asked_again(stubs):
    memory = stubs("dies once", timeout_s=30.0)
    assert memory.size() == 7 and memory.num_restarts == 1
    assert memory.size() == 7 and memory.num_restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("silent", r"^the memory gave no answer within 3 s while counting$"),
        ("dies", r"^the memory (died \(.*\)|gave no answer within .* s) while counting$"),
    ],
)
def test_a_buffer_that_does_not_come_back_is_reported_in_time(stubs, way, message):
    memory = stubs(way, timeout_s=3.0)
    start = time.monotonic()
    with pytest.raises(ActorFailure, match=message):
        memory.size()
    assert time.monotonic() - start < 2 * 3.0 + 15


@pytest.mark.slow
def test_what_the_buffer_raises_is_raised_as_it_is(stubs):
    with pytest.raises(ValueError, match="^size = -1; expected more$"):
        stubs("fails", timeout_s=30.0).size()


def test_the_process_that_has_a_journal_is_found(start, tmp_path):
    """It is what ends a stopped process; asking must not take the journal from whoever has it."""
    memory = start()
    path = memory._journal
    assert path.exists() and holder_of(path) == os.getpid() == holder_of(path)
    elsewhere = tmp_path / "elsewhere/journal.db"
    assert holder_of(elsewhere) is None
    script = "import sys; from pathlib import Path; from rllib_srl.replay.journal.file import JournalLock\n"
    script += "lock = JournalLock(Path(sys.argv[1])); print('here', flush=True); sys.stdin.read()"
    with Popen([sys.executable, "-c", script, str(elsewhere)], stdin=PIPE, stdout=PIPE, cwd=ROOT) as other:
        assert other.stdout.readline() == b"here\n"
        assert holder_of(elsewhere) == other.pid == holder_of(elsewhere)
        other.stdin.close()
        other.wait(20)
    assert holder_of(elsewhere) is None
