"""Validates how prompts are played: how often (`rollout`), and how far ahead of training (`max_lag`).

Each function yields error messages "name = value; expected ...".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.algorithm.settings import ENV_RUNNERS
from rllib_srl.batch.estimators import GROUP_NORMALISED
from rllib_srl.common.setting_checks import is_integer, is_number

ROLLOUTS = ("full", "screening", "knapsack")
LATE = ("memory", "drop")


def faults_of_rollout(config: Any) -> Iterator[str]:
    """Yield all errors of the rollout settings of an `SRLConfig`."""
    least = 1 if config.rule_of("advantage") == "posterior" else 2  # `validation.py` reports smaller groups
    if config.rollout not in ROLLOUTS:
        yield f"rollout = {config.rollout!r}; expected one of {', '.join(map(repr, ROLLOUTS))}"
    elif is_integer(config.group_size, least) and config.rollout != "full":
        yield from _screening(config) if config.rollout == "screening" else _knapsack(config)
    yield from _ahead(config)


def _ahead(config: Any) -> Iterator[str]:
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
        "rollout": (config.rollout == "screening", "'full' or 'knapsack'"),
        "dynamic_sampling_tries": (settings.dynamic_sampling_tries, "0: further prompts would have to be waited for"),
        "rollout_is_correction": (settings.correction == "none", "a correction for tokens of older weights"),
        "kl_coeff": (settings.kl_coeff and settings.kl_in_reward, "0, or a KL in the loss"),
        "replay_capacity": (config.late == "memory" and not config.replay_capacity, "a memory, or late = 'drop'"),
    }
    for name, (is_wrong, expected) in wrong.items():
        if is_wrong:
            value = settings.correction if name == "rollout_is_correction" else getattr(config, name)
            yield f"{name} = {value!r} with max_lag = {lag}; expected {expected}"


def _screening(config: Any) -> Iterator[str]:
    size, group_size = config.screen_size, config.group_size
    if group_size < 3:
        yield f"rollout = 'screening' with group_size = {group_size}; expected at least 3: 2 to screen, 1 to add"
    elif not is_integer(size, 2) or size >= group_size:
        yield f"screen_size = {size!r}; expected an integer from 2 to group_size - 1 = {group_size - 1}"
    settings = config.loss_settings()
    for name, rule in (("advantage", settings.advantage), ("reuse_advantage", settings.reuse_advantage)):
        if rule is not None and rule not in GROUP_NORMALISED:
            yield (
                f"rollout = 'screening' with {name} = {rule!r}; expected one of "
                f"{', '.join(map(repr, GROUP_NORMALISED))}: with others, the groups screened out would have a signal"
            )
    if settings.silent_groups != "skip":
        yield (
            f"rollout = 'screening' with silent_groups = {settings.silent_groups!r}; expected 'skip': prompts that are "
            "screened out are not trained on"
        )
    if settings.rescue != "none":
        yield (
            f"rollout = 'screening' with rescue = {settings.rescue!r}; expected 'none': prompts that are screened out "
            "are not trained on"
        )
    yield from _ungraded("screen_size", config)


def _knapsack(config: Any) -> Iterator[str]:
    group_size, smallest, largest = config.group_size, config.smallest_group, config.largest_group
    if group_size < 3:
        yield f"rollout = 'knapsack' with group_size = {group_size}; expected at least 3: groups of 2 cannot give any"
    elif not is_integer(smallest, 2) or smallest >= group_size:
        yield f"smallest_group = {smallest!r}; expected an integer from 2 to group_size - 1 = {group_size - 1}"
    if largest is not None and not is_integer(largest, group_size + 1):
        yield f"largest_group = {largest!r}; expected an integer above group_size = {group_size}, or None"
    if config.replay_capacity == 0:
        yield "rollout = 'knapsack' with replay_capacity = 0; expected a memory, which estimates the pass rates"
    yield from _ungraded("smallest_group", config)


def _ungraded(name: str, config: Any) -> Iterator[str]:
    size, least = getattr(config, name), config.replay_min_graded
    if config.replay_capacity and is_integer(size, 2) and is_integer(least, 1) and least > size:
        yield f"{name} = {size!r}; expected at least replay_min_graded = {least}, so that the memory grades each visit"
