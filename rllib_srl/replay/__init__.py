"""Replay memory: schedules stored prompts for revisits and stored groups for reuse."""

from rllib_srl.replay.admission.hooks import Refusal
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.settings import ReplaySettings

__all__ = ["Refusal", "ReplaySettings", "SRLReplayBuffer"]
