"""The buffer as an actor behind RLlib's `ReplayBufferInterface`: it fetches and hands out, and has no logic of its own.

    runner --Group--> object store --reference--> driver --reference--> actor.add: fetches the tokens itself
    actor.sample_apart: answers with metadata, and apart from it with the groups, which stay in the object store

The second answer belongs to the driver, as all answers do, and outlives the actor; what the actor puts there itself
would die with it. The same class serves in the driver's process where everything runs in one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface

from rllib_srl.columns import ColumnarList
from rllib_srl.planner.shares import DomainShares
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.parcels import Parcel
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.successes import stored_successes
from rllib_srl.replay.visits import Visit
from rllib_srl.types import Group, GroupMeta, Prompt


class ReplayBufferActor(ReplayBufferInterface):
    """One shard of the memory.

    Invariant: whatever a call has answered is in the journal, so that a restart loses nothing.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        **arguments: Any,
    ) -> None:
        """Open the buffer; what goes wrong is kept for `check_started`, because Ray would lose the reason.

        Args:
            settings: of the memory.
            arguments: of `SRLReplayBuffer`.
        """
        self._busy_s, self._fault = 0.0, None
        try:
            self._buffer = SRLReplayBuffer(settings, **arguments)
        except Exception as error:  # any: it is raised again, in the driver
            self._fault = error

    def check_started(self) -> None:
        """Raise what the constructor ran into, if anything."""
        if self._fault is not None:
            raise self._fault

    @property
    def buffer(self) -> SRLReplayBuffer:
        """The buffer; after a restart that failed, raise why, whatever is asked."""
        self.check_started()
        return self._buffer

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.buffer)

    def size(self) -> int:
        """Return the number of items, for callers in other processes."""
        return len(self.buffer)

    def add(
        self, batch: Sequence[Any], now: int = 0, request: str = "", fetch_timeout_s: float = 60.0
    ) -> tuple[list[Visit], list[int]]:
        """Store and grade groups; see `SRLReplayBuffer.add`.

        Args:
            batch: groups, or references to them.
            now: the training iteration.
            request: name of the call, unique in the run.
            fetch_timeout_s: how long to wait for the object store.

        Returns:
            The visits, and the positions in `batch` of groups that no longer exist (their runner died).
        """
        begin = time.perf_counter()
        groups, lost = _fetched(batch, fetch_timeout_s)
        visits = self.buffer.add(groups, now, request)
        self._busy_s += time.perf_counter() - begin
        return visits, lost

    def due(
        self,
        num: int,
        now: int,
        request: str = "",
        slots: float | None = None,
        without: Collection[str] = (),
        shares: DomainShares | None = None,
    ) -> list[Prompt]:
        """Draw prompts to be played again; see `SRLReplayBuffer.due`."""
        begin = time.perf_counter()
        prompts = self.buffer.due(num, now, request, slots, without, shares)
        self._busy_s += time.perf_counter() - begin
        return prompts

    def sample(
        self,
        num_items: int | None = None,
        now: int = 0,
        request: str = "",
        without: Collection[str] = (),
        shares: DomainShares | None = None,
        **kwargs: Any,
    ) -> list[GroupMeta]:
        """Draw stored groups to train on again, in this process; see `SRLReplayBuffer.sample`."""
        begin = time.perf_counter()
        drawn = self.buffer.draw(num_items or 0, now, request, without, shares)
        metas = [replace(one.meta, ref=one.group) for one in drawn]
        self._busy_s += time.perf_counter() - begin
        return metas

    @ray.method(num_returns=2)
    def sample_apart(
        self,
        num_items: int,
        now: int,
        request: str = "",
        without: Collection[str] = (),
        shares: DomainShares | None = None,
    ) -> tuple[list[GroupMeta], list[Group]]:
        """Draw as `sample`; return metadata whose `ref` is None, and the groups as another object."""
        begin = time.perf_counter()
        drawn = self.buffer.draw(num_items, now, request, without, shares)
        answer = ColumnarList(one.meta for one in drawn), Parcel(drawn)
        self._busy_s += time.perf_counter() - begin
        return answer

    def successes(self, keys: Sequence[str], now: int) -> list[GroupMeta]:
        """Return stored groups of these prompts that hold a success; see `successes.stored_successes`."""
        return [GroupMeta.of(group, group) for group in stored_successes(self.buffer, keys, now).values()]

    @ray.method(num_returns=2)
    def successes_apart(self, keys: Sequence[str], now: int) -> tuple[list[GroupMeta], list[Group]]:
        """Answer as `successes`, metadata and groups apart, as `sample_apart` does."""
        metas = self.successes(keys, now)
        return ColumnarList(replace(meta, ref=None) for meta in metas), ColumnarList(meta.ref for meta in metas)

    def rate(self, ratings: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items by people's ratings; see `SRLReplayBuffer.rate`."""
        return self.buffer.rate(ratings, now, request)

    def rehearse(self, changes: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items of reused groups; see `SRLReplayBuffer.rehearse`."""
        return self.buffer.rehearse(changes, now, request)

    def embed(self, vectors: Sequence[Any], keys: Mapping[str, str], now: int, request: str = "") -> int:
        """Take hidden states as embeddings; see `SRLReplayBuffer.embed`.

        Args:
            vectors: for each learner group id -> float32 [G, D], or a reference to that.
            keys: id of each group this shard keeps -> key of its prompt.
            now: the training iteration.
            request: name of the call.
        """
        parts, _ = _fetched(vectors, 60.0)
        found = {keys[group_id]: block for part in parts for group_id, block in part.items() if group_id in keys}
        return self.buffer.embed(found, now, request)

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Forget groups that are too far from the policy; see `SRLReplayBuffer.drop`."""
        return self.buffer.drop(group_ids, request)

    def stats(self, now: int) -> dict[str, float]:
        """Return gauges and lifetime counts, and `busy_s`: seconds worked since the last call."""
        begin = time.perf_counter()
        stats = self.buffer.stats(now)
        stats["busy_s"] = self._busy_s + time.perf_counter() - begin
        self._busy_s = 0.0
        return stats

    def tidy(self) -> None:
        """Do what would stall a commit later."""
        self.buffer.tidy()

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Write a consistent copy of the journal to `path`; see `SRLReplayBuffer.snapshot`."""
        return self.buffer.snapshot(path)

    def restore(self, path: Path) -> int:
        """Go back to a snapshot; return the number of orphans. See `SRLReplayBuffer.restore`."""
        return self.buffer.restore(path)

    def check_valid(self) -> None:
        """Check every invariant of the buffer."""
        self.buffer.check_valid()

    def get_state(self) -> dict[str, Any]:
        """Return a description of the journal; its contents travel as a snapshot file, never through the driver."""
        return self.buffer.describe()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Refuse: use `restore`, which reads a snapshot file.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the memory's state is a snapshot file; expected snapshot(path) and restore(path)")

    def close(self) -> None:
        """Close the journal."""
        if self._fault is None:
            self.buffer.close()


def _fetched(batch: Sequence[Any], timeout_s: float) -> tuple[list[Group], list[int]]:
    if not any(isinstance(ref, ray.ObjectRef) for ref in batch):
        return list(batch), []
    groups, lost = [], []
    deadline = time.monotonic() + timeout_s
    with suppress(ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
        return ray.get(list(batch), timeout=timeout_s), []
    # Some are gone: those that are there are found one by one.
    for at, ref in enumerate(batch):
        try:
            groups.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            lost.append(at)
    return groups, lost
