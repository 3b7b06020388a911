"""Read the rows of data files: JSON Lines, JSON, CSV, TSV, Parquet and Arrow, compressed or not, alone or in a folder.

    rows_of(Path("train.jsonl.gz"))     (1, {"question": ...}), (2, RowFault), ...
    files_in(Path("shards"))            [shards/train-00000-of-00002.parquet, shards/train-00001-of-00002.parquet]

    .jsonl .ndjson   one JSON object a line                          .csv .tsv    names of the columns in the first line
    .json            a list of objects, one object, or an object     .parquet     any
                     that holds a list under data, rows or problems  .arrow       as written by `datasets`
    text files also with .gz, .bz2, .xz or .zst behind

A row that cannot be read is a `RowFault` in its place, so that one of them never costs the rest. What is read but
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
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".bz2", ".xz", ".zst")  # behind a suffix
MAX_LINE_BYTES = 4 << 20  # of a row of JSONL or CSV: many times the longest prompt, small against the memory
SPLITS = {  # words in names of files, and the split that they mean
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "heldout"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
QUESTION_LIKE = ("question", "problem", "prompt", "_text", "messages")  # of a file that holds one object
_HOLDERS = ("data", "rows", "problems")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # beside the data
_MAX_SHOWN = 12  # names in a message
_MAX_FIELD_CHARS = 1 << 27  # a longer field ends a file of CSV: a quote that is never closed
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class RowFault(ValueError):
    """A row that cannot be used: `field` and what is wrong with it."""

    def __init__(self, field: str, fault: str):
        super().__init__(f"field {field!r} {fault}")


class Row(dict[str, Any]):
    """A row as read. Invariant: `notes` says what of the file is not in it."""

    notes: tuple[str, ...] = ()


def kind_of(name: str) -> str:
    """Return the suffix that says how a file is read, "" if it cannot be: ".jsonl" of "train.jsonl.gz"."""
    path = Path(name.lower())
    if path.suffix in PACKED:
        path = path.with_suffix("")
    return path.suffix if path.suffix in SUFFIXES else ""


def stem_of(name: str) -> str:
    """Return the name of a file without folders and suffixes, that of a folder as it is."""
    path = Path(name)
    while path.suffix.lower() in (*SUFFIXES, *PACKED):
        path = path.with_suffix("")
    return path.name


def files_in(folder: Path) -> list[Path]:
    """Return the data files of a folder and its folders, in the order of their names.

    Raises:
        ValueError: there are none, or those of several splits or kinds; the message lists them.
    """
    inside = sorted(
        path for path in folder.rglob("*")
        if kind_of(path.name) and path.is_file() and not any(part[0] in "._" for part in path.relative_to(folder).parts)
    )  # fmt: skip
    found = [path for path in inside if path.name not in _DESCRIPTIONS] or inside
    if any(kind_of(path.name) != ".json" for path in found):
        found = [path for path in found if kind_of(path.name) != ".json"]  # descriptions beside the data
    if not found:
        raise ValueError(f"path = {str(folder)!r} is a folder without data files; expected files that end in "
                         f"{', '.join(SUFFIXES)}, also with {', '.join(PACKED)}")  # fmt: skip
    of_split: dict[str, list[Path]] = {}
    for path in found:
        of_split.setdefault(split_of(path.relative_to(folder)), []).append(path)
    if len(splits := sorted(set(of_split) - {""})) > 1:
        each = " or ".join(repr(_common(of_split[split])) for split in splits)
        raise ValueError(f"path = {str(folder)!r} holds the splits {', '.join(splits)}; expected one of them: {each}")
    if len(kinds := sorted({kind_of(path.name) for path in found})) > 1:
        raise ValueError(
            f"path = {str(folder)!r} holds files of several kinds ({', '.join(kinds)}); expected one kind, or one of "
            f"the files: {listed([path.name for path in found])}"
        )
    return found


def parts_of(path: Path) -> list[Path]:
    """Return the data files beside each other that are named after a split: train.jsonl, train-00000-of-00002.parquet.

    Args:
        path: of a folder, with the name of the split
    """
    if not path.name or not path.parent.is_dir():
        return []
    pattern = re.compile(rf"{re.escape(path.name)}(?:[-_.]?\d+(?:-of-\d+)?(?:-\w+)?)?")
    return sorted(one for one in path.parent.iterdir() if kind_of(one.name) and pattern.fullmatch(stem_of(one.name)))


def split_of(path: Path) -> str:
    """Return the split that a word of a file's name says or, if none does, that of a folder around it; "" for none."""
    for part in reversed(path.parts):
        named = {SPLITS[word] for word in re.findall("[a-z]+", stem_of(part).lower()) if word in SPLITS}
        if len(named) == 1:
            return named.pop()
    return ""


