"""Set up and export the model of a learner: LoRA adapters, activation checkpointing, FSDP2; optimisers by name.

    lora_rank > 0               add_adapters               only low-rank products are trained
    activation_checkpointing    rl_module.py               each decoder layer keeps its input and recomputes the rest
    fsdp                        sharding.py                a learner holds 1 / num_learners of weights, gradients, state
    optimizer_name              make_optimizer             bfloat16, 8-bit or paged optimiser state

`algorithm/validation.py` rejects combinations that do not work.

Adapters (peft):

    weight = base + scaling * B @ A          A, B trained; B starts at 0, so the policy starts as the base
    to the engine                            as they are (`adapter_tensors`), or merged: lora = {"send": "merged"}
    to files                                 merged, under the names of the model without adapters (`policy_weights`)
    reference policy                         the same model with its adapters off (`adapters_off`): no second copy

Optimisers (torch, bitsandbytes):

    name                state of a parameter with n elements     device
    adamw               8 n bytes                                CPU, GPU
    sgd                 none                                     CPU, GPU
    adamw_bf16          4 n bytes                                CPU, GPU    `BF16AdamW`
    adamw_8bit          2 n bytes + 4 bytes per 256 elements     CPU, GPU    8 n bytes below 4,096 elements
    paged_adamw         8 n bytes, paged to the host on demand        GPU
    paged_adamw_8bit    as adamw_8bit, paged as above                 GPU

Sources: Hu et al. 2021 (LoRA), arXiv 2106.09685;
Dettmers et al. 2022 (8-bit optimisers, block-wise quantisation), arXiv 2110.02861;
Dettmers et al. 2023 (QLoRA, paged optimisers), arXiv 2305.14314 section 3;
Loshchilov & Hutter 2017 (AdamW), arXiv 1711.05101; Zamirai et al. 2020 (stochastic rounding), arXiv 2010.06192.
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
from rllib_srl.learner.sharding import local, shard, whole

_BASE = ".base_layer"  # peft's name for the wrapped layer


def set_up_model(policy: CausalLMModule, config: Any, device: torch.device) -> None:
    """Add adapters, checkpoint activations and shard the weights as the settings ask, in place.

    Args:
        policy: module on `device`.
        config: an `SRLConfig`.
        device: device of the learner.
    """
    flat = config.flat()
    if flat.lora_rank:
        add_adapters(policy.model, flat.adapter_spec(), config.seed or 0)
    if config.activation_checkpointing:
        policy.checkpoint_activations(offload=config.activation_checkpointing == "offload")
    if config.is_sharded:
        shard(policy, policy.model, device, flat.fsdp_gather_dtype)


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
        elif not any(name.startswith(f"{layer}.") for layer in _parents(owner, layers)):
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


def _parents(owner: str, layers: dict[str, Any]) -> Iterator[str]:
    parts = owner.split(".")
    for end in range(1, len(parts) + 1):
        if ".".join(parts[:end]) in layers:
            yield ".".join(parts[:end])


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
    """Return layout and tensors of what an engine receives: only the adapters, or the whole policy.

    Args:
        model: of the policy.
        sends_adapter: whether the engine applies the adapters itself.
    """
    if not sends_adapter:
        return weights_layout(model), policy_weights(model)
    return [(name, one.shape, one.dtype) for name, one in adapter_tensors(model)], adapter_tensors(model)


def export(policy: CausalLMModule, directory: str, is_first: bool) -> None:
    """Write model and tokenizer as a Hugging Face directory; with FSDP2 call it on every learner.

    Args:
        policy: module in training.
        directory: where to write.
        is_first: whether this learner writes.
    """
    weights = {}
    for name, tensor in policy_weights(policy.model):  # every learner takes part in gathering; one keeps the result
        if is_first:
            weights[name] = tensor.detach().cpu()
    if is_first:
        policy.model.save_pretrained(directory, state_dict=weights)
        load_tokenizer(local_model(policy.model_config["model"])).save_pretrained(directory)


# --- optimisers -----------------------------------------------------------------------------------

TORCH = ("adamw", "sgd", "adamw_bf16")
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
    if name == "adamw_bf16":
        return BF16AdamW(parameters, betas, weight_decay)
    if name in BITSANDBYTES:
        import bitsandbytes

        make: Callable[..., torch.optim.Optimizer] = getattr(bitsandbytes.optim, BITSANDBYTES[name])
        return make(parameters, betas=betas, weight_decay=weight_decay)
    return torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay, fused=True)


CHUNK = 2**24  # elements that are fp32 at a time
MOMENTS = ("exp_avg", "exp_avg_sq")


class BF16AdamW(torch.optim.Optimizer):
    """AdamW with moments in bfloat16. Invariant: `state_dict` has them as fp32, which holds them exactly.

    step      m, v in fp32 -> AdamW's step on fp32 weights -> m, v rounded to bfloat16
    rounding  up or down at random, so that the mean is exact: to the nearest, v would stop to follow the gradient,
              because beta2 = 0.999 changes it by less than bfloat16 can show (2 ** -8)

    The random bits come from the step and the position of the parameter: learners with equal gradients keep equal
    states, and a restored run goes on bit for bit.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Set the parameters, AdamW's moving-average rates and its weight decay; RLlib sets the learning rate."""
        super().__init__(parameters, {"lr": 1e-3, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("closure; expected None: gradients are computed before the step")
        for group in self.param_groups:
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self._step_one(group, position, parameter)

    def _step_one(self, group: dict[str, Any], position: int, parameter: torch.nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        num, (beta1, beta2) = int(state["step"]), group["betas"]
        own = [local(one) for one in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
        generator = torch.Generator(own[0].device).manual_seed(num * 1_000_003 + position)
        rows = max(1, CHUNK * len(own[0]) // max(1, own[0].numel()))
        for weight, gradient, first, second in zip(*(one.split(rows) for one in own), strict=True):
            mean = first.float().lerp_(gradient.float(), 1 - beta1)
            square = second.float().lerp_(gradient.float().square(), 1 - beta2)
            scale = (square / (1 - beta2**num)).sqrt_().add_(group["eps"])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**num))
            first.copy_(stochastic_bf16(mean, generator))
            second.copy_(stochastic_bf16(square, generator))

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state with fp32 moments: numpy, in which RLlib saves them, has no bfloat16."""
        state = super().state_dict()
        entries = {
            index: {name: value.float() if name in MOMENTS else value for name, value in entry.items()}
            for index, entry in state["state"].items()
        }
        return {**state, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned; torch would keep the moments in the dtype of the weights."""
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            for name in MOMENTS:
                if name in entry:
                    entry[name] = entry[name].to(torch.bfloat16)


def stochastic_bf16(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return fp32 numbers as bfloat16, rounded up or down at random, with the number as the mean.

    Args:
        value: finite, fp32.
        generator: on the device of `value`.
    """
    noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    # The upper 16 bits of fp32 are bfloat16; the carry of the lower ones rounds up.
    return noise.add_(value.contiguous().view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32).bfloat16()
