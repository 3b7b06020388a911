"""From the tables to what a rule sees, and from what it chose back to slots.

    pool of slots (bounded, `candidate_pool`) -> Candidates -> select -> slots

The same columns describe items (revisit, eviction) and groups (reuse); a group takes its item's where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rllib_srl.planner.shares import DomainShares
from rllib_srl.replay.candidates import Candidates
from rllib_srl.replay.domain_recall import overdue_by_recall
from rllib_srl.replay.eviction import evict
from rllib_srl.replay.memory import MemoryStore
from rllib_srl.replay.recall import Recall
from rllib_srl.replay.records import LEECH, WAITING, rows_at
from rllib_srl.replay.selection import Carry, make_settings, select
from rllib_srl.replay.settings import ReplaySettings, domain_filter

RESERVE = 0.125  # share of the memory that is kept for items which wait for their place in the schedule


class Draws:
    """Draws items and groups from a `MemoryStore`.

    Invariant: apart from the tables, a draw depends on the generator given and on `get_state()` alone. One that falls
    short took all there was: rounding decided nothing, so it leaves the carry as it was.
    """

    def __init__(self, settings: ReplaySettings, store: MemoryStore, recall: Recall) -> None:
        """Draw from `store` by the rules of `settings`."""
        self._settings, self._store, self._recall = settings, store, recall
        self._filter = domain_filter(settings.domains)
        coeff = settings.diversity_coeff if "draw" in settings.diversity_on else 0.0
        values = {"leech_share": settings.leech_share, "diversity_coeff": coeff, **settings.selection_config}
        self._rule_settings = make_settings(settings.selection, values, [settings.reuse_selection])
        self._carries = {"items": Carry(), "groups": Carry(), "planned_items": Carry(), "planned_groups": Carry()}

    def items(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        without: Sequence[int] = (),
        shares: DomainShares | None = None,
    ) -> np.ndarray:
        """Return the slots of `num` items to be played again, fewer only if fewer may be played.

        Args:
            num: items wanted.
            now: the training iteration.
            generator: of this draw.
            without: slots that the batch has already.
            shares: of domains, in place of `domain_quotas`.
        """
        store, settings = self._store, self._settings
        size = max(num + len(without), settings.candidate_pool)
        pool = store.pool(now, size, generator, self.domains(shares), settings.min_recall_interval)
        pool = pool[~np.isin(pool, np.array(without, pool.dtype))]
        if not len(pool) or num < 1:
            return np.empty(0, np.int64)
        candidates = self.item_candidates(pool, now)
        if not settings.early:
            due = np.flatnonzero(candidates.overdue >= 0)
            pool, candidates = pool[due], candidates.take(due)
        is_leech_N = store.items["status"][pool] == LEECH
        return pool[self._select(settings.selection, "items", candidates, num, generator, is_leech_N, shares)]

    def groups(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        without: Sequence[int] = (),
        shares: DomainShares | None = None,
    ) -> np.ndarray:
        """Return the group slots of `num` groups to be trained on again, fewer only if fewer may be.

        Args:
            num: groups wanted.
            now: the training iteration.
            generator: of this draw.
            without: numbers (`seq`) of groups that the batch has already.
            shares: of domains, in place of `domain_quotas`.
        """
        store, settings = self._store, self._settings
        size = max(num + len(without), settings.candidate_pool)
        domains = self.domains(shares, are_groups=True)
        pool = store.group_pool(now, size, generator, settings.max_age, settings.max_uses, domains)
        pool = pool[~np.isin(store.groups["seq"][pool], np.array(without, np.uint64))]
        if not len(pool) or num < 1:
            return np.empty(0, np.int64)
        candidates = self.group_candidates(pool, now)
        return pool[self._select(settings.reuse_selection, "groups", candidates, num, generator, shares=shares)]

    def evicted(self, num: int, now: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of `num` items to evict, fewer only if the rule sees fewer.

        `lowest_value` spares the schedule as long as more than `RESERVE` of the memory waits to get in: a learned item
        is of less value than any that is not, and would go after its first success, before it could be remembered.
        """
        store, settings = self._store, self._settings
        is_reserve_full = store.num_items(WAITING) >= num + max(1, int(RESERVE * settings.capacity))
        if settings.eviction == "lowest_value" and is_reserve_full:
            pool = store.waiting(settings.candidate_pool)
        else:
            pool = store.any_items(settings.candidate_pool, generator)
        candidates = self.item_candidates(pool, now)
        weights = self._weights(candidates)
        return pool[evict(self._settings.eviction, candidates, num, generator, self._rule_settings, weights)]

    def item_candidates(self, slots_N: np.ndarray, now: int) -> Candidates:
        """Describe items to a rule; what their domain forgets, they do (`domain_recall.py`)."""
        rows_N = rows_at(self._store.items, slots_N)
        elapsed_N = now - rows_N["last_review"]
        interval_N = np.maximum(1.0, rows_N["due"] - rows_N["last_review"])
        factor_N = self._recall.domains.factor(rows_N["domain"], now)
        recall_N = factor_N * self._recall.retrievability(slots_N, now)
        overdue_N = (now - rows_N["due"]) / interval_N
        missing_N = overdue_by_recall(recall_N, self._settings.desired_retention)
        return Candidates.of(
            len(slots_N),
            **_shared(rows_N),
            pass_rate=rows_N["pass_rate"],
            group_size=rows_N["group_size"],
            abs_advantage=np.sqrt(rows_N["variance"], dtype=np.float64),
            age=now - rows_N["created"],
            elapsed=elapsed_N,
            overdue=np.where(factor_N < 1, np.maximum(overdue_N, missing_N), overdue_N),
            retrievability=recall_N,
            is_new=rows_N["visits"] <= 1,
            **_of_item(rows_N, factor_N),
        )

    def group_candidates(self, groups_N: np.ndarray, now: int) -> Candidates:
        """Describe groups to a rule."""
        rows_N = rows_at(self._store.groups, groups_N)
        slots_N = rows_N["slot"].astype(np.int64)
        items_N = rows_at(self._store.items, slots_N)
        return Candidates.of(
            len(groups_N),
            are_groups=True,
            **_shared(rows_N),
            pass_rate=rows_N["num_success"] / np.maximum(1, rows_N["size"]),
            group_size=rows_N["size"],
            abs_advantage=rows_N["abs_advantage"],
            age=now - rows_N["born"],
            elapsed=now - rows_N["born"],
            retrievability=self._recall.retrievability(slots_N, now),
            uses=rows_N["uses"],
            is_new=rows_N["uses"] == 0,
            **_of_item(items_N),
        )

    def domains(self, shares: DomainShares | None = None, are_groups: bool = False) -> Collection[int] | None:
        """Return the numbers of the domains whose items, or groups, may be drawn; None for all."""
        if self._filter is None and (shares is None or shares.only is None):
            return None
        every = enumerate(self._store.domains)
        return [number for number, name in every if self.is_wanted(name, shares, are_groups)]

    def is_wanted(self, domain: str, shares: DomainShares | None = None, are_groups: bool = False) -> bool:
        """Say whether items, or groups, of a domain, by name, may be drawn."""
        if shares is not None and shares.only not in (None, domain):
            return False
        if self._filter is None:
            return True
        if self._filter == "last":
            return domain in self._store.domains[-2:][:1]
        if self._filter == "earlier":  # the newest domain's prompts come fresh; its groups are reused like any
            return are_groups or domain != self._store.header.newest_domain
        is_wanted: Callable[[str], bool] = self._filter if callable(self._filter) else self._filter.__contains__
        return is_wanted(domain)

    def get_state(self) -> dict[str, Any]:
        """Return the fractions of slots that rounding left over, as JSON types."""
        return {
            name: {"leeches": carry.leeches, "domains": [[int(d), float(c)] for d, c in carry.domains.items()]}
            for name, carry in self._carries.items()
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._carries |= {
            name: Carry(carry["leeches"], {int(d): float(c) for d, c in carry["domains"]})
            for name, carry in state.items()
        }

    def _select(
        self,
        rule: str,
        carried: str,
        candidates: Candidates,
        num: int,
        generator: np.random.Generator,
        is_leech_N: np.ndarray | None = None,
        shares: DomainShares | None = None,
    ) -> np.ndarray:
        weights: Mapping[int, float] | None = self._weights(candidates)
        if shares is not None:
            columns = (candidates.domain, candidates.pass_rate)
            class_N, weights = shares.divided(self._store.domains, *columns, num)
            candidates, carried = replace(candidates, domain=class_N), f"planned_{carried}"
        carry = self._carries[carried]
        chosen = select(rule, candidates, num, generator, self._rule_settings, weights, is_leech_N, carry)
        if len(chosen.indices) == num:
            self._carries[carried] = chosen.carry
        return chosen.indices

    def _weights(self, candidates: Candidates) -> dict[int, float] | None:
        quotas = self._settings.domain_quotas
        if quotas is None:
            return None
        if quotas == "equal":
            return dict.fromkeys(np.unique(candidates.domain).tolist(), 1.0)
        ids = {name: self._store.domain_id(name) for name in quotas}
        return {number: float(quotas[name]) for name, number in ids.items() if number is not None}


def _shared(rows_N: np.ndarray) -> dict[str, Any]:
    columns: dict[str, Any] = {name: rows_N[name] for name in ("reward", "variance", "nll", "num_success")}
    return columns | {"seq": rows_N["seq"].astype(np.int64)}


def _of_item(rows_N: np.ndarray, factor_N: np.ndarray | float = 1.0) -> dict[str, Any]:
    names = ("domain", "novelty", "diversity", "lapses", "visits", "score")
    alpha_N, beta_N = rows_N["alpha"].astype(np.float64), rows_N["beta"].astype(np.float64)
    return {name: rows_N[name] for name in names} | {"posterior_mean": factor_N * alpha_N / (alpha_N + beta_N)}
