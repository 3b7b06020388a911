"""A `Group` and its bytes, without pickle: what the journal stores and what travels between processes.

    "SRLG"  version u16  0 u16  header length u32  0 u32      16 bytes, little-endian as everything here
    header  JSON in ASCII, spaces up to a multiple of 8       all but the arrays; dtype and shape of these
    arrays  one after another, each up to a multiple of 8     the loss mask as packed bits, the others as they are
    xxh3    u64 over everything before

Decoded arrays are read-only views of the bytes (the mask apart), so that decoding costs a checksum and no copy. Where
they lie (`places_in`) is enough to find them again in a copy of the bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from rllib_srl.types import Group, Prompt, StopReason

MAGIC = b"SRLG"
VERSION = 1
_PREAMBLE = struct.Struct("<4sHHII")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 8
_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
LONG = ("token_ids_N", "behaviour_logp_N")  # a number a token, stored as they are
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # made once: making it takes longer than a small value
_BITS = "bits"  # stands for the dtype of a packed mask
Place = tuple[str, tuple[int, ...], int]  # of an array in a payload: dtype, shape, first byte


def encode(group: Group) -> bytes:
    """Write a group down. The same group gives the same bytes in every process.

    Raises:
        ValueError: an array is not of numbers, the mask is not of booleans, or `extra` holds what JSON cannot give
            back; all faults at once.
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
    """Read a group back; its arrays are read-only views of `payload`.

    Args:
        payload: what `encode` returned.
        name: what an error calls it; without one, the group id if that can still be read.

    Raises:
        ValueError: naming the group and what is wrong with its bytes.
    """
    header = read_header(payload, name)
    return group_of(header, payload, places_in(payload, header, name or header["group_id"]))


def group_of(header: Mapping[str, Any], payload: bytes, places: Mapping[str, Place]) -> Group:
    """Return the group of a payload whose header and places are known."""
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
    """Check the bytes of a group and return its header: everything but the arrays.

    Raises:
        ValueError: naming the group and what is wrong with its bytes.
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
    return json.loads(payload[_PREAMBLE.size : _PREAMBLE.size + length])


def places_in(payload: bytes, header: dict[str, Any], name: str) -> dict[str, Place]:
    """Return where the arrays of a group lie, by name.

    Raises:
        ValueError: the payload is not as long as its header says.
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
    """Return the array at a place of a payload, a read-only view unless it is of packed bits."""
    dtype, shape, at = place
    if dtype != _BITS:
        return np.ndarray(shape, _dtype(dtype), payload, at)
    count = math.prod(shape)
    packed = np.ndarray((-(-count // 8),), np.uint8, payload, at)
    return np.unpackbits(packed, count=count).view(bool).reshape(shape)


def compact_json(value: Any) -> str:
    """Return JSON in ASCII without spaces."""
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt as what JSON holds, every field by its name."""
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt whose `prompt_fields` these are; a field that is younger than they has its default."""
    return Prompt(**{**fields, "history": tuple(fields["history"])})


_JSON_SCALARS = {type(None), bool, int, float, str}


def json_faults(value: Any, name: str) -> list[str]:
    """Return a line for each part of `value` that would not come back from JSON as it went in.

    A tuple would come back as a list and a number as a key would come back as text, so both are faults.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return []
    if isinstance(value, list):
        if set(map(type, value)) <= _JSON_SCALARS:  # the usual long list: ids or numbers
            return []
        return [fault for i, part in enumerate(value) for fault in json_faults(part, f"{name}[{i}]")]
    if isinstance(value, dict):
        if set(map(type, value)) <= {str} and set(map(type, value.values())) <= _JSON_SCALARS:
            return []
        keys = [f"{name} has the key {key!r}; expected text" for key in value if not isinstance(key, str)]
        return keys + [fault for key, part in value.items() for fault in json_faults(part, f"{name}[{key!r}]")]
    return [f"{name} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict"]


@lru_cache(maxsize=64)  # parsing a name takes longer than making an array
def _dtype(name: str) -> np.dtype:
    return np.dtype(name)


def _called(payload: bytes, name: str) -> str:
    """Return what an error calls a payload: its header may be damaged too, so its id is a guess."""
    if name:
        return f"group {name}"
    start = payload.find(b'"group_id":"')
    guess = payload[start + 12 :].split(b'"', 1)[0][:80] if start >= 0 else b"of unreadable id"
    return f"group {guess.decode('ascii', 'replace')}"


def _padded(data: bytes, filler: bytes) -> bytes:
    return data + filler * (_up(len(data)) - len(data))


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
