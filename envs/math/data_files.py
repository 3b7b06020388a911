"""Read the rows of data files: JSON Lines, JSON, CSV, TSV, Parquet and Arrow, compressed or not, alone or in a folder.

    rows_of(Path("train.jsonl.gz"))     (1, {"question": ...}), (2, RowError), ...

    .jsonl .ndjson   one JSON object a line                          .csv .tsv    names of the columns in the first line
    .json            a list of objects, one object, or an object     .parquet     any
                     that holds a list under data, rows or problems  .arrow       as written by `datasets`
    text files also with .gz, .bz2, .xz or .zst behind

A row that cannot be read is a `RowError` in its place, so that one of them never costs the rest. What is read but
deserves a look (a key that occurs twice in an object) is in `Row.notes`.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from rllib_srl.envs.math.data_place import PACKED, SUFFIXES, files_in, kind_of

MAX_LINE_BYTES = 4 << 20  # of a row of JSONL or CSV: many times the longest prompt, small against the memory
QUESTION_LIKE = ("question", "problem", "prompt", "_text", "messages")  # of a file that holds one object
_MARKS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
_HOLDERS = ("data", "rows", "problems")
_MAX_FIELD_CHARS = 1 << 27  # a longer field ends a file of CSV: a quote that is never closed
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class RowError(ValueError):
    """A row that cannot be used: `field` and what is wrong with it."""

    def __init__(self, field: str, error: str):
        super().__init__(f"field {field!r} {error}")


class Row(dict[str, Any]):
    """A row as read. Invariant: `notes` says what of the file is not in it."""

    notes: tuple[str, ...] = ()


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, row) of a data file or folder; a row that cannot be read is yielded as a `RowError`.

    Raises:
        ValueError: unsupported file type, or the file cannot be read at all.
    """
    files = files_in(path) if path.is_dir() else [path]
    yield from enumerate((row for file in files for row in _rows_in(file)), 1)


