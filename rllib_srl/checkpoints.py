"""Checkpoint directories: sealed when written, verified before anything is read, kept few.

    <log directory>/checkpoint_000010/   RLlib's own files + manifest.json, the sizes and checksums of all of them

The manifest is written last, so that a directory without one is a write that did not finish.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
PREFIX = "checkpoint_"
CHUNK = 1 << 24


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message says which file and why."""


def seal(path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of a finished checkpoint.

    Args:
        path: the checkpoint.
        about: plain facts that a reader wants to know before it loads anything.
    """
    files = {str(file.relative_to(path)): _describe(file) for file in _files(path)}
    scratch = path / (MANIFEST + ".tmp")
    scratch.write_text(json.dumps({"about": dict(about or {}), "files": files}, indent=1, sort_keys=True))
    scratch.replace(path / MANIFEST)


def verify_sealed(path: Path) -> dict[str, Any]:
    """Check that every file is what was written, and return what `seal` was told about the checkpoint.

    Raises:
        CheckpointError: naming what is missing or damaged, and what to do.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; expected a directory that save_to_path wrote")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {path} has no {MANIFEST}: its writing did not finish; use an earlier one")
    try:
        listed = json.loads((path / MANIFEST).read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged ({error}); use an earlier one") from error
    damaged = [name for name, described in listed["files"].items() if not _is_intact(path / name, described)]
    if damaged:
        raise CheckpointError(f"checkpoint {path} is damaged: {', '.join(sorted(damaged)[:5])}; use an earlier one")
    return listed["about"]


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the finished checkpoints of a log directory, oldest first."""
    return sorted(path for path in directory.glob(PREFIX + "*") if (path / MANIFEST).is_file())


def place_for(directory: Path, iteration: int) -> Path:
    """Return where the checkpoint of an iteration goes."""
    return directory / f"{PREFIX}{iteration:06d}"


def prune(directory: Path, num_kept: int) -> None:
    """Delete all but the newest finished checkpoints."""
    for path in checkpoints_in(directory)[:-num_kept]:
        shutil.rmtree(path)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith(MANIFEST))


def _describe(file: Path) -> list:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return [file.stat().st_size, digest.hexdigest()]


def _is_intact(file: Path, described: list) -> bool:
    return file.is_file() and file.stat().st_size == described[0] and _describe(file) == described
