"""Encode groups as bytes for the journal, and as columns for transfer between processes.

1. Bytes of a `Group`, without pickle (`encode`, `decode`). The journal stores this payload, in the format of
safetensors: the arrays, and all other fields as JSON in the metadata. Decoded arrays are read-only views of the bytes.
Their places (`opened_payload`) also locate them in a copy of the bytes.

2. Lists of records (`ColumnarList`), pickled as a few long columns instead of many short values:

    [Group, Group, ...] --pickled--> one column per field, arrays concatenated --unpickled--> views of the columns
                                     nested records become columns too

Pickling an array or a record costs microseconds whatever its length, and a draw of 256 groups has 1,536 arrays and 512
records. The unpickled list equals the original, including array types.

3. Stored groups for the learners (`StoredGroupBatch`), pickled as their payloads without a copy, and columns of all
other fields:

    StoredGroupBatch --pickled--> one buffer per group (payload), columns --unpickled--> Groups, views of both

Token ids, log-probs and masks are nearly all of a payload. Concatenating them first would copy them twice, and the
first copy goes into fresh memory, which costs more than the copy itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pickle import PickleBuffer
from typing import Any, Literal, TypeVar

import numpy as np
from safetensors.numpy import save

from rllib_srl.types import Group, GroupMeta, History, Prompt, StopReason

_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
LONG = ("token_ids_N", "loss_mask_N", "behaviour_logp_N")  # one value per token
_FIELDS_OF_METADATA = "group"
_DTYPES = {f"{kind}{8 * size}": np.dtype(f"<{code}{size}") for kind, code in zip("IUF", "iuf") for size in (1, 2, 4, 8)
           if (kind, size) != ("F", 1)} | {"BOOL": np.dtype(bool)}  # fmt: skip
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # created once: construction costs more than a small value
Place = tuple[np.dtype, tuple[int, ...], int]  # of an array in a payload: dtype, shape, first byte


def encode(group: Group) -> bytes:
    """Return a group as bytes. The same group gives the same bytes in every process.

    Raises:
        ValueError: an array is not numeric, the mask is not boolean, or `extra` does not survive a round trip through
            JSON; the message lists all errors.
    """
    faults, arrays = json_faults(group.extra, "extra"), {}
    for name in _ARRAYS:
        array = arrays[name] = np.ascontiguousarray(getattr(group, name))
        is_mask = name == "loss_mask_N"
        if array.dtype.kind not in ("b" if is_mask else "iuf"):
            faults.append(f"{name} is of {array.dtype}; expected {'bool' if is_mask else 'integers or floats'}")
    if faults:
        raise ValueError(f"group {group.group_id} cannot be stored: " + "; ".join(faults))
    header = {
        "group_id": group.group_id,
        "prompt": prompt_fields(group.prompt),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "num_dropped": int(group.num_dropped),
        "origin": group.origin,
        "extra": group.extra,
    }
    payload: bytes = save(arrays, {_FIELDS_OF_METADATA: compact_json(header)})
    return payload


def decode(payload: bytes, name: str = "") -> Group:
    """Return the group of a payload; its arrays are read-only views of `payload`.

    Args:
        payload: the output of `encode`.
        name: the group's name in error messages.

    Raises:
        ValueError: the payload cannot be read; the message names the group.
    """
    return group_of(*opened_payload(payload, name), payload)


def group_of(header: Mapping[str, Any], places: Mapping[str, Place], payload: bytes) -> Group:
    """Return the group of a payload, given its header and places."""
    return Group(
        group_id=header["group_id"],
        prompt=prompt_of(header["prompt"]),
        stop_reasons=tuple(StopReason(value) for value in header["stop_reasons"]),
        num_dropped=header["num_dropped"],
        origin=header["origin"],
        extra=header["extra"],
        **{name: array_at(payload, place) for name, place in places.items()},
    )


def opened_payload(payload: bytes, name: str = "") -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the fields of a payload's group except the arrays, and the places of its arrays.

    Raises:
        ValueError: the payload cannot be read; the message names the group.
    """
    try:
        start = 8 + int.from_bytes(payload[:8], "little")
        described = json.loads(payload[8:start])
        header: dict[str, Any] = json.loads(described.pop("__metadata__")[_FIELDS_OF_METADATA])
        places = {
            field: (_DTYPES[one["dtype"]], tuple(one["shape"]), start + one["data_offsets"][0])
            for field, one in described.items()
        }
        end = start + max(one["data_offsets"][1] for one in described.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"group {name} is damaged: its header cannot be read: {error}") from error
    if end != len(payload):
        raise ValueError(f"group {name} is damaged: {len(payload)} bytes; expected {end}")
    return header, places


def array_at(payload: bytes | memoryview, place: Place) -> np.ndarray:
    """Return the array at a place of a payload, a read-only view."""
    dtype, shape, at = place
    return np.ndarray(shape, dtype, payload, at)


def compact_json(value: Any) -> str:
    """Return a value as JSON in ASCII without spaces."""
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt by name, as JSON types."""
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt of `prompt_fields`."""
    return Prompt(**{**fields, "history": tuple(fields["history"])})


