"""Define the numpy records of items and groups, their bytes on disk, and the bounds of their values.

ITEM    160 bytes    key, schedule, last visit, posterior of recall, diversity, history
GROUP    96 bytes    item, iteration and weight version of its rollout, statistics for reuse
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.types import Prompt

# The widest fields come first and the padding is a named field: NumPy copies named fields only, so unnamed padding
# would hold arbitrary bytes.
ITEM = np.dtype(
    [("key", "u8"), ("seq", "u8"), ("stability", "f8"), ("difficulty", "f8"), ("interval", "f8"), ("due", "f8")]
    + [("history_sum", "f8"), ("history_count", "f8"), ("history_clock", "f8")]  # see `replay/history.py`
    + [("domain", "i4"), ("reps", "i4"), ("lapses", "i4"), ("streak", "i4")]
    + [("last_review", "i4"), ("created", "i4"), ("alpha", "f4"), ("beta", "f4"), ("pass_rate", "f4")]
    + [("reward", "f4"), ("num_success", "i4"), ("group_size", "i4"), ("visits", "i4"), ("version", "i4")]
    + [("variance", "f4"), ("nll", "f4"), ("novelty", "f4"), ("diversity", "f4")]
    + [("num_silent", "i4")]  # groups of equal rewards in a row, at most 8
    + [("num_groups", "i4"), ("has_vector", "?"), ("is_solved", "?"), ("spare", "V6")],
    align=True,
)
GROUP = np.dtype(
    [("seq", "u8"), ("num_bytes", "i8")]
    + [("history_clock", "f8")]  # its item's after the visit; below 0: the group is no part of the item's history
    + [("slot", "i4"), ("born", "i4"), ("version", "i4"), ("uses", "i4")]
    + [("size", "i4"), ("num_success", "i4"), ("reward", "f4"), ("variance", "f4"), ("abs_advantage", "f4")]
    + [("nll", "f4"), ("num_tokens", "i4"), ("num_loss_tokens", "i4")]
    + [("lowest", "f4"), ("highest", "f4")]  # reward
    + [("num_rewarded", "i4")]  # episodes with a reward
    + [("domain_place", "i4")]  # number of the group among those of its domain, from 1; 0: it is not among them
    + [("spare", "V8")],
    align=True,
)
_NEVER_NEGATIVE = (
    *("stability", "interval", "variance", "reps", "lapses", "visits"),
    *("num_success", "num_groups", "history_count", "history_clock"),
    "num_silent",
)
_SETTABLE = {  # by a caller; the store sets the rest
    ITEM: frozenset(ITEM.names or ()) - {"key", "seq", "num_groups", "spare"},
    GROUP: frozenset(GROUP.names or ()) - {"seq", "slot", "spare"},
}

assert ITEM.itemsize <= 256


@dataclass(frozen=True)
class Header:
    """The state of a store beside its rows: the next sequence numbers and the domains seen so far.

    Invariant: the number of an item, a group or a domain is never reused, even after a removal.
    """

    next_seq: int = 0
    next_group_seq: int = 0
    domains: tuple[str, ...] = ()  # an item's `domain` is a position here
    newest_domain: str = ""  # of the item added last

    def after_item(self, domain: str) -> Header:
        """Return the header after an item of `domain` was added."""
        domains = self.domains if domain in self.domains else (*self.domains, domain)
        return replace(self, next_seq=self.next_seq + 1, domains=domains, newest_domain=domain)

    def after_group(self) -> Header:
        """Return the header after a group was added."""
        return replace(self, next_group_seq=self.next_group_seq + 1)

    def to_json(self) -> str:
        """Return the header as JSON."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Return the header that `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"domains": tuple(values["domains"])})


def key_of(prompt: Prompt) -> int:
    """Return the key of a prompt as the integer in [0, 2**64) that the item table holds."""
    return int(prompt.key, 16)


def faults_of_fields(fields: Mapping[str, Any], dtype: np.dtype) -> list[str]:
    """Return one message for each field that a caller may not set: unknown ones and those the store sets itself."""
    unfit = fields.keys() - _SETTABLE[dtype]
    return [f"{name} = {fields[name]!r}; expected a field among {sorted(_SETTABLE[dtype])}" for name in sorted(unfit)]


