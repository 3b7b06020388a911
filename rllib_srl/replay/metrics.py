"""The memory's metrics: counts of a buffer by name and domain, and realised fractions of replay.

Fractions are counted in three units, because each can hide a shift that another shows:
    prompts played (revisits cost generation)    groups trained on ("signal")    their loss tokens (what trains)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from rllib_srl.replay.admission import REASONS
from rllib_srl.replay.items import Tables
from rllib_srl.replay.ratings import RatedGroups
from rllib_srl.types import GroupMeta

COUNTS = (
    *(f"num_refused_{reason}" for reason in REASONS),
    *("num_revisits", "num_reuses", "num_retained", "num_evicted", "num_groups_replaced", "num_targets_replaced"),
    *("num_dropped_drifted", "num_episodes_without_loss", "num_grown"),
    "num_rated",
)
COUNTS_OF_DOMAIN = ("num_groups", "num_groups_without_signal", "num_revisits", "num_reuses")
RATING_COUNTS = ("num_applied", "num_changed", "num_unused")
ORIGINS = ("fresh", "revisit", "reuse")


def stats_of(tables: Tables, counts: Mapping[str, int], rated: RatedGroups, now: int) -> dict[str, float]:
    whole = {name: num for name, num in counts.items() if not name.startswith("domains/")}
    whole = {**dict.fromkeys(COUNTS, 0), **whole}  # report zero counts, so that plots have no gaps
    return {
        "num_items": len(tables),
        "num_due": tables.num_due(now),
        "num_stored_groups": tables.num_groups,
        "num_targets": len(tables.targets),
        "num_bytes_stored": tables.num_bytes,
        "num_bytes_targets": sum(tables.targets.values()),
        **whole,
        **{f"ratings/{name}": getattr(rated, name) for name in RATING_COUNTS},
        "num_refused": sum(num for name, num in whole.items() if name.startswith("num_refused_")),
        **counts_of_domains(tables.num_by_domain(), counts),
    }


def counts_of_domains(stored: Mapping[str, tuple[int, int]], counts: Mapping[str, int]) -> dict[str, int]:
    """Return "domains/<domain>/<name>" -> the items and groups stored of each domain now, and its counts."""
    found: dict[str, int] = {}
    for domain in sorted(stored.keys() | by_domain(counts).keys()):
        num_items, num_groups = stored.get(domain, (0, 0))
        named = {"num_items": num_items, "num_stored_groups": num_groups}
        named |= {name: counts.get(f"domains/{domain}/{name}", 0) for name in COUNTS_OF_DOMAIN}
        found |= {f"domains/{domain}/{name}": num for name, num in named.items()}
    return found


def by_domain(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return domain -> name -> value of the metrics "domains/<domain>/<name>"; a domain's name may contain "/"."""
    found: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        if metric.startswith("domains/"):
            domain, _, name = metric.removeprefix("domains/").rpartition("/")
            found.setdefault(domain, {})[name] = value
    return found


def counts_of(groups: Iterable[GroupMeta], trained: Iterable[GroupMeta]) -> Counter[str]:
    """Count by origin: groups and their generated tokens, groups that are trained on and their loss tokens."""
    units = ("groups", "signal", "tokens", "generated")
    counts: Counter[str] = Counter({f"num_{unit}_{origin}": 0 for unit in units for origin in ORIGINS})
    for name, of_tokens, metas in (("groups", "generated", groups), ("signal", "tokens", trained)):
        for group in metas:
            counts[f"num_{name}_{group.origin}"] += 1
            counts[f"num_{of_tokens}_{group.origin}"] += int(group.num_loss_tokens_G.sum())
    return counts


def shares_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Return revisit / (fresh + revisit) and reuse / (fresh + revisit + reuse) of counts over any period, in each unit.

    They are nan where nothing was counted.
    """
    fractions = {}
    for unit, name in (("groups", "prompts"), ("signal", "signal"), ("tokens", "tokens")):
        fresh, revisit, reuse = (counts.get(f"num_{unit}_{origin}", 0) for origin in ORIGINS)
        played, everything = fresh + revisit, fresh + revisit + reuse
        fractions[f"revisit_share_{name}"] = revisit / played if played else float("nan")
        fractions[f"reuse_share_{name}"] = reuse / everything if everything else float("nan")
    return fractions
