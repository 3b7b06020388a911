"""Prompts of an environment, and an episode of given turns."""

from itertools import islice
from typing import Any


def first_ids(env: Any, split: str = "train", seed: int = 0, count: int = 50) -> list[str]:
    return list(islice(env.prompt_ids(split, seed), count))


def play(env: Any, turns: list[str], prompt_id: str) -> tuple[str, list[float], bool, dict[str, Any]]:
    """Return the last observation, all rewards, whether the episode is over, and the last info."""
    env.reset(options={"prompt_id": prompt_id})
    rewards = []
    for turn in turns:
        observation, reward, terminated, _, info = env.step(turn)
        rewards.append(reward)
    return observation, rewards, terminated, info


def played(env: Any, prompt_id: str, turns: list[str]) -> list[Any]:
    """Return what the environment answers to each turn."""
    env.reset(options={"prompt_id": prompt_id})
    return [env.step(turn) for turn in turns]
