"""Runs on a Ray cluster, of which a node is killed: python -m tests.algorithm.lost_nodes DIRECTORY.

In a process of its own, because a test process can have one Ray only. DIRECTORY/out.json says what happened.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

SOON_S = 120.0


def wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


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
    """Return settings of a small run with a memory on such a cluster."""
    config = memory_config(directory / "model", directory / "log", groups_per_item=99, max_logp_gap=None)
    config.environment(env_config={"num_prompts": 400, "flag": str(directory / "flag")})
    config.env_runners(num_env_runners=1, num_transcripts=0)
    return config.training(checkpoint_every=2, start_timeout_s=200.0, update_timeout_s=120.0, sync_timeout_s=120.0)


@contextmanager
def cluster_of(kind: str) -> Iterator[tuple[Cluster, list[Any]]]:
    """Start a head and two nodes that each have one resource `kind`, and connect to it."""
    head = {"num_cpus": 2, "resources": {"head": 1}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, resources={kind: 1}) for _ in range(2)]
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextmanager
def killed(cluster: Cluster, node: Any, flag: Path) -> Iterator[None]:
    """Kill a node, with all its processes, once a process has left the flag."""

    def kill() -> None:
        wait_for(flag.exists)
        cluster.remove_node(node, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def gone_through(algo: Any, num: int) -> list[dict[str, Any]]:
    """Train, and return what each iteration counted and left behind."""
    done = []
    for _ in range(num):
        begin = time.monotonic()
        result = algo.train()
        counts = {name: n for name, n in result.items() if name.startswith("num_")}
        done.append(
            {
                "iteration": result["training_iteration"],
                "counts": counts,
                "num_groups": result["env_runners"]["num_groups"],
                "runners": list(algo.runners.ids),
                "seconds": time.monotonic() - begin,
            }
        )
        print(done[-1], flush=True)
    return done


def without_a_runner(directory: Path) -> dict[str, Any]:
    """Kill the node of the second of two runners in the third rollout; one iteration later replace it."""
    config = config_in(directory).env_runners(env_runner_cls=WaitingRunner)
    with cluster_of("runner") as (cluster, nodes):
        config.env_runners(num_env_runners=2, custom_resources_per_env_runner={"runner": 1})
        algo = config.learners(num_learners=0).training(checkpoint_every=0).build_algo()
        doomed = algo.runners._place_of[2].node
        (node,) = [node for node in nodes if node.node_id == doomed]
        with watched(algo):
            with killed(cluster, node, directory / "flag"):
                begun = gone_through(algo, 2)
                lost = gone_through(algo, 2)
            cluster.add_node(num_cpus=1, resources={"runner": 1})
            back: list[dict[str, Any]] = []
            deadline = time.monotonic() + SOON_S
            while len(algo.runners.ids) < 2 and time.monotonic() < deadline:
                time.sleep(1)
                back += gone_through(algo, 1)
            back += gone_through(algo, 1)
        gap, missing = algo.weight_sync.sync(algo.version)
        check_memory(algo)
        algo.stop()
    return {"begun": begun, "lost": lost, "back": back, "gap": gap.max, "missing": list(missing)}


if __name__ == "__main__":
    where = Path(sys.argv[1])
    save_random_llama(where / "model")
    try:
        (where / "out.json").write_text(json.dumps(without_a_runner(where)))
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
