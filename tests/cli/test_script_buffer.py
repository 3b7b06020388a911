"""srl memory on a real run: what each command says is what the run did, and reading disturbs nothing."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rllib_srl.cli import memory as script
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.payloads import decode
from rllib_srl.types import Group, Prompt
from tests.flat_settings import grouped
from tests.small_buffer import cells, said
from tests.small_memory import SCHEDULED
from tests.small_worlds import small_config

ITERATIONS, CAPACITY = 14, 24  # 4 prompts an iteration, half of them revisits: 30 items come


@dataclass
class Run:
    """A run that has ended, and what it knew of itself."""

    directory: Path
    model_dir: Path
    rows: dict[str, np.void] = field(default_factory=dict)  # key -> the item's row at the end
    prompts: dict[str, Prompt] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)
    drawn: list[tuple[int, str]] = field(default_factory=list)  # iteration, key
    groups: dict[str, Group] = field(default_factory=dict)  # id -> stored group

    @property
    def journal(self) -> Path:
        return self.directory / "replay/memory.db"


@pytest.fixture(scope="module")
def run(random_llama_dir, tmp_path_factory, ray_here) -> Run:
    """Train in this process, and note what the memory held when it stopped."""
    run = Run(tmp_path_factory.mktemp("memory") / "run", random_llama_dir)
    config = small_config(random_llama_dir, run.directory, num_prompts=400).training(lr=3e-3)
    config.replay(revisit_fraction=0.5, reuse_fraction=0.25, capacity=CAPACITY, min_buffer_size=4)
    config.replay(**grouped(SCHEDULED, "replay_"))
    algo = config.build_algo()
    due = algo.memory.draw_prompts

    def watched(num: int, now: int, *shares: Any) -> list[Prompt]:
        prompts = due(num, now, *shares)
        run.drawn += [(now, prompt.key) for prompt in prompts]
        return prompts

    algo.memory.draw_prompts = watched
    for _ in range(ITERATIONS):
        algo.train()
    buffer = algo.memory.process.actor
    slots = buffer.tables.slots()
    recalls = buffer.recall.recall_of(buffer.tables.items[slots], ITERATIONS).tolist()
    for slot, recall in zip(slots.tolist(), recalls, strict=True):
        prompt = buffer.tables.prompt_of(slot)
        run.prompts[prompt.key], run.recall[prompt.key] = prompt, recall
        run.rows[prompt.key] = buffer.tables.items[slot].copy()
        for at in buffer.tables.groups_of(slot):
            group = decode(buffer.store.payload(int(buffer.tables.groups[at]["seq"])))
            run.groups[group.group_id] = group
    run.stats = SRLReplayBuffer.stats(buffer, ITERATIONS)
    algo.save_to_path(str(run.directory / "checkpoint_000014"))
    algo.stop()
    (run.directory / "settings.yaml").write_text(yaml.safe_dump({"model": str(random_llama_dir)}))
    return run


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_list_lists_the_items_as_they_were(run: Run, capsys: pytest.CaptureFixture) -> None:
    lines = said(capsys, "list", run.directory, "--limit", 99).splitlines()
    assert lines[-1] == f"{len(run.rows)} of {len(run.rows)} items, iteration {ITERATIONS}, sorted by due"
    heading, *rows = map(cells, lines[:-1])
    assert len(rows) == len(run.rows) == CAPACITY
    shown = {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
    for key, row in run.rows.items():
        found = shown[key[:10]]
        assert found["prompt"] == f"tests.small_worlds:Even [{run.prompts[key].prompt_id}]"
        assert found["recall"] == f"{run.recall[key]:.2f}"
        assert (found["visits"], found["lapses"]) == (str(row["visits"]), str(row["lapses"]))
        assert (found["pass rate"], found["diversity"]) == (f"{row['pass_rate']:.2f}", f"{row['diversity']:.2f}")
    due = [run.rows[key]["due"] for row in rows for key in run.rows if key.startswith(row[0])]
    assert due == sorted(due) and len(due) == run.stats["num_items"]


@pytest.mark.slow
def test_list_sorts_filters_and_limits(run: Run, capsys: pytest.CaptureFixture) -> None:
    lines = said(capsys, "list", run.directory, "--sort", "recall", "--limit", 5).splitlines()
    heading, *rows = (cells(line) for line in lines[:-1])
    recalls = [row[heading.index("recall")] for row in rows]
    assert recalls == [f"{recall:.2f}" for recall in sorted(run.recall.values())[:5]]
    heading, *rows = (cells(line) for line in said(capsys, "list", run.directory, "--sort", "lapses").splitlines()[:-1])
    lapses = [int(row[heading.index("lapses")]) for row in rows]
    assert lapses == sorted((int(row["lapses"]) for row in run.rows.values()), reverse=True)
    assert said(capsys, "list", run.directory, "--domain", "odd").startswith(f"0 of {CAPACITY} items")
    assert said(capsys, "list", run.directory, "--domain", "even", "--limit", 2).startswith("key")


@pytest.mark.slow
def test_a_checkpoint_and_a_file_are_read_like_a_run(run: Run, capsys: pytest.CaptureFixture) -> None:
    expected = said(capsys, "list", run.directory)
    for place in (run.directory / "checkpoint_000014", run.journal, run.journal.parent, run.directory / "replay"):
        assert said(capsys, "list", place) == expected


@pytest.mark.slow
def test_stats_are_those_of_the_run(run: Run, capsys: pytest.CaptureFixture) -> None:
    text, domains = said(capsys, "stats", run.directory).split("\n\n")
    first, *lines = text.splitlines()
    assert cells(domains.splitlines()[0])[0] == "domain"
    assert first.startswith(f"iteration {ITERATIONS}; spacing fsrs, desired retention 0.9, 1 iteration per day")
    shown = dict(cells(line) for line in lines)
    known = {name: value for name, value in run.stats.items() if not name.startswith("domains/")}
    assert shown == {name: f"{value:.6g}" for name, value in known.items()}
    assert int(shown["num_evicted"]) > 0 and int(shown["num_revisits"]) == len(run.drawn)


@pytest.mark.slow
def test_show_tells_the_item_and_what_was_said(run: Run, capsys: pytest.CaptureFixture) -> None:
    key = max(run.rows, key=lambda key: run.rows[key]["num_groups"])
    row = run.rows[key]
    shown = said(capsys, "show", run.directory, run.prompts[key].prompt_id)
    assert re.search(rf"^item +{key}$", shown, re.M) and re.search(rf"^reviews +{row['reps']}, ", shown, re.M)
    assert f"{run.recall[key]:.2f} expected now, iteration {ITERATIONS}; the rule asks for 0.9" in shown
    own = [group for group in run.groups.values() if group.prompt.key == key]
    assert len(own) == row["num_groups"] == 2
    for group in own:
        born = int(group.group_id.split(".")[0])
        assert f"group {group.group_id}: age {ITERATIONS - born} iteration" in shown
        assert f"rewards {' '.join(f'{reward:g}' for reward in group.rewards_G)}" in shown
    assert shown.count(f"environment │ {group.prompt.prompt_id}:") == 8  # 2 groups of 4 episodes
    assert shown.count("     policy │ ") == 8


@pytest.mark.slow
def test_verify_says_ok_with_counts(run: Run, capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, "verify", run.directory)
    assert text.startswith(f"ok  {run.journal}: {CAPACITY} items, {len(run.groups)} groups, ")
    assert said(capsys, "verify", run.directory / "checkpoint_000014").startswith("ok  ")


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "expected"), [
    ("UPDATE payloads SET payload = substr(payload, 1, 60) || X'00' || substr(payload, 62)", "group {} is damaged"),
    ("UPDATE items SET row = zeroblob(length(row)) WHERE slot = 3", "not so in this memory"),
    ("UPDATE state SET value = '9' || value WHERE name = 'items'", "loading it failed: Extra data"),
    ("DELETE FROM payloads WHERE seq = (SELECT max(seq) FROM groups)", "does not hold group"),
    ("DELETE FROM groups WHERE seq = (SELECT max(seq) FROM groups)", "num_groups"),
])  # fmt: skip
def test_verify_names_each_fault(run: Run, tmp_path: Path, capsys, damage: str, expected: str) -> None:
    path = tmp_path / "memory.db"
    path.write_bytes(run.journal.read_bytes())
    with sqlite3.connect(path) as db:
        seqs = [seq for (seq,) in db.execute("SELECT seq FROM groups ORDER BY seq")]
        db.execute(damage)
    db.close()
    capsys.readouterr()
    assert script.main(["verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    if "{}" in expected:
        assert len(lines) == len(seqs) and all(expected.format(s) in line for s, line in zip(seqs, lines, strict=True))
    else:
        assert expected in lines[0]


@pytest.mark.slow
def test_reading_changes_nothing(run: Run, capsys: pytest.CaptureFixture) -> None:
    before, key = bytes_in(run.directory), next(iter(run.rows))
    for argv in (["list"], ["stats"], ["verify"], ["show", key]):
        said(capsys, argv[0], run.directory, *argv[1:])
    assert bytes_in(run.directory) == before
