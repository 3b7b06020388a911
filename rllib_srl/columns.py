"""Records that travel between processes as a few long arrays instead of many short ones.

    [Group, Group, ...] --pickled--> one column a field, records laid end to end --unpickled--> views of the columns

A pickled array costs microseconds whatever its length, and a draw of 256 groups has 1,536 of them. What comes out
equals what went in, types of arrays included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np

Record = TypeVar("Record")
Column = tuple[str, Any, list[int] | None]  # of a field: name, values, cuts


class ColumnarList(list[Record]):
    """A list of instances of one dataclass.

    Invariant: a copy made by pickle is equal, entry by entry; its arrays are views, read-only where Ray's are.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how to build this list again from columns."""
        if not self:
            return ColumnarList, ()
        kind: Any = type(self[0])
        columns = [_column(field.name, [getattr(record, field.name) for record in self]) for field in fields(kind)]
        return opened, (kind, columns)


def _column(name: str, values: Sequence[Any]) -> Column:
    if len({(value.dtype.str, value.shape[1:]) if isinstance(value, np.ndarray) else None for value in values}) > 1:
        return name, values, None  # laid end to end they would take on one type
    if not isinstance(values[0], np.ndarray) or not values[0].ndim:
        return name, values, None
    return name, np.concatenate(values), [0, *accumulate(map(len, values))]


def opened(kind: Callable[..., Record], columns: Iterable[Column]) -> ColumnarList[Record]:
    """Return the records whose columns these are.

    Args:
        kind: the dataclass.
        columns: of each field the name, the values, and where they are cut; None for one value a record.
    """
    values = {
        name: column if cuts is None else [column[start:end] for start, end in pairwise(cuts)]
        for name, column, cuts in columns
    }
    return ColumnarList(kind(**dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True))
