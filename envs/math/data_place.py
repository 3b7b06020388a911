"""Find the files of a data set: a local file or folder, or a file or split of one of the hub, downloaded if need be.

local_files("", "data/train.jsonl.gz")            [data/train.jsonl.gz]
local_files("", "data/train")                     the files data/train-*.parquet, or those in the folder data/train
local_files("openai/gsm8k", "main/train")         [.../main/train-00000-of-00001.parquet]
kind_of("train.jsonl.gz")                         ".jsonl"
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
    files = [path for path in inside if path.name not in _DESCRIPTIONS] or inside
    if any(kind_of(path.name) != ".json" for path in files):
        files = [path for path in files if kind_of(path.name) != ".json"]  # descriptions beside the data
    if not files:
        raise ValueError(f"path = {str(folder)!r} is a folder without data files; expected files that end in "
                         f"{', '.join(SUFFIXES)}, also with {', '.join(PACKED)}")  # fmt: skip
    of_split: dict[str, list[Path]] = {}
    for path in files:
        of_split.setdefault(split_of(path.relative_to(folder)), []).append(path)
    if len(splits := sorted(set(of_split) - {""})) > 1:
        each = " or ".join(repr(_common(of_split[split])) for split in splits)
        raise ValueError(f"path = {str(folder)!r} holds the splits {', '.join(splits)}; expected one of them: {each}")
    if len(kinds := sorted({kind_of(path.name) for path in files})) > 1:
        raise ValueError(
            f"path = {str(folder)!r} holds files of several kinds ({', '.join(kinds)}); expected one kind, or one of "
            f"the files: {listed([path.name for path in files])}"
        )
    return files


def parts_of(path: Path) -> list[Path]:
    """Return the data files beside each other that are named after a split: train.jsonl, train-00000-of-00002.parquet.

    Args:
        path: of a folder, with the name of the split
    """
    if not path.name or not path.parent.is_dir():
        return []
    pattern = re.compile(rf"{re.escape(path.name)}(?:[-_.]?\d+(?:-of-\d+)?(?:-\w+)?)?")
    return sorted(p for p in path.parent.iterdir() if kind_of(p.name) and pattern.fullmatch(stem_of(p.name)))


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


def local_files(hub_id: str, path: str) -> list[Path]:
    """Return the data files that a path names, downloaded from the hub if `hub_id` is given.

    Raises:
        ValueError: there is no such file, or the hub cannot be reached; the message suggests a remedy.
    """
    if not hub_id:
        return _files_here(path)
    from huggingface_hub import hf_hub_download, list_repo_files

    try:
        names = [path]
        if not kind_of(path):
            names = _files_of_split(hub_id, path, list_repo_files(hub_id, repo_type="dataset"))
        return [Path(hf_hub_download(hub_id, name, repo_type="dataset")) for name in names]
    except _SplitError:
        raise
    except Exception as error:  # the hub's client raises those of several HTTP libraries
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ValueError(
            f"hub_id = {hub_id!r}, path = {path!r} cannot be fetched ({reason}); expected a data set with that file "
            "and a network, or download it elsewhere and set path to the local file alone (there is no file or folder "
            f"{hub_id!r} in {Path.cwd()})"
        ) from error


def _files_here(path: str) -> list[Path]:
    local = Path(path).expanduser()
    if local.is_file():
        return [local]
    if local.is_dir():
        return files_in(local)
    if parts := parts_of(local):
        return parts
    what = "is not a file of data" if local.exists() else "does not exist"
    raise ValueError(
        f"path = {path!r} {what}; expected a file that ends in {', '.join(SUFFIXES)}, also with "
        f"{', '.join(PACKED)}, or a folder of them"
    )


class _SplitError(ValueError):
    """A data set of the hub has no file, or several files, of a split."""


def _files_of_split(hub_id: str, split: str, names: Sequence[str]) -> list[str]:
    """Return the files of a split: "main/train" is main/train.jsonl or main/train-00000-of-00002.parquet, ..."""
    pattern = rf"(?:data/)?{re.escape(split)}(?:-(?P<part>\d+)-of-(?P<num>\d+)[^/]*)?"
    usable = [name for name in names if kind_of(name)]
    matches = [(match, name) for name in usable if (match := re.fullmatch(pattern, _bare(name)))]
    if len(matches) == 1:
        return [matches[0][1]]
    parts = sorted(int(match["part"]) for match, _ in matches if match["part"])
    if matches and parts == list(range(len(matches))) and {int(match["num"]) for match, _ in matches} == {len(matches)}:
        return sorted(name for _, name in matches)
    raise _SplitError(
        f"hub_id = {hub_id!r} has {len(matches)} files of the split {split!r}; expected one of its files as path: "
        + (listed([name for _, name in matches] or usable) or "no file of a known kind")
    )


def _bare(name: str) -> str:
    """Return the name of a file, with its folders, without suffixes."""
    return str(Path(name).with_name(stem_of(name)))
