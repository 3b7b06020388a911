"""The memory in any trainer, without Ray: stored prompts and answers, and the loss that keeps what was learned.

    buffer = SRLReplayBuffer(capacity=1000)    prompts to revisit, groups to reuse, right answers to hold
    retention = Retention(weight=1.0)          the loss on answers that are held

`SRL` uses the same two through `.replay(...)`; docs/examples/torch_memory.py is a loop in plain torch.
"""

from rllib_srl.losses.retention import Retention
from rllib_srl.replay.buffer import SRLReplayBuffer

__all__ = ["Retention", "SRLReplayBuffer"]
