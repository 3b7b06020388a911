"""Computes a buffer's metrics: gauges and lifetime counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rllib_srl.replay.admission.admission import Reason

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer

REASONS = (*(reason.value for reason in Reason), "duplicate", "ungraded")
COUNTS = (
    *(f"num_refused_{reason}" for reason in REASONS),
    *("num_revisits", "num_reuses", "num_evicted", "num_groups_replaced", "num_dropped_drifted"),
    *("num_episodes_without_loss", "num_grown"),
    *("num_histories_dropped",),
    *("num_rated", "num_rehearsed", "num_reviews_of_nothing"),
)

COUNTS_OF_DOMAIN = ("num_groups", "num_groups_without_signal", "num_revisits", "num_reuses")


def gauges(buffer: SRLReplayBuffer, now: int) -> dict[str, float]:
    """Return gauges of size, and all lifetime counts."""
    store, payloads = buffer.store, buffer.ledger.payloads
    whole = {name: num for name, num in buffer.counts.items() if not name.startswith("domains/")}
    counts = {**dict.fromkeys(COUNTS, 0), **whole}  # report zero counts, so that plots have no gaps
    return {
        "num_items": len(store),
        "num_due": store.num_due(now),
        "num_stored_groups": store.num_groups,
        "num_histories_without_item": len(buffer.unstored),
        "num_bytes_in_memory": payloads.num_bytes,
        "num_bytes_stored": store.num_bytes,
        "num_spilled": payloads.num_spilled,
        "num_read_back": payloads.num_read_back,
        **counts,
        **_ratings(buffer),
        "num_refused": sum(num for name, num in counts.items() if name.startswith("num_refused_")),
        **_domains(buffer),
    }


def _domains(buffer: SRLReplayBuffer) -> dict[str, int]:
    """Return "domains/<domain>/<name>" -> what is stored of each domain now, and its lifetime counts."""
    stored = buffer.store.num_by_domain()
    found: dict[str, int] = {}
    for domain in sorted(stored.keys() | by_domain(buffer.counts).keys()):
        num_items, num_groups = stored.get(domain, (0, 0))
        named = {"num_items": num_items, "num_stored_groups": num_groups}
        named |= {name: buffer.counts[f"domains/{domain}/{name}"] for name in COUNTS_OF_DOMAIN}
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


def _ratings(buffer: SRLReplayBuffer) -> dict[str, float]:
    """Return what has become of people's ratings of stored answers."""
    return {
        "ratings/num_applied": buffer.rated.num_applied,
        "ratings/num_changed": buffer.rated.num_changed,
        "ratings/num_stale_groups": buffer.rated.num_stale_groups,
        "ratings/num_unused": buffer.rated.num_unused,
    }
