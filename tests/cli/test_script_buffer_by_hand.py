"""srl memory on buffers made by hand: words for each case, imports, secrets, shards, and a live journal."""

from __future__ import annotations

import multiprocessing
import re
import sqlite3
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from rllib_srl.cli.shared import memory_plots as buffer_plots
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal import file
from rllib_srl.replay.journal.reader import reading
from rllib_srl.replay.store.records import ITEM
from rllib_srl.replay.tools.verify import verify
from tests.small_buffer import a_group, by_hand, cells, said

# --- words ----------------------------------------------------------------------------------------


def last_line(capsys: pytest.CaptureFixture, directory: Path, name: str) -> str:
    return said(capsys, "why", directory, name).splitlines()[-1]


def test_a_memory_without_a_spacing_rule_speaks_of_visits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The default: nothing is due and nothing predicts recall, so no command shows either."""
    buffer = SRLReplayBuffer(directory=tmp_path, admit=None, min_recall_interval=2, min_buffer_size=1)
    buffer.add([a_group(1, (1, 1), 1), a_group(2, (1, 0), 1)], 1, "1.add")
    buffer.draw_prompts(0, 1, "1.draw_prompts")
    assert last_line(capsys, tmp_path, "p1") == (
        "not drawn for iteration 2: rests until iteration 3 (min_recall_interval)"
    )
    assert {prompt.prompt_id for prompt in buffer.draw_prompts(2, 5, "5.draw_prompts")} == {"p1", "p2"}
    buffer.add([a_group(2, (0, 0), 5)], 5, "5.add")
    buffer.draw_prompts(0, 8, "8.draw_prompts")
    buffer.close()
    lines = said(capsys, "why", tmp_path, "p2").splitlines()
    assert lines[1] == (
        "drawn for iteration 5: 4 iterations after its last visit, pass rate 0.50, 1 visit before, rule uniform"
    )
    assert lines[-1] == (
        "may be drawn for iteration 9: last visited 3 iterations ago; so may 1 other items, rule uniform"
    )
    rows = [cells(line) for line in said(capsys, "ls", tmp_path, "--sort", "pass_rate").splitlines()]
    assert [row[1] for row in rows[1:3]] == ["world [p2]", "world [p1]"]
    assert [row[3:5] for row in rows[1:3]] == [["any time", "-"]] * 2
    text = said(capsys, "ls", tmp_path, "--sort", "recall", status=1)
    assert text.startswith("error: --sort recall: this memory has no spacing rule, so it predicts no recall; expected")
    shown = said(capsys, "show", tmp_path, "p2")
    assert "expected now" not in shown and "due at" not in shown and "pass rate, posterior" not in shown
    assert "2, first met in iteration 1" in shown
    head = said(capsys, "stats", tmp_path).splitlines()[0]
    assert head == "iteration 8; spacing none; selection uniform, reuse uniform"
    assert said(capsys, "plot", tmp_path, "--out", tmp_path / "memory.png").strip().endswith("memory.png")
    height, width, _ = image.imread(tmp_path / "memory.png").shape
    assert height < width / 2  # only the row of the prompts' history


# --- files ----------------------------------------------------------------------------------------


def test_import_into_a_stopped_run_changes_no_schedule(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    buffer = by_hand(tmp_path / "replay", run="mine")
    buffer.add([a_group(1, (1, 0), 1), a_group(2, (1, 1), 1)], 1, "1.add")
    before = buffer.store.items[buffer.store.slots()].copy()
    buffer.snapshot(tmp_path / "snapshot.sqlite")
    buffer.close()
    other = by_hand(tmp_path / "other")
    other.add([a_group(1, (0, 1, 0), 9), a_group(3, (0, 1), 9)], 9)
    other.close()
    said(capsys, "export", tmp_path / "other", tmp_path / "x.jsonl")
    taken = said(capsys, "import", tmp_path, tmp_path / "x.jsonl", "--now", 4)
    assert taken.startswith("2 of 2 groups stored, with iteration 4; 1 new items")
    with reading(tmp_path / "replay/journal.db") as one:
        for name in ("due", "reps", "pass_rate", "last_review", "alpha", "novelty"):
            assert one.stored.items[name][:2].tolist() == before[name].tolist(), name
        assert one.stored.items["num_groups"].tolist() == [2, 1, 1]
        assert one.stored.state["run"] == "mine"
    buffer = by_hand(tmp_path / "replay", run="mine")  # resumed from its checkpoint, the run still has them
    assert buffer.restore(tmp_path / "snapshot.sqlite") == 2 and len(buffer) == 2
    buffer.check_valid()
    buffer.close()


# --- a run that goes on ---------------------------------------------------------------------------


def write_on(directory: str, started: Event, ended: Event) -> None:
    """Play the run: commit, and move the WAL into the file, as fast as it goes."""
    buffer = by_hand(Path(directory), groups_per_item=1)
    now = 0
    while not ended.is_set():
        now += 1
        buffer.add(
            [a_group(n, (1, 0), now, [9 + now % 90, now % 70, 3]) for n in range(now % 7, 40, 7)], now, f"{now}.add"
        )
        if now % 5 == 0:
            buffer.tidy()
        if now == 20:
            started.set()
    buffer.check_valid()
    buffer.close()


@pytest.mark.slow
def test_a_live_journal_is_read_whole_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    writer = context.Process(target=write_on, args=(str(tmp_path), started, ended))
    writer.start()
    try:
        assert started.wait(60)
        positions = []
        end = time.monotonic() + 60
        while len(positions) < 4 or (positions[-1] == positions[0] and time.monotonic() < end):
            text = said(capsys, "verify", tmp_path)
            positions.append(int(re.search(r"position (\d+)", text)[1]))
            assert text.startswith("ok  ") and " 40 items, 40 groups, " in text
        assert positions == sorted(positions) and positions[-1] > positions[0] >= 20
        (tmp_path / "x.jsonl").write_text("")
        text = said(capsys, "import", tmp_path, tmp_path / "x.jsonl", status=1)
        assert f"is in use by process {writer.pid}" in text and text.count("\n") == 1
    finally:
        ended.set()
        writer.join(60)
    assert writer.exitcode == 0


def test_a_copy_is_of_one_moment_and_no_commit_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner commits and moves its WAL into the file between the steps of the copy."""
    buffer, turns, back_up = by_hand(tmp_path), iter(range(1, 99)), file.back_up

    def play() -> None:
        now = next(turns)
        buffer.add([a_group(n, (1, 0), now, [9, now]) for n in range(4 * now, 4 * now + 4)], now)

    def disturbed(source: sqlite3.Connection, copy: Path) -> None:
        play()
        buffer.tidy()
        play()
        back_up(source, copy)

    play()
    play()
    for position, patched in ((2, back_up), (2, disturbed), (4, disturbed)):
        monkeypatch.setattr(file, "back_up", patched)
        with reading(tmp_path / "journal.db") as one:
            assert (one.stored.position, len(one.stored.items)) == (position, 4 * position)
    monkeypatch.setattr(file, "back_up", back_up)
    assert not verify(tmp_path / "journal.db").faults
    buffer.check_valid()
    buffer.close()