def lines_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield as `rows_of` does from a file of one JSON object a line, whatever its name is."""
    yield from enumerate(_read(path, _json_lines), 1)


def _rows_in(path: Path) -> Iterator[Any]:
    kind = kind_of(path.name)
    if not kind:
        raise ValueError(f"file {path.name!r}; expected one that ends in {', '.join(SUFFIXES)}, also with "
                         f"{', '.join(PACKED)}, or a folder of them")  # fmt: skip
    if kind in (".json", ".csv", ".tsv"):
        yield from _read(path, _checked_text)
    yield from _read(path, _READERS[kind])


def _read(path: Path, reader: Callable[[Path], Iterable[Any]]) -> Iterator[Any]:
    try:
        yield from reader(path)
    except _UNREADABLE as error:
        raise ValueError(f"file {str(path)!r} cannot be read: {error or type(error).__name__}") from error


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked as its suffix or, without one, its first bytes say."""
    packed = path.suffix.lower()
    if packed not in PACKED:
        with open(path, "rb") as file:
            start = file.read(6)
        packed = next((suffix for mark, suffix in _MARKS.items() if start.startswith(mark)), "")
    if packed == ".zst":
        import pyarrow

        held: IO[bytes] = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
        return held
    of_suffix: Mapping[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    stream: IO[bytes] = of_suffix.get(packed, open)(path, "rb")
    return stream


def _checked_text(path: Path) -> tuple[()]:
    """Check that a text file which is read as a whole is UTF-8; return no rows."""
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            _decoded(line, path, number)
    return ()


def _decoded(line: bytes, path: Path, number: int) -> str:
    """Return a line as text.

    Raises:
        ValueError: it is not UTF-8; the message names the place and the remedy.
    """
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        is_wide = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and number == 1
        encoding = "UTF-16" if is_wide else "the encoding it was written in, perhaps CP1252"
        source = "UTF-16" if is_wide else "CP1252"
        raise ValueError(
            f"file {str(path)!r}, line {number} cannot be read: byte {error.start + 1} (0x{line[error.start]:02x}) is "
            f"not UTF-8; expected UTF-8, and this file seems to be {encoding}: iconv -f {source} -t UTF-8 FILE > NEW"
        ) from error


# --- JSON -----------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """Return the value of a JSON text; an object in which a key occurs twice becomes a `Row` with a note.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        row = Row(made)
        names = [name for name, num in Counter(name for name, _ in pairs).items() if num > 1]
        row.notes = tuple(f"has the key {name!r} twice, and the last one counts" for name in names)
        noted.append(row)
        return row

    noted: list[Row] = []
    value = json.loads(text, object_pairs_hook=of_pairs)
    if not noted:
        return value
    return [_with_notes(item) for item in value] if isinstance(value, list) else _with_notes(value)


def _with_notes(value: Any) -> Any:
    """Return a row that has the notes of all objects in it."""
    notes: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        node = waiting.pop()
        notes += node.notes if isinstance(node, Row) else ()
        waiting += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if not notes or not isinstance(value, dict):
        return value
    row = Row(value)
    row.notes = tuple(dict.fromkeys(notes))
    return row


def _json_lines(path: Path) -> Iterator[Any]:
    with opened(path) as lines:
        number = 0
        while line := lines.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while not line.endswith(b"\n") and (line := lines.readline(MAX_LINE_BYTES)):
                    pass
                yield RowError(
                    "(row)", f"(line {number}) has more than {MAX_LINE_BYTES} bytes; expected one row a line"
                )
                continue
            text = _decoded(line, path, number)
            if not text.strip():
                continue
            try:
                value = parsed(text)
                yield from value if number == 1 and isinstance(value, list) else [value]  # a list under another name
            except json.JSONDecodeError as error:
                place = f"at column {error.colno} of line {number}"
                yield RowError("(row)", f"is not JSON {place} ({error.msg}); expected one object a line")
            except (ValueError, RecursionError) as error:  # a number of too many digits, or too deep
                yield RowError("(row)", f"is not JSON: {error}; expected one object a line")


def _json_list(path: Path) -> Iterator[Any]:
    with opened(path) as file:
        text = file.read().decode("utf-8-sig")
    try:
        held = parsed(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):  # JSON Lines under another name
            yield from _json_lines(path)
            return
        raise ValueError(f"file {str(path)!r} is not JSON: {error}; expected a list (or name it .jsonl)") from error
    except RecursionError as error:
        raise ValueError(f"file {str(path)!r} is not JSON: {error}; expected a list (or name it .jsonl)") from error
    held = _of_columns(held) if isinstance(held, dict) else held
    if isinstance(held, Mapping) and not any(name in held for name in _HOLDERS):
        names = {str(name).casefold().strip() for name in held}
        if names & set(QUESTION_LIKE) and not all(isinstance(row, Mapping) for row in held.values()):
            held = [held]  # a file a row, as MATH is published
    if isinstance(held, Mapping):
        held = next((held[name] for name in _HOLDERS if name in held), held)
    if isinstance(held, Mapping) and all(isinstance(row, Mapping) for row in held.values()):
        held = list(held.values())
    if not isinstance(held, list):
        raise ValueError(f"file {str(path)!r} holds no rows; expected a list, or one under {', '.join(_HOLDERS)}")
    yield from map(_with_notes, held)


def _of_columns(held: dict[str, Any]) -> Any:
    """Return the rows of an object that holds columns, as pandas and `datasets` write them; else the object."""
    if isinstance(held.get("columns"), list) and isinstance(held.get("data"), list):
        return [dict(zip(held["columns"], row, strict=False)) if isinstance(row, list) else row for row in held["data"]]
    columns = list(held.values())
    if not {str(name).strip().casefold() for name in held} & set(QUESTION_LIKE):
        return held
    if all(isinstance(column, dict) for column in columns) and len({tuple(column) for column in columns}) == 1:
        columns = [list(column.values()) for column in columns]
    if all(isinstance(column, list) for column in columns) and len({len(column) for column in columns}) == 1:
        return [dict(zip(held, values, strict=True)) for values in zip(*columns, strict=True)]
    return held


# --- tables ---------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> Iterator[Any]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        delimiter, quoting, num_before = _form_of_table(path)
        for _ in range(num_before):
            lines.readline()
        reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            twice = [name for name, num in Counter(filter(None, names)).items() if num > 1]
            notes = tuple(f"has the column {name!r} twice, and the last one counts" for name in twice)
            begin = reader.line_num + 1
            for values in reader:
                if any(value.strip() for value in values):
                    yield _csv_row(names, values, notes, (begin + num_before, reader.line_num + num_before))
                    notes = ()  # once for a file
                begin = reader.line_num + 1
        except csv.Error as error:
            where = f"file {str(path)!r}, line {reader.line_num + 1}"
            raise ValueError(f"{where} cannot be read: {error}; expected comma-separated values, and every quote "
                             "closed") from error  # fmt: skip


def _csv_row(
    names: Sequence[str], values: Sequence[str], notes: tuple[str, ...], span: tuple[int, int]
) -> Row | RowError:
    if len(values) < len(names) and span[1] > span[0]:
        error = f"(lines {span[0]} to {span[1]}) has {len(values)} of {len(names)} values over several lines"
        return RowError("(row)", f"{error}; expected every quote closed: write a quote at the start of a text twice")
    if (extra := len(values) - len(names)) > 0 and any(value.strip() for value in values[len(names) :]):
        return RowError("(row)", f"has {extra} more values than column names")
    if (num := sum(map(len, values))) > MAX_LINE_BYTES:
        name, value = max(zip(names, values, strict=False), key=lambda pair: len(pair[1]))
        size = f"has {len(value)} of the row's {num} characters; expected at most {MAX_LINE_BYTES}"
        return RowError(name, f"{size}: is a quote not closed?")
    row = Row(dict.fromkeys(names))
    row.update(zip(names, values, strict=False))
    row.notes = notes
    return row


def _form_of_table(path: Path) -> tuple[str, Literal[0, 3], int]:
    """Return the character between values, the use of quotes, and the number of lines before the names.

    Values are between tabs in .tsv, else between what the line of names has. Excel may write "sep=;" in front. In a
    .tsv whose lines have equally many tabs, and where a quote begins a value that it does not end, quotes mean nothing.
    """
    with opened(path) as lines:
        names, num_before = lines.readline(MAX_LINE_BYTES).decode("utf-8-sig", "replace"), 0
        if match := re.fullmatch(r"sep=(.)\s*", names):
            return match[1], csv.QUOTE_MINIMAL, 1
        if kind_of(path.name) != ".tsv":
            return next((mark for mark in (",", ";", "\t", "|") if mark in names), ","), csv.QUOTE_MINIMAL, num_before
        num_tabs, is_open = names.count("\t"), False
        for line in lines:
            values = line.rstrip(b"\r\n").split(b"\t")
            if len(values) != num_tabs + 1 and values != [b""]:
                return "\t", csv.QUOTE_MINIMAL, num_before
            is_open |= any(cell[:1] == b'"' and (len(cell) == 1 or cell[-1:] != b'"') for cell in values)
    return "\t", csv.QUOTE_NONE if is_open else csv.QUOTE_MINIMAL, num_before


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(_whole(path) if path.suffix.lower() in PACKED else path) as held:
            for batch in held.iter_batches():
                yield from map(_named, batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"file {str(path)!r} is not a Parquet file: {error}") from error


def _arrow_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.ipc

    held = _whole(path)
    try:
        reader: Iterable[Any]
        try:
            reader = pyarrow.ipc.open_stream(held)
        except pyarrow.ArrowInvalid:
            of_file = pyarrow.ipc.open_file(held)
            reader = (of_file.get_batch(number) for number in range(of_file.num_record_batches))
        for batch in reader:
            yield from map(_named, batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"file {str(path)!r} is not an Arrow file: {error}") from error


def _whole(path: Path) -> Any:
    import pyarrow

    with opened(path) as file:
        return pyarrow.BufferReader(file.read())


def _named(row: Mapping[str, Any]) -> Row:
    return Row((str(name).strip(), value) for name, value in row.items())


_READERS = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json_list, ".csv": _csv_rows,
            ".tsv": _csv_rows, ".parquet": _parquet_rows, ".arrow": _arrow_rows}  # fmt: skip
