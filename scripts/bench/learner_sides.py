"""The two sides of the learner's benchmark on the same episodes: a padded Hugging Face step, and our prefix tries.

    padded   transformers' own model and "sdpa" attention, rows of one micro-batch padded to their longest, the head on
             completion tokens only, log-softmax of whole logits, as plain trainers do
    trie     `micro_batches` and `token_logps`, as in the learner

Both compute -sum advantage * logp / tokens in the same number format and split by the same budget of tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from rllib_srl.batch.layout import Episode, MicroBatch, micro_batches, trie_layout
from rllib_srl.engine.models import local_model
from rllib_srl.learner.scoring import as_tensors, load_causal_lm, token_logps

SHAPES = ("fewshot", "long")
SIDES = ("padded", "trie")


def episodes_of_shape(shape: str, model: str, num_prompts: int | None = None) -> list[list[Episode]]:
    """Return the episodes of a shape, in parts that are timed one by one.

    Args:
        shape: "fewshot" (the quick-start's 16 prompts x 8 answers, which share a few-shot text: one part) or "long"
            (256 random tokens of prompt and 256 of answer, 8 x 8: one part per prompt).
        model: whose tokenizer and vocabulary are used.
        num_prompts: in place of 16 or 8.
    """
    rng = np.random.default_rng(0)
    if shape == "long":
        prompts = [rng.integers(0, 49_000, 256).tolist() for _ in range(num_prompts or 8)]
        parts = [[(prompt, rng.integers(0, 49_000, 256).tolist()) for _ in range(8)] for prompt in prompts]
    else:
        parts = [_fewshot(model, num_prompts or 16, rng)]
    index = itertools.count()
    return [[_episode(prompt, answer, next(index), rng) for prompt, answer in part] for part in parts]


def _fewshot(model: str, num_prompts: int, rng: np.random.Generator) -> list[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    from rllib_srl.cli.quickstart import SETTINGS
    from rllib_srl.envs.math.compare import Compare

    tokenizer = AutoTokenizer.from_pretrained(local_model(model))
    world, pairs = Compare(SETTINGS["env_config"]), []
    for prompt_id in itertools.islice(world.prompt_ids("train", SETTINGS["seed"]), num_prompts):
        text, _ = world.reset(options={"prompt_id": prompt_id})
        numbers = prompt_id.split(", ")  # the policy names one of them nearly always
        answers = [f" {rng.choice(numbers)}\n" for _ in range(SETTINGS["group_size"])]
        pairs += [(tokenizer(text)["input_ids"], tokenizer(answer)["input_ids"]) for answer in answers]
    return pairs


def _episode(prompt: list[int], answer: list[int], index: int, rng: np.random.Generator) -> Episode:
    ids = np.array(prompt + answer, np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    return Episode(ids, mask, np.where(mask, -1.0, 0.0).astype(np.float32), float(rng.normal()), index)


@dataclass
class Side:
    """One side: a model, and how it computes a part's gradients. Invariant: both sides start from the same weights."""

    name: str
    model: Any
    dtype: str
    budget: int  # tokens of one forward and backward pass

    @classmethod
    def load(cls, name: str, model: str, dtype: str, budget: int) -> Side:
        """Load the model for a side."""
        if name == "trie":
            return cls(name, load_causal_lm(model), dtype, budget)
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(
            local_model(model), dtype=torch.float32, attn_implementation="sdpa"
        )
        return cls(name, loaded.eval(), dtype, budget)

    def passes(self, part: Sequence[Episode]) -> list[MicroBatch[np.ndarray]]:
        """Return the forward and backward passes of a part."""
        return micro_batches(part, self.budget, self.name == "trie")

    def gradients(self, part: Sequence[Episode], at_most: int | None = None) -> float:
        """Add the gradients of a part to the model's and return the seconds it took, layout included.

        Args:
            part: episodes.
            at_most: run at most this many passes.
        """
        start = time.perf_counter()
        num_tokens = sum(int(one.loss_mask_T.sum()) for one in part)
        for one in self.passes(part)[:at_most]:
            with self._autocast():
                logp_N = self._logps(one)
            advantage_N = torch.from_numpy(one["advantage"])
            (-(advantage_N * logp_N).sum() / num_tokens).backward()
        return time.perf_counter() - start

    def _logps(self, one: MicroBatch[np.ndarray]) -> torch.Tensor:
        batch = as_tensors(one, torch.device("cpu"), 1.0)
        if self.name == "trie":
            return token_logps(self.model, batch)["logp"]
        hidden = self.model.model(
            input_ids=batch["token_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden.flatten(0, 1)[batch["predictor"]]).float()
        logp_N: torch.Tensor = logits.log_softmax(-1).gather(1, batch["target"][:, None])[:, 0]
        return logp_N

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.dtype == "bfloat16" else nullcontext()


@dataclass(frozen=True)
class Count:
    """The work of a part: tokens, rows of the head, and pairs of tokens that attend.

    Invariant: counts unique tokens only; nothing that is computed twice is counted twice.
    """

    num_tokens: int
    num_rows: int
    num_pairs: int

    @classmethod
    def of(cls, part: Sequence[Episode]) -> Count:
        """Count a part laid out as one trie, whatever the budget."""
        layout = trie_layout([one.token_ids_T for one in part])
        rows = {int(path[at - 1]) for one, path in zip(part, layout.paths) for at in np.flatnonzero(one.loss_mask_T)}
        return cls(layout.token_ids_RT.size, len(rows), int((layout.position_ids_RT + 1).sum()))

    def flops(self, config: Any) -> float:
        """Return the floating-point operations of forward and backward pass: three matmuls for each of the forward."""
        shapes = [shape for shape, times in layer_shapes(config) for _ in range(times)]
        body = 2 * self.num_tokens * config.num_hidden_layers * sum(a * b for a, b in shapes)
        head = 2 * self.num_rows * config.hidden_size * config.vocab_size
        heads = config.num_attention_heads * _head_dim(config) * config.num_hidden_layers
        flops: float = 3.0 * (body + head + 4 * self.num_pairs * heads)
        return flops


def layer_shapes(config: Any) -> list[tuple[tuple[int, int], int]]:
    """Return the matrices of a decoder layer, inputs by outputs, and how often each occurs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * _head_dim(config) for n in (config.num_attention_heads, config.num_key_value_heads))
    return [((hidden, queries), 1), ((queries, hidden), 1), ((hidden, keys), 2), ((hidden, inner), 2),
            ((inner, hidden), 1)]  # fmt: skip


def matmul_rate(config: Any, count: Count, dtype: str) -> float:
    """Return FLOP/s of the matmuls that a step must make, forward and both of backward, at the model's shapes."""
    shapes = [(count.num_tokens, *shape, times * config.num_hidden_layers) for shape, times in layer_shapes(config)]
    shapes.append((count.num_rows, config.hidden_size, config.vocab_size, 1))
    flops = seconds = 0.0
    for rows, inputs, outputs, times in shapes:
        x, w, g = (torch.randn(*shape).to(getattr(torch, dtype)) for shape in
                   ((rows, inputs), (outputs, inputs), (rows, outputs)))  # fmt: skip
        for action in (lambda: x @ w.T, lambda: g @ w, lambda: g.T @ x):  # noqa: B023 (called at once)
            seconds += times * median(_timed(action) for _ in range(3))
            flops += times * 2.0 * rows * inputs * outputs
    return flops / seconds


def _timed(action: Any) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim
