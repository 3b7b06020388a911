"""How larger models fit a learner: adapters, activations computed twice, weights spread out, other optimisers.

    lora_rank > 0               adapters.py     only low-rank products are trained
    activation_checkpointing    here            each decoder layer keeps its input alone and runs again backwards
    fsdp                        sharding.py     every learner holds 1 / num_learners of weights, gradients and state
    optimizer_name              optimizers.py   8-bit or paged state

`faults.py` says which of them do not go together, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rllib_srl.adapters import add_adapters, has_adapters, merged
from rllib_srl.batch import bare_episode, micro_batch
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.gradients import grads_of, norm, summed
from rllib_srl.models import local_model
from rllib_srl.optimizers import make_optimizer
from rllib_srl.sharded_state import load_sharded, save_sharded
from rllib_srl.sharding import most, norm_of_shards, shard, sharded_optimizer_state, summed_shards, whole
from rllib_srl.sharding import whole_optimizer_state as gathered_state


class Fitted:
    """Mixin of the learner. Invariant: with `fsdp` every learner enters each method that gathers or sums."""

    config: Any
    model: Any
    module: Any
    _device: torch.device
    _params: dict[Any, torch.nn.Parameter]
    _named_optimizers: dict[str, torch.optim.Optimizer]
    _gathered_optimizers: dict[str, Any] | None = None  # by `gather`, until the next update

    def _make_module(self) -> Any:
        module = super()._make_module()  # type: ignore[misc]
        own, config = module[DEFAULT_MODULE_ID], self.config
        if config.lora_rank:
            add_adapters(own.model, config.lora_rank, config.lora_alpha, config.lora_targets, config.seed or 0)
        if config.activation_checkpointing:
            own.checkpoint_activations()
        if config.fsdp:
            shard(own, own.model, self._device)
        return module

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Register the optimiser over the trained parameters, with RLlib's learning-rate schedule."""
        params = [p for p in self.module[module_id].parameters() if p.requires_grad]
        optimizer = make_optimizer(config.optimizer_name, params, tuple(config.adam_betas), config.weight_decay)
        self.register_optimizer(  # type: ignore[attr-defined]
            module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr
        )

    # --- gradients over learners --------------------------------------------------------------

    def _summed_gradients(self) -> list[torch.Tensor]:
        own = grads_of(self._params.values())
        return summed_shards(own) if self.config.fsdp else summed(own, self.config.num_learners)

    def _norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return norm_of_shards(gradients) if self.config.fsdp else norm(gradients)

    def postprocess_gradients(self, gradients_dict: dict) -> dict:
        """Clip as RLlib does; with `fsdp` by the norm over all learners' parts."""
        if not self.config.fsdp:
            return super().postprocess_gradients(gradients_dict)  # type: ignore[misc]
        if self.config.grad_clip is None:
            return gradients_dict
        factor = (self.config.grad_clip / (self._norm(list(gradients_dict.values())) + 1e-6)).clamp(max=1.0)
        return {ref: gradient * factor.item() for ref, gradient in gradients_dict.items()}

    def _num_missing(self, num_passes: int) -> int:
        """Return how many passes another learner runs beyond this one's; to be asked before the first of them."""
        return most(num_passes, self._device) - num_passes if self.config.fsdp else 0

    def _run_empty(self, num_passes: int) -> None:
        """Run passes without effect, in which this learner only hands its part of the weights to the others."""
        for _ in range(num_passes):
            batch = self._tensors(micro_batch([bare_episode([0, 0], 0)], self._can_share), False)  # type: ignore
            with self._autocast():  # type: ignore[attr-defined]
                logp_N = self.module[DEFAULT_MODULE_ID](batch)["logp"]
            (0.0 * logp_N.sum()).backward()

    # --- what leaves the learner ----------------------------------------------------------------

    def policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole weights of the policy: adapters merged, shards gathered."""
        if has_adapters(self.model):
            return merged(self.model)
        return whole(self.model.named_parameters())

    def export(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory; with `fsdp` every learner must be asked."""
        weights = {name: tensor.detach() for name, tensor in self.policy_weights()}
        if not self.is_first():
            return
        self.model.save_pretrained(directory, state_dict=weights)
        load_tokenizer(local_model(self.module[DEFAULT_MODULE_ID].model_config["model"])).save_pretrained(directory)

    def is_first(self) -> bool:
        """Return whether this is the learner whose answers count."""
        return not self.config.fsdp or torch.distributed.get_rank() == 0

    def gather(self) -> None:
        """Collect what `get_state` will be asked for: RLlib asks one learner, which cannot gather alone."""
        if not self.config.fsdp:
            return
        self.module[DEFAULT_MODULE_ID].gather(self.is_first())
        self._gathered_optimizers = {
            name: gathered_state(optimizer.state_dict()) for name, optimizer in self._named_optimizers.items()
        }

    def leave_to_shards(self) -> None:
        """Leave weights and optimiser out of what `get_state` returns: `save_shards` writes them."""
        self.module[DEFAULT_MODULE_ID].leave_to_shards()
        self._gathered_optimizers = {}

    def save_shards(self, directory: str) -> None:
        """Write this learner's part of weights and optimiser; with `fsdp`, and every learner must be asked."""
        self._forget_gathered()
        own = dict(self.module[DEFAULT_MODULE_ID].saved_parameters())
        save_sharded(Path(directory), own, self._named_optimizers)

    def load_shards(self, directory: str) -> None:
        """Take this learner's part of what any number of learners wrote with `save_shards`, all of it without `fsdp`.

        Raises:
            CheckpointError: a shard is missing, or cannot be read.
            ValueError: the shards are of another model or optimiser.
        """
        own = self.module[DEFAULT_MODULE_ID]
        load_sharded(Path(directory), dict(own.saved_parameters()), self._named_optimizers)
        own.awaits_shards = False

    def _forget_gathered(self) -> None:
        self._gathered_optimizers = None
        self.module[DEFAULT_MODULE_ID].gathered = None

    def _get_optimizer_state(self) -> dict[str, Any]:
        if not self.config.fsdp:
            return super()._get_optimizer_state()  # type: ignore[misc]
        if self._gathered_optimizers is None:
            raise RuntimeError("the optimiser is spread over learners; call gather on all of them first")
        return {
            name: {"module_id": DEFAULT_MODULE_ID, "state": convert_to_numpy(state)}
            for name, state in self._gathered_optimizers.items()
        }

    def _set_optimizer_state(self, state: dict[str, Any]) -> None:
        if not self.config.fsdp:
            super()._set_optimizer_state(state)  # type: ignore[misc]
            return
        if not state:  # it lies in shards
            return
        for name, optimizer in self._named_optimizers.items():
            given = state[name]["state"]
            entries = convert_to_torch_tensor(given["state"], device=self._device)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(sharded_optimizer_state({**given, "state": entries}, parameters))
