"""Groups as files that other programs read, and back: JSONL or Parquet, one row a group, nothing lost.

    group_id  env_id  prompt_id  domain  history  step    origin  num_dropped  stop_reasons  extra (text of JSON)
    token_ids  loss_mask  behaviour_logp                  a list an episode
    rewards  versions  text (optional, for people)        an entry an episode
    item                                                  the item's record by column, null without one

In JSON, an item's float that is no number is the text "nan", "inf" or "-inf". Files appear whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.export_rows import Exported, Row, Unreadable, exported_of, row_of

__all__ = ["Exported", "Imported", "Row", "export_groups", "import_groups"]

ROWS_A_BATCH = 256
MOST_NAMED = 10  # faults that an error spells out; it says how many there are


@dataclass(frozen=True)
class Imported:
    """What a file held. Invariant: `faults` has one line for each row that was left out."""

    rows: list[Exported]
    faults: list[str]

    @property
    def num_skipped(self) -> int:
        """Return how many rows were left out."""
        return len(self.faults)


def export_groups(
    rows: Iterable[Exported],
    path: str | Path,
    item: np.dtype | None = None,
    text: Callable[[np.ndarray], str] | None = None,
    redact: Callable[[Row], Row | None] | None = None,
) -> int:
    """Write groups to a `.jsonl` or `.parquet` file and return how many.

    Args:
        rows: groups with their items, read once, a few at a time.
        path: of the file; what was there is replaced at the end.
        item: dtype of the items' records; None exports none.
        text: token ids of an episode -> text, to add the column `text`.
        redact: changes a row before it is written (tokens, text, history, extra: secrets may be in any of them), or
            returns None to leave it out. What it returns must still be a valid group.

    Raises:
        ValueError: another suffix, an item that is not of the dtype, an `extra` that JSON cannot hold, or a row that
            `redact` made invalid; then no file is written.
    """
    path = Path(path)
    write = _one_of({".jsonl": _write_jsonl, ".parquet": _write_parquet}, path)
    with _whole_file(path) as scratch:
        return write(_rows_of(rows, path, item, text, redact), scratch, item)


def import_groups(path: str | Path, on_fault: str = "refuse") -> Imported:
    """Read a file that `export_groups` wrote, or that another program wrote like it.

    Args:
        path: of a `.jsonl` or `.parquet` file.
        on_fault: "refuse" takes all rows or none; "skip" leaves broken rows out and lists them.

    Raises:
        ValueError: another suffix or `on_fault`, a file that is not of its format, or broken rows when refusing; these
            are named by file, row and field.
    """
    path = Path(path)
    if on_fault not in ("refuse", "skip"):
        raise ValueError(f"on_fault = {on_fault!r}; expected 'refuse' or 'skip'")
    rows, faults = [], []
    for number, row in enumerate(_one_of({".jsonl": _read_jsonl, ".parquet": _read_parquet}, path)(path), 1):
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
    redact: Callable[[Row], Row | None] | None,
) -> Iterator[Row]:
    for number, exported in enumerate(rows, 1):
        row = row_of(exported, text)
        columns = None if row["item"] is None else tuple(row["item"])
        if columns is not None and (item is None or columns != item.names):
            wanted = "none" if item is None else item.names
            raise ValueError(f"{path.name} row {number}: item has the columns {columns}; expected {wanted}")
        if redact is not None:
            redacted = redact(row)
            if redacted is None:
                continue
            try:
                exported_of(redacted)
            except ValueError as error:
                raise ValueError(f"{path.name} row {number}: redaction broke it: {error}") from error
            row = redacted
        yield row


def _one_of(by_suffix: Mapping[str, Callable], path: Path) -> Callable:
    if path.suffix not in by_suffix:
        raise ValueError(f"path = {path}; expected a name that ends in {' or '.join(by_suffix)}")
    return by_suffix[path.suffix]


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Let a file be written under another name, and give it its own once it is whole and on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    try:
        yield scratch
        with scratch.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _write_jsonl(rows: Iterable[Row], path: Path, item: np.dtype | None) -> int:
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


def _write_parquet(rows: Iterable[Row], path: Path, item: np.dtype | None) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_rows = 0
    rows = iter(rows)
    batch = list(islice(rows, ROWS_A_BATCH))
    schema = _schema(item, has_text=any("text" in row for row in batch))
    with pq.ParquetWriter(path, schema) as writer:
        while batch:
            try:
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
                raise ValueError(
                    f"rows {num_rows + 1} to {num_rows + len(batch)} do not fit Parquet: {error}"
                ) from error
            num_rows += len(batch)
            batch = list(islice(rows, ROWS_A_BATCH))
    return num_rows


def _schema(item: np.dtype | None, has_text: bool) -> Any:
    import pyarrow as pa

    texts, floats = pa.list_(pa.string()), pa.list_(pa.float32())
    fields: dict[str, Any] = dict.fromkeys(("group_id", "env_id", "prompt_id", "domain", "step", "origin"), pa.string())
    fields |= {"history": texts, "num_dropped": pa.int64(), "stop_reasons": texts, "extra": pa.string()}
    fields |= {"token_ids": pa.list_(pa.list_(pa.int32())), "loss_mask": pa.list_(pa.list_(pa.bool_()))}
    fields |= {"behaviour_logp": pa.list_(floats), "rewards": floats, "versions": pa.list_(pa.list_(pa.int64()))}
    if has_text:
        fields["text"] = texts
    if item is not None:
        columns = [(name, pa.from_numpy_dtype(part[0])) for name, part in (item.fields or {}).items()]
        fields["item"] = pa.struct(columns)
    return pa.schema(list(fields.items()))


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_A_BATCH):
                yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path.name} is no Parquet file: {error}") from error
