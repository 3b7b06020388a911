"""Find the file of a data set: a local path, or a file or split of a data set of the hub, downloaded if need be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rllib_srl.envs.math.question_rows import SUFFIXES

_MAX_SHOWN = 20  # files in a message


def local_file(hub_id: str, path: str) -> Path:
    """Return the path of a data file, downloaded from the hub if `hub_id` is given.

    Raises:
        ValueError: there is no such file, or the hub cannot be reached; the message suggests a remedy.
    """
    if not hub_id:
        local = Path(path).expanduser()
        if not local.is_file():
            raise ValueError(f"path = {path!r} is not a file; expected a file that ends in {', '.join(SUFFIXES)}")
        return local
    from huggingface_hub import hf_hub_download, list_repo_files

    try:
        if Path(path).suffix.lower() not in SUFFIXES:
            path = _file_of_split(hub_id, path, list_repo_files(hub_id, repo_type="dataset"))
        return Path(hf_hub_download(hub_id, path, repo_type="dataset"))
    except _SplitError:
        raise
    except Exception as error:  # the hub's client raises those of several HTTP libraries
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ValueError(
            f"hub_id = {hub_id!r}, path = {path!r} cannot be fetched ({reason}); expected a data set with that file "
            "and a network, or download it elsewhere and set path to the local file alone"
        ) from error


class _SplitError(ValueError):
    """A data set of the hub has no file, or several files, of a split."""


def _file_of_split(hub_id: str, split: str, names: Sequence[str]) -> str:
    """Return the one file of a split: "main/train" is main/train.jsonl or main/train-00000-of-00001.parquet."""
    pattern = rf"(?:data/)?{re.escape(split)}(?:-\d+-of-\d+[^/]*)?"
    usable = [name for name in names if Path(name).suffix.lower() in SUFFIXES]
    found = [name for name in usable if re.fullmatch(pattern, str(Path(name).with_suffix("")))]
    if len(found) == 1:
        return found[0]
    listed = ", ".join((found or usable)[:_MAX_SHOWN]) or "no file of a known kind"
    raise _SplitError(
        f"hub_id = {hub_id!r} has {len(found)} files of the split {split!r}; expected one of its files as path: "
        f"{listed}"
    )
