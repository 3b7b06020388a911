"""What the live page reads while a run writes: lines, columns, transcripts; and its charts as shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_srl.cli.dashboard.drawing import HEIGHT, LEFT, RIGHT, TOP, WIDTH, drawing_of
from rllib_srl.cli.dashboard.live_run import LiveRun
from rllib_srl.cli.dashboard.transcripts import Transcripts, Wanted
from rllib_srl.cli.report.metrics_table import MetricsTable
from rllib_srl.cli.report.run_plots import Plot
from rllib_srl.cli.shared.tail import Tail
from tests.cli.test_script_report import episode, row


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


# --- lines


def test_each_line_is_read_once_and_when_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a.jsonl")
    assert not tail.has_restarted() and list(tail.new_lines()) == []
    (tmp_path / "a.jsonl").write_bytes(b"one\ntw")
    assert not tail.has_restarted() and list(tail.new_lines()) == [(0, b"one\n")]
    assert list(tail.new_lines()) == []
    with (tmp_path / "a.jsonl").open("ab") as stream:
        stream.write(b"o\nthree\n")
    assert list(tail.new_lines()) == [(4, b"two\n"), (8, b"three\n")] and not tail.has_restarted()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_cut_or_replaced_is_read_again(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    assert not tail.has_restarted() and len(list(tail.new_lines())) == 2
    if is_replaced:
        (tmp_path / "b").write_bytes(b"another one\nlonger\n")
        (tmp_path / "b").replace(path)
    else:
        path.write_bytes(b"1\n")
    assert tail.has_restarted()
    assert [line for _, line in tail.new_lines()] == ([b"another one\n", b"longer\n"] if is_replaced else [b"1\n"])
    assert not tail.has_restarted()


# --- columns


def test_columns_grow_and_an_iteration_trained_again_replaces_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 2.0, "b": 5}, {"iteration": 3, "a": 3.0}))
    table = MetricsTable(path)
    assert table.refresh() and not table.refresh()
    with path.open("a") as stream:
        stream.write(lines({"iteration": 2, "a": 20.0}, {"iteration": 4, "c": math.nan, "a": 4}))
        stream.write('{"iteration": 5, "a')
    assert table.refresh() and table.iterations().tolist() == [1, 2, 3, 4]
    columns = table.columns()
    assert columns["a"].tolist() == [1, 20, 3, 4] and np.isnan(columns["b"]).all()
    assert table.num_damaged == 0


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{x}\n[1]\n{"a": 1}\n{"iteration": 1e999}\n{"iteration": 1, "a": "b"}\n' + lines({"iteration": 7}))
    table = MetricsTable(path)
    table.refresh()
    assert table.num_damaged == 5 and table.iterations().tolist() == [7] and len(table.faults) == 1


# --- transcripts


@pytest.fixture
def transcripts(tmp_path: Path) -> Transcripts:
    path = tmp_path / "transcripts.jsonl"
    some = [episode(n, index, reward) for n in range(1, 5) for index, reward in enumerate((0.0, 1.0))]
    again = episode(2, 1, 0.5, 'Zoë said "yes"\\no')
    path.write_text(lines(*some, again) + '{"iteration": 9, "gro')
    found = Transcripts(path)
    found.refresh()
    return found


def names(found: Any) -> list[tuple[int, int]]:
    return [(one["iteration"], one["index"]) for _, one in found.episodes]


def test_the_newest_episodes_come_first_page_by_page(transcripts: Transcripts) -> None:
    assert len(transcripts) == 8 and transcripts.num_damaged == 0
    first = transcripts.search(Wanted(), None, 3)
    assert names(first) == [(2, 1), (4, 1), (4, 0)] and first.before == 6
    second = transcripts.search(Wanted(), first.before, 9)
    assert names(second) == [(3, 1), (3, 0), (2, 0), (1, 1), (1, 0)] and second.before is None
    assert transcripts.search(Wanted(), 0, 3).episodes == ()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(text='zoë said "yes"'), [(2, 1)]),
        (Wanted(text='"yes"\\n'), [(2, 1)]),
        (Wanted(text="said"), [(2, 1)]),
        (Wanted(text="policy"), []),  # a name in the file, not a text of the episode
        (Wanted(text="<b>", iteration=lambda n: n == 4), [(4, 1), (4, 0)]),
        (Wanted(reward=lambda reward: reward >= 1), [(4, 1), (3, 1), (1, 1)]),
        (Wanted(stop_reason="truncated"), []),
        (Wanted(env_id="sums", iteration=lambda n: n == 1), [(1, 1), (1, 0)]),
    ],
)
def test_filters_and_text(transcripts: Transcripts, wanted: Wanted, expected: list[tuple[int, int]]) -> None:
    assert names(transcripts.search(wanted, None, 20)) == expected


def test_damaged_episodes_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "transcripts.jsonl"
    bad = [{"iteration": 1}, [], {**episode(1, 0, 1.0), "turns": [{"role": "x", "text": 3}]}]
    path.write_text(lines(*bad, episode(1, 0, 1.0)) + "{\n")
    found = Transcripts(path)
    found.refresh()
    assert len(found) == 1 and found.num_damaged == 4 and found.choices() == (["terminated"], ["sums"])


# --- the run


def test_a_run_is_read_as_it_grows(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("iterations: 3\n")
    run = LiveRun(tmp_path)
    run.refresh()
    assert run.facts is None and run.state() == "no finished iteration yet"
    (tmp_path / "metrics.jsonl").write_text(lines(row(1, 0.5)))
    run._looked_at = -1.0
    run.refresh()
    assert run.facts is not None and run.state() == "1 of 3 iterations, the last one less than a minute ago"
    before = run.version
    run._looked_at = -1.0
    run.refresh()
    assert run.version == before
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(lines(row(2, 0.5), row(3, 0.5)) + "?\n")
    run._looked_at = -1.0
    run.refresh()
    assert run.state().startswith("3 of 3 iterations, finished") and run.version > before
    assert run.faults == ["metrics.jsonl has 1 damaged lines, which are left out"]


# --- charts


def test_a_chart_is_drawn_where_its_values_are() -> None:
    values = np.array([0.0, math.nan, 1.0])
    bands = {"a": [np.array([0.0, 0.0, 0.5]), np.array([0.5, 1.0, 1.0])]}
    drawing = drawing_of(Plot("t", "y", np.array([0, 1, 2]), {"a": values}, bands))
    (curve,) = drawing.curves
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - 34
    assert curve.path == f"M{left:.1f},{bottom:.1f}L{right:.1f},{top:.1f}" and curve.points == ((0.0, 0.0), (2.0, 1.0))
    middle = (top + bottom) / 2
    corners = ((left, middle), (right, top), (right, middle), (left, bottom))
    assert curve.band == "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in corners) + "Z"
    assert [label for _, label in drawing.y_ticks] == ["0%", "20%", "40%", "60%", "80%", "100%"]


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf], [3.0], [5.0, 5.0], [-1e-9, 1e12], [-2.0, -1.0]])
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawing = drawing_of(Plot("t", "", np.arange(1, len(values) + 1), {"a": np.array(values)}, may_be_share=False))
    assert "nan" not in str(drawing.curves) and "inf" not in str(drawing.curves) and drawing.y_ticks
