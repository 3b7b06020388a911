"""Keep a layer's activations on general texts on the side of their thresholds that the starting model had them on.

    build       activations of the starting model on all texts  ->  bounds and labels of every entry
    an update   the next few texts: forward, margin beyond the bounds, backward into the same gradient

Every learner computes the same texts and contributes its share of the gradient, so that any number of learners and
shards gives that of one. The texts are cut to equal parts in the order of the file, one part per optimiser step.

Differences from the released code of GeRe (arXiv 2508.04676):
1. The texts are not trained on by cross-entropy: the policy is trained by reward alone.
2. The layer is a decoder layer's output; the released code takes the last one after the final norm.
3. The weight is a constant; there it may follow the cross-entropy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, bare_episode, micro_batch
from rllib_srl.engine.canary import GENERAL_TEXTS
from rllib_srl.learner.scoring import Scorer
from rllib_srl.losses.regulariser_settings import PACKAGED, GeRe
from rllib_srl.losses.regularisers import Thresholds


def read_texts(path: str, num: int) -> list[str]:
    """Return the first texts of a file: the lines of a text file that are not blank, or "text" of each row of JSON.

    Args:
        path: a file, whose name ends in .jsonl if it holds JSON; `PACKAGED`: the six general texts of the package.
        num: maximum number of texts.

    Raises:
        ValueError: the file cannot be read, or holds no text; the message is what the user gave and what is expected.
    """
    if path == PACKAGED:
        return list(GENERAL_TEXTS[:num])
    try:
        lines = [line for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a file of texts, or {PACKAGED!r}: {error}") from error
    if str(path).endswith(".jsonl"):
        lines = [_text_of(line, at) for at, line in enumerate(lines[:num])]
    if not lines:
        raise ValueError("expected a file with at least one text; it is empty")
    return lines[:num]


def _text_of(line: str, at: int) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected JSON in row {at}: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str) or not row["text"].strip():
        raise ValueError(f'expected {{"text": ...}} in row {at}')
    return str(row["text"])


class AnchorTexts:
    """Margin of one layer's activations on general texts. Invariant: it is 0 for the weights of the model's files."""

    def __init__(
        self, settings: GeRe, model: Any, scorer: Scorer, tokenizer: Any, num_shards: int, is_sharded: bool
    ) -> None:
        """Run the starting model over all texts; call it before a checkpoint is loaded, and on every learner.

        Args:
            settings: of the regulariser.
            model: the Hugging Face model in training, which still has the weights of its files.
            scorer: of the policy.
            tokenizer: of the model.
            num_shards: number of shards whose gradients are summed.
            is_sharded: whether FSDP2 shards the weights.

        Raises:
            ValueError: a text has fewer than two tokens.
        """
        self._layer = model.base_model.layers[settings.layer]
        self._scorer, self._is_sharded = scorer, is_sharded
        self._share = settings.coeff / num_shards
        streams = _streams(read_texts(settings.path, settings.num_texts), tokenizer, settings.max_tokens)
        parts = [streams[at : at + settings.texts_per_step] for at in range(0, len(streams), settings.texts_per_step)]
        episodes = [[_unmasked(*one) for one in enumerate(part)] for part in parts]
        self._batches = [scorer.tensors(micro_batch(part, share_prefixes=False)) for part in episodes]
        with torch.no_grad():
            hidden = [self._activations(batch)[0] for batch in self._batches]
        self._bounds = Thresholds(*(one.float() for one in Thresholds.of(torch.cat(hidden).double())))
        self._labels = [self._bounds.labels(one).cpu() for one in hidden]
        self._num_steps = 0

    def backward(self) -> float:
        """Add this learner's share of the gradient on the next texts to the parameters; return its share of the margin.

        The shares of all learners add up to `coeff` times the margin.
        """
        at = self._num_steps % len(self._batches)
        self._num_steps += 1
        hidden_ND, logp_N = self._activations(self._batches[at])
        margin = self._share * self._bounds.margin(hidden_ND, self._labels[at].to(hidden_ND.device))
        # FSDP2 reduces gradients of all modules that took part; the head and later layers take part with 0.
        (margin + 0.0 * logp_N.sum() if self._is_sharded else margin).backward()
        return float(margin.detach())

    def get_state(self) -> dict[str, int]:
        """Return the number of optimiser steps so far, which fixes the next texts."""
        return {"num_steps": self._num_steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._num_steps = int(state["num_steps"])

    def _activations(self, batch: MicroBatch[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output at all tokens, fp32 [N, D], padding left out, and log-probs of some tokens."""
        with _output_of(self._layer) as found:
            logp_N = self._scorer.forward(batch)["logp"]
        return found[0][batch["attention_mask"].bool()].float(), logp_N


def _streams(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> list[list[int]]:
    streams = [list(tokenizer.encode(text, add_special_tokens=False))[:max_tokens] for text in texts]
    if short := [text for text, stream in zip(texts, streams, strict=True) if len(stream) < 2]:
        raise ValueError(f"regularisers.gere.path: the text {short[0]!r} has fewer than two tokens; expected more")
    return streams


def _unmasked(index: int, stream: Sequence[int]) -> Episode:
    """Return a text as an episode with one loss token: the head is not needed, and its cost is by loss tokens."""
    return replace(bare_episode(stream, index), loss_mask_T=np.arange(len(stream)) == len(stream) - 1)


@contextmanager
def _output_of(layer: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield a list that gets the hidden states of each forward pass of a decoder layer inside the block."""
    found: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handle = layer.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
