"""The journal: what was acknowledged is there, whatever happened after; what failed changed nothing."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.replay.journal import journal as journal_module
from rllib_srl.replay.journal.codec import decode, encode
from rllib_srl.replay.journal.file import PAGE_BYTES
from rllib_srl.replay.journal.journal import Commit, Journal, JournalError
from rllib_srl.replay.store import items as memory
from rllib_srl.types import Prompt
from scripts.kill_loop import GROUP as KILL_GROUP
from scripts.kill_loop import ITEM as KILL_ITEM
from scripts.kill_loop import Twin
from tests.replay.stored import GROUP, ITEM, a_group, a_row, a_visit, an_item, assert_same

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep/journal.db"


def contents(journal) -> tuple:
    """Return everything that can be read, comparable."""
    stored = journal.load()
    payloads = [journal.read_group(seq) for seq in stored.seqs]
    arrays = (stored.slots, stored.items, stored.seqs, stored.groups)
    vectors = [(slot, vector.tobytes()) for slot, vector in journal.vectors()]
    return stored.position, [a.tobytes() for a in arrays], stored.prompts, stored.state, payloads, vectors


def helper(*arguments, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.replay.journal_writer", *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


# Round trips ------------------------------------------------------------------------------------------------------


def test_three_visits_by_hand(path):
    with Journal(path, ITEM, GROUP) as journal:
        assert [journal.commit(a_visit(index)) for index in (0, 2, 1)] == [1, 2, 3]
        changed = Commit(
            items={2: an_item(5, 9.5)}, groups={0: a_row(0, uses=1)}, removed_slots=[0], removed_groups=[1]
        )
        assert journal.commit(changed) == 4
    with Journal(path) as journal:
        stored = journal.load()
        assert (stored.position, stored.slots.tolist(), stored.seqs.tolist()) == (4, [1, 2], [0, 2])
        assert stored.items.tolist() == [(2**64 - 2, 1 / 3, 2, 1), (5, 9.5, 2, 1)]
        assert stored.prompts == [Prompt("world", f"p{i}", "sums", ("a",)) for i in (1, 2)]
        assert stored.groups.tolist() == [(0, 0, 1), (2, 2, 0)]
        assert stored.state == {"generator": np.random.default_rng(1).bit_generator.state, "raw": b"\1"}
        assert [(slot, vector.tolist()) for slot, vector in journal.vectors()] == [(1, [1, 1, 1]), (2, [2, 2, 2])]
        assert_same(decode(journal.read_group(2)), a_group(2))
        assert (journal.has_group(0), journal.has_group(1)) == (True, False)
        assert journal.answer("2.add") == {"stored": [2, None, 0.1]}


@pytest.mark.parametrize("seed", [3, 256])
def test_random_commits_agree_with_dictionaries(path, seed):
    generator, twin = np.random.default_rng(seed), Twin(seed)
    journal = Journal(path, KILL_ITEM, KILL_GROUP, is_durable=False)
    for _ in range(120):
        commit = twin.next()
        assert journal.commit(commit) == twin.position + 1
        twin.follow(commit)
        match int(generator.integers(8)):
            case 0:
                journal.tidy()
            case 1:
                assert twin.differences(journal) == []
            case 2:
                journal.close(is_clean=bool(generator.integers(2)))
                journal = Journal(path, KILL_ITEM, KILL_GROUP, is_durable=False)
    assert twin.differences(journal) == [] and len(twin.groups) > 20
    twin.follow(twin.next())
    assert len(twin.differences(journal)) > 4  # the comparison can fail
    journal.close()


def test_the_stores_own_rows_come_back(path):
    with Journal(path, memory.ITEM, memory.GROUP) as journal:
        row = np.ones((), memory.ITEM)[()]
        journal.commit(Commit(items={0: row, 1: row.tobytes()}, prompts=dict.fromkeys((0, 1), Prompt("w", "p"))))
    with Journal(path, memory.ITEM, memory.GROUP) as journal:
        assert journal.load().items.tolist() == [row.item()] * 2 and journal.load().items.dtype == memory.ITEM


def test_threads_take_turns_and_snapshots_are_of_one_moment(path, tmp_path):
    twin = Twin(1)
    commits = []
    for _ in range(60):
        commits.append(twin.next())
        twin.follow(commits[-1])
    with Journal(path, KILL_ITEM, KILL_GROUP, is_durable=False) as journal:
        thread = threading.Thread(target=lambda: [journal.commit(commit) for commit in commits])
        thread.start()
        positions = [journal.snapshot(tmp_path / f"copy{i}") for i in range(5)]
        thread.join()
        assert twin.differences(journal) == []
    for i, position in enumerate(positions):
        assert sorted(file.name for file in tmp_path.glob(f"copy{i}*")) == [f"copy{i}"]  # one file, no WAL
        past = Twin(1)
        while past.position < position:
            past.follow(past.next())
        with Journal(tmp_path / f"copy{i}") as copy:
            assert past.differences(copy) == []


def test_a_closed_journal_is_one_file_and_refuses_commits(path):
    journal = Journal(path, ITEM, GROUP)
    journal.commit(a_visit(1))
    assert contents(journal)[0] == 1 and Path(f"{path}-wal").exists()
    journal.close()
    journal.close()
    assert sorted(file.name for file in path.parent.iterdir()) == ["journal.db", "journal.db.lock"]
    with pytest.raises(JournalError, match="is closed"):
        journal.commit(a_visit(2))


def test_a_commit_waits_for_the_disk_if_it_is_durable(path):
    for is_durable, level in ((True, 2), (False, 0)):
        with Journal(path, ITEM, GROUP, is_durable=is_durable) as journal:
            pragmas = [journal.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")]
            assert pragmas == [level, "wal"]


# Requests ---------------------------------------------------------------------------------------------------------


def test_a_repeated_request_finds_its_answer_until_it_is_long_ago(path):
    with Journal(path, ITEM, GROUP, keep_requests=3) as journal:
        for index in range(5):
            assert journal.answer(f"{index}.add") is None
            journal.commit(a_visit(index))
        with pytest.raises(JournalError, match=r"request '3.add' has been answered already"):
            journal.commit(Commit(request="3.add", answer=1))
        assert [journal.answer(f"{index}.add") is None for index in range(5)] == [True, True, False, False, False]
    with Journal(path, keep_requests=3) as journal:
        assert [journal.answer(f"{index}.add") is None for index in range(5)] == [True, True, False, False, False]
        assert journal.answer("4.add") == a_visit(4).answer


# What fails changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_written", [False, True])
def test_a_commit_that_fails_midway_leaves_no_trace(path, monkeypatch, is_written):
    write = journal_module.write_commit

    def fails(*arguments):
        if is_written:
            write(*arguments)
        raise ZeroDivisionError

    with Journal(path, ITEM, GROUP) as journal:
        journal.commit(a_visit(0))
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "write_commit", fails)
            with pytest.raises(ZeroDivisionError):
                journal.commit(a_visit(1))
        assert journal.position == 1 and not journal.has_group(1) and journal.answer("1.add") is None
        assert journal.commit(a_visit(1)) == 2
        after = contents(journal)
    with Journal(path) as journal:
        assert contents(journal) == after and len(after[2]) == 2


def test_a_full_disk_refuses_and_loses_nothing(path):
    big = {1: encode(a_group(1, num_tokens=20_000))}
    with Journal(path, ITEM, GROUP) as journal:
        for index in (0, 2, 3):
            journal.commit(a_visit(index))
        journal.commit(a_visit(9, payloads={9: encode(a_group(1, num_tokens=12_000))}))
        before = contents(journal)
        (pages,) = journal.db.execute("PRAGMA page_count").fetchone()
        journal.db.execute(f"PRAGMA max_page_count = {pages + 8}")
        with pytest.raises(JournalError, match=r"commit 5 failed: database or disk is full; nothing of it was stored"):
            journal.commit(a_visit(1, payloads=big))
        assert contents(journal) == before and journal.position == 4
        assert journal.commit(a_visit(4)) == 5  # there is room for a small one
        journal.commit(Commit(removed_groups=[9], removed_slots=[9]))
        journal.tidy()  # pages of removed groups are free again
        journal.commit(a_visit(5, payloads={5: encode(a_group(5, num_tokens=12_000))}))
        after = contents(journal)
    with Journal(path) as journal:
        assert contents(journal) == after and journal.position == 7


def test_a_file_system_that_refuses_to_write_loses_nothing(path):
    process = helper("fill", path, 3 << 20)
    told, faults = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, faults
    refused, went_on = told.splitlines()
    position, _, message = refused.partition(" ")
    assert f"commit {int(position) + 1} failed" in message and "nothing of it was stored" in message
    assert int(went_on) == int(position) + 1 > 20
    with Journal(path, ITEM, GROUP) as journal:
        assert journal.position == int(went_on)
        assert journal.load().slots.tolist() == list(range(journal.position))


# Whose journal it is ----------------------------------------------------------------------------------------------


def test_two_buffers_cannot_share_a_journal(path):
    process = helper("hold", path)
    try:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(JournalError, match=rf"{path} is in use by process {process.pid}; expected one buffer"):
            Journal(path, ITEM, GROUP)
    finally:
        process.kill()
        process.communicate()
    with Journal(path, ITEM, GROUP) as journal:  # a dead process holds nothing
        journal.commit(a_visit(0))
        with pytest.raises(JournalError, match=f"in use by process {os.getpid()}"):
            Journal(path.parent / "." / path.name)
        assert journal.commit(a_visit(1)) == 2


# Damage -----------------------------------------------------------------------------------------------------------


def test_files_that_are_no_journals_are_refused(path):
    path.parent.mkdir()
    path.write_bytes(b"no database at all, but long enough to look like one" * 200)
    with pytest.raises(JournalError, match=r"not a database: the file is damaged; restore a checkpoint"):
        Journal(path, ITEM, GROUP)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(JournalError, match="is an SQLite database but no journal"):
        Journal(path, ITEM, GROUP)
    with pytest.raises(JournalError, match="is empty; expected dtypes"):
        Journal(path.with_name("new"))


def test_rows_of_another_version_are_refused_field_by_field(path):
    with Journal(path, ITEM, GROUP) as journal:
        journal.commit(a_visit(0))
        before = contents(journal)
    other = np.dtype([("key", "u8"), ("due", "f4"), ("status", "i1"), ("score", "f4")])
    with pytest.raises(JournalError) as caught:
        Journal(path, other, np.dtype(GROUP.descr[1:]))
    for part in ("item rows differ: due is float64 in the file, float32 here", "score is absent in the file", "seq is"):
        assert part in str(caught.value)
    with Journal(path, ITEM, GROUP) as journal:
        assert contents(journal) == before
        journal.db.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(JournalError, match=r"\(schema 99\), which is not supported; expected schema 3"):
        Journal(path)


def test_a_torn_page_is_noticed(path):
    with Journal(path, ITEM, GROUP) as journal:
        for index in range(40):
            journal.commit(a_visit(index))
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(PAGE_BYTES)
        stream.write(os.urandom(size - PAGE_BYTES))
    with pytest.raises(JournalError, match="damaged|malformed"), Journal(path, ITEM, GROUP) as journal:
        contents(journal)


# Kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.slow
def test_fifty_kills_lose_nothing_acknowledged():
    command = [sys.executable, "scripts/kill_loop.py", "--kills", "50", "--seed", "1"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    result = json.loads(done.stdout)
    assert result["faults"] == [] and done.returncode == 0
    assert result["num_kills"] == 50 and result["num_lives"] >= 25
