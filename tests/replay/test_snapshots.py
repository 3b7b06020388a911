"""Snapshots and the way back: what the snapshot had, what it had not as orphans, and never another run's groups."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.replay.journal import file, snapshots
from rllib_srl.replay.journal.codec import decode, encode
from rllib_srl.replay.journal.journal import Commit, Journal, JournalError
from rllib_srl.replay.journal.snapshots import descends, restore
from rllib_srl.types import Prompt
from tests.replay.stored import GROUP, ITEM, a_group, a_row, a_visit, assert_same
from tests.replay.test_journal import contents, helper, of_schema_1

NEW_SEQ = 1 << 62


@pytest.fixture
def live(tmp_path):
    return tmp_path / "live.db"


def visit(path: Path, *indexes: int) -> tuple:
    """Commit visits and return the contents after them."""
    with Journal(path, ITEM, GROUP) as journal:
        for index in indexes:
            journal.commit(a_visit(index))
        return contents(journal)


def copy_of(path: Path, name: str) -> Path:
    with Journal(path) as journal:
        journal.snapshot(path.with_name(name))
    return path.with_name(name)


def orphans_of(path: Path) -> list[str]:
    """Return the ids of a journal's orphans, every part of them checked."""
    with Journal(path) as journal:
        stored = journal.load()
        ids = []
        for seq, prompt in stored.orphans.items():
            (at,) = np.flatnonzero(stored.seqs == seq)
            group = decode(journal.read_group(seq))
            assert prompt == group.prompt and stored.groups[at].tolist()[::3] == (seq, True)
            assert stored.groups["slot"][at] == -1
            assert_same(group, a_group(int(group.group_id[1:])))
            ids.append(group.group_id)
        assert not stored.groups["is_orphan"][stored.seqs < NEW_SEQ].any()
        return ids


def test_back_to_a_snapshot_with_what_came_after_as_orphans(live):
    before = visit(live, 0, 1)
    snapshot = copy_of(live, "s")
    bytes_of_snapshot = snapshot.read_bytes()
    visit(live, 2, 3, 4)
    with Journal(live) as journal:
        journal.commit(Commit(removed_groups=[3], groups={0: a_row(0, uses=9)}))
    restored = restore(snapshot, live)
    assert (restored.num_orphans, restored.position, restored.replaced) == (2, 3, None)
    assert orphans_of(live) == ["g2", "g4"]
    with Journal(live, ITEM, GROUP) as journal:
        assert journal.answer("1.add") == a_visit(1).answer and journal.answer("2.add") is None
        journal.commit(Commit(removed_groups=[NEW_SEQ, NEW_SEQ + 1]))
        after = contents(journal)
        assert after[1:] == before[1:]
        assert journal.commit(a_visit(2)) == 5  # its number is free again
    assert orphans_of(live) == []
    assert snapshot.read_bytes() == bytes_of_snapshot  # a checkpoint's files are sealed


def test_orphans_of_several_restores_are_kept_once(live):
    visit(live, 0)
    snapshot = copy_of(live, "s")
    visit(live, 1, 2)
    assert restore(snapshot, live).num_orphans == 2
    visit(live, 1, 5)  # the run goes on: it plays group 1 again, to the same bytes, and another one
    assert restore(snapshot, live).num_orphans == 3
    assert orphans_of(live) == ["g1", "g2", "g5"]
    assert restore(snapshot, live).num_orphans == 3
    later = copy_of(live, "s2")
    visit(live, 6)
    assert restore(later, live).num_orphans == 1  # the others are in the snapshot
    assert orphans_of(live) == ["g1", "g2", "g5", "g6"]
    assert not live.with_name("live.db.replaced").exists()


def test_what_died_without_tidying_up_gives_its_groups_too(live, monkeypatch):
    visit(live, 0)
    snapshot = copy_of(live, "s")
    journal = Journal(live)
    for index in (1, 2):
        journal.commit(a_visit(index))
    journal.commit(Commit(removed_groups=[1]))
    monkeypatch.setattr(journal, "tidy", lambda: None)
    keep = {path: path.with_name("kept" + path.name) for path in (live, Path(f"{live}-wal"))}
    for path, kept in keep.items():
        shutil.copyfile(path, kept)  # as a kill would leave them: the last commits are in the WAL and the log only
    journal.close(is_clean=False)
    for path, kept in keep.items():
        os.replace(kept, path)
    assert Path(f"{live}-wal").stat().st_size > 0
    assert restore(snapshot, live).num_orphans == 1
    assert orphans_of(live) == ["g2"]


