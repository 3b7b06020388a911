"""The health battery: degeneration by hand, gates at their boundaries, and task files that cannot be run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from rllib_srl.studies import gates
from rllib_srl.studies.gates import Outcome, Shift
from rllib_srl.studies.health import battery, harness
from rllib_srl.studies.health.battery import Battery, Measured
from rllib_srl.studies.health.comparison import Comparison
from rllib_srl.studies.health.degeneration import healthy_range, measures_of, repetition

TASK = {
    "task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "mine.jsonl"}},
    "test_split": "test", "metric_list": [{"metric": "acc"}],
}  # fmt: skip


def test_degeneration_by_hand() -> None:
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)  # 1234 2341 3412 4123 1234
    assert repetition([7] * 10) == pytest.approx(6 / 7)
    assert repetition([1, 2, 3]) == 0.0
    found = measures_of([5, 6], np.log(np.array([0.5, 0.125])))
    assert found == {"repetition": 0.0, "length": 2.0, "entropy": pytest.approx(2 * np.log(2))}


def test_the_healthy_range_is_relative_to_before() -> None:
    assert healthy_range("repetition", 0.2) == pytest.approx((0.0, 0.3))
    assert healthy_range("entropy", 3.0) == (1.5, 6.0)


@pytest.mark.parametrize(
    ("after", "low", "high", "outcome"),
    [
        (0.25, 0.01, 0.09, Outcome.PASSED),  # more, within the range
        (0.35, -0.02, 0.32, Outcome.PASSED),  # beyond by estimate, but 0 is not excluded
        (0.35, 0.05, 0.25, Outcome.BAD),
        (0.60, 0.30, 0.50, Outcome.HARMFUL),  # the whole interval, .5 to .7, lies above .3
    ],
)
def test_the_gate_of_degeneration_at_its_boundaries(after: float, low: float, high: float, outcome: Outcome) -> None:
    verdict = gates.degeneration("repetition", Shift(40, 0.2, after, low, high), 0.0, 0.3)
    assert (verdict.outcome, verdict.domain) == (outcome, "repetition")
    assert "healthy 0 to 0.3" in verdict.reason


def test_a_shift_is_paired() -> None:
    before = {str(at): float(at) for at in range(20)}
    shift = gates.paired_shift(before, {key: value + 1 for key, value in before.items()}, 0.95)
    assert (shift.num, shift.change, shift.low, shift.high) == (20, 1.0, 1.0, 1.0)  # no spread left
    with pytest.raises(ValueError, match="1 texts before and 1 after have none in common"):
        gates.paired_shift({"a": 1.0}, {"b": 1.0}, 0.95)


def test_a_comparison_pairs_questions_and_judges_each_measure() -> None:
    right = {str(at): True for at in range(40)}
    before = Measured({"srl_words": right}, right, {"entropy": {str(at): 3.0 for at in range(40)}})
    wrong = {key: int(key) >= 30 for key in right}  # 30 of 40 are lost
    after = Measured({"srl_words": wrong}, right, {"entropy": {str(at): 0.1 for at in range(40)}}, 2)
    found = Comparison.of(before, after)
    assert found.changes["srl_words"].change == -0.75 and found.changes["format"].change == 0.0
    outcomes = {verdict.domain: verdict.outcome for verdict in found.verdicts()}
    assert outcomes == {"srl_words": Outcome.HARMFUL, "format": Outcome.PASSED, "entropy": Outcome.HARMFUL}
    assert json.loads(json.dumps(found.as_json()))["num_lost"] == [0, 2]
    with pytest.raises(ValueError, match="expected the same"):
        Comparison.of(before, Measured({"srl_sums": right}))


def test_the_packages_tasks_are_whole() -> None:
    tasks = {task.name: task.num for task in harness.read_tasks(harness.own_tasks())}
    assert tasks == {"srl_copy": 40, "srl_grammar": 40, "srl_sums": 48, "srl_words": 48}
    rows = [json.loads(line) for line in (harness.TASKS / "words.jsonl").read_text().splitlines()]
    assert all(len(set(row["choices"])) == 4 and 0 <= row["label"] < 4 for row in rows)
    assert len({row["question"] for row in rows}) == 48
    labels = np.bincount([row["label"] for row in rows], minlength=4)
    assert labels.max() <= 20  # no place is right too often
    for line in (harness.TASKS / "sums.jsonl").read_text().splitlines():
        first, sign, second = json.loads(line)["question"].split()
        value = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert json.loads(line)["answer"] == str(value)
    assert len(set(battery.read_openings(battery.OPENINGS))) == 40


@pytest.mark.parametrize(
    ("changes", "rows", "message"),
    [
        ({}, "", "mine.jsonl has 0 rows; expected at least one question"),
        ({}, None, "mine.jsonl does not exist"),
        ({}, "{not json", "mine.jsonl is not JSONL"),
        ({"dataset_path": "openai/gsm8k"}, "{}", "expected 'task', 'test_split' and 'dataset_path: json'"),
        ({"metric_list": []}, "{}", "expected 'metric_list' with at least one metric"),
        ({"dataset_kwargs": {}}, "{}", "data_files: {test: FILE.jsonl}"),
    ],
)
def test_a_task_file_that_cannot_be_run_is_one_error(
    tmp_path: Path, changes: dict, rows: str | None, message: str
) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**TASK, **changes}))
    if rows is not None:
        (tmp_path / "mine.jsonl").write_text(rows)
    with pytest.raises(harness.HarnessError) as error:
        harness.read_tasks([tmp_path / "mine.yaml"])
    assert message in str(error.value) and "mine.yaml" in str(error.value)


def test_a_task_file_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\nprocess_docs: !function utils.f\n")
    with pytest.raises(harness.HarnessError, match="is not plain YAML"):
        harness.read_tasks([tmp_path / "mine.yaml"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Battery(("looks",)), "parts = looks; expected some of tasks, domains, degeneration"),
        (Battery(()), "parts = none"),
        (Battery(("domains",), (Path("mine.yaml"),)), "tasks = mine.yaml; expected the part 'tasks' with it"),
        (Battery(("domains",), (), 0), "prompts = 0; expected at least 1"),
    ],
)
def test_a_battery_that_makes_no_sense_is_refused(given: Battery, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given.check()
