"""The learner's kernels without Ray or vLLM: tries against padding, memory of the block mask.

    python -m scripts.gpu.learner exact     forward and backward, float32 and bfloat16
    python -m scripts.gpu.learner mask      seconds and bytes for up to 65,536 tokens

`--short` runs a small model on the CPU. Exit status 1 if float32 differs by more than LIMIT.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rllib_srl.algorithm.model_shape import SHAPES, ModelShape
from rllib_srl.batch.layout import bare_episode, micro_batch
from rllib_srl.learner.scoring import as_tensors, autocast, token_logps
from rllib_srl.learner.trie_attention import block_mask, num_graphs, register

LIMIT = 1e-3  # nats, and relative L2 of the gradient, in float32
SHORT = ModelShape(2, 64, 128, 4, 2, 512, True, 16)
GIB = 2**30


def print_figures(**figures: Any) -> None:
    """Print one JSON line."""
    print(json.dumps(figures), flush=True)


def make_model(shape: ModelShape, device: str) -> Any:
    """Return a Llama with random float32 weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.is_tied, max_position_embeddings=131072,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register()).eval()


def streams(num_tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """Return four groups of four answers to one prompt, about `num_tokens` tokens without the repeated prompts."""
    rng = np.random.default_rng(seed)
    each = max(8, num_tokens // 20)
    found = []
    for _ in range(4):
        prompt = rng.integers(0, vocab, each)
        found += [np.concatenate([prompt, rng.integers(0, vocab, each)]).tolist() for _ in range(4)]
    return found


def scores(model: Any, sequences: list[list[int]], device: str, shares: bool, dtype: str) -> tuple[torch.Tensor, int]:
    """Return the log-probs of all tokens, with gradients, and the number of computed tokens."""
    one = micro_batch([bare_episode(ids, index) for index, ids in enumerate(sequences)], shares)

    with autocast(torch.device(device), dtype):
        return token_logps(model, as_tensors(one, torch.device(device), 1.0))["logp"], one["token_ids"].size


def exact(device: str, is_short: bool) -> int:
    """Compare tries with padding, forward and backward; return the exit status."""
    shape = SHORT if is_short else SHAPES["0.1B"]
    model, is_wrong = make_model(shape, device), False
    for dtype in ("float32", "bfloat16"):
        for num_tokens in (400,) if is_short else (400, 2500, 8000):
            sequences = streams(num_tokens, shape.vocab, num_tokens)
            found = []
            for shares in (True, False):
                model.zero_grad(set_to_none=True)
                logp, _ = scores(model, sequences, device, shares, dtype)
                logp.mean().backward()
                gradient = torch.cat([one.grad.flatten().float() for one in model.parameters()])
                found.append((logp.detach().float(), gradient))
            (logp, gradient), (wanted, wanted_gradient) = found
            gap = float((logp - wanted).abs().max())
            relative = float((gradient - wanted_gradient).norm() / wanted_gradient.norm())
            is_wrong |= dtype == "float32" and not (gap < LIMIT and relative < LIMIT)
            print_figures(dtype=dtype, tokens=num_tokens, max_logp_gap=gap, gradient_gap=relative, graphs=num_graphs())
    return int(is_wrong)


def mask(device: str, is_short: bool) -> int:
    """Measure the block mask: seconds and the largest allocation."""
    for num_tokens in (2048,) if is_short else (4096, 16384, 32768, 65536):
        sequences = streams(num_tokens, 1000, 0)
        trie = micro_batch([bare_episode(ids, i) for i, ids in enumerate(sequences)], True)["trie"]
        assert trie is not None
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        before, start = allocated(device), time.perf_counter()
        block_mask(trie, None, device)
        if device == "cuda":
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
        print_figures(tokens=len(trie), ms=round(1e3 * (time.perf_counter() - start), 2), peak_mib=peak / 2**20)
    return 0


def allocated(device: str) -> int:
    """Return the bytes that torch has allocated on the GPU, 0 on a CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Check the learner's kernels.")
    parser.add_argument("what", choices=("exact", "mask"))
    parser.add_argument("--short", action="store_true", help="a small model on the CPU")
    return parser.parse_args(argv)


def header(device: str) -> Iterator[tuple[str, Any]]:
    """Yield what the figures depend on."""
    yield from {"torch": torch.__version__, "device": device}.items()
    if device == "cuda":
        yield "card", torch.cuda.get_device_name()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one check; return the exit status."""
    args = arguments(argv)
    device = "cpu" if args.short or not torch.cuda.is_available() else "cuda"
    print_figures(**dict(header(device)))
    if args.what == "exact":
        return exact(device, args.short)
    return mask(device, args.short)


if __name__ == "__main__":
    sys.exit(main())
