"""Write a Hugging Face directory of a model of a given size, with the tiny model's tokenizer and random weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from rllib_srl.algorithm.model_shape import ModelShape
from rllib_srl.engine.models import TINY, local_model


def write_random_model(shape: ModelShape, directory: Path, has_weights: bool) -> Path:
    """Write the directory and return it.

    Args:
        shape: of the model; its vocabulary is at least the tiny tokenizer's.
        directory: created.
        has_weights: False writes a file without weights, for an engine that makes its own.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    tokenizer = AutoTokenizer.from_pretrained(local_model(TINY))
    if len(tokenizer) > shape.vocab:
        raise ValueError(f"vocab = {shape.vocab} of {asdict(shape)}; expected at least {len(tokenizer)}")
    config = LlamaConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.is_tied, max_position_embeddings=32768,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    if has_weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
        save_file({}, directory / "model.safetensors")  # an engine refuses a directory without
    tokenizer.save_pretrained(directory)
    return directory
