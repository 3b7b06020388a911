"""Validates how many episodes a prompt gets (`rollout`); returns error messages "name = value; expected ..."."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rllib_srl.batch.estimators import GROUP_NORMALISED
from rllib_srl.common.setting_checks import is_integer

ROLLOUTS = ("full", "screening", "knapsack")


def faults_of_rollout(config: Any) -> Iterator[str]:
    """Yield all errors of the rollout settings of an `SRLConfig`."""
    least = 1 if config.rule_of("advantage") == "posterior" else 2  # `validation.py` reports smaller groups
    if config.rollout not in ROLLOUTS:
        yield f"rollout = {config.rollout!r}; expected one of {', '.join(map(repr, ROLLOUTS))}"
    elif is_integer(config.group_size, least) and config.rollout != "full":
        yield from _screening(config) if config.rollout == "screening" else _knapsack(config)


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
