"""Prompts of a world, and an episode of given turns: what the tests of question worlds share."""

from __future__ import annotations

from itertools import islice
from typing import Any


def first_ids(world: Any, split: str = "train", seed: int = 0, count: int = 50) -> list[str]:
    return list(islice(world.prompt_ids(split, seed), count))


def play(world: Any, turns: list[str], prompt_id: str) -> tuple[str, list[float], bool, dict[str, Any]]:
    """Return the last observation, all rewards, whether the episode is over, and the last info."""
    world.reset(options={"prompt_id": prompt_id})
    rewards = []
    for turn in turns:
        observation, reward, terminated, _, info = world.step(turn)
        rewards.append(reward)
    return observation, rewards, terminated, info


def played(world: Any, prompt_id: str, turns: list[str]) -> list[Any]:
    """Return what the environment answers to each turn."""
    world.reset(options={"prompt_id": prompt_id})
    return [world.step(turn) for turn in turns]
