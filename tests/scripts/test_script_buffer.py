"""scripts/buffer.py on a real run: what each command says is what the run did, and reading disturbs nothing."""

from __future__ import annotations

import json
import multiprocessing
import re
import sqlite3
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.calibration import ReviewLog
from rllib_srl.replay.export import import_groups
from rllib_srl.replay.journal import Journal
from rllib_srl.replay.readings import reading
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.spacing import make_spacing
from rllib_srl.types import Group, Prompt, StopReason
from scripts import buffer as script
from scripts import buffer_plots
from scripts.settings import read_values
from tests.small_worlds import small_config

ROOT = Path(__file__).resolve().parents[2]
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
        return self.directory / "replay/shard_0/journal.db"


@pytest.fixture(scope="module")
def run(random_llama_dir, tmp_path_factory, ray_here) -> Run:
    """Train in this process, and note what the memory held when it stopped."""
    run = Run(tmp_path_factory.mktemp("memory") / "run", random_llama_dir)
    config = small_config(random_llama_dir, run.directory, num_prompts=400).training(lr=3e-3)
    config.replay(revisit_fraction=0.5, reuse_fraction=0.25, capacity=CAPACITY, min_buffer_size=4)
    algo = config.build_algo()
    due = algo.memory.due

    def watched(num: int, now: int) -> list[Prompt]:
        prompts = due(num, now)
        run.drawn += [(now, prompt.key) for prompt in prompts]
        return prompts

    algo.memory.due = watched
    for _ in range(ITERATIONS):
        algo.train()
    buffer = algo.memory._shards[0].buffer
    slots = buffer.store.slots()
    for slot, recall in zip(slots.tolist(), buffer.recall.retrievability(slots, ITERATIONS).tolist(), strict=True):
        prompt = buffer.store.prompt_of(slot)
        run.prompts[prompt.key], run.recall[prompt.key] = prompt, recall
        run.rows[prompt.key] = buffer.store.items[slot].copy()
        for at in buffer.store.groups_of(slot):
            group = buffer.ledger.payloads.get(int(buffer.store.groups[at]["seq"]))
            run.groups[group.group_id] = group
    run.stats = buffer.stats(ITERATIONS)
    algo.save_to_path(str(run.directory / "checkpoint_000014"))
    algo.stop()
    (run.directory / "settings.yaml").write_text(yaml.safe_dump({"model": str(random_llama_dir)}))
    return run


def said(capsys: pytest.CaptureFixture, *argv: object, status: int = 0) -> str:
    """Return what a command prints, on standard output if it succeeds, else on standard error."""
    capsys.readouterr()
    found = script.main([str(word) for word in argv])
    shown = capsys.readouterr()
    assert found == status, shown
    return shown.out if status == 0 else shown.err


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- listing --------------------------------------------------------------------------------------


def test_ls_lists_the_items_as_they_were(run: Run, capsys: pytest.CaptureFixture) -> None:
    lines = said(capsys, "ls", run.directory, "--limit", 99).splitlines()
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
        assert (found["due"] == "waiting") == (row["status"] == 1)
    due = [run.rows[key]["due"] for row in rows for key in run.rows if key.startswith(row[0]) and row[3] != "waiting"]
    assert due == sorted(due) and len(due) == run.stats["num_scheduled"]


def test_ls_sorts_filters_and_limits(run: Run, capsys: pytest.CaptureFixture) -> None:
    lines = said(capsys, "ls", run.directory, "--sort", "recall", "--limit", 5).splitlines()
    assert [cells(line)[4] for line in lines[1:-1]] == [f"{recall:.2f}" for recall in sorted(run.recall.values())[:5]]
    lapses = [int(cells(line)[7]) for line in said(capsys, "ls", run.directory, "--sort", "lapses").splitlines()[1:-1]]
    assert lapses == sorted((int(row["lapses"]) for row in run.rows.values()), reverse=True)
    waiting = said(capsys, "ls", run.directory, "--status", "waiting", "--limit", 1).splitlines()
    assert len(waiting) == 3 and " waiting " in waiting[1]
    assert said(capsys, "ls", run.directory, "--domain", "odd").startswith(f"0 of {CAPACITY} items")
    assert said(capsys, "ls", run.directory, "--domain", "even", "--limit", 2).startswith("key")


