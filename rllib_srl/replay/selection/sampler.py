"""Draws items and groups from the tables: builds candidates, applies a rule, returns slots.

    pool of slots (at most `MOST_CANDIDATES`) -> Candidates -> rule -> slots

Items (revisit, eviction) and groups (reuse) have the same columns; a group takes the columns it lacks from its item.
Draws are functions of the rows: not of the order in which rows were added and removed, nor of when they were loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rllib_srl.replay.history import discount
from rllib_srl.replay.items import Tables
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.rules import BY_DUE, DATELESS, EVICTIONS, SELECTIONS, Candidates, apply
from rllib_srl.replay.settings import ReplaySettings

MOST_CANDIDATES = 4096  # maximum candidates of a draw; if there are more, a uniform sample of them


class Draws:
    """Draws items and groups from `Tables`; apart from the tables, a draw depends only on the given generator."""

    def __init__(self, settings: ReplaySettings, tables: Tables, recall: Recall) -> None:
        self._settings, self._tables, self._recall = settings, tables, recall
        self._reads_recall = settings.reads_recall
        self._is_by_due = settings.selection in BY_DUE
        self._is_by_due |= settings.has_due_dates and settings.selection not in DATELESS  # a rule of the user
        chosen = {
            "items": (SELECTIONS, settings.selection, settings.selection_config),
            "groups": (SELECTIONS, settings.reuse_selection, settings.reuse_selection_config),
            "eviction": (EVICTIONS, settings.eviction, {}),
        }
        self._rules = {
            kind: (f"{table.kind} {name!r}", table.make(name, config)) for kind, (table, name, config) in chosen.items()
        }

    def items(self, num: int, now: int, generator: np.random.Generator, without: Sequence[int] = ()) -> np.ndarray:
        """Return the slots of `num` items to revisit, none of `without`; fewer only if fewer may be played."""
        pool_N = self.item_pool(now, max(num + len(without), MOST_CANDIDATES), generator)
        pool_N = pool_N[~np.isin(pool_N, np.array(without, pool_N.dtype))]
        return self._drawn("items", pool_N, now, num, generator)

    def groups(self, num: int, now: int, generator: np.random.Generator, must_vary: bool = True) -> np.ndarray:
        """Return the slots of `num` groups to reuse, fewer only if fewer may be reused.

        Groups without a reward are left out, and if they `must_vary` those whose rewards are all equal.
        """
        pool_N = self.group_pool(now, max(num, MOST_CANDIDATES), generator, must_vary)
        return self._drawn("groups", pool_N, now, num, generator)

    def evicted(self, num: int, now: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of at most `num` items to evict; raise a ValueError if the rule returned none."""
        slots_N = self._tables.slots()
        pool_N = slots_N[generator.choice(len(slots_N), min(MOST_CANDIDATES, len(slots_N)), replace=False)]
        evicted_N = self._drawn("eviction", pool_N, now, num, generator)
        if not len(evicted_N):
            raise ValueError(f"{self._rules['eviction'][0]} returned no item; expected at least one")
        return evicted_N

    def item_pool(self, now: int, max_num: int, generator: np.random.Generator) -> np.ndarray:
        """Return the slots of at most `max_num` candidates for a revisit: items that are due, and items that rested.

        Where due dates count, the earliest due items come first, and a uniform sample of the rested fills the pool;
        elsewhere, and if more than `max_num` qualify, all of it is a uniform sample. Due items are not tested against
        `min_recall_interval`: their due date already includes it. Items that wait for a rating are left out.
        """
        rows = self._tables.items
        due_N, is_free_N = rows["due"], self._tables.items.is_used & self._is_in_domains() & ~self._is_waiting(now)
        is_due_N = is_free_N & (due_N <= now)
        is_rested_N = is_free_N & (rows["last_review"] <= now - self._settings.min_recall_interval)
        if not self._is_by_due and np.count_nonzero(is_able_N := is_due_N | is_rested_N) > max_num:
            return self._sampled(is_able_N, max_num, generator)
        slots_N = np.flatnonzero(is_due_N)
        if 0 < max_num < len(slots_N):
            slots_N = slots_N[due_N[slots_N] <= np.partition(due_N[slots_N], max_num - 1)[max_num - 1]]
        first_N: np.ndarray = slots_N[np.lexsort((rows["seq"][slots_N], due_N[slots_N]))[:max_num]]
        if len(first_N) == max_num:
            return first_N
        sampled_N = self._sampled(is_rested_N, max_num, generator)
        # Dropping the due slots from a uniform random sequence leaves a uniform random sequence of the others.
        others_N = sampled_N[due_N[sampled_N] > now]
        return np.concatenate([first_N, others_N[: max_num - len(first_N)]])

    def group_pool(self, now: int, max_num: int, generator: np.random.Generator, must_vary: bool) -> np.ndarray:
        """Return the slots of candidates for reuse, a uniform sample of those that are young and not used up."""
        rows, settings = self._tables.groups, self._settings
        is_able_N = self._tables.groups.is_used & (rows["born"] < now) & (rows["born"] >= now - settings.max_age)
        is_able_N &= (rows["uses"] < settings.max_uses) & (rows["variance" if must_vary else "num_rewarded"] > 0)
        is_able_N &= self._is_in_domains(are_groups=True)[rows["slot"]]
        groups_N = np.flatnonzero(is_able_N)
        domain_N = self._tables.items["domain"][rows["slot"][groups_N]]
        keys_N = (domain_N, *(rows[name][groups_N] for name in ("uses", "born", "seq")))
        groups_K: np.ndarray = groups_N[sample(max_num, generator, *keys_N)]
        return groups_K

    def _is_waiting(self, now: int) -> np.ndarray:
        """Return whether each item has a group without rewards that is young enough to be rated and reused.

        Another visit would soon replace the answers that people are asked to rate.
        """
        groups = self._tables.groups
        young_N = np.flatnonzero(groups.is_used & (groups["born"] >= now - self._settings.max_age))
        unrated_N = young_N[groups["num_rewarded"][young_N] == 0]
        is_waiting_N = np.zeros(len(self._tables.items), bool)
        is_waiting_N[groups["slot"][unrated_N]] = True
        return is_waiting_N

    def _sampled(self, is_wanted_N: np.ndarray, max_num: int, generator: np.random.Generator) -> np.ndarray:
        slots_N = np.flatnonzero(is_wanted_N)
        keys_N = [self._tables.items[name][slots_N] for name in ("domain", "last_review", "seq")]
        slots_K: np.ndarray = slots_N[sample(max_num, generator, *keys_N)]
        return slots_K

    def _is_in_domains(self, are_groups: bool = False) -> np.ndarray:
        """Return whether each item row is of a domain whose items, or groups, may be drawn; free rows may be of any."""
        chosen, names = self._settings.domains, self._tables.domains
        if chosen == "all":
            return np.ones(len(self._tables.items), bool)
        if chosen == "last":
            chosen = names[-2:][:1]
        elif chosen == "earlier":  # the newest domain's prompts are played fresh; its groups may still be reused
            newest = None if are_groups else self._tables.newest_domain
            chosen = [name for name in names if name != newest]
        is_in_D = np.array([*(name in chosen for name in names), False])
        is_in_N: np.ndarray = is_in_D[self._tables.items["domain"]]
        return is_in_N

    def _drawn(self, kind: str, pool_N: np.ndarray, now: int, num: int, generator: np.random.Generator) -> np.ndarray:
        title, rule = self._rules[kind]
        candidates = self._candidates(pool_N, now, are_groups=kind == "groups")
        slots_N: np.ndarray = pool_N[apply(title, rule, candidates, max(0, num), generator)]
        return slots_N

    def _candidates(self, slots_N: np.ndarray, now: int, are_groups: bool) -> Candidates:
        """Build candidates, with the columns of recall only if something reads them.

        The histories of items are discounted up to the newest visit of any of them.
        """
        settings, items = self._settings, self._tables.items
        rows_N = (self._tables.groups if are_groups else items).at(slots_N)
        items_N = items.at(rows_N["slot"]) if are_groups else rows_N
        columns: dict[str, Any] = {name: rows_N[name] for name in ("reward", "variance", "nll")}
        columns |= {name: items_N[name] for name in ("domain", "diversity", "visits")}
        columns["seq"] = rows_N["seq"].astype(np.int64)
        if self._reads_recall:
            alpha_N, beta_N = items_N["alpha"].astype(np.float64), items_N["beta"].astype(np.float64)
            columns["retrievability"] = self._recall.recall_of(items_N, now)
            columns["posterior_mean"] = alpha_N / (alpha_N + beta_N)
        if are_groups:
            columns |= {"abs_advantage": rows_N["abs_advantage"], "uses": rows_N["uses"]}
            columns["pass_rate"] = rows_N["num_success"] / np.maximum(1, rows_N["size"])
            columns["age"] = columns["elapsed"] = now - rows_N["born"]
        else:
            rho_N = discount(settings.history_half_life, float(rows_N["version"].max(initial=0)) - rows_N["version"])
            columns |= {name: rho_N * rows_N[name] for name in ("history_sum", "history_count")}
            columns |= {"pass_rate": rows_N["pass_rate"], "num_zero_variance": rows_N["num_zero_variance"]}
            columns["abs_advantage"] = np.sqrt(rows_N["variance"], dtype=np.float64)
            columns |= {"age": now - rows_N["created"], "elapsed": now - rows_N["last_review"]}
            columns["overdue"] = (now - rows_N["due"]) / np.maximum(1.0, rows_N["due"] - rows_N["last_review"])
        return Candidates(len(slots_N), are_groups, settings.diversity_coeff, **columns)


def sample(num: int, generator: np.random.Generator, *keys_N: np.ndarray) -> np.ndarray:
    """Draw the positions of `num` distinct rows uniformly, in random order, or of all rows if there are fewer.

    They are drawn as ranks in the order of the integers `keys_N`, the first key first, so that the draw does not depend
    on the places of the rows; no two rows agree in all keys.
    """
    if not (num := min(num, len(keys_N[0]))):
        return np.empty(0, np.int64)
    rank_K = generator.choice(len(keys_N[0]), num, replace=False)
    spans = [int(key_N.max()) - int(key_N.min()) + 1 for key_N in keys_N]
    order_N: np.ndarray
    if math.prod(spans) >= 1 << 63:
        order_N = np.lexsort(keys_N[::-1])
        return order_N[rank_K]
    code_N = np.zeros(len(keys_N[0]), np.int64)  # one integer per row is sorted eight times as fast
    for key_N, span in zip(keys_N, spans):
        code_N = code_N * span + (key_N.astype(np.int64) - int(key_N.min()))
    order_N = np.argsort(code_N)
    return order_N[rank_K]
