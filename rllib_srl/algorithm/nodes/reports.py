"""Compare the reports of a cluster's nodes with that of the driver's node: one line for each fault.

    NodeReport             what a node has: packages, torch's build, cards, model, the run's directory
    faults(...)            differences that end a run later, or let it train on something else
    directory_faults(...)  learners that write their shards where the driver cannot read them

Nothing here calls Ray; `asking.py` collects the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

PACKAGES = ("rllib_srl", "ray", "torch", "transformers")  # compared in every run
FETCHED = "fetched"  # in place of a digest: the node gets the model from its package or from the hub
DRIVER = "as on the driver's node"
INSTALL = "install the same packages there"


class NodeError(ValueError):
    """Nodes of the cluster do not fit the run; the message has one line for each fault."""


@dataclass(frozen=True)
class NodeReport:
    """What a node has.

    Invariant: `card_bytes` is None unless `num_cards` is above 0. `num_cards` is None where nobody looked.
    """

    node: str  # Ray's id
    address: str
    versions: Mapping[str, str | None]  # by package; None: not installed
    cuda: str | None  # CUDA version (or ROCm's) that torch is built for; None: a build for CPUs
    num_gpus: float  # that Ray declares and the run may use
    num_cards: int | None  # that torch sees
    card_bytes: float | None  # memory of the smallest card
    model: str | None  # digest of the model's directory, or `FETCHED`; None: absent
    has_directory: bool  # was a file that the driver wrote to the run's directory seen? False if nobody looked
    num_learner_places: int = 0  # learners that the node's resources can hold


def faults(
    driver: NodeReport, others: Sequence[NodeReport], model: str, packages: Collection[str] = PACKAGES
) -> list[str]:
    """Return what is wrong with the nodes, one line each, [] if nothing is.

    Args:
        driver: the report of the driver's node, with which the others are compared.
        others: reports of the other nodes that the run may use.
        model: the model's name, as the user gave it.
        packages: names of the packages that must be equal.
    """
    found = [line for one in others for line in (*_of_packages(driver, one, packages), *_of_model(driver, one, model))]
    expected = _expected_cuda([driver, *others])
    return found + [line for one in (driver, *others) for line in _of_cards(one, expected)]


def directory_faults(reports: Sequence[NodeReport], num_learners: int, directory: str) -> tuple[list[str], list[str]]:
    """Return faults and warnings about sharded learners on nodes that do not share the run's directory.

    A fault: the nodes that share it cannot hold all learners. A warning: they can, but Ray may use another node.

    Args:
        reports: of all nodes that the run may use, the driver's included.
        num_learners: of the run.
        directory: the run's.
    """
    apart = [one for one in reports if one.num_learner_places and not one.has_directory]
    num_places = sum(one.num_learner_places for one in reports if one.has_directory)
    lines = [directory_line(one.address, directory, num_places < num_learners) for one in apart]
    return (lines, []) if num_places < num_learners else ([], lines)


def directory_line(address: str, directory: str, is_certain: bool) -> str:
    """Return the message for a node that does not share the run's directory.

    Args:
        address: of the node.
        directory: the run's.
        is_certain: whether a learner runs there; False: one may.
    """
    what = "learners there write their shards of fsdp" if is_certain else "a learner placed there would write its shard"
    return (
        f"node {address} does not see the run's directory {directory}, and {what} to another disk; expected --out on "
        "storage that all nodes mount, learners kept on nodes that do (custom_resources_per_learner), or "
        "checkpoint_every = 0"
    )


def smallest_card(reports: Sequence[NodeReport]) -> float | None:
    """Return the memory of the smallest card of all nodes, bytes; None if there is no card."""
    return min((one.card_bytes for one in reports if one.card_bytes is not None), default=None)


def build_fault(num_gpus: float, cuda: str | None, torch: str, where: str, expected: str | None = None) -> str:
    """Return the message for a torch that is built for CPUs beside GPUs that Ray declares, "" if that is not so.

    Args:
        num_gpus: that Ray declares there.
        cuda: that torch is built for.
        torch: its version.
        where: the node, for the message.
        expected: CUDA version of the other nodes, if it is known.
    """
    if not num_gpus or cuda is not None:
        return ""
    wanted = f"a build for CUDA {expected}" if expected else "a build for CUDA"
    return (
        f"{where} declares {num_gpus:g} GPUs to Ray, but torch {torch} there is built for CPUs; expected {wanted} "
        "(bash scripts/setup.sh --set gpu), or no GPUs: num_gpus_per_env_runner = 0, num_gpus_per_learner = 0"
    )


def _of_packages(driver: NodeReport, one: NodeReport, packages: Collection[str]) -> Iterator[str]:
    for name in packages:
        wanted, found = driver.versions.get(name), one.versions.get(name)
        if wanted is None or _comparable(name, found) == _comparable(name, wanted):
            continue
        if found is None:
            yield f"node {one.address} has no package {name}; expected {name} {wanted}, {DRIVER}: {INSTALL}"
        else:
            yield f"node {one.address} has {name} {found}; expected {wanted}, {DRIVER}: {INSTALL}"


def _comparable(name: str, version: str | None) -> str | None:
    """Return a version as it is compared: without torch's build, which `_of_cards` compares, and vLLM's."""
    return version.partition("+")[0] if version and name in ("torch", "vllm") else version


def _of_model(driver: NodeReport, one: NodeReport, model: str) -> Iterator[str]:
    mend = "copy it there, or let both read one shared directory"
    if one.model is None:
        yield f"node {one.address} has no model {model!r}; expected the files of the driver's node: {mend}"
    elif FETCHED not in (one.model, driver.model) and one.model != driver.model:
        yield (
            f"node {one.address} has other files as model {model!r} (digest {one.model}); expected those of the "
            f"driver's node (digest {driver.model}): {mend}"
        )


def _expected_cuda(reports: Sequence[NodeReport]) -> str | None:
    """Return the CUDA version of most nodes with GPUs, of equally many the first's, which is the driver's."""
    counts = Counter(one.cuda for one in reports if one.num_gpus and one.cuda is not None)
    return counts.most_common(1)[0][0] if counts else None


def _of_cards(one: NodeReport, expected: str | None) -> Iterator[str]:
    where = f"node {one.address}"
    if line := build_fault(one.num_gpus, one.cuda, one.versions.get("torch") or "", where, expected):
        yield line
    elif one.num_gpus and one.cuda != expected:
        yield (
            f"{where} has torch for CUDA {one.cuda}; expected CUDA {expected}, as on the other nodes with GPUs: "
            f"{INSTALL} (bash scripts/setup.sh --set gpu)"
        )
    elif one.num_gpus and one.num_cards == 0:
        yield (
            f"{where} declares {one.num_gpus:g} GPUs to Ray, but torch for CUDA {one.cuda} sees none there; expected "
            "a driver that nvidia-smi shows and that is new enough, or no GPUs declared: ray start --num-gpus 0"
        )
