"""Base class for wrappers, which play the prompts of an inner environment; finds and makes the inner environment.

Around.__init__(name, config)      self.world, and its domain and stop strings
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

    def __init__(self, world: str, world_config: Mapping[str, Any]):
        """Make the inner environment. Raises as `inner_world`."""
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self.world = inner_world(world, world_config)
        self.domain = str(getattr(self.world, "domain", world))
        self.stop_strings: tuple[str, ...] = tuple(getattr(self.world, "stop_strings", ()))
        for name in ("domain_of", "split_of", "data_question", "shot_ids"):
            if hasattr(self.world, name):
                setattr(self, name, getattr(self.world, name))

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the inner environment's prompt ids of `split`, in an order of `seed`."""
        prompt_ids: Iterator[str] = self.world.prompt_ids(split, seed)
        return prompt_ids

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn the full reward in the inner environment."""
        turns: list[str] = self.world.gold_turns(prompt_id)
        return turns

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the inner environment's tools, for the chat template."""
        return getattr(self.world, "tool_schemas", [])

    @property
    def system_prompt(self) -> str:
        """Return the inner environment's system prompt."""
        return getattr(self.world, "system_prompt", "")

    def close(self) -> None:
        """Close the inner environment."""
        self.world.close()


def known_worlds() -> list[str]:
    """Return the names of the installed entry points, sorted."""
    return sorted(_installed(tuple(sys.path)))


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points by name. Cached by `sys.path`: the metadata of every installed package is searched."""
    return {point.name: point for point in entry_points(group=GROUP)}


def inner_world(world: str, world_config: Mapping[str, Any]) -> Any:
    """Make the environment inside a wrapper.

    Args:
        world: an entry point of the group "rllib_srl.envs", or "package.module:Class"
        world_config: its env_config

    Raises:
        ValueError: there is no such environment, it cannot be imported, or it has no `prompt_ids`.
    """
    point = EntryPoint(world, world, GROUP) if ":" in world else _installed(tuple(sys.path)).get(world)
    if point is None:
        raise ValueError(f'world = {world!r}; expected "package.module:Class" or one of {", ".join(known_worlds())}')
    try:
        make = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"world = {world!r} cannot be imported ({type(error).__name__}: {error})") from error
    inner = make(dict(world_config))
    if not hasattr(inner, "prompt_ids"):
        raise ValueError(f"world = {world!r} has no prompt_ids; expected an environment with prompt_ids")
    return inner
