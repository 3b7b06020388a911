"""Frozen policies and their log-probs: the reference, from which the KL is measured, and teachers.

    weights        the matrices of decoder layers in the compute dtype, as autocast rounds them before each product:
                   scores are those of fp32 weights, bit for bit; embedding, norms and head in fp32
    is_sharded     over the learners, as the policy is
    is_offloaded   in host memory; on the device while they score, with FSDP2 one layer at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.func import functional_call

from rllib_srl.batch.layout import MicroBatch
from rllib_srl.engine.adapters import has_adapters
from rllib_srl.learner.model_setup import adapters_off
from rllib_srl.learner.rl_module import CausalLMModule
from rllib_srl.learner.scoring import autocast, token_logps
from rllib_srl.learner.sharding import decoder_layers, norms_of, shard
from rllib_srl.losses.kl import KL_REWARDS
from rllib_srl.storage.checkpoints import MANIFEST
from rllib_srl.storage.weight_file import WEIGHTS, read_weights

START = "start"  # instead of a model: the policy before training


class Root(torch.nn.Module):
    """A model whose forward pass returns log-probs: with FSDP2 only a root's own forward pass gathers weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Set the Hugging Face model."""
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps`."""
        return token_logps(self.model, batch)


class Home(NamedTuple):
    """How frozen policies are held; see the module."""

    device: torch.device  # on which they score
    compute_dtype: str  # "float32" or "bfloat16"
    is_sharded: bool = False
    is_offloaded: bool = False


class FrozenPolicy:
    """A policy that scores tokens: a separate model, or the policy in training with its adapters off.

    Invariant: equal on all learners, or sharded over them; it never gets a gradient.
    """

    def __init__(self, model: torch.nn.Module, home: Home) -> None:
        """Set the model, which is whole and, if it is offloaded, in host memory; it is sharded in place."""
        self.model, self._home = model, home
        self._copies: dict[str, torch.Tensor] = {}  # copies of offloaded weights, on the device
        self._root: Any = Root(model)  # FSDP2 adds methods
        if home.is_sharded:
            shard(self._root, model, home.device, home.compute_dtype, home.is_offloaded)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Copy offloaded weights to the device for the block."""
        if self._home.is_offloaded and not self._home.is_sharded:
            named = [*self._root.named_parameters(), *self._root.named_buffers()]
            self._copies = {name: tensor.to(self._home.device) for name, tensor in named}
        try:
            yield
        finally:
            self._copies = {}

    def logp(self, batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
        """Return the log-probs of the target tokens of a micro-batch, fp32 [N], nats; see `scores`."""
        return self.scores(batch)["logp"]

    def scores(self, batch: MicroBatch[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the output of `token_logps`, without gradient.

        A collective if the policy is sharded: all learners must run equally many. Call it inside `on_device`.
        """
        with torch.no_grad(), autocast(self._home.device, self._home.compute_dtype), adapters_off(self.model):
            out: dict[str, torch.Tensor] = (
                functional_call(self._root, self._copies, (batch,)) if self._copies else self._root(batch)
            )
        if self._home.is_sharded:
            self._root.reshard()  # FSDP2 keeps gathered weights until a backward pass
        return out

    def episode_kl(
        self, batches: Iterable[MicroBatch[torch.Tensor]], num_episodes: int, estimator: str
    ) -> np.ndarray:
        """Return an estimate of the KL to the reference of each episode, summed over its tokens, nats, float64 [B].

        The policy is the one that wrote the tokens: k1 = behaviour_logp - ref_logp.
        """
        sums_B = np.zeros(num_episodes)
        for batch in batches:
            kl_N = KL_REWARDS[estimator](batch["behaviour_logp"], self.logp(batch))
            np.add.at(sums_B, batch["episode"].cpu().numpy(), kl_N.float().cpu().numpy())
        return sums_B


class FrozenPolicies:
    """The frozen policies of one learner. Invariant: each is loaded once."""

    def __init__(self, policy: CausalLMModule, home: Home) -> None:
        """Start with none loaded; `policy` is the policy before training."""
        self._policy, self._home = policy, home
        self.loaded: dict[str, FrozenPolicy] = {}  # by source

    def load(self, source: str = START) -> FrozenPolicy:
        """Return a frozen policy: the starting policy, a model, or a checkpoint of the policy's model.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        if source not in self.loaded:
            self.loaded[source] = self._made(source)
        return self.loaded[source]

    def _made(self, source: str) -> FrozenPolicy:
        policy, home = self._policy, self._home
        if source == START and has_adapters(policy.model):
            return FrozenPolicy(policy.model, Home(home.device, home.compute_dtype))
        # From the model's own files, so that a restored run keeps the reference of the first run.
        is_own = source == START or is_checkpoint(source)
        module = CausalLMModule(model_config=policy.model_config if is_own else {"model": source})
        if is_checkpoint(source):
            module.set_state(read_weights(_weights_in(Path(source))))
        model, num_tokens = module.model, len(policy.model.get_input_embeddings().weight)
        if len(model.get_input_embeddings().weight) > num_tokens:
            # Both have the same tokenizer: logits beyond the policy's tokens are padding, which is never sampled.
            model.resize_token_embeddings(num_tokens)
        model.requires_grad_(False)
        if home.compute_dtype == "bfloat16":
            round_matrices(model)
        if not home.is_sharded and not home.is_offloaded:
            model = model.to(home.device)
        return FrozenPolicy(model, home)


def round_matrices(model: Any) -> None:
    """Hold the weights of decoder layers in bfloat16, in place, except those of norms."""
    for layer in decoder_layers(model):
        kept = {id(weight) for norm in norms_of(layer) for weight in norm.parameters()}
        for weight in layer.parameters():
            if id(weight) not in kept:
                weight.data = weight.data.to(torch.bfloat16)


def is_checkpoint(source: str) -> bool:
    """Return whether a frozen policy is a checkpoint of a run."""
    return (Path(source) / MANIFEST).is_file()


def checkpoint_error(path: Path) -> str:
    """Return why the weights of a checkpoint cannot be a frozen policy, "" if they can; no weight is read."""
    from safetensors import safe_open

    file = _weights_in(path)
    if file.is_file():
        with safe_open(file, "np") as weights:
            has_adapters_only = all("lora_" in name for name in weights.keys())  # noqa: SIM118
        if not has_adapters_only:
            return ""
    return "expected a checkpoint with all weights of the model in one file, or a model: srl export writes one"


def _weights_in(checkpoint: Path) -> Path:
    return next(checkpoint.glob(f"**/{WEIGHTS}"), checkpoint / WEIGHTS)
