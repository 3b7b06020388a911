"""Replay memory: schedules stored prompts for revisits and stored groups for reuse.

The names below load on first use, so that the settings alone do not load the memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_srl.replay.admission import Refusal
    from rllib_srl.replay.buffer import SRLReplayBuffer
    from rllib_srl.replay.settings import ReplaySettings

_HOMES = {"Refusal": "admission", "ReplaySettings": "settings", "SRLReplayBuffer": "buffer"}
__all__ = ["Refusal", "ReplaySettings", "SRLReplayBuffer"]


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
