"""At which learning rate does a small model learn to compare numbers best within ten iterations?

Varied: the learning rate, a factor of about three between neighbours, on two seeds each.
Kept: everything else, the prompts of a seed included.
Read: held-out accuracy after the last iteration, the mean of the seeds; a rate whose seeds disagree by more than
the intervals of the accuracies is unstable, whatever its mean. Trials whose training reward is among the lower two
thirds after 4 iterations are stopped there (ASHA) and have no accuracy.
Source: Li et al. 2020, arXiv 1810.05934 (ASHA).
"""

from __future__ import annotations

from typing import Any

from ray import tune

from rllib_srl import SRLConfig
from rllib_srl.tune_configs import Search

RATES = (1e-5, 3e-5, 1e-4)
SEEDS = (1, 2)
GRACE = 4  # iterations that every trial gets


def asha(iterations: int) -> Any:
    """Return Tune's ASHA scheduler, which stops trials with low training reward early."""
    from ray.tune.schedulers import ASHAScheduler

    return ASHAScheduler(
        time_attr="training_iteration",
        metric="env_runners/episode_return_mean",
        mode="max",
        max_t=iterations,
        grace_period=min(GRACE, iterations),
        reduction_factor=3,
    )


def study() -> Search:
    """Return the search; one trial takes two CPUs, the engine's and the learner's."""
    config = (
        SRLConfig()
        .environment("compare", env_config={"num_numbers": 3})
        .rl_module(model_config={"model": "smollm2-135m"})
        .env_runners(num_env_runners=1, max_turn_tokens=8, max_episode_tokens=256)
        .training(lr=tune.grid_search(list(RATES)), num_prompts_per_batch=16, group_size=8, checkpoint_every=0)
        .evaluation(evaluation_duration=200)
        .debugging(seed=tune.grid_search(list(SEEDS)))
    )
    return Search(config, iterations=10, varied=("lr", "seed"), metric="evaluation/accuracy", scheduler=asha)
