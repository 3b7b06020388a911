"""Keeps the history of prompts whose groups were all refused, so that they have no item.

    refused group of an unknown prompt ──note──> its history ──┬─ rows: what a later visit finds
                                                               └─ take: a new item of the prompt continues with it

A refused group is trained on and paid like any other, so it belongs to the history (`replay/history.py`). The newest
`LIMIT` prompts are kept: at a half-life of 11 updates nothing is left of older ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllib_srl.replay.history import after_visit
from rllib_srl.replay.visits import GroupFacts

LIMIT = 4096  # prompts
PAST = np.dtype(
    [("key", "u8"), ("history_sum", "f8"), ("history_count", "f8"), ("history_clock", "f8"), ("version", "i4")]
    + [("num_silent", "i4")]
    + [("visits", "i4"), ("num_success", "i4"), ("group_size", "i4"), ("is_solved", "?"), ("spare", "V3")],
    align=True,
)
_TAKEN_OVER = (  # by a new item; its own visits are still to come
    *("history_sum", "history_count", "history_clock", "version", "num_success", "group_size"),
    *("num_silent", "is_solved"),
)


class UnstoredHistories:
    """Histories by key of the prompt, the latest noted last.

    Invariant: at most `LIMIT` of them; `get_state` holds all of it. None as the state means that there never was one.
    """

    def __init__(self) -> None:
        """Start without histories."""
        self._rows: dict[int, np.ndarray] = {}  # [1] each
        self._state: bytes | None = None
        self._is_used = False

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._rows)

    def rows(self, keys: Sequence[int]) -> np.ndarray:
        """Return the histories of some prompts, of dtype `PAST`; zeros where nothing is known."""
        return np.concatenate([np.zeros(0, PAST), *(self._rows.get(key, _NOTHING) for key in keys)])

    def note(
        self, keys: Sequence[int], facts: Sequence[GroupFacts], by: str, half_life: float | None, policy_kl: float
    ) -> int:
        """Add a visit of each of some distinct prompts; return how many older histories were dropped for them.

        Args:
            keys: of the prompts.
            facts: of the groups played.
            by: as in `history.after_visit`, like `half_life` and `policy_kl`.
        """
        if not keys:
            return 0
        before_N = self.rows(keys)
        fields = after_visit(before_N, facts, by, half_life, policy_kl)
        fields |= {"key": np.array(keys, np.uint64), "visits": before_N["visits"] + 1}
        for name, of in (("version", "version"), ("num_success", "num_success"), ("group_size", "size")):
            fields[name] = np.array([getattr(one, of) for one in facts])
        after_N = np.zeros(len(keys), PAST)
        for name, value_N in fields.items():
            after_N[name] = value_N
        for at, key in enumerate(keys):
            self._rows.pop(key, None)
            self._rows[key] = after_N[at : at + 1]
        num_dropped = max(0, len(self._rows) - LIMIT)
        for key in list(self._rows)[:num_dropped]:
            del self._rows[key]
        self._changed()
        return num_dropped

    def take(self, key: int) -> dict[str, Any]:
        """Remove a prompt, and return its history as fields of its new item; {} if nothing is known."""
        row = self._rows.pop(key, None)
        if row is None:
            return {}
        self._changed()
        return {name: row[name][0].item() for name in _TAKEN_OVER}

    def _changed(self) -> None:
        self._state, self._is_used = None, True

    def get_state(self) -> bytes | None:
        """Return the histories as bytes; None if there never was one."""
        if self._state is None and self._is_used:
            self._state = np.concatenate([np.zeros(0, PAST), *self._rows.values()]).tobytes()
        return self._state

    def set_state(self, state: bytes | None) -> None:
        """Restore the state that `get_state` returned."""
        rows_N = np.frombuffer(state or b"", PAST)
        self._rows = {key: rows_N[at : at + 1].copy() for at, key in enumerate(rows_N["key"].tolist())}
        self._state, self._is_used = state, state is not None


_NOTHING = np.zeros(1, PAST)
