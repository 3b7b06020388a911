"""Runs on a Ray cluster whose nodes differ: python -m tests.algorithm.differing_nodes NAME DIRECTORY.

In a process of its own, because a test process can have one Ray only. DIRECTORY/out.json has the messages. All nodes
look for the model in ~/model, and each has a home, packages in front of the installed ones, and a name as a resource:

    node      home          packages
    head      head/
    same      head/
    model     model/                    another model in ~/model
    none      none/                     no model
    old       head/         old/        another version of transformers
    bare      head/         bare/       an rllib_srl without these modules
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # of other Rays nothing is seen or changed
os.environ.update(RAY_worker_niceness="0")  # 15 by default: on a busy machine workers would wait for minutes

import ray  # after the directory was set
from ray.cluster_utils import Cluster

from rllib_srl import SRL
from rllib_srl.algorithm.nodes import asking
from rllib_srl.algorithm.nodes.reports import NodeError
from tests.conftest import ROOT
from tests.engine.small_llama import save_random_llama
from tests.small_memory import memory_config

NODES = {
    "same": ("head", []),
    "model": ("model", []),
    "none": ("none", []),
    "old": ("head", ["old"]),
    "bare": ("head", ["bare"]),
}
CWD = Path("/proc/self/cwd")  # a path behind which processes see different directories, as on disks of their own


def prepare(directory: Path) -> None:
    """Write homes, packages and working directories."""
    for home, seed in (("head", 0), ("model", 1)):
        save_random_llama(directory / home / "model", seed=seed)
    old = directory / "old/transformers-4.0.1.dist-info"
    bare = directory / "bare/rllib_srl"
    for one in (directory / "none", bare / "algorithm", old, directory / "nodes", directory / "driver"):
        one.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.1\n")
    (bare / "__init__.py").write_text('__version__ = "0.0.1"\n')
    (bare / "algorithm/__init__.py").touch()


@contextmanager
def head_in(directory: Path) -> Iterator[Cluster]:
    """Start the head with the working directory nodes/, and connect to it from driver/."""
    os.environ.update(HOME=str(directory / "head"), PYTHONPATH=str(ROOT))
    os.chdir(directory / "nodes")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        os.chdir(directory / "driver")  # workers find modules in the driver's directory
        ray.init(cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_nodes(cluster: Cluster, directory: Path, names: Iterable[str] = NODES) -> list[Any]:
    """Start other nodes."""
    os.chdir(directory / "nodes")
    added = []
    for name in names:
        home, packages = NODES[name]
        paths = [*(directory / one for one in packages), *([] if name == "bare" else [ROOT])]
        variables = {"HOME": str(directory / home), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        added.append(cluster.add_node(num_cpus=1, resources={name: 1, "any": 1}, env_vars=variables))
    os.chdir(directory / "driver")
    return added


def config_on(directory: Path, name: str) -> Any:
    """Return settings of a small run whose runner needs a node with this resource."""
    config = memory_config("~/model", directory / "log")
    config.env_runners(num_env_runners=1, custom_resources_per_env_runner={name: 1})
    return config.learners(num_learners=0).training(checkpoint_every=0, start_timeout_s=200.0)


def sharded_on(directory: Path, name: str) -> Any:
    """Return settings of a run whose two learners need nodes with this resource and write shards."""
    config = config_on(directory, name)
    config.learners(num_learners=2, custom_resources_per_learner={name: 1})
    return config.training(fsdp=True, checkpoint_every=2)


def lines_of(action: Callable[[], Any]) -> list[str]:
    """Return the lines with which something is refused, [] if it is not."""
    try:
        action()
    except NodeError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


def checked(config: Any, where: Path) -> list[Any]:
    """Compare the nodes that a run may use."""
    config.validate()
    return asking.check_nodes(config, partial(super(SRL, SRL).default_resource_request, config), where)


def before(directory: Path) -> dict[str, Any]:
    """Compare the head alone, then with each node and with all."""
    out: dict[str, Any] = {}
    with head_in(directory) as cluster:
        asked: list[str] = []
        sent, start = asking._sent, time.process_time()
        asking._sent = lambda questions: asked.extend(questions) or sent(questions)
        out["alone"] = checked(config_on(directory, "any"), directory)
        out["alone_s"], out["alone_asked"] = time.process_time() - start, asked
        asking._sent = sent
        add_nodes(cluster, directory)
        for name in NODES:
            out[name] = lines_of(partial(checked, config_on(directory, name), directory))
        out["all"] = lines_of(partial(config_on(directory, "any").build_algo))
        out["shared"] = lines_of(partial(checked, sharded_on(directory, "same"), directory))
        out["apart"] = lines_of(partial(checked, sharded_on(directory, "same"), CWD))
        out["address"], out["transformers"] = ray.util.get_node_ip_address(), version("transformers")
        reports = checked(config_on(directory, "same"), directory)
        out["reports"] = [[one.model, one.num_gpus, one.num_cards, one.has_directory] for one in reports]
        out["left"] = sorted(one.name for one in directory.glob(".shared-*"))
    return out


def joined(directory: Path) -> dict[str, Any]:
    """Replace the node of one of two runners, then that of the other, by a node with another version of a package."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rllib_srl").addHandler(handler)
    with head_in(directory) as cluster:
        nodes = {node.node_id: node for node in add_nodes(cluster, directory, ["same", "same"])}
        algo = config_on(directory, "any").env_runners(num_env_runners=2, sample_timeout_s=60.0).build_algo()
        ids = [[*algo.runners.ids]]
        second, first = nodes[algo.runners.nodes[2]], nodes[algo.runners.nodes[1]]
        cluster.remove_node(second, allow_graceful=False)
        num_groups = [algo.train()["env_runners"]["num_groups"]]
        ids.append([*algo.runners.ids])
        add_nodes(cluster, directory, ["old"])
        deadline = time.monotonic() + 150
        while not any("plays no more" in line for line in lines) and time.monotonic() < deadline:
            num_groups.append(algo.train()["env_runners"]["num_groups"])
            time.sleep(1)
        ids.append([*algo.runners.ids])
        cluster.remove_node(first, allow_graceful=False)
        ended = lines_of(algo.train)
        algo.stop()
    return {"ids": ids, "num_groups": num_groups, "lines": lines, "ended": ended}


if __name__ == "__main__":
    name, where = sys.argv[1], Path(sys.argv[2])
    prepare(where)
    try:
        (where / "out.json").write_text(json.dumps({"before": before, "joined": joined}[name](where)))
    finally:
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
