"""Send the metrics and settings of a run to Weights & Biases or MLflow, or offer them to Prometheus: one callback each.

    config.callbacks("contrib.trackers:wandb")       also :mlflow, :prometheus, or a list of them
    srl train ... --callbacks contrib.trackers:wandb
    class Mine(Wandb): project, group = "sums", "first"                                  another project

Each row has the numbers of an iteration. The tracker's run belongs to the log directory, where `tracker-NAME.txt` has
its id: a run that resumes there continues it. A tracker that fails later is a warning; its rows wait and are sent with
the next iteration. Credentials and addresses are the tracker's own environment variables and login commands
(WANDB_API_KEY, WANDB_MODE=offline, WANDB_ENTITY; MLFLOW_TRACKING_URI): never settings, which are written to
files. Command line, console, git remote, packages and transcripts are not sent.

Traps: W&B drops rows whose step is below the newest, as after a resume, so the iteration is a metric. MLflow repeats a
request for minutes, here for seconds; two processes that create its local store at once damage it.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock

from rllib_srl.algorithm.settings import SETTINGS, without_secrets
from rllib_srl.cli.shared.settings import flat_settings
from rllib_srl.common.callbacks import SRLCallback
from rllib_srl.common.metric_names import numbers_of
from rllib_srl.engine.models import cache_root

logger = logging.getLogger(__name__)

# RLlib's settings that are sent beside those of SRL.
OF_RLLIB = (
    *("env", "env_config", "seed", "lr", "num_epochs", "grad_clip", "num_env_runners", "num_learners"),
    *("evaluation_interval", "evaluation_duration"),
)
TIMEOUT_S = 60.0  # of W&B's start, and of the upload at its end
_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
_MLFLOW = {"HTTP_REQUEST_TIMEOUT": "20", "HTTP_REQUEST_MAX_RETRIES": "1", "DISABLE_TELEMETRY": "true"}  # seconds


def settings_to_log(config: Any) -> dict[str, Any]:
    """Return the settings of a run as texts and numbers, nested names joined by ".", without secrets."""
    names = [name for name, row in SETTINGS.items() if name in OF_RLLIB or not row.is_rllib]
    values = {"model": config.model_config["model"], **{name: getattr(config, name) for name in names}}
    del values["seal_key_file"]
    return dict(flat_settings(values))


class TrackerError(ValueError):
    """A tracker cannot start; the message has the reason and, if known, the remedy."""


class Tracker(SRLCallback):
    """One run of a tracker. Invariant: no call has sent the rows in `_waiting`, which are in order."""

    name: ClassVar[str]  # of the package
    project: ClassVar[str] = "rllib_srl"  # in MLflow the experiment
    group: ClassVar[str | None] = None  # name that related runs share

    def __init__(self) -> None:
        """Start nothing: RLlib makes callbacks in every process."""
        super().__init__()
        self._waiting: list[tuple[int, dict[str, float]]] = []
        self._is_started = self._is_failing = False

    def start(self, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> tuple[str, str]:
        """Start a run, or continue `run_id`; return its id, and its address or the command that shows it."""
        raise NotImplementedError

    def send(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers of an iteration."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the run."""
        raise NotImplementedError

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Start the run, or continue that of the log directory."""
        path = Path(algorithm.logdir) / f"tracker-{self.name}.txt"
        known = path.read_text(encoding="utf-8").strip() if path.is_file() else None
        settings = settings_to_log(algorithm.config) | {"seed": algorithm.seed}
        try:
            run_id, place = self.start(path.parent, settings, known)
        except ModuleNotFoundError as error:
            raise TrackerError(
                f"contrib.trackers:{self.name} needs the package {error.name}: pip install 'rllib_srl[{self.name}]'"
            ) from error
        except Exception as error:  # of another package: an API key that is refused, a server that is down
            raise TrackerError(f"contrib.trackers:{self.name} cannot start: {_line_of(error)}") from error
        self._is_started = True
        path.write_text(run_id + "\n", encoding="utf-8")
        logging.getLogger("rllib_srl.start").info("%s: %s", self.name, place)

    def on_train_result(self, *, algorithm: Any, result: Mapping[str, Any], **kwargs: Any) -> None:
        """Send the numbers of an iteration after those that wait."""
        self._waiting.append((algorithm.iteration, dict(numbers_of(result))))
        self._send_waiting()

    def on_stop(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Send what waits, and end the run."""
        if not self._is_started:
            return
        self._is_started = False
        self._send_waiting()
        if self._waiting:
            logger.warning("%s: %d iterations were not sent", self.name, len(self._waiting))
        try:
            self.finish()
        except Exception as error:  # of another package: training has ended and must not fail now
            logger.warning("%s could not be closed (%s)", self.name, _line_of(error))

    def _send_waiting(self) -> None:
        try:
            while self._waiting:
                self.send(*self._waiting[0])
                del self._waiting[0]
                self._is_failing = False
        except Exception as error:  # of another package, often of the network: the row is kept
            if not self._is_failing:
                logger.warning("%s failed (%s); its metrics wait until it works again", self.name, _line_of(error))
            self._is_failing = True


