"""Reads the result files of a study: one study.json, and one file of JSON lines per trial.

    results/replay/
      study.json                         `Study`: the question, fixed beforehand
      trials/srl--1.jsonl                arm srl, seed 1
        {"kind": "trial", "study": "5c1f...", "arm": "srl", "seed": 1, "settings": {"lr": 3e-05, ...}}
        {"kind": "row", "stage": -1, "iteration": 0, "domain": "compare", "accuracy": 0.12, ...}     before training
        {"kind": "row", "stage": 0, "iteration": 5, "domain": "compare", "accuracy": 0.55, ...}
        {"kind": "end", "num_rows": 24}                                      only a finished trial has this line

Every evaluation writes one row for each domain of the study. Counts and seconds are cumulative over the trial and
cover training only: tokens and seconds of evaluations and probes are in `num_probe_tokens` and `probe_s`. A line is on
disk before `add` returns. A line that was cut off by a kill has no newline and is ignored; any other malformed line is
an error, and so is a trial of another study.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rllib_srl.studies.fields import STRICT, read_object
from rllib_srl.studies.study import Study

STUDY_FILE = "study.json"
TRIALS = "trials"
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class ResultsError(ValueError):
    """A results directory is invalid; the message names file, row and field."""


@dataclass(frozen=True)
class Row:
    """One domain in one evaluation."""

    __pydantic_config__ = STRICT

    stage: int  # stage trained last; -1 before any training
    iteration: Count  # training iterations done
    domain: str
    accuracy: Fraction  # share of held-out prompts answered right
    num_generated_tokens: Count  # tokens generated in training so far, revisits included
    num_trained_tokens: Count  # tokens in the loss so far; reused tokens count each time
    seconds: Seconds  # training time so far
    peak_bytes: Count  # peak memory use so far: of the processes on a CPU, of the device on a GPU
    num_prompts: Count = 0  # held-out prompts behind the accuracy; 0: not recorded
    parse_rate: Fraction | None = None  # share of answers that could be parsed
    num_probe_tokens: Count = 0  # tokens generated in evaluations and probes so far, not part of the budget
    probe_s: Seconds = 0.0
    measures: dict[str, float] = field(default_factory=dict)  # other measures: "pass_at_8", "revisit_share"
    num_live_tokens: Count = 0  # played tokens that entered the loss so far, each counted once: those with a gradient

    def faults(self, study: Study) -> list[str]:
        """Return an error message for each field that does not fit the study."""
        faults = []
        if self.domain not in (names := [domain.name for domain in study.domains]):
            faults.append(f"domain = {self.domain!r}; expected one of {', '.join(names)}")
        if not -1 <= self.stage < study.num_stages:
            faults.append(f"stage = {self.stage}; expected -1 to {study.num_stages - 1}")
        return faults


@dataclass(frozen=True)
class Header:
    """First line of a trial's file."""

    __pydantic_config__ = STRICT

    study: str  # fingerprint of the trial's study
    arm: str
    seed: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class End:
    """Last line of a finished trial's file."""

    __pydantic_config__ = STRICT

    num_rows: int


@dataclass(frozen=True)
class Trial:
    """One arm with one seed, as read from its file. Invariant: evaluations are complete."""

    header: Header
    rows: tuple[Row, ...]
    is_finished: bool
    path: Path


@dataclass(frozen=True)
class Results:
    """Contents of a results directory; trials by arm in the order of the study, then by seed."""

    study: Study
    trials: tuple[Trial, ...]

    def of(self, arm: str) -> tuple[Trial, ...]:
        """Return the finished trials of an arm, by seed."""
        return tuple(trial for trial in self.trials if trial.header.arm == arm and trial.is_finished)


def trial_path(directory: Path, arm: str, seed: int) -> Path:
    """Return the path of a trial's file."""
    return directory / TRIALS / f"{arm}--{seed}.jsonl"


def read_study(directory: Path) -> Study:
    """Read study.json.

    Raises:
        ResultsError: the file is missing or invalid; the message names file and fields.
    """
    path = directory / STUDY_FILE
    try:
        return read_object(Study, json.loads(path.read_text(encoding="utf-8"))).checked()
    except FileNotFoundError:
        raise ResultsError(f"{path} does not exist; expected the results directory of a study") from None
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: " + str(error).replace("\n", f"\n{path}: ")) from error


