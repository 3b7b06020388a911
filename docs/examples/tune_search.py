"""Search over a setting with Ray Tune: which learning rate gains most in a few iterations?

    python docs/examples/tune_search.py                   one to two minutes on two CPU cores

`register()` makes the algorithm known to Tune as "SRL". Any setting can be searched: give it a `tune.grid_search` or a
distribution instead of a value.
"""

from __future__ import annotations

import argparse
import tempfile

from ray import tune

from rllib_srl import SRLConfig, register


def main(argv: list[str] | None = None) -> None:
    """Run one trial for each learning rate and print their rewards."""
    parser = argparse.ArgumentParser(description="A grid search over the learning rate.")
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-4])
    arguments = parser.parse_args(argv)
    config = (
        SRLConfig()
        .environment("compare", env_config={"num_shots": 0})
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=12, max_episode_tokens=96)
        .training(num_prompts_per_batch=16, group_size=8, compute_dtype="float32", checkpoint_every=0)
        .training(lr=tune.grid_search(arguments.rates))
        .debugging(seed=1)
    )
    register()
    tuner = tune.Tuner(
        "SRL",
        param_space=config.to_dict(),
        run_config=tune.RunConfig(
            storage_path=tempfile.mkdtemp(prefix="tune_search_"),
            stop={"training_iteration": arguments.iterations},
            verbose=0,
        ),
    )
    results = tuner.fit()
    for result in sorted(results, key=lambda result: result.config["lr"]):
        reward = result.metrics["env_runners"]["episode_return_mean"]
        print(f"lr {result.config['lr']:g}  reward of the last iteration {reward:.3f}")
    if results.num_errors:
        raise SystemExit(f"{results.num_errors} trials failed: {results.errors[0]}")


if __name__ == "__main__":
    main()
