"""One row of an export: plain values of a group and its item, and the checks that bring a group back from them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.replay.codec import json_faults
from rllib_srl.types import Group, Prompt, StopReason

Row = dict[str, Any]
NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Exported:
    """What one row holds: a group, and its item as it was, a record or its columns by name."""

    group: Group
    item: np.void | Mapping[str, bool | int | float] | None = None


class Unreadable(str):
    """Stands for a row that could not be read at all, and says why."""


def row_of(exported: Exported, text: Callable[[np.ndarray], str] | None) -> Row:
    """Return what is written of a group, as plain values.

    Raises:
        ValueError: its `extra` holds what JSON cannot give back.
    """
    group = exported.group
    if faults := json_faults(group.extra, "extra"):
        raise ValueError(f"group {group.group_id} cannot be exported: {'; '.join(faults)}")
    cuts = [slice(a, b) for a, b in zip(group.offsets[:-1], group.offsets[1:], strict=True)]
    row = {
        "group_id": group.group_id,
        **vars(group.prompt),
        "history": list(group.prompt.history),
        "origin": group.origin,
        "num_dropped": int(group.num_dropped),
        "stop_reasons": [reason.value for reason in group.stop_reasons],
        "extra": json.dumps(group.extra),
        "token_ids": [group.token_ids_N[cut].tolist() for cut in cuts],
        "loss_mask": [group.loss_mask_N[cut].tolist() for cut in cuts],
        "behaviour_logp": [group.behaviour_logp_N[cut].tolist() for cut in cuts],
        "rewards": group.rewards_G.tolist(),
        "versions": group.versions_G2.tolist(),
    }
    if text is not None:
        row["text"] = [text(group.token_ids_N[cut]) for cut in cuts]
    item = exported.item
    row["item"] = {name: item[name].item() for name in item.dtype.names or ()} if isinstance(item, np.void) else item
    return row


def exported_of(row: Any) -> Exported:
    """Build the group of a row, and check it.

    Raises:
        ValueError: naming each field that is missing or not what it should be.
    """
    if isinstance(row, Unreadable):
        raise ValueError(row)
    if not isinstance(row, dict):
        raise ValueError(f"it is a {type(row).__name__}; expected an object with fields")
    faults = [fault for name, (check, what) in _FIELDS.items() if (fault := _fault_of_field(row, name, check, what))]
    if faults:
        raise ValueError("; ".join(faults))
    lengths = [len(stream) for stream in row["token_ids"]]
    if not lengths:
        raise ValueError("token_ids has no episode")
    for name in ("loss_mask", "behaviour_logp"):
        if [len(stream) for stream in row[name]] != lengths:
            faults.append(f"{name} has streams of other lengths than token_ids")
    for name in ("rewards", "versions", "stop_reasons"):
        if len(row[name]) != len(lengths):
            faults.append(f"{name} has {len(row[name])} entries; expected {len(lengths)}, one an episode")
    if faults:
        raise ValueError("; ".join(faults))
    group = _group(row, lengths)
    group.check_valid()
    return Exported(group, _item(row.get("item")))


def _group(row: Row, lengths: list[int]) -> Group:
    prompt = Prompt(row["env_id"], row["prompt_id"], row["domain"], tuple(row["history"]), row.get("step") or "")
    return Group(
        group_id=row["group_id"],
        prompt=prompt,
        token_ids_N=_joined(row["token_ids"], np.int32),
        loss_mask_N=_joined(row["loss_mask"], np.bool_),
        behaviour_logp_N=_joined(row["behaviour_logp"], np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        rewards_G=np.array(row["rewards"], np.float32),
        versions_G2=np.array(row["versions"], np.int64).reshape(-1, 2),
        stop_reasons=tuple(StopReason(value) for value in row["stop_reasons"]),
        num_dropped=row["num_dropped"],
        origin=row["origin"],
        extra=json.loads(row["extra"]),
    )


def _joined(streams: list[list], dtype: type) -> np.ndarray:
    return np.array([value for stream in streams for value in stream], dtype)


def _item(columns: Any) -> dict[str, bool | int | float] | None:
    if columns is None:
        return None
    is_right = isinstance(columns, dict) and all(_is_number(v) or v in NO_NUMBERS for v in columns.values())
    if not is_right:
        raise ValueError("item is not an object of numbers")
    return {name: NO_NUMBERS[value] if isinstance(value, str) else value for name, value in columns.items()}


# Fields -----------------------------------------------------------------------------------------------------------


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _is_float(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any, bits: int = 64) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << bits - 1) <= value < 1 << bits - 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(part) for part in value)


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except (TypeError, ValueError):
        return False


def _is_reason(value: Any) -> bool:
    return _is_text(value) and value in {reason.value for reason in StopReason}


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "group_id": (_is_text, "text"),
    "env_id": (_is_text, "text"),
    "prompt_id": (_is_text, "text"),
    "domain": (_is_text, "text"),
    "history": (_list_of(_is_text), "a list of texts"),
    "origin": (lambda value: value in ("fresh", "revisit", "reuse"), "fresh, revisit or reuse"),
    "num_dropped": (lambda value: _is_int(value) and value >= 0, "an integer of at least 0"),
    "stop_reasons": (_list_of(_is_reason), "a list of stop reasons"),
    "extra": (_is_json_object, "the text of a JSON object"),
    "token_ids": (_list_of(_list_of(lambda v: _is_int(v, 32) and v >= 0)), "a list of lists of int32 of at least 0"),
    "loss_mask": (_list_of(_list_of(lambda value: isinstance(value, bool))), "a list of lists of booleans"),
    "behaviour_logp": (_list_of(_list_of(_is_float)), "a list of lists of numbers"),
    "rewards": (_list_of(_is_float), "a list of numbers"),
    "versions": (_list_of(lambda v: _list_of(_is_int)(v) and len(v) == 2), "a list of pairs of integers"),
}


def _fault_of_field(row: Row, name: str, check: Callable[[Any], bool], what: str) -> str:
    if name not in row:
        return f"{name} is missing"
    shown = repr(row[name])
    return "" if check(row[name]) else f"{name} = {shown[:60]}{'...' * (len(shown) > 60)}; expected {what}"
