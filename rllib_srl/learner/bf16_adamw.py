"""AdamW whose moments are kept in bfloat16: 4 bytes of state per parameter in place of 8.

    step      m, v in fp32 -> AdamW's step on fp32 weights -> m, v rounded to bfloat16
    rounding  up or down at random, so that the mean is exact: to the nearest, v would stop to follow the gradient,
              because beta2 = 0.999 changes it by less than bfloat16 can show (2 ** -8)

The random bits come from the step and the position of the parameter: learners with equal gradients keep equal states,
and a restored run goes on bit for bit.

Sources: Loshchilov & Hutter 2017 (AdamW), arXiv 1711.05101; Zamirai et al. 2020 (stochastic rounding), arXiv
2010.06192.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rllib_srl.learner.fsdp.sharding import local

CHUNK = 2**24  # elements that are fp32 at a time
MOMENTS = ("exp_avg", "exp_avg_sq")


class BF16AdamW(torch.optim.Optimizer):
    """AdamW with moments in bfloat16. Invariant: `state_dict` has them as fp32, which holds them exactly."""

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
