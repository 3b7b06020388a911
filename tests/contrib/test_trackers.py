"""Trackers: what they are sent, failures, and the values that real ones store offline.

The real ones need their packages, which the working set does not hold: `scripts/test.sh --all` makes an environment.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback

from rllib_srl import SRLConfig
from rllib_srl.cli.shared.shown_settings import settings_to_log
from rllib_srl.contrib.trackers import Tracker, TrackerError
from tests.small_worlds import small_config

REWARD = "env_runners/episode_return_mean"


def test_settings_are_logged_flat_and_without_secrets() -> None:
    env_config = {
        "num_shots": 0, "reward_headers": {"Authorization": "Bearer abc", "Accept": "json"},
        "reward_url": "https://me:hunter2@host/grade", "api_key": "abc", "max_tokens": 7, "note": "password=hunter22",
    }  # fmt: skip
    config = SRLConfig().environment("compare", env_config=env_config).training(lr=1e-4, seal_key_file="/my/key")
    told = settings_to_log(config)
    assert told["env"] == "compare" and told["lr"] == 1e-4 and told["env_config.num_shots"] == 0
    assert told["model"] == "smollm2-135m" and told["env_config.max_tokens"] == 7
    assert told["env_config.reward_headers.Accept"] == "json"
    assert "abc" not in (text := json.dumps(told)) and "hunter" not in text
    assert "seal_key_file" not in told


class Flaky(Tracker):
    """A tracker whose calls fail while `is_down`."""

    name = "flaky"

    def __init__(self) -> None:
        super().__init__()
        self.is_down, self.num_finished, self.rows = False, 0, list[tuple[int, float]]()

    def start(self, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> tuple[str, str]:
        assert (settings["seed"], settings["lr"]) == (5, 1e-6)
        if run_id == "r2":
            raise PermissionError("the key Bearer abc is refused\nand more")
        self.run_id = "r1" if run_id is None else "r2"
        return self.run_id, "here"

    def send(self, iteration: int, numbers: Mapping[str, float]) -> None:
        if self.is_down:
            raise ConnectionError("no route, password=hunter22")
        self.rows.append((iteration, numbers["x"]))

    def finish(self) -> None:
        self.num_finished += 1


def algorithm(directory: Path) -> Any:
    config = SRLConfig().environment("compare")
    return SimpleNamespace(config=config, logdir=str(directory), seed=5, iteration=0)


def log(tracker: Tracker, algo: Any, iteration: int) -> None:
    algo.iteration = iteration
    tracker.on_train_result(algorithm=algo, result={"x": float(iteration), "config": {"y": 1}})


def test_rows_of_a_tracker_that_fails_wait_and_are_sent_in_order(tmp_path: Path, caplog) -> None:
    one, algo = Flaky(), algorithm(tmp_path)
    one.on_algorithm_init(algorithm=algo)
    log(one, algo, 1)
    one.is_down = True
    with caplog.at_level(logging.WARNING):
        log(one, algo, 2)
        log(one, algo, 3)
    (line,) = [record.getMessage() for record in caplog.records]  # one for the failure, not one for each row
    assert line.startswith("flaky failed (ConnectionError: no route") and "hunter" not in line
    assert one.rows == [(1, 1.0)]
    one.is_down = False
    log(one, algo, 4)
    assert one.rows == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    one.is_down = True
    log(one, algo, 5)
    for _ in range(2):
        one.on_stop(algorithm=algo)
    assert caplog.records[-1].getMessage() == "flaky: 1 iterations were not sent" and one.num_finished == 1


def test_the_run_of_a_directory_is_continued_and_one_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    for run_id in ("r1", "r2"):
        one = Flaky()
        one.on_algorithm_init(algorithm=algorithm(tmp_path))
        assert one.run_id == run_id == (tmp_path / "tracker-flaky.txt").read_text().strip()
    with pytest.raises(TrackerError, match=r"trackers:flaky cannot start: PermissionError: the key.*refused$"):
        Flaky().on_algorithm_init(algorithm=algorithm(tmp_path))
    Flaky().on_stop(algorithm=algorithm(tmp_path))  # never started: nothing to finish


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    config = SRLConfig().callbacks("contrib.trackers:trackio")
    with pytest.raises(TrackerError, match=r"needs the package trackio: pip install 'rllib_srl\[trackio\]'"):
        config.callbacks_class().on_algorithm_init(algorithm=algorithm(tmp_path))


class Noted(Tracker):
    """Notes what it was called with."""

    name = "noted"
    calls: ClassVar[list[Any]] = []

    def start(self, directory: Path, settings: Mapping[str, Any], run_id: str | None) -> tuple[str, str]:
        self.calls.append(run_id)
        return "r1", "here"

    def send(self, iteration: int, numbers: Mapping[str, float]) -> None:
        self.calls.append((iteration, numbers[REWARD]))

    def finish(self) -> None:
        self.calls.append("end")


@pytest.mark.slow
def test_a_run_sends_each_iteration_and_ends_its_tracker(random_llama_dir: Path, tmp_path: Path, ray_here: Any) -> None:
    algo = small_config(random_llama_dir, tmp_path).callbacks([Noted, RLlibCallback]).build_algo()
    try:
        rewards = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(2)]
    finally:
        algo.stop()
    assert Noted.calls == [None, (1, rewards[0]), (2, rewards[1]), "end"]


def wandb_rows(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of W&B's offline files: LevelDB's log format, records of protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # whole, or the last part
                record, parts = Record.FromString(parts), b""
                if record.WhichOneof("record_type") == "history":
                    items = record.history.item
                    yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def stored(name: str, directory: Path) -> list[tuple[int, float]]:
    """Return (iteration, reward) as the tracker has stored them, in order."""
    run_id = (directory / f"tracker-{name}.txt").read_text().strip()
    if name == "wandb":
        return [(row["iteration"], row[REWARD]) for row in wandb_rows(directory)]
    if name == "mlflow":
        from mlflow import MlflowClient

        run = (client := MlflowClient()).get_run(run_id)
        assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.0003"
        return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, REWARD)]
    from trackio.sqlite_storage import SQLiteStorage

    return [(row["step"], row[REWARD]) for row in SQLiteStorage.get_logs("rllib_srl", run_id)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_real_tracker_stores_a_run_and_its_continuation(name, ray_here, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    pytest.importorskip(name, reason=f"{name} is not installed: rllib_srl[{name}]")
    directory = tmp_path / "run"
    config = (
        SRLConfig()
        .environment("compare", env_config={"num_shots": 0})
        .rl_module(model_config={"model": "tiny"})
        .env_runners(num_env_runners=0, engine="transformers", max_turn_tokens=8, max_episode_tokens=128)
        .training(num_prompts_per_batch=2, group_size=2, lr=3e-4, compute_dtype="float32", checkpoint_every=2)
        .training(log_directory=str(directory))
        .callbacks(f"contrib.trackers:{name}")
        .debugging(seed=3)
    )
    rewards = []
    for iterations in (2, 1):
        algo = config.copy(copy_frozen=False).build_algo()
        try:
            if iterations == 1:
                algo.restore_from_path(str(directory / "checkpoint_000002"))
            rewards += [algo.train()["env_runners"]["episode_return_mean"] for _ in range(iterations)]
        finally:
            algo.stop()
    found = stored(name, directory)
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx(rewards)
