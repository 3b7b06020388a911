"""GeRe: keep a layer's activations on general texts on the side of their thresholds where the starting model had them.

    regularisers={"contrib.gere": {"coeff": 0.01, "layer": -1}}

    start       activations of the starting model on all texts; per dimension bounds = mean -+ one standard deviation
    an update   the next few texts: mean distance of activations from their old side, backward into the same gradient

Every learner computes the same texts and contributes its share of the gradient, so that any number of learners and
shards gives that of one. The texts are cut to equal parts in the order of the file, one part per optimiser step.

Differences from the released code: the texts are not trained on by cross-entropy, the layer is a decoder layer's output
before the final norm, and the weight is constant.

Source: GeRe, arXiv 2508.04676 and its released code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, bare_episode, micro_batch
from rllib_srl.common.setting_checks import is_integer
from rllib_srl.engine.canary import GENERAL_TEXTS
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.learner.regularisers.rule import AT_LEAST_1, COEFF, Range, Regulariser, Training, bounded

PACKAGED = "packaged"  # stands for the package's own texts
LOWER, BETWEEN, UPPER = -1, 0, 1  # labels of activations


def read_texts(path: str, num: int) -> list[str]:
    """Return the first texts of a file: the lines of a text file that are not blank, or "text" of each row of JSON.

    Args:
        path: a file, whose name ends in .jsonl if it holds JSON; `PACKAGED`: the six general texts of the package.
        num: maximum number of texts.

    Raises:
        ValueError: the file cannot be read, or holds no text.
    """
    if path == PACKAGED:
        return list(GENERAL_TEXTS[:num])
    try:
        lines = [line for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
        if str(path).endswith(".jsonl"):
            lines = [str(json.loads(line)["text"]) for line in lines[:num]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rows = f"a file of texts or of JSON rows with 'text', or {PACKAGED!r}"
        raise ValueError(f"expected {rows}: {type(error).__name__}: {error}") from error
    if not lines:
        raise ValueError("expected a file with at least one text; it is empty")
    return lines[:num]


class Thresholds(NamedTuple):
    """Bounds [D] of the activations of a layer."""

    low_D: torch.Tensor
    high_D: torch.Tensor

    @classmethod
    def of(cls, hidden_ND: torch.Tensor) -> Thresholds:
        """Return mean -+ one standard deviation over all tokens, dimension by dimension."""
        mean_D, std_D = hidden_ND.mean(0), hidden_ND.std(0, correction=0)
        return cls(mean_D - std_D, mean_D + std_D)

    def labels(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return LOWER at or below the lower bound, UPPER at or above the upper one, else BETWEEN; int8 [N, D]."""
        return (hidden_ND >= self.high_D).to(torch.int8) - (hidden_ND <= self.low_D).to(torch.int8)

    def margin(self, hidden_ND: torch.Tensor, labels_ND: torch.Tensor) -> torch.Tensor:
        """Return the mean distance of activations from their old side, over the entries that are not 0.

            LOWER    relu(h - low)
            BETWEEN  relu(h - high) + relu(low - h)
            UPPER    relu(high - h)
        """
        above_low, below_high = torch.relu(hidden_ND - self.low_D), torch.relu(self.high_D - hidden_ND)
        outside = torch.relu(hidden_ND - self.high_D) + torch.relu(self.low_D - hidden_ND)
        entries = torch.where(labels_ND == LOWER, above_low, torch.where(labels_ND == UPPER, below_high, outside))
        return entries.sum() / torch.count_nonzero(entries).clamp(min=1)


