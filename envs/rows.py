"""Apply the setting `broken_rows` to the rows of a file: refuse the first broken row, or leave all of them out."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

T = TypeVar("T", bound=Sized)


def usable(
    rows: T, faults: list[str], path: str, *, skips_broken: bool, remedy: str, expected: str
) -> tuple[T, tuple[str, ...]]:
    """Return the rows of a file and the error messages of its broken rows.

    Args:
        rows: the rows without a fault
        faults: one message for each broken row
        path: the file, for messages
        skips_broken: leave broken rows out
        remedy: what to do about broken rows
        expected: contents of a file that has rows

    Raises:
        ValueError: a row is broken and not skipped, or no row is left.
    """
    if faults and not skips_broken:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ValueError(f"{faults[0]}{more}; {remedy}")
    if not rows:
        raise ValueError(f"{path} has no usable row; expected {expected}")
    return rows, tuple(faults)