def read_results(directory: Path) -> Results:
    """Read a results directory; unfinished trials are included, with `is_finished` False.

    Raises:
        ResultsError: a file is damaged or belongs to another study; the message names file, row and field.
    """
    study = read_study(directory)
    paths = sorted((directory / TRIALS).glob("*.jsonl"))
    order = [arm.name for arm in study.arms]
    trials = [read_trial(path, study) for path in paths]
    return Results(study, tuple(sorted(trials, key=lambda t: (order.index(t.header.arm), t.header.seed))))


def read_trial(path: Path, study: Study) -> Trial:
    """Read one trial; of an unfinished one, its complete evaluations.

    Raises:
        ResultsError: as in `read_results`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error})") from error
    lines = text.split("\n")[:-1]  # text after the last newline is an incomplete line
    if not lines:
        raise ResultsError(f"{path}: is empty; expected a header line")
    entries = [_read_line(path, number, line) for number, line in enumerate(lines, 1)]
    header = _checked_header(path, entries[0], study)
    is_finished = isinstance(entries[-1], End)
    rows = entries[1 : len(entries) - is_finished]
    for number, row in enumerate(rows, 2):
        if not isinstance(row, Row):
            raise ResultsError(f"{path}, row {number}: kind is {type(row).__name__.lower()}; expected a row here")
        if faults := row.faults(study):
            raise ResultsError(f"{path}, row {number}: " + "; ".join(faults))
    if is_finished and entries[-1].num_rows != len(rows):
        raise ResultsError(f"{path}, row {len(lines)}: num_rows = {entries[-1].num_rows}; expected {len(rows)}")
    return Trial(header, _whole_evaluations(path, rows, study, is_finished), is_finished, path)


def _read_line(path: Path, number: int, line: str) -> Any:
    kinds: dict[str, type] = {"trial": Header, "row": Row, "end": End}
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ResultsError(f"{path}, row {number}: is not JSON ({error})") from error
    if not isinstance(value, dict) or value.get("kind") not in kinds:
        kind = value.get("kind") if isinstance(value, dict) else value
        raise ResultsError(f"{path}, row {number}: kind = {kind!r}; expected one of {', '.join(kinds)}")
    try:
        return read_object(kinds[value.pop("kind")], value)
    except ValueError as error:
        raise ResultsError(f"{path}, row {number}: " + "; ".join(str(error).split("\n"))) from error


def _checked_header(path: Path, header: Any, study: Study) -> Header:
    if not isinstance(header, Header):
        raise ResultsError(f"{path}, row 1: kind is {type(header).__name__.lower()}; expected trial")
    if header.study != study.fingerprint:
        raise ResultsError(
            f"{path}, row 1: study = {header.study!r}; expected {study.fingerprint!r}, the study in study.json. "
            "The trial is of another study, or study.json was changed afterwards"
        )
    if path.name != trial_path(Path(), header.arm, header.seed).name:
        raise ResultsError(f"{path}, row 1: arm = {header.arm!r}, seed = {header.seed}; expected the file name's")
    if header.arm not in [arm.name for arm in study.arms] or header.seed not in study.seeds:
        raise ResultsError(f"{path}, row 1: arm = {header.arm!r}, seed = {header.seed}; the study has no such trial")
    return header


def _whole_evaluations(path: Path, rows: Sequence[Row], study: Study, is_finished: bool) -> tuple[Row, ...]:
    """Check that evaluations are complete; drop an incomplete last evaluation of an unfinished trial."""
    num, names = len(study.domains), sorted(domain.name for domain in study.domains)
    whole = len(rows) - len(rows) % num
    if is_finished and whole < len(rows):
        raise ResultsError(f"{path}: {len(rows)} rows; expected {num} an evaluation, one a domain")
    for start in range(0, whole, num):
        found = [row.domain for row in rows[start : start + num]]
        if sorted(found) != names:
            raise ResultsError(f"{path}, row {start + 2}: domain = {found}; expected each once")
    return tuple(rows[:whole])
