"""Draws items and groups from the tables: builds candidates, applies a rule, returns slots.

    pool of slots (bounded, `candidate_pool`) -> Candidates -> select -> slots

Items (revisit, eviction) and groups (reuse) have the same columns; a group takes the columns it lacks from its item.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.schedule.recall import Recall, overdue_by_recall
from rllib_srl.replay.selection.candidates import Candidates
from rllib_srl.replay.selection.eviction import evict
from rllib_srl.replay.selection.pool import COLUMNS as POOL_COLUMNS
from rllib_srl.replay.selection.pool import (
    DISCOUNTED_BY,
    HISTORY,
    SlotClock,
    Surprise,
    context_of,
    discounted,
    pool_candidates,
)
from rllib_srl.replay.selection.predicates import Entry, domain_filter, sees_entries
from rllib_srl.replay.selection.rules import (
    BY_DUE,
    DATELESS,
    READ_HISTORY,
    SELECTIONS,
    WHOLE_POOL,
    Carry,
    Rule,
    importance,
    make_settings,
    select,
)
from rllib_srl.replay.selection.shares import NUM_BANDS, DomainShares
from rllib_srl.replay.selection.signal import Recorded, signal
from rllib_srl.replay.selection.today import Judged, Past, Today, judged, past_of, trains_again
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import LEECH, WAITING, rows_at
from rllib_srl.types import History

RESERVE = 0.125  # share of the capacity reserved for items that wait to be scheduled


class DrawnGroups(NamedTuple):
    """Slots of drawn groups, and the loss weight of each (`rules.importance`)."""

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

    def __init__(
        self,
        settings: ReplaySettings,
        store: ItemStore,
        recall: Recall,
        statistics: DomainStatistics,
        surprise: Surprise | None = None,
    ) -> None:
        """Draw from `store` by the rules of `settings`.

        Args:
            settings: of the memory.
            store: the items.
            recall: their schedule.
            statistics: of the domains.
            surprise: as in `pool.context_of`.
        """
        self._settings, self._store, self._recall = settings, store, recall
        self._statistics, self._surprise = statistics, surprise
        self._clock = SlotClock()
        # Of the last draw by `signal`: slot -> factors of its priority; number of a domain -> `DomainSlots.facts_of`.
        self.reasons: dict[int, dict[str, float]] = {}
        self.domain_reasons: dict[int, dict[str, float]] = {}
        self._filter = domain_filter(settings.domains)
        self._sees_entries = sees_entries(self._filter)
        coeff = settings.diversity_coeff if "draw" in settings.diversity_on else 0.0
        common = {"leech_share": settings.leech_share, "diversity_coeff": coeff}
        common["reservoir_seed"] = settings.reservoir_seed
        of_reuse = settings.reuse_selection_config
        rules = settings.selection, settings.reuse_selection
        # Without parameters of its own, the rule of groups reads those that both rules share.
        of_groups = (rules, settings.selection_config) if of_reuse is None else (rules[::-1], of_reuse)
        given = {"items": (rules, settings.selection_config), "groups": of_groups}
        self._rule_settings = {
            kind: make_settings(one, {**common, **values}, [other]) for kind, ((one, other), values) in given.items()
        }
        self._carries = {"items": Carry(), "groups": Carry(), "planned_items": Carry(), "planned_groups": Carry()}

    def items(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        without: Sequence[int] = (),
        shares: DomainShares | None = None,
    ) -> np.ndarray:
        """Return the slots of `num` items to revisit, fewer only if fewer may be played.

        Args:
            num: items wanted.
            now: the training iteration.
            generator: of this draw.
            without: slots that are already in the batch.
            shares: domain shares in place of `domain_quotas`.
        """
        store, settings = self._store, self._settings
        domains = self.domains(shares)
        if settings.selection in WHOLE_POOL:
            return self._of_all(num, now, generator, without, shares)

        is_by_due = not settings.fill_with_not_due or settings.selection in BY_DUE
        is_by_due |= settings.has_due_dates and settings.selection not in DATELESS  # a rule of the user

        def pooled(size: int) -> np.ndarray:
            found = store.pool(now, size, generator, domains, settings.min_recall_interval, is_by_due)
            return self._wanted_items(found[~np.isin(found, np.array(without, found.dtype))], now)

        pool = pooled(size := max(num + len(without), settings.candidate_pool))
        if self._sees_entries and len(pool) < num and size < len(store):
            pool = pooled(len(store))  # items that pass the predicate may be anywhere
        if not len(pool) or num < 1:
            return np.empty(0, np.int64)
        candidates = self.item_candidates(pool, now)
        if not settings.fill_with_not_due:
            due = np.flatnonzero(candidates.overdue >= 0)
            pool, candidates = pool[due], candidates.take(due)
        is_leech_N = store.items["status"][pool] == LEECH
        selected = self._select(settings.selection, "items", candidates, num, generator, is_leech_N, shares)
        slots_K: np.ndarray = pool[selected.indices]
        return slots_K

    def from_pool(
        self, num: int, now: int, generator: np.random.Generator, shares: DomainShares | None = None
    ) -> np.ndarray:
        """Return the slots of `num` items to play, visited or not: all that have rested are candidates of the rule.

        Args:
            num: items wanted.
            now: the training iteration.
            generator: of this draw.
            shares: domain shares in place of `domain_quotas`.
        """
        return self._of_all(num, now, generator, (), shares)

    def _of_all(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        without: Sequence[int],
        shares: DomainShares | None,
    ) -> np.ndarray:
        store, settings = self._store, self._settings
        self.reasons, self.domain_reasons = {}, {}
        slots_N = store.rested(now, self.domains(shares), settings.min_recall_interval)
        slots_N = slots_N[~np.isin(slots_N, np.array(without, np.int64))] if len(without) else slots_N
        slots_N = self._wanted_items(slots_N, now)
        if not len(slots_N) or num < 1:
            return np.empty(0, np.int64)
        candidates = self.all_candidates(slots_N, now)
        name = settings.selection
        rule = Recorded() if SELECTIONS.named(name) is signal else None  # a user's rule of this name has no reasons
        drawn = self._select(name, "items", candidates, num, generator, shares=shares, applied=rule).indices
        if name == "signal":
            self._clock.advance(candidates.domain[drawn].tolist())
        if rule is not None:
            pairs = zip(slots_N[drawn].tolist(), candidates.seq[drawn].tolist(), strict=True)
            self.reasons = {slot: rule.factors[seq] for slot, seq in pairs}
            self.domain_reasons = rule.domains
        drawn_K: np.ndarray = slots_N[drawn]
        return drawn_K

    def all_candidates(self, slots_N: np.ndarray, now: int) -> Candidates:
        """Build the candidates of the rules that read the history of every item; their recall is left out."""
        store, settings = self._store, self._settings
        columns = store.columns_of(slots_N, POOL_COLUMNS)
        if settings.selection in READ_HISTORY or self._surprise:
            history = store.columns_of(slots_N, (*HISTORY, *DISCOUNTED_BY[settings.history_by]))
            columns |= discounted(history, settings.history_by, settings.history_half_life)
        context = context_of(self._statistics, store.domains, self._clock, self._surprise)
        return pool_candidates(columns, now, context, store.domains, self._rule_settings["items"].signal.weights)

    def groups(
        self,
        num: int,
        now: int,
        generator: np.random.Generator,
        shares: DomainShares | None = None,
        today: Today | None = None,
    ) -> DrawnGroups:
        """Return `num` groups to reuse, fewer only if fewer may be reused.

        Args:
            num: groups wanted.
            now: the training iteration.
            generator: of this draw.
            shares: domain shares in place of `domain_quotas`.
            today: baseline that decides which groups have a signal; None: those whose rewards differ.
        """
        store, settings = self._store, self._settings
        domains = self.domains(shares, are_groups=True)
        has_signal = None if today is None else partial(self._trains_again, today=today)

        def pooled(size: int) -> np.ndarray:
            limits = (settings.max_age, settings.max_uses)
            found = store.group_pool(now, size, generator, *limits, domains, has_signal)
            return self._wanted_groups(found, now)

        pool = pooled(size := max(num, settings.candidate_pool))
        if self._sees_entries and len(pool) < num and size < store.num_groups:
            pool = pooled(store.num_groups)
        if not len(pool) or num < 1:
            return DrawnGroups(np.empty(0, np.int64), np.empty(0))
        candidates = self.group_candidates(pool, now, today)
        drawn = self._select(settings.reuse_selection, "groups", candidates, num, generator, shares=shares)
        return DrawnGroups(pool[drawn.indices], drawn.weight_N)

    def evicted(self, num: int, now: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of `num` items to evict, fewer only if the pool has fewer.

        `lowest_value` evicts only waiting items while at least `num` + `RESERVE` * capacity items wait. A learned item
        has a lower value than an unlearned one, so it would otherwise be evicted after its first success, before its
        next review.
        """
        store, settings = self._store, self._settings
        is_reserve_full = store.num_items(WAITING) >= num + max(1, int(RESERVE * settings.capacity))
        if settings.eviction == "lowest_value" and is_reserve_full:
            pool = store.waiting(settings.candidate_pool)
        else:
            pool = store.any_items(settings.candidate_pool, generator)
        candidates = self.item_candidates(pool, now)
        weights = self._weights(candidates)
        evicted_K = evict(self._settings.eviction, candidates, num, generator, self._rule_settings["items"], weights)
        slots_K: np.ndarray = pool[evicted_K]
        return slots_K

    def item_candidates(self, slots_N: np.ndarray, now: int) -> Candidates:
        """Build the candidates of items; their recall is corrected by the domain factor (`schedule/recall.py`)."""
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

    def histories(
        self,
        today: Today,
        rows_N: np.ndarray,
        items_N: np.ndarray,
        domains: Sequence[str],
        reward_sum_N: np.ndarray | None = None,
    ) -> Past:
        """Return the histories of stored groups' prompts as of today, without the groups themselves.

        Args:
            today: the policy that finds them.
            rows_N: of the groups.
            items_N: rows of their items; zeros without one.
            domains: name of the domain of each.
            reward_sum_N: as in `today.past_of`.
        """
        names = list(dict.fromkeys(domains))
        domain_N = np.array([names.index(name) for name in domains], np.int64)
        by, half_life = self._settings.history_by, self._settings.history_half_life
        return past_of(today, by, half_life, self._statistics, names, items_N, rows_N, domain_N, reward_sum_N)

    def _trains_again(self, groups_N: np.ndarray, today: Today) -> np.ndarray:
        return trains_again(today, self._judged(groups_N, today))

    def _judged(self, groups_N: np.ndarray, today: Today) -> Judged:
        rows_N = rows_at(self._store.groups, groups_N)
        items_N = rows_at(self._store.items, rows_N["slot"])
        by, half_life = self._settings.history_by, self._settings.history_half_life
        domain_N = items_N["domain"].astype(np.int64)
        names = self._store.domains
        return judged(
            today, past_of(today, by, half_life, self._statistics, names, items_N, rows_N, domain_N), rows_N
        )

    def group_candidates(self, groups_N: np.ndarray, now: int, today: Today | None = None) -> Candidates:
        """Build the candidates of groups; with `today` their spread is around its baseline, not around their mean."""
        rows_N = rows_at(self._store.groups, groups_N)
        slots_N = rows_N["slot"].astype(np.int64)
        items_N = rows_at(self._store.items, slots_N)
        shared, abs_advantage_N = _shared(rows_N), rows_N["abs_advantage"]
        if today is not None:
            shared["variance"] = self._judged(groups_N, today).mean_square
            abs_advantage_N = np.sqrt(shared["variance"])
        return Candidates.of(
            len(groups_N),
            are_groups=True,
            **shared,
            pass_rate=rows_N["num_success"] / np.maximum(1, rows_N["size"]),
            group_size=rows_N["size"],
            abs_advantage=abs_advantage_N,
            age=now - rows_N["born"],
            elapsed=now - rows_N["born"],
            retrievability=self._recall.retrievability(slots_N, now),
            uses=rows_N["uses"],
            is_new=rows_N["uses"] == 0,
            **_of_item(items_N),
        )

    def domains(self, shares: DomainShares | None = None, are_groups: bool = False) -> Collection[int] | None:
        """Return the numbers of the domains whose items, or groups, may be drawn; None for all."""
        if (self._filter is None or self._sees_entries) and (shares is None or shares.only is None):
            return None
        every = enumerate(self._store.domains)
        return [number for number, name in every if self.is_wanted(name, shares, are_groups)]

    def is_wanted(self, domain: str, shares: DomainShares | None = None, are_groups: bool = False) -> bool:
        """Return whether items, or groups, of a domain (by name) may be drawn."""
        if shares is not None and shares.only not in (None, domain):
            return False
        if self._filter is None or self._sees_entries:
            return True
        if self._filter == "last":
            return domain in self._store.domains[-2:][:1]
        if self._filter == "earlier":  # the newest domain's prompts are played fresh; its groups may still be reused
            return are_groups or domain != self._store.header.newest_domain
        is_wanted: Callable[[str], bool] = self._filter if callable(self._filter) else self._filter.__contains__
        return is_wanted(domain)

    @property
    def entry_filter(self) -> Callable[[np.ndarray, int], np.ndarray] | None:
        """Return a function of slots and `now` that keeps the items passing the predicate; None without one."""
        return self._wanted_items if self._sees_entries else None

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
        """Return the carried fractions of slots, and the clock of slots if the rule reads it, as JSON types."""
        carries = {
            name: {"leeches": carry.leeches, "domains": [[int(d), float(c)] for d, c in carry.domains.items()]}
            for name, carry in self._carries.items()
        }
        if self._settings.selection != "signal":
            return carries
        surprise = list(self._surprise) if self._surprise else None  # for readers of the journal
        return {**carries, "clock": self._clock.get_state(), "surprise": surprise}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._carries |= {
            name: Carry(carry["leeches"], {int(d): float(c) for d, c in carry["domains"]})
            for name, carry in state.items()
            if name in self._carries
        }
        self._clock.set_state(state.get("clock", {}))

    def _select(
        self,
        rule: str,
        carried: str,
        candidates: Candidates,
        num: int,
        generator: np.random.Generator,
        is_leech_N: np.ndarray | None = None,
        shares: DomainShares | None = None,
        applied: Rule | None = None,
    ) -> _Chosen:
        weights: Mapping[int, float] | None = self._weights(candidates)
        settings = self._rule_settings[carried]
        if shares is not None:
            columns = (candidates.domain, candidates.pass_rate)
            class_N, weights = shares.divided(self._store.domains, *columns, num)
            context = candidates.context.divided(len(self._store.domains), NUM_BANDS)
            candidates = replace(candidates, domain=class_N, context=context)
            carried = f"planned_{carried}"
        carry = self._carries[carried]
        chosen = select(rule, candidates, num, generator, settings, weights, is_leech_N, carry, applied)
        if len(chosen.indices) == num:
            self._carries[carried] = chosen.carry
        weight_N = importance(rule, candidates, chosen.indices, settings, weights)
        return _Chosen(chosen.indices, weight_N)

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


class DrawnAnswer(NamedTuple):
    """The journal's answer to a draw for reuse; one entry a group."""

    seqs: list[int]
    weights: list[float]
    histories: list[History | None]  # under today's baseline

    def to_json(self) -> Any:
        """Return JSON types: the numbers alone if there is nothing else to say."""
        if set(self.weights) <= {1.0} and set(self.histories) <= {None}:
            return self.seqs
        histories = [None if one is None else list(one) for one in self.histories]
        return {"seqs": self.seqs, "weights": self.weights, "histories": histories}


def drawn_in(answer: Any) -> DrawnAnswer:
    """Return the answer that `to_json` wrote; earlier versions wrote no histories."""
    if not isinstance(answer, Mapping):
        return DrawnAnswer(answer, [1.0] * len(answer), [None] * len(answer))
    histories = answer.get("histories", [None] * len(answer["seqs"]))
    of = [None if one is None else History(*one) for one in histories]
    return DrawnAnswer(answer["seqs"], answer["weights"], of)
