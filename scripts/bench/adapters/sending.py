#!/usr/bin/env python3
"""Compare engines that get adapters with engines that get merged weights: bytes, seconds, tokens/s, canary gap.

    python -m scripts.bench.adapters.sending --models tiny smollm2-135m

Both engines run in this process, in turns: each round sends the same learner's adapters to both, scores the canary and
decodes the same prompts. The adapters' B is random, as after training. Figures are medians of the rounds; ratios are
adapter / merged. Seconds of a sync: pack, load and score the canary on the engine; without Ray's transfer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

import torch

from rllib_srl.engine import CanaryGap, Sampling, canary_sequences, make_engine
from rllib_srl.engine.adapters import TARGETS, AdapterSpec, adapter_tensors, add_adapters
from rllib_srl.engine.canary import update_sequences
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.engine.sync import pack_stream
from rllib_srl.learner.model_setup import sent_weights
from rllib_srl.learner.rl_module import load_causal_lm

RANK, CONTEXT, NUM_PROMPTS, PROMPT_TOKENS = 8, 256, 16, 48
SIDES = ("merged", "adapter")


def measured(name: str, dtype: str, num_rounds: int, num_tokens: int) -> dict[str, Any]:
    """Return the median figures of both sides and their ratios for one model."""
    directory, spec = local_model(name), AdapterSpec.of(RANK, None, TARGETS)
    model = load_causal_lm(name)
    add_adapters(model, spec, seed=0)
    sequences = update_sequences(canary_sequences(load_tokenizer(directory), CONTEXT))
    common: dict[str, Any] = {"dtype": dtype, "context_length": CONTEXT, "max_num_seqs": NUM_PROMPTS}
    common |= {"kv_cache_gib": 0.25, "num_threads": torch.get_num_threads()}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with (
        closing(make_engine("vllm", directory, **common)) as merged,
        closing(make_engine("vllm", directory, adapter=spec, **common)) as adapted,
    ):
        for version in range(1, num_rounds + 1):
            drift(model, version)
            wanted = score(model, sequences, dtype)
            for side, engine in zip(SIDES, (merged, adapted), strict=True):
                found[side].append(one_round(side, engine, model, version, (sequences, wanted), dtype, num_tokens))
    figures: dict[str, Any] = {
        side: {key: median(one[key] for one in rows) for key in rows[0]} for side, rows in found.items()
    }
    ratios = {key: figures["adapter"][key] / figures["merged"][key] for key in figures["merged"]}
    return {"model": name, "dtype": dtype, "rank": RANK, **figures, "adapter / merged": ratios}


def one_round(
    side: str, engine: Any, model: torch.nn.Module, version: int, canary: Any, dtype: str, num_tokens: int
) -> dict[str, float]:
    """Send to one engine, compare the canary, and decode."""
    sequences, wanted = canary
    start = time.perf_counter()
    bundle = pack_stream(*sent_weights(model, side == "adapter"), version, dtype)
    engine.load_weights(bundle)
    logps = engine.score(sequences)
    sync_s, gap = time.perf_counter() - start, CanaryGap.between(logps, wanted)
    prompts = [[3 + (17 * version + 7 * row + at) % 500 for at in range(PROMPT_TOKENS)] for row in range(NUM_PROMPTS)]
    start = time.perf_counter()
    turns = engine.generate(prompts, Sampling(max_tokens=num_tokens, runs_to_limit=True))
    rate = sum(len(turn.token_ids) for turn in turns) / (time.perf_counter() - start)
    return {"bytes": bundle.buffer.nbytes, "sync_s": sync_s, "tokens_per_s": rate, "gap_mean": gap.mean}


def drift(model: torch.nn.Module, seed: int) -> None:
    """Set each B to small noise, as an update would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model):
            if "lora_B" in name:
                tensor.normal_(0, 0.01, generator=generator)


@torch.no_grad()
def score(model: Any, sequences: Sequence[list[int]], dtype: str) -> list[Any]:
    """Return the learner's log-probs."""
    scores = []
    for sequence in sequences:
        ids_T = torch.tensor(sequence)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        scores.append(logits_TV[:-1].log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].numpy())
    return scores


def main() -> None:
    """Print one JSON line per model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny"], help="names of models")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="number format of engines")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each decoded sequence")
    args = parser.parse_args()
    for name in args.models:
        print(json.dumps(measured(name, args.dtype, args.rounds, args.tokens)), flush=True)


if __name__ == "__main__":
    main()
