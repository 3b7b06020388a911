"""The texts of the stub's answers: gold turns, the gold turns of another prompt, or a text that no environment reads.

    right       gold_turns(prompt_id); with `graded_turns` the turns of grade 3 or 4
    wrong       the gold turns of the first other prompt whose last turn differs; with `graded_turns` grade 1 or 2
    malformed   MALFORMED, in every turn; also in place of a wrong answer where all prompts have the same gold turns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from rllib_srl.common.environments import Environment, prompts_of
from rllib_srl.types import Prompt

MALFORMED = " ??"
NUM_OTHERS = 50  # prompts that are searched for a wrong answer
MAX_KEPT = 65_536  # answers


class NoGoldTurnsError(ValueError):
    """An environment does not say what a right answer is."""


class Answers:
    """Right and wrong answers of some environments. Invariant: equal prompts have equal answers."""

    def __init__(self, worlds: Mapping[str, Callable[[], Environment]]) -> None:
        """Set environment id -> a function that makes an instance; one of each is made, when it is needed."""
        self._worlds = worlds
        self._made: dict[str, Any] = {}
        self._others: dict[str, list[tuple[str, ...]]] = {}
        self._kept = lru_cache(MAX_KEPT)(self._found)

    def turns(self, prompt: Prompt, is_right: bool, is_best: bool) -> tuple[str, ...]:
        """Return the turns of a right or wrong answer.

        Args:
            prompt: the prompt.
            is_right: whether it is right.
            is_best: with grades, whether the better one of the two grades.

        Raises:
            NoGoldTurnsError: see the class.
        """
        return self._kept(prompt.env_id, prompt.prompt_id, is_right, is_best)

    def _found(self, env_id: str, prompt_id: str, is_right: bool, is_best: bool) -> tuple[str, ...]:
        env = self._env(env_id)
        if hasattr(env, "graded_turns"):
            return tuple(env.graded_turns(prompt_id)[1 + 2 * is_right + is_best])
        gold = gold_turns(env, env_id, prompt_id)
        if is_right:
            return gold
        if env_id not in self._others:
            ids = islice(prompts_of(env, "train", 0), NUM_OTHERS)
            self._others[env_id] = [gold_turns(env, env_id, str(one)) for one in ids]
        return next((one for one in self._others[env_id] if one[-1] != gold[-1]), (MALFORMED,))

    def _env(self, env_id: str) -> Any:
        if env_id not in self._made:
            self._made[env_id] = self._worlds[env_id]().unwrapped
        return self._made[env_id]

    def close(self) -> None:
        """Close the environments."""
        made, self._made = self._made, {}
        for env in made.values():
            if hasattr(env, "close"):
                env.close()


def gold_turns(env: Any, env_id: str, prompt_id: str) -> tuple[str, ...]:
    """Return the turns of a right answer.

    Raises:
        NoGoldTurnsError: see the class.
    """
    found: Sequence[str] | None = env.gold_turns(prompt_id) if hasattr(env, "gold_turns") else None
    if not found:
        raise NoGoldTurnsError(
            f"environment {env_id!r} has no gold_turns for prompt {prompt_id!r}; expected them with engine = 'stub': "
            "they are its right answers"
        )
    return tuple(found)
