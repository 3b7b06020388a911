"""Runs on a Ray cluster, of which a node is killed: python -m tests.algorithm.lost_nodes NAME DIRECTORY.

In a process of its own, because a test process can have one Ray only. DIRECTORY/out.json says what happened.
"""

from __future__ import annotations

import hashlib
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
from ray.core.generated import autoscaler_pb2

from rllib_srl.algorithm import checkpointing
from rllib_srl.algorithm.resources import draining_nodes
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.rollout.env_runner import LLMEnvRunner
from tests.conftest import ROOT
from tests.engine.small_llama import save_random_llama
from tests.small_memory import check_shards, memory_config, watched, weights_of

SOON_S = 120.0


def wait_for(is_there: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    deadline = time.monotonic() + SOON_S
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


class WaitingLearner(GRPOTorchLearner):
    """Says in the middle of its fourth update that it is there, and waits for the death of a node."""

    num_updates = 0

    def _accumulate_gradients(self):
        sums = super()._accumulate_gradients()
        self.num_updates += 1
        flag = Path(self.config.env_config["flag"])
        if self.num_updates == 4 and not flag.exists():
            flag.touch()
            time.sleep(15)
        return sums


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


class WaitingAhead(LLMEnvRunner):
    """Says after a slice with the weights of the second update that it is there, if it is the second, and waits."""

    def advance(self, *args, **kwargs):
        played = super().advance(*args, **kwargs)
        flag = Path(self.config.env_config["flag"])
        if self.engine.version >= 2 and self.worker_index == 2 and played.num_unfinished and not flag.exists():
            flag.touch()
            time.sleep(15)
        return played


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
                "version": algo.version,
                "weights": hashlib.sha256(weights_of(algo).tobytes()).hexdigest(),
                "counts": counts,
                "replay": {n: v for n, v in result["replay"].items() if n.startswith("num_")},
                "num_groups": result["env_runners"]["num_groups"],
                "num_learners": algo.learners.num,
                "runners": list(algo.runners.ids),
                "seconds": time.monotonic() - begin,
            }
        )
        print(done[-1], flush=True)
    return done


def drained(algo: Any, cluster: Cluster, node: Any) -> list[dict[str, Any]]:
    """Announce the end of a node, in ten minutes, as clouds do, and run one iteration."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = time.time_ns() // 1_000_000 + 600_000
    client = ray._raylet.GcsClient(address=cluster.address)
    is_accepted, why = client.drain_node(node.node_id, reason, "pre-empted", deadline_ms)
    assert is_accepted, why
    wait_for(lambda: node.node_id in draining_nodes())
    return gone_through(algo, 1)


def learner(directory: Path) -> dict[str, Any]:
    """Drain and kill the node of one of two learners in the fourth update; resume its checkpoint with one learner."""
    checkpointing.REPLACE_S = 10.0
    with cluster_of("learner") as (cluster, nodes):
        config = config_in(directory).learners(
            num_learners=2, learner_class=WaitingLearner, custom_resources_per_learner={"learner": 1}
        )
        config.env_runners(custom_resources_per_env_runner={"head": 1})  # it survives
        algo = config.copy(copy_frozen=False).build_algo()
        with killed(cluster, nodes[1], directory / "flag"):
            begun = gone_through(algo, 2)
            begun += drained(algo, cluster, nodes[1])
            shutil.copytree(directory / "log/checkpoint_000003", directory / "three")
            rebuilt = gone_through(algo, 2)
        check_shards(algo)
        algo.stop()
        config.learners(num_learners=1).training(log_directory=str(directory / "other"))
        other = config.build_algo()
        other.restore_from_path(directory / "three")
        resumed = gone_through(other, 2)
        other.stop()
    return {"begun": begun, "rebuilt": rebuilt, "resumed": resumed}


def runner(directory: Path) -> dict[str, Any]:
    """Kill the node of the second of two runners in the third rollout; one iteration later replace it."""
    return _without_a_runner(directory, config_in(directory).env_runners(env_runner_cls=WaitingRunner))


def ahead(directory: Path) -> dict[str, Any]:
    """The same with runners that play ahead: the node dies in mid-slice, with groups in play."""
    config = config_in(directory).env_runners(env_runner_cls=WaitingAhead, max_lag=1, slice_s=0.05, max_turns=3)
    config.environment(env_config={**config.env_config, "slow_s": 0.3})
    return _without_a_runner(directory, config.replay(revisit_fraction=0.0))


def _without_a_runner(directory: Path, config: Any) -> dict[str, Any]:
    with cluster_of("runner") as (cluster, nodes):
        config.env_runners(num_env_runners=2, custom_resources_per_env_runner={"runner": 1})
        algo = config.learners(num_learners=0).training(checkpoint_every=0).build_algo()
        doomed = algo.runners._place_of[2].node
        (node,) = [node for node in nodes if node.node_id == doomed]
        with watched(algo) as iterations:
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
        outstanding = algo.ahead.outstanding if algo.ahead is not None else []
        groups = {
            "taken": [[meta.group_id, meta.prompt.key] for one in iterations for meta in one.metas],
            "in_play": [[one.group_id, one.prompt.key] for one in outstanding],
        }
        gap, missing = algo.weight_sync.sync(algo.version)
        check_shards(algo)
        algo.stop()
    return {"begun": begun, "lost": lost, "back": back, "gap": gap.max, "missing": list(missing), **groups}


if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    save_random_llama(where / "model")
    try:
        out = {"learner": learner, "runner": runner, "ahead": ahead}[name](where)
        (where / "out.json").write_text(json.dumps(out))
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
