"""Write groups to JSONL files without loss, one row per group, and read and validate such files.

    group_id  env_id  prompt_id  domain  history  step    origin  num_dropped  stop_reasons  extra (text of JSON)
    token_ids  loss_mask  behaviour_logp                  one list per episode
    rewards  versions  text (optional, human-readable)    one entry per episode
    item                                                  the item's record by column, or null

In JSON, a non-finite float of an item is the text "nan", "inf" or "-inf". Files are written atomically.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.journal.codec import json_faults
from rllib_srl.types import Group, Prompt, StopReason

Row = dict[str, Any]
NO_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Exported:
    """The content of one row: a group, and its item as a record or as columns by name."""

    group: Group
    item: np.void | Mapping[str, bool | int | float] | None = None


class Unreadable(str):
    """The error message of a row that could not be parsed."""


def row_of(exported: Exported, text: Callable[[np.ndarray], str] | None) -> Row:
    """Return the row of a group, as plain values.

    Raises:
        ValueError: `extra` does not survive a round trip through JSON.
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
    """Build the group of a row and validate it.

    Raises:
        ValueError: naming each field that is missing or invalid.
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


def _joined(streams: list[list[Any]], dtype: type) -> np.ndarray:
    return np.array([value for stream in streams for value in stream], dtype)


def _item(columns: Any) -> dict[str, bool | int | float] | None:
    if columns is None:
        return None
    kinds = bool | int | float
    if not isinstance(columns, dict) or not all(isinstance(v, kinds) or v in NO_NUMBERS for v in columns.values()):
        raise ValueError("item is not an object of numbers")
    return {name: NO_NUMBERS[value] if isinstance(value, str) else value for name, value in columns.items()}


# Fields -----------------------------------------------------------------------------------------------------------


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


__all__ = ["Exported", "Imported", "Row", "export_groups", "import_groups"]

MOST_NAMED = 10  # maximum number of invalid rows listed in an error message; it counts the others


@dataclass(frozen=True)
class Imported:
    """The content of a file. Invariant: `faults` has one message for each row that was left out."""

    rows: list[Exported]
    faults: list[str]

    @property
    def num_skipped(self) -> int:
        """Return the number of rows that were left out."""
        return len(self.faults)


def export_groups(
    rows: Iterable[Exported],
    path: str | Path,
    item: np.dtype | None = None,
    text: Callable[[np.ndarray], str] | None = None,
) -> int:
    """Write groups to a `.jsonl` file and return their number.

    Args:
        rows: groups with their items, iterated once, a few at a time.
        path: of the file; an existing file is replaced at the end.
        item: dtype of the items' records; None if no row has an item.
        text: token ids of an episode -> text, for the column `text`; None omits the column.

    Raises:
        ValueError: another suffix, an item of another dtype, or an `extra` that JSON cannot hold; then no file is
            written.
    """
    path = _checked(path)
    with _whole_file(path) as scratch:
        return _write_jsonl(_rows_of(rows, path, item, text), scratch)


def import_groups(path: str | Path, on_fault: str = "refuse") -> Imported:
    """Read a file in the format of `export_groups`.

    Args:
        path: of a `.jsonl` file.
        on_fault: "refuse" imports all rows or none; "skip" leaves invalid rows out and lists them.

    Raises:
        ValueError: another suffix, an unknown `on_fault`, or invalid rows with "refuse"; the message names file, row
            and field.
    """
    path = _checked(path)
    if on_fault not in ("refuse", "skip"):
        raise ValueError(f"on_fault = {on_fault!r}; expected 'refuse' or 'skip'")
    rows, faults = [], []
    for number, row in enumerate(_read_jsonl(path), 1):
        try:
            rows.append(exported_of(row))
        except ValueError as error:
            faults.append(f"{path.name} row {number}: {error}")
    if faults and on_fault == "refuse":
        more = f"; and {len(faults) - MOST_NAMED} more rows" if len(faults) > MOST_NAMED else ""
        raise ValueError(f"{len(faults)} broken rows, nothing was imported: " + "; ".join(faults[:MOST_NAMED]) + more)
    return Imported(rows, faults)


def _rows_of(
    rows: Iterable[Exported],
    path: Path,
    item: np.dtype | None,
    text: Callable[[np.ndarray], str] | None,
) -> Iterator[Row]:
    for number, exported in enumerate(rows, 1):
        row = row_of(exported, text)
        columns = None if row["item"] is None else tuple(row["item"])
        if columns is not None and (item is None or columns != item.names):
            wanted = "none" if item is None else item.names
            raise ValueError(f"{path.name} row {number}: item has the columns {columns}; expected {wanted}")
        yield row


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".jsonl":
        raise ValueError(f"path = {path}; expected a name that ends in .jsonl")
    return path


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Yield a scratch path; on success, flush the file and rename it to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    try:
        yield scratch
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_jsonl(rows: Iterable[Row], path: Path) -> int:
    num_rows = 0
    with path.open("w", encoding="ascii") as stream:
        for row in rows:
            if row["item"] is not None:
                row = {**row, "item": {name: _json_number(value) for name, value in row["item"].items()}}
            stream.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            num_rows += 1
    return num_rows


def _json_number(value: float) -> float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        for line in stream:
            try:
                yield json.loads(line)
            except ValueError as error:
                yield Unreadable(f"not JSON ({error})")
