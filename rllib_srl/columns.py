"""Records that travel between processes as a few long columns instead of many short values.

    [Group, Group, ...] --pickled--> one column a field, arrays laid end to end --unpickled--> views of the columns
                                     a record inside a record is columns too

A pickled array costs microseconds whatever its length, as does a record, and a draw of 256 groups has 1,536 and 512 of
them. What comes out equals what went in, types of arrays included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np

Record = TypeVar("Record")
# How values travel: "each" as they are; "joined" into one array, and where it is cut; "records" of a class, by columns.
Column = tuple[Literal["each", "joined", "records"], Any, Any]


class ColumnarList(list[Record]):
    """A list of instances of one dataclass.

    Invariant: a copy made by pickle is equal, entry by entry; its arrays are views, read-only where Ray's are.
    """

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how to build this list again from columns."""
        return opened_list, (column_of(self),)


def column_of(values: Sequence[Any]) -> Column:
    """Return some values as pickle takes the least time over them; `opened` undoes it."""
    kinds = set(map(type, values))
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    if kind is np.ndarray and values[0].ndim and len({(value.dtype, value.shape[1:]) for value in values}) == 1:
        return "joined", np.concatenate(values), [0, *accumulate(map(len, values))]  # of one type, or it would change
    if is_dataclass(kind) and fields(kind) and all(field.init and not field.kw_only for field in fields(kind)):
        return "records", kind, columns_of(values, [field.name for field in fields(kind)])
    return "each", list(values), None


def columns_of(records: Sequence[Any], names: Sequence[str]) -> list[Column]:
    """Return the columns of some fields of records."""
    return [column_of([getattr(record, name) for record in records]) for name in names]


def opened(column: Column) -> list[Any]:
    """Return the values whose column this is."""
    how, values, rest = column
    if how == "joined":
        return [values[start:end] for start, end in pairwise(rest)]
    if how == "records":
        return [values(*row) for row in zip(*map(opened, rest), strict=True)]
    return values


def opened_list(column: Column) -> ColumnarList[Any]:
    """Return the list whose column this is."""
    return ColumnarList(opened(column))
