"""Groups as bytes in the format of safetensors, and prompts as JSON.

Arrays are tensors; all other fields are JSON in the metadata, without pickle. The same group gives the same bytes in
every process.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rllib_srl.types import Group, Prompt, StopReason

_ARRAYS = ("token_ids_N", "loss_mask_N", "behaviour_logp_N", "offsets", "rewards_G", "versions_G2")
_COMPACT = json.JSONEncoder(separators=(",", ":"))  # created once: construction costs more than a small value
_JSON_SCALARS = {type(None), bool, int, float, str}


def encode(group: Group) -> bytes:
    """Return a group as bytes.

    Raises:
        ValueError: listing what is no numeric array, no boolean mask, or would not survive a round trip through JSON.
    """
    errors, arrays = json_errors(group.extra, "extra"), {}
    for name in _ARRAYS:
        array = arrays[name] = np.ascontiguousarray(getattr(group, name))
        is_mask = name == "loss_mask_N"
        if array.dtype.kind not in ("b" if is_mask else "iuf"):
            errors.append(f"{name} is of {array.dtype}; expected {'bool' if is_mask else 'integers or floats'}")
    if errors:
        raise ValueError(f"group {group.group_id} cannot be stored: " + "; ".join(errors))
    header = {
        "group_id": group.group_id,
        "prompt": prompt_fields(group.prompt),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "num_dropped": int(group.num_dropped),
        "origin": group.origin,
        "extra": group.extra,
    }
    payload: bytes = save(arrays, {"fields": compact_json(header)})
    return payload


def decode(payload: bytes, name: str = "", origin: str | None = None) -> Group:
    """Return the group of a payload, of another origin if one is given; errors have the group's `name`."""
    try:
        end = 8 + int.from_bytes(payload[:8], "little")
        header: dict[str, Any] = json.loads(json.loads(payload[8:end])["__metadata__"]["fields"])
        arrays = load(payload)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"group {name} is damaged: {error}") from error
    reasons = tuple(StopReason(value) for value in header.pop("stop_reasons"))
    fields = {**header, "prompt": prompt_of(header["prompt"]), "origin": origin or header["origin"], **arrays}
    return Group(stop_reasons=reasons, **fields)


def compact_json(value: Any) -> str:
    return _COMPACT.encode(value)


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    return {**vars(prompt), "history": list(prompt.history)}


def prompt_of(fields: dict[str, Any]) -> Prompt:
    return Prompt(**{**fields, "history": tuple(fields["history"])})


def json_errors(value: Any, name: str) -> list[str]:
    """Return one message for each part of `value` that a round trip through JSON would change.

    JSON turns tuples into lists and numeric keys into strings, so both are errors.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return []
    if isinstance(value, list):
        if set(map(type, value)) <= _JSON_SCALARS:  # fast path: long lists are mostly ids or numbers
            return []
        return [error for i, part in enumerate(value) for error in json_errors(part, f"{name}[{i}]")]
    if isinstance(value, dict):
        keys = [f"{name} has the key {key!r}; expected text" for key in value if not isinstance(key, str)]
        return keys + [error for key, part in value.items() for error in json_errors(part, f"{name}[{key!r}]")]
    return [f"{name} is a {type(value).__name__}; expected None, bool, int, float, str, list or dict"]