class Wandb(Tracker):
    """Weights & Biases. Offline its run is a directory in the log directory, which `wandb sync` uploads."""

    name: ClassVar[str] = "wandb"

    def start(self, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> tuple[str, str]:
        """Start or continue a run; the key is looked up first, because W&B would ask for it on a hidden terminal."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or "online"
        if mode == "online":
            from wandb.sdk.lib.wbauth import authenticate_session

            if authenticate_session(host=wandb.setup().settings.base_url, source="tracker", prompt=False) is None:
                raise TrackerError("no API key; run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        options = wandb.Settings(
            console="off", disable_code=True, disable_git=True, silent=True, reinit="create_new", x_disable_meta=True,
            x_save_requirements=False, init_timeout=TIMEOUT_S, finish_timeout=TIMEOUT_S,
        )  # fmt: skip
        self._run = wandb.init(
            project=self.project, name=directory.name, group=self.group, mode=mode, id=run_id or uuid.uuid4().hex[:12],
            resume="allow", dir=str(directory), config=dict(settings), allow_val_change=True, settings=options,
        )  # fmt: skip
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        place = self._run.url if mode == "online" else f"wandb sync {self._run.settings.sync_dir}"
        return self._run.id, str(place)

    def send(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Queue a row; W&B's own process sends it."""
        self._run.log({**numbers, "iteration": iteration})

    def finish(self) -> None:
        """Send what is left, at most for `TIMEOUT_S`."""
        self._run.finish()


class MLflow(Tracker):
    """MLflow, on the tracking server or in the local store of MLFLOW_TRACKING_URI."""

    name: ClassVar[str] = "mlflow"

    def start(self, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> tuple[str, str]:
        """Start or continue a run; MLflow does not allow to change the settings of the latter."""
        for name, value in _MLFLOW.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        from mlflow import MlflowClient
        from mlflow.entities import Param

        lock = cache_root() / "mlflow.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, timeout=2 * TIMEOUT_S):
            self._client = MlflowClient()
            existing = self._client.get_experiment_by_name(self.project)
            experiment = existing.experiment_id if existing else self._client.create_experiment(self.project)
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
        else:
            tags = {"group": self.group} if self.group else {}
            run_id = str(self._client.create_run(experiment, run_name=directory.name, tags=tags).info.run_id)
            params = [Param(name, str(value)) for name, value in settings.items()]
            for at in range(0, len(params), 100):  # most of a request
                self._client.log_batch(run_id, params=params[at : at + 100])
        self._run_id = run_id
        return run_id, f"{self._client.tracking_uri}, experiment {self.project!r}, run {directory.name!r}"

    def send(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Send the numbers; characters that MLflow does not allow in names become "_"."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        rows = [Metric(_NOT_IN_MLFLOW.sub("_", name), number, now, iteration) for name, number in numbers.items()]
        for at in range(0, len(rows), 1000):  # most of a request
            self._client.log_batch(self._run_id, metrics=rows[at : at + 1000])

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


GAUGES = {  # name -> pattern of the metric's name (docs/metrics.md) with the domain as its group, description
    "lag": (r"rollout/lag_mean", "updates between the first token of a group and its training, mean"),
    "live_share": (r"env_runners/live_token_share", "share of the generated tokens that are trained on"),
    "accuracy": (r"evaluation/by_domain/(.+)/accuracy", "share of right greedy answers to held-out prompts"),
    "forgetting": (r"planner/forgetting", "best minus current accuracy, mean over domains"),
    "retention_nll": (r"retention/by_domain/(.+)/nll", "mean -log-prob of held answers under the present policy, nats"),
    "canary_gap": (r"weight_sync/canary_max", "largest difference of engine and learner log-probs, nats a token"),
}


def found_in(result: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield name, domain ("" for none) and value of each gauge whose metric a result has."""
    for metric, value in numbers_of(result):
        for name, (pattern, _) in GAUGES.items():
            if match := re.fullmatch(pattern, metric):
                yield name, (match.groups() or ("",))[0], value


class Prometheus(SRLCallback):
    """Sets gauges of Ray, as `ray_rllib_srl_accuracy{domain="compare",run="first"}` of each node for Prometheus."""

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Register the gauges with Ray."""
        from ray.util.metrics import Gauge

        keys = ("run", "domain")
        self._gauges = {name: Gauge(f"rllib_srl_{name}", about, keys) for name, (_, about) in GAUGES.items()}

    def on_train_result(self, *, algorithm: Any, result: Mapping[str, Any], **kwargs: Any) -> None:
        """Set the gauges of an iteration."""
        run = Path(algorithm.logdir).name
        for name, domain, value in found_in(result):
            self._gauges[name].set(value, {"run": run, "domain": domain})


wandb, mlflow, prometheus = Wandb, MLflow, Prometheus


def _line_of(error: Exception) -> str:
    """Return the first line of an error; servers and clients may repeat what they were given, so no secrets."""
    line = next(iter(str(error).strip().splitlines()), "")
    return str(without_secrets(f"{type(error).__name__}: {line}"))
