"""The setting `tracker`: which trackers there are, their parameters, and the validation of both.

    tracker="wandb"                                      one
    tracker=["tensorboard", "mlflow"]                    several
    tracker={"name": "wandb", "project": "sums", "mode": "offline"}

A tracker's credentials are never settings, because settings are written to files: each tracker reads its own
environment variables and the files of its own login command.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rllib_srl.common.setting_tables import Setting

TENSORBOARD, WANDB, MLFLOW, TRACKIO = TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
PACKAGES = {WANDB: "wandb", MLFLOW: "mlflow", TRACKIO: "trackio"}  # tensorboardX is always installed
MODES = ("online", "offline")
# Names of settings whose texts are secrets.
SECRET_NAME = re.compile(r"(key|token|secret|password|passwd|authorization|cookie|credential)s?$", re.IGNORECASE)
_REMOTE = (WANDB, MLFLOW, TRACKIO)
TABLE = {
    "tracker": Setting(
        None,
        "experiment tracker of the metrics: tensorboard wandb mlflow trackio, or a list of them "
        "(docs/metrics.md#trackers); None: none",
        "tracker.name",
        is_head=True,
    ),
    "tracker_project": Setting("rllib_srl", "project, in MLflow the experiment", "tracker.project", _REMOTE),
    "tracker_run": Setting(None, "name of the run; None: that of its log directory", "tracker.run", _REMOTE),
    "tracker_group": Setting(None, "name that related runs share; None: no group", "tracker.group", _REMOTE),
    "tracker_entity": Setting(None, "user or team; None: the account's default", "tracker.entity", (WANDB,)),
    "tracker_mode": Setting(
        None, '"online" or "offline"; None: $WANDB_MODE, else online', "tracker.mode", (WANDB,)
    ),
    "tracker_uri": Setting(
        None, "tracking server or store; None: $MLFLOW_TRACKING_URI, else MLflow's default", "tracker.uri", (MLFLOW,)
    ),
    "tracker_space": Setting(
        None, "Hugging Face Space; None: $TRACKIO_SPACE_ID, else this machine", "tracker.space", (TRACKIO,)
    ),
}
_TEXTS = tuple(name for name in TABLE if name not in ("tracker", "tracker_mode"))


@dataclass(frozen=True)
class TrackerChoice:
    """The trackers of a run with their parameters; None and "" leave a parameter to the tracker."""

    names: tuple[str, ...]
    project: str
    run: str
    group: str | None
    entity: str | None
    mode: str | None
    uri: str | None
    space: str | None

    @classmethod
    def of(cls, settings: Any, run: str) -> TrackerChoice:
        """Return the choice of valid settings by their flat names.

        Args:
            settings: an object with the attributes of `TABLE`.
            run: name of the run if the settings have none.
        """
        return cls(
            names_in(settings.tracker),
            project=settings.tracker_project,
            run=settings.tracker_run or run,
            group=settings.tracker_group,
            entity=settings.tracker_entity,
            mode=settings.tracker_mode,
            uri=settings.tracker_uri,
            space=settings.tracker_space,
        )


def names_in(value: Any) -> tuple[str, ...]:
    """Return the names that a value of `tracker` lists."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def faults_of_tracker(settings: Any) -> Iterator[str]:
    """Yield an error message for each unknown or missing tracker and each invalid parameter."""
    names = names_in(settings.tracker)
    unknown = [name for name in names if name not in TRACKERS]
    if unknown or len(set(names)) < len(names) or (settings.tracker is not None and not names):
        yield f"tracker = {settings.tracker!r}; expected one of {', '.join(TRACKERS)}, a list of them, or None"
        return
    for name in names:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            yield f"tracker = {name!r}; expected the package {PACKAGES[name]}: pip install 'rllib_srl[{name}]'"
    for name in _TEXTS:
        value = getattr(settings, name)
        if value != TABLE[name].default and not (isinstance(value, str) and value.strip()):
            yield f"{name} = {value!r}; expected a text that is not empty"
    if settings.tracker_mode not in (None, *MODES):
        yield f"tracker_mode = {settings.tracker_mode!r}; expected one of {', '.join(map(repr, MODES))}, or None"
    if isinstance(settings.tracker_uri, str) and _has_password(settings.tracker_uri):
        yield (
            "tracker_uri = a URI with a password; expected none, because settings are written to files: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )


def _has_password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError:  # not a valid address, of which MLflow tells
        return bool(re.search(r"//[^/]*:[^/]*@", uri))


