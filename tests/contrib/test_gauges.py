"""Gauges: which metrics they are, and a run whose numbers Prometheus can read from Ray."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
import ray

from rllib_srl.contrib.trackers import GAUGES, found_in
from tests.small_worlds import small_config
from tests.waiting import wait_until


def test_metrics_become_gauges_with_their_domain() -> None:
    result = {
        "rollout": {"lag_mean": 1.5, "lag_max": 2},
        "env_runners": {"live_token_share": 0.5},
        "evaluation": {"accuracy": 0.6, "by_domain": {"a/b": {"accuracy": 0.75, "num": 4}}},
        "planner": {"forgetting": 0.1},
        "retention": {"by_domain": {"even": {"kl": 0.02}}},
        "weight_sync": {"canary_max": 0.001, "canary_mean": 0.0},
    }
    found = {(name, domain): value for name, domain, value in found_in(result)}
    assert found == {
        ("lag", ""): 1.5, ("live_share", ""): 0.5, ("accuracy", "a/b"): 0.75, ("forgetting", ""): 0.1,
        ("retention_kl", "even"): 0.02, ("canary_gap", ""): 0.001,
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
def test_prometheus_reads_the_numbers_of_a_run(random_llama_dir: Path, tmp_path: Path, ray_here: object) -> None:
    config = small_config(random_llama_dir, tmp_path / "mine").evaluation(evaluation_interval=1)
    algo = config.callbacks("contrib.trackers:prometheus").build_algo()
    try:
        result = algo.train()
        wanted = {name for name, _, _ in found_in(result)}
        assert wanted == {"live_share", "accuracy", "canary_gap"}
        values: dict[str, str] = {}

        def are_there() -> bool:
            values.update(line.rsplit(" ", 1) for line in scraped() if 'run="mine"' in line)
            return {name.partition("{")[0].removeprefix("ray_rllib_srl_") for name in values} == wanted

        assert wait_until(are_there, 90), values
        (share,) = [float(value) for name, value in values.items() if "live_share{" in name]
        assert share == pytest.approx(result["env_runners"]["live_token_share"])
        assert any("accuracy{" in name and 'domain="even"' in name for name in values), values
    finally:
        algo.stop()
