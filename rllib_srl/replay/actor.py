"""Wraps the buffer as a Ray actor with the methods of RLlib's `ReplayBufferInterface`; it holds no replay logic.

    runner --Groups--> object store --reference--> driver --reference--> actor.add: fetches the tokens itself
    actor.draw_groups: returns two objects, the metadata and the groups; the groups stay in the object store

Ray makes the driver the owner of return values, so the second object outlives the actor. An object that the actor put
into the store itself would be lost with it. In local mode the same class runs in the driver's process.

`rllib_srl.algorithm.srl` registers the class with RLlib's interface. Importing RLlib here would load torch and Tune
into each buffer's process.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.history import Policy
from rllib_srl.replay.journal.codec import ColumnarList, StoredGroupBatch
from rllib_srl.replay.rated import RatedGroup, RatedUntil
from rllib_srl.replay.settings import ReplaySettings, register_rules
from rllib_srl.replay.visits import Visit
from rllib_srl.types import Group, GroupMeta, ListedRef, Prompt


class ReplayBufferActor:
    """The memory of a run.

    Invariant: the effect of every call that has returned is in the journal, so a restart loses nothing.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        rules: Any = None,
        **arguments: Any,
    ) -> None:
        """Open the buffer.

        An exception is kept for `check_started`, because Ray would lose its message.

        Args:
            settings: replay settings.
            rules: rules that the driver has registered, as `settings.users_rules` returns them, or a list that holds
                one reference to them.
            arguments: passed to `SRLReplayBuffer`.
        """
        self._busy_s, self._fault = 0.0, None
        try:
            register_rules(settings, _fetched_rules(rules))
            self._buffer = SRLReplayBuffer(settings, **arguments)
        except Exception as error:  # of any type: `check_started` raises it in the driver
            self._fault = error

    def check_started(self) -> None:
        """Raise the exception of the constructor, if there was one."""
        if self._fault is not None:
            raise self._fault

    @property
    def buffer(self) -> SRLReplayBuffer:
        """Return the buffer, or raise the exception of the constructor."""
        self.check_started()
        return self._buffer

    def __bool__(self) -> bool:
        """Return True.

        After a failed call Ray takes the truth value of the actor, for which Python would call `__len__`, which may
        raise again. That error would end the worker, and Ray would restart it in an endless loop.
        """
        return True

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.buffer)

    def size(self) -> int:
        """Return the number of items, for callers in other processes."""
        return len(self.buffer)

    def add(
        self,
        batch: Sequence[Any],
        now: int = 0,
        request: str = "",
        fetch_timeout_s: float = 60.0,
        policy_kl: float = 0.0,
    ) -> tuple[list[Visit], list[int]]:
        """Store and grade groups; see `SRLReplayBuffer.add`.

        Args:
            batch: groups, or references to them.
            now: the training iteration.
            request: name of the call, unique in the run.
            fetch_timeout_s: timeout of the fetch from the object store, in seconds.
            policy_kl: as in `SRLReplayBuffer.add`.

        Returns:
            The visits, and the positions in `batch` of lost groups (the node that held them died).
        """
        begin = time.perf_counter()
        groups, lost = _fetched(batch, fetch_timeout_s)
        visits = self.buffer.add(groups, now, request, policy_kl=policy_kl)
        self._busy_s += time.perf_counter() - begin
        return visits, lost

    def draw_prompts(
        self,
        num: int,
        now: int,
        request: str = "",
        without: Collection[str] = (),
    ) -> list[Prompt]:
        """Draw prompts to revisit; see `SRLReplayBuffer.draw_prompts`."""
        begin = time.perf_counter()
        prompts = self.buffer.draw_prompts(num, now, request, without)
        self._busy_s += time.perf_counter() - begin
        return prompts

    def sample(
        self,
        num_items: int | None = None,
        now: int = 0,
        request: str = "",
        policy: Policy | None = None,
        **kwargs: Any,
    ) -> list[GroupMeta]:
        """Draw stored groups to reuse; each `ref` holds the group itself. See `SRLReplayBuffer.draw_groups`."""
        begin = time.perf_counter()
        drawn = self.buffer.draw_groups(num_items or 0, now, request, policy)
        metas = [replace(one.meta, ref=one.group) for one in drawn]
        self._busy_s += time.perf_counter() - begin
        return metas

    @ray.method(num_returns=2)
    def draw_groups(
        self,
        num_items: int,
        now: int,
        request: str = "",
        policy: Policy | None = None,
    ) -> tuple[list[GroupMeta], list[Group]]:
        """Draw as `sample` does; return the metadata with `ref` None, and the groups as a second object."""
        begin = time.perf_counter()
        drawn = self.buffer.draw_groups(num_items, now, request, policy)
        answer = ColumnarList(one.meta for one in drawn), StoredGroupBatch(drawn)
        self._busy_s += time.perf_counter() - begin
        return answer

    def rate(self, ratings: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items by human ratings; see `SRLReplayBuffer.rate`."""
        return self.buffer.rate(ratings, now, request)

    def rate_answers(
        self, groups: Sequence[RatedGroup], source: str, position: int, now: int, request: str = ""
    ) -> dict[str, int]:
        """Apply ratings of stored answers; see `SRLReplayBuffer.rate_answers`."""
        return self.buffer.rate_answers(groups, source, position, now, request)

    def rated_until(self) -> RatedUntil:
        """Return how far the ratings of which file were applied."""
        return RatedUntil.of(self.buffer.rated)

    def rehearse(self, changes: Mapping[str, float], now: int, request: str = "") -> int:
        """Grade items of reused groups; see `SRLReplayBuffer.rehearse`."""
        return self.buffer.rehearse(changes, now, request)

    def embed(self, vectors: Sequence[Any], keys: Mapping[str, str], now: int, request: str = "") -> int:
        """Store hidden states as embeddings; see `SRLReplayBuffer.embed`.

        Args:
            vectors: one mapping a learner, group id -> float32 [G, D], or a reference to one.
            keys: group id -> prompt key.
            now: the training iteration.
            request: name of the call.
        """
        parts, _ = _fetched(vectors, 60.0)
        found = {keys[group_id]: block for part in parts for group_id, block in part.items() if group_id in keys}
        return self.buffer.embed(found, now, request)

    def drop(self, group_ids: Sequence[str], request: str = "") -> int:
        """Remove groups that have drifted too far from the policy; see `SRLReplayBuffer.drop`."""
        return self.buffer.drop(group_ids, request)

    def stats(self, now: int) -> dict[str, float]:
        """Return gauges, lifetime counts, and `busy_s`: seconds of work since the last call of `stats`."""
        begin = time.perf_counter()
        stats = self.buffer.stats(now)
        stats["busy_s"] = self._busy_s + time.perf_counter() - begin
        self._busy_s = 0.0
        return stats

    def tidy(self) -> None:
        """Run journal maintenance; see `SRLReplayBuffer.tidy`."""
        self.buffer.tidy()

    def snapshot(self, path: Path) -> dict[str, Any]:
        """Write a consistent copy of the journal to `path`; see `SRLReplayBuffer.snapshot`."""
        return self.buffer.snapshot(path)

    def restore(self, path: Path) -> int:
        """Restore a snapshot; return the number of groups stored after it. See `SRLReplayBuffer.restore`."""
        return self.buffer.restore(path)

    def check_valid(self) -> None:
        """Check every invariant of the buffer."""
        self.buffer.check_valid()

    def get_state(self) -> dict[str, Any]:
        """Return all of the buffer: the bytes of a snapshot, and the path, position and lineage of its journal.

        `SRL` copies snapshots from file to file instead, so that stored tokens do not pass through the driver.
        """
        with TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            self.buffer.snapshot(path)
            return {**self.buffer.describe(), "snapshot": path.read_bytes()}

    def get_host(self) -> str:
        """Return the name of the machine that the buffer runs on."""
        return platform.node()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned, as `restore` does from a file.

        Raises:
            ValueError: `state` holds no snapshot; nothing has changed.
            JournalError: its snapshot cannot be read; nothing has changed.
        """
        if not isinstance(state.get("snapshot"), bytes):
            raise ValueError(f"state = {sorted(state)}; expected what get_state returned, with the bytes of a snapshot")
        with TemporaryDirectory() as folder:
            path = Path(folder) / "snapshot"
            path.write_bytes(state["snapshot"])
            self.buffer.restore(path)

    def close(self) -> None:
        """Close the journal."""
        if self._fault is None:
            self.buffer.close()


def _fetched_rules(rules: Any) -> Mapping[str, Any]:
    if not isinstance(rules, list):
        return rules or {}
    try:
        found: Mapping[str, Any] = ray.get(rules[0], timeout=60.0)
    except ray.exceptions.RaySystemError as error:  # a module that the rules need cannot be imported here
        raise ValueError(
            f"rules registered in the script cannot be loaded in the buffer's process: {error}; expected rules that "
            'need nothing it cannot import, or "module:rule"'
        ) from error
    return found


def _fetched(batch: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[int]]:
    objects = [ref.ref if isinstance(ref, ListedRef) else ref for ref in batch]
    if not any(isinstance(ref, ray.ObjectRef) for ref in objects):
        return list(batch), []
    found = _objects(list(dict.fromkeys(objects)), timeout_s)
    lost = [at for at, ref in enumerate(objects) if ref not in found]
    there = [(ref, found[whole]) for ref, whole in zip(batch, objects, strict=True) if whole in found]
    return [whole[ref.index] if isinstance(ref, ListedRef) else whole for ref, whole in there], lost


def _objects(refs: list[ray.ObjectRef[Any]], timeout_s: float) -> dict[ray.ObjectRef[Any], Any]:
    """Return reference -> object for the objects that still exist."""
    found: dict[ray.ObjectRef[Any], Any] = {}
    deadline = time.monotonic() + timeout_s
    with suppress(ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
        return dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True))
    # One lost object fails the whole `ray.get`, so fetch one by one.
    for ref in refs:
        with suppress(ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            found[ref] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    return found
