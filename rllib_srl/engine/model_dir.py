"""Check a local Hugging Face model directory and read its config, tokenizer, end tokens and parameter shapes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rllib_srl.engine.models import check_model_dir


def checked_dir(model_dir: str | Path, context_length: int) -> Path:
    """Return a model's directory.

    Raises:
        ValueError: it is incomplete, or the model has fewer positions than `context_length`.
    """
    path = check_model_dir(Path(model_dir))
    longest = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
    if longest is not None and context_length > longest:
        raise ValueError(
            f"context_length = {context_length}; expected at most {longest}, the max_position_embeddings of {path.name}"
        )
    return path


def load_config(model_dir: Path) -> Any:
    """Return the model's configuration, without running code from the directory."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_dir, local_files_only=True)


def load_tokenizer(model_dir: Path) -> Any:
    """Return the tokenizer, without running code from the directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def vocabulary_digest(model_dir: Path) -> str:
    """Return a digest of the tokens of a tokenizer and their ids."""
    tokens = sorted(load_tokenizer(model_dir).get_vocab().items())
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=8).hexdigest()


def end_token_ids(model_dir: Path, tokenizer: Any) -> frozenset[int]:
    """Return the model's own end tokens: the tokenizer's and those of its generation configuration, as vLLM does.

    Without a generation configuration the model's configuration counts. The tokens that close a turn in a chat template
    come with each request (`Sampling.end_ids`).
    """
    from transformers import GenerationConfig

    if (model_dir / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
    else:
        listed = GenerationConfig.from_model_config(load_config(model_dir)).eos_token_id
    token_ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    return frozenset(token for token in token_ids if token is not None)


def expected_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every distinct parameter of the model; a tied head has no separate entry.

    The names are those of `named_parameters()` of the Hugging Face model, as a learner packs them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