def test_a_checkpoint_and_a_file_are_read_like_a_run(run: Run, capsys: pytest.CaptureFixture) -> None:
    expected = said(capsys, "ls", run.directory)
    for place in (run.directory / "checkpoint_000014", run.journal, run.journal.parent, run.directory / "replay"):
        assert said(capsys, "ls", place) == expected


def test_stats_are_those_of_the_run(run: Run, capsys: pytest.CaptureFixture) -> None:
    first, *lines = said(capsys, "stats", run.directory).splitlines()
    assert first.startswith(f"iteration {ITERATIONS}; spacing fsrs, desired retention 0.9, 1 iteration a day")
    shown = dict(map(cells, lines))
    known = {name: value for name, value in run.stats.items() if name not in script.OF_A_PROCESS}
    assert shown == {name: f"{value:.6g}" for name, value in known.items()}
    assert int(shown["num_evicted"]) > 0 and int(shown["num_revisits"]) == len(run.drawn)


# --- one item -------------------------------------------------------------------------------------


def test_show_tells_the_item_its_reviews_and_what_was_said(run: Run, capsys: pytest.CaptureFixture) -> None:
    key = max(run.rows, key=lambda key: run.rows[key]["visits"])
    row = run.rows[key]
    shown = said(capsys, "show", run.directory, run.prompts[key].prompt_id)
    assert f"item                  {key}\n" in shown
    assert f"reviews               {row['reps']}, " in shown
    assert f"{run.recall[key]:.2f} expected now, iteration {ITERATIONS}; the rule asks for 0.9" in shown
    with Journal(Path(copy_of(run.journal))) as journal:
        reviews = journal.reviews()[journal.reviews()["key"] == row["key"]]
    table = [cells(line) for line in shown.split("reviews\n", 1)[1].split("\n\n")[0].splitlines()[1:]]
    assert [int(line[0]) for line in table] == reviews["now"].tolist() and len(table) > 2
    assert [line[3] for line in table[1:]] == [f"{predicted:.2f}" for predicted in reviews["predicted"][1:]]
    assert [line[2] for line in table] == [f"{r['num_success'] / r['n']:.2f} ({r['num_success']} of 4)" for r in reviews]
    own = [group for group in run.groups.values() if group.prompt.key == key]
    assert len(own) == row["num_groups"] == 2
    for group in own:
        born = int(group.group_id.split(".")[0])
        assert f"group {group.group_id}: age {ITERATIONS - born} iteration" in shown
        assert f"rewards {' '.join(f'{reward:g}' for reward in group.rewards_G)}" in shown
    assert shown.count(f"environment │ {group.prompt.prompt_id}:") == 8  # 2 groups of 4 episodes
    assert shown.count("     policy │ ") == 8


def test_why_tells_the_draws_that_were_made(run: Run, capsys: pytest.CaptureFixture) -> None:
    """The recall a draw rested on is the one that the review of that iteration was judged by."""
    with Journal(Path(copy_of(run.journal))) as journal:
        predicted = {(int(r["now"]), f"{int(r['key']):016x}"): float(r["predicted"]) for r in journal.reviews()}
    num_draws = 0
    for key in run.rows:
        lines = said(capsys, "why", run.directory, key, "--limit", 99).splitlines()
        drawn = [line for line in lines if line.startswith("drawn for")]
        iterations = [now for now, other in run.drawn if other == key]
        assert [int(re.findall(r"\d+", line)[0]) for line in drawn] == iterations
        for line, now in zip(drawn, iterations, strict=True):
            assert f"predicted recall {predicted[now, key]:.2f}, lapses " in line and line.endswith(", rule srl")
        assert f"iteration {ITERATIONS + 1}" in lines[-1]
        num_draws += len(drawn)
        if run.rows[key]["status"] == 1:
            assert "it waits outside the schedule with" in lines[-1]
        elif run.rows[key]["due"] > ITERATIONS + 1:
            assert f"predicted recall {run.recall[key]:.2f} now" in lines[-1] and "not due until" in lines[-1]
        else:
            assert "may be drawn for iteration" in lines[-1]
    assert num_draws > 10


