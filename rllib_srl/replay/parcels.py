"""Stored groups on their way to learners: the bytes they are stored as, uncopied, beside columns of all else.

    Parcel of Opened groups --pickled--> one buffer a group (its payload), columns --unpickled--> Groups, views of both

Token ids and log-probs are nine tenths of a payload. Laid end to end first, they would be copied twice, and the first
time into fresh memory, which costs more than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pickle import PickleBuffer
from typing import Any

from rllib_srl.columns import Column, ColumnarList, columns_of, opened
from rllib_srl.replay.codec import LONG, Place, array_at, group_of, places_in, read_header
from rllib_srl.types import Group, GroupMeta


@dataclass(frozen=True)
class Opened:
    """A stored group, decoded. Invariant: its arrays lie in `payload` at `places`."""

    group: Group
    payload: bytes
    places: dict[str, Place]

    @classmethod
    def of(cls, payload: bytes, name: str, origin: str) -> Opened:
        """Open a group, as one of another origin; see `codec.decode`."""
        header = read_header(payload, name)
        places = places_in(payload, header, name)
        return cls(group_of({**header, "origin": origin}, payload, places), payload, places)

    @cached_property
    def meta(self) -> GroupMeta:
        """Describe the group, without a reference to it; counted once, for a mask is long."""
        return GroupMeta.of(self.group, None)

    def renamed(self, group_id: str) -> Opened:
        """Return it under another id."""
        return replace(self, group=replace(self.group, group_id=group_id))


class Parcel(list[Group]):
    """Opened groups as a list of groups.

    Invariant: a copy made by pickle is an equal list, without the bytes; its arrays are views, read-only where Ray's
    are.
    """

    def __init__(self, contents: Iterable[Opened] = ()) -> None:
        """List the groups of `contents`."""
        self._contents = list(contents)
        super().__init__(one.group for one in self._contents)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return how to build the groups again from payloads and columns."""
        payloads = [PickleBuffer(one.payload) if int(protocol) >= 5 else one.payload for one in self._contents]
        places = [[one.places[name] for one in self._contents] for name in LONG]
        return unpacked, (payloads, places, columns_of(self, _REST))


_FIELDS = [field.name for field in fields(Group)]
_REST = [name for name in _FIELDS if name not in LONG]


def unpacked(payloads: Sequence[Any], places: Sequence[Sequence[Place]], rest: Sequence[Column]) -> ColumnarList[Group]:
    """Return the groups of a parcel.

    Args:
        payloads: the bytes of each group, in any buffer.
        places: of each array in `LONG`, where it lies in each payload.
        rest: of each other field of a group.
    """
    columns = {name: list(map(array_at, payloads, of_field)) for name, of_field in zip(LONG, places, strict=True)}
    columns |= {name: opened(column) for name, column in zip(_REST, rest, strict=True)}
    return ColumnarList(Group(*row) for row in zip(*(columns[name] for name in _FIELDS), strict=True))