def rows_at(rows: np.ndarray, slots: Any) -> np.ndarray:
    """Return a copy of `rows[slots]`, 20 times as fast as NumPy, which copies records field by field."""
    return rows.view(np.dtype((np.void, rows.dtype.itemsize)))[np.asarray(slots, np.int64)].view(rows.dtype)


def bytes_at(rows: np.ndarray, slots: Any) -> list[bytes]:
    """Return the bytes of some rows, each equal to its `tobytes()`."""
    found: list[bytes] = rows.view(np.dtype((np.void, rows.dtype.itemsize)))[np.asarray(slots, np.int64)].tolist()
    return found


def filled(rows: np.ndarray, fields: Mapping[str, Any]) -> Any:
    """Set fields of `rows` in place and return them; pass new rows or a copy.

    Raises:
        ValueError: a value that does not fit its field or the number of rows, or a `due` that is NaN.
    """
    for name, value in fields.items():
        try:
            rows[name] = value
        except (ValueError, TypeError, OverflowError) as error:
            fault = f"{name} = {value!r}; expected {rows.dtype[name]} values for {rows.size} rows"
            raise ValueError(fault) from error
    if "due" in fields and np.isnan(rows["due"]).any():
        raise ValueError(f"due = {fields['due']!r}; expected numbers")
    return rows


def faults_of_items(rows_N: np.ndarray, num_domains: int) -> Iterator[str]:
    """Yield one message for each bound that some item breaks."""
    for name in ("alpha", "beta"):
        yield from _broken(rows_N, rows_N[name] > 0, f"the posterior's {name} is above 0")
    for name in ("pass_rate", "diversity"):
        yield from _broken(rows_N, (rows_N[name] >= 0) & (rows_N[name] <= 1), f"{name} is in [0, 1]")
    for name in _NEVER_NEGATIVE:
        yield from _broken(rows_N, rows_N[name] >= 0, f"{name} is at least 0")
    for name in [name for name in ITEM.names or () if ITEM[name].kind == "f"]:
        yield from _broken(rows_N, np.isfinite(rows_N[name]), f"{name} is finite")
    yield from _broken(rows_N, rows_N["due"] >= rows_N["last_review"], "due is not before last_review")
    yield from _broken(rows_N, rows_N["lapses"] <= rows_N["reps"], "lapses are reviews: at most reps")
    yield from _broken(rows_N, rows_N["num_success"] <= rows_N["group_size"], "num_success is at most group_size")
    is_domain_N = (rows_N["domain"] >= 0) & (rows_N["domain"] < num_domains)
    yield from _broken(rows_N, is_domain_N, f"domain is one of the {num_domains} that came")


def faults_of_groups(rows_N: np.ndarray) -> Iterator[str]:
    """Yield one message for each bound that some group breaks."""
    counts = ("uses", "num_success", "num_loss_tokens", "num_bytes", "num_rewarded", "domain_place")
    for name in (*counts, "variance", "abs_advantage"):
        yield from _broken(rows_N, rows_N[name] >= 0, f"{name} of a group is at least 0")
    for name in [name for name in GROUP.names or () if GROUP[name].kind == "f"]:
        yield from _broken(rows_N, np.isfinite(rows_N[name]), f"{name} of a group is finite")
    yield from _broken(rows_N, rows_N["num_success"] <= rows_N["size"], "num_success of a group is at most its size")
    is_ordered_N = rows_N["lowest"] <= rows_N["highest"]
    yield from _broken(rows_N, is_ordered_N, "the lowest reward of a group is at most the highest")
    is_part_N = rows_N["num_rewarded"] <= rows_N["size"]
    yield from _broken(rows_N, is_part_N, "the episodes of a group with a reward are at most its size")
    is_fewer_N = rows_N["num_loss_tokens"] <= rows_N["num_tokens"]
    yield from _broken(rows_N, is_fewer_N, "loss tokens are tokens: at most num_tokens")


def _broken(rows_N: np.ndarray, holds_N: np.ndarray, law: str) -> Iterator[str]:
    if not holds_N.all():
        yield f"{law}: not so for seq {rows_N['seq'][~holds_N][:5].tolist()}"
