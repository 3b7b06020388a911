"""Set up and export the model of a learner: LoRA adapters, activation checkpointing, FSDP2; optimisers by name.

    lora_rank > 0               add_adapters               only low-rank products are trained
    activation_checkpointing    rl_module.py               each decoder layer keeps its input and recomputes the rest
    fsdp                        sharding.py                a learner holds 1 / num_learners of weights, gradients, state
    optimizer_name              make_optimizer             8-bit or paged optimiser state

`algorithm/validation.py` rejects combinations that do not work.

Adapters (peft):

    weight = base + scaling * B @ A          A, B trained; B starts at 0, so the policy starts as the base
    to the engine                            as they are (`adapter_tensors`), or merged: lora_send = "merged"
    to files                                 merged, under the names of the model without adapters (`policy_weights`)
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
Dettmers et al. 2023 (QLoRA, paged optimisers), arXiv 2305.14314 section 3;
Loshchilov & Hutter 2017 (AdamW), arXiv 1711.05101.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from rllib_srl.engine.adapters import NAME, adapter_layers, adapter_tensors, add_adapters, has_adapters
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.sharding import shard, whole

_BASE = ".base_layer"  # peft's name for the wrapped layer


def set_up_model(policy: CausalLMModule, config: Any, device: torch.device) -> None:
    """Add adapters, checkpoint activations and shard the weights as the settings ask, in place."""
    if config.lora_rank:
        add_adapters(policy.model, config.adapter_spec(), config.seed or 0)
    if config.activation_checkpointing:
        policy.checkpoint_activations(offload=config.activation_checkpointing == "offload")
    if config.fsdp:
        shard(policy, policy.model, device, config.fsdp_gather_dtype)


# --- adapters -------------------------------------------------------------------------------------


def merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) of the policy with adapters merged, under the names of the model without adapters.

    One merged weight exists at a time.
    """
    for name, parameter, layer in _unwrapped(model):
        if layer is None:
            yield name, parameter
        else:
            yield name, parameter.detach() + layer.get_delta_weight(NAME)


def _unwrapped(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """Yield name without adapters, parameter, and the adapted layer whose weight it is; None for any other."""
    layers = dict(adapter_layers(model))
    for name, parameter in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        if owner.endswith(_BASE):
            owner = owner.removesuffix(_BASE)
            yield f"{owner}.{kind}", parameter, layers[owner] if kind == "weight" else None
        elif not owner.endswith((f".lora_A.{NAME}", f".lora_B.{NAME}")):
            yield name, parameter, None


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block, so that the model computes as its base."""
    layers = [layer for _, layer in adapter_layers(model)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


# --- weights of the policy ------------------------------------------------------------------------


def policy_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole weight) of the policy, with adapters merged and shards gathered; a collective with FSDP2."""
    return merged(model) if has_adapters(model) else whole(model.named_parameters())


def weights_layout(model: torch.nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Return name, whole shape and dtype of what `policy_weights` yields, without merging or gathering."""
    return [(name, parameter.shape, parameter.dtype) for name, parameter, _ in _unwrapped(model)]


def sent_weights(
    model: torch.nn.Module, sends_adapter: bool
) -> tuple[list[tuple[str, torch.Size, torch.dtype]], Iterator[tuple[str, torch.Tensor]]]:
    """Return layout and tensors of what an engine receives: only the adapters, or the whole policy."""
    if not sends_adapter:
        return weights_layout(model), policy_weights(model)
    return [(name, tensor.shape, tensor.dtype) for name, tensor in adapter_tensors(model)], adapter_tensors(model)


def export(policy: CausalLMModule, directory: str, is_first: bool) -> None:
    """Write model and tokenizer as a Hugging Face directory; with FSDP2 call it on every learner, the first writes."""
    weights = {}
    for name, tensor in policy_weights(policy.model):  # every learner takes part in gathering; one keeps the result
        if is_first:
            weights[name] = tensor.detach().cpu()
    if is_first:
        policy.model.save_pretrained(directory, state_dict=weights)
        load_tokenizer(local_model(policy.model_config["model"])).save_pretrained(directory)


# --- optimisers -----------------------------------------------------------------------------------

TORCH = ("adamw", "sgd")
PAGED = {"paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}
BITSANDBYTES = {"adamw_8bit": "AdamW8bit", **PAGED}
OPTIMIZERS = (*TORCH, *BITSANDBYTES)


def error_of(name: str, num_gpus: float) -> str | None:
    """Return an error message if an optimiser cannot run here, with GPUs per learner, else None."""
    if name in PAGED and not num_gpus:
        return f"optimizer_name = {name!r}; expected num_gpus_per_learner above 0: on a CPU there is nothing to page"
    if name in BITSANDBYTES and find_spec("bitsandbytes") is None:
        return f"optimizer_name = {name!r}; expected the package bitsandbytes: pip install 'rllib_srl[optimizers]'"
    return None


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """Return one of `OPTIMIZERS`; RLlib's schedule sets the learning rate, and `sgd` reads no other setting."""
    if name == "sgd":
        return torch.optim.SGD(parameters)
    if name in BITSANDBYTES:
        import bitsandbytes

        make: Callable[..., torch.optim.Optimizer] = getattr(bitsandbytes.optim, BITSANDBYTES[name])
        return make(parameters, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay, fused=True)
