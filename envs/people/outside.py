"""Base class for environments graded externally: by a person (rating.py) or a judge (rubric.py).

    reset(prompt)     as in the inner environment
    step(answer)  ->  "", the grader's reward, terminated
                  ->  "", 0, truncated, info["stop_reason"] = "env_timeout"        no grade within the deadline

One turn is an episode. Prompts, splits, domain and stop strings are the inner environment's. An episode without a grade
carries no information about the policy: the runner drops it from its group, so it is not trained on and grades no item.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from rllib_srl.envs import text
from rllib_srl.envs.wrappers.around import Around

UNGRADED = "env_timeout"  # stop reason of an answer without a grade in time


class GradedOutside(Around):
    """A wrapper whose prompts come from the inner environment and whose rewards come from a grader.

    Invariant: as in `Around`; observations are the inner environment's, rewards never are.
    """

    def __init__(self, world: str, world_config: dict[str, Any]):
        super().__init__(world, world_config)
        self._asked: tuple[str, str] | None = None  # prompt id and prompt, until it is answered

    @abstractmethod
    def graded(self, prompt_id: str, prompt: str, answer: str) -> tuple[float, dict[str, Any]] | None:
        """Return reward and info of an answer; None if no grade came within the deadline."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """State a prompt.

        Args:
            seed: of the generator that draws a training prompt when no prompt id is given
            options: "prompt_id", and with it an empty "history": the first turn ends an episode

        Raises:
            ValueError: for an unknown option or prompt id, or a history.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if history:
            raise ValueError(
                f"the history of {len(history)} turns ends the episode of prompt {prompt_id!r}; expected an empty one"
            )
        prompt, info = self.world.reset(seed=seed, options=None if prompt_id is None else {"prompt_id": prompt_id})
        self._asked = (str(info["prompt_id"] if prompt_id is None else prompt_id), prompt)
        return prompt, {"prompt_id": self._asked[0]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Have the answer graded; this ends the episode."""
        text.check_step(action, self._asked is not None)
        assert self._asked is not None
        (prompt_id, prompt), self._asked = self._asked, None
        stop = self.stop_strings[0] if self.stop_strings else ""
        answer = action.split(stop, 1)[0] if stop else action
        found = self.graded(prompt_id, prompt, answer.strip())
        if found is None:
            return "", 0.0, False, True, {"stop_reason": UNGRADED}
        return "", found[0], True, False, found[1]
