"""The memory: which prompts to play again and which groups to train on again."""

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.settings import ReplaySettings

__all__ = ["ReplaySettings", "SRLReplayBuffer"]
