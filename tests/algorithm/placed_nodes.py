"""A run on a Ray cluster of a head and three nodes: python -m tests.algorithm.placed_nodes DIRECTORY.

In a process of its own, because a test process can have one Ray only. DIRECTORY/out.json says where its processes are.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # of other Rays nothing is seen or changed
os.environ.update(RAY_worker_niceness="0")  # 15 by default: on a busy machine workers would wait for minutes

import ray  # after the directory was set
from ray.cluster_utils import Cluster

from tests.conftest import ROOT
from tests.engine.small_llama import save_random_llama
from tests.small_worlds import small_config


def places(directory: Path) -> dict[str, Any]:
    """Start three runners and two learners on three nodes, train once, stop; say which node each was on."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2, resources={"seat": 3}).node_id for _ in range(3)]
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        config = small_config(directory / "model", directory / "log").training(start_timeout_s=200.0)
        config.env_runners(num_env_runners=3, num_cpus_per_env_runner=0, custom_resources_per_env_runner={"seat": 1})
        algo = config.learners(num_learners=2, num_cpus_per_learner=1).build_algo()
        result = algo.train()
        workers = algo.learner_group._backend_executor.worker_group.workers
        found = {
            "nodes": nodes,
            "runners": [algo.runners._place_of[i].node for i in algo.runners.ids],
            "learners": [worker.metadata.node_id for worker in workers],
            "num_groups": result["env_runners"]["num_groups"],
        }
        algo.stop()
        tables = ray.util.placement_group_table().values()
        return {**found, "left": [one["state"] for one in tables if one["state"] != "REMOVED"]}
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    save_random_llama(where / "model")
    try:
        (where / "out.json").write_text(json.dumps(places(where)))
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
