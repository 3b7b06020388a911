"""Measure tokens per second of the vLLM engine on random weights, and whether equal seeds give equal tokens.

    python -m scripts.gpu.engine 1.5B [--dtype float32]

`--short` uses the Transformers engine with a small model on the CPU. Exit status 1 if
another seed gives the same tokens. `equal_turns` is the share of turns that an equal seed repeats; it may be below 1,
because rounding depends on the batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rllib_srl.algorithm.model_shape import SHAPES, ModelShape
from rllib_srl.engine import make_engine
from rllib_srl.engine.protocol import Sampling
from scripts.gpu.random_model import SHORT, write_random_model


def start(shape: ModelShape, directory: Path, dtype: str, is_short: bool) -> Any:
    """Return an engine with random weights; vLLM makes them itself."""
    write_random_model(shape, directory, has_weights=is_short)
    if is_short:
        return make_engine("transformers", directory, dtype="float32", seed=0, context_length=128, device="cpu")
    import vllm

    vllm.EngineArgs = partial(vllm.EngineArgs, load_format="dummy")
    return make_engine("vllm", directory, dtype=dtype, seed=0, context_length=2048, max_num_seqs=256)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one model; return the exit status."""
    parser = argparse.ArgumentParser(description="Measure the engine on random weights.")
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--short", action="store_true", help="a small model on the CPU")
    args = parser.parse_args(argv)
    shape = SHORT if args.short else SHAPES[args.size]
    groups, size, num_new = (2, 2, 8) if args.short else (32, 8, 256)
    rng = np.random.default_rng(0)
    prompts = [ids for _ in range(groups) for ids in [rng.integers(5, 500, 16 if args.short else 512).tolist()] * size]
    with tempfile.TemporaryDirectory() as directory:
        begin = time.perf_counter()
        engine = start(shape, Path(directory), args.dtype, args.short)
        started = time.perf_counter() - begin
        sampling = Sampling(max_tokens=num_new, temperature=1.0, runs_to_limit=True)
        samples = []
        for seed in (1, 1, 2):
            engine.reseed(seed)
            begin = time.perf_counter()
            turns = engine.generate(prompts, sampling)
            seconds = time.perf_counter() - begin
            num_tokens = sum(len(turn.token_ids) for turn in turns)
            samples.append([turn.token_ids.tolist() for turn in turns])
            print(json.dumps({"seed": seed, "tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}))
        engine.close()
    shared = float(np.mean([a == b for a, b in zip(samples[0], samples[1], strict=True)]))
    print(json.dumps({"start_s": round(started, 1), "equal_turns": shared, "differs": samples[0] != samples[2]}))
    return int(samples[0] == samples[2])


if __name__ == "__main__":
    sys.exit(main())
