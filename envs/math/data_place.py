"""Find the files of a data set: a local file or folder, or a file or split of one of the hub, downloaded if need be.

local_files("", "data/train.jsonl.gz")            [data/train.jsonl.gz]
local_files("", "data/train")                     the files data/train-*.parquet, or those in the folder data/train
local_files("openai/gsm8k", "main/train")         [.../main/train-00000-of-00001.parquet]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rllib_srl.envs.math.data_names import PACKED, SUFFIXES, files_in, kind_of, parts_of, stem_of

_MAX_SHOWN = 20  # files in a message


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
    raise ValueError(
        f"path = {path!r} is not a file; expected a file that ends in {', '.join(SUFFIXES)}, also with "
        f"{', '.join(PACKED)}, or a folder of them"
    )


class _SplitError(ValueError):
    """A data set of the hub has no file, or several files, of a split."""


def _files_of_split(hub_id: str, split: str, names: Sequence[str]) -> list[str]:
    """Return the files of a split: "main/train" is main/train.jsonl or main/train-00000-of-00002.parquet, ..."""
    pattern = rf"(?:data/)?{re.escape(split)}(?:-(?P<part>\d+)-of-(?P<num>\d+)[^/]*)?"
    usable = [name for name in names if kind_of(name)]
    found = [(match, name) for name in usable if (match := re.fullmatch(pattern, _bare(name)))]
    if len(found) == 1:
        return [found[0][1]]
    parts = sorted(int(match["part"]) for match, _ in found if match["part"])
    if found and parts == list(range(len(found))) and {int(match["num"]) for match, _ in found} == {len(found)}:
        return sorted(name for _, name in found)
    listed = ", ".join([name for _, name in found][:_MAX_SHOWN] or usable[:_MAX_SHOWN]) or "no file of a known kind"
    raise _SplitError(
        f"hub_id = {hub_id!r} has {len(found)} files of the split {split!r}; expected one of its files as path: "
        f"{listed}"
    )


def _bare(name: str) -> str:
    """Return the name of a file, with its folders, without suffixes."""
    return str(Path(name).with_name(stem_of(name)))
