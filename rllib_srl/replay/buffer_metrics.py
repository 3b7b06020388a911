"""Computes a buffer's metrics: gauges, lifetime counts, and the facts that explain the draw of an item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.admission.admission import Reason
from rllib_srl.replay.schedule.calibration import report
from rllib_srl.replay.schedule.recall import overdue_by_recall
from rllib_srl.replay.store.records import LEECH, SCHEDULED, WAITING

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer

NAN = float("nan")
REASONS = (*(reason.value for reason in Reason), "duplicate", "ungraded")
COUNTS = (
    *(f"num_refused_{reason}" for reason in REASONS),
    *("num_admitted", "num_revisits", "num_reuses", "num_evicted", "num_groups_replaced", "num_dropped_drifted"),
    *("num_episodes_without_loss", "num_grown"),
    *("num_enrolled", "num_refits", "num_recalibrations"),
    *("num_histories_dropped",),
    *("num_rated", "num_rehearsed", "num_reviews_of_nothing"),
)

COUNTS_OF_DOMAIN = ("num_groups", "num_groups_without_signal", "num_revisits", "num_reuses")


def gauges(buffer: SRLReplayBuffer, now: int) -> dict[str, float]:
    """Return gauges of size, load and calibration, and all lifetime counts."""
    store, payloads = buffer.store, buffer.ledger.payloads
    whole = {name: num for name, num in buffer.counts.items() if not name.startswith("domains/")}
    counts = {**dict.fromkeys(COUNTS, 0), **whole}  # report zero counts, so that plots have no gaps
    num_due = store.num_due(now)
    load = buffer.recall.load.metrics(buffer.recall.slots, num_due, store.num_items(WAITING))
    return {
        "num_items": len(store),
        "num_scheduled": store.num_items(SCHEDULED),
        "num_leeches": store.num_items(LEECH),
        "num_due": num_due,
        "num_stored_groups": store.num_groups,
        "num_histories_without_item": len(buffer.unstored),
        "num_bytes_in_memory": payloads.num_bytes,
        "num_bytes_stored": store.num_bytes,
        "num_spilled": payloads.num_spilled,
        "num_read_back": payloads.num_read_back,
        "load": load["load"],
        "load_ratio": load["load_ratio"],
        "backlog": load["backlog"],
        "num_waiting": load["num_waiting"],
        "stretch_factor": load["stretch"],
        **_calibration(buffer),
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


def _calibration(buffer: SRLReplayBuffer) -> dict[str, float]:
    """Return predicted and observed recall over the newest reviews; nan until an item has been revisited.

    Without a spacing rule nothing is predicted, so all but the observed recall are nan.
    """
    log = buffer.reviews.log()
    if not len(log) or np.isnan(log.predicted).all():
        names = ("predicted_recall_mean", "observed_recall_mean", "recall_log_loss", "recall_constant_log_loss")
        return {**dict.fromkeys(names, NAN), "num_predicted_reviews": 0, "reviews_median": 0.0}
    found = report(log)
    num_reviews_K = np.unique(log.predictable().key, return_counts=True)[1]
    is_told = buffer.settings.has_due_dates
    return {
        "reviews_median": float(np.median(num_reviews_K)),  # over revisited items
        "predicted_recall_mean": found.predicted if is_told else NAN,
        "observed_recall_mean": found.observed,
        "recall_log_loss": found.log_loss if is_told else NAN,
        "recall_constant_log_loss": found.log_loss_constant if is_told else NAN,
        "num_predicted_reviews": found.num_reviews,
    }


def facts_of_item(buffer: SRLReplayBuffer, slot: int, now: int) -> dict[str, Any]:
    """Return the facts behind a draw of this item: lateness, predicted recall, domain factor, lapses, diversity."""
    row = buffer.store.items[slot]
    recall = float(buffer.recall.retrievability(np.array([slot]), now)[0])
    factor = float(buffer.recall.domains.factor(np.array([row["domain"]]), now)[0])
    is_lost = factor < 1 and overdue_by_recall(np.array([factor * recall]), buffer.settings.desired_retention)[0] >= 0
    return {
        "key": f"{int(row['key']):016x}",
        "now": now,
        "due": round(float(row["due"]), 3),
        "late": round(now - float(row["due"]), 3),
        "recall": round(recall, 4) if row["reps"] else None,
        "has_due_dates": buffer.settings.has_due_dates,
        "elapsed": now - int(row["last_review"]),
        "domain_factor": round(factor, 4),  # multiplies `recall`; see `schedule/recall.py`
        "is_due_by_domain": bool(is_lost and row["due"] > now),
        "pass_rate": round(float(row["pass_rate"]), 4),
        "visits": int(row["visits"]),
        "lapses": int(row["lapses"]),
        "novelty": round(float(row["novelty"]), 4),
        "diversity": round(float(row["diversity"]), 4),
        "is_leech": bool(row["status"] == LEECH),
        **_factors(buffer, slot),
    }


def _factors(buffer: SRLReplayBuffer, slot: int) -> dict[str, Any]:
    """Return the reasons of the last draw by `signal`, {} after a draw by another rule.

    `signal` has the factors of the item's priority; `signal_domain` has base, wait, rank and slots of its domain. It is
    missing where no domain was chosen first.
    """
    found = buffer.draws.reasons.get(slot)
    if found is None:
        return {}
    told: dict[str, Any] = {"signal": {name: round(value, 6) for name, value in found.items()}}
    if domain := buffer.draws.domain_reasons.get(int(buffer.store.items["domain"][slot])):
        told["signal_domain"] = {**domain, "base": float(f"{domain['base']:.6g}")}
    return told
