"""The chaos suite: its plan, its moments, its books and its table by hand; and a short form of it on a real run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from types import SimpleNamespace

import pytest

from scripts.chaos import network
from scripts.chaos.faults import KINDS, LATEST, PHASE_OF, plan
from scripts.chaos.invariants import Books, faults_of
from scripts.chaos.live import Outcome
from scripts.chaos.phases import EVERY_PHASE, Moment, at_moment_of, seconds_of_phases
from scripts.chaos.run import row_of, table
from tests.conftest import ROOT
from tests.quick_workers import IMPORTS, VLLM


def run_of_calls(log: list[str]) -> SimpleNamespace:
    """Return what has the methods that begin the phases; `train` calls them in order."""

    def noting(name):
        return lambda: log.append(name)

    algo = SimpleNamespace(_learn=noting("_learn"), evaluate=noting("evaluate"))
    algo.runners, algo.memory = SimpleNamespace(play_groups=noting("play_groups")), SimpleNamespace(add=noting("add"))
    algo.weight_sync = SimpleNamespace(sync=noting("sync"))

    def train() -> None:
        algo.runners.play_groups()
        algo.memory.add()
        algo._learn()
        algo.weight_sync.sync()
        algo.evaluate()

    algo.train = train
    return algo


def test_a_plan_depends_on_its_seed_and_visits_every_phase_with_every_kind():
    planned = list(plan([*KINDS], 6, seed=3))
    assert planned == list(plan([*KINDS], 6, seed=3)) != list(plan([*KINDS], 6, seed=4))
    for kind, ways in KINDS.items():
        for way in ways:
            phases = [fault.phase for fault in planned if (fault.kind, fault.way) == (kind, way)]
            assert sorted(phases) == ([PHASE_OF[way]] * 6 if way in PHASE_OF else sorted(EVERY_PHASE))
    assert all(0 <= fault.share < LATEST and 0 <= fault.victim < 1 for fault in planned)
    assert list(plan([*KINDS], 2, seed=3)) == planned[: 2 * len(planned) // 6]  # portions add up


@pytest.mark.parametrize("phase", EVERY_PHASE)
def test_an_action_is_done_once_when_its_phase_begins(phase):
    log: list[str] = []
    algo = run_of_calls(log)
    usual = algo.evaluate
    with at_moment_of(algo, phase, lambda: log.append("!"), 0.0) as moment:
        algo.train()
        algo.train()
    names = {"play": 0, "remember": 1, "learn": 2, "sync": 3, "evaluate": 4, "rest": 0}
    assert log.count("!") == 1 and log.index("!") == names[phase] and moment.struck_at is not None
    assert algo.evaluate is usual


def test_a_moment_may_come_later_and_its_error_is_raised():
    start = time.monotonic()
    with at_moment_of(run_of_calls([]), "play", lambda: None, 0.2) as moment:
        assert moment.struck_at is None
        moment.begin()
    assert moment.struck_at >= start + 0.2
    late = Moment(lambda: 1 / 0, 0.01)
    late.begin()
    with pytest.raises(ZeroDivisionError):
        late.wait()


def test_the_seconds_of_the_phases_add_up_to_the_iteration(monkeypatch):
    algo, passed_s = run_of_calls([]), 0.0
    usual = algo._learn

    def learn():
        nonlocal passed_s
        passed_s += 0.5
        usual()

    # Time passes while it learns, and at each look at the clock.
    clock = (passed_s + looks / 1000 for looks in count())
    monkeypatch.setattr("scripts.chaos.phases.time", SimpleNamespace(monotonic=lambda: next(clock)))
    algo._learn = learn
    took = seconds_of_phases(algo)
    assert 0.05 <= took["learn"] < 1 and took["rest"] == 0 and took["play"] < took["learn"]
    assert sum(took[phase] for phase in EVERY_PHASE) <= took["iteration"] + 1e-6


class Memory:
    """Acknowledges what it is given; `stored` is what a journal would hold: uses by group id."""

    num_shards = 0

    def __init__(self):
        self.log = []

    def add(self, names):
        return {name: SimpleNamespace(refused="" if "refused" not in name else "secret") for name in names}

    def sample(self, names):
        return [SimpleNamespace(group_id=name) for name in names]

    def snapshot(self, directory):
        self.log.append(directory)

    def restore(self, directory):
        return 0


def test_books_note_what_was_acknowledged_and_go_back_with_a_snapshot(tmp_path):
    memory = Memory()
    books = Books(memory)
    memory.add(["1.0", "1.1", "1.2 refused"])
    memory.sample(["1.0"])
    memory.snapshot(tmp_path / "one")
    memory.add(["2.0"])
    memory.sample(["1.0", "1.1"])
    assert books.page.kept == {"1.0", "1.1", "2.0"} and books.page.drawn == Counter({"1.0": 2, "1.1": 1})
    memory.restore(tmp_path / "one")
    assert books.page.kept == {"1.0", "1.1"} and books.page.drawn == Counter({"1.0": 1})
    assert books.page.earlier == {"2.0"}
    faults = books.faults(memory, tmp_path / "copy")  # a memory without anything in it
    assert [fault.partition(":")[0] for fault in faults[:2]] == [
        "acknowledged groups are missing",
        "acknowledged groups of repeated iterations are missing",
    ]
    assert len(faults) == 3 and faults[2].startswith("draws {'1.0': 1} more")


def test_prompts_that_are_not_accounted_for_and_engines_that_differ_are_faults():
    prints = [{"a": (1,)}, {"a": (2,)}]
    algo = SimpleNamespace(config=SimpleNamespace(num_prompts_per_batch=8), version=4)
    algo.runners = SimpleNamespace(ids=[1, 2], fingerprint=lambda ids, timeout_s: dict(zip(ids, prints, strict=True)))
    algo.weight_sync = SimpleNamespace(sync=lambda version: (SimpleNamespace(mean=1.0), {}))
    played = {"num_groups_with_signal": 3, "num_groups_without_signal": 4, "num_groups_dropped": 0}
    learnt = {"reuse/num_tokens": 5, "reuse/gradient_norm": 0.0, "reuse/clip_fraction": 0.5}
    result = {"env_runners": played, "learners": {"default_policy": learnt}, "replay": {"num_groups_lost": 1}}
    assert [fault.split(":")[0] for fault in faults_of(algo, result)] == [
        "7 prompts of 8 are accounted for",
        "1 groups were lost on the way to the memory",
        "reused groups have no gradient",
        "the engines hold different weights",
        "the engines do not compute with version 4",
    ]


def test_the_table_counts_and_names_what_was_not_survived():
    first, second, third, *_ = (one for one in plan(["buffer"], 3, seed=0) if one.way == "KILL")
    rows = [row_of(fault, Outcome(recovered_s=s), 0, 2.0) for fault, s in ((first, 3.0), (second, 4.0))]
    rows.append(row_of(third, Outcome(faults=["a group is missing"]), 0, 2.0))
    lines = table(rows).splitlines()
    assert lines[2] == "| buffer | KILL | learn play remember | 3 | 2 | 3.5 | 4.0 | 2.0 |"
    assert lines[3:] == ["buffer KILL 2 in learn: a group is missing"]
    assert [row["survived"] for row in rows] == [True, True, False]
    assert {field.name for field in dataclasses.fields(third)} < set(rows[2])


def test_delays_depend_on_the_seed_and_hold_for_a_few_faults_each():
    faults = [one for one in plan(["network"], 7, seed=3) if one.way == "delays"]
    asked = []

    def rows_of(some, seed, model, delays):
        asked.append((len(some), delays))
        return [{"number": one.number, "usual_s": 9.0} for one in some] or [{"usual_s": 0.5}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "_rows_of", rows_of)
        rows = list(network.delayed_rows(faults, 3, "tiny", float("inf")))
    assert [row["number"] for row in rows] == list(range(7)) and {row["usual_s"] for row in rows} == {0.5}
    assert [num for num, _ in asked] == [0, 5, 2] and asked[0][1] == {}
    first, second = (delays[network.DELAYS] for _, delays in asked[1:])
    assert first != second and first == network.delays_of(faults[:5], 3) != network.delays_of(faults[:5], 4)
    for item in first.split(","):
        name, bounds = item.split("=")
        shortest, longest = map(int, bounds.split(":"))
        assert name in network.DELAYED and 5_000 <= shortest <= 20_000 < 40_000 <= longest <= 120_000


def rows_of_a_run(tmp_path, kinds, timeout_s):
    """Put one fault of each kind and way into a real run, in a process of its own; return the rows, all survived."""
    command = [sys.executable, "-m", "tests.quick_workers", "scripts/chaos/run.py", "--faults", "1"]
    command += ["--out", str(tmp_path / "rows.jsonl"), "--kinds", *dict(kinds), "--ways", *{way for _, way in kinds}]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), IMPORTS: VLLM if "engine" in dict(kinds) else ""}
    said = tmp_path / "said.txt"
    with said.open("w", encoding="utf-8") as file:
        try:
            status: int | str = subprocess.run(
                command, cwd=ROOT, env=environment, check=False,
                stdout=file, stderr=subprocess.STDOUT, timeout=timeout_s,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = f"still running after {timeout_s} s"
    assert status == 0, f"{status}\n{said.read_text(encoding='utf-8')[-6000:]}"
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {(row["kind"], row["way"]) for row in rows} == set(kinds)
    assert all(row["faults"] == [] and row["recovered_s"] > 0 for row in rows)
    return {(row["kind"], row["way"]): row for row in rows}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_late_messages_and_a_lost_one(tmp_path):
    """A process that is slow because its messages are late is not taken for dead."""
    rows = rows_of_a_run(tmp_path, [("network", "delays"), ("network", "losses")], 380)
    late, lost = rows["network", "delays"], rows["network", "losses"]
    assert late["num_repairs"] == 0 and late["recovered_s"] > 1.5 * late["usual_s"]
    assert (lost["phase"], lost["num_repairs"]) == ("play", 1)  # the runner's answer; its prompts are played again


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_run_survives_the_death_of_an_engines_worker(tmp_path):
    """One of two workers of vLLM's tensor parallelism is killed in mid-play, then one is stopped."""
    rows = rows_of_a_run(tmp_path, [("engine", "KILL"), ("engine", "STOP")], 880)
    assert [row["num_repairs"] for row in rows.values()] == [1, 1]
    assert {row["phase"] for row in rows.values()} == {"play"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_survives_faults_of_each_kind(tmp_path):
    """Six faults, one of each kind; in a process of its own, because it fills disks and starts a Ray."""
    kinds = dict.fromkeys(("runner", "buffer", "learner"), "KILL")
    kinds |= {"slow": "pulses", "weight": "loading", "disk": "full"}
    rows = rows_of_a_run(tmp_path, [*kinds.items()], 280).values()
    repaired = {row["kind"] for row in rows if row["num_repairs"]}
    assert {"runner", "learner"} <= repaired and "slow" not in repaired
    (canary,) = (row["error"] for row in rows if row["way"] == "loading")
    assert canary.startswith("WeightSyncError: ")
