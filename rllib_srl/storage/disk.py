"""Turns errors of a full disk into `DiskFull`, which names the file and the free space.

with writing(path): ...        raises DiskFull if the disk is full; other errors pass unchanged
append(path, text)             appends all of the text or nothing
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, user's quota reached, file size limit reached
# Messages of libraries and processes that pass the error on without its errno.
TEXTS = (*map(os.strerror, FULL), "database or disk is full")
PAGE = 1 << 16  # bytes; larger than the data that any file system stores inside an inode
REMEDY = "free some space, or set log_directory to another disk, and resume from the last checkpoint"


class DiskFull(OSError):
    """The disk is full; the message names the file, the free space, and what to do."""


def full_message(path: str | Path, reason: str = "") -> str:
    """Return the error message of a full disk; the path could not be written, and need not exist."""
    place = Path(path).absolute()
    there = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(there).free >> 20
    return f"disk full: cannot write {path} ({free} MiB free){reason and ': '}{reason}; {REMEDY}"


def is_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes is that of a full disk."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, DiskFull) or (isinstance(cause, OSError) and cause.errno in FULL):
            return True
        if any(text in str(cause) for text in TEXTS):
            return True
        seen.append(cause)
        cause = getattr(cause, "cause", None) or cause.__cause__  # Ray's errors hold the callee's error as `cause`
    return False


def cannot_grow(path: Path) -> bool:
    """Return whether `path` cannot grow; tests it by writing beyond its size to a temporary file beside it."""
    probe = path.with_name(f"{path.name}.probe")
    longest = max((file.stat().st_size for file in path.parent.glob(f"{path.name}*")), default=0)
    try:
        with probe.open("wb") as stream:
            return os.pwrite(stream.fileno(), bytes(PAGE), longest) < PAGE
    except OSError as error:
        return error.errno in FULL
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of a full disk while `path` is written into `DiskFull`."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:  # writers in other processes or languages raise their own types
        if not is_full(error):
            raise
        raise DiskFull(full_message(path)) from error


def append(path: Path, data: str | bytes) -> None:
    """Append all of `data` to a file, or nothing; DiskFull: the disk is full; the file is unchanged."""
    with writing(path), path.open("ab", buffering=0) as stream:
        before = stream.tell()
        remainder = memoryview(data.encode() if isinstance(data, str) else data)
        try:
            while remainder:
                remainder = remainder[stream.write(remainder) :]
        except OSError:
            stream.truncate(before)
            raise
