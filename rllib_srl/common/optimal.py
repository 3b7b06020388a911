"""Exact values of the best policies, for environments that compute them.

    optimal_value(prompt_id)    the expected reward of the best policy with memory
    optimal_values(prompt_id)   the same, `with_memory`, and that of the best policy `without_memory`

An environment has both methods or neither; `rllib_srl.envs.games.beliefs` implements them for small hidden-state tasks.
A wrapper may change rewards and observations, so the values of the environment inside do not hold for it: it has values
only if it has the methods itself. The wrappers of `gymnasium.make` are looked through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rllib_srl.common.environments import WorldError

METHODS = ("optimal_value", "optimal_values")
MADE_WITH = (PassiveEnvChecker, OrderEnforcing, TimeLimit)  # by gymnasium.make; they change no reward


@dataclass(frozen=True)
class PromptValues:
    """The exact values of a prompt, as expected rewards. Invariant: `without_memory` <= `with_memory`."""

    prompt_id: str
    with_memory: float
    without_memory: float


def peeled(env: Any) -> Any:
    """Return the environment without the wrappers that `gymnasium.make` adds."""
    while type(env) in MADE_WITH:  # not a subclass, which may change rewards
        env = env.env
    return env


def has_values(env: Any) -> bool:
    """Return whether an environment computes the values of its best policies."""
    return all(callable(getattr(peeled(env), method, None)) for method in METHODS)


def values_of(env: Any, name: str, prompt_ids: Iterable[str]) -> Iterator[PromptValues]:
    """Yield the exact values of each prompt.

    Args:
        env: the environment.
        name: its name, for errors.
        prompt_ids: prompts of it.

    Raises:
        WorldError: the environment computes no such values.
    """
    if not has_values(env):
        raise WorldError(
            f"environment {name!r} has no exact values; expected one with {' and '.join(METHODS)}, such as grid, "
            "registers, oracle or faults"
        )
    for prompt_id in prompt_ids:
        found = peeled(env).optimal_values(prompt_id)
        yield PromptValues(prompt_id, float(found.with_memory), float(found.without_memory))
