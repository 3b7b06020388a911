"""Train a few iterations with the GPUs placed as asked: seconds of each part, canary gap, peak memory of the learner.

    python -m scripts.gpu.run --model tiny                                              the defaults of this machine
    python -m scripts.gpu.run --model tiny --shares 0.6 0.4 --colocate
    python -m scripts.gpu.run --model tiny --dtype float32                              the canary at 1e-3 nats
    python -m scripts.gpu.run --random 1.5B --iterations 3 [--lora]                     random weights

`--short` trains a tiny random model with the Transformers engine on the CPU: all that needs no GPU, in as few
processes as that needs. It has no split engine, and recomputes activations where `--offload` would move them.
Exit status 1 if no weights were updated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl import SRLConfig
from rllib_srl.algorithm.gpu_memory import GIB
from rllib_srl.algorithm.model_shape import SHAPES
from scripts.gpu.random_model import SHORT, write_random_model


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a few iterations on GPUs.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--random", choices=SHAPES, help="a model of this size with random weights")
    parser.add_argument("--shares", nargs=2, type=float, metavar=("ENGINE", "LEARNER"), help="GPUs of each process")
    parser.add_argument("--fsdp", type=int, default=0, metavar="N", help="shard over N learners")
    parser.add_argument("--engine-parallel", type=int, default=1, metavar="N", help="GPUs of one engine")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the computation, in place of the default")
    parser.add_argument("--max-lag", type=int, default=0, metavar="N", help="play ahead of up to N updates")
    parser.add_argument("--iterations", type=int, default=2)
    for name in ("--colocate", "--lora", "--offload", "--gather-bf16", "--short"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace, directory: Path) -> SRLConfig:
    """Return the settings of the run."""
    model: str | Path = args.model
    if args.short or args.random:
        shape = SHORT if args.short else SHAPES[args.random]
        model = write_random_model(shape, directory / "model", has_weights=True)
    config: SRLConfig = (
        SRLConfig()
        .environment("tests.small_envs:Mixed")  # rewards for any text, so that random weights learn
        .rl_module(model_config={"model": str(model)})
        .env_runners(max_turn_tokens=8, max_episode_tokens=256)
        .training(num_prompts_per_batch=4 if args.short else 16, group_size=4, lr=1e-5, checkpoint_every=0)
        .training(log_directory=str(directory / "run"), activation_checkpointing=bool(args.random or args.offload))
        .training(lora_rank=16 if args.lora else 0, optimizer_name=args.optimizer)
        .replay("none")
        .debugging(seed=1)
    )
    if args.fsdp:
        config.training(fsdp=True, fsdp_gather_dtype="bfloat16" if args.gather_bf16 else "float32")
    if args.gather_bf16 or args.dtype:
        config.training(compute_dtype=args.dtype or "bfloat16")
    if args.max_lag:
        config.env_runners(max_lag=args.max_lag, late="drop")
    if args.short:
        config.env_runners(engine="transformers", num_env_runners=int(bool(args.fsdp or args.max_lag)))
        config.env_runners(num_cpus_per_env_runner=0.25).learners(num_cpus_per_learner=0.25, num_learners=args.fsdp)
        return config
    if args.offload:
        config.training(activation_checkpointing="offload")
    if args.engine_parallel > 1:
        config.env_runners(engine_tensor_parallel_size=args.engine_parallel)
    if args.shares:
        config.env_runners(num_gpus_per_env_runner=args.shares[0]).learners(num_gpus_per_learner=args.shares[1])
        config.learners(num_learners=max(1, args.fsdp))
    turns = False if args.max_lag else args.colocate or None  # playing ahead, engine and learner compute together
    return config.env_runners(colocate=turns)


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of an iteration: every timer, the canary and counts that show that something was learned."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(f"{prefix}/{name}" if prefix else str(name), item)
        elif isinstance(value, int | float):
            flat[prefix] = value

    walk("", {name: result.get(name, {}) for name in ("timers", "env_runners", "learners", "weight_sync")})
    return {name: round(value, 5) for name, value in flat.items()}


def peak_gib(learner: Any) -> float:
    """Return the largest memory in GiB that torch allocated on a learner's GPU, 0 without one; runs in its process."""
    import torch

    return round(torch.cuda.max_memory_allocated() / GIB, 2) if torch.cuda.is_available() else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Train; return the exit status."""
    import ray
    import torch

    args = parse(argv)
    ray.init(include_dashboard=False, log_to_driver=True, num_gpus=0 if args.short else torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as directory:
        config = config_of(args, Path(directory))
        algo = config.build_algo()
        placed = ("num_gpus_per_env_runner", "num_gpus_per_learner", "num_learners", "colocate", "compute_dtype")
        print(json.dumps({name: getattr(algo.config, name) for name in placed}), flush=True)
        for number in range(1 if args.short else args.iterations):
            print(json.dumps({"iteration": number + 1, **figures_of(algo.train())}), flush=True)
        peaks = [result.get() for result in algo.learner_group.foreach_learner(peak_gib, timeout_seconds=60)]
        print(json.dumps({"learner_peak_gib": peaks}), flush=True)
        num_updates = algo.version
        algo.stop()
    ray.shutdown()
    if num_updates:
        return 0
    print("error: no group had different rewards, so nothing was learned and no weights were sent")
    return 1


if __name__ == "__main__":
    sys.exit(main())
