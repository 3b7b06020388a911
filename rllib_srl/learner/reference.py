"""Frozen policies: the reference, which is the anchor of the KL, and teachers; their log-probs, and how they move.

    base         never moves
    ema          every `every` iterations  reference <- rate * policy + (1 - rate) * reference
    last_good    every `every` iterations  reference <- policy, if the mean reward since the last check is the best

With "last_good", a policy that has collapsed is pulled back to the last good one.

Sources: Jiang et al. 2025 (ExIt), arXiv 2509.04575 (refresh every M iterations with rate alpha; TRL: 0.6 every 512);
Liu et al. 2025 (ProRL), arXiv 2505.24864 section 3.3 (reference reset to a good checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.engine.adapters import has_adapters
from rllib_srl.learner.model_setup import adapters_off
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.scoring import autocast, token_logps
from rllib_srl.learner.sharding import shard
from rllib_srl.losses.kl import KL_REWARDS
from rllib_srl.storage.checkpoints import MANIFEST
from rllib_srl.storage.weight_file import WEIGHTS, read_weights

START = "start"  # in place of a model: the policy as it starts to train


class ReferenceClock:
    """Schedule of the reference's updates, kept by the driver. Invariant: `get_state` holds its whole state."""

    def __init__(self, kind: str, every: int, rate: float) -> None:
        """Set rule `kind` ("base", "ema" or "last_good"), the period in iterations and the rate of "ema"."""
        self._kind, self._every, self._rate = kind, every, rate
        self._sum, self._num, self._best = 0.0, 0, -np.inf

    def rate_at(self, now: int, rewards: Iterable[float]) -> float:
        """Return the policy's share in the next reference, in [0, 1]; 0 keeps the reference. Call every iteration.

        Args:
            now: training iteration.
            rewards: rewards of this iteration's episodes.
        """
        values = list(rewards)
        self._sum, self._num = self._sum + float(np.sum(values)), self._num + len(values)
        if self._kind == "base" or now % self._every:
            return 0.0
        if self._kind == "ema":
            return self._rate
        mean = self._sum / self._num if self._num else -np.inf
        self._sum, self._num = 0.0, 0
        is_good = mean >= self._best and mean > -np.inf
        self._best = max(self._best, mean)
        return 1.0 if is_good else 0.0

    def get_state(self) -> dict[str, float]:
        """Return the reward sum, the count and the best mean."""
        return {"sum": self._sum, "num": self._num, "best": self._best}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._sum, self._num, self._best = state["sum"], state["num"], state["best"]


