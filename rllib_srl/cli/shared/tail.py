"""Read what another process appends to a file of lines, again and again, each line once.

    tail = Tail(path)
    if tail.has_restarted(): ...          the file was replaced or cut: forget what was read
    for offset, line in tail.new_lines(): ...

A last line without its end is being written; it is read when it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Tail:
    """A position in a file that grows. Invariant: `position` is where a line begins."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning of a file, which may not exist yet."""
        self.path = path
        self.position = 0
        self._inode: int | None = None

    def has_restarted(self) -> bool:
        """Return whether the file was replaced by another one or has lost lines; if so, start at its beginning."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            inode, size = None, 0
        else:
            inode, size = found.st_ino, found.st_size
        is_other = self._inode is not None and inode != self._inode
        self._inode = inode
        if is_other or size < self.position:
            self.position = 0
            return True
        return False

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each whole line that was not read yet; none if there is no file."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self.position)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset, self.position = self.position, self.position + len(line)
                yield offset, line
