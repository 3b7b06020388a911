"""Run task files with EleutherAI's lm-eval harness, offline, in a process of its own.

    task.yaml   task: srl_words                       as lm-eval has it: output_type, doc_to_text, metric_list, ...
                dataset_path: json
                dataset_kwargs: {data_files: {test: words.jsonl}}        local, relative to the task file
    --lm-eval--> task -> number of the question -> whether the answer is right

The package's own files are in `tasks/`; from that folder, `lm_eval --include_path .` runs them too. The first metric of
a task decides; it is 0 or 1 for each question (`acc`, `exact_match`). Prompts are raw text: no chat template.
`!function` is refused: a task file is data, not code.

A process of its own, because lm-eval changes global state (seeds, logging, data set caches), and its memory is free
when it ends.

Source: Gao et al., "The Language Model Evaluation Harness", https://github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TASKS = Path(__file__).with_name("tasks")
TIMEOUT_S = 3600.0
_TAIL = 1500  # characters of an error output that are shown
_BATCH = 16
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")


class HarnessError(ValueError):
    """Task files cannot be run; the message names the file or the package."""


@dataclass(frozen=True)
class TaskFile:
    """A validated task file. Invariant: its data is a local JSONL file with at least one row."""

    name: str
    path: Path
    data: Path
    num: int  # questions


def own_tasks() -> list[Path]:
    """Return the task files of this package."""
    return sorted(TASKS.glob("*.yaml"))


def read_tasks(paths: Sequence[Path]) -> list[TaskFile]:
    """Read task files and check their data.

    Raises:
        HarnessError: all errors, one per line.
    """
    tasks, faults = list[TaskFile](), list[str]()
    for path in paths:
        try:
            tasks.append(_read_task(path))
        except HarnessError as error:
            faults.append(f"{path}: {error}")
    names = [task.name for task in tasks]
    faults += [f"task {name!r} is in several files" for name in sorted(set(names)) if names.count(name) > 1]
    if faults or not tasks:
        raise HarnessError("\n".join(faults) or "tasks is empty; expected at least one task file")
    return tasks


def check_installed() -> None:
    """Check that lm-eval is installed.

    Raises:
        HarnessError: it is not.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise HarnessError(
            "the part 'tasks' runs on lm-eval, which is not installed: pip install 'rllib_srl[health]'; "
            "or leave it out: --parts domains degeneration"
        )


def run_tasks(model_dir: Path, tasks: Sequence[TaskFile], dtype: str) -> dict[str, dict[str, bool]]:
    """Answer the questions of all tasks with a model; return task -> number of the question -> whether it is right.

    Args:
        model_dir: directory of the model.
        tasks: to run.
        dtype: of the model, "float32" or "bfloat16".

    Raises:
        HarnessError: lm-eval failed, or took longer than `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory(prefix="rllib_srl-") as scratch:
        answer = Path(scratch) / "answer.json"
        asked = {"model": str(model_dir), "tasks": [str(task.path) for task in tasks], "dtype": dtype}
        environment = {**os.environ, **OFFLINE, "HF_HOME": scratch, "TOKENIZERS_PARALLELISM": "false"}
        program = [sys.executable, "-m", __name__, json.dumps(asked), str(answer)]
        try:
            done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise HarnessError(f"lm-eval took longer than {TIMEOUT_S:.0f} s on {model_dir}") from error
        if done.returncode or not answer.is_file():
            raise HarnessError(f"lm-eval failed on {model_dir} (status {done.returncode}):\n{done.stderr[-_TAIL:]}")
        found: dict[str, dict[str, bool]] = json.loads(answer.read_text(encoding="utf-8"))
    for task in tasks:
        if (num := len(found.get(task.name, ()))) != task.num:
            raise HarnessError(f"lm-eval answered {num} of {task.num} questions of {task.name}")
    return found


def _read_task(path: Path) -> TaskFile:
    values = _content(path)
    name, metrics = values.get("task"), values.get("metric_list")
    files = (values.get("dataset_kwargs") or {}).get("data_files")
    split = values.get("test_split")
    if not isinstance(name, str) or not isinstance(split, str) or values.get("dataset_path") != "json":
        raise HarnessError("expected 'task', 'test_split' and 'dataset_path: json'")
    if not isinstance(metrics, list) or not metrics or not isinstance(metrics[0], dict) or "metric" not in metrics[0]:
        raise HarnessError("expected 'metric_list' with at least one metric")
    if not isinstance(files, dict) or not isinstance(files.get(split), str):
        raise HarnessError(f"expected 'dataset_kwargs: {{data_files: {{{split}: FILE.jsonl}}}}'")
    data = path.parent / files[split]
    if not data.is_file():
        raise HarnessError(f"its data {data} does not exist")
    try:
        num = sum(1 for line in data.read_text(encoding="utf-8").splitlines() if line.strip() and json.loads(line))
    except ValueError as error:
        raise HarnessError(f"its data {data} is not JSONL: {error}") from error
    if not num:
        raise HarnessError(f"its data {data} has 0 rows; expected at least one question")
    return TaskFile(name, path.absolute(), data.absolute(), num)


def _content(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HarnessError(f"cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise HarnessError(f"is not plain YAML, which a task file has to be: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise HarnessError("expected a mapping, as lm-eval's task files are")
    return values


# --- in the process of its own --------------------------------------------------------------------


def _answer(asked: dict[str, Any]) -> dict[str, dict[str, bool]]:
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    configs = []
    for task in read_tasks([Path(one) for one in asked["tasks"]]):
        values = _content(task.path)
        values["dataset_kwargs"]["data_files"] = {values["test_split"]: str(task.data)}
        configs.append(values)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = HFLM(pretrained=asked["model"], device=device, dtype=asked["dtype"], batch_size=_BATCH)
    manager = TaskManager(include_defaults=False)
    how: dict[str, Any] = {"log_samples": True, "bootstrap_iters": 0}
    results = lm_eval.simple_evaluate(model=model, tasks=configs, task_manager=manager, **how)
    found = {}
    for values in configs:
        metric = values["metric_list"][0]["metric"]
        scores = {str(one["doc_id"]): float(one[metric]) for one in results["samples"][values["task"]]}
        if graded := [score for score in scores.values() if score not in (0.0, 1.0)]:
            raise HarnessError(f"task {values['task']}: {metric} = {graded[0]}; expected a metric that is 0 or 1")
        found[values["task"]] = {key: score == 1.0 for key, score in scores.items()}
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_answer(json.loads(sys.argv[1]))), encoding="utf-8")