class Root(torch.nn.Module):
    """A model whose forward pass returns log-probs: with FSDP2 only a root's own forward pass gathers weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Set the Hugging Face model."""
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps`."""
        return token_logps(self.model, batch)


class Reference:
    """The reference policy: a model of its own, or the policy with its adapters off.

    Invariant: equal on all learners, or sharded over them as the policy is; it never gets a gradient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        compute_dtype: str,
        gather_dtype: str | None = None,
    ) -> None:
        """Set the model.

        Args:
            model: whole; with `gather_dtype` it is sharded in place.
            device: of the model.
            compute_dtype: "float32" or "bfloat16".
            gather_dtype: of `shard`; the policy's, or the two would differ before the first update. None: keep the
                model whole on each learner.
        """
        self.model = model
        self._device, self._compute_dtype = device, compute_dtype
        self._root: Any = Root(model)  # FSDP2 adds methods
        self._is_sharded = gather_dtype is not None
        if gather_dtype is not None:
            shard(self._root, model, device, gather_dtype)

    @classmethod
    def of(
        cls,
        policy: CausalLMModule,
        device: torch.device,
        compute_dtype: str,
        gather_dtype: str | None = None,
        source: str = START,
    ) -> Reference:
        """Return the reference of a policy that starts to train; see `__init__`.

        Args:
            policy: starts to train.
            source: another policy in its place, a model or a checkpoint of the policy's model.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        if source == START and has_adapters(policy.model):
            return cls(policy.model, device, compute_dtype)
        # From the model's own files, so that a restored run keeps the reference of the first run.
        is_own = source == START or is_checkpoint(source)
        module = CausalLMModule(model_config=policy.model_config if is_own else {"model": source})
        if is_checkpoint(source):
            module.set_state(read_weights(_weights_in(Path(source))))
        model = module.model.requires_grad_(False)
        return cls(model.to(device), device, compute_dtype, gather_dtype)

    def logp(self, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
        """Return the log-probs of the target tokens of a micro-batch, fp32 [N], nats; see `scores`."""
        return self.scores(batch)["logp"]

    def scores(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps`, without gradient.

        A collective if the reference is sharded: all learners must run equally many.
        """
        with torch.no_grad(), autocast(self._device, self._compute_dtype), adapters_off(self.model):
            out: dict[str, torch.Tensor] = self._root(batch)
        if self._is_sharded:
            self._root.reshard()  # FSDP2 keeps gathered weights until a backward pass
        return out

    def episode_kl(
        self, batches: Iterable[MicroBatch[torch.Tensor]], num_episodes: int, estimator: str
    ) -> np.ndarray:
        """Return an estimate of the KL to the reference of each episode, summed over its tokens, nats, float64 [B].

        The policy is the one that wrote the tokens: k1 = behaviour_logp - ref_logp.

        Args:
            estimator: a name of `KL_REWARDS`.
            batches: micro-batches as for `token_logps`, with `behaviour_logp` and `episode` [N].
            num_episodes: B; `episode` is in [0, B).
        """
        sums_B = np.zeros(num_episodes)
        for batch in batches:
            kl_N = KL_REWARDS[estimator](batch["behaviour_logp"], self.logp(batch))
            np.add.at(sums_B, batch["episode"].cpu().numpy(), kl_N.float().cpu().numpy())
        return sums_B

    def follow(self, policy: torch.nn.Module, rate: float) -> None:
        """Set the weights to rate * policy + (1 - rate) * reference, parameter by parameter.

        Args:
            policy: policy in training, of the reference's architecture.
            rate: share of the policy, in [0, 1].

        Raises:
            ValueError: the two models differ in parameter names.
        """
        ours, theirs = dict(self.model.named_parameters()), dict(policy.named_parameters())
        if set(ours) != set(theirs):
            names = ", ".join(sorted(set(ours) ^ set(theirs))[:4])
            raise ValueError(f"reference and policy differ in parameters: {names}")
        with torch.no_grad():
            for name, parameter in ours.items():
                parameter.lerp_(theirs[name].to(parameter), rate)

    def get_state(self) -> dict[str, np.ndarray]:
        """Return a copy of the weights by name, fp32."""
        return {name: p.detach().float().cpu().numpy().copy() for name, p in self.model.named_parameters()}

    def set_state(self, weights: Mapping[str, np.ndarray]) -> None:
        """Load what `get_state` returned."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.tensor(np.asarray(weights[name])))


def is_checkpoint(source: str) -> bool:
    """Return whether a frozen policy is a checkpoint of a run."""
    return (Path(source) / MANIFEST).is_file()


def checkpoint_fault(path: Path) -> str:
    """Return why the weights of a checkpoint cannot be a frozen policy, "" if they can; no weight is read."""
    from safetensors import safe_open

    file = _weights_in(path)
    if file.is_file():
        with safe_open(file, "np") as weights:
            has_adapters_only = all("lora_" in name for name in weights.keys())  # noqa: SIM118
        if not has_adapters_only:
            return ""
    return "expected a checkpoint with the weights of the whole model in one file; srl export writes a model of any"


def _weights_in(checkpoint: Path) -> Path:
    return next(checkpoint.glob(f"**/{WEIGHTS}"), checkpoint / WEIGHTS)
