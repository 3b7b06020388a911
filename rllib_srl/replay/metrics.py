"""Names of a buffer's counts, and its metrics by domain."""

from __future__ import annotations

from collections.abc import Mapping

from rllib_srl.replay.admission.admission import Reason

REASONS = (*(reason.value for reason in Reason), "duplicate", "ungraded")
COUNTS = (
    *(f"num_refused_{reason}" for reason in REASONS),
    *("num_revisits", "num_reuses", "num_retained", "num_evicted", "num_groups_replaced", "num_targets_replaced"),
    *("num_dropped_drifted", "num_episodes_without_loss", "num_grown", "num_histories_dropped"),
    *("num_rated", "num_rehearsed", "num_reviews_of_nothing"),
)
COUNTS_OF_DOMAIN = ("num_groups", "num_groups_without_signal", "num_revisits", "num_reuses")


def counts_of_domains(stored: Mapping[str, tuple[int, int]], counts: Mapping[str, int]) -> dict[str, int]:
    """Return "domains/<domain>/<name>" -> what is stored of each domain now, and its lifetime counts.

    Args:
        stored: domain -> number of its items and of their groups.
        counts: lifetime counts under the same names.
    """
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
