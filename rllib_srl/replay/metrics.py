"""The memory's metrics: gauges of its size, and lifetime counts by name and domain."""

from __future__ import annotations

from collections.abc import Mapping

from rllib_srl.replay.admission import REASONS
from rllib_srl.replay.items import Tables
from rllib_srl.replay.ratings import RatedGroups

COUNTS = (
    *(f"num_refused_{reason}" for reason in REASONS),
    *("num_revisits", "num_reuses", "num_retained", "num_evicted", "num_groups_replaced"),
    *("num_dropped_drifted", "num_answers_outdated", "num_episodes_without_loss", "num_grown", "num_rated"),
)
COUNTS_OF_DOMAIN = ("num_groups", "num_groups_zero_variance", "num_revisits", "num_reuses")


def stats_of(tables: Tables, counts: Mapping[str, int], rated: RatedGroups, now: int) -> dict[str, float]:
    whole = {name: num for name, num in counts.items() if not name.startswith("domains/")}
    whole = {**dict.fromkeys(COUNTS, 0), **whole}  # report zero counts, so that plots have no gaps
    stored, of_domains = tables.num_by_domain(), dict[str, float]()
    for domain in sorted(stored.keys() | by_domain(counts).keys()):
        named = dict(zip(("num_items", "num_stored_groups"), stored.get(domain, (0, 0)), strict=True))
        named |= {name: counts.get(f"domains/{domain}/{name}", 0) for name in COUNTS_OF_DOMAIN}
        of_domains |= {f"domains/{domain}/{name}": num for name, num in named.items()}
    return {
        "num_items": len(tables),
        "num_due": tables.num_due(now),
        "num_stored_groups": tables.num_groups,
        "num_bytes_stored": tables.num_bytes,
        **whole,
        **{f"ratings/{name}": getattr(rated, name) for name in ("num_applied", "num_changed", "num_unused")},
        "num_refused": sum(num for name, num in whole.items() if name.startswith("num_refused_")),
        **of_domains,
    }


def by_domain(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return domain -> name -> value of the metrics "domains/<domain>/<name>"; a domain's name may contain "/"."""
    domains: dict[str, dict[str, float]] = {}
    for metric, value in metrics.items():
        if metric.startswith("domains/"):
            domain, _, name = metric.removeprefix("domains/").rpartition("/")
            domains.setdefault(domain, {})[name] = value
    return domains
