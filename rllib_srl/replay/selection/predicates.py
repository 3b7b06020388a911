"""Restricts replay to a part of the memory: to some domains, or to items and groups chosen by a predicate.

    domains = "all" | "last" | "earlier" | ["sums", "words"]
    domains = "my_rules:kept"            or the name of a registered predicate: PREDICATES["mine"] = kept

    def kept(domain: str) -> bool                        one argument: called for each domain
    def kept(domain: str, entry: Entry) -> bool          two: called for each item (revisit) and each group (reuse)
        return entry.reward < 0.9 and entry.prompt.env_id == "compare"

A predicate must be deterministic. It does not affect eviction.
"""

from __future__ import annotations

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
    pass_rate: float  # share of episodes that passed
    variance: float  # of the rewards
    iteration: int  # in which the group was played, or the item was created
    version: int  # of the policy that played it last
    elapsed: int  # iterations since the last visit; of a group: since it was played
    visits: int  # of the item; 0 for a group without an item
    lapses: int  # of the item: failures that followed a success
    streak: int  # of the item: successes in a row; below 0: failures
    uses: int  # times the group was trained on again; 0 for an item

    @classmethod
    def of_item(cls, row: np.void, prompt: Prompt, now: int) -> Entry:
        """Build the entry of an item from its row."""
        counts = {name: int(row[name]) for name in ("version", "visits", "lapses", "streak")}
        return cls(
            prompt,
            False,
            now,
            reward=float(row["reward"]),
            pass_rate=float(row["pass_rate"]),
            variance=float(row["variance"]),
            iteration=int(row["created"]),
            elapsed=now - int(row["last_review"]),
            uses=0,
            **counts,
        )

    @classmethod
    def of_group(cls, row: np.void, prompt: Prompt, now: int, item: np.void | None = None) -> Entry:
        """Build the entry of a group from its row and its item's row; None: the group has no item."""
        names = ("visits", "lapses", "streak")
        counts = {name: 0 if item is None else int(item[name]) for name in names}
        return cls(
            prompt,
            True,
            now,
            reward=float(row["reward"]),
            pass_rate=int(row["num_success"]) / max(1, int(row["size"])),
            variance=float(row["variance"]),
            iteration=int(row["born"]),
            version=int(row["version"]),
            elapsed=now - int(row["born"]),
            uses=int(row["uses"]),
            **counts,
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
    if not callable(domains):
        if (fault := PREDICATES.fault(domains)) and not (isinstance(domains, str) and ":" in domains):
            raise ValueError(f"domains = {domains!r}; expected {_WAYS}{_registered()}")
        if fault:
            raise ValueError(f"domains = {domains!r}; {fault}")
        predicate = PREDICATES.named(domains)
    else:
        predicate = domains
    if num_required(predicate) not in (1, 2):
        raise ValueError(f"domains = {domains!r}; expected a predicate of a domain, or of a domain and an `Entry`")
    return predicate


def sees_entries(chosen: Any) -> bool:
    """Return whether a filter of `domain_filter` is a predicate of two arguments, called for each item and group."""
    return callable(chosen) and num_required(chosen) == 2


def num_required(predicate: Callable[..., Any]) -> int:
    """Return the number of positional arguments to call a predicate with; -1 if it takes none or needs a keyword.

    A predicate that can be called with one argument gets the domain only, even if it has optional arguments.
    """
    try:
        parameters = inspect.signature(predicate).parameters.values()
    except ValueError:  # written in C, without a signature
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [one for one in parameters if one.kind in kinds]
    num = sum(one.default is inspect.Parameter.empty for one in placed)
    takes_any = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    must_name = any(
        one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is inspect.Parameter.empty for one in parameters
    )
    if must_name or (not placed and not takes_any):
        return -1
    return max(1, num)


def _registered() -> str:
    return f", or the registered {', '.join(map(repr, sorted(PREDICATES)))}" if PREDICATES else ""