@dataclass
class GeRe(Regulariser):
    """Margin of one layer's activations on general texts. Invariant: it is 0 for the weights of the model's files."""

    coeff: float = bounded(0.01, COEFF)
    path: str = bounded(PACKAGED, Range(lambda x: isinstance(x, str) and bool(x), "the path of a file of texts"))
    layer: int = bounded(-1, Range(lambda x: is_integer(x, -(2**31)), "an integer, the number of a decoder layer"))
    num_texts: int = bounded(64, AT_LEAST_1)  # of the file, the first ones
    texts_per_step: int = bounded(8, AT_LEAST_1)
    max_tokens: int = bounded(128, Range(lambda x: is_integer(x, 2), "an integer of at least 2"))  # of a text

    def faults(self, name: str, config: Any) -> Iterator[str]:
        """Yield errors of the file and of settings that do not fit."""
        try:
            read_texts(self.path, self.num_texts)
        except ValueError as error:
            yield f"{name}.path = {self.path!r}; {error}"
        if is_integer(config.max_episode_tokens, 8) and self.max_tokens > config.max_episode_tokens:
            most = config.max_episode_tokens
            yield f"{name}.max_tokens = {self.max_tokens}; expected at most max_episode_tokens = {most}"
        if config.sequence_parallel > 1:
            yield f"{name} with fsdp.sequence_parallel; expected 1: its texts are padded, and only tries are split"

    def faults_of_model(self, name: str, num_layers: int | None, num_tokens: int | None) -> Iterator[str]:
        """Yield an error if the model does not have the layer."""
        if num_layers is not None and not -num_layers <= self.layer < num_layers:
            yield f"{name}.layer = {self.layer}; expected {-num_layers} to {num_layers - 1}, a layer of the model"

    def start(self, training: Training) -> None:
        """Run the starting model over all texts.

        Raises:
            ValueError: a text has fewer than two tokens.
        """
        super().start(training)
        model, tokenizer = training.policy.model, load_tokenizer(local_model(training.policy.model_config["model"]))
        self._decoder_layer = model.base_model.layers[self.layer]
        texts = read_texts(self.path, self.num_texts)
        streams = [list(tokenizer.encode(text, add_special_tokens=False))[: self.max_tokens] for text in texts]
        if short := [text for text, stream in zip(texts, streams, strict=True) if len(stream) < 2]:
            raise ValueError(f"path = {self.path!r}: the text {short[0]!r} has fewer than two tokens; expected more")
        self._batches = []
        for at in range(0, len(streams), self.texts_per_step):
            part = [_episode(index, stream) for index, stream in enumerate(streams[at : at + self.texts_per_step])]
            self._batches.append(training.scorer.tensors(micro_batch(part, share_prefixes=False)))
        with torch.no_grad():
            hidden = [self._activations(batch)[0] for batch in self._batches]
        if training.is_sharded:
            training.policy.reshard()  # FSDP2 keeps gathered weights until a backward pass
        self._bounds = Thresholds(*(one.float() for one in Thresholds.of(torch.cat(hidden).double())))
        self._labels = [self._bounds.labels(one).cpu() for one in hidden]
        self._num_steps = 0

    def backward(self) -> float:
        """Add this learner's share of the gradient on the next texts; return its share of coeff times the margin."""
        at = self._num_steps % len(self._batches)
        self._num_steps += 1
        hidden_ND, logp_N = self._activations(self._batches[at])
        margin = self._bounds.margin(hidden_ND, self._labels[at].to(hidden_ND.device))
        value = self.coeff / self.training.num_shards * margin
        # FSDP2 reduces gradients of all modules that took part; the head and later layers take part with 0.
        (value + 0.0 * logp_N.sum() if self.training.is_sharded else value).backward()
        return float(value.detach())

    def get_state(self) -> dict[str, Any]:
        """Return the number of optimiser steps so far, which fixes the next texts."""
        return {"num_steps": self._num_steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self._num_steps = int(state["num_steps"])

    def _activations(self, batch: MicroBatch[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output at all tokens, fp32 [N, D], padding left out, and log-probs of some tokens."""
        with _output_of(self._decoder_layer) as found:
            logp_N = self.training.scorer.forward(batch)["logp"]
        return found[0][batch["attention_mask"].bool()].float(), logp_N


def _episode(index: int, stream: Sequence[int]) -> Episode:
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


gere = GeRe
