"""The store: what was acknowledged is there, whatever happened after; what failed changed nothing."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rllib_srl.replay import store as module
from rllib_srl.replay.payloads import decode
from rllib_srl.replay.store import DATABASE, EARLIER, PAGE_BYTES, Store, StoreError, holder_of
from scripts.memory_laws import content
from tests.replay.groups import a_group
from tests.replay.stored import a_row, an_item, assert_same, commit, prompt_at, put_item

REPO = Path(__file__).resolve().parents[2]


def contents(store: Store) -> tuple:
    """Return everything that can be read, comparable."""
    tables, state = store.read()
    held = content(tables)
    return store.position, held, state, [store.payload(seq) for seq in held["groups"]]


def prompts_in(directory: Path, run: str = "") -> list[str]:
    with closing(Store(directory, run)) as store:
        tables, _ = store.read()
        return [tables.prompt_of(slot).prompt_id for slot in tables.slots().tolist()]


def visited(directory: Path, *indexes: int, run: str = "") -> tuple:
    """Commit visits and return the contents after them."""
    with closing(Store(directory, run)) as store:
        for index in indexes:
            commit(store, index)
        return contents(store)


def user(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.replay.stored", *map(str, arguments)]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_three_visits_by_hand(tmp_path):
    with closing(Store(tmp_path / "deep")) as store:
        for index in (0, 2, 1):
            commit(store, index)
        with store.transaction():
            store.delete("items", "slot = ?", [(1,)])
            store.delete("groups", "seq = ?", [(1,)])
            put_item(store, 2, an_item(5, 9.5), prompt_at(2), np.full(3, 7, np.float32))
            store.put("groups", [(0, a_row(0, uses=1).tobytes(), "g0")])
            assert store.read()[0].slots().tolist() == [0, 2]  # what a transaction has written is read in it
        assert store.position == 4
    with closing(Store(tmp_path / "deep")) as store:
        tables, state = store.read()
        assert (store.position, tables.slots().tolist(), [*content(tables)["groups"]]) == (4, [0, 2], [0, 2])
        assert tables.items["key"][[0, 2]].tolist() == [2**64 - 1, 5] and tables.items["due"][2] == 9.5
        assert [tables.prompt_of(slot) for slot in (0, 2)] == [prompt_at(0), prompt_at(2)]
        assert tables.groups["uses"][:2].tolist() == [1, 0] and tables.group_ids == {0: "g0", 1: "g2"}
        assert state["generator"] == np.random.default_rng(1).bit_generator.state
        assert tables.vectors[1].tolist() == [[0] * 3, [7] * 3]
        assert_same(decode(store.payload(2)), a_group(2, 2))
        assert store.answer("2.add") == {"stored": [2, None, 0.1]} and store.answer("3.add") is None
        with pytest.raises(StoreError, match="memory.db has no group 7: it was removed, or replaced by a newer one"):
            store.payload(7)


def test_a_closed_store_is_one_file_and_refuses_commits(tmp_path):
    store = Store(tmp_path)
    commit(store, 1)
    assert (tmp_path / f"{DATABASE}-wal").exists()
    store.close()
    store.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [DATABASE, f"{DATABASE}.lock"]
    with pytest.raises(StoreError, match="closed database"):
        commit(store, 2)


def test_two_buffers_cannot_share_a_store(tmp_path):
    process = user("hold", tmp_path)
    path = tmp_path / DATABASE
    try:
        assert process.stdout.readline() == "open\n"
        assert holder_of(path) == process.pid
        with pytest.raises(StoreError, match=rf"{path} is in use by process {process.pid}; expected one buffer"):
            Store(tmp_path)
    finally:
        process.kill()
        process.communicate()
    assert holder_of(path) is None
    with closing(Store(tmp_path)) as store:  # a dead process holds nothing
        commit(store, 0)
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            Store(tmp_path / ".")
        assert holder_of(path) == os.getpid()
        commit(store, 1)


def test_a_store_is_continued_by_its_run_and_set_aside_by_another(tmp_path):
    visited(tmp_path, 0, run="a")
    for run, expected in (("a", ["p0"]), ("", ["p0"]), ("b", [])):
        assert prompts_in(tmp_path, run) == expected
        assert (tmp_path / EARLIER).exists() == (run == "b")
    # Nothing was committed by "b": its file goes without a trace, and that of "a" stays where it was set aside.
    visited(tmp_path, 7, run="c")
    (tmp_path / "kept").mkdir()
    shutil.copy(tmp_path / EARLIER, tmp_path / "kept" / DATABASE)
    assert prompts_in(tmp_path / "kept") == ["p0"]


def test_files_of_others_and_of_other_versions_are_refused(tmp_path):
    path = tmp_path / DATABASE
    path.write_bytes(b"no database at all, but long enough to look like one" * 200)
    with pytest.raises(StoreError, match="not a database: the file is damaged"):
        Store(tmp_path)
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE x (y)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="no such table: meta: the file is damaged, or is not a file of memory"):
        Store(tmp_path)
    assert path.read_bytes()[100:] == before[100:]  # SQLite's header says that there was a log
    path.unlink()
    with closing(Store(tmp_path)) as store:
        commit(store, 0)
        store._db.execute("UPDATE meta SET value = '[3]' WHERE name = 'schema'")
    with pytest.raises(StoreError, match="was written by another version of this program, which is not supported"):
        Store(tmp_path)


def test_state_that_is_not_whole_is_refused(tmp_path):
    visited(tmp_path, 0)
    with closing(Store(tmp_path)) as store:
        store._db.execute("UPDATE state SET value = '9' || value WHERE name = 'items'")
        with pytest.raises(StoreError, match="loading it failed: .*: the file is damaged; restore a checkpoint"):
            store.read()


def test_a_torn_page_is_noticed(tmp_path):
    visited(tmp_path, *range(40))
    path = tmp_path / DATABASE
    with path.open("r+b") as stream:
        stream.seek(PAGE_BYTES)
        stream.write(os.urandom(path.stat().st_size - PAGE_BYTES))
    with pytest.raises(StoreError, match="damaged|malformed"), closing(Store(tmp_path)) as store:
        contents(store)


def snapshot_of(directory: Path, name: str = "s") -> Path:
    with closing(Store(directory)) as store:
        store.snapshot(directory / name)
    return directory / name


def restored(snapshot: Path, directory: Path, run: str = "") -> tuple[int, tuple]:
    """Restore a snapshot; return the number of groups dropped, and the contents."""
    with closing(Store(directory, run)) as store:
        return store.restore(snapshot), contents(store)


def test_back_to_a_snapshot(tmp_path):
    before = visited(tmp_path, 0, 1)
    snapshot = snapshot_of(tmp_path)
    bytes_of_snapshot = snapshot.read_bytes()
    visited(tmp_path, 2, 3, 4)
    with closing(Store(tmp_path)) as store:
        with store.transaction():
            store.delete("groups", "seq = ?", [(3,)])
            store.put("groups", [(0, a_row(0, uses=9).tobytes(), "g0")])
        assert store.restore(snapshot) == 3
        assert store.answer("1.add") == {"stored": [1, None, 0.1]} and store.answer("2.add") is None
        assert contents(store) == before
        commit(store, 2)
        assert store.position == 3  # its number is free again
    assert snapshot.read_bytes() == bytes_of_snapshot  # a checkpoint's files are sealed
    assert sorted(path.name for path in tmp_path.iterdir()) == [DATABASE, f"{DATABASE}.lock", "s"]
    assert restored(snapshot, tmp_path / "node2") == (0, before)


def test_a_new_process_counts_what_the_earlier_one_stored_after_the_snapshot(tmp_path):
    visited(tmp_path, 0, run="a")
    snapshot = snapshot_of(tmp_path)
    visited(tmp_path, 1, 2, run="a")
    assert restored(snapshot, tmp_path, run="b")[0] == 2
    assert not (tmp_path / EARLIER).exists() and (tmp_path / DATABASE).exists()


def test_what_is_not_a_snapshot_changes_nothing(tmp_path):
    before = visited(tmp_path, 0)
    (tmp_path / "junk").write_bytes(b"x" * 10_000)
    for path, message in (("junk", "not a database"), ("absent", "does not exist; expected a file")):
        with pytest.raises(StoreError, match=message):
            restored(tmp_path / path, tmp_path)
    assert visited(tmp_path) == before
    assert sorted(path.name for path in tmp_path.glob("memory*")) == [DATABASE, f"{DATABASE}.lock"]


def test_readers_do_not_stop_a_restore(tmp_path):
    before = visited(tmp_path, 0)
    snapshot = snapshot_of(tmp_path)
    with closing(Store(tmp_path)) as store:
        commit(store, 1)
        uri = f"{store.path.as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM groups").fetchone() == (2,)
            assert store.restore(snapshot) == 1
        assert contents(store) == before


@pytest.mark.slow
def test_a_restore_that_dies_at_any_step_can_be_repeated(tmp_path):
    live = tmp_path / "live"
    new = visited(live, 0)
    snapshot = snapshot_of(live)
    old = visited(live, 1, 2)
    shutil.copyfile(live / DATABASE, tmp_path / "kept")
    num_steps = 0
    while num_steps < 50:
        process = user("restore", snapshot, live, num_steps)
        _, errors = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        assert visited(live) in (old, new)
        assert restored(snapshot, live)[1] == new
        shutil.copyfile(tmp_path / "kept", live / DATABASE)
        num_steps += 1
    assert 3 <= num_steps < 50 and visited(live) == new


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_kills_lose_nothing_acknowledged_and_draw_nothing_twice():
    command = [sys.executable, "scripts/kill_loop.py", "--kills", "100", "--seed", "1"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=880)
    result = json.loads(done.stdout)
    assert result["errors"] == [] and done.returncode == 0
    assert result["num_kills"] == 100 and result["num_lives"] >= 10  # in the others nothing was acknowledged


def test_only_the_latest_answers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "NUM_ANSWERS", 3)
    with closing(Store(tmp_path)) as store:
        for index in range(5):
            commit(store, index)
        assert [store.answer(f"{index}.add") is None for index in range(5)] == [True, True, False, False, False]
        with pytest.raises(StoreError, match="UNIQUE"):
            commit(store, 4)
