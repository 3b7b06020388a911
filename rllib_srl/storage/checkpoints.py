"""Checkpoint directories: seals them with a signed manifest, verifies them before reading, and prunes old ones.

    <log directory>/checkpoint_000010/   RLlib's own files + manifest.json: size and digest of each, and a signature
    <log directory>/earlier-attempts/    files that the run does not continue from, in numbered directories

The manifest is written last, so a directory without one is an unfinished write.

    verify_sealed   checks the digests: every file is unchanged, no other file exists. For readers that open no pickle
    verify_own      also checks the signature, HMAC-SHA256 with the user's key (`seal_key.py`). Needed before RLlib
                    unpickles anything, because a pickle can run any code
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rllib_srl.storage.disk import DiskFull, writing
from rllib_srl.storage.seal_key import VARIABLE, key_id, key_place, read_key

MANIFEST = "manifest.json"
PREFIX = "checkpoint_"
SET_ASIDE = "earlier-attempts"
CHUNK = 1 << 24
SIGNED = ("about", "digest", "files")  # signed entries of a manifest
_NUM_THREADS = min(4, os.cpu_count() or 1)


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message names the file and the reason."""


def seal(path: Path, about: Mapping[str, Any] | None = None, key: bytes | None = None) -> None:
    """Write the manifest of a finished checkpoint.

    `about` is in JSON's types; `verify_sealed` and `verify_own` return it. Without a key nothing is signed.
    """
    files = {str(file.relative_to(path)): _describe(file) for file in sorted(_files(path))}
    content: dict[str, Any] = {"about": dict(about or {}), "digest": DIGEST, "files": files}
    if key is not None:
        content["signature"] = {"key": key_id(key), "hmac": _signature(content, key)}
    scratch = path / (MANIFEST + ".tmp")
    scratch.write_text(json.dumps(content, indent=1, sort_keys=True))
    scratch.replace(path / MANIFEST)


@contextmanager
def written_whole(path: Path) -> Iterator[None]:
    """Write a checkpoint inside the context: a failure removes the directory unless it existed with files before."""
    is_new = not path.exists() or not any(path.iterdir())
    try:
        with writing(path):
            yield
    except BaseException as error:
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, DiskFull) and (earlier := checkpoints_in(path.parent)):
            size = sum(file.stat().st_size for file in _files(earlier[-1]))
            error.add_note(f"the checkpoint before, {earlier[-1].name}, has {size / 2**20:,.1f} MiB")
        raise


def verify_sealed(path: Path) -> dict[str, Any]:
    """Verify the digests of all files; return the `about` entry of the manifest.

    This does not make pickles safe: anyone who can change a file can also write a matching manifest. See `verify_own`.

    Raises:
        CheckpointError: a file is missing, damaged or unlisted; the message names it and what to do.
    """
    return _verify_content(path, _read_manifest(path))