def a_group(number: int, rewards: tuple[float, ...], now: int, ids: list[int] | None = None) -> Group:
    """Return a group of one-token answers to prompt `number`, or with `ids` as every answer."""
    ids = ids or [7 + number]
    size, length = len(rewards), 1 + len(ids)
    mask_N = np.tile([False] + [True] * len(ids), size)
    tokens_N = np.tile([1, *ids], size)
    tokens_N[length - 1 :: length] += np.arange(size) if ids == [7 + number] else 0
    return Group(
        f"{now}.{number}",
        Prompt("world", f"p{number}", domain="sums"),
        tokens_N.astype(np.int32),
        mask_N,
        np.where(mask_N, -0.5, 0).astype(np.float32),
        np.arange(size + 1) * length,
        np.array(rewards, np.float32),
        np.full((size, 2), now - 1),
        (StopReason.TERMINATED,) * size,
    )


def by_hand(directory: Path, **settings: object) -> SRLReplayBuffer:
    values = {"on_secret": "keep", "load_control": "none", "spacing": "fixed", "spacing_config": {"base_interval": 4.0}}
    return SRLReplayBuffer(directory=directory, **{**values, "diversity_coeff": 0.0, **settings})


def last_line(capsys: pytest.CaptureFixture, directory: Path, name: str) -> str:
    return said(capsys, "why", directory, name).splitlines()[-1]