@pytest.mark.parametrize(
    ("live", "live_position", "snapshot", "position", "want"),
    [
        ([("a", 0)], 5, [("a", 0)], 3, True),
        ([("a", 0)], 3, [("a", 0)], 5, False),  # the snapshot is newer than the file
        ([("a", 0), ("b", 3)], 9, [("a", 0)], 3, True),  # b began at the snapshot
        ([("a", 0), ("b", 3)], 9, [("a", 0)], 2, True),  # or after it
        ([("a", 0), ("b", 3)], 9, [("a", 0)], 4, False),  # or before: a's 4 is not b's 4
        ([("a", 0), ("b", 3)], 9, [("a", 0), ("b", 3)], 7, True),
        ([("a", 0), ("b", 3)], 9, [("a", 0), ("c", 3)], 7, False),  # two clones
        ([("a", 0)], 9, [("a", 0), ("c", 3)], 7, False),
        ([("z", 0)], 9, [("a", 0)], 3, False),
    ],
)
def test_only_what_went_through_the_snapshot_descends_from_it(live, live_position, snapshot, position, want):
    assert descends(live, live_position, snapshot, position) is want


def test_clones_never_get_each_others_groups(live):
    """Population based training: a trial takes over another's checkpoint, both go on, and it happens again."""
    other = live.with_name("other.db")
    visit(live, 0)
    visit(other, 50)
    snapshot = copy_of(live, "s")
    taken = restore(snapshot, other)
    assert (taken.num_orphans, taken.replaced) == (0, other.with_name("other.db.replaced"))
    assert "does not descend" in taken.reason
    with Journal(taken.replaced) as journal:
        assert decode(journal.read_group(50)).group_id == "g50"
    with Journal(live) as a, Journal(other) as b:
        assert a.lineage == b.lineage and a.branches != b.branches
    visit(live, 1, 2, 3)
    visit(other, 61, 62)
    newer = copy_of(live, "s2")  # at position 4, as `other` is
    assert restore(newer, other).num_orphans == 0
    assert restore(copy_of(other, "s3"), live).num_orphans == 0
    visit(live, 7)
    assert restore(live.with_name("s3"), live).num_orphans == 1  # its own groups it does get
    assert orphans_of(live) == ["g7"]


def test_a_snapshot_restores_where_nothing_was(live, tmp_path):
    before = visit(live, 0, 1)
    elsewhere = tmp_path / "node2/live.db"
    assert restore(copy_of(live, "s"), elsewhere).num_orphans == 0
    with Journal(elsewhere) as journal:
        assert contents(journal)[1:] == before[1:] and journal.position == 3


def test_a_snapshot_of_schema_1_restores_and_a_live_file_of_schema_1_gives_orphans(live):
    snapshot = of_schema_1(live.with_name("s"))
    shutil.copyfile(snapshot, live)
    bytes_of_snapshot = snapshot.read_bytes()
    with Journal(live, ITEM, GROUP) as journal:
        journal.commit(a_visit(5))
    assert restore(snapshot, live).num_orphans == 1
    assert orphans_of(live) == ["g2", "g5"] and snapshot.read_bytes() == bytes_of_snapshot
    shutil.copyfile(snapshot, live)
    assert restore(snapshot, live).replaced is None and orphans_of(live) == ["g2"]


def test_a_damaged_live_file_is_set_aside_as_it_is(live):
    before = visit(live, 0)
    snapshot = copy_of(live, "s")
    live.write_bytes(b"x" * 10_000)
    Path(f"{live}-wal").write_bytes(b"y" * 100)
    restored = restore(snapshot, live)
    assert restored.num_orphans == 0 and "not a database" in restored.reason
    assert restored.replaced.read_bytes() == b"x" * 10_000
    with Journal(live) as journal:
        assert contents(journal)[1:] == before[1:]


def test_a_damaged_group_is_counted_and_left_behind(live):
    visit(live, 0)
    snapshot = copy_of(live, "s")
    visit(live, 1, 2)
    with Journal(live) as journal:
        journal.db.execute("UPDATE payloads SET payload = CAST(payload || 'x' AS BLOB) WHERE seq = 1")
    restored = restore(snapshot, live)
    assert (restored.num_orphans, restored.num_damaged) == (1, 1)
    assert orphans_of(live) == ["g2"]


