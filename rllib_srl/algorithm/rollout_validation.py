"""Validates how far ahead of training prompts are played (`max_lag`); yields messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.algorithm.settings import ENV_RUNNERS
from rllib_srl.common.setting_checks import is_integer, is_number

LATE = ("memory", "drop")


def faults_of_rollout(config: Any) -> Iterator[str]:
    """Yield all errors of the rollout settings of an `SRLConfig`."""
    lag = config.max_lag
    if not is_integer(lag, 0):
        yield f"max_lag = {lag!r}; expected an integer of at least 0"
        return
    if not is_number(config.slice_s) or config.slice_s <= 0:
        yield f"slice_s = {config.slice_s!r}; expected a number above 0"
    if config.late not in LATE:
        yield f"late = {config.late!r}; expected one of {', '.join(map(repr, LATE))}"
    if not lag:
        for name in ("in_flight", "slice_s", "late"):
            if getattr(config, name) != ENV_RUNNERS[name].default:
                yield f"{name} = {getattr(config, name)!r} with max_lag = 0; expected it only with max_lag above 0"
        return
    num, settings = config.num_prompts_per_batch, config.loss_settings()
    if config.in_flight is not None and not is_integer(config.in_flight, num + 1 if is_integer(num, 1) else 2):
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
            value = settings.correction if name == "rollout_is_correction" else getattr(config, name)
            yield f"{name} = {value!r} with max_lag = {lag}; expected {expected}"
