"""The memory in any trainer, without Ray: stored prompts and answers, and the KL that holds answers.

    buffer = SRLReplayBuffer(capacity=1000)    prompts to revisit, groups to reuse, targets of right answers
    retention = Retention(weight=1.0)          targets from logits, and the loss at later updates

`SRL` uses the same two through `.replay(...)`; docs/examples/torch_memory.py is a loop in plain torch.
"""

from rllib_srl.losses.retention import Retention
from rllib_srl.replay.buffer import SRLReplayBuffer

__all__ = ["Retention", "SRLReplayBuffer"]
