"""Draws items and groups from the tables: builds candidates, applies a rule, returns slots.

    pool of slots (at most `MOST_CANDIDATES`) -> Candidates -> filter -> rule -> slots

Items (revisit, eviction) and groups (reuse) have the same columns; a group takes the columns it lacks from its item.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from rllib_srl.common.rules import RuleError, called
from rllib_srl.replay.history import discount
from rllib_srl.replay.items import Tables, rows_at
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.rules import (
    BY_DUE,
    DATELESS,
    EVICTIONS,
    SELECTIONS,
    Candidates,
    apply,
    domain_filter,
)
from rllib_srl.replay.settings import ReplaySettings

MOST_CANDIDATES = 4096  # of a draw; of more, a uniform sample is drawn first


class Draws:
    """Draws items and groups from `Tables`; apart from the tables, a draw depends only on the given generator."""

    def __init__(self, settings: ReplaySettings, store: Tables, recall: Recall) -> None:
        self._settings, self._store, self._recall = settings, store, recall
        self._reads_recall = settings.reads_recall
        self._is_by_due = settings.selection in BY_DUE
        self._is_by_due |= settings.has_due_dates and settings.selection not in DATELESS  # a rule of the user
        self._filter = domain_filter(settings.domains)
        self._rules = {
            "items": SELECTIONS.make(settings.selection, settings.selection_config),
            "groups": SELECTIONS.make(settings.reuse_selection, settings.reuse_selection_config),
        }
        self._eviction = EVICTIONS.make(settings.eviction, {})

    def items(self, num: int, now: int, generator: np.random.Generator, without: Sequence[int] = ()) -> np.ndarray:
        """Return the slots of `num` items to revisit, none of `without`; fewer only if fewer may be played."""
        store, settings = self._store, self._settings
        size, interval = self._size(num + len(without), len(store)), settings.min_recall_interval
        pool_N = store.pool(now, size, generator, self._domains(), interval, self._is_by_due)
        pool_N = pool_N[~np.isin(pool_N, np.array(without, pool_N.dtype))]
        return self._drawn("items", settings.selection, pool_N, self.item_candidates(pool_N, now), num, generator)[0]

    def groups(
        self, num: int, now: int, generator: np.random.Generator, must_vary: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of `num` groups to reuse and their loss weights, fewer only if fewer may be reused.

        Groups whose rewards are all equal are left out if they `must_vary`.
        """
        store, settings = self._store, self._settings
        size, domains = self._size(num, store.num_groups), self._domains(are_groups=True)
        pool_N = store.group_pool(now, size, generator, settings.max_age, settings.max_uses, domains, must_vary)
        candidates = self.group_candidates(pool_N, now)
        return self._drawn("groups", settings.reuse_selection, pool_N, candidates, num, generator)

    def evicted(self, num: int, now: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of `num` items to evict, fewer only if the pool has fewer."""
        pool_N = self._store.any_items(MOST_CANDIDATES, generator)
        candidates, title = self.item_candidates(pool_N, now), f"eviction {self._settings.eviction!r}"
        slots_K: np.ndarray = pool_N[apply(title, self._eviction, candidates, num, generator)[0]]
        return slots_K

    # --- candidates ------------------------------------------------------------------------------

    def item_candidates(self, slots_N: np.ndarray, now: int) -> Candidates:
        """Build the candidates of items; their histories are discounted up to the newest visit of any of them."""
        rows_N, settings = rows_at(self._store.items, slots_N), self._settings
        newest = float(rows_N["version"].max(initial=0))
        rho_N = discount(settings.history_half_life, newest - rows_N["version"])
        return Candidates(
            len(slots_N),
            diversity_coeff=settings.diversity_coeff,
            **self._columns(rows_N, rows_N, now),
            pass_rate=rows_N["pass_rate"],
            group_size=rows_N["group_size"],
            abs_advantage=np.sqrt(rows_N["variance"], dtype=np.float64),
            age=now - rows_N["created"],
            elapsed=now - rows_N["last_review"],
            overdue=(now - rows_N["due"]) / np.maximum(1.0, rows_N["due"] - rows_N["last_review"]),
            is_new=rows_N["visits"] <= 1,
            num_zero_variance=rows_N["num_silent"],
            history_sum=rho_N * rows_N["history_sum"],
            history_count=rho_N * rows_N["history_count"],
        )

    def group_candidates(self, groups_N: np.ndarray, now: int) -> Candidates:
        rows_N = rows_at(self._store.groups, groups_N)
        return Candidates(
            len(groups_N),
            are_groups=True,
            diversity_coeff=self._settings.diversity_coeff,
            **self._columns(rows_N, rows_at(self._store.items, rows_N["slot"]), now),
            pass_rate=rows_N["num_success"] / np.maximum(1, rows_N["size"]),
            group_size=rows_N["size"],
            abs_advantage=rows_N["abs_advantage"],
            age=now - rows_N["born"],
            elapsed=now - rows_N["born"],
            uses=rows_N["uses"],
            is_new=rows_N["uses"] == 0,
        )

    def _columns(self, rows_N: np.ndarray, items_N: np.ndarray, now: int) -> dict[str, Any]:
        """Return the columns that items and groups share, those of recall only if something reads them."""
        columns: dict[str, Any] = {name: rows_N[name] for name in ("reward", "variance", "nll", "num_success")}
        columns |= {name: items_N[name] for name in ("domain", "diversity", "visits")}
        columns["seq"] = rows_N["seq"].astype(np.int64)
        if self._reads_recall:
            alpha_N, beta_N = items_N["alpha"].astype(np.float64), items_N["beta"].astype(np.float64)
            columns["retrievability"] = self._recall.recall_of(items_N, now)
            columns["posterior_mean"] = alpha_N / (alpha_N + beta_N)
        return columns

    # --- filter ----------------------------------------------------------------------------------

    def _domains(self, are_groups: bool = False) -> Collection[int] | None:
        """Return the numbers of the domains whose items, or groups, may be drawn; None for all."""
        chosen, names = self._filter, self._store.domains
        if chosen is None or callable(chosen):
            return None
        if chosen == "last":
            return range(len(names))[-2:][:1]
        if chosen == "earlier":  # the newest domain's prompts are played fresh; its groups may still be reused
            newest = None if are_groups else self._store.newest_domain
            return [number for number, name in enumerate(names) if name != newest]
        return [number for number, name in enumerate(names) if name in chosen]

    def _size(self, least: int, total: int) -> int:
        """Return the size of a pool: all, `total`, for a user's filter, which may leave few of them."""
        return total if callable(self._filter) else max(least, MOST_CANDIDATES)

    def _kept(self, candidates: Candidates) -> np.ndarray:
        """Return whether a user's filter keeps each candidate, bool [N]; all without one."""
        is_kept_N = np.full(len(candidates), not callable(self._filter))
        for domain in np.unique(candidates.domain).tolist() if callable(self._filter) else ():
            inside = np.flatnonzero(candidates.domain == domain)
            answer = np.asarray(called("domains", self._filter, self._store.domains[domain], candidates.take(inside)))
            if answer.dtype != bool or answer.shape not in ((), inside.shape):
                raise RuleError(
                    f"domains returned {answer.dtype} of shape {answer.shape}; expected True or False, or one for each "
                    f"of {len(inside)} candidates"
                )
            is_kept_N[inside] = answer
        return is_kept_N

    def _drawn(
        self,
        kind: str,
        name: str,
        pool_N: np.ndarray,
        candidates: Candidates,
        num: int,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots that the rule of `kind` draws of those that the filter keeps, and their loss weights."""
        if num < 1:
            return np.empty(0, np.int64), np.empty(0)
        is_kept_N = self._kept(candidates)
        if not is_kept_N.all():
            pool_N, candidates = pool_N[is_kept_N], candidates.take(np.flatnonzero(is_kept_N))
        indices, weight_N = apply(f"selection {name!r}", self._rules[kind], candidates, num, generator)
        return pool_N[indices], weight_N
