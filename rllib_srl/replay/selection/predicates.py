"""Restricts replay to a part of the memory: to some domains, or to items and groups chosen by a predicate.

    domains = "all" | "last" | "earlier" | ["sums", "words"]
    domains = "my_rules:kept"            or the name of a registered predicate: PREDICATES["mine"] = kept

    def kept(domain: str) -> bool                        one argument: called for each domain
    def kept(domain: str, entry: Entry) -> bool          two: called for each item (revisit) and each group (reuse)
        return entry.reward < 0.9 and entry.prompt.env_id == "compare"

A predicate must be deterministic. It does not affect eviction.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.types import Prompt

Predicate = Callable[..., bool]
PREDICATES: Rules[Predicate] = Rules("domains", {})
_WAYS = "'all', 'last', 'earlier', a list of names or 'module:function'"


@dataclass(frozen=True)
class Entry:
    """Description of one item or one stored group, the input of a predicate.

    Invariant: `reward`, `pass_rate` and `variance` of an item are those of its last visit, 0 before the first.
    """

    prompt: Prompt  # environment, prompt id, domain and history
    is_group: bool  # a stored group, drawn for reuse; else an item, drawn for a revisit
    now: int  # the training iteration
    reward: float  # mean, in [0, 1]
    pass_rate: float  # fraction of the episodes that passed
    variance: float  # of the rewards
    iteration: int  # in which the group was played, or the item was created
    version: int  # of the policy that played it last
    elapsed: int  # iterations since the last visit; of a group: since it was played
    visits: int  # of the item; 0 for a group without an item
    lapses: int  # of the item: failures that followed a success
    streak: int  # of the item: successes in a row; below 0: failures
    uses: int  # times the group was trained on again; 0 for an item

    @classmethod
    def of(cls, row: np.void, prompt: Prompt, now: int, item: np.void | None = None) -> Entry:
        """Build the entry of an item from its row, or that of a group from its row and its item's row."""
        is_group = item is not None
        created, visited = ("born", "born") if is_group else ("created", "last_review")
        return cls(
            prompt,
            is_group,
            now,
            reward=float(row["reward"]),
            pass_rate=int(row["num_success"]) / max(1, int(row["size"])) if is_group else float(row["pass_rate"]),
            variance=float(row["variance"]),
            iteration=int(row[created]),
            version=int(row["version"]),
            elapsed=now - int(row[visited]),
            uses=int(row["uses"]) if is_group else 0,
            **{name: int((row if item is None else item)[name]) for name in ("visits", "lapses", "streak")},
        )


def domain_filter(domains: Any) -> Any:
    """Parse the setting `domains`: return None (all), "last", "earlier", a frozenset of names, or a predicate.

    Raises:
        ValueError: an invalid value, or a predicate that cannot be imported or takes other arguments.
    """
    if domains == "all":
        return None
    if isinstance(domains, str) and domains in ("last", "earlier"):
        return domains
    if isinstance(domains, list | tuple | set | frozenset) and domains and all(isinstance(d, str) for d in domains):
        return frozenset(domains)
    predicate = domains
    if not callable(domains):
        if error := PREDICATES.fault(domains):
            registered = f", or the registered {', '.join(map(repr, sorted(PREDICATES)))}" if PREDICATES else ""
            is_path = isinstance(domains, str) and ":" in domains
            raise ValueError(f"domains = {domains!r}; {error if is_path else f'expected {_WAYS}{registered}'}")
        predicate = PREDICATES.named(domains)
    if not _num_arguments(predicate):
        raise ValueError(f"domains = {domains!r}; expected a predicate of a domain, or of a domain and an `Entry`")
    return predicate


def sees_entries(chosen: Any) -> bool:
    """Return whether a filter of `domain_filter` is a predicate of two arguments, called for each item and group.

    A predicate that can be called with one argument gets the domain only, even if it has optional arguments.
    """
    return callable(chosen) and _num_arguments(chosen) == 2


def _num_arguments(predicate: Callable[..., Any]) -> int:
    """Return 1 or 2, the fewest positional arguments with which a predicate can be called; 0: it takes neither."""
    try:
        signature = inspect.signature(predicate)
    except ValueError:  # written in C, without a signature
        return 1
    for num in (1, 2):
        with contextlib.suppress(TypeError):
            signature.bind(*range(num))
            return num
    return 0