def test_a_journal_is_read_where_nobody_may_write(tmp_path: Path) -> None:
    """A closed journal is one file, and its reader leaves nothing beside it."""
    buffer = by_hand(tmp_path / "a")
    buffer.add([a_group(1, (1, 0), 1)], 1)
    buffer.close()
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    (tmp_path / "a").chmod(0o500)
    with reading(tmp_path / "a/journal.db") as one:
        assert len(one.stored.items) == 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before == ["journal.db", "journal.db.lock"]
    (tmp_path / "a").chmod(0o700)


def test_history_and_silence_of_the_plot_by_hand() -> None:
    rows = np.zeros(5, ITEM)
    rows["visits"] = [0, 1, 2, 9, 3]
    rows["history_count"], rows["history_sum"] = [0, 8, 4, 16, 2], [0, 2, 4, 0, 1]
    rows["num_silent"], rows["is_solved"] = [0, 0, 1, 8, 2], [False, False, True, False, True]
    visits_N, reward_N, is_silent_N = buffer_plots.reward_points(rows)
    assert visits_N.tolist() == [1, 2, 9, 3] and reward_N.tolist() == [0.25, 1.0, 0.0, 0.5]
    assert is_silent_N.tolist() == [False, True, True, True]
    solved_C, unsolved_C = buffer_plots.silent_counts(rows)
    assert solved_C.tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0] and unsolved_C.tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 1]
