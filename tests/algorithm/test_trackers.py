"""Trackers: their settings, what they are sent, failures, and the values that real ones store offline."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rllib_srl import SRLConfig
from rllib_srl.algorithm.settings import GROUPS, SETTINGS
from rllib_srl.algorithm.tracking.choice import PACKAGES, TENSORBOARD, TRACKERS, TrackerChoice, faults_of_tracker
from rllib_srl.algorithm.tracking.clients import CLIENTS, TrackerError
from rllib_srl.algorithm.tracking.tracking import RUNS, Tracking, settings_to_log, start_tracking
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.cli.shared.settings import read_value
from rllib_srl.storage.event_file import EventFile

REWARD = "env_runners/episode_return_mean"


def config_with(tracker: Any) -> SRLConfig:
    return SRLConfig().environment("compare").training(tracker=tracker)


def faults(tracker: Any) -> list[str]:
    return [line for line in faults_of(config_with(tracker)) if line.startswith("tracker")]


# --- the setting


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("tracker", "expected"),
    [
        (None, []),
        ("tensorboard", []),
        (["wandb", "mlflow"], []),
        ({"name": "wandb", "project": "x", "entity": "me", "mode": "offline", "group": "g", "run": "r"}, []),
        ({"name": ["mlflow", "tensorboard"], "uri": "sqlite:///a.db"}, []),
        ("wandbb", ["tracker = 'wandbb'; expected one of tensorboard, wandb, mlflow, trackio, a list of them, or"]),
        (["wandb", "wandb"], ["tracker = ['wandb', 'wandb']; expected one of"]),
        ([], ["tracker = []; expected one of"]),
        ({"name": "wandb", "uri": "x"}, ["tracker.uri = 'x'; expected it only with tracker = 'mlflow', not 'wandb'"]),
        ({"name": "tensorboard", "run": "x"}, ["tracker.run = 'x'; expected it only with tracker = 'wandb' or"]),
        ({"name": "wandb", "project": " "}, ["tracker.project = ' '; expected a text that is not empty"]),
        ({"name": "wandb", "mode": "dry"}, ["tracker.mode = 'dry'; expected one of 'online', 'offline', or None"]),
        ({"name": "wandb", "projet": "x"}, ["tracker.projet = 'x'; expected some of project, run, group"]),
    ],
)
def test_faults_of_the_setting(tracker: Any, expected: list[str]) -> None:
    found = faults(tracker)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    "tracker",
    [{"name": "wandb", "api_key": "s3cret"}, {"name": "mlflow", "uri": "https://me:s3cret@host/x"}],
)
def test_secrets_are_refused_and_not_repeated(tracker: Any) -> None:
    (line,) = faults(tracker)
    assert "s3cret" not in line and "expected" in line


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    expected = f"tracker = '{name}'; expected the package {name}: pip install 'rllib_srl[{name}]'"
    assert list(faults_of_tracker(config_with([TENSORBOARD, name]).flat())) == [expected]


def test_flags_and_files_write_it_in_three_ways() -> None:
    assert read_value("tracker", ["wandb"]) == "wandb"
    assert read_value("tracker", ["wandb", "mlflow"]) == ["wandb", "mlflow"]
    assert read_value("tracker", ["name=wandb", "project=x"]) == {"name": "wandb", "project": "x"}
    assert read_value("tracker", {"name": ["wandb", "mlflow"], "project": "x"})["name"] == ["wandb", "mlflow"]
    assert SETTINGS["tracker"].default is None


def test_the_choice_has_the_runs_name_unless_one_is_given() -> None:
    flat = config_with({"name": "mlflow", "project": "x"}).flat()
    choice = TrackerChoice.of(flat, "sums-1")
    assert (choice.names, choice.project, choice.run, choice.uri) == (("mlflow",), "x", "sums-1", None)
    assert TrackerChoice.of(config_with({"name": "wandb", "run": "mine"}).flat(), "sums-1").run == "mine"


# --- what is logged


def test_settings_are_logged_flat_and_without_secrets() -> None:
    env_config = {
        "num_shots": 0,
        "reward_headers": {"Authorization": "Bearer abc", "Accept": "json"},
        "reward_url": "https://me:hunter2@host/grade",
        "api_key": "abc",
        "max_tokens": 7,
        "note": "password=hunter22",
    }
    config = SRLConfig().environment("compare", env_config=env_config).training(lr=1e-4, seal_key_file="/my/key")
    told = settings_to_log(config)
    assert told["env"] == "compare" and told["lr"] == 1e-4 and told["env_config.num_shots"] == 0
    assert told["model"] == "smollm2-135m" and told["env_config.max_tokens"] == 7
    assert told["env_config.reward_headers.Accept"] == "json"
    assert "abc" not in (text := json.dumps(told)) and "hunter" not in text
    assert "seal_key_file" not in told and "tracker" not in told


class Flaky:
    """A tracker whose calls fail while `is_down`."""

    run_id, place = "r1", "here"

    def __init__(self, *_: Any) -> None:
        self.is_down, self.is_closed, self.rows = False, False, list[tuple[int, Mapping[str, float]]]()

    def log(self, iteration: int, numbers: Mapping[str, float]) -> None:
        if self.is_down:
            raise ConnectionError("no route, password=hunter22")
        self.rows.append((iteration, numbers))

    def close(self) -> None:
        self.is_closed = True


def test_rows_of_a_tracker_that_fails_wait_and_are_sent_in_order(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Flaky(), Flaky()
    both = Tracking({"a": one, "b": other})
    both.log(1, {"x": 1.0})
    one.is_down = True
    with caplog.at_level(logging.WARNING):
        both.log(2, {"x": 2.0})
        both.log(3, {"x": 3.0})
    (line,) = [record.getMessage() for record in caplog.records]  # one for the failure, not one for each row
    assert line.startswith("tracker 'a' failed (ConnectionError: no route") and "hunter" not in line
    assert [number for number, _ in one.rows] == [1] and [number for number, _ in other.rows] == [1, 2, 3]
    one.is_down = False
    both.log(4, {"x": 4.0})
    assert [(number, row["x"]) for number, row in one.rows] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_rows_that_were_never_sent_are_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    one = Flaky()
    only = Tracking({"a": one})
    one.is_down = True
    with caplog.at_level(logging.WARNING):
        only.log(1, {})
        only.log(2, {})
        only.close()
        only.close()
    assert caplog.records[-1].getMessage().endswith("; 2 iterations were not sent")
    assert len(caplog.records) == 2 and one.is_closed


def test_the_trackers_runs_are_kept_beside_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def start(choice: TrackerChoice, directory: Path, told: Mapping[str, Any], run_id: str | None) -> Flaky:
        assert (choice.project, directory, told["seed"], told["lr"]) == ("p", tmp_path, 5, 1e-6)
        asked.append(run_id)
        return Flaky()

    monkeypatch.setitem(CLIENTS, "wandb", start)
    config = config_with({"name": "wandb", "project": "p"})
    for _ in range(2):
        start_tracking(config, tmp_path, 5, lambda: EventFile(tmp_path)).close()
    assert asked == [None, "r1"] and json.loads((tmp_path / RUNS).read_text()) == {"wandb": "r1"}
    (tmp_path / RUNS).write_text("{")
    with pytest.raises(TrackerError, match="cannot be read"):
        start_tracking(config, tmp_path, 5, lambda: EventFile(tmp_path))


def test_a_tracker_that_cannot_start_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Flaky()

    def fail(*_: Any) -> Flaky:
        raise PermissionError("the key Bearer abc is refused\nand more")

    monkeypatch.setitem(CLIENTS, "wandb", lambda *_: first)
    monkeypatch.setitem(CLIENTS, "mlflow", fail)
    with pytest.raises(TrackerError, match="tracker = 'mlflow' cannot start: PermissionError: the key.*refused$"):
        start_tracking(config_with(["wandb", "mlflow"]), tmp_path, 5, lambda: EventFile(tmp_path))
    assert first.is_closed and not (tmp_path / RUNS).exists()


# --- the real ones, offline

class Tracked(NamedTuple):
    """A run of two iterations and its continuation by one, with every tracker that is installed."""

    directory: Path
    uri: str
    rewards: list[float]


@pytest.fixture(scope="module")
def tracked(ray_here: Any, tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    place = tmp_path_factory.mktemp("tracked")
    directory, uri = place / "run", f"sqlite:///{place}/mlflow.db"
    installed = [name for name in TRACKERS if name not in PACKAGES or importlib.util.find_spec(PACKAGES[name])]
    given = {"project": "sums", "mode": "offline", "uri": uri}
    is_read = {key: set(installed) & {*GROUPS["tracker"].readers(key)} for key in given}
    tracker = {"name": installed, **{key: one for key, one in given.items() if is_read[key]}}
    config = (
        SRLConfig()
        .environment("compare", env_config={"num_shots": 0})
        .rl_module(model_config={"model": "tiny"})
        .env_runners(num_env_runners=0, engine="transformers", max_turn_tokens=8, max_episode_tokens=128)
        .training(num_prompts_per_batch=2, group_size=2, lr=3e-4, compute_dtype="float32", checkpoint_every=2)
        .training(log_directory=str(directory), tracker=tracker)
        .debugging(seed=3)
    )
    rewards = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(place / "trackio"))  # read when trackio is imported
        for iterations in (2, 1):
            algo = config.copy(copy_frozen=False).build_algo()
            try:
                if iterations == 1:
                    algo.restore_from_path(str(directory / "checkpoint_000002"))
                rewards += [algo.train()["env_runners"]["episode_return_mean"] for _ in range(iterations)]
            finally:
                algo.stop()
    return Tracked(directory, uri, rewards)


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


def stored(name: str, directory: Path, uri: str) -> list[tuple[int, float]]:
    """Return (iteration, reward) as the tracker has stored them, in order."""
    runs = json.loads((directory / RUNS).read_text()) if name != TENSORBOARD else {}
    if name == "wandb":
        return [(row["iteration"], row[REWARD]) for row in wandb_rows(directory)]
    if name == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        run = client.get_run(runs[name])
        assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.0003"
        return [(metric.step, metric.value) for metric in client.get_metric_history(runs[name], REWARD)]
    if name == "trackio":
        from trackio.sqlite_storage import SQLiteStorage

        return [(row["step"], row[REWARD]) for row in SQLiteStorage.get_logs("sums", runs[name])]
    found = []
    for path in sorted(directory.glob("events.out.*")):
        events = EventAccumulator(str(path))
        events.Reload()
        found += [(event.step, event.value) for event in events.Scalars(REWARD)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_a_real_tracker_stores_the_metrics_of_a_run_and_of_its_continuation(name: str, tracked: Tracked) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"{PACKAGES[name]} is not installed: rllib_srl[{name}]")
    found = stored(name, tracked.directory, tracked.uri)
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx(tracked.rewards)
