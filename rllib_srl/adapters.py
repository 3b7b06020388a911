"""Low-rank adapters through peft: few trained parameters, merged whenever the policy leaves the learner.

    weight = base + scaling * B @ A          A, B trained; B starts at 0, so the policy starts as the base
    to the engine, to files                  merged, under the names of the model without adapters (`merged`)
    the reference policy                     the same model with its adapters off (`adapters_off`): no second copy

Source: Hu et al. 2021 (LoRA), arXiv 2106.09685.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTER = "default"
_BASE = ".base_layer"  # peft's name of the layer that an adapter wraps


def add_adapters(model: torch.nn.Module, rank: int, alpha: float | None, targets: Sequence[str], seed: int) -> None:
    """Freeze the model and wrap linear layers in adapters, in place.

    Args:
        model: a Hugging Face model.
        rank: of each product, at least 1.
        alpha: the product is scaled by alpha / rank; None: by 2.
        targets: the last part of the layers' names.
        seed: of A, which must be the same in every learner.

    Raises:
        ValueError: the model has no layer of one of the names.
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
    """Return whether `add_adapters` was called on a model."""
    return next(_layers(model), None) is not None


def merged(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights of the policy as a model without adapters has them, as `named_parameters` does."""
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
    """Let the model compute what its base does inside the block."""
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
