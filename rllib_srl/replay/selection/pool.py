"""Builds the candidates of rules to which every item is one, played or not, and counts the slots of each domain.

    columns of all items + statistics of their domains + clock of slots -> Candidates

Only what these rules read is filled in: a draw from 65,536 items takes a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.history import discounts
from rllib_srl.replay.selection.candidates import Candidates
from rllib_srl.replay.selection.context import Context

COLUMNS = ("seq", "domain", "last_drawn", "last_review", "visits", "num_silent", "num_unsolved", "cost")
HISTORY = ("history_sum", "history_count")
DISCOUNTED_BY = {"versions": ("version",), "kl": ("history_clock",), "visits": ()}  # columns that tell a history's age


class Surprise(NamedTuple):
    """Where a group without spread trains as well: the expected squared advantage takes the place of S."""

    group_size: int
    prior_weight: float  # w0 of the posterior baseline


class SlotClock:
    """Counts drawn slots, and remembers the last one of each domain. Invariant: `get_state` holds its whole state."""

    def __init__(self) -> None:
        """Start before the first slot."""
        self._num_slots = 0
        self._last: dict[int, int] = {}  # domain -> number of its last slot, from 1

    def waits(self, num_domains: int) -> np.ndarray:
        """Return the slots since the last one of each domain, the next slot included; all slots if it had none."""
        return np.array([self._num_slots + 1 - self._last.get(d, 0) for d in range(num_domains)], np.float64)

    @property
    def first_wait(self) -> float:
        """Return the wait of a domain that never had a slot."""
        return float(self._num_slots + 1)

    def advance(self, domains: Sequence[int]) -> None:
        """Count the slots that these domains got, in this order."""
        for domain in domains:
            self._num_slots += 1
            self._last[int(domain)] = self._num_slots

    def get_state(self) -> dict[str, Any]:
        """Return the counts, as JSON types."""
        return {"num_slots": self._num_slots, "last": [[domain, slot] for domain, slot in self._last.items()]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned; {} is that before the first slot."""
        self._num_slots = int(state.get("num_slots", 0))
        self._last = {int(domain): int(slot) for domain, slot in state.get("last", [])}


def context_of(
    statistics: DomainStatistics, domains: Sequence[str], clock: SlotClock, surprise: Surprise | None
) -> Context:
    """Return what rules read beside the columns.

    Args:
        statistics: of the domains, by name.
        domains: their names, in the order of their numbers.
        clock: of the slots.
        surprise: as in `Surprise`, None where only groups with spread train.
    """
    return Context(
        live_D=np.array([statistics.signal_rate(name) for name in domains]),
        mean_D=np.array([statistics.mean(name) for name in domains]),
        expected_D=np.array([statistics.expected_reward(name) for name in domains]),
        unsolved_D=np.array([float(statistics.num_unsolved(name)) for name in domains]),
        solved_after_D=np.array([statistics.unsolved_scale(name) for name in domains]),
        icc_D=np.array([statistics.icc(name) for name in domains]),
        wait_D=clock.waits(len(domains)),
        first_wait=clock.first_wait,
        group_size=surprise.group_size if surprise else 0,
        prior_weight=surprise.prior_weight if surprise else 0.0,
    )


def pool_candidates(
    columns: Mapping[str, np.ndarray], now: int, context: Context, domains: Sequence[str], weights: Mapping[str, float]
) -> Candidates:
    """Build the candidates of items.

    An item whose play failed counts as visited when it was drawn, so that it waits for its turn like any other. An
    item without a known cost has the mean cost of its domain, or of all items.

    Args:
        columns: those of `COLUMNS`, and those of `HISTORY` for rules that read it, by name; one entry an item.
        now: the training iteration.
        context: of the draw.
        domains: names by number.
        weights: domain -> factor of its items' priority; 1 where it is missing.
    """
    last_N = np.maximum(columns["last_drawn"], np.where(columns["visits"] > 0, columns["last_review"], 0))
    is_unseen_N = (columns["visits"] == 0) & (columns["last_drawn"] == 0)
    domain_N = columns["domain"].astype(np.int64)
    weight_D = np.array([float(weights.get(name, 1.0)) for name in domains])
    given: dict[str, Any] = {name: columns[name] for name in HISTORY if name in columns}
    if weights:
        given["weight"] = weight_D[domain_N]
    return Candidates.of(
        len(domain_N),
        context=context,
        seq=columns["seq"].astype(np.int64),
        domain=domain_N,
        elapsed=np.where(is_unseen_N, now + 1, now - last_N),
        visits=np.where(is_unseen_N, 0, np.maximum(1, columns["visits"])),
        num_silent=columns["num_silent"],
        num_unsolved=columns["num_unsolved"],
        cost=_filled_costs(columns["cost"].astype(np.float64), domain_N),
        **given,
    )


def discounted(columns: Mapping[str, np.ndarray], by: str, half_life: float | None) -> dict[str, np.ndarray]:
    """Return the columns of `HISTORY` as the newest policy that has visited any of the items finds them.

    Args:
        columns: those of `HISTORY` and of `DISCOUNTED_BY[by]`, by name; one entry an item.
        by: setting `history_by`.
        half_life: setting `history_half_life`.
    """
    ages_N = [columns[name] for name in DISCOUNTED_BY[by]]
    newest = [float(age_N.max(initial=0)) for age_N in ages_N]
    version, kl = (newest[0] if by == name else 0.0 for name in ("versions", "kl"))
    if by == "versions" and (span := int(version - ages_N[0].min()) + 1) < len(ages_N[0]):
        # Few versions: one power each, not one an item.
        rho_T = discounts(by, half_life, _aged(by, version - np.arange(span)), np.full(span, version), kl)
        rho_N = rho_T[int(version) - ages_N[0]]
    else:
        rows_N = _aged(by, ages_N[0] if ages_N else np.zeros(len(columns["history_sum"])))
        rho_N = discounts(by, half_life, rows_N, np.full(len(rows_N), version), kl)
    return {name: rho_N * columns[name] for name in HISTORY}


def _aged(by: str, age_N: np.ndarray) -> np.ndarray:
    """Return rows with only the columns that `discounts` reads."""
    rows_N = np.zeros(len(age_N), [("version", "i4"), ("history_clock", "f8")])
    for name in DISCOUNTED_BY[by]:
        rows_N[name] = age_N
    return rows_N


def _filled_costs(cost_N: np.ndarray, domain_N: np.ndarray) -> np.ndarray:
    is_known_N = cost_N > 0
    if is_known_N.all():
        return cost_N
    if not is_known_N.any():
        return np.ones(len(cost_N))
    num_D = np.bincount(domain_N[is_known_N], minlength=int(domain_N.max()) + 1)
    sum_D = np.bincount(domain_N, cost_N)
    mean_D = np.where(num_D > 0, sum_D / np.maximum(num_D, 1), sum_D.sum() / num_D.sum())
    filled_N = cost_N.copy()
    filled_N[~is_known_N] = mean_D[domain_N[~is_known_N]]
    return filled_N
