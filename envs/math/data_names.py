"""Tell files of data by their names, and find those of a folder or of a split.

kind_of("train.jsonl.gz")      ".jsonl"
files_in(Path("shards"))       [shards/train-00000-of-00002.parquet, shards/train-00001-of-00002.parquet]
parts_of(Path("data/train"))   [data/train-00000-of-00002.parquet, ...]
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".bz2", ".xz", ".zst")  # behind a suffix
SPLITS = {  # words in names of files, and the split that they mean
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "heldout"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # beside the data
_MAX_SHOWN = 12  # names in a message


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
