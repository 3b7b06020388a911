"""LoRA adapters of a model: add them, name their tensors, and move them for the self-test.

    weight of a layer = base + scale * B @ A         A [rank, inputs], B [outputs, rank]; B starts at 0

    learner   add_adapters(model, spec, seed)        trains A and B
              adapter_tensors(model)                 (name, parameter) of A and B, packed for the engines
    engine    expected_adapters(config, spec)        name and shape of what it must receive

Names are those of peft's files without their prefix: "model.layers.0.self_attn.q_proj.lora_A.weight".

Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TABLES = frozenset({"lm_head", "embed_tokens"})  # vLLM applies adapters to them by one index per request, not per token
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks for which vLLM reserves memory
MAX_RANK = RANKS[-1]
NAME = "default"  # the adapter's name in peft's model


@dataclass(frozen=True)
class AdapterSpec:
    """The form of the adapters of a model.

    Invariant: `rank` is at least 1; `alpha` is above 0.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]  # last component of the names of the layers

    @staticmethod
    def of(rank: int, alpha: float | None, targets: tuple[str, ...] | list[str]) -> AdapterSpec:
        """Return the form that settings describe; `alpha` None means a scale of 2."""
        return AdapterSpec(rank, 2 * rank if alpha is None else alpha, tuple(targets))

    @property
    def scale(self) -> float:
        """The factor of B @ A."""
        return self.alpha / self.rank


def add_adapters(model: torch.nn.Module, spec: AdapterSpec, seed: int) -> None:
    """Freeze the model and wrap linear layers in adapters, in place; A starts equal for equal seeds.

    Raises:
        ValueError: a target matches no linear layer of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    check_targets(model, spec)
    model.requires_grad_(False)
    scale: Any = spec.alpha
    targets = list(spec.targets)
    config = LoraConfig(r=spec.rank, lora_alpha=scale, target_modules=targets, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)


def check_targets(model: torch.nn.Module, spec: AdapterSpec) -> None:
    """Check that each target is a linear layer of the model.

    Raises:
        ValueError: a target is not a linear layer.
    """
    layers = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if missing := sorted(set(spec.targets) - layers):
        expected = f"the model has no layers {missing}, expected some of {sorted(layers)}"
        raise ValueError(f"lora_targets = {list(spec.targets)}; {expected}")


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of each layer with an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
            yield name, module


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether the model has adapters."""
    return next(adapter_layers(model), None) is not None


def adapter_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name, parameter) of A and B of each layer."""
    for name, layer in adapter_layers(model):
        yield f"{name}.lora_A.weight", layer.lora_A[NAME].weight
        yield f"{name}.lora_B.weight", layer.lora_B[NAME].weight


def expected_adapters(config: Any, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of A and B of each layer, in the order of `adapter_tensors`.

    Raises:
        ValueError: a target matches no linear layer of the model.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_targets(model, spec)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name.rsplit(".", 1)[-1] in spec.targets:
            shapes[f"{name}.lora_A.weight"] = (spec.rank, layer.in_features)
            shapes[f"{name}.lora_B.weight"] = (layer.out_features, spec.rank)
    return shapes
