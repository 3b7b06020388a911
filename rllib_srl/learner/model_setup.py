"""Set up model and optimiser of a learner: LoRA adapters, activation checkpointing, FSDP2, optimiser by name.

    lora_rank > 0               add_adapters, merged       only low-rank products are trained
    activation_checkpointing    rl_module.py               each decoder layer keeps its input and recomputes the rest
    fsdp                        fsdp/                      a learner holds 1 / num_learners of weights, gradients, state
    optimizer_name              make_optimizer             8-bit or paged optimiser state

`algorithm/validation.py` rejects combinations that do not work.

Adapters (peft):

    weight = base + scaling * B @ A          A, B trained; B starts at 0, so the policy starts as the base
    to the engine, to files                  merged, under the names of the model without adapters (`merged`)
    reference policy                         the same model with its adapters off (`adapters_off`): no second copy

Optimisers (torch, bitsandbytes):

    name                state of a parameter with n elements     device
    adamw               8 n bytes                                CPU, GPU
    sgd                 none                                     CPU, GPU
    adamw_8bit          2 n bytes + 4 bytes per 256 elements     CPU, GPU    8 n bytes below 4,096 elements
    paged_adamw         8 n bytes, paged to the host on demand        GPU
    paged_adamw_8bit    as adamw_8bit, paged as above                 GPU

Sources: Hu et al. 2021 (LoRA), arXiv 2106.09685;
Dettmers et al. 2022 (8-bit optimisers, block-wise quantisation), arXiv 2110.02861;
Dettmers et al. 2023 (QLoRA, paged optimisers), arXiv 2305.14314 section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rllib_srl.batch.layout import bare_episode, micro_batch
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.learner.fsdp.sharded_state import load_sharded, save_sharded
from rllib_srl.learner.fsdp.sharding import most, norm_of_shards, shard, sharded_optimizer_state, summed_shards, whole
from rllib_srl.learner.fsdp.sharding import whole_optimizer_state as gathered_state
from rllib_srl.learner.gradients import grads_of, norm, summed

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"
_BASE = ".base_layer"  # peft's name for the wrapped layer


def add_adapters(model: torch.nn.Module, rank: int, alpha: float | None, targets: Sequence[str], seed: int) -> None:
    """Freeze the model and wrap linear layers in adapters, in place.

    Args:
        model: a Hugging Face model.
        rank: rank of each product B @ A, at least 1.
        alpha: the product is scaled by alpha / rank; None means a scale of 2.
        targets: last component of the names of the layers to wrap.
        seed: seed for A, which must start equal on every learner.

    Raises:
        ValueError: a target matches no linear layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    own = {name.rsplit(".", 1)[-1] for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    if missing := sorted(set(targets) - own):
        raise ValueError(f"lora_targets = {list(targets)}; {missing} are none of the model's layers {sorted(own)}")
    model.requires_grad_(False)
    scale: Any = 2 * rank if alpha is None else alpha
    config = LoraConfig(r=rank, lora_alpha=scale, target_modules=list(targets), lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _ADAPTER)


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether the model has adapters."""
    return next(_layers(model), None) is not None


def merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of the policy with adapters merged, under the names of the model without adapters."""
    layers = dict(_layers(model))
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner.endswith(_BASE):
            owner = owner.removesuffix(_BASE)
            layer = layers[owner]
            delta = layer.get_delta_weight(_ADAPTER) if kind == "weight" else 0.0
            yield f"{owner}.{kind}", parameter.detach() + delta
        elif not any(name.startswith(f"{layer}.") for layer in _parents(owner, layers)):
            yield name, parameter


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block, so that the model computes as its base."""
    layers = [layer for _, layer in _layers(model)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
            yield name, module


def _parents(owner: str, layers: dict[str, Any]) -> Iterator[str]:
    parts = owner.split(".")
    for end in range(1, len(parts) + 1):
        if ".".join(parts[:end]) in layers:
            yield ".".join(parts[:end])


TORCH = ("adamw", "sgd")
PAGED = {"paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
BITSANDBYTES = {"adamw_8bit": "AdamW8bit", **PAGED}
OPTIMIZERS = (*TORCH, *BITSANDBYTES)


def fault_of(name: str, num_gpus: float) -> str | None:
    """Return an error message if an optimiser cannot run here, else None.

    Args:
        name: one of `OPTIMIZERS`.
        num_gpus: GPUs per learner.
    """
    if name in PAGED and not num_gpus:
        return f"optimizer_name = {name!r}; expected num_gpus_per_learner above 0: on a CPU there is nothing to page"
    if name in BITSANDBYTES and find_spec("bitsandbytes") is None:
        return f"optimizer_name = {name!r}; expected the package bitsandbytes: pip install 'rllib_srl[optimizers]'"
    return None


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Return an optimiser; RLlib's schedule sets the learning rate.

    Args:
        name: one of `OPTIMIZERS`.
        parameters: trained parameters only.
        betas: AdamW's moving-average rates.
        weight_decay: AdamW's weight decay.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters)
    if name in BITSANDBYTES:
        import bitsandbytes

        return getattr(bitsandbytes.optim, BITSANDBYTES[name])(parameters, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay, fused=True)


class Fitted:
    """Model and optimiser setup of a learner (mixin), and their state.

    Invariant: with `fsdp` every learner calls each method that gathers or sums (collectives).
    """

    config: Any
    model: Any
    module: Any
    _device: torch.device
    _params: dict[Any, torch.nn.Parameter]
    _named_optimizers: dict[str, torch.optim.Optimizer]
    _gathered_optimizers: dict[str, Any] | None = None  # set by `gather`, cleared by the next update

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
        """Clip as RLlib does; with `fsdp` by the global norm over all shards."""
        if not self.config.fsdp:
            return super().postprocess_gradients(gradients_dict)  # type: ignore[misc]
        if self.config.grad_clip is None:
            return gradients_dict
        factor = (self.config.grad_clip / (self._norm(list(gradients_dict.values())) + 1e-6)).clamp(max=1.0)
        return {ref: gradient * factor.item() for ref, gradient in gradients_dict.items()}

    def _num_missing(self, num_passes: int) -> int:
        """Return by how many passes the busiest learner exceeds this one; call it before the first pass."""
        return most(num_passes, self._device) - num_passes if self.config.fsdp else 0

    def _run_empty(self, num_passes: int) -> None:
        """Run passes with zero loss, in which this learner only contributes its shard of the weights."""
        for _ in range(num_passes):
            batch = self._tensors(micro_batch([bare_episode([0, 0], 0)], self._can_share), False)  # type: ignore
            with self._autocast():  # type: ignore[attr-defined]
                logp_N = self.module[DEFAULT_MODULE_ID](batch)["logp"]
            (0.0 * logp_N.sum()).backward()

    # --- export and checkpointing ---------------------------------------------------------------

    def policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole weight) of the policy, with adapters merged and shards gathered."""
        if has_adapters(self.model):
            return merged(self.model)
        return whole(self.model.named_parameters())

    def export(self, directory: str) -> None:
        """Write model and tokenizer as a Hugging Face directory; with `fsdp` call it on every learner."""
        weights = {name: tensor.detach() for name, tensor in self.policy_weights()}
        if not self.is_first():
            return
        self.model.save_pretrained(directory, state_dict=weights)
        load_tokenizer(local_model(self.module[DEFAULT_MODULE_ID].model_config["model"])).save_pretrained(directory)

    def is_first(self) -> bool:
        """Return whether this learner's results are used: learner 0 with `fsdp`, else every learner."""
        return not self.config.fsdp or torch.distributed.get_rank() == 0

    def gather(self) -> None:
        """Gather the state for a later `get_state`, which RLlib calls on one learner only; a collective."""
        if not self.config.fsdp:
            return
        self.module[DEFAULT_MODULE_ID].gather(self.is_first())
        self._gathered_optimizers = {
            name: gathered_state(optimizer.state_dict()) for name, optimizer in self._named_optimizers.items()
        }

    def leave_to_shards(self) -> None:
        """Exclude weights and optimiser from `get_state`, because `save_shards` writes them."""
        self.module[DEFAULT_MODULE_ID].leave_to_shards()
        self._gathered_optimizers = {}

    def save_shards(self, directory: str) -> None:
        """Write this learner's shard of weights and optimiser; with `fsdp` only, and on every learner."""
        self._forget_gathered()
        own = dict(self.module[DEFAULT_MODULE_ID].saved_parameters())
        save_sharded(Path(directory), own, self._named_optimizers)

    def take_weights(self, weights: dict[str, Any]) -> None:
        """Load the weights of a checkpoint and keep the optimiser state; call it on every learner.

        Raises:
            ValueError: the weights belong to another model.
        """
        self.module[DEFAULT_MODULE_ID].set_state(weights)

    def load_shards(self, directory: str, weights_only: bool = False) -> None:
        """Load this learner's rows from the shards, or whole tensors without `fsdp`.

        Args:
            directory: written by `save_shards` on any number of learners.
            weights_only: keep the optimiser state.

        Raises:
            CheckpointError: a shard is missing or cannot be read.
            ValueError: the shards belong to another model or optimiser.
        """
        own = self.module[DEFAULT_MODULE_ID]
        optimizers = {} if weights_only else self._named_optimizers
        load_sharded(Path(directory), dict(own.saved_parameters()), optimizers)
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
        if not state:  # `load_shards` loads it
            return
        for name, optimizer in self._named_optimizers.items():
            given = state[name]["state"]
            entries = convert_to_torch_tensor(given["state"], device=self._device)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(sharded_optimizer_state({**given, "state": entries}, parameters))
