"""Sizes of causal language models with Llama's layers, and what follows from them; nothing here needs Ray."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model with Llama's layers.

    Invariant: `num_parameters` counts tied weights once.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    is_tied: bool
    head_dim: int

    @staticmethod
    def of(directory: Path) -> ModelShape | None:
        """Return the shape that a model's config.json describes, None if it lacks a size that is needed."""
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = config.get("text_config") or config
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if any(not isinstance(config.get(name), int) for name in names) or "num_experts" in config:
            return None
        layers, hidden, inner, heads, vocab = (config[name] for name in names)
        kv_heads = config.get("num_key_value_heads") or heads
        is_tied, head_dim = bool(config.get("tie_word_embeddings", False)), config.get("head_dim") or hidden // heads
        return ModelShape(layers, hidden, inner, heads, kv_heads, vocab, is_tied, head_dim)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        tables = (1 if self.is_tied else 2) * self.vocab * self.hidden
        return tables + self.num_layers * self.layer_parameters + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters on all linear layers of the decoder layers."""
        queries, keys = self.head_dim * self.num_heads, self.head_dim * self.num_kv_heads
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return self.num_layers * rank * (attention + 3 * (self.hidden + self.inner))

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token in bfloat16."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def layer_activation_bytes(self) -> float:
        """Bytes per token that autograd keeps for one decoder layer in bfloat16: residuals and norms are fp32."""
        attention = 2 * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 4 * 2 * self.inner + 26.0 * self.hidden


SHAPES = {
    "0.1B": ModelShape(30, 576, 1536, 9, 3, 49152, True, 64),  # SmolLM2-135M
    "0.5B": ModelShape(24, 896, 4864, 14, 2, 151936, True, 64),  # Qwen2.5-0.5B
    "1.5B": ModelShape(28, 1536, 8960, 12, 2, 151936, True, 128),  # Qwen2.5-1.5B
    "3B": ModelShape(36, 2048, 11008, 16, 2, 151936, True, 128),  # Qwen2.5-3B
    "8B": ModelShape(32, 4096, 14336, 32, 8, 128256, False, 128),  # Llama-3.1-8B
}
