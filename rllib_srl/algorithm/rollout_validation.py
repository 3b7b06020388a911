"""Validates how far ahead of training prompts are played (`max_lag`); yields messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.algorithm.settings import FLAT


def faults_of_rollout(config: Any) -> Iterator[str]:
    """Yield all errors of the rollout settings of an `SRLConfig`."""
    lag = config.max_lag
    if not lag:
        for name in ("in_flight", "slice_s", "late"):
            if getattr(config, name) != FLAT[name].default:
                yield f"{name} = {getattr(config, name)!r} with max_lag = 0; expected it only with max_lag above 0"
        return
    num, settings = config.num_prompts_per_batch, config.loss_settings()
    if config.in_flight is not None and config.in_flight <= num:
        yield f"in_flight = {config.in_flight!r}; expected an integer above num_prompts_per_batch = {num}, or None"
    wrong = {
        "num_env_runners": (config.num_env_runners == 0, "at least 1: a runner plays while this process trains"),
        "colocate": (config.colocate, "False: engine and learner would use the GPU at the same time"),
        "dynamic_sampling_tries": (settings.dynamic_sampling_tries, "0: further prompts would have to be waited for"),
        "rollout_is_correction": (settings.correction == "none", "a correction for tokens of older weights"),
        "kl_coeff": (settings.kl_coeff and settings.kl_in_reward, "0, or a KL in the loss"),
        "replay_capacity": (config.late == "memory" and not config.replay_capacity, "a memory, or late = 'drop'"),
    }
    for name, (is_wrong, expected) in wrong.items():
        if is_wrong:
            known = settings.correction if name == "rollout_is_correction" else getattr(config, name)
            value = getattr(settings, name, known)  # not "preset"
            yield f"{name} = {value!r} with max_lag = {lag}; expected {expected}"
