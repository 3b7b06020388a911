"""The clients of the trackers. Each starts a run or continues an earlier one, logs rows of numbers, and ends.

Ray's `WandbLoggerCallback` and `MLflowLoggerCallback` run on Tune's driver, so they see neither `algo.train()` nor
`srl train`; its `setup_wandb` needs an API key even offline, and there is none for Trackio. These clients therefore
call the trackers' own packages, which are imported when a run starts.

Traps and the remedies used here:
1. W&B drops rows whose step is below the newest one, as after a resume from an older checkpoint: a row has its
   iteration as a metric, over which all others are plotted.
2. W&B asks for an API key on a terminal, and the prompt may be hidden: the key is looked up before.
3. W&B uploads command line, console, git remote and the list of packages: all of them are turned off.
4. MLflow repeats a request for minutes: here it gives up after seconds, and `Tracking` sends the row again later.
5. Two processes that create MLflow's local store at the same time damage each other's tables: one after the other.
6. Trackio has one current run per context and finishes it when another one starts: each run gets its own context.
"""

from __future__ import annotations

import io
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from contextvars import Context
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from rllib_srl.algorithm.tracking.choice import MLFLOW, TRACKIO, WANDB, TrackerChoice
from rllib_srl.engine.models import cache_root
from rllib_srl.storage.event_file import EventFile

ITERATION = "iteration"
WANDB_TIMEOUT_S = 60.0  # of its start, and of the upload at its end
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
MLFLOW_BATCH = {"metrics": 1000, "params": 100}  # most entries of a request
MLFLOW_LOCK_S = 120.0  # longest wait for another process that creates the store
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")


class TrackerError(ValueError):
    """A tracker cannot start; the message contains the reason and, if known, the remedy."""


class Tracker(Protocol):
    """One run of a tracker. Invariant: a later process continues it by `run_id`."""

    run_id: str
    place: str  # address, or the command that shows the run

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an iteration."""

    def close(self) -> None:
        """End the run."""


class TensorBoard:
    """TensorBoard scalars in the run's event file, which belongs to the caller."""

    run_id = ""

    def __init__(self, open_writer: Callable[[], EventFile], directory: Path) -> None:
        """Write into the event file in `directory` that `open_writer` returns."""
        self._open_writer = open_writer
        self.place = f"tensorboard --logdir {directory}"

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Append one scalar for each number."""
        writer = self._open_writer()
        for name, number in numbers.items():
            writer.add_scalar(name, number, iteration)
        writer.flush()

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


class WeightsAndBiases:
    """A run of Weights & Biases. Offline it is a directory below the log directory, which `wandb sync` uploads."""

    def __init__(self, choice: TrackerChoice, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        """Start a run, or continue `run_id`.

        Raises:
            TrackerError: there is no API key.
        """
        import wandb

        mode = choice.mode or os.environ.get("WANDB_MODE") or "online"
        if mode == "online":
            _check_wandb_key(wandb)
        self.run_id = run_id or uuid.uuid4().hex[:12]
        options = wandb.Settings(
            console="off", disable_code=True, disable_git=True, silent=True, reinit="create_new",
            x_disable_meta=True, x_save_requirements=False,
            init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S,
        )
        self._run = wandb.init(
            project=choice.project, name=choice.run, group=choice.group, entity=choice.entity, mode=mode,
            id=self.run_id, resume="allow", dir=str(directory), config=dict(settings), allow_val_change=True,
            settings=options,
        )
        self._run.define_metric(ITERATION)
        self._run.define_metric("*", step_metric=ITERATION)
        self.place = str(self._run.url) if mode == "online" else f"wandb sync {self._run.settings.sync_dir}"

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Queue a row; W&B's own process sends it."""
        self._run.log({**numbers, ITERATION: iteration})

    def close(self) -> None:
        """Send what is left, at most for `WANDB_TIMEOUT_S`."""
        self._run.finish()


def _check_wandb_key(wandb: Any) -> None:
    from wandb.sdk.lib.wbauth import authenticate_session

    if authenticate_session(host=wandb.setup().settings.base_url, source="tracker", prompt=False) is None:
        raise TrackerError("no API key; run `wandb login`, set WANDB_API_KEY, or set mode to 'offline'")


class MLflow:
    """A run of MLflow, on a tracking server or in a local store; the project is its experiment."""

    def __init__(self, choice: TrackerChoice, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        """Start a run, or continue `run_id`; MLflow does not allow to change the settings of the latter."""
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        lock = cache_root() / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=MLFLOW_LOCK_S):
            self._client = MlflowClient(tracking_uri=choice.uri)
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            self.run_id = run_id
        else:
            experiment = _experiment(self._client, choice.project)
            tags = {"group": choice.group} if choice.group else {}
            self.run_id = self._client.create_run(experiment, run_name=choice.run, tags=tags).info.run_id
            self._log_params(settings)
        self.place = f"{choice.uri or self._client.tracking_uri}, experiment {choice.project!r}, run {choice.run!r}"

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers; characters that MLflow does not allow in names become "_"."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._send("metrics", [Metric(_NOT_IN_MLFLOW.sub("_", n), x, now, iteration) for n, x in numbers.items()])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.run_id)

    def _log_params(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self._send("params", [Param(name, str(value)) for name, value in settings.items()])

    def _send(self, kind: str, entries: list[Any]) -> None:
        for at in range(0, len(entries), MLFLOW_BATCH[kind]):
            self._client.log_batch(self.run_id, **{kind: entries[at : at + MLFLOW_BATCH[kind]]})


def _experiment(client: Any, name: str) -> str:
    """Return the id of an experiment; create it if there is none."""
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        if (found := client.get_experiment_by_name(name)) is None:
            raise
        return str(found.experiment_id)  # another run has created it meanwhile


class Trackio:
    """A run of Trackio, on this machine or in a Hugging Face Space."""

    def __init__(self, choice: TrackerChoice, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> None:
        """Start a run, or continue `run_id`, which is its name: Trackio finds runs by name."""
        import trackio

        self.run_id = run_id or f"{choice.run}-{uuid.uuid4().hex[:6]}"
        how: dict[str, Any] = {"project": choice.project, "name": self.run_id, "group": choice.group}
        how["space_id"] = choice.space
        how |= {"config": dict(settings), "resume": "allow" if run_id else "never"}
        with redirect_stdout(io.StringIO()):
            self._run = Context().run(trackio.init, **how, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self.place = choice.space or f"trackio show --project {choice.project}"

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Queue a row; a thread of Trackio writes or sends it."""
        self._run.log(dict(numbers), step=iteration)

    def close(self) -> None:
        """Send what is left, at most for 30 seconds."""
        with redirect_stdout(io.StringIO()):
            self._run.finish()


Start = Callable[[TrackerChoice, Path, Mapping[str, Any], str | None], Tracker]
CLIENTS: dict[str, Start] = {WANDB: WeightsAndBiases, MLFLOW: MLflow, TRACKIO: Trackio}
