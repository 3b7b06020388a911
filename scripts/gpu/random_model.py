"""Models of random weights: their configuration, and a Hugging Face directory with the tiny model's tokenizer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.engine.models import TINY, local_model

SHORT = ModelShape(2, 64, 128, 4, 2, 4096, True, 16)  # of --short


def llama_config(shape: ModelShape, **others: Any) -> Any:
    """Return the configuration of a Llama of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.is_tied, **others,
    )  # fmt: skip


def write_random_model(shape: ModelShape, directory: Path, has_weights: bool) -> Path:
    """Write the directory and return it.

    Args:
        shape: of the model; its vocabulary is at least the tiny tokenizer's.
        directory: created.
        has_weights: False writes a file without weights, for an engine that makes its own.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(local_model(TINY))
    if len(tokenizer) > shape.vocab:
        raise ValueError(f"vocab = {shape.vocab} of {asdict(shape)}; expected at least {len(tokenizer)}")
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = llama_config(shape, max_position_embeddings=32768, architectures=["LlamaForCausalLM"], **ids)
    directory.mkdir(parents=True, exist_ok=True)
    if has_weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
        save_file({}, directory / "model.safetensors")  # an engine refuses a directory without
    tokenizer.save_pretrained(directory)
    return directory
