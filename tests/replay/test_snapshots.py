"""Snapshots and the way back: exactly what the snapshot had, whatever the live file had."""

from __future__ import annotations

import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

from rllib_srl.replay.journal import snapshots
from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.journal import Commit, Journal, JournalError
from rllib_srl.replay.journal.snapshots import restore
from tests.replay.stored import GROUP, ITEM, a_group, a_row, a_visit
from tests.replay.test_journal import contents, helper


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


def test_back_to_a_snapshot(live):
    before = visit(live, 0, 1)
    snapshot = copy_of(live, "s")
    bytes_of_snapshot = snapshot.read_bytes()
    visit(live, 2, 3, 4)
    with Journal(live) as journal:
        journal.commit(Commit(removed_groups=[3], groups={0: a_row(0, uses=9)}))
    restore(snapshot, live)
    with Journal(live, ITEM, GROUP) as journal:
        assert journal.answer("1.add") == a_visit(1).answer and journal.answer("2.add") is None
        assert contents(journal) == before
        assert journal.commit(a_visit(2)) == 3  # its number is free again
    assert snapshot.read_bytes() == bytes_of_snapshot  # a checkpoint's files are sealed


def test_a_snapshot_restores_where_nothing_was(live, tmp_path):
    before = visit(live, 0, 1)
    elsewhere = tmp_path / "node2/live.db"
    restore(copy_of(live, "s"), elsewhere)
    with Journal(elsewhere) as journal:
        assert contents(journal) == before


def test_a_damaged_live_file_is_replaced_with_its_log(live):
    before = visit(live, 0)
    snapshot = copy_of(live, "s")
    live.write_bytes(b"x" * 10_000)
    Path(f"{live}-wal").write_bytes(b"y" * 100)
    restore(snapshot, live)
    with Journal(live) as journal:
        assert contents(journal) == before


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
    visit(live, 0)
    with Journal(live) as journal:
        journal.commit(a_visit(3, payloads={3: encode(a_group(3, num_tokens=20_000))}))
    snapshot, after = copy_of(live, "s"), visit(live, 1, 2)

    def full(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots.shutil, "copyfile", full)
        with pytest.raises(JournalError, match="no room|No space|full"):
            restore(snapshot, live)
    assert visit(live) == after


def test_readers_do_not_stop_a_restore(live):
    """They keep what they read; the file has another name by then."""
    visit(live, 0)
    snapshot = copy_of(live, "s")
    journal = Journal(live, ITEM, GROUP)
    journal.commit(a_visit(1))
    reader = sqlite3.connect(f"{live.as_uri()}?mode=ro", uri=True, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM groups").fetchone() == (2,)
    restore(snapshot, live, close=journal.close)
    reader.close()
    with Journal(live, ITEM, GROUP) as journal:
        assert journal.has_group(0) and not journal.has_group(1)


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
def test_a_restore_that_dies_at_any_step_can_be_repeated(live):
    new = visit(live, 0)
    snapshot = copy_of(live, "s")
    old = visit(live, 1, 2)
    shutil.copyfile(live, live.with_name("kept"))
    num_steps = 0
    while num_steps < 50:
        process = helper("restore", snapshot, live, num_steps)
        _, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        with Journal(live, ITEM, GROUP) as journal:
            assert contents(journal) in (old, new)
        restore(snapshot, live)
        assert visit(live) == new
        shutil.copyfile(live.with_name("kept"), live)
        num_steps += 1
    assert 4 <= num_steps < 50 and visit(live) == new
