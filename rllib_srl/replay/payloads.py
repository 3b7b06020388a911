"""A drawn group with the bytes that it was stored as, and batches of them, which are pickled as these bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pickle import PickleBuffer
from typing import Any

from rllib_srl.replay.store import decode
from rllib_srl.types import Group, GroupMeta, History


@dataclass(frozen=True)
class StoredGroup:
    """A drawn group, and the bytes that it was stored as."""

    group: Group
    payload: bytes
    weight: float = 1.0  # loss weight from the draw
    history: History | None = None  # of its prompt without the group, where the baseline is one from history

    @cached_property
    def meta(self) -> GroupMeta:
        """Return the metadata of the group, without a reference to it."""
        return replace(GroupMeta.of(self.group, None, self.weight), history=self.history)


class StoredGroupBatch(list[Group]):
    """A list of groups that pickles as their stored bytes. Invariant: an unpickled copy is an equal list."""

    def __init__(self, contents: Iterable[StoredGroup] = ()) -> None:
        """Create the list of the groups in `contents`."""
        contents = list(contents)
        self._payloads = [one.payload for one in contents]
        super().__init__(one.group for one in contents)

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the constructor of the groups, their bytes and their origins."""
        buffers = [PickleBuffer(payload) if int(protocol) >= 5 else payload for payload in self._payloads]
        return _unpickled, (buffers, [group.origin for group in self])


def _unpickled(payloads: Sequence[Any], origins: Sequence[str]) -> list[Group]:
    return [decode(payload, str(at), origin) for at, (payload, origin) in enumerate(zip(payloads, origins))]
