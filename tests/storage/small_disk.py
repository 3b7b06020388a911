"""Disks that run full: a small tmpfs, where this process may mount one, and a limit to the size of files."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Tmpfs:
    """A file system in memory, which can be filled up and emptied again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def mounted(cls, path: Path, size: str) -> Iterator[Tmpfs]:
        path.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path))
        try:
            yield cls(path)
        finally:
            _run("umount", "-l", str(path))

    @staticmethod
    def is_allowed(scratch: Path) -> bool:
        try:
            with Tmpfs.mounted(scratch / "may_i", "64k"):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False

    def resize(self, size: str) -> None:
        _run("mount", "-o", f"remount,size={size}", str(self.path))

    def fill(self) -> None:
        with (self.path / "filler").open("wb", buffering=0) as stream:
            try:
                while True:
                    stream.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        (self.path / "filler").unlink()


class Limited:
    """Any file system, with a limit to the size of the files that this process writes. Python ignores the signal."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, self._before[1]))

    def free(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def used(path: Path) -> set[str]:
    """Return the names of the files below a directory, but for the filler."""
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return {str(file.relative_to(path)) for file in found} - {"filler"}
