"""Base class for wrappers, which play the prompts of an inner environment; finds and makes the inner environment.

Around.__init__(name, config)      self.env, and its domain and stop strings
prompt_ids, gold_turns, tool_schemas, system_prompt, close: the inner environment's
domain_of, split_of, data_question, shot_ids: the inner environment's if it has them
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium

from rllib_srl.envs import text

GROUP = "rllib_srl.envs"


class Around(gymnasium.Env[str, str]):
    """A `gymnasium.Env` that plays the prompts of another environment.

    Invariant: prompt ids, splits, domains and stop strings are always the inner environment's.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, env: str, env_config: Mapping[str, Any]):
        """Make the inner environment. Raises as `inner_env`."""
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self.env = inner_env(env, env_config)
        self.domain = str(getattr(self.env, "domain", env))
        self.stop_strings: tuple[str, ...] = tuple(getattr(self.env, "stop_strings", ()))
        for name in ("domain_of", "split_of", "data_question", "shot_ids"):
            if hasattr(self.env, name):
                setattr(self, name, getattr(self.env, name))

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the inner environment's prompt ids of `split`, in an order of `seed`."""
        prompt_ids: Iterator[str] = self.env.prompt_ids(split, seed)
        return prompt_ids

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn the full reward in the inner environment."""
        turns: list[str] = self.env.gold_turns(prompt_id)
        return turns

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the inner environment's tools, for the chat template."""
        return getattr(self.env, "tool_schemas", [])

    @property
    def system_prompt(self) -> str:
        """Return the inner environment's system prompt."""
        return getattr(self.env, "system_prompt", "")

    def close(self) -> None:
        """Close the inner environment."""
        self.env.close()


def known_envs() -> list[str]:
    """Return the names of the installed entry points, sorted."""
    return sorted(_installed(tuple(sys.path)))


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points by name. Cached by `sys.path`: the metadata of every installed package is searched."""
    return {point.name: point for point in entry_points(group=GROUP)}


def inner_env(env: str, env_config: Mapping[str, Any]) -> Any:
    """Make the environment inside a wrapper.

    Args:
        env: an entry point of the group "rllib_srl.envs", or "package.module:Class"
        env_config: its env_config

    Raises:
        ValueError: there is no such environment, it cannot be imported, or it has no `prompt_ids`.
    """
    point = EntryPoint(env, env, GROUP) if ":" in env else _installed(tuple(sys.path)).get(env)
    if point is None:
        raise ValueError(f'env = {env!r}; expected "package.module:Class" or one of {", ".join(known_envs())}')
    try:
        make = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"env = {env!r} cannot be imported ({type(error).__name__}: {error})") from error
    inner = make(dict(env_config))
    if not hasattr(inner, "prompt_ids"):
        raise ValueError(f"env = {env!r} has no prompt_ids; expected an environment with prompt_ids")
    return inner
