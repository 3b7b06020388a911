"""What can be measured of a served model: one source for the page (`GET /v1/figures`) and Prometheus (`GET /metrics`).

    answers   number since the start; of the newest ones latency p50 and p95, tokens a second
    ratings   number, in the last hour, how many have each reward
    versions  the active one, how many are in each state, ratings until each active one, verdicts of the gates

Answers that were cut off are not among them. The latency is that of the whole answer, as its client waits for it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from rllib_srl.people.served_store import ACTIVE, SUPERSEDED, ServedStore

NEWEST = 1024  # answers
RATE_S = 3600.0  # over which ratings are counted


class Meter:
    """Latency and length of the newest answers of a server."""

    def __init__(self) -> None:
        self.num = 0
        self._newest: deque[tuple[float, int]] = deque(maxlen=NEWEST)

    def note(self, seconds: float, num_tokens: int) -> None:
        self.num += 1
        self._newest.append((seconds, num_tokens))

    def figures(self) -> dict[str, Any]:
        """Return number, latency and speed; None where there is no answer yet."""
        seconds = [latency for latency, _ in self._newest]
        total = sum(seconds)
        return {
            "num": self.num,
            "latency_p50_s": percentile(seconds, 0.5),
            "latency_p95_s": percentile(seconds, 0.95),
            "tokens_per_s": sum(num for _, num in self._newest) / total if total else None,
        }


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least a share of the values do not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def stored_figures(store: ServedStore) -> dict[str, Any]:
    """Return what the store says of ratings and versions; it belongs to its thread."""
    since = datetime.now(UTC) - timedelta(seconds=RATE_S)
    rewards, versions, active = store.rewards(), store.versions(), store.active()
    verdicts = [verdict for row in versions for verdict in row.metrics.get("verdicts", ())]
    gates = Counter(f"{verdict['gate']} {'passed' if verdict['is_passed'] else 'failed'}" for verdict in verdicts)
    reached = [row.number for row in versions if row.state in (ACTIVE, SUPERSEDED)]
    return {
        "ratings": {
            "num": sum(rewards.values()),
            "in_last_hour": store.num_since(since.isoformat(timespec="seconds")),
            "rewards": {f"{reward:g}": num for reward, num in sorted(rewards.items())},
        },
        "versions": {
            "active": active.number if active else 0,
            "states": dict(Counter(row.state for row in versions)),
            "ratings_until": {str(number): len(store.remembered(number)) for number in reached},
            "gates": dict(gates),
        },
    }


def prometheus_text(figures: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return figures as Prometheus reads them; what is not known yet is left out."""
    registry = CollectorRegistry()
    for part, values in figures.items():
        for name, value in values.items():
            if isinstance(value, Mapping):
                gauge = Gauge(f"srl_{part}_{name}", f"{part}: {name}", ["of"], registry=registry)
                for of, number in value.items():
                    gauge.labels(of).set(number)
            elif value is not None:
                Gauge(f"srl_{part}_{name}", f"{part}: {name}", registry=registry).set(value)
    return generate_latest(registry)
