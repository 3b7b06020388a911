"""A node of a Ray cluster is killed: the run goes on without its runner, and takes it back on another node.

    python -m tests.algorithm.lost_nodes DIRECTORY

In its own process, because a test process can have one Ray only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # of other Rays nothing is seen or changed
os.environ.update(RAY_worker_niceness="0")  # 15 by default: on a busy machine workers would wait for minutes

import ray  # after the directory was set
from ray.cluster_utils import Cluster

from rllib_srl.rollout.env_runner import LLMEnvRunner
from tests.conftest import ROOT
from tests.engine.small_llama import save_random_llama
from tests.small_memory import check_memory, memory_config, watched
from tests.waiting import wait_until

SOON_S = 120.0


class WaitingRunner(LLMEnvRunner):
    """Says in its third rollout that it is there, and waits for the death of its node, if it is the second runner."""

    num_played = 0

    def play_groups(self, *args, **kwargs):
        groups = super().play_groups(*args, **kwargs)
        self.num_played += 1
        flag = Path(self.config.env_config["flag"])
        if self.num_played == 3 and self.worker_index == 2 and not flag.exists():
            flag.touch()
            time.sleep(15)
        return groups


def config_in(directory: Path) -> Any:
    """Return settings of a small run with a memory and two runners on their own nodes."""
    config = memory_config(directory / "model", directory / "log", groups_per_item=99, max_logp_gap=None)
    config.environment(env_config={"num_prompts": 400, "flag": str(directory / "flag")})
    config.env_runners(num_env_runners=2, num_transcripts=0, env_runner_cls=WaitingRunner)
    config.env_runners(custom_resources_per_env_runner={"runner": 1}).learners(num_learners=0)
    return config.training(start_timeout_s=200.0, update_timeout_s=120.0, sync_timeout_s=120.0)


def count_of(result: dict[str, Any], name: str) -> int:
    return int(result.get(f"num_{name}", 0))


def lose_a_runner(cluster: Cluster, nodes: list[Any], directory: Path) -> None:
    """Kill the node of the second runner in the third rollout; two iterations later add another node."""
    algo = config_in(directory).build_algo()
    (node,) = [node for node in nodes if node.node_id == algo.runners._place_of[2].node]
    flag, results = directory / "flag", []

    def train() -> dict[str, Any]:
        results.append(algo.train())
        print(results[-1]["training_iteration"], algo.runners.ids, flush=True)
        return results[-1]

    def kill() -> None:
        assert wait_until(flag.exists, SOON_S)
        cluster.remove_node(node, allow_graceful=False)

    with watched(algo):
        killer = threading.Thread(target=kill)
        killer.start()
        for _ in range(2):
            train()
            assert algo.runners.ids == [1, 2]
        for _ in range(2):
            start, lost = time.monotonic(), train()
            assert algo.runners.ids == [1]
            assert time.monotonic() - start < SOON_S  # it does not wait for a node that is dead
        killer.join()
        names = ("runners_lost", "groups_played_again", "runner_restarts")
        assert [count_of(lost, name) for name in names] == [1, 2, 0]
        cluster.add_node(num_cpus=1, resources={"runner": 1})
        deadline = time.monotonic() + SOON_S
        while len(algo.runners.ids) < 2 and time.monotonic() < deadline:
            time.sleep(1)
            train()
        back = train()
    assert algo.runners.ids == [1, 2] and count_of(back, "runner_restarts") == 1
    assert [result["training_iteration"] for result in results] == list(range(1, len(results) + 1))
    assert {result["env_runners"]["num_groups"] for result in results} == {4}
    gap, missing = algo.weight_sync.sync(algo.version)
    assert gap.max < 1e-3 and not missing
    check_memory(algo)
    algo.stop()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    save_random_llama(where / "model")
    head = {"num_cpus": 2, "resources": {"head": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, resources={"runner": 1}) for _ in range(2)]
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        lose_a_runner(cluster, nodes, where)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
