"""One GRPO iteration beside a step of TRL on the same card: 0.5B random weights, 64 prompts x 8 answers of 256 tokens.

    python -m scripts.gpu.beside_trl

Same prompts of 256 tokens, rewards for any text, bfloat16, vLLM on both sides (TRL: in its process, asleep during
updates). `--short` uses a small model, 4 x 4 answers of 8 tokens and Transformers on the CPU. TRL is that of
scripts/bench/trl.py. Prints the seconds of both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym

from rllib_srl import SRLConfig
from rllib_srl.algorithm.model_shape import SHAPES
from scripts.bench.trl import theirs, trl_python
from scripts.gpu.random_model import SHORT, write_random_model

NUM_PROMPTS = 4096  # that exist
NUM_WARM, NUM_STEPS = 1, 3


class Letters(gym.Env[str, str]):
    """Pays 1 for an answer whose code points have an even sum, so that nearly every group has both rewards."""

    def __init__(self, env_config: Mapping[str, Any] | None = None) -> None:
        """Take `num_letters` of a prompt."""
        self._num_letters = int((env_config or {}).get("num_letters", 256))

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield each prompt of a split once."""
        return (str(2 * number + (split == "heldout")) for number in range(NUM_PROMPTS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Return the letters of a prompt."""
        rng = random.Random(str((options or {})["prompt_id"]))
        return " ".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(self._num_letters)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pay for an even sum."""
        return "", float(sum(map(ord, action)) % 2 == 0), True, False, {}


def config_of(model: Path, is_short: bool) -> SRLConfig:
    """Return our settings."""
    prompts, size, num = (4, 4, 8) if is_short else (64, 8, 256)
    letters = 16 if is_short else 256
    config: SRLConfig = (
        SRLConfig()
        .environment("scripts.gpu.beside_trl:Letters", env_config={"num_letters": letters})
        .rl_module(model_config={"model": str(model)})
        .env_runners(max_turn_tokens=num, max_episode_tokens=4 * letters + num)
        .training(num_prompts_per_batch=prompts, group_size=size, lr=1e-6, checkpoint_every=0)
        .training(log_directory=str(model.parent / "run"), activation_checkpointing=not is_short)
        .training(micro_batch_tokens=4096 if is_short else 32768)
        .replay("none")
        .debugging(seed=1)
    )
    if is_short:
        config.env_runners(engine="transformers", num_env_runners=0).training(compute_dtype="float32")
    return config


def ours(config: SRLConfig) -> list[float]:
    """Return the seconds of iterations, without those that warm up."""
    import ray
    import torch

    is_short = config.num_env_runners == 0
    ray.init(include_dashboard=False, num_gpus=0 if is_short else torch.cuda.device_count())
    algo = config.build_algo()
    try:
        return [float(algo.train()["time_this_iter_s"]) for _ in range(NUM_WARM + NUM_STEPS)][NUM_WARM:]
    finally:
        algo.stop()
        ray.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides; return the exit status."""
    parser = argparse.ArgumentParser(description="An iteration beside a step of TRL.")
    parser.add_argument("--short", action="store_true", help="a small model on the CPU")
    is_short = parser.parse_args(argv).short
    python = trl_python()
    with tempfile.TemporaryDirectory() as directory:
        shape = SHORT if is_short else SHAPES["0.5B"]
        model = write_random_model(shape, Path(directory) / "model", has_weights=True)
        config = config_of(model, is_short)
        mine = ours(config)
        print(json.dumps({"ours_s": [round(seconds, 3) for seconds in mine]}), flush=True)
        prompts = config.num_prompts_per_batch
        env = Letters(config.env_config)
        ids = [prompt_id for prompt_id, _ in zip(env.prompt_ids("train", 1), range(prompts * (NUM_WARM + NUM_STEPS)))]
        job = {
            "model": str(model), "dtype": "float32" if is_short else "bfloat16", "reward": "even", "stop": None,
            "rows": [{"prompt": env.reset(options={"prompt_id": prompt_id})[0]} for prompt_id in ids],
            "group_size": config.group_size, "num_prompts": prompts, "num_steps": NUM_WARM + NUM_STEPS,
            "max_tokens": config.max_turn_tokens, "lr": config.lr, "temperature": config.temperature, "seed": 1,
            "num_threads": int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1), "on_card": not is_short,
        }  # fmt: skip
        other = theirs(python, job)["seconds"][NUM_WARM:]
    figures = {"ours_s": round(median(mine), 3), "trl_s": round(median(other), 3)}
    print(json.dumps({**figures, "trl_over_ours": round(median(other) / median(mine), 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
