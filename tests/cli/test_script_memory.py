"""srl memory: what each command says of buffers made by hand, and of a live database."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rllib_srl.algorithm.named import MEMORIES
from rllib_srl.replay import store
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.reading import reading
from scripts.memory_laws import check_tables, check_valid
from tests.small_buffer import a_group, by_hand, cells, said


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run whose memory drew its prompts p1 and p2 for iteration 8, in which p1 failed."""
    directory = tmp_path / "run"
    buffer = by_hand(directory / "replay", min_buffer_size=1)
    buffer.add([a_group(1, (1, 1), 1, ids=[40, 41]), a_group(2, (1, 0), 1, ids=[42])], 1, "1.add")
    buffer.draw_prompts(0, 1, "1.draw_prompts")
    buffer.draw_prompts(2, 8, "8.draw_prompts")
    buffer.draw_groups(1, 8, "8.draw_groups")
    buffer.add([a_group(1, (0, 0), 8, ids=[40])], 8, "8.add")
    buffer.close()
    (directory / "settings.yaml").write_text("model: tiny\n")
    return directory


def test_list_and_stats_of_a_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    heading, *rows, last = said(capsys, "list", run).splitlines()
    assert last == "2 of 2 items, iteration 8, sorted by due"
    shown = {cells(row)[1]: dict(zip(cells(heading), cells(row), strict=True)) for row in rows}
    assert list(shown) == ["env [p2]", "env [p1]"]  # p1 was reviewed in iteration 8
    first = shown["env [p1]"]
    assert (first["visits"], first["lapses"], first["groups"], first["pass rate"]) == ("2", "1", "2", "0.00")
    assert (first["due"], shown["env [p2]"]["due"]) == ("in 4 iterations", "3 iterations ago")
    assert said(capsys, "list", run, "--sort", "lapses", "--limit", 1).splitlines()[1].startswith(first["key"])
    assert said(capsys, "list", run, "--domain", "odd").startswith("0 of 2 items")
    for place in (run / "replay", run / "replay/memory.db"):
        assert said(capsys, "list", place) == "\n".join([heading, *rows, last]) + "\n"
    text, domains = said(capsys, "stats", run).split("\n\n")
    first_line, *lines = text.splitlines()
    assert first_line.startswith("iteration 8; spacing fixed, desired retention 0.9, 1 iteration per day")
    stats = dict(map(cells, lines))
    assert (stats["num_items"], stats["num_revisits"], stats["num_reuses"]) == ("2", "2", "1")
    assert cells(domains.splitlines()[0])[0] == "domain" and cells(domains.splitlines()[1])[0] == "sums"


def test_show_tells_the_item_and_what_was_said(run: Path, capsys: pytest.CaptureFixture) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    shown = said(capsys, "show", run, "p1")
    assert re.search(r"^item +[0-9a-f]{16}$", shown, re.M) and re.search(r"^reviews +2, 1 lapse$", shown, re.M)
    assert "expected now, iteration 8; the rule asks for 0.9" in shown
    assert "group 1.1: age 7 iterations, version 0, " in shown and "group 8.1: age 0 iterations" in shown
    assert shown.count("rewards 1 1") == 1 and shown.count("environment │ ") == shown.count("     policy │ ") == 4
    assert "none of 2 items has the prompt id or key 'p9'" in said(capsys, "show", run, "p9", status=1)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_memory_without_a_spacing_rule_speaks_of_visits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Nothing is due and nothing predicts recall, so no command shows either."""
    plain = {name.removeprefix("replay_"): value for name, value in MEMORIES["uniform"].items()}
    buffer = SRLReplayBuffer(directory=tmp_path, admit=None, min_recall_interval=2, min_buffer_size=1, **plain)
    buffer.add([a_group(1, (1, 1), 1), a_group(2, (1, 0), 1)], 1, "1.add")
    buffer.draw_prompts(0, 1, "1.draw_prompts")
    assert {prompt.prompt_id for prompt in buffer.draw_prompts(2, 5, "5.draw_prompts")} == {"p1", "p2"}
    buffer.add([a_group(2, (0, 0), 5)], 5, "5.add")
    buffer.close()
    rows = [cells(line) for line in said(capsys, "list", tmp_path, "--sort", "pass_rate").splitlines()]
    assert [row[1] for row in rows[1:3]] == ["env [p2]", "env [p1]"]
    assert [row[3:5] for row in rows[1:3]] == [["any time", "-"]] * 2
    text = said(capsys, "list", tmp_path, "--sort", "recall", status=1)
    assert text.startswith("error: --sort recall: this memory has no spacing rule, so it predicts no recall; expected")
    shown = said(capsys, "show", tmp_path, "p2")
    assert "expected now" not in shown and "due at" not in shown
    assert "2, first met in iteration 1" in shown
    head = said(capsys, "stats", tmp_path).splitlines()[0]
    assert head == "iteration 5; spacing none; selection uniform, reuse uniform"


def test_a_copy_is_of_one_moment_and_no_commit_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner commits and moves its WAL into the file once the copy has begun."""
    buffer, turns, begin = by_hand(tmp_path), iter(range(1, 99)), store._reader

    def play() -> None:
        now = next(turns)
        buffer.add([a_group(n, (1, 0), now, [9, now]) for n in range(4 * now, 4 * now + 4)], now)

    @contextmanager
    def disturbed(path: Path) -> Iterator[sqlite3.Connection]:
        with begin(path) as source:
            play()
            buffer.store._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            play()
            yield source

    play()
    play()
    for position, patched in ((2, begin), (2, disturbed), (4, disturbed)):
        monkeypatch.setattr(store, "_reader", patched)
        with reading(tmp_path / "memory.db") as one:
            assert (one.store.position, len(one.tables)) == (position, 4 * position)
            check_tables(one.tables, one.store)
    check_valid(buffer)
    buffer.close()


def test_a_memory_is_read_where_nobody_may_write(tmp_path: Path) -> None:
    """A closed memory is one file, and its reader leaves nothing beside it."""
    buffer = by_hand(tmp_path / "a")
    buffer.add([a_group(1, (1, 0), 1)], 1)
    buffer.close()
    before = sorted(path.name for path in (tmp_path / "a").iterdir())
    (tmp_path / "a").chmod(0o500)
    with reading(tmp_path / "a/memory.db") as one:
        assert len(one.tables) == 1
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == before == ["memory.db", "memory.db.lock"]
    (tmp_path / "a").chmod(0o700)
