"""Writes the files of a study (formats in `results.py`): durable line by line, resumable after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rllib_srl.studies.fields import faults_of
from rllib_srl.studies.results import (
    STUDY_FILE,
    TRIALS,
    End,
    Header,
    ResultsError,
    Row,
    read_results,
    read_study,
    read_trial,
    trial_path,
)
from rllib_srl.studies.study import Study


def write_study(directory: Path, study: Study) -> None:
    """Write study.json; do nothing if the directory already holds the same study.

    Raises:
        ResultsError: the directory holds another study, or the study is not valid.
    """
    if faults := study.faults():
        raise ResultsError(f"study {study.name!r}:\n" + "\n".join(f"  {fault}" for fault in faults))
    path = directory / STUDY_FILE
    if path.exists():
        if read_study(directory).fingerprint != study.fingerprint:
            raise ResultsError(f"{path}: holds another study; use another directory")
        return
    (directory / TRIALS).mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(study), indent=2) + "\n")


def finished_trials(directory: Path, study: Study) -> set[tuple[str, int]]:
    """Return arm and seed of the finished trials; write study.json if the directory is new.

    Raises:
        ResultsError: the directory cannot be read, or holds another study.
    """
    write_study(directory, study)
    return {(t.header.arm, t.header.seed) for t in read_results(directory).trials if t.is_finished}


def open_trial(
    directory: Path, study: Study, arm: str, seed: int, settings: Mapping[str, Any], from_iteration: int = 0
) -> TrialWriter:
    """Create a trial's file, or continue it; the study must have been written before.

    Args:
        directory: the results directory.
        study: the study in that directory.
        arm: one of its arms.
        seed: one of its seeds.
        settings: all settings of the run, in JSON's types; a continued trial keeps those of its first start.
        from_iteration: number of iterations in the run's checkpoint; later rows of an earlier attempt are removed, and
            written again by the run. 0 starts a new file.

    Raises:
        ResultsError: the trial is finished or not part of this study, or the settings have types unknown to JSON.
    """
    if arm not in (names := [a.name for a in study.arms]) or seed not in study.seeds:
        raise ResultsError(f"arm = {arm!r}, seed = {seed}; expected arm {', '.join(names)} and a seed of the study")
    if read_study(directory).fingerprint != study.fingerprint:
        raise ResultsError(f"{directory / STUDY_FILE}: holds another study")
    path, header, rows = trial_path(directory, arm, seed), Header(study.fingerprint, arm, seed, dict(settings)), []
    if path.exists():
        earlier = read_trial(path, study)
        if earlier.is_finished:
            raise ResultsError(f"{path}: the trial is finished; it is not run again")
        if from_iteration > 0:
            header, rows = earlier.header, [row for row in earlier.rows if row.iteration <= from_iteration]
    try:
        lines = [_line_of("trial", header)] + [_line_of("row", row) for row in rows]
    except (TypeError, ValueError) as error:
        raise ResultsError(f"settings of arm {arm!r} are not JSON: {error}") from error
    write_whole(path, "".join(lines))
    return TrialWriter(path, study, len(rows))


class TrialWriter:
    """Appends rows to one trial's file. Invariant: when `add` returns, its rows are on disk."""

    def __init__(self, path: Path, study: Study, num_rows: int) -> None:
        """Append to `path`, which holds a header and `num_rows` rows."""
        self._study, self._num_rows = study, num_rows
        self._file = path.open("a", encoding="utf-8")

    def add(self, rows: Sequence[Row]) -> None:
        """Write the rows of one evaluation, one for each domain of the study.

        Raises:
            ValueError: all errors of the rows; nothing was written.
        """
        faults = [fault for row in rows for fault in (faults_of(Row, asdict(row)) or row.faults(self._study))]
        names = sorted(domain.name for domain in self._study.domains)
        if not faults and sorted(row.domain for row in rows) != names:
            faults = [f"domain = {[row.domain for row in rows]}; expected each of {', '.join(names)} once"]
        if faults:
            raise ValueError("\n".join(faults))
        self._write("".join(_line_of("row", row) for row in rows))
        self._num_rows += len(rows)

    def finish(self) -> None:
        """Write the end line, which marks the trial as finished."""
        self._write(_line_of("end", End(self._num_rows)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TrialWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close the file."""
        self.close()

    def _write(self, line: str) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())


def _line_of(kind: str, value: Header | Row | End) -> str:
    return json.dumps({"kind": kind, **asdict(value)}, allow_nan=False) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically and durably: a kill before the end leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
