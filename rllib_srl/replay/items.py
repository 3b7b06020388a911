"""Hold the items of a memory and their groups: two NumPy tables, a map of keys, and draws of candidates.

    key -> slot ──> ITEM row, prompt ──> slots of its groups, oldest first ──> GROUP rows, targets

    pool, group_pool, any_items        slots of candidates for a rule

Draws are functions of the rows: not of the order in which rows were added and removed, nor of when they were loaded.
A new record takes the smallest free slot. Rows change only through the methods, which note the slots for the next
commit (`changed`); `items` and `groups` are read-only views. Groups may take other slots after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from rllib_srl.types import Prompt

# Sizes are multiples of 8 and the widest fields come first, so that fields are aligned without padding, which would
# hold arbitrary bytes: NumPy copies named fields only.
ITEM = np.dtype(
    [("key", "u8"), ("seq", "u8"), ("stability", "f8"), ("difficulty", "f8"), ("interval", "f8"), ("due", "f8")]
    + [("history_sum", "f8"), ("history_count", "f8")]  # see `replay/history.py`
    + [("domain", "i4"), ("reps", "i4"), ("lapses", "i4"), ("streak", "i4")]
    + [("last_review", "i4"), ("created", "i4"), ("alpha", "f4"), ("beta", "f4"), ("pass_rate", "f4")]
    + [("reward", "f4"), ("num_success", "i4"), ("group_size", "i4"), ("visits", "i4"), ("version", "i4")]
    + [("variance", "f4"), ("nll", "f4"), ("novelty", "f4"), ("diversity", "f4")]
    + [("num_silent", "i4")]  # groups of equal rewards in a row, at most 8
    + [("num_groups", "i4"), ("has_vector", "i4"), ("is_solved", "i4")]
)
GROUP = np.dtype(
    [("seq", "u8"), ("num_bytes", "i4"), ("in_history", "i4")]  # whether the item's history has its rewards
    + [("slot", "i4"), ("born", "i4"), ("version", "i4"), ("uses", "i4")]
    + [("size", "i4"), ("num_success", "i4"), ("reward", "f4"), ("variance", "f4"), ("abs_advantage", "f4")]
    + [("nll", "f4"), ("num_tokens", "i4"), ("num_loss_tokens", "i4")]
)
_AT_LEAST_0 = (
    *("stability", "interval", "variance", "reps", "lapses", "visits", "num_success", "num_groups", "domain"),
    *("history_count", "num_silent", "pass_rate", "diversity", "uses", "num_loss_tokens", "num_bytes", "abs_advantage"),
)
Domains = Collection[int] | None  # by number; None: all


def key_of(prompt: Prompt) -> int:
    """Return the key of a prompt as the integer in [0, 2**64) that the item table holds."""
    return int(prompt.key, 16)


def rows_at(rows: np.ndarray, slots: Any) -> np.ndarray:
    """Return a copy of `rows[slots]`, 20 times as fast as NumPy, which copies records field by field."""
    return _whole(rows)[np.asarray(slots, np.int64)].view(rows.dtype)


def _whole(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.dtype((np.void, rows.dtype.itemsize)))


def filled(rows: np.ndarray, fields: Mapping[str, Any]) -> Any:
    """Set fields of `rows` in place and return them; pass new rows or a copy."""
    for name, value in fields.items():
        rows[name] = value
    return rows


@dataclass(frozen=True)
class Contents:
    """What a database holds: items in slot order, groups in seq order; vectors, payloads and targets are left there."""

    position: int = 0  # number of commits
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    items: np.ndarray = field(default_factory=lambda: np.zeros(0, ITEM))
    prompts: list[Prompt] = field(default_factory=list)
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, GROUP))
    group_ids: list[str] = field(default_factory=list)
    targets: list[tuple[int, int, int]] = field(default_factory=list)  # seq, episode, bytes
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def seqs(self) -> np.ndarray:
        """Return the seq of each group, int64."""
        return self.groups["seq"].astype(np.int64)


class Changed(NamedTuple):
    """What was written and removed since the last commit."""

    items: list[tuple[int, bytes, Prompt]]  # slot, row, prompt
    removed_slots: list[int]
    groups: list[tuple[int, bytes, str]]  # seq, row, id
    removed_groups: list[int]  # seqs


class _Table:
    """Records by slot. Invariant: free rows are zero; `changed` has the slots written or freed since it was cleared."""

    def __init__(self, dtype: np.dtype, slots_N: np.ndarray, rows_N: np.ndarray) -> None:
        self.is_used = np.zeros(0, bool)
        self.changed: set[int] = set()
        self._bind(np.zeros(0, dtype))
        self._reserve(int(slots_N.max(initial=63)) + 1)
        self.rows[slots_N] = rows_N
        self.is_used[slots_N] = True

    def add(self, row: np.ndarray) -> int:
        slot = int(self.is_used.argmin())
        if self.is_used[slot]:
            self._reserve((slot := len(self.rows)) + 1)
        self.rows[slot], self.is_used[slot] = row[0], True
        self.changed.add(slot)
        return slot

    def update(self, slots: Any, fields: Mapping[str, Any]) -> None:
        listed = np.asarray(slots, np.int64)
        if len(np.unique(listed)) < len(listed) or not self.is_used[listed].all():
            raise ValueError(f"slots = {listed[:5].tolist()}; expected distinct ones that are in use")
        _whole(self.rows)[listed] = _whole(filled(rows_at(self.rows, listed), fields))
        self.changed.update(listed.tolist())

    def free(self, slot: int) -> None:
        self.rows[slot], self.is_used[slot] = np.zeros(1, self.rows.dtype)[0], False
        self.changed.add(slot)

    def _reserve(self, num_rows: int) -> None:
        more = max(num_rows, len(self.rows) * 9 // 8 + 64) - len(self.rows)
        self.is_used = np.concatenate([self.is_used, np.zeros(more, bool)])
        self._bind(np.concatenate([self.rows, np.zeros(more, self.rows.dtype)]))

    def _bind(self, rows: np.ndarray) -> None:
        self.rows, self.view = rows, rows.view()
        self.view.flags.writeable = False


class Tables:
    """The rows of all items and of their groups. Invariant: `check_valid` passes."""

    def __init__(self, stored: Contents | None = None) -> None:
        """Create tables with what a store holds; by default empty ones."""
        stored = stored or Contents()
        header = stored.state.get("items") or {"next_seq": 0, "next_group_seq": 0, "domains": [], "newest_domain": ""}
        self.next_seq, self.next_group_seq = header["next_seq"], header["next_group_seq"]  # never used again
        self.domains: list[str] = list(header["domains"])  # an item's `domain` is a position here; positions are final
        self.newest_domain: str = header["newest_domain"]  # of the item added last
        slots = stored.slots.tolist()
        self._items = _Table(ITEM, stored.slots, stored.items)
        self._groups = _Table(GROUP, np.arange(len(stored.groups)), stored.groups)
        self._prompts: dict[int, Prompt] = dict(zip(slots, stored.prompts, strict=True))
        self._slots = dict(zip(stored.items["key"].tolist(), slots, strict=True))
        self._groups_of: dict[int, list[int]] = {slot: [] for slot in slots}
        self.group_ids = dict(enumerate(stored.group_ids))  # by slot of the group
        self._group_at = {name: at for at, name in self.group_ids.items()}
        self.targets = {(seq, episode): num_bytes for seq, episode, num_bytes in stored.targets}
        self.removed_slots: list[int] = []  # since the last commit
        self._removed_groups: list[int] = []  # seqs
        for at, slot in enumerate(stored.groups["slot"].tolist()):  # in the order of seq
            if slot not in self._groups_of:
                raise ValueError(f"every group belongs to an item: there is none at slot {slot}")
            self._groups_of[slot].append(at)

    @property
    def header(self) -> dict[str, Any]:
        """Return the state that is not in the rows, as JSON types."""
        names = ("next_seq", "next_group_seq", "domains", "newest_domain")
        return {name: getattr(self, name) for name in names}

    @property
    def items(self) -> np.ndarray:
        """Return a read-only view of the item table, free rows included; stale after `add_item`, which may move it."""
        return self._items.view

    @property
    def groups(self) -> np.ndarray:
        """Return a read-only view of the group table, free rows included; stale after `add_group`."""
        return self._groups.view

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the groups and their targets."""
        return int(self.groups["num_bytes"].sum()) + sum(self.targets.values())

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._slots)

    def num_by_domain(self) -> dict[str, tuple[int, int]]:
        """Return domain -> number of its items and of their groups, 0 of domains whose items are gone."""
        rows_N, num = rows_at(self.items, self.slots()), len(self.domains)
        items_D = np.bincount(rows_N["domain"], minlength=num)
        groups_D = np.bincount(rows_N["domain"], rows_N["num_groups"], minlength=num).astype(np.int64)
        return dict(zip(self.domains, zip(items_D.tolist(), groups_D.tolist(), strict=True), strict=True))

    def domain_id(self, name: str) -> int | None:
        """Return the number of a domain, or None if no item of it was ever added."""
        return self.domains.index(name) if name in self.domains else None

    def slot_of(self, key: int) -> int | None:
        return self._slots.get(key)

    def prompt_of(self, slot: int) -> Prompt:
        return self._prompts[slot]

    def slots(self) -> np.ndarray:
        """Return the slots of all items, ascending."""
        return np.flatnonzero(self._items.is_used)

    def group_slots(self) -> np.ndarray:
        """Return the slots of all groups, ascending."""
        return np.flatnonzero(self._groups.is_used)

    def groups_of(self, slot: int) -> list[int]:
        """Return the group slots of an item, oldest first."""
        return list(self._groups_of[slot])

    def slots_with_vector(self) -> list[int]:
        """Return the slots of items that have a vector, ascending."""
        slots: list[int] = np.flatnonzero(self.items["has_vector"]).tolist()
        return slots

    def group_at(self, group_id: str) -> int | None:
        """Return the slot of the group with an id, the newest of several, or None."""
        return self._group_at.get(group_id)

    # --- changes ---------------------------------------------------------------------------------

    def add_item(self, key: int, prompt: Prompt, domain: str, now: int, **fields: Any) -> int:
        """Add an item with a new key at the smallest free slot and return the slot.

        Defaults, which `fields` override: creation, last review and due date are `now`; the posterior of its recall is
        uniform (alpha = beta = 1); all other fields are 0.
        """
        if key in self._slots:
            raise ValueError(f"key = {key:#x}; expected one that no item has")
        fields = {"created": now, "last_review": now, "due": now, "alpha": 1, "beta": 1} | fields
        row = filled(np.zeros(1, ITEM), fields)
        if domain not in self.domains:
            self.domains = [*self.domains, domain]
        row["key"], row["seq"], row["domain"] = key, self.next_seq, self.domains.index(domain)
        slot = self._items.add(row)
        self.next_seq, self.newest_domain = self.next_seq + 1, domain
        self._slots[key], self._prompts[slot], self._groups_of[slot] = slot, prompt, []
        return slot

    def remove_item(self, slot: int) -> None:
        """Remove an item and its groups."""
        for group in self.groups_of(slot):
            self.remove_group(group)
        del self._slots[int(self.items["key"][slot])], self._prompts[slot], self._groups_of[slot]
        self._items.free(slot)
        self.removed_slots.append(slot)

    def remove(self, keys: Collection[str] = (), domain: str | None = None, before: int | None = None) -> int:
        """Remove items; see `SRLReplayBuffer.remove`."""
        slots_N = self.slots()
        rows_N = rows_at(self.items, slots_N)
        is_gone_N = np.isin(rows_N["key"], np.array([int(key, 16) for key in keys], np.uint64))
        if domain is not None:
            number = self.domain_id(domain)
            is_gone_N |= rows_N["domain"] == (-1 if number is None else number)
        if before is not None:
            is_gone_N |= rows_N["last_review"] < before
            groups_N = self.group_slots()
            for at in groups_N[self.groups["born"][groups_N] < before].tolist():
                self.remove_group(at)
        for slot in slots_N[is_gone_N].tolist():
            self.remove_item(slot)
        return int(is_gone_N.sum())

    def update(self, slots: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of distinct items, each an array with one entry a slot or one value for all, or nothing.

        Raises:
            ValueError: slots without an item, or given twice.
        """
        self._items.update(slots, fields)

    def update_groups(self, groups: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of distinct groups, as `update` does."""
        self._groups.update(groups, fields)

    def add_group(self, slot: int, group_id: str, max_groups: int, **fields: Any) -> tuple[int, int]:
        """Add a group to an item, of which `max_groups` are kept; return its slot, and the number evicted for it."""
        row = filled(np.zeros(1, GROUP), fields | {"seq": self.next_group_seq, "slot": slot})
        siblings = self.groups_of(slot)
        evicted = siblings[: max(0, len(siblings) + 1 - max_groups)]
        for group in evicted:
            self.remove_group(group)
        group = self._groups.add(row)
        self.next_group_seq += 1
        self.group_ids[group] = group_id
        self._group_at[group_id] = group
        self._link(slot, [*self._groups_of[slot], group])
        return group, len(evicted)

    def remove_group(self, group: int) -> None:
        """Remove one group with its targets."""
        seq, slot = int(self.groups["seq"][group]), int(self.groups["slot"][group])
        group_id = self.group_ids.pop(group)
        if self._group_at.get(group_id) == group:
            del self._group_at[group_id]
        self._groups.free(group)
        self._link(slot, [other for other in self._groups_of[slot] if other != group])
        self._removed_groups.append(seq)
        for episode in self.episodes_with_target(seq):
            del self.targets[seq, episode]

    def episodes_with_target(self, seq: int) -> list[int]:
        """Return the episodes of a group that have a target."""
        return [episode for of, episode in self.targets if of == seq]

    def _link(self, slot: int, groups: list[int]) -> None:
        self._groups_of[slot] = groups
        self._items.update([slot], {"num_groups": len(groups)})

    def changed(self) -> Changed:
        """Return what was written and removed since the last call of `committed`."""
        slots = [slot for slot in sorted(self._items.changed) if self._items.is_used[slot]]
        groups = [at for at in sorted(self._groups.changed) if self._groups.is_used[at]]
        return Changed(
            [(slot, self.items[slot].tobytes(), self._prompts[slot]) for slot in slots],
            list(self.removed_slots),
            [(int(self.groups["seq"][at]), self.groups[at].tobytes(), self.group_ids[at]) for at in groups],
            list(self._removed_groups),
        )

    def committed(self) -> None:
        """Note that all changes are stored."""
        for noted in (self._items.changed, self._groups.changed, self.removed_slots, self._removed_groups):
            noted.clear()

    # --- draws -----------------------------------------------------------------------------------

    def pool(
        self,
        now: float,
        max_num: int,
        generator: Generator,
        domains: Domains = None,
        min_recall_interval: float = 1,
        is_by_due: bool = True,
    ) -> np.ndarray:
        """Return the distinct slots of candidates for a revisit: due items, and items that rested.

        The earliest due items come first. The rest of `max_num` is a uniform sample of the other items with
        last_review + min_recall_interval <= now. If at most `max_num` items qualify, all are returned. Due items are
        not tested against `min_recall_interval`: their due date already includes it.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, unless due items alone fill the pool or no other item has rested.
            domains: by number; None takes all.
            min_recall_interval: iterations, at least 0.
            is_by_due: whether due items come first; else, if more than `max_num` items qualify, all of the pool is a
                uniform sample.
        """
        due_N, is_free_N = self.items["due"], self._items.is_used & self._is_in(domains)
        is_due_N = is_free_N & (due_N <= now)
        is_rested_N = is_free_N & (self.items["last_review"] <= now - min_recall_interval)
        if not is_by_due and np.count_nonzero(is_able_N := is_due_N | is_rested_N) > max_num:
            return self._sampled(is_able_N, max_num, generator)
        slots_N = np.flatnonzero(is_due_N)
        if 0 < max_num < len(slots_N):
            slots_N = slots_N[due_N[slots_N] <= np.partition(due_N[slots_N], max_num - 1)[max_num - 1]]
        first_N: np.ndarray = slots_N[np.lexsort((self.items["seq"][slots_N], due_N[slots_N]))[:max_num]]
        if len(first_N) == max_num:
            return first_N
        sampled_N = self._sampled(is_rested_N, max_num, generator)
        # Dropping the due slots from a uniform random sequence leaves a uniform random sequence of the others.
        others_N = sampled_N[due_N[sampled_N] > now]
        return np.concatenate([first_N, others_N[: max_num - len(first_N)]])

    def group_pool(
        self,
        now: int,
        max_num: int,
        generator: Generator,
        max_age: int,
        max_uses: int,
        domains: Domains = None,
        must_vary: bool = True,
    ) -> np.ndarray:
        """Return the group slots of candidates for reuse: a uniform sample, or all if there are at most `max_num`.

        Candidates have uses < max_uses and 0 < now - born <= max_age.

        Args:
            now: iteration.
            max_num: at least 0.
            generator: used once, or not at all if there are no candidates.
            max_age: iterations.
            max_uses: of a group.
            domains: of the items, by number; None takes all.
            must_vary: leave out groups whose rewards are all equal.
        """
        rows = self.groups
        is_able_N = self._groups.is_used & (rows["born"] < now) & (rows["born"] >= now - max_age)
        is_able_N &= (rows["uses"] < max_uses) & ((rows["variance"] > 0) | (not must_vary))
        is_able_N &= self._is_in(domains)[rows["slot"]]
        groups_N = np.flatnonzero(is_able_N)
        domain_N = self.items["domain"][rows["slot"][groups_N]]
        groups_K: np.ndarray = groups_N[
            sample(max_num, generator, domain_N, *(rows[name][groups_N] for name in ("uses", "born", "seq")))
        ]
        return groups_K

    def any_items(self, max_num: int, generator: Generator) -> np.ndarray:
        """Return a uniform sample of the slots of items; all if there are at most `max_num`."""
        slots_N = self.slots()
        if not len(slots_N):
            return slots_N
        return slots_N[generator.choice(len(slots_N), min(max_num, len(slots_N)), replace=False)]

    def num_due(self, now: float) -> int:
        return int(np.count_nonzero((self.items["due"] <= now) & self._items.is_used))

    def _sampled(self, is_wanted_N: np.ndarray, max_num: int, generator: Generator) -> np.ndarray:
        """Return a uniform sample of wanted items, at most `max_num`, in random order."""
        slots_N = np.flatnonzero(is_wanted_N)
        keys_N = [self.items[name][slots_N] for name in ("domain", "last_review", "seq")]
        slots_K: np.ndarray = slots_N[sample(max_num, generator, *keys_N)]
        return slots_K

    def _is_in(self, domains: Domains) -> np.ndarray:
        """Return whether each item row is of one of the domains; free rows may be of any."""
        if domains is None:
            return np.ones(len(self.items), bool)
        is_in_N: np.ndarray = np.isin(np.arange(len(self.domains) + 1), list(domains))[self.items["domain"]]
        return is_in_N

    # --- checks ----------------------------------------------------------------------------------

    def content(self) -> dict[str, Any]:
        """Return everything in a form that `==` compares; the slots of groups do not count."""
        groups_N, slots_N = self.group_slots(), self.slots()
        return {
            "items": (slots_N.tolist(), rows_at(self.items, slots_N).tobytes()),
            "prompts": dict(self._prompts),
            "groups": {int(row["seq"]): row.tobytes() for row in self.groups[groups_N]},
            "ids of groups": {int(self.groups["seq"][at]): self.group_ids[at] for at in groups_N.tolist()},
            "targets": dict(self.targets),
        }

    def faults(self) -> list[str]:
        """Return one message for each broken invariant."""
        slots_N, groups_N = self.slots(), self.group_slots()
        items_N, rows_N = rows_at(self.items, slots_N), rows_at(self.groups, groups_N)
        linked = {slot: sorted(groups_N[rows_N["slot"] == slot].tolist()) for slot in self._groups_of}
        laws = {
            "numbers are finite and counts at least 0": _in_range(items_N) and _in_range(rows_N),
            "alpha and beta are above 0": (items_N["alpha"] > 0).all() and (items_N["beta"] > 0).all(),
            "no item is due before its last review": (items_N["last_review"] <= items_N["due"]).all(),
            "every item is of a known domain": (items_N["domain"] < len(self.domains)).all(),
            "every key leads to its item": self._slots == dict(zip(items_N["key"].tolist(), slots_N.tolist())),
            "every item has a prompt": self._prompts.keys() == set(slots_N.tolist()),
            "every item leads to its groups": {s: sorted(g) for s, g in self._groups_of.items()} == linked,
            "every group belongs to an item": self._items.is_used[rows_N["slot"]].all(),
            "every group has an id": self.group_ids.keys() == set(groups_N.tolist()),
            "num_groups counts an item's groups": all(self.items["num_groups"][s] == len(g) for s, g in linked.items()),
            "a target belongs to a group": {seq for seq, _ in self.targets} <= set(rows_N["seq"].tolist()),
            "no seq is used twice": all(
                len(np.unique(rows["seq"])) == len(rows) and (rows["seq"] < end).all()
                for rows, end in ((items_N, self.next_seq), (rows_N, self.next_group_seq))
            ),
            "a free row is zero": not any(
                table.rows.view(np.uint8).reshape(len(table.rows), -1)[~table.is_used].any()
                for table in (self._items, self._groups)
            ),
        }
        return [f"{law}: not so in this memory" for law, holds in laws.items() if not holds]


def _in_range(rows_N: np.ndarray) -> bool:
    """Return whether all numbers are finite, and none of `_AT_LEAST_0` is negative."""
    columns = {name: rows_N[name] for name in rows_N.dtype.names or ()}
    is_negative = any((columns[name] < 0).any() for name in _AT_LEAST_0 if name in columns)
    return not is_negative and all(np.isfinite(values_N).all() for values_N in columns.values())


def sample(num: int, generator: Generator, *keys_N: np.ndarray) -> np.ndarray:
    """Draw the positions of distinct rows uniformly, in random order.

    They are drawn as ranks in the order of the keys, so that the draw does not depend on the places of the rows.

    Args:
        num: at least 0; if there are fewer rows, all are returned.
        generator: used once, or not at all if there is nothing to draw.
        keys_N: integers that order the rows, the first key first; no two rows agree in all of them.
    """
    if not (num := min(num, len(keys_N[0]))):
        return np.empty(0, np.int64)
    rank_K = generator.choice(len(keys_N[0]), num, replace=False)
    spans = [int(key_N.max()) - int(key_N.min()) + 1 for key_N in keys_N]
    order_N: np.ndarray
    if math.prod(spans) >= 1 << 63:
        order_N = np.lexsort(keys_N[::-1])
        return order_N[rank_K]
    code_N = np.zeros(len(keys_N[0]), np.int64)  # one integer a row is sorted eight times as fast
    for key_N, span in zip(keys_N, spans):
        code_N = code_N * span + (key_N.astype(np.int64) - int(key_N.min()))
    order_N = np.argsort(code_N)
    return order_N[rank_K]
