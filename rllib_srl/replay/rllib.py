"""The replay buffer with RLlib's interface: the actor that `SRL` starts, or an object of the driver in local mode.

    runner --groups--> object store --references--> driver --references--> add, which fetches the groups itself
    draw_apart -> metadata, and the groups as a second object, which stays in the object store

Ray makes the driver the owner of what a call returns, so drawn groups outlive the actor that drew them.

`rllib_srl.algorithm.srl` registers the class with RLlib's `ReplayBufferInterface`: a base class would load RLlib and
torch into the actor's process, 4 s and 320 MB at each start.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.intake import Visit
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import Group, GroupMeta, ListedRef


class RLlibReplayBuffer(SRLReplayBuffer):
    """`SRLReplayBuffer` as one of RLlib's buffers."""

    def __init__(self, settings: ReplaySettings | None = None, *, is_actor: bool = False, **arguments: Any) -> None:
        """Open the buffer; an actor keeps an exception for the next `call`, because Ray would lose its message."""
        self._busy_s, self._error = 0.0, None
        try:
            super().__init__(settings, **arguments)
        except Exception as error:  # of any type: `call` raises it
            if not is_actor:
                raise
            self._error = error

    def __bool__(self) -> bool:
        """Return True: Ray asks after a failed call, and `__len__` may fail again, which would end the process."""
        return True

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by name; raise the exception of the constructor, if there was one."""
        if self._error is not None:
            raise self._error
        begin = time.perf_counter()
        try:
            return getattr(self, method)(*args, **kwargs)
        finally:
            self._busy_s += time.perf_counter() - begin

    def add(self, batch: Sequence[Any], now: int = 0, request: str = "", is_played: bool = True) -> list[Visit]:
        """Store and grade groups, or references to groups; lost ones (their node died) are left out.

        Fetching takes at most half of the time after which the caller takes this process for hung.
        """
        return super().add(_fetched(batch, self.settings.timeout_s / 2), now, request, is_played)

    def sample(self, num_items: int | None = None, now: int = 1, **kwargs: Any) -> list[Group]:
        """Draw stored groups, one by default, in an iteration after that of `add`; see `draw_groups`."""
        return self.draw_groups(1 if num_items is None else num_items, now, **kwargs)

    def draw_apart(self, method: str, *args: Any, **kwargs: Any) -> tuple[list[GroupMeta], list[Group]]:
        """Draw groups by a method of this class; return their metadata with `ref` None, and the groups."""
        groups: list[Group] = getattr(self, method)(*args, **kwargs)
        return [GroupMeta.of(group, None) for group in groups], groups

    def rated_until(self, source: str) -> tuple[int, list[str]]:
        """Return the newest change of a ratings file that was applied, and the groups whose answers were not found."""
        return self.rated.position if self.rated.source == source else 0, list(self.rated.unused)

    def stats(self, now: int) -> dict[str, float]:
        """Return gauges, lifetime counts, and `busy_s`: seconds of calls since the last one of `stats`."""
        busy_s, self._busy_s = self._busy_s, 0.0
        return {**super().stats(now), "busy_s": busy_s}

    def get_state(self) -> dict[str, Any]:
        """Return the bytes of a snapshot; `SRL` copies files instead, so that tokens do not pass through the driver."""
        with TemporaryDirectory() as folder:
            self.snapshot(Path(folder) / "snapshot")
            whole = (Path(folder) / "snapshot").read_bytes()
        return {"path": str(self.store.path), "position": self.store.position, "snapshot": whole}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`, or change nothing and raise a ValueError or a `StoreError`."""
        if not isinstance(state.get("snapshot"), bytes):
            raise ValueError(f"state = {sorted(state)}; expected what get_state returned, with the bytes of a snapshot")
        with TemporaryDirectory() as folder:
            (Path(folder) / "snapshot").write_bytes(state["snapshot"])
            self.restore(Path(folder) / "snapshot")

    def get_host(self) -> str:
        return platform.node()


def _fetched(batch: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the objects behind references, fetching each once; those that are lost are left out."""
    whole = [ref.ref if isinstance(ref, ListedRef) else ref for ref in batch]
    refs = list(dict.fromkeys(ref for ref in whole if isinstance(ref, ray.ObjectRef)))
    values: dict[Any, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        values = dict(zip(refs, ray.get(refs, timeout=timeout_s), strict=True)) if refs else {}
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):  # one lost object fails the whole call
        for ref in refs:
            with suppress(ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                values[ref] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    objects = [values.get(ref) if isinstance(ref, ray.ObjectRef) else ref for ref in whole]
    there = [(ref, value) for ref, value in zip(batch, objects, strict=True) if value is not None]
    return [value[ref.index] if isinstance(ref, ListedRef) else value for ref, value in there]
