"""Learn one task after another, with the memory on: are the old tasks kept?

    python docs/examples/replay_stream.py                 about a minute on a CPU
    python docs/examples/replay_stream.py --no-replay     the same tokens, without a memory

The first task asks for the largest of three numbers, the second one for the smallest. One word of the prompt differs,
so a policy that learns the second task quickly unlearns the first one. `revisit_fraction` plays stored prompts again,
`reuse_fraction` trains on stored groups again. Both take their share from the new task, which is learned more slowly.
One run of one seed illustrates this and proves nothing; docs/continual.md has the measurements.
"""

from __future__ import annotations

import argparse
import tempfile

from rllib_srl import SRLConfig

FIRST, SECOND = 5, 12  # iterations of each task
LARGEST = {"num_shots": 0, "ask": "largest"}
SMALLEST = {"num_shots": 0, "ask": "smallest"}
STREAM = [
    {"env": "compare", "domain": "largest", "env_config": LARGEST, "iterations": FIRST},
    {"env": "compare", "domain": "smallest", "env_config": SMALLEST, "iterations": SECOND},
]


def main(argv: list[str] | None = None) -> None:
    """Train on both tasks; print held-out accuracy of each after each, and what the memory did."""
    parser = argparse.ArgumentParser(description="Two tasks in turn, with or without replay.")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    config = (
        SRLConfig()
        .environment(stream=STREAM)
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=12, max_episode_tokens=96)
        .training(lr=3e-4, num_prompts_per_batch=16, group_size=8, compute_dtype="float32")
        .training(log_directory=tempfile.mkdtemp(prefix="replay_stream_"), checkpoint_every=0)
        .evaluation(evaluation_duration=192)
        .debugging(seed=arguments.seed)
    )
    if arguments.no_replay:
        config.replay("none")
    else:
        config.replay("uniform", capacity=4096, revisit_fraction=0.4, reuse_fraction=0.25, domains="all")
    algo = config.build_algo()
    try:
        for iteration in range(1, FIRST + SECOND + 1):
            result = algo.train()
            reward = result["env_runners"]["episode_return_mean"]
            print(f"iteration {iteration:2}  reward {reward:.3f}", flush=True)
            if iteration in (FIRST, FIRST + SECOND):
                by_domain = algo.evaluate()["by_domain"]
                found = "  ".join(f"{name} {by_domain[name]['accuracy']:.3f}" for name in sorted(by_domain))
                print(f"held-out accuracy after iteration {iteration}: {found}", flush=True)
        if memory := result.get("replay"):
            items, revisits, reuses = (int(memory[name]) for name in ("num_items", "num_revisits", "num_reuses"))
            print(f"memory: {items} items, {revisits} prompts played again, {reuses} groups trained on again")
    finally:
        algo.stop()


if __name__ == "__main__":
    main()
