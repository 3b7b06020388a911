"""Writing the files of a study (`results.py` says what they hold): durable line by line, resumable after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rllib_srl.continual.fields import faults_of
from rllib_srl.continual.results import (
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
from rllib_srl.continual.study import Study


def write_study(directory: Path, study: Study) -> None:
    """Write study.json, or find the same study there.

    Raises:
        ResultsError: the directory holds another study, or the study has faults.
    """
    if faults := study.faults():
        raise ResultsError(f"study {study.name!r}:\n" + "\n".join(f"  {fault}" for fault in faults))
    path = directory / STUDY_FILE
    if path.exists():
        if read_study(directory).fingerprint != study.fingerprint:
            raise ResultsError(f"{path}: holds another study than the one asked for; give another directory")
        return
    (directory / TRIALS).mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(study), indent=2) + "\n")


def finished_trials(directory: Path, study: Study) -> set[tuple[str, int]]:
    """Return arm and seed of the trials that need not be run again.

    Raises:
        ResultsError: the directory cannot be read, or holds another study.
    """
    write_study(directory, study)
    return {(t.header.arm, t.header.seed) for t in read_results(directory).trials if t.is_finished}


def open_trial(
    directory: Path, study: Study, arm: str, seed: int, settings: Mapping[str, Any], from_iteration: int = 0
) -> TrialWriter:
    """Begin a trial's file, or go on with it; the study must be written already.

    Args:
        directory: of the results.
        study: the one that lies there.
        arm: one of its arms.
        seed: one of its seeds.
        settings: every setting of the run, in JSON's types; those of the first start are kept.
        from_iteration: iterations the run has done, as its checkpoint says; later rows of an earlier attempt go, and
            are written again. 0 starts anew.

    Raises:
        ResultsError: the trial is finished, no trial of this study, or settings are not JSON's types.
    """
    if arm not in (names := [a.name for a in study.arms]) or seed not in study.seeds:
        raise ResultsError(f"arm = {arm!r}, seed = {seed}; expected arm {', '.join(names)} and a seed of the study")
    if read_study(directory).fingerprint != study.fingerprint:
        raise ResultsError(f"{directory / STUDY_FILE}: holds another study than the one asked for")
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
    """Appends rows to one trial's file. Invariant: what `add` took is on the disk when it returns."""

    def __init__(self, path: Path, study: Study, num_rows: int) -> None:
        """Append to `path`, which holds a header and `num_rows` rows."""
        self._study, self._num_rows = study, num_rows
        self._file = path.open("a", encoding="utf-8")

    def add(self, rows: Sequence[Row]) -> None:
        """Write the rows of one evaluation, one for each domain of the study.

        Raises:
            ValueError: all that is wrong with them; nothing is written.
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
        """Say that the trial is whole."""
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
    """Write a file that is on the disk when this returns; who is killed before leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
