"""Replay memory: schedules stored prompts for revisits and stored groups for reuse.

`SRLEpisodeReplayBuffer` needs RLlib, so it loads on first use: the other parts work without Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.settings import ReplaySettings

if TYPE_CHECKING:
    from rllib_srl.replay.episodes.buffer import SRLEpisodeReplayBuffer

__all__ = ["ReplaySettings", "SRLEpisodeReplayBuffer", "SRLReplayBuffer"]


def __getattr__(name: str) -> Any:
    if name != "SRLEpisodeReplayBuffer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rllib_srl.replay.episodes.buffer import SRLEpisodeReplayBuffer

    return SRLEpisodeReplayBuffer
