"""Draws items and groups from the tables: builds candidates, applies a rule, returns slots.

    pool of slots (at most `MOST_CANDIDATES`) -> Candidates -> select -> slots

Items (revisit, eviction) and groups (reuse) have the same columns; a group takes the columns it lacks from its item.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.replay.history import discounts
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.candidates import MOST_CANDIDATES, Candidates
from rllib_srl.replay.selection.eviction import EVICTIONS, evict
from rllib_srl.replay.selection.predicates import Entry, domain_filter, sees_entries
from rllib_srl.replay.selection.rules import BY_DUE, DATELESS, SELECTIONS, Carry, Rule, loss_weights, select
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import rows_at
from rllib_srl.types import History


class DrawnGroups(NamedTuple):
    """Slots of drawn groups, and the loss weight of each (`rules.loss_weights`)."""

    groups_N: np.ndarray
    weight_N: np.ndarray


class _Chosen(NamedTuple):
    indices: np.ndarray
    weight_N: np.ndarray


class Draws:
    """Draws items and groups from a `ItemStore`.

    Invariant: apart from the tables, a draw depends only on the given generator and on `get_state()`. A short draw
    takes all candidates without any rounding, so it leaves the carry unchanged.
    """

    def __init__(self, settings: ReplaySettings, store: ItemStore, recall: Recall) -> None:
        """Draw from `store`, whose schedule is `recall`, by the rules of `settings`."""
        self._settings, self._store, self._recall = settings, store, recall
        self._reads_recall, self._has_due_dates = settings.reads_recall, settings.has_due_dates
        self._is_by_due = not settings.fill_with_not_due or settings.selection in BY_DUE
        self._is_by_due |= settings.has_due_dates and settings.selection not in DATELESS  # a rule of the user
        self._measures_diversity = settings.embedding_used is not None
        self._filter = domain_filter(settings.domains)
        self._sees_entries = sees_entries(self._filter)
        self._diversity_coeff = settings.diversity_coeff if "draw" in settings.diversity_on else 0.0
        self._rules: dict[str, tuple[str, Rule]] = {
            "items": (settings.selection, SELECTIONS.make(settings.selection, settings.selection_config)),
            "groups": (
                settings.reuse_selection,
                SELECTIONS.make(settings.reuse_selection, settings.reuse_selection_config),
            ),
        }
        self._eviction = EVICTIONS.make(settings.eviction, {})
        self._carries: dict[str, Carry] = {"items": {}, "groups": {}}

    def items(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        without: Sequence[int] = (),
    ) -> np.ndarray:
        """Return the slots of `num` items to revisit, fewer only if fewer may be played.

        Args:
            num: items wanted.
            now: the training iteration.
            generator: of this draw.
            without: slots that are already in the batch.
        """
        store, settings = self._store, self._settings
        domains = self.domains()

        def pooled(size: int) -> np.ndarray:
            found = store.pool(now, size, generator, domains, settings.min_recall_interval, self._is_by_due)
            return self._wanted_items(found[~np.isin(found, np.array(without, found.dtype))], now)

        pool = pooled(size := max(num + len(without), MOST_CANDIDATES))
        if self._sees_entries and len(pool) < num and size < len(store):
            pool = pooled(len(store))  # items that pass the predicate may be anywhere
        if not len(pool) or num < 1:
            return np.empty(0, np.int64)
        candidates = self.item_candidates(pool, now)
        if not settings.fill_with_not_due:
            due = np.flatnonzero(candidates.overdue >= 0)
            pool, candidates = pool[due], candidates.take(due)
        slots_K: np.ndarray = pool[self._select("items", candidates, num, generator).indices]
        return slots_K

    def groups(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        must_vary: bool = True,
    ) -> DrawnGroups:
        """Return `num` groups to reuse, fewer only if fewer may be reused.

        Args:
            num: groups wanted.
            now: the training iteration.
            generator: of this draw.
            must_vary: leave out groups whose rewards are all equal.
        """
        store, settings = self._store, self._settings
        domains = self.domains(are_groups=True)

        def pooled(size: int) -> np.ndarray:
            found = store.group_pool(now, size, generator, settings.max_age, settings.max_uses, domains, must_vary)
            return self._wanted_groups(found, now)

        pool = pooled(size := max(num, MOST_CANDIDATES))
        if self._sees_entries and len(pool) < num and size < store.num_groups:
            pool = pooled(store.num_groups)
        if not len(pool) or num < 1:
            return DrawnGroups(np.empty(0, np.int64), np.empty(0))
        drawn = self._select("groups", self.group_candidates(pool, now), num, generator)
        return DrawnGroups(pool[drawn.indices], drawn.weight_N)

    def evicted(self, num: int, now: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of `num` items to evict, fewer only if the pool has fewer."""
        pool = self._store.any_items(MOST_CANDIDATES, generator)
        candidates = self.item_candidates(pool, now)
        weights = self._weights(candidates)
        name = self._settings.eviction
        slots_K: np.ndarray = pool[evict(name, self._eviction, candidates, num, generator, weights)]
        return slots_K

    def item_candidates(self, slots_N: np.ndarray, now: int) -> Candidates:
        """Build the candidates of items; their histories are discounted up to the newest visit of any of them."""
        rows_N = rows_at(self._store.items, slots_N)
        interval_N = np.maximum(1.0, rows_N["due"] - rows_N["last_review"])
        newest_N = np.full(len(rows_N), rows_N["version"].max(initial=0))
        how = (self._settings.history_by, self._settings.history_half_life)
        rho_N = discounts(*how, rows_N, newest_N, float(rows_N["history_clock"].max(initial=0.0)))
        return Candidates.of(
            len(slots_N),
            diversity_coeff=self._diversity_coeff,
            **_shared(rows_N),
            **_of_item(rows_N),
            pass_rate=rows_N["pass_rate"],
            group_size=rows_N["group_size"],
            abs_advantage=np.sqrt(rows_N["variance"], dtype=np.float64),
            age=now - rows_N["created"],
            elapsed=now - rows_N["last_review"],
            overdue=(now - rows_N["due"]) / interval_N,
            **self._recalled(rows_N, now),
            is_new=rows_N["visits"] <= 1,
            num_silent=rows_N["num_silent"],
            history_sum=rho_N * rows_N["history_sum"],
            history_count=rho_N * rows_N["history_count"],
        )

    def group_candidates(self, groups_N: np.ndarray, now: int) -> Candidates:
        """Build the candidates of groups."""
        rows_N = rows_at(self._store.groups, groups_N)
        items_N = rows_at(self._store.items, rows_N["slot"])
        return Candidates.of(
            len(groups_N),
            are_groups=True,
            diversity_coeff=self._diversity_coeff,
            **_shared(rows_N),
            **_of_item(items_N),
            pass_rate=rows_N["num_success"] / np.maximum(1, rows_N["size"]),
            group_size=rows_N["size"],
            abs_advantage=rows_N["abs_advantage"],
            age=now - rows_N["born"],
            elapsed=now - rows_N["born"],
            **self._recalled(items_N, now),
            uses=rows_N["uses"],
            is_new=rows_N["uses"] == 0,
        )

    def _recalled(self, items_N: np.ndarray, now: int) -> dict[str, Any]:
        """Return the columns of recall; none if nothing reads them."""
        if not self._reads_recall:
            return {}
        alpha_N, beta_N = items_N["alpha"].astype(np.float64), items_N["beta"].astype(np.float64)
        return {
            "retrievability": self._recall.recall_of(items_N, now),
            "posterior_mean": alpha_N / (alpha_N + beta_N),
        }

    def why(self, slot: int, now: int) -> dict[str, Any]:
        """Return the facts behind a draw of an item: lateness, predicted recall, lapses, diversity."""
        rows_N = rows_at(self._store.items, [slot])
        row, is_predicted = rows_N[0], self._has_due_dates and rows_N["reps"][0]
        return {
            "key": f"{int(row['key']):016x}",
            "now": now,
            "late": round(now - float(row["due"]), 3),
            "recall": round(float(self._recall.recall_of(rows_N, now)[0]), 4) if is_predicted else None,
            "has_due_dates": self._has_due_dates,
            "elapsed": now - int(row["last_review"]),
            "pass_rate": round(float(row["pass_rate"]), 4),
            "visits": int(row["visits"]),
            "lapses": int(row["lapses"]),
            **({n: round(float(row[n]), 4) for n in ("novelty", "diversity")} if self._measures_diversity else {}),
        }

    def domains(self, are_groups: bool = False) -> Collection[int] | None:
        """Return the numbers of the domains whose items, or groups, may be drawn; None for all."""
        if self._filter is None or self._sees_entries:
            return None
        every = enumerate(self._store.domains)
        return [number for number, name in every if self.is_wanted(name, are_groups)]

    def is_wanted(self, domain: str, are_groups: bool = False) -> bool:
        """Return whether items, or groups, of a domain (by name) may be drawn."""
        if self._filter is None or self._sees_entries:
            return True
        if self._filter == "last":
            return domain in self._store.domains[-2:][:1]
        if self._filter == "earlier":  # the newest domain's prompts are played fresh; its groups may still be reused
            return are_groups or domain != self._store.header.newest_domain
        is_wanted: Callable[[str], bool] = self._filter if callable(self._filter) else self._filter.__contains__
        return is_wanted(domain)

    def _wanted_items(self, slots_N: np.ndarray, now: int) -> np.ndarray:
        if not self._sees_entries or not len(slots_N):
            return slots_N
        store = self._store
        entries = (Entry.of_item(store.items[slot], store.prompt_of(slot), now) for slot in slots_N.tolist())
        return slots_N[[self._is_entry_wanted(entry) for entry in entries]]

    def _wanted_groups(self, groups_N: np.ndarray, now: int) -> np.ndarray:
        if not self._sees_entries or not len(groups_N):
            return groups_N
        rows_N, items = self._store.groups[groups_N], self._store.items
        slots = rows_N["slot"].tolist()
        entries = (
            Entry.of_group(row, self._store.prompt_of(slot), now, items[slot])
            for row, slot in zip(rows_N, slots, strict=True)
        )
        return groups_N[[self._is_entry_wanted(entry) for entry in entries]]

    def _is_entry_wanted(self, entry: Entry) -> bool:
        return bool(self._filter(entry.prompt.domain, entry))

    def get_state(self) -> dict[str, Any]:
        """Return the carried fractions of slots, as JSON types."""
        return {name: [[int(d), float(c)] for d, c in carry.items()] for name, carry in self._carries.items()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._carries = {name: {int(d): float(c) for d, c in carry} for name, carry in state.items()}

    def _select(
        self,
        kind: str,
        candidates: Candidates,
        num: int,
        generator: np.random.Generator,
    ) -> _Chosen:
        name, rule = self._rules[kind]
        weights = self._weights(candidates)
        chosen = select(name, rule, candidates, num, generator, weights, self._carries[kind])
        if len(chosen.indices) == num:
            self._carries[kind] = chosen.carry
        return _Chosen(chosen.indices, loss_weights(rule, candidates, chosen.indices, weights))

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


def _of_item(rows_N: np.ndarray) -> dict[str, Any]:
    return {name: rows_N[name] for name in ("domain", "diversity", "visits")}


class DrawnAnswer(NamedTuple):
    """The journal's answer to a draw for reuse; one entry a group."""

    seqs: list[int]
    weights: list[float]
    histories: list[History | None]  # of their prompts, where the baseline is one from history

    def to_json(self) -> Any:
        """Return JSON types: the numbers alone if there is nothing else to say."""
        if set(self.weights) <= {1.0} and set(self.histories) <= {None}:
            return self.seqs
        histories = [None if one is None else list(one) for one in self.histories]
        return {"seqs": self.seqs, "weights": self.weights, "histories": histories}


def drawn_in(answer: Any) -> DrawnAnswer:
    """Return the answer that `to_json` wrote."""
    if not isinstance(answer, Mapping):
        return DrawnAnswer(answer, [1.0] * len(answer), [None] * len(answer))
    of = [None if one is None else History(*one) for one in answer["histories"]]
    return DrawnAnswer(answer["seqs"], answer["weights"], of)
