"""Hold the items of a memory and their groups: two NumPy tables and a map of keys.

    key -> slot ──> ITEM row, prompt ──> slots of its groups, oldest first ──> GROUP rows

Rows change only through the methods, which note the slots for the next commit. Groups may take other slots after a
restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

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
    + [("num_zero_variance", "i4"), ("has_vector", "i4")]  # groups of equal rewards in a row, at most 8
)
GROUP = np.dtype(
    [("seq", "u8"), ("num_bytes", "i4"), ("in_history", "i2")]  # whether the item's history has its rewards
    + [("num_answers", "i2")]  # right answers that may be held
    + [("slot", "i4"), ("born", "i4"), ("version", "i4"), ("uses", "i4")]
    + [("size", "i2"), ("num_rewarded", "i2"), ("num_success", "i4"), ("reward", "f4"), ("variance", "f4")]
    + [("abs_advantage", "f4"), ("nll", "f4"), ("num_tokens", "i4"), ("num_loss_tokens", "i4")]
)
NO_ITEMS, NO_GROUPS = np.zeros(0, ITEM), np.zeros(0, GROUP)


def key_of(prompt: Prompt) -> int:
    """Return the key of a prompt as the integer in [0, 2**64) that the item table holds."""
    return int(prompt.key, 16)


def filled(rows: np.ndarray, fields: Mapping[str, Any]) -> Any:
    """Set fields of `rows` in place and return them; pass new rows or a copy."""
    for name, value in fields.items():
        rows[name] = value
    return rows


class Table:
    """Records of one kind by slot; a new one takes the smallest free slot.

    Invariant: free rows are zero; `changed` has the slots written or freed since the last commit.
    """

    def __init__(self, dtype: np.dtype, slots_N: np.ndarray, rows_N: np.ndarray) -> None:
        self.is_used = np.zeros(0, bool)
        self.changed: set[int] = set()
        self._bind(np.zeros(0, dtype))
        self._reserve(int(slots_N.max(initial=63)) + 1)
        self._rows[slots_N] = rows_N
        self.is_used[slots_N] = True

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        """Return a field of all rows, free ones included, or rows: a read-only view, stale after `add`."""
        return self._view[place]

    def slots(self) -> np.ndarray:
        return np.flatnonzero(self.is_used)

    def at(self, slots: Any) -> np.ndarray:
        """Return a copy of the rows at some slots, 20 times as fast as NumPy, which copies records field by field."""
        return self._whole[np.asarray(slots, np.int64)].view(self._rows.dtype)

    def add(self, row: np.ndarray) -> int:
        slot = int(self.is_used.argmin())
        if self.is_used[slot]:
            self._reserve((slot := len(self._rows)) + 1)
        self._rows[slot], self.is_used[slot] = row[0], True
        self.changed.add(slot)
        return slot

    def update(self, slots: Sequence[int] | np.ndarray, **fields: Any) -> None:
        """Set fields of distinct records to an array with one entry per slot, or to one value."""
        listed = np.asarray(slots, np.int64)
        if len(np.unique(listed)) < len(listed) or not self.is_used[listed].all():
            raise ValueError(f"slots = {listed[:5].tolist()}; expected distinct ones that are in use")
        self._whole[listed] = filled(self.at(listed), fields).view(self._whole.dtype)
        self.changed.update(listed.tolist())

    def free(self, slot: int) -> None:
        self._rows[slot], self.is_used[slot] = np.zeros(1, self._rows.dtype)[0], False
        self.changed.add(slot)

    def _reserve(self, num_rows: int) -> None:
        more = max(num_rows, len(self._rows) * 9 // 8 + 64) - len(self._rows)
        self.is_used = np.concatenate([self.is_used, np.zeros(more, bool)])
        self._bind(np.concatenate([self._rows, np.zeros(more, self._rows.dtype)]))

    def _bind(self, rows: np.ndarray) -> None:
        self._rows, self._view = rows, rows.view()
        self._view.flags.writeable = False
        self._whole = rows.view(np.dtype((np.void, rows.dtype.itemsize)))


class Tables:
    """The rows of all items and of their groups. Invariant: keys, items and groups are linked."""

    def __init__(
        self,
        slots_N: np.ndarray = np.zeros(0, np.int64),
        items_N: np.ndarray = NO_ITEMS,
        prompts: Sequence[Prompt] = (),
        groups_N: np.ndarray = NO_GROUPS,
        group_ids: Sequence[str] = (),
        vectors_KD: np.ndarray | None = None,
        *,
        next_seq: int = 0,
        next_group_seq: int = 0,
        domains: Sequence[str] = (),
        newest_domain: str = "",
    ) -> None:
        """Create tables with the content of a store, empty ones by default.

        Slots are ascending, and groups in the order of seq; `vectors_KD` are of the items that have one. An item's
        `domain` is a position in `domains`, which is final.
        """
        self.next_seq, self.next_group_seq = next_seq, next_group_seq
        self.domains, self.newest_domain = list(domains), newest_domain
        slots = slots_N.tolist()
        self._slots = dict(zip(items_N["key"].tolist(), slots, strict=True))
        self._prompts: dict[int, Prompt] = dict(zip(slots, prompts, strict=True))
        self.items = Table(ITEM, slots_N, items_N)
        self.groups = Table(GROUP, np.arange(len(groups_N)), groups_N)
        self._groups_of: dict[int, list[int]] = {slot: [] for slot in slots}
        self.group_ids = dict(zip(range(len(groups_N)), group_ids, strict=True))  # by slot of the group
        self._group_at = {name: at for at, name in self.group_ids.items()}
        self._vectors_ND = np.zeros((0, 0), np.float32)  # by slot
        if vectors_KD is not None:
            self.set_vectors(np.flatnonzero(self.items["has_vector"]), vectors_KD)
        self.removed_slots: list[int] = []  # since the last commit
        self.removed_groups: list[int] = []  # seqs
        for at, slot in enumerate(groups_N["slot"].tolist()):
            if slot not in self._groups_of:
                raise ValueError(f"no item is at slot {slot}; expected the slot of the item of the group")
            self._groups_of[slot].append(at)

    @property
    def header(self) -> dict[str, Any]:
        """The state that is not in the rows, as JSON types."""
        names = ("next_seq", "next_group_seq", "domains", "newest_domain")
        return {name: getattr(self, name) for name in names}

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @property
    def num_bytes(self) -> int:
        return int(self.groups["num_bytes"].sum())

    def __len__(self) -> int:
        return len(self._slots)

    def num_by_domain(self) -> dict[str, tuple[int, int]]:
        """Return domain -> number of its items and of their groups, 0 for domains whose items are gone."""
        of_groups = self.groups["slot"][self.groups.slots()]
        counts = (
            np.bincount(self.items["domain"][slots], minlength=len(self.domains)).tolist()
            for slots in (self.slots(), of_groups)
        )
        return dict(zip(self.domains, zip(*counts, strict=True), strict=True))

    def num_due(self, now: float) -> int:
        return int(np.count_nonzero((self.items["due"] <= now) & self.items.is_used))

    def slots(self) -> np.ndarray:
        return self.items.slots()

    def slot_of(self, key: int) -> int | None:
        return self._slots.get(key)

    def prompt_of(self, slot: int) -> Prompt:
        return self._prompts[slot]

    def groups_of(self, slot: int) -> list[int]:
        """Return the group slots of an item, oldest first."""
        return list(self._groups_of[slot])

    @property
    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of the items that have a vector, ascending, and the vectors, [K, D]."""
        slots_K = np.flatnonzero(self.items["has_vector"])
        return slots_K, self._vectors_ND[slots_K]

    def group_at(self, group_id: str) -> int | None:
        """Return the slot of the group with an id, the newest of several, or None."""
        return self._group_at.get(group_id)

    def add_item(self, key: int, prompt: Prompt, domain: str, now: int, **fields: Any) -> int:
        """Add an item with a new key and return its slot.

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
        slot = self.items.add(row)
        self.next_seq, self.newest_domain = self.next_seq + 1, domain
        self._slots[key], self._prompts[slot], self._groups_of[slot] = slot, prompt, []
        return slot

    def remove_item(self, slot: int) -> None:
        for group in self.groups_of(slot):
            self.remove_group(group)
        del self._slots[int(self.items["key"][slot])], self._prompts[slot], self._groups_of[slot]
        self.items.free(slot)
        self.removed_slots.append(slot)

    def remove(self, keys: Collection[str] = (), domain: str | None = None, before: int | None = None) -> int:
        slots_N = self.slots()
        rows_N = self.items.at(slots_N)
        is_gone_N = np.isin(rows_N["key"], np.array([int(key, 16) for key in keys], np.uint64))
        if domain in self.domains:
            is_gone_N |= rows_N["domain"] == self.domains.index(domain)
        if before is not None:
            is_gone_N |= rows_N["last_review"] < before
            groups_N = self.groups.slots()
            for at in groups_N[self.groups["born"][groups_N] < before].tolist():
                self.remove_group(at)
        for slot in slots_N[is_gone_N].tolist():
            self.remove_item(slot)
        return int(is_gone_N.sum())

    def set_vectors(self, slots: Sequence[int] | np.ndarray, vectors_KD: np.ndarray) -> None:
        if (num := len(self.items) - len(self._vectors_ND)) > 0:
            before_ND = self._vectors_ND.reshape(-1, vectors_KD.shape[1])
            self._vectors_ND = np.concatenate([before_ND, np.zeros((num, vectors_KD.shape[1]), np.float32)])
        self._vectors_ND[slots] = vectors_KD

    def add_group(self, slot: int, group_id: str, max_groups: int, **fields: Any) -> tuple[int, int]:
        """Add a group to an item, of which `max_groups` are kept; return its slot, and the number evicted for it."""
        row = filled(np.zeros(1, GROUP), fields | {"seq": self.next_group_seq, "slot": slot})
        siblings = self.groups_of(slot)
        evicted = siblings[: max(0, len(siblings) + 1 - max_groups)]
        for group in evicted:
            self.remove_group(group)
        group = self.groups.add(row)
        self.next_group_seq += 1
        self.group_ids[group] = group_id
        self._group_at[group_id] = group
        self._groups_of[slot].append(group)
        return group, len(evicted)

    def remove_group(self, group: int) -> None:
        seq, slot = int(self.groups["seq"][group]), int(self.groups["slot"][group])
        group_id = self.group_ids.pop(group)
        if self._group_at.get(group_id) == group:
            del self._group_at[group_id]
        self.groups.free(group)
        self._groups_of[slot].remove(group)
        self.removed_groups.append(seq)

    def changed_items(self) -> list[tuple[int, bytes, Prompt, bytes | None]]:
        """Return slot, row, prompt and vector, if it has one, of each item that was written since the last commit."""
        rows = [(slot, self.items[slot]) for slot in sorted(self.items.changed) if self.items.is_used[slot]]
        return [
            (slot, row.tobytes(), self._prompts[slot], self._vectors_ND[slot].tobytes() if row["has_vector"] else None)
            for slot, row in rows
        ]

    def changed_groups(self) -> list[tuple[int, bytes, str]]:
        """Return seq, row and id of each group that was written since the last commit."""
        rows = [(at, self.groups[at]) for at in sorted(self.groups.changed) if self.groups.is_used[at]]
        return [(int(row["seq"]), row.tobytes(), self.group_ids[at]) for at, row in rows]

    def committed(self) -> None:
        for noted in (self.items.changed, self.groups.changed, self.removed_slots, self.removed_groups):
            noted.clear()
