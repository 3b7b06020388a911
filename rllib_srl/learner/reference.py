"""Frozen policies and their log-probs: the reference, from which the KL is measured, and teachers."""

from __future__ import annotations

from collections.abc import Iterable
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
