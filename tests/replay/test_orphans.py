"""Groups that were committed after the checkpoint a run went back to: counted, for reuse only, and only to fill."""

from __future__ import annotations

import pytest

from rllib_srl.replay.journal.orphans import orphan_id
from rllib_srl.replay.journal.schema import FIRST_ORPHAN
from tests.replay.groups import a_buffer, a_group, a_prompt, everything, play


def crash(directory, at=5, end=9, **settings):
    """Play `end` iterations with a copy taken at iteration `at`, and die; return what the last ones answered."""
    buffer = a_buffer(directory / "run", run="first", **settings)
    for now in range(1, at + 1):
        play(buffer, now)
    buffer.snapshot(directory / "copy")
    lost = [play(buffer, now) for now in range(at + 1, end + 1)]
    buffer.close()
    return lost


@pytest.mark.parametrize("is_in_place", [False, True], ids=["a_new_process", "the_running_buffer"])
def test_a_crash_after_a_checkpoint_leaves_orphans_and_the_schedule_of_the_checkpoint(tmp_path, is_in_place):
    lost = crash(tmp_path, at=5, end=9, groups_per_item=9)
    buffer = a_buffer(tmp_path / "run", run="first" if is_in_place else "second", groups_per_item=9)
    assert (len(buffer) > 0) == is_in_place
    num = buffer.restore(tmp_path / "copy")
    # Four iterations of 8 groups each, none refused or replaced, were committed after the copy.
    assert num == 4 * 8 == len(buffer.orphans) == buffer.stats(5)["num_orphan_groups"]
    assert buffer.counts["num_orphans_taken_over"] == num
    clone = a_buffer(tmp_path / "clone", run="clone", groups_per_item=9)
    assert clone.restore(tmp_path / "copy") == 0 and len(clone.orphans) == 0
    mine, theirs = everything(buffer), everything(clone)
    for state in (mine, theirs):
        state["orphans"] = state["state"]["counts"] = None
    assert mine == theirs
    again = [play(buffer, now) for now in range(6, 10)]
    assert [one["due"] for one in again] == [one["due"] for one in lost]
    assert [one["visits"] for one in again] == [one["visits"] for one in lost]
    # Own groups are drawn as they were; orphans come only after them.
    for one, before in zip(again, lost, strict=True):
        own = [drawn for drawn in one["reused"] if "orphan" not in drawn[0]]
        assert own == before["reused"]
    buffer.check_valid()


def test_a_clone_in_another_directory_goes_on_without_any(tmp_path):
    lost = crash(tmp_path)
    clone = a_buffer(tmp_path / "clone", run="clone")
    assert clone.restore(tmp_path / "copy") == 0
    assert [play(clone, now) for now in range(6, 10)] == lost


def test_orphans_fill_only_what_the_runs_own_groups_do_not(tmp_path):
    buffer = a_buffer(tmp_path / "run", run="a")
    buffer.add([a_group(i) for i in range(3)], 1)
    buffer.snapshot(tmp_path / "copy")
    buffer.add([a_group(i, 2, i) for i in range(10, 15)], 2)
    assert buffer.restore(tmp_path / "copy") == 5
    clone = a_buffer()  # without orphans
    clone.restore(tmp_path / "copy")
    assert len(buffer.sample(3, 2)) == len(clone.sample(3, 2)) == 3
    assert {row["uses"] for row in buffer.orphans.rows.values()} == {0}
    drawn = [group.group_id for group in buffer.sample(6, 2)]
    assert sorted(drawn[:3]) == ["1.0"] * 3  # what `a_group` calls them all
    assert [name for name in drawn[3:] if name.startswith("2.orphan")] == drawn[3:] and len(set(drawn[3:])) == 3
    assert sum(int(row["uses"]) for row in buffer.orphans.rows.values()) == 3
    # They have a generator of their own: later draws are those of a run that has none.
    assert len(clone.sample(6, 2)) == 3
    for one in (buffer, clone):
        one.add([a_group(i, 3, i) for i in range(20, 40)], 3)
    own = [[group.group_id for group in one.sample(4, now)] for now in (4, 5) for one in (buffer, clone)]
    assert own[0] == own[1] and own[2] == own[3]