def test_what_keeps_an_item_from_being_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Visited in iteration 10 with an interval of 4: due at 14; the reading stands at 10, 12 and 16."""
    buffer = by_hand(tmp_path / "a", min_recall_interval=3, leech_failures=1, leech_interval=20)
    buffer.add([a_group(1, (1, 1), 10), a_group(2, (0, 0), 10)], 10, "10.add")
    buffer.due(0, 10, "10.due", slots=2.0)
    buffer.close()
    text = last_line(capsys, tmp_path / "a", "p1")
    assert text.startswith("not drawn for iteration 11: not due until iteration 14 (in 4 iterations), predicted recall")
    assert text.endswith("; rests until iteration 13 (min_recall_interval)")
    assert last_line(capsys, tmp_path / "a", "p2") == (
        "not drawn for iteration 11: a leech, failed 1 times in a row; tested again from iteration 30, leeches taking "
        "at most 10% of revisits"
    )
    buffer = by_hand(tmp_path / "a", min_recall_interval=1)
    buffer.due(0, 12, "12.due", slots=2.0)
    buffer.close()
    assert last_line(capsys, tmp_path / "a", "p1").endswith("now; before that only if too few items are due")
    buffer = by_hand(tmp_path / "a")
    buffer.due(0, 16, "16.due", slots=2.0)
    buffer.close()
    text = last_line(capsys, tmp_path / "a", "p1")
    assert text.startswith("may be drawn for iteration 17: due 2 iterations ago, predicted recall")
    assert text.endswith("; 0 other items are due for 2 slots an iteration, rule srl")


def test_a_draw_in_words(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    buffer = by_hand(tmp_path)
    buffer.add([a_group(1, (1, 1), 1), a_group(2, (1, 0), 1)], 1, "1.add")
    buffer.due(0, 1, "1.due", slots=2.0)
    assert {prompt.prompt_id for prompt in buffer.due(2, 8, "8.due")} == {"p1", "p2"}
    assert [group.prompt.prompt_id for group in buffer.sample(1, 8, "8.sample")] == ["p2"]  # the one with signal
    buffer.close()
    recall = make_spacing("fixed", base_interval=4.0)
    assert recall.interval_of(np.array([4.0])) == 4.0
    lines = said(capsys, "why", tmp_path, "p2").splitlines()
    assert re.fullmatch(
        r"drawn for iteration 8: due 3 iterations ago, predicted recall 0\.\d\d, lapses 0, novelty \d\.\d\d "
        r"\(diversity \d\.\d\d\), rule srl",
        lines[1],
    )
    assert lines[2] == "reused in iteration 8: its group of iteration 1 was trained on again"


def test_names_that_are_unknown_ambiguous_or_gone(run: Run, capsys: pytest.CaptureFixture) -> None:
    gone = next(key for _, key in run.drawn if key not in run.rows) if len(run.drawn) else ""
    assert f"none of {CAPACITY} items has the prompt id or key 'zz'" in said(capsys, "why", run.directory, "zz", status=1)
    assert "one was evicted, reviewed" in said(capsys, "show", run.directory, gone, status=1)
    text = said(capsys, "why", run.directory, "", status=1)
    assert text.startswith("error: '' is 24 items: ") and text.endswith("and 19 more; expected more digits of a key\n")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export_holds_every_group_and_its_item(run: Run, tmp_path: Path, capsys, suffix: str) -> None:
    path = tmp_path / f"groups{suffix}"
    assert said(capsys, "export", run.directory, path).startswith(f"{len(run.groups)} groups in ")
    rows = import_groups(path).rows
    assert {row.group.group_id for row in rows} == set(run.groups)
    for row in rows:
        stored = run.groups[row.group.group_id]
        for name in ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "rewards_G", "versions_G2"):
            assert np.array_equal(getattr(row.group, name), getattr(stored, name)), name
        item = run.rows[row.group.prompt.key]
        assert row.item["key"] == item["key"] and row.item["due"] == item["due"] and row.item["reps"] == item["reps"]


def test_import_into_a_new_buffer_and_again(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, new = tmp_path / "groups.jsonl", tmp_path / "new"
    said(capsys, "export", run.directory, path)
    assert json.loads(path.read_text().splitlines()[0])["text"][0].startswith("even ")
    num, items = len(run.groups), len(run.rows)
    taken = said(capsys, "import", new, path, "--model", run.model_dir, "--now", 3)
    assert taken == f"{num} of {num} groups stored, born in iteration 3; {items} new items; refused: none\n"
    again = said(capsys, "import", new, path, "--model", run.model_dir, "--now", 5)
    assert again == f"0 of {num} groups stored, born in iteration 5; 0 new items; refused: {num} duplicate\n"
    with reading(new / "journal.db") as one:
        assert set(one.stored.groups["born"].tolist()) == {3}
        assert (one.stored.items["reps"] == 1).all()  # neither a second group nor a second import tests a policy
        logps = {one.group(seq).behaviour_logp_N.tobytes() for seq in one.stored.seqs.tolist()}
        assert logps == {group.behaviour_logp_N.tobytes() for group in run.groups.values()}
        ids = [one.group(seq).group_id for seq in one.stored.seqs.tolist()]
    assert not set(ids) & set(run.groups) and {name.split("~")[0] for name in ids} == set(run.groups)
    assert said(capsys, "verify", new).startswith("ok  ")


def test_import_into_a_stopped_run_changes_no_schedule(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    buffer = by_hand(tmp_path / "replay/shard_0", run="mine")
    buffer.add([a_group(1, (1, 0), 1), a_group(2, (1, 1), 1)], 1, "1.add")
    before = buffer.store.items[buffer.store.slots()].copy()
    buffer.close()
    other = by_hand(tmp_path / "other")
    other.add([a_group(1, (0, 1, 0), 9), a_group(3, (0, 1), 9)], 9)
    other.close()
    said(capsys, "export", tmp_path / "other", tmp_path / "x.parquet")
    taken = said(capsys, "import", tmp_path, tmp_path / "x.parquet", "--now", 4)
    assert taken.startswith("2 of 2 groups stored, born in iteration 4; 1 new items")
    with reading(tmp_path / "replay/shard_0/journal.db") as one:
        for name in ("due", "reps", "pass_rate", "last_review", "alpha", "novelty"):
            assert one.stored.items[name][:2].tolist() == before[name].tolist(), name
        assert one.stored.items["num_groups"].tolist() == [2, 1, 1]
        assert one.stored.state["run"] == "mine"


def test_a_broken_row_is_named_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    buffer = by_hand(tmp_path / "a")
    buffer.add([a_group(1, (1, 0), 1), a_group(2, (1, 1), 1)], 1)
    buffer.close()
    path = tmp_path / "x.jsonl"
    said(capsys, "export", tmp_path / "a", path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["prompt_id"], rows[1]["behaviour_logp"][0][1] = "p3", float("nan")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = said(capsys, "ls", tmp_path / "a")
    text = said(capsys, "import", tmp_path / "a", path, status=1)
    assert text.startswith("error: 1 broken rows, nothing was imported: x.jsonl row 2: group 1.2 is not valid: ")
    assert "behaviour_logp_N is not finite" in text and text.count("\n") == 1
    assert said(capsys, "ls", tmp_path / "a") == before
    text = said(capsys, "import", tmp_path / "a", path, "--skip-broken")
    assert text.startswith("1 of 1 groups stored") and "left out: x.jsonl row 2: " in text
    assert said(capsys, "ls", tmp_path / "a").splitlines()[-1].startswith("3 of 3 items")


def test_secrets_are_shown_and_exported_by_their_kind(
    random_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tokenizer = load_tokenizer(random_llama_dir)
    ids = tokenizer.encode("a password=hunter2xyz b", add_special_tokens=False)
    settings = {"on_secret": "mask", "model_dir": random_llama_dir}
    buffer = by_hand(tmp_path, **settings)
    assert buffer.add([a_group(1, (1, 0), 1, ids)], 1)[0].refused == ""
    buffer.close()
    shown = said(capsys, "show", tmp_path, "p1", "--model", random_llama_dir)
    assert "password=[password]" in shown and "hunter2" not in shown
    assert "expected it, to redact what is exported" in said(capsys, "export", tmp_path, tmp_path / "x.jsonl", status=1)
    said(capsys, "export", tmp_path, tmp_path / "x.jsonl", "--model", random_llama_dir)
    (row,) = import_groups(tmp_path / "x.jsonl").rows
    assert "hunter2" not in (tmp_path / "x.jsonl").read_text()
    text = tokenizer.decode(row.group.stream(0).tolist())
    assert "password=" in text and "hunter" not in text and text.endswith(" b")
    assert not row.group.loss_mask_N[row.group.token_ids_N == 0].any()


# --- verify ---------------------------------------------------------------------------------------


def copy_of(journal: Path) -> Path:
    """Return a copy of a journal that nobody has open."""
    copies = journal.parent / "copies"
    copies.mkdir(exist_ok=True)
    (copies / "journal.db").write_bytes(journal.read_bytes())
    return copies / "journal.db"


def test_verify_says_ok_with_counts(run: Run, capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, "verify", run.directory)
    num_reviews = int(run.stats["num_predicted_reviews"]) + len({key for key in run.rows})
    assert text.startswith(f"ok  {run.journal}: {CAPACITY} items, {len(run.groups)} groups, ")
    assert int(re.search(r"(\d+) reviews", text)[1]) >= num_reviews
    assert said(capsys, "verify", run.directory / "checkpoint_000014").startswith("ok  ")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("UPDATE payloads SET payload = substr(payload, 1, 60) || X'00' || substr(payload, 62)", "group {} is damaged"),
        ("UPDATE items SET row = zeroblob(length(row)) WHERE slot = 3", "item 3 is damaged: its checksum"),
        ("UPDATE state SET value = '9' || value WHERE name = 'slots'", "state slots is damaged: its checksum"),
        ("DELETE FROM payloads WHERE seq = (SELECT max(seq) FROM groups)", "has lost its payload"),
        ("DELETE FROM groups WHERE seq = (SELECT max(seq) FROM groups)", "num_groups"),
    ],
)
def test_verify_names_each_fault(run: Run, tmp_path: Path, capsys, damage: str, expected: str) -> None:
    path = tmp_path / "journal.db"
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


def test_damaged_files_are_one_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = bytearray(run.journal.read_bytes())
    data[40_000:60_000] = bytes(20_000)
    (tmp_path / "journal.db").write_bytes(data)
    capsys.readouterr()
    assert script.main(["verify", str(tmp_path)]) == 1
    assert re.match(r"page: |journal .* failed|\w+ .* damaged", capsys.readouterr().out)
    (tmp_path / "journal.db").write_bytes(b"no database at all")
    text = said(capsys, "ls", tmp_path, status=1)
    assert text.startswith(f"error: journal {tmp_path / 'journal.db'}") and text.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["ls", "{tmp}/nowhere"], "does not exist; expected a run's directory, a checkpoint or a journal file"),
        (["ls", "{tmp}"], "holds no memory; expected a run's directory"),
        (["export", "{run}", "{tmp}/x.csv"], "expected a name that ends in .jsonl or .parquet"),
        (["import", "{run}", "{tmp}/missing.jsonl"], "missing.jsonl"),
        (["import", "{run}/checkpoint_000014", "{tmp}/x.jsonl"], "is part of a checkpoint; expected a run's directory"),
        (["import", "{tmp}/new", "{tmp}/x.jsonl"], "the tokenizer is not known"),
        (["fit", "{run}", "--min_reviews", "9999"], "expected at least 9999"),
    ],
)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, capsys, argv: list[str], expected: str) -> None:
    text = said(capsys, *(word.format(tmp=tmp_path, run=run.directory) for word in argv), status=1)
    assert text.startswith("error: ") and expected in text and text.count("\n") == 1


# --- judging --------------------------------------------------------------------------------------


def test_fit_prints_a_line_that_makes_the_fitted_rule(run: Run, capsys: pytest.CaptureFixture) -> None:
    text = said(capsys, "fit", run.directory, "--min_reviews", 8)
    losses = {name: float(value) for name, value in re.findall(r"^ +(rule as .*?|constant.*?)  +(\d\.\d{4})$", text, re.M)}
    assert losses["rule as fitted"] < losses["rule as it is set"]
    values = read_values(yaml.safe_load(text.splitlines()[-1]))
    rule = make_spacing("fsrs", **values["replay_spacing_config"])
    printed = dict(re.findall(r"^ +w(\d+) +\S+ +(\S+)$", text, re.M))
    assert {int(n): float(x) for n, x in printed.items()}.items() <= dict(enumerate(rule.w)).items() and len(printed) == 7
    assert ReplaySettings(spacing_config=values["replay_spacing_config"]).faults() == []
    assert "the constant: " in text and ("beats" in text or "does not beat" in text)


def test_plot_shows_what_the_log_says(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert said(capsys, "plot", run.directory, "--out", tmp_path / "m.png") == f"{tmp_path / 'm.png'}\n"
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "m.png").stat().st_size > 20_000
    with reading(run.journal) as one:
        log = script.whole_log([one])
        keys, nums = np.unique(log.key, return_counts=True)
        own = log[log.key == keys[nums.argmax()]]
        times, recalls = buffer_plots.expected_over_time(one.rule, own, 1.0, ITERATIONS)
    ends = np.flatnonzero(np.diff(times) == 0)  # a review: the curve falls to it and starts anew
    assert times[ends].tolist() == own.now[1:].tolist() and len(ends) > 2
    np.testing.assert_allclose(recalls[ends], own.predicted[1:], rtol=1e-12)
    assert (recalls[ends + 1] == 1).all()


def test_points_of_the_plot_by_hand() -> None:
    """Three reviews after 1, 3 and 2 iterations of 2, 4 and 4 episodes with 1, 4 and 2 right."""
    log = ReviewLog(
        key=[1, 1, 2, 3], now=[1, 2, 4, 5], elapsed_days=[0, 0.5, 1.5, 1.0], grade=[3, 3, 3, 3], num_success=[1, 1, 4, 2],
        n=[2, 2, 4, 4], predicted=[np.nan, 0.55, 0.98, 0.52], trained=[True] * 4, version=[0] * 4, temperature=[1.0] * 4,
        trained_tokens=[1] * 4,
    )  # fmt: skip
    points = [point[:2] for point in buffer_plots.observed_by_time(log, scale=2.0)]
    assert points == [(1.0, 0.5), (2.5, 0.75)]
    points = [point[:2] for point in buffer_plots.calibration_points(log)]
    assert points == pytest.approx([((2 * 0.55 + 4 * 0.52) / 6, 0.5), (0.98, 1.0)])


# --- a run that goes on ---------------------------------------------------------------------------


def test_reading_changes_nothing(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before, key = bytes_in(run.directory), next(iter(run.rows))
    for argv in (["ls"], ["stats"], ["verify"], ["show", key], ["why", key], ["export", tmp_path / "x.parquet"]):
        said(capsys, argv[0], run.directory, *argv[1:])
    assert bytes_in(run.directory) == before


def write_on(directory: str, started: multiprocessing.Event, ended: multiprocessing.Event) -> None:
    """Play the run: commit, and move the WAL into the file, as fast as it goes."""
    buffer = by_hand(Path(directory), groups_per_item=1)
    now = 0
    while not ended.is_set():
        now += 1
        buffer.add([a_group(n, (1, 0), now, [9 + now % 90, now % 70, 3]) for n in range(now % 7, 40, 7)], now, f"{now}.add")
        if now % 5 == 0:
            buffer.tidy()
        if now == 20:
            started.set()
    buffer.check_valid()
    buffer.close()


def test_a_live_journal_is_read_whole_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    writer = context.Process(target=write_on, args=(str(tmp_path), started, ended))
    writer.start()
    try:
        assert started.wait(60)
        positions = []
        for _ in range(6):
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


def test_shards_are_shown_as_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Prompt n goes to the shard of its key; a shard that was not asked lately stands at the other's iteration."""
    groups = [a_group(n, (1, 0), n + 1) for n in range(12)]
    shards = [[g for g in groups if int(g.prompt.key, 16) % 2 == i] for i in range(2)]
    for index, part in enumerate(shards):
        buffer = by_hand(tmp_path / f"replay/shard_{index}", num_shards=2)
        for group in part:
            buffer.add([group], int(group.group_id.split(".")[0]))
        buffer.close()
    assert said(capsys, "ls", tmp_path).splitlines()[-1] == "12 of 12 items, iteration 12, sorted by due"
    lines = said(capsys, "stats", tmp_path).splitlines()
    found = dict((name, values) for name, *values in map(cells, lines[2:]))
    assert found["num_items"] == ["12", str(len(shards[0])), str(len(shards[1]))]
    said(capsys, "export", tmp_path, tmp_path / "x.jsonl")
    assert said(capsys, "import", tmp_path, tmp_path / "x.jsonl").startswith("0 of 12 groups stored")
    (tmp_path / "y.jsonl").write_text((tmp_path / "x.jsonl").read_text().replace('"prompt_id":"p', '"prompt_id":"q'))
    assert said(capsys, "import", tmp_path, tmp_path / "y.jsonl").startswith("12 of 12 groups stored")
    assert said(capsys, "verify", tmp_path).count("ok  ") == 2
    for index in range(2):
        with reading(tmp_path / f"replay/shard_{index}/journal.db") as one:
            assert {int(prompt.key, 16) % 2 for prompt in one.stored.prompts} == {index}


def test_settings_travel_with_the_journal(tmp_path: Path) -> None:
    settings = ReplaySettings(spacing_config={"scale": 0.5}, spacing="leitner", mask_window=(0.2, 3.0), on_secret="keep")
    SRLReplayBuffer(settings, directory=tmp_path).close()
    with reading(tmp_path / "journal.db") as one:
        assert one.settings == ReplaySettings() and one.now == 0  # nothing was committed yet
    for given in (settings, replace(settings, desired_retention=0.6, domains=("a", "b"))):
        buffer = SRLReplayBuffer(given, directory=tmp_path)
        buffer.add([a_group(1, (1, 0), 1)], 1)
        buffer.close()
        with reading(tmp_path / "journal.db") as one:
            assert replace(one.settings, domains=tuple(one.settings.domains)) == replace(given, domains=tuple(given.domains))
            assert one.rule == make_spacing("leitner", given.desired_retention, scale=0.5)


def test_help_and_a_closed_pipe() -> None:
    shown = subprocess.run(
        [sys.executable, "scripts/buffer.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "Look into the memory of a run" in shown.stdout and "verify" in shown.stdout
