"""A run on a Ray cluster that grows on demand: python -m tests.algorithm.growing_cluster DIRECTORY RAY_DIRECTORY.

In a process of its own, because a test process can have one Ray only. DIRECTORY/out.json says what happened. The
caller ends the cluster's processes, which have RAY_DIRECTORY in their command: they do not end with this one.

Ray's `AutoscalingCluster` starts and ends with `ray stop --force`, which would end every Ray of this machine. A
stand-in for the command `ray` leaves that out, and gives the cluster a port and a directory of its own. Its settings
are in a file that Ray's wheels lack (`fake_multi_node/example.yaml`), so they are here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = OWN = sys.argv[2]  # of other Rays nothing is seen or changed
os.environ.update(RAY_worker_niceness="0")  # 15 by default: on a busy machine workers would wait for minutes

import ray  # after the directory was set
from ray.cluster_utils import AutoscalingCluster

from rllib_srl.algorithm.resources import PlacementError
from tests.conftest import ROOT
from tests.engine.small_llama import save_random_llama
from tests.small_worlds import small_config

HEAD = "ray.head.default"  # what Ray's fake provider calls it
STAND_IN = """#!{python}
import os, sys
if sys.argv[1] != "stop":
    own = ["--port={port}", "--include-dashboard=false", "--temp-dir={directory}", "--disable-usage-stats"]
    os.execv({ray!r}, [{ray!r}, *sys.argv[1:], *own])
"""


class GrowingCluster(AutoscalingCluster):
    """Ray's cluster with a fake autoscaler, whose nodes are processes of this machine."""

    def _generate_config(self, head_resources: dict, worker_node_types: dict, **settings: Any) -> dict[str, Any]:
        del settings["autoscaler_v2"]
        lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "growing",
            "max_workers": 2,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 5,
            "auth": {"ssh_user": "nobody"},
            "docker": {},
            "head_node_type": HEAD,
            "available_node_types": {**worker_node_types, HEAD: head},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            **{f"{name}_commands": [] for name in lists},
            **settings,
        }


def started() -> str:
    """Start a head without places, and an autoscaler that adds nodes of one place; return its address."""
    with socket.socket() as one:
        one.bind(("", 0))
        port = one.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    stand_in = Path(OWN, "bin", "ray")
    stand_in.parent.mkdir()
    own = {"python": sys.executable, "port": port, "directory": OWN, "ray": str(Path(sys.executable).with_name("ray"))}
    stand_in.write_text(STAND_IN.format(**own))
    stand_in.chmod(0o755)
    os.environ["PATH"] = f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}"
    place = {"resources": {"CPU": 1, "seat": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}
    provider = {
        "type": "fake_multinode",
        "gcs_address": address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    GrowingCluster({"CPU": 0}, {"place": place}, provider=provider).start()
    return address


def grown(directory: Path) -> dict[str, Any]:
    """Build and train a run that needs two nodes more than there are."""
    ray.init(started(), log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
    before = [node["Resources"].get("seat", 0) for node in ray.nodes() if node["Alive"]]
    config = small_config(directory / "model", directory / "log").training(start_timeout_s=200.0)
    config.env_runners(num_env_runners=2, num_cpus_per_env_runner=1, custom_resources_per_env_runner={"seat": 1})
    try:
        config.copy(copy_frozen=False).build_algo()
        refused = ""
    except PlacementError as error:
        refused = str(error)
    begin = time.monotonic()
    algo = config.training(check_resources=False).build_algo()
    start_s = time.monotonic() - begin
    results = [algo.train() for _ in range(2)]
    nodes = {node["NodeID"]: node["Resources"].get("seat", 0) for node in ray.nodes() if node["Alive"]}
    found = {
        "before": before,
        "refused": refused,
        "seats_of_runners": [nodes[algo.runners._place_of[i].node] for i in algo.runners.ids],
        "nodes_of_runners": len({algo.runners._place_of[i].node for i in algo.runners.ids}),
        "num_groups": [one["env_runners"]["num_groups"] for one in results],
        "start_s": start_s,
    }
    algo.stop()
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    save_random_llama(where / "model")
    (where / "out.json").write_text(json.dumps(grown(where)))
    ray.shutdown()
