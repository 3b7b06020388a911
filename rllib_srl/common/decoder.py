"""Decode token ids with the tokenizer in a model's directory, without transformers and torch where possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any


def _without_transformers(model_dir: Path) -> Any:
    """Return the tokenizer loaded by the library `tokenizers`, or None if that library would ignore some tokens.

    Importing transformers, which imports torch, takes longer than the rest of a replay buffer's start.
    """
    saved, configured = model_dir / "tokenizer.json", model_dir / "tokenizer_config.json"
    if not saved.is_file() or not configured.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(saved))
    config = json.loads(configured.read_text(encoding="utf-8"))
    named = [value for name, value in config.items() if name.endswith("_token")]
    for several in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(several) or []
        named += listed.values() if isinstance(listed, dict) else listed
    texts = {text["content"] if isinstance(text, dict) else text for text in named} - {None, True, False}
    if any(tokenizer.token_to_id(text) is None for text in texts):
        return None
    added = config.get("added_tokens_decoder") or {}
    is_whole = all(tokenizer.id_to_token(int(number)) == token["content"] for number, token in added.items())
    return tokenizer if is_whole else None


def decoder_of(model_dir: Path) -> Callable[[Sequence[int]], str]:
    """Return the decoding function of a model's tokenizer; it keeps special tokens."""
    if (alone := _without_transformers(model_dir)) is not None:
        return partial(alone.decode, skip_special_tokens=False)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:  # the wrapper takes four times as long
        return partial(fast.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
