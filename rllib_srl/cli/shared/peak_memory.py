"""Measure the peak memory of a process and all its descendants, from Linux's /proc.

Proportional set sizes are summed: a page shared by n processes counts 1/n in each, so that the object
store and weights mapped twice count once.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
INTERVAL_S = 2.0


class PeakMemory:
    """Samples in a thread from `start` to `stop`.

    Invariant: `peak_bytes` is the largest sample so far, None where the system has no /proc.
    """

    def __init__(self) -> None:
        """Create a sampler of this process and its descendants."""
        self.peak_bytes: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        """Start sampling."""
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        """Stop sampling."""
        self._is_over.set()
        self._thread.join(timeout=10 * INTERVAL_S)

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            held = memory_of_tree(os.getpid())
            if held:
                self.peak_bytes = max(self.peak_bytes or 0, held)


def memory_of_tree(root: int) -> int:
    """Return the memory of a process and its descendants in bytes; 0 without /proc."""
    return sum(proportional_bytes(_read(PROC / str(pid) / "smaps_rollup")) for pid in [root, *descendants(root)])


def descendants(root: int) -> list[int]:
    """Return the ids of all descendants of a process; [] without /proc."""
    children = defaultdict(list)
    for path in PROC.glob("[0-9]*/stat"):
        if fields := _read(path).rpartition(")")[2].split():
            children[int(fields[1])].append(int(path.parent.name))
    found, todo = list[int](), [root]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return found


def proportional_bytes(smaps: str) -> int:
    """Return the proportional set size in the text of a smaps_rollup file, in bytes; 0 if it has none."""
    sizes = (line.split()[1] for line in smaps.splitlines() if line.startswith("Pss:"))
    return 1024 * int(next(sizes, "0"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended, or is another user's
        return ""
