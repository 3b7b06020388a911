"""Encode groups and targets as bytes in the format of safetensors, without pickle.

    encode(group) -> bytes: its arrays, and all other fields as JSON in the metadata     decode(bytes) -> group
    StoredGroupBatch: pickled as the bytes of its groups, without a copy; unpickled as groups

Decoded arrays are read-only views of the bytes. The same group gives the same bytes in every process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pickle import PickleBuffer
from typing import Any

import numpy as np
from safetensors.numpy import save

from rllib_srl.types import Group, GroupMeta, History, Prompt, StopReason, Target

_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
_OF_TARGET = ("ids_Tk", "logp_Tk", "sampled_logp_T")
_DTYPES = {f"{kind}{8 * size}": np.dtype(f"<{code}{size}") for kind, code in zip("IUF", "iuf") for size in (1, 2, 4, 8)
           if (kind, size) != ("F", 1)} | {"BOOL": np.dtype(bool)}  # fmt: skip
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # created once: construction costs more than a small value
_JSON_SCALARS = {type(None), bool, int, float, str}


def encode(group: Group) -> bytes:
    """Return a group as bytes.

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
    return _saved(arrays, header)


def decode(payload: Any, name: str = "", origin: str | None = None) -> Group:
    """Return the group of a payload.

    Args:
        payload: what `encode` returned, in any buffer.
        name: the group's name in error messages.
        origin: of the group; None: as stored.

    Raises:
        ValueError: the payload cannot be read; the message names the group.
    """
    header, arrays = _opened(payload, f"group {name}")
    return Group(
        group_id=header["group_id"],
        prompt=prompt_of(header["prompt"]),
        stop_reasons=tuple(StopReason(value) for value in header["stop_reasons"]),
        num_dropped=header["num_dropped"],
        origin=origin or header["origin"],
        extra=header["extra"],
        **arrays,
    )


def encode_target(target: Target) -> bytes:
    """Return a target as bytes."""
    arrays = {name: np.ascontiguousarray(getattr(target, name)) for name in _OF_TARGET}
    return _saved(arrays, {"group_id": target.group_id, "episode": target.episode})


def decode_target(payload: bytes) -> Target:
    """Return the target of `encode_target`.

    Raises:
        ValueError: the payload cannot be read.
    """
    header, arrays = _opened(payload, "a target")
    return Target(header["group_id"], header["episode"], **arrays)


def _saved(arrays: dict[str, np.ndarray], header: Mapping[str, Any]) -> bytes:
    payload: bytes = save(arrays, {"fields": compact_json(header)})
    return payload


def _opened(payload: Any, what: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        view = memoryview(payload).cast("B")
        start = 8 + int.from_bytes(view[:8], "little")
        described = json.loads(bytes(view[8:start]))
        header: dict[str, Any] = json.loads(described.pop("__metadata__")["fields"])
        end = start + max(one["data_offsets"][1] for one in described.values())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{what} is damaged: its header cannot be read: {error}") from error
    if end != len(view):
        raise ValueError(f"{what} is damaged: {len(view)} bytes; expected {end}")
    return header, {
        name: np.ndarray(tuple(one["shape"]), _DTYPES[one["dtype"]], payload, start + one["data_offsets"][0])
        for name, one in described.items()
    }


def compact_json(value: Any) -> str:
    """Return a value as JSON in ASCII without spaces."""
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a prompt by name, as JSON types."""
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    """Return the prompt of `prompt_fields`."""
    return Prompt(**{**fields, "history": tuple(fields["history"])})


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
        keys = [f"{name} has the key {key!r}; expected text" for key in value if not isinstance(key, str)]
        return keys + [fault for key, part in value.items() for fault in json_faults(part, f"{name}[{key!r}]")]
    return [f"{name} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict"]


@dataclass(frozen=True)
class StoredGroup:
    """A drawn group, and the bytes that it was stored as."""

    group: Group
    payload: bytes
    weight: float = 1.0  # loss weight from the draw
    history: History | None = None  # of its prompt without the group, where the baseline is one from history

    @cached_property
    def meta(self) -> GroupMeta:
        """Return the metadata of the group, without a reference to it."""
        return replace(GroupMeta.of(self.group, None, self.weight), history=self.history)


class StoredGroupBatch(list[Group]):
    """A list of groups that pickles as their stored bytes. Invariant: an unpickled copy is an equal list."""

    def __init__(self, contents: Iterable[StoredGroup] = ()) -> None:
        """Create the list of the groups in `contents`."""
        contents = list(contents)
        self._payloads = [one.payload for one in contents]
        super().__init__(one.group for one in contents)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the constructor of the groups, their bytes and their origins."""
        buffers = [PickleBuffer(payload) if int(protocol) >= 5 else payload for payload in self._payloads]
        return _unpickled, (buffers, [group.origin for group in self])


def _unpickled(payloads: Sequence[Any], origins: Sequence[str]) -> list[Group]:
    return [decode(payload, str(at), origin) for at, (payload, origin) in enumerate(zip(payloads, origins))]
