"""The files of a study: one study.json, and one file of JSON lines per trial, a line for each evaluation.

    results/replay/
      study.json                   `Study`: the question, fixed beforehand
      trials/srl--1.jsonl          arm srl, seed 1
        {"study": "5c1f...", "stage": -1, "iteration": 0, "accuracy": {"compare": 0.12, ...}, ...}     before training
        {"study": "5c1f...", "stage": 0, "iteration": 5, "accuracy": {"compare": 0.55, ...}, ...}
      runs/srl--1/                 the newest checkpoint of that trial until it is finished

A trial is finished once it has the evaluation of the study's last stage. Counts and seconds are cumulative over the
trial and cover training only; those of evaluations are apart (`num_probe_tokens`, `probe_s`). A line is on disk before
`add` returns. A line that a kill has cut off has no newline and is ignored; any other malformed line is an error, and
so is a line of another study.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from rllib_srl.studies.study import STRICT, Study

STUDY_FILE = "study.json"
TRIALS, RUNS = "trials", "runs"
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
T = TypeVar("T")


class ResultsError(ValueError):
    """A results directory is invalid; the message names file, line and field."""


@dataclass(frozen=True)
class Evaluation:
    """Greedy answers to held-out prompts of every domain, and the cost of the training before."""

    __pydantic_config__ = STRICT

    study: str  # fingerprint
    stage: Annotated[int, Field(ge=-1)]  # trained last; -1 before any training
    iteration: Count  # training iterations done
    accuracy: dict[str, Fraction]  # domain -> share of held-out prompts answered right
    num_generated_tokens: Count  # in training so far, revisits included
    num_trained_tokens: Count  # in the loss so far; reused and held tokens count each time
    seconds: Seconds  # training time so far
    num_probe_tokens: Count  # generated in evaluations so far, not part of the budget
    probe_s: Seconds
    peak_bytes: Count  # peak memory use so far: of the processes on a CPU, of the device on a GPU
    measures: dict[str, dict[str, float]] = field(default_factory=dict)  # domain -> name -> another measure


@dataclass(frozen=True)
class Trial:
    """One arm with one seed, as read from its file."""

    arm: str
    seed: int
    evaluations: tuple[Evaluation, ...]
    is_finished: bool
    path: Path


@dataclass(frozen=True)
class Results:
    """Contents of a results directory; trials by arm in the order of the study, then by seed."""

    study: Study
    trials: tuple[Trial, ...]

    def of(self, arm: str) -> tuple[Trial, ...]:
        """Return the finished trials of an arm, by seed."""
        return tuple(trial for trial in self.trials if trial.arm == arm and trial.is_finished)

    @property
    def finished(self) -> set[tuple[str, int]]:
        """Return arm and seed of the finished trials."""
        return {(trial.arm, trial.seed) for trial in self.trials if trial.is_finished}


_STUDIES, _EVALUATIONS = TypeAdapter(Study), TypeAdapter(Evaluation)


def run_path(directory: Path, arm: str, seed: int) -> Path:
    """Return the folder of an unfinished trial's checkpoints in a results directory."""
    return directory / RUNS / f"{arm}--{seed}"


def write_study(directory: Path, study: Study) -> None:
    """Write study.json; do nothing if the directory already holds the same study.

    Raises:
        ResultsError: the directory holds another study.
    """
    path = directory / STUDY_FILE
    if not path.exists():
        (directory / TRIALS).mkdir(parents=True, exist_ok=True)
        write_whole(path, _STUDIES.dump_json(study, indent=2).decode() + "\n")
    elif read_study(directory).fingerprint != study.fingerprint:
        raise ResultsError(f"{path}: holds another study; use another directory")


def read_study(directory: Path) -> Study:
    """Read study.json.

    Raises:
        ResultsError: the file is missing or invalid; the message names file and fields.
    """
    path = directory / STUDY_FILE
    if not path.is_file():
        raise ResultsError(f"{path} does not exist; expected the results directory of a study")
    study = _parsed(_STUDIES, path.read_bytes(), str(path))
    if errors := study.errors():
        raise ResultsError(f"{path}: " + "; ".join(errors))
    return study


def read_results(directory: Path) -> Results:
    """Read a results directory; unfinished trials are included, with `is_finished` False.

    Raises:
        ResultsError: a file is damaged or belongs to another study; the message names file, line and field.
    """
    study = read_study(directory)
    trials = [read_trial(directory, study, arm.name, seed) for arm in study.arms for seed in sorted(study.seeds)]
    return Results(study, tuple(trial for trial in trials if trial.evaluations))


def read_trial(directory: Path, study: Study, arm: str, seed: int) -> Trial:
    """Read one trial, which has no evaluations if there is no file.

    Raises:
        ResultsError: as in `read_results`.
    """
    path = directory / TRIALS / f"{arm}--{seed}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # after the last newline: cut off
    evaluations = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        evaluations.append(evaluation := _parsed(_EVALUATIONS, line, where))
        if error := error_of(evaluation, study):
            raise ResultsError(f"{where}: {error}")
    is_finished = bool(evaluations) and evaluations[-1].stage == study.num_stages - 1
    return Trial(arm, seed, tuple(evaluations), is_finished, path)


def error_of(evaluation: Evaluation, study: Study) -> str:
    """Return why an evaluation is not one of a study, "" if it is."""
    names = [domain.name for domain in study.domains]
    if evaluation.study != study.fingerprint:
        return f"study = {evaluation.study!r}; expected {study.fingerprint!r}, the study in {STUDY_FILE}"
    if sorted(evaluation.accuracy) != sorted(names):
        return f"accuracy of {sorted(evaluation.accuracy)}; expected {sorted(names)}"
    if evaluation.stage >= study.num_stages:
        return f"stage = {evaluation.stage}; expected -1 to {study.num_stages - 1}"
    return ""


class TrialWriter:
    """Appends evaluations to one trial's file. Invariant: when `add` returns, its line is on disk."""

    def __init__(self, directory: Path, study: Study, arm: str, seed: int, from_iteration: int = 0) -> None:
        """Begin a trial's file, or continue it after a checkpoint; the study must have been written before.

        Args:
            directory: the results directory.
            study: the study in that directory.
            arm: one of its arms.
            seed: one of its seeds.
            from_iteration: iteration of the run's checkpoint; later lines of an earlier attempt are removed and
                written again by the run. 0 starts a new file.

        Raises:
            ResultsError: the trial is finished.
        """
        earlier = read_trial(directory, study, arm, seed)
        if earlier.is_finished:
            raise ResultsError(f"{earlier.path}: the trial is finished; it is not run again")
        kept = [e for e in earlier.evaluations if e.iteration <= from_iteration] if from_iteration else []
        write_whole(earlier.path, "".join(map(_line_of, kept)))
        self._study = study
        self._file = earlier.path.open("a", encoding="utf-8")

    def add(self, evaluation: Evaluation) -> None:
        """Write an evaluation.

        Raises:
            ValueError: it does not fit the study; nothing was written.
        """
        if error := error_of(evaluation, self._study):
            raise ValueError(error)
        self._file.write(_line_of(evaluation))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically and durably: a kill before the end leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _line_of(evaluation: Evaluation) -> str:
    return _EVALUATIONS.dump_json(evaluation).decode() + "\n"


def _parsed(form: TypeAdapter[T], text: bytes, where: str) -> T:
    try:
        return form.validate_json(text)
    except ValidationError as error:
        errors = [f"{'.'.join(map(str, entry['loc'])) or 'value'}: {entry['msg']}" for entry in error.errors()]
        raise ResultsError(f"{where}: " + "; ".join(errors)) from None
