"""The files of a run that may be going on: its metrics, settings and transcripts, read as they grow.

Reading again costs what was appended since.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.metrics import TRANSCRIPTS
from rllib_srl.cli.dashboard.transcripts import Transcripts
from rllib_srl.cli.report.metrics_table import MetricsTable
from rllib_srl.cli.report.run_facts import RunFacts, settings_in
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import SETTINGS_FILE, RunError
from rllib_srl.replay.reading import PLACES
from rllib_srl.studies.results import STUDY_FILE

PAUSE_S = 0.5  # shortest time between two looks at the files


def check_is_run(directory: Path) -> None:
    """Check that a path is the directory of a run, which may not have finished an iteration yet.

    Raises:
        RunError: it is not.
    """
    if (directory / STUDY_FILE).is_file():
        raise RunError(f"{directory} is a study; expected the directory of a run (srl report shows studies)")
    has_files = any((directory / name).is_file() for name in (METRICS, SETTINGS_FILE))
    if not has_files and not any(directory.glob(PLACES[0])):
        there = "holds no run" if directory.is_dir() else "does not exist"
        raise RunError(f"{directory} {there}; expected the directory of a run ({METRICS})")


class LiveRun:
    """The files of one run. Invariant: `facts` are those of `table`; used by one thread."""

    def __init__(self, directory: Path) -> None:
        """Prepare the reading of a run's directory; `refresh` reads."""
        self.directory = directory
        self.transcripts = Transcripts(directory / TRANSCRIPTS)
        self.facts: RunFacts | None = None  # None before the first finished iteration
        self.version = 0  # of the metrics
        self._table = MetricsTable(directory / METRICS)
        self._settings: Mapping[str, Any] = {}
        self._settings_at, self._settings_fault = 0.0, ""
        self._looked_at = -PAUSE_S

    def refresh(self) -> None:
        """Read what the run has written since, unless that was done a moment ago."""
        if time.monotonic() - self._looked_at < PAUSE_S:
            return
        if any([self._table.refresh(), self._read_settings()]):
            self.version += 1
            table = self._table
            known = (self.directory, self._settings, table.iterations(), table.columns())
            self.facts = RunFacts(*known) if table.num_iterations else None
        self.transcripts.refresh()
        self._looked_at = time.monotonic()

    def _read_settings(self) -> bool:
        """Read the settings if their file is another one; return whether it is."""
        written_at = _written_at(self.directory / SETTINGS_FILE)
        if written_at == self._settings_at:
            return False
        self._settings, self._settings_at, self._settings_fault = {}, written_at, ""
        try:
            self._settings = settings_in(self.directory)
        except (ValueError, OSError) as error:
            self._settings_fault = f"{SETTINGS_FILE} cannot be read: {' '.join(str(error).split())}"
        return True

    @property
    def faults(self) -> list[str]:
        """Return a line for each file with damaged lines, which are left out."""
        found = ((METRICS, self._table.num_damaged), (TRANSCRIPTS, self.transcripts.num_damaged))
        lines = [f"{name} has {num:,} damaged lines, which are left out" for name, num in found if num]
        return [*lines, *([self._settings_fault] if self._settings_fault else [])]

    def state(self) -> str:
        """Return how far the run is, in words."""
        if self.facts is None:
            return "no finished iteration yet"
        done, planned = int(self.facts.iterations[-1]), self._settings.get("iterations")
        written_at = _written_at(self.directory / METRICS)
        of = f" of {planned:,}" if isinstance(planned, int) else ""
        end = "finished" if isinstance(planned, int) and done >= planned else "the last one"
        return f"{done:,}{of} iterations, {end} {_ago(time.time() - written_at)}"


def _written_at(path: Path) -> float:
    """Return when a file was written, in seconds since 1970; 0 without one."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _ago(seconds: float) -> str:
    """Return a time that has passed in its largest unit."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            num = int(seconds // size)
            return f"{num} {unit}{'s' if num > 1 else ''} ago"
    return "less than a minute ago"
