"""All trackers of a run: starts them, sends each iteration's metrics, and ends them.

    trackers.json, in the log directory     {"wandb": "4f1c..."}: the tracker's runs, which a resumed run continues

A tracker that fails does not end training. Its rows wait and are sent with the next iteration; each failure after a
success is a warning, and so are rows that could not be sent at the end.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rllib_srl.algorithm.settings import SETTINGS
from rllib_srl.algorithm.tracking.choice import SECRET_NAME, TENSORBOARD, TrackerChoice, names_in
from rllib_srl.algorithm.tracking.clients import CLIENTS, TensorBoard, Tracker, TrackerError
from rllib_srl.common.metric_names import numbers_of
from rllib_srl.replay.admission.secrets import redact
from rllib_srl.storage.disk import writing
from rllib_srl.storage.event_file import EventFile

logger = logging.getLogger(__name__)

RUNS = "trackers.json"
# RLlib's settings that are logged beside those of SRL.
OF_RLLIB = (
    *("env", "env_config", "seed", "lr", "num_epochs", "grad_clip", "num_env_runners", "num_learners"),
    *("evaluation_interval", "evaluation_duration"),
)
NOT_LOGGED = ("tracker", "seal_key_file")
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class Tracking:
    """The trackers of one run. Invariant: the rows of `_waiting[name]` were logged by no call, in order."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        """Take started trackers by name."""
        self._trackers = dict(trackers)
        self._waiting: dict[str, list[tuple[int, dict[str, float]]]] = {name: [] for name in trackers}

    @property
    def places(self) -> dict[str, str]:
        """Return tracker -> address of the run, or the command that shows it."""
        return {name: tracker.place for name, tracker in self._trackers.items()}

    def log(self, iteration: int, result: Mapping[str, Any]) -> None:
        """Send the numbers in the result of an iteration to every tracker."""
        numbers = dict(numbers_of(result)) if self._trackers else {}
        for name in self._trackers:
            waited = len(self._waiting[name])
            self._waiting[name].append((iteration, numbers))
            error = self._send(name)
            if error is not None and not waited:
                logger.warning("tracker %r failed (%s); its metrics wait until it works again", name, _told(error))

    def close(self) -> None:
        """Send the rows that wait, and end the runs."""
        for name, tracker in self._trackers.items():
            error = self._send(name)
            try:
                tracker.close()
            except Exception as failure:  # of another package: training has ended and must not fail now
                error = error or failure
            if error is not None:
                told = (name, _told(error), len(self._waiting[name]))
                logger.warning("tracker %r failed at the end (%s); %d iterations were not sent", *told)
        self._trackers = {}

    def _send(self, name: str) -> Exception | None:
        """Send the rows that wait; return the error that stopped it."""
        while rows := self._waiting[name]:
            try:
                self._trackers[name].log(*rows[0])
            except Exception as error:  # of another package, often of the network: the row is kept
                return error
            del rows[0]
        return None


def start_tracking(config: Any, directory: Path, seed: int, open_writer: Callable[[], EventFile]) -> Tracking:
    """Start the trackers that the settings name, or continue their runs of an earlier process.

    Args:
        config: a valid SRLConfig.
        directory: of the run's logs.
        seed: of the run, if the config has none.
        open_writer: returns the run's event file.

    Raises:
        TrackerError: a tracker cannot start; those before it were ended.
    """
    choice = TrackerChoice.of(config.flat(), run=directory.name)
    known = _earlier_runs(directory)
    told = settings_to_log(config) | {"seed": seed}
    started: dict[str, Tracker] = {}
    for name in choice.names:
        try:
            if name == TENSORBOARD:
                started[name] = TensorBoard(open_writer, directory)
            else:
                started[name] = CLIENTS[name](choice, directory, told, known.get(name))
        except Exception as error:  # of another package: an API key that is refused, a server that is down
            Tracking(started).close()
            earlier = f"; its run {known[name]} is named in {directory / RUNS}" if name in known else ""
            raise TrackerError(f"tracker = {name!r} cannot start: {_told(error)}{earlier}") from error
    runs = known | {name: tracker.run_id for name, tracker in started.items() if tracker.run_id}
    if runs != known:
        with writing(directory / RUNS):
            (directory / RUNS).write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    return Tracking(started)


def tracks(config: Any, name: str) -> bool:
    """Return whether the settings name a tracker."""
    return name in names_in(config.flat().tracker)


def settings_to_log(config: Any) -> dict[str, Any]:
    """Return the settings of a run as texts and numbers, nested names joined by ".", without secrets."""
    names = [name for name in (*OF_RLLIB, *SETTINGS) if name not in NOT_LOGGED]
    values = {"model": config.model_config["model"], **{name: getattr(config, name) for name in names}}
    return dict(flat_settings(values))


def flat_settings(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as (name, text or number), nested names joined by ".", without secrets."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", value
        else:
            is_secret = isinstance(value, str) and SECRET_NAME.search(str(name))
            yield f"{prefix}{name}", "[secret]" if is_secret else _without_secrets(str(value))


def _without_secrets(text: str) -> str:
    return redact(_USER_IN_ADDRESS.sub("[password]", text))


def _told(error: Exception) -> str:
    """Return the first line of an error; servers and clients may repeat what they were given, so no secrets."""
    line = next(iter(str(error).strip().splitlines()), "")
    return _without_secrets(f"{type(error).__name__}: {line}" if line else type(error).__name__)


def _earlier_runs(directory: Path) -> dict[str, str]:
    """Return tracker -> its run, as `trackers.json` has it; {} without one.

    Raises:
        TrackerError: the file cannot be read.
    """
    path = directory / RUNS
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrackerError(f"{path} cannot be read ({error}); to start new runs of the trackers, remove it") from error
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise TrackerError(f"{path} has no runs by tracker; to start new runs of the trackers, remove it")
    return found
