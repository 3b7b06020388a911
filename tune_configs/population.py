"""Which learning rate and replay fractions does population-based training choose on a stream of domains?

Varied: learning rate, revisit and reuse fraction, by population-based training: every few iterations the worst quarter
of the runs copies weights and memory of one of the best and changes its settings at random.
Kept: the stream, and everything else.
Read: the settings of the best runs at the end, by held-out accuracy over all domains. They are a proposal, to be
compared as arms of a study of their own, because such a schedule has no single setting that could be confirmed.
Source: Jaderberg et al. 2017, arXiv 1711.09846.
"""

from __future__ import annotations

from typing import Any

from ray import tune

from rllib_srl import SRLConfig
from rllib_srl.tune_configs import Search
from rllib_srl.tune_configs.arms import COMMON, CONSTANT_SRL, FRACTIONS
from rllib_srl.tune_configs.streams import scaled

RATES = (3e-5, 1e-4, 3e-4, 1e-3)  # initial rates, one per run
EVERY = 6  # iterations
METRIC = "env_runners/episode_return_mean"


def scheduler(iterations: int) -> Any:
    """Return Tune's scheduler; a run changes at most every `EVERY` iterations, and never at its end."""
    from ray.tune.schedulers import PopulationBasedTraining

    return PopulationBasedTraining(
        time_attr="training_iteration",
        metric=METRIC,
        mode="max",
        perturbation_interval=min(EVERY, max(1, iterations // 2)),
        hyperparam_mutations={
            "lr": tune.loguniform(1e-5, 1e-3),
            **{name: tune.uniform(0.05, 0.5) for name in FRACTIONS},
        },
    )


def study() -> Search:
    """Return the search; runs start from SRL with constant shares, at rates a factor of about three apart."""
    values = {**COMMON, **CONSTANT_SRL, "stream": scaled("cpu", iterations=EVERY), "checkpoint_every": 0, "seed": 1}
    model = values.pop("model")
    config = SRLConfig().rl_module(model_config={"model": model}).update_from_dict(values)
    starts = {"lr": RATES, **{name: (share,) for name, share in FRACTIONS.items()}}
    config.update_from_dict({name: tune.grid_search(list(values)) for name, values in starts.items()})
    return Search(config, 6 * EVERY, tuple(starts), metric="evaluation/accuracy", scheduler=scheduler)
