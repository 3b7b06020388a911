"""Encode groups as bytes for the journal, and as columns for transfer between processes.

1. Bytes of a `Group`, without pickle (`encode`, `decode`). The journal stores this payload:

    "SRLG"  version u16  0 u16  header length u32  0 u32      16 bytes, little-endian as everything here
    header  JSON in ASCII, spaces up to a multiple of 8       all but the arrays; dtype and shape of these
    arrays  one after another, each up to a multiple of 8     the loss mask as packed bits, the others as they are
    xxh3    u64 over everything before

Decoded arrays, except the mask, are read-only views of the bytes, so decoding costs a checksum and no copy. Their
places (`places_in`) also locate them in a copy of the bytes.

2. Lists of records (`ColumnarList`), pickled as a few long columns instead of many short values:

    [Group, Group, ...] --pickled--> one column per field, arrays concatenated --unpickled--> views of the columns
                                     nested records become columns too

Pickling an array or a record costs microseconds whatever its length, and a draw of 256 groups has 1,536 arrays and 512
records. The unpickled list equals the original, including array types.

3. Stored groups for the learners (`StoredGroupBatch`), pickled as their payloads without a copy, and columns of all
other fields:

    StoredGroupBatch --pickled--> one buffer per group (payload), columns --unpickled--> Groups, views of both

Token ids and log-probs are nine tenths of a payload. Concatenating them first would copy them twice, and the first copy
goes into fresh memory, which costs more than the copy itself.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pickle import PickleBuffer
from typing import Any, Literal, TypeVar

import numpy as np
import xxhash

from rllib_srl.types import Group, GroupMeta, History, Prompt, StopReason

MAGIC = b"SRLG"
VERSION = 1
_PREAMBLE = struct.Struct("<4sHHII")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 8
_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
LONG = ("token_ids_N", "behaviour_logp_N")  # one number per token, stored unpacked
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # created once: construction costs more than a small value
_BITS = "bits"  # the dtype name of a packed mask
Place = tuple[str, tuple[int, ...], int]  # of an array in a payload: dtype, shape, first byte


def encode(group: Group) -> bytes:
    """Return a group as bytes. The same group gives the same bytes in every process.

    Raises:
        ValueError: an array is not numeric, the mask is not boolean, or `extra` does not survive a round trip through
            JSON; the message lists all errors.
    """
    faults = json_faults(group.extra, "extra")
    arrays, described = [], []
    for name in _ARRAYS:
        array = np.asarray(getattr(group, name))
        is_mask = name == "loss_mask_N"
        if array.dtype.kind not in ("b" if is_mask else "iuf"):
            faults.append(f"{name} is of {array.dtype}; expected {'bool' if is_mask else 'integers or floats'}")
            continue
        stored = np.packbits(array) if is_mask else np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        described.append([name, _BITS if is_mask else stored.dtype.str, list(array.shape)])
        arrays.append(stored.tobytes())
    if faults:
        raise ValueError(f"group {group.group_id} cannot be stored: " + "; ".join(faults))
    header = {
        "group_id": group.group_id,
        "prompt": prompt_fields(group.prompt),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "num_dropped": int(group.num_dropped),
        "origin": group.origin,
        "extra": group.extra,
        "arrays": described,
    }
    text = _padded(compact_json(header).encode(), b" ")
    body = [_PREAMBLE.pack(MAGIC, VERSION, 0, len(text), 0), text, *(_padded(array, b"\0") for array in arrays)]
    data = b"".join(body)
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def decode(payload: bytes, name: str = "") -> Group:
    """Return the group of a payload; its arrays, except the mask, are read-only views of `payload`.

    Args:
        payload: the output of `encode`.
        name: the group's name in error messages; "" uses the group id if it is readable.

    Raises:
        ValueError: the payload is damaged or of another format; the message names the group and the error.
    """
    header = read_header(payload, name)
    return group_of(header, payload, places_in(payload, header, name or header["group_id"]))


def group_of(header: Mapping[str, Any], payload: bytes, places: Mapping[str, Place]) -> Group:
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


def read_header(payload: bytes, name: str = "") -> dict[str, Any]:
    """Verify the checksum and format of a payload and return its header: all fields except the arrays.

    Raises:
        ValueError: the payload is damaged or of another format; the message names the group and the error.
    """
    if len(payload) < _PREAMBLE.size + _CHECKSUM.size:
        raise ValueError(f"{_called(payload, name)} is damaged: {len(payload)} bytes are too few")
    (stored,) = _CHECKSUM.unpack_from(payload, len(payload) - _CHECKSUM.size)
    computed = xxhash.xxh3_64_intdigest(memoryview(payload)[: -_CHECKSUM.size])
    if stored != computed:
        raise ValueError(f"{_called(payload, name)} is damaged: its checksum is {computed:016x}, not {stored:016x}")
    magic, version, _, length, _ = _PREAMBLE.unpack_from(payload)
    if (magic, version) != (MAGIC, VERSION):
        found = f"{magic!r} version {version}"
        raise ValueError(f"{_called(payload, name)} is of format {found}; expected {MAGIC!r} version {VERSION}")
    header: dict[str, Any] = json.loads(payload[_PREAMBLE.size : _PREAMBLE.size + length])
    return header


def places_in(payload: bytes, header: dict[str, Any], name: str) -> dict[str, Place]:
    """Return the places of a group's arrays in its payload, by name.

    Raises:
        ValueError: the length of the payload does not match its header.
    """
    places, at = {}, _PREAMBLE.size + _PREAMBLE.unpack_from(payload)[3]
    for field, dtype, shape in header["arrays"]:
        places[field] = dtype, tuple(shape), at
        count = math.prod(shape)
        at += _up(-(-count // 8) if dtype == _BITS else count * _dtype(dtype).itemsize)
    if at + _CHECKSUM.size != len(payload):
        raise ValueError(f"group {name} is damaged: {len(payload)} bytes; expected {at + _CHECKSUM.size}")
    return places


def array_at(payload: bytes | memoryview, place: Place) -> np.ndarray:
    """Return the array at a place of a payload: a read-only view, or a copy if it is packed bits."""
    dtype, shape, at = place
    if dtype != _BITS:
        return np.ndarray(shape, _dtype(dtype), payload, at)
    count = math.prod(shape)
    packed = np.ndarray((-(-count // 8),), np.uint8, payload, at)
    return np.unpackbits(packed, count=count).view(bool).reshape(shape)


def compact_json(value: Any) -> str:
    """Return a value as JSON in ASCII without spaces."""
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt by name, as JSON types."""
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt of `prompt_fields`; a field that older data lacks has its default."""
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


@lru_cache(maxsize=64)  # parsing a dtype name costs more than creating an array
def _dtype(name: str) -> np.dtype:
    return np.dtype(name)


def _called(payload: bytes, name: str) -> str:
    """Return the name of a payload for error messages; without `name`, guess the id, as the header may be damaged."""
    if name:
        return f"group {name}"
    start = payload.find(b'"group_id":"')
    guess = payload[start + 12 :].split(b'"', 1)[0][:80] if start >= 0 else b"of unreadable id"
    return f"group {guess.decode('ascii', 'replace')}"


def _padded(data: bytes, filler: bytes) -> bytes:
    return data + filler * (_up(len(data)) - len(data))


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
    history: History | None = None  # of its prompt without the group, where today's baseline judges it

    @classmethod
    def of(cls, payload: bytes, name: str, origin: str) -> StoredGroup:
        """Decode a group and set its origin; arguments and errors as in `decode`."""
        header = read_header(payload, name)
        places = places_in(payload, header, name)
        return cls(group_of({**header, "origin": origin}, payload, places), payload, places)

    @cached_property
    def meta(self) -> GroupMeta:
        """Return the metadata of the group, without a reference to it; cached, as counting the mask is slow."""
        return replace(GroupMeta.of(self.group, None, self.weight), history=self.history)

    def renamed(self, group_id: str) -> StoredGroup:
        """Return a copy with another group id."""
        return replace(self, group=replace(self.group, group_id=group_id))


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