def test_orphans_obey_the_bounds_of_reuse(tmp_path):
    buffer = a_buffer(tmp_path / "run", run="a", max_uses=2, max_age=4, domains=["sums"])
    buffer.snapshot(tmp_path / "copy")
    buffer.add([a_group(a_prompt(0, "sums"), 2), a_group(a_prompt(1, "words"), 2)], 2)
    buffer.add([a_group(a_prompt(2, "sums"), 2, rewards=(1, 1))], 2)  # nothing to learn from
    assert buffer.restore(tmp_path / "copy") == 3
    buffer.check_valid()
    drawn = [[group.prompt.prompt_id for group in buffer.sample(3, now)] for now in (1, 6, 6)]
    assert drawn == [["p0"], ["p0"], []]  # its iteration has not come again at 1; two uses
    fresh = a_buffer(tmp_path / "b", run="b", max_age=4)
    fresh.snapshot(tmp_path / "none")
    fresh.add([a_group(0, 2)], 2)
    fresh.restore(tmp_path / "none")
    assert fresh.sample(1, 7) == [] and len(fresh.sample(1, 6)) == 1


def test_an_orphan_that_is_played_again_is_the_runs_own(tmp_path):
    buffer = a_buffer(tmp_path, run="a")
    buffer.snapshot(tmp_path / "copy")
    twin, other = a_group(0, 2), a_group(1, 2)
    buffer.add([twin, other], 2)
    assert buffer.restore(tmp_path / "copy") == 2
    buffer.add([twin, a_group(1, 2, salt=1)], 2)  # the first comes out as it did, the second does not
    assert len(buffer.orphans) == 1 and buffer.counts["num_orphans_played"] == 1
    drawn = buffer.sample(9, 3)
    assert len(drawn) == 3 and len({group.token_ids_N.tobytes() for group in drawn}) == 3
    assert len({group.group_id for group in drawn if "orphan" in group.group_id}) == 1
    buffer.check_valid()
    buffer.close()
    assert len(a_buffer(tmp_path, run="a").orphans) == 1


def test_an_orphan_can_be_dropped_and_a_failed_drop_keeps_it(tmp_path, monkeypatch):
    buffer = a_buffer(tmp_path, run="a")
    buffer.snapshot(tmp_path / "copy")
    buffer.add([a_group(0, 2), a_group(1, 2)], 2)
    buffer.restore(tmp_path / "copy")
    first, second = (group.group_id for group in buffer.sample(2, 2))
    state = everything(buffer)
    with monkeypatch.context() as patch:
        patch.setattr(buffer.ledger.journal, "commit", lambda commit: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            buffer.drop([first])
    assert everything(buffer) == state
    assert buffer.drop([first]) == 1
    assert len(buffer.orphans) == 1
    buffer.check_valid()
    assert [group.group_id for group in buffer.sample(2, 3)] == [second]


def test_orphans_of_several_crashes_are_all_kept(tmp_path):
    buffer = a_buffer(tmp_path, run="a")
    buffer.snapshot(tmp_path / "copy")
    for salt in range(3):
        buffer.add([a_group(0, 2, salt=salt)], 2)
        buffer.snapshot(tmp_path / "later")
        buffer.restore(tmp_path / "copy")
    # Each restore takes what came after the copy from the journal it replaces, earlier orphans among it.
    assert len(buffer.orphans) == 3
    assert len({group.group_id for group in buffer.sample(3, 3)}) == 3


def test_ids_of_orphans_begin_with_the_iteration_and_end_with_the_place():
    assert orphan_id("12.3", FIRST_ORPHAN + 7) == "12.orphan7.3"
