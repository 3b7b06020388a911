"""Trackers: what they are sent, failures, the values that real ones store offline, and the gauges of Prometheus.

The real ones need their packages, which the working set does not hold: `scripts/test.sh --all` makes an environment.
"""

import json
import logging
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rllib_srl import SRLConfig
from rllib_srl.contrib.trackers import GAUGES, Tracker, TrackerError, found_in, settings_to_log
from tests.small_envs import small_config
from tests.waiting import wait_until

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
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    config = SRLConfig().callbacks("contrib.trackers:wandb")
    with pytest.raises(TrackerError, match=r"needs the package wandb: pip install 'rllib_srl\[wandb\]'"):
        config.callbacks_class().on_algorithm_init(algorithm=algorithm(tmp_path))


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
    from mlflow import MlflowClient

    run = (client := MlflowClient()).get_run(run_id)
    assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.0003"
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, REWARD)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_real_tracker_stores_a_run_and_its_continuation(name, ray_here, tmp_path, monkeypatch):
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


def test_metrics_become_gauges_with_their_domain() -> None:
    result = {
        "rollout": {"lag_mean": 1.5, "lag_max": 2},
        "env_runners": {"live_token_share": 0.5},
        "evaluation": {"accuracy": 0.6, "by_domain": {"a/b": {"accuracy": 0.75, "num": 4}}},
        "planner": {"forgetting": 0.1},
        "retention": {"by_domain": {"even": {"nll": 0.02}}},
        "weight_sync": {"canary_max": 0.001, "canary_mean": 0.0},
    }
    found = {(name, domain): value for name, domain, value in found_in(result)}
    assert found == {
        ("lag", ""): 1.5, ("live_share", ""): 0.5, ("accuracy", "a/b"): 0.75, ("forgetting", ""): 0.1,
        ("retention_nll", "even"): 0.02, ("canary_gap", ""): 0.001,
    }  # fmt: skip
    assert {name for name, _ in found} == set(GAUGES)


def scraped() -> list[str]:
    """Return the lines of this node's metrics of ours, in Prometheus' text form; [] while there are none."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith("ray_rllib_srl_")]
    return []


@pytest.mark.slow
def test_prometheus_reads_the_numbers_of_a_run(random_llama_dir: Path, tmp_path: Path, ray_here: object, build) -> None:
    config = small_config(random_llama_dir, tmp_path).evaluation(evaluation_interval=1)
    algo = build(config.callbacks("contrib.trackers:prometheus"))
    result = algo.train()
    wanted = {name for name, _, _ in found_in(result)}
    assert wanted == {"live_share", "accuracy", "canary_gap"}
    values: dict[str, str] = {}

    def are_there() -> bool:
        values.update(line.rsplit(" ", 1) for line in scraped() if 'run="log0"' in line)
        return {name.partition("{")[0].removeprefix("ray_rllib_srl_") for name in values} == wanted

    assert wait_until(are_there, 90), values
    (share,) = [float(value) for name, value in values.items() if "live_share{" in name]
    assert share == pytest.approx(result["env_runners"]["live_token_share"])
    assert any("accuracy{" in name and 'domain="even"' in name for name in values), values
