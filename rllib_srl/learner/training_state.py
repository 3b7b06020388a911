"""Gather, load and move the state that training changes: trained weights and the state of their optimiser.

RLlib reads the whole state from one learner, for a checkpoint as for `get_state`. With FSDP2 all learners `gather` it
first, in the host memory of learner 0; each takes its rows of a state that is loaded. A state fits any number of
learners, with or without FSDP2, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.sharding import sharded_optimizer_state, whole_optimizer_state


class TrainingState:
    """Weights and optimiser state of a learner.

    Invariant: the next update drops the gathered state (`forget_gathered`), so it is never older than the weights.
    """

    def __init__(
        self,
        policy: CausalLMModule,
        optimizers: Mapping[str, torch.optim.Optimizer],
        device: torch.device,
        is_sharded: bool,
        is_first: bool,
    ) -> None:
        """Set the policy and its optimisers by name.

        Args:
            policy: module in training.
            optimizers: its optimisers; the same objects for the whole life of the learner.
            device: device of the policy.
            is_sharded: whether FSDP2 shards the weights.
            is_first: whether RLlib calls `get_state` on this learner.
        """
        self._policy, self._optimizers, self._device = policy, optimizers, device
        self._is_sharded, self._is_first = is_sharded, is_first
        self._gathered: dict[str, Any] | None = None  # whole optimiser states

    def gather(self) -> None:
        """Gather weights and optimiser state for `get_state`; a collective."""
        if not self._is_sharded:
            return
        self._policy.gather(self._is_first)
        states = {name: one.state_dict() for name, one in self._optimizers.items()}
        self._gathered = {name: whole_optimizer_state(state, self._is_first) for name, state in states.items()}

    def forget_gathered(self) -> None:
        """Drop what `gather` has gathered."""
        self._policy.gathered = self._gathered = None

    def gathered_optimizers(self) -> dict[str, Any]:
        """Return the gathered optimiser state in RLlib's form.

        Raises:
            RuntimeError: `gather` was not called.
        """
        if self._gathered is None:
            raise RuntimeError("the optimiser is spread over learners; call gather on all of them first")
        return {
            name: {"module_id": DEFAULT_MODULE_ID, "state": convert_to_numpy(state)}
            for name, state in self._gathered.items()
        }

    def set_gathered_optimizers(self, state: Mapping[str, Any]) -> None:
        """Load this learner's rows of what `gathered_optimizers` returned."""
        for name, optimizer in self._optimizers.items():
            given = state[name]["state"]
            entries = convert_to_torch_tensor(given["state"], device=self._device)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(sharded_optimizer_state({**given, "state": entries}, parameters))

    def move_optimizers(self, device: torch.device | str) -> None:
        """Move the tensors of the optimiser state to a device."""
        for optimizer in self._optimizers.values():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():  # step counts stay where the optimiser put them
                        state[name] = value.to(device)