_JSON_SCALARS = {type(None), bool, int, float, str}


def json_faults(value: Any, name: str) -> list[str]:
    """Return one message for each part of `value` that a round trip through JSON would change.

    JSON turns tuples into lists and numeric keys into strings, so both are errors.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return []
    if isinstance(value, list):
        if set(map(type, value)) <= _JSON_SCALARS:  # fast path: long lists are mostly ids or numbers
            return []
        return [fault for i, part in enumerate(value) for fault in json_faults(part, f"{name}[{i}]")]
    if isinstance(value, dict):
        if set(map(type, value)) <= {str} and set(map(type, value.values())) <= _JSON_SCALARS:
            return []
        keys = [f"{name} has the key {key!r}; expected text" for key in value if not isinstance(key, str)]
        return keys + [fault for key, part in value.items() for fault in json_faults(part, f"{name}[{key!r}]")]
    return [f"{name} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict"]


Record = TypeVar("Record")
# Encoding: "each", the values; "joined", one concatenated array and its cuts; "records", a class and its columns.
Column = tuple[Literal["each", "joined", "records"], Any, Any]


class ColumnarList(list[Record]):
    """A list of instances of one dataclass.

    Invariant: an unpickled copy is equal, entry by entry; its arrays are views, read-only if Ray's buffers are.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the constructor of this list and its columns."""
        return opened_list, (column_of(self),)


def column_of(values: Sequence[Any]) -> Column:
    """Return values in the encoding that pickles fastest; `opened` reverses it."""
    kinds = set(map(type, values))
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray and values[0].ndim and len({(value.dtype, value.shape[1:]) for value in values}) == 1:
        return "joined", np.concatenate(values), [0, *accumulate(map(len, values))]  # mixed dtypes would be converted
    if is_dataclass(kind) and fields(kind) and all(field.init and not field.kw_only for field in fields(kind)):
        return "records", kind, columns_of(values, [field.name for field in fields(kind)])
    return "each", list(values), None


def columns_of(records: Sequence[Any], names: Sequence[str]) -> list[Column]:
    """Return the columns of some fields of records."""
    return [column_of([getattr(record, name) for record in records]) for name in names]


def opened(column: Column) -> list[Any]:
    """Return the values of a column."""
    how, values, rest = column
    if how == "joined":
        return [values[start:end] for start, end in pairwise(rest)]
    if how == "records":
        return [values(*row) for row in zip(*map(opened, rest), strict=True)]
    plain: list[Any] = values
    return plain


def opened_list(column: Column) -> ColumnarList[Any]:
    """Return the list of a column."""
    return ColumnarList(opened(column))


@dataclass(frozen=True)
class StoredGroup:
    """A stored group, decoded. Invariant: the arrays of `group` are at `places` in `payload`."""

    group: Group
    payload: bytes
    places: dict[str, Place]
    weight: float = 1.0  # loss weight from the draw
    history: History | None = None  # of its prompt without the group, where the baseline is one from history

    @classmethod
    def of(cls, payload: bytes, name: str, origin: str) -> StoredGroup:
        """Decode a group and set its origin; arguments and errors as in `decode`."""
        header, places = opened_payload(payload, name)
        return cls(group_of({**header, "origin": origin}, places, payload), payload, places)

    @cached_property
    def meta(self) -> GroupMeta:
        """Return the metadata of the group, without a reference to it; cached, as counting the mask is slow."""
        return replace(GroupMeta.of(self.group, None, self.weight), history=self.history)


class StoredGroupBatch(list[Group]):
    """A list of groups that pickles as the payloads of its `StoredGroup` groups.

    Invariant: an unpickled copy is an equal list, without the payloads; its arrays are views, read-only if Ray's
    buffers are.
    """

    def __init__(self, contents: Iterable[StoredGroup] = ()) -> None:
        """Create the list of the groups in `contents`."""
        self._contents = list(contents)
        super().__init__(one.group for one in self._contents)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the constructor of the groups, their payloads and their columns."""
        payloads = [PickleBuffer(one.payload) if int(protocol) >= 5 else one.payload for one in self._contents]
        places = [[one.places[name] for one in self._contents] for name in LONG]
        return unpacked, (payloads, places, columns_of(self, _REST))


_FIELDS = [field.name for field in fields(Group)]
_REST = [name for name in _FIELDS if name not in LONG]


def unpacked(payloads: Sequence[Any], places: Sequence[Sequence[Place]], rest: Sequence[Column]) -> ColumnarList[Group]:
    """Return the groups of a pickled parcel.

    Args:
        payloads: the bytes of each group, in any buffer.
        places: for each array in `LONG`, its place in each payload.
        rest: the columns of the other fields.
    """
    columns = {name: list(map(array_at, payloads, of_field)) for name, of_field in zip(LONG, places, strict=True)}
    columns |= {name: opened(column) for name, column in zip(_REST, rest, strict=True)}
    return ColumnarList(Group(*row) for row in zip(*(columns[name] for name in _FIELDS), strict=True))
