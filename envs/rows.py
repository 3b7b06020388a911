"""Read a file of one JSON object a line, and apply the setting `bad_rows`: refuse a broken row, or leave it out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rllib_srl.envs.math.data_files import RowError, lines_of

T = TypeVar("T")


def usable_rows(path: str | Path, read: Callable[[Any], T], *, skips_broken: bool) -> tuple[list[T], tuple[str, ...]]:
    """Return what `read` makes of each row of a file, and the error messages of its broken rows.

    Args:
        path: the file
        read: makes a value of a row, or raises a `ValueError` for a broken one
        skips_broken: leave broken rows out

    Raises:
        ValueError: the file cannot be read, a row is broken and not skipped, or no row is left.
    """
    rows: list[T] = []
    errors: list[str] = []
    for number, row in lines_of(Path(path)):
        try:
            if isinstance(row, RowError):
                raise row
            rows.append(read(row))
        except ValueError as error:
            errors.append(f"{path}, row {number}: {error}")
    if errors and not skips_broken:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ValueError(f"{errors[0]}{more}; fix the rows, or set bad_rows = 'skip'")
    if not rows:
        raise ValueError(f"{path} has no usable row; expected at least one")
    return rows, tuple(errors)
