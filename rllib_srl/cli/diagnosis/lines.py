"""The lines of `srl doctor`: one per check, with ok, warning or failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclass(frozen=True)
class Line:
    """The result of a check. Invariant: `status` is `OK`, `WARNING` or `FAILURE`, `text` has one line."""

    status: str
    topic: str
    text: str


@dataclass
class Findings:
    """Prints lines as they come. Invariant: `lines` are those printed."""

    lines: list[Line] = field(default_factory=list)

    def add(self, found: Iterable[Line]) -> bool:
        """Print lines; return whether none of them is a failure."""
        is_fine = True
        for line in found:
            self.lines.append(line)
            print(f"{line.status:<9}{line.topic:<13}{' '.join(line.text.split())}", flush=True)
            is_fine &= line.status != FAILURE
        return is_fine

    def count(self, status: str) -> int:
        """Return the number of lines with a status."""
        return sum(line.status == status for line in self.lines)