def _common(files: Sequence[Path]) -> str:
    """Return a path that names these files alone, where there is one: a file, a split, or their folder."""
    if len(files) == 1:
        return str(files[0])
    folders = {path.parent for path in files}
    first = re.split(r"[-_.]?\d", stem_of(files[0].name))[0]
    if len(folders) == 1 and first and parts_of(files[0].with_name(first)) == list(files):
        return str(files[0].with_name(first))
    return os.path.commonpath(folders)


def listed(names: Sequence[Any]) -> str:
    """Return names in a line, the first ones of many."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(str(name)[:40] for name in names[:_MAX_SHOWN]) + more


def rows_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, row) of a data file or folder; a row that cannot be read is yielded as a `RowFault`.

    Raises:
        ValueError: unsupported file type, or the file cannot be read at all.
    """
    files = files_in(path) if path.is_dir() else [path]
    yield from enumerate((row for file in files for row in _rows_in(file)), 1)


def _rows_in(path: Path) -> Iterator[Any]:
    kind = kind_of(path.name)
    if not kind:
        raise ValueError(f"file {path.name!r}; expected one that ends in {', '.join(SUFFIXES)}, also with "
                         f"{', '.join(PACKED)}, or a folder of them")  # fmt: skip
    try:
        if kind in (".json", ".csv", ".tsv"):
            _check_text(path)
        yield from _READERS[kind](path)
    except _UNREADABLE as error:
        raise ValueError(f"file {str(path)!r} cannot be read: {error or type(error).__name__}") from error


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading, unpacked as its suffix says."""
    packed = path.suffix.lower()
    if packed == ".zst":
        import pyarrow

        held: IO[bytes] = io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
        return held
    of_suffix: Mapping[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    found: IO[bytes] = of_suffix.get(packed, open)(path, "rb")
    return found


def _check_text(path: Path) -> None:
    """Check that a text file which is read as a whole is UTF-8."""
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            _decoded(line, path, number)


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
            f"no UTF-8; expected UTF-8, and this file seems to be {encoding}: iconv -f {source} -t UTF-8 FILE > NEW"
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
    return [_with_notes(one) for one in value] if isinstance(value, list) else _with_notes(value)


def _with_notes(value: Any) -> Any:
    """Return a row that has the notes of all objects in it."""
    notes: list[str] = []
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        notes += one.notes if isinstance(one, Row) else ()
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
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
                yield RowFault(
                    "(row)", f"(line {number}) has more than {MAX_LINE_BYTES} bytes; expected one row a line"
                )
                continue
            text = _decoded(line, path, number)
            if not text.strip():
                continue
            try:
                value = parsed(text)
                yield from value if number == 1 and isinstance(value, list) else [value]  # a list under another name
            except (ValueError, RecursionError) as error:
                yield RowFault("(row)", f"is not JSON: {error}")


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


# --- tables ---------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> Iterator[Any]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, delimiter=_delimiter(path))
        try:
            names = [name.strip() for name in next(reader, [])]
            twice = [name for name, num in Counter(filter(None, names)).items() if num > 1]
            notes = tuple(f"has the column {name!r} twice, and the last one counts" for name in twice)
            for values in reader:
                if values:
                    yield _csv_row(names, values, notes)
                    notes = ()  # once for a file
        except csv.Error as error:
            where = f"file {str(path)!r}, line {reader.line_num + 1}"
            raise ValueError(f"{where} cannot be read: {error}; expected comma-separated values, and every quote "
                             "closed") from error  # fmt: skip


def _csv_row(names: Sequence[str], values: Sequence[str], notes: tuple[str, ...]) -> Row | RowFault:
    if (extra := len(values) - len(names)) > 0 and any(value.strip() for value in values[len(names) :]):
        return RowFault("(row)", f"has {extra} more values than column names")
    if (num := sum(map(len, values))) > MAX_LINE_BYTES:
        return RowFault("(row)", f"has {num} characters; expected at most {MAX_LINE_BYTES}: is a quote not closed?")
    row = Row(dict.fromkeys(names))
    row.update(zip(names, values, strict=False))
    row.notes = notes
    return row


def _delimiter(path: Path) -> str:
    """Return the character between values: a tab, or what the line of names has in place of commas."""
    if kind_of(path.name) == ".tsv":
        return "\t"
    with opened(path) as lines:
        names = lines.readline(MAX_LINE_BYTES).decode("utf-8-sig", "replace")
    return next((mark for mark in (",", ";", "\t", "|") if mark in names), ",")


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