def verify_own(path: Path, key_file: str | Path | None = None) -> dict[str, Any]:
    """Verify that a checkpoint was sealed with this user's key and is unchanged; return the manifest's `about` entry.

    Raises:
        CheckpointError: it is not signed or was signed with another key, or as in `verify_sealed`.
        SealKeyError: the key cannot be used.
    """
    listed = _read_manifest(path)
    if doubt := _doubt(listed, key_file):
        raise CheckpointError(
            f"checkpoint {path} {doubt}: restoring it can run any code in its pickles; if you trust its author, pass "
            "--trust-checkpoint (in Python trust=True); to restore checkpoints on several machines, share one key by "
            f"seal_key_file or ${VARIABLE}"
        )
    return _verify_content(path, listed)


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the finished checkpoints of a log directory, oldest first."""
    return sorted(path for path in directory.glob(PREFIX + "*") if (path / MANIFEST).is_file())


def place_for(directory: Path, iteration: int) -> Path:
    return directory / f"{PREFIX}{iteration:06d}"


def set_aside(paths: Sequence[Path], directory: Path) -> None:
    """Move files that the run in `directory` does not continue from to a new numbered directory below it."""
    aside = directory / SET_ASIDE
    place = aside / str(1 + sum(1 for _ in aside.glob("*")))
    place.mkdir(parents=True)
    for path in paths:
        path.rename(place / path.name)


def make_newest(place: Path) -> None:
    """Set aside finished checkpoints of the same or a later iteration than the one to be written at `place`.

    They are of an earlier run in this directory, or this run has gone back to an older checkpoint since.
    """
    if later := [path for path in checkpoints_in(place.parent) if path >= place]:
        set_aside(later, place.parent)


def prune(directory: Path, num_kept: int) -> None:
    """Delete all but the newest finished checkpoints."""
    for path in checkpoints_in(directory)[:-num_kept]:
        shutil.rmtree(path)


# --- the manifest ---------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; expected a directory written by save_to_path")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(f"checkpoint {path} has no {MANIFEST}, so it is incomplete; use an earlier one")
    try:
        listed = json.loads((path / MANIFEST).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged ({error}); use an earlier one") from error
    parts = [listed.get(name) for name in ("about", "files")] if isinstance(listed, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts) or listed.get("digest") != DIGEST:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} was not written by save_to_path; use an earlier one")
    manifest: dict[str, Any] = listed
    return manifest


def _doubt(listed: Mapping[str, Any], key_file: str | Path | None) -> str:
    """Return why a manifest does not carry this user's signature, "" if it does."""
    signature = listed.get("signature")
    if not isinstance(signature, dict):
        return "is not signed"
    key, place = read_key(key_file), key_place(key_file)
    if key is None:
        return f"was sealed with a key, but {place} has no key"
    if signature.get("key") != key_id(key):
        return f"was sealed with another key than {place}"
    if not hmac.compare_digest(str(signature.get("hmac")).encode(), _signature(listed, key).encode()):
        return f"has a {MANIFEST} that was changed after it was sealed"
    return ""


def _signature(content: Mapping[str, Any], key: bytes) -> str:
    signed = json.dumps({name: content.get(name) for name in SIGNED}, sort_keys=True, separators=(",", ":"))
    return hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()


def _verify_content(path: Path, listed: Mapping[str, Any]) -> dict[str, Any]:
    files = listed["files"]
    more = sorted({str(file.relative_to(path)) for file in _files(path)} - set(files))
    if more:
        raise CheckpointError(
            f"checkpoint {path} has files that its {MANIFEST} does not list: {', '.join(more[:5])}; remove them, or "
            "use another checkpoint"
        )
    damaged = sorted(name for name, described in files.items() if not _is_intact(path / name, described))
    if damaged:
        raise CheckpointError(f"checkpoint {path} is damaged: {', '.join(damaged[:5])}; use an earlier one")
    return dict(listed["about"])


# --- files ----------------------------------------------------------------------------------------


def _files(path: Path) -> Iterator[Path]:
    """Yield all files but the manifest; symbolic links are yielded, not followed."""
    manifests = (path / MANIFEST, path / (MANIFEST + ".tmp"))
    return (file for file in path.rglob("*") if (file.is_symlink() or not file.is_dir()) and file not in manifests)


def _tree_sha256(file: Path) -> str:
    """Return the SHA-256 of the SHA-256s of a file's chunks, computed by several threads: hashing releases the GIL."""

    def digest(start: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.sha256(stream.read(CHUNK)).digest()

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return hashlib.sha256(b"".join(pool.map(digest, range(0, file.stat().st_size, CHUNK)))).hexdigest()


DIGEST = "sha256 of the sha256 of each 16 MiB"


def _describe(file: Path) -> list[Any]:
    return [file.stat().st_size, _tree_sha256(file)]


def _is_intact(file: Path, described: Any) -> bool:
    """Return whether a file matches its manifest entry; a symbolic link never does, since its target can change."""
    if file.is_symlink() or not file.is_file() or not isinstance(described, list):
        return False
    return [file.stat().st_size] == described[:1] and _describe(file) == described
