"""Estimate token advantages with a value head: undiscounted GAE over the policy-written tokens of an episode.

    value_t  = head(hidden state before token t)                        0 everywhere without a critic
    delta_t  = value_{t+1} - value_t,  at the last token  return - value_t
    A_t      = sum_l lambda^l delta_{t+l}                               target_t = A_t + value_t
    loss     = scale * (value_t - target_t)^2 / 2                       trains the head alone

The head reads detached hidden states, so the value loss never changes the policy. It starts at zero, which gives
A_t = return at lambda = 1.

Differences from PPO's usual critic:
1. It has no network of its own.
2. Values are not clipped.

Source: Schulman et al. 2016, arXiv 1506.02438 eq. 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.learner.gradients import gradients_of, norm, set_gradients, summed


def gae(value_N: torch.Tensor, return_N: torch.Tensor, episode_N: torch.Tensor, lam: float) -> torch.Tensor:
    """Return the advantage of each token, float32 [N].

    Args:
        value_N: value of the state before each token.
        return_N: return of the episode, repeated at each of its tokens.
        episode_N: episode of each token; tokens of an episode are contiguous and in order.
        lam: lambda, in [0, 1].
    """
    value, returns, episode = (one.detach().double().cpu().numpy() for one in (value_N, return_N, episode_N))
    is_last_N = np.append(episode[1:] != episode[:-1], True)
    delta_N = np.where(is_last_N, returns, np.append(value[1:], 0.0)) - value
    advantage_N, running = np.empty_like(delta_N), 0.0
    for n in range(len(delta_N) - 1, -1, -1):
        running = delta_N[n] + (0.0 if is_last_N[n] else lam * running)
        advantage_N[n] = running
    return torch.from_numpy(advantage_N).to(value_N.device, torch.float32)

CRITIC_LR = 1e-3  # learning rate of the value head


class Critic:
    """A linear value head with its own Adam. Invariant: equal on all learners."""

    def __init__(self, hidden_size: int, lr: float, device: Any, num_learners: int = 1, num_copies: int = 1) -> None:
        """Start at zero.

        Args:
            hidden_size: width of the policy's hidden states.
            lr: learning rate of Adam.
            device: device of the policy.
            num_learners: as for `summed`.
            num_copies: as for `summed`.
        """
        self._over = num_learners, num_copies
        self.head = torch.nn.Linear(hidden_size, 1).to(device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self._optimizer = torch.optim.Adam(self.head.parameters(), lr=lr)

    def values(self, fwd_out: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value of the state before each token [N]; only the head gets a gradient.

        Args:
            fwd_out: `hidden` [U, D] and `row` [N] from `scoring.token_logps`.
        """
        value_N: torch.Tensor = self.head(fwd_out["hidden"].detach().float())[:, 0][fwd_out["row"]]
        return value_N

    def loss(
        self, batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scaled value loss of a micro-batch, and the detached unscaled sum over its tokens.

        Args:
            batch: `scale` and `value_target` [N].
            fwd_out: as for `values`.
        """
        loss_N = 0.5 * (self.values(fwd_out) - batch["value_target"]).square()
        return (batch["scale"] * loss_N).sum(), loss_N.detach().sum()

    def step(self, is_policy_finite: bool = True) -> None:
        """Sum the gradients over learners, step, and drop them; a collective.

        Args:
            is_policy_finite: False skips the step, as a gradient that is not finite does.
        """
        gradients = summed(gradients_of(self.head.parameters()), *self._over)
        if is_policy_finite and bool(torch.isfinite(norm(gradients))):
            set_gradients(self.head.parameters(), gradients)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def get_state(self) -> dict[str, Any]:
        """Return the state of head and optimiser."""
        return {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load what `get_state` returned."""
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])


def set_token_advantages(
    batch: MicroBatch[torch.Tensor], fwd_out: Mapping[str, torch.Tensor], critic: Critic | None, lam: float
) -> None:
    """Replace the returns in `advantage` by token advantages and add `value_target`; call it once per update.

    Args:
        batch: `advantage` [N] holds the return of each token's episode; changed in place.
        fwd_out: output of the first pass, before any step.
        critic: None means values of 0.
        lam: lambda, in [0, 1].
    """
    value_N = torch.zeros_like(batch["advantage"]) if critic is None else critic.values(fwd_out).detach()
    batch["advantage"] = gae(value_N, batch["advantage"], batch["episode"], lam)
    batch["value_target"] = batch["advantage"] + value_N