def test_what_is_no_snapshot_changes_nothing(live, tmp_path):
    before = visit(live, 0)
    (tmp_path / "junk").write_bytes(b"x" * 10_000)
    for path, message in (("junk", "not a database"), ("absent", "does not exist; expected a file")):
        with pytest.raises(JournalError, match=message):
            restore(tmp_path / path, live)
    open_one = Journal(tmp_path / "open", ITEM, GROUP)
    open_one.commit(a_visit(1))
    with pytest.raises(JournalError, match="is a live journal, open-wal beside it; expected a snapshot"):
        restore(tmp_path / "open", live)
    snapshot = copy_of(live, "s")
    with pytest.raises(JournalError, match="in use by process"):
        restore(snapshot, open_one.path)
    open_one.close()
    assert visit(live) == before
    assert sorted(path.name for path in tmp_path.glob("live*")) == ["live.db", "live.db.lock"]


def test_a_restore_without_room_changes_nothing(live, monkeypatch):
    """A full disk is not the old file's fault: it must not cost the orphans."""
    visit(live, 0)
    snapshot = copy_of(live, "s")
    after = visit(live, 1, 2)
    connect = snapshots.connect

    def small(path, is_durable):
        db = connect(path, is_durable)
        if path.suffix == ".new":
            db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        return db

    with Journal(live) as journal:
        journal.commit(a_visit(3, payloads={3: encode(a_group(3, num_tokens=20_000))}))
        after = contents(journal)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "connect", small)
        with pytest.raises(JournalError, match="database or disk is full"):
            restore(snapshot, live)
    assert visit(live) == after
    assert restore(snapshot, live).num_orphans == 3


def test_an_old_file_that_another_program_locks_is_left_alone(live, monkeypatch):
    after = visit(live, 0, 1)
    snapshot = copy_of(live, "s")
    other = sqlite3.connect(live, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(file, "TIMEOUT_S", 0.1)
    with pytest.raises(JournalError, match="another process has it open"):
        restore(snapshot, live)
    other.close()
    assert visit(live) == after


def test_a_restore_waits_for_a_reader_and_then_changes_nothing(live, monkeypatch):
    visit(live, 0)
    snapshot = copy_of(live, "s")
    monkeypatch.setattr(file, "TIMEOUT_S", 0.1)
    journal = Journal(live, ITEM, GROUP)
    journal.commit(a_visit(1))
    reader = sqlite3.connect(f"{live.as_uri()}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM groups").fetchone() == (2,)
    with pytest.raises(JournalError, match="another process has it open"):
        restore(snapshot, live, close=journal.close)
    assert reader.execute("SELECT count(*) FROM groups").fetchone() == (2,)
    visit(live, 2)  # commits do not wait for readers
    reader.close()
    assert restore(snapshot, live).num_orphans == 2
    assert orphans_of(live) == ["g1", "g2"]


def test_a_snapshot_that_fails_leaves_the_one_before(live, monkeypatch):
    visit(live, 0)
    snapshot = copy_of(live, "s")
    before = snapshot.read_bytes()
    with Journal(live) as journal:
        journal.commit(a_visit(1))
        with monkeypatch.context() as patch:
            patch.setattr(snapshots.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("no")))
            with pytest.raises(JournalError, match=r"snapshot .*s cannot be written: no"):
                journal.snapshot(snapshot)
        assert snapshot.read_bytes() == before and not snapshot.with_name("s.new").exists()
        assert journal.commit(a_visit(2)) == 3
        assert journal.snapshot(snapshot) == 3


@pytest.mark.slow
@pytest.mark.parametrize("is_clone", [False, True])
def test_a_restore_that_dies_at_any_step_can_be_repeated(live, is_clone):
    source = live.with_name("source.db") if is_clone else live
    visit(source, 0)
    snapshot = copy_of(source, "s")
    old = visit(live, 1, 2)
    shutil.copyfile(live, live.with_name("kept"))
    num_steps = 0
    while num_steps < 50:
        process = helper("restore", snapshot, live, num_steps)
        told, faults = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, faults
        with Journal(live, ITEM, GROUP) as journal:
            found = contents(journal)
            is_old = found == old
            assert is_old or (found[2] == [Prompt("world", "p0", "sums", ("a",))] and journal.has_group(0))
        assert is_old or is_clone is False or decode_of(live.with_name("live.db.replaced"), 1) == "g1"
        restored = restore(snapshot, live)
        assert restored.num_orphans == (0 if is_clone else 2)
        shutil.copyfile(live.with_name("kept"), live)
        num_steps += 1
    assert 8 <= num_steps < 50 and told == ("0\n" if is_clone else "2\n")


def decode_of(path: Path, seq: int) -> str:
    with Journal(path) as journal:
        return decode(journal.read_group(seq)).group_id
