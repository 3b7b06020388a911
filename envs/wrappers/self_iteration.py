"""Self-iteration: a wrapper in which an episode improves an earlier answer, or departs from it.

    SelfIteration({"env": "compare", "env_config": {"num_shots": 0}})

    reset(options={"prompt_id": "17, 93, 40"})                     the base task, as the inner environment asks it
        Question: Which is largest: 17, 93 or 40?
        Answer: 40
    reset(options={"prompt_id": ..., "history": [" 40\n"], "step": "improve"})      one self-iteration step
        Question: Which is largest: 17, 93 or 40?
        Answer: 40
        That answer can be improved. Keep what is right in it, correct what is wrong, and answer again.
        Answer: 93                                                 graded by the inner environment: reward 1

A history holds the policy's earlier answers to the request, oldest first. Only the last one is shown, so prompts do
not grow with depth. One episode is one step: a chain of K steps is K episodes, each on the history of the last one.

The transcript keeps the inner environment's style, which a base model continues; no other answer format is requested.
Both steps state the request and the current answer. "diverge" also asks for an answer that differs greatly, in the
order: approach so far, another approach, new answer. The text after the last "Answer:" of such a turn is graded, or
the whole turn if there is none, so that a model that answers at once is graded as well.

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, sections on reward and divergence, appendix B. The wording
is our own. Where an answer with the full reward cannot be improved, the paper's ratio is 0/0; here it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings
from rllib_srl.envs.wrappers.around import Around, known_envs

REWARDS = ("plain", "improvement")
CUE = "Answer:"
ASKED = {
    "improve": (
        f"That answer can be improved. Keep what is right in it, correct what is wrong, and answer again.\n{CUE}"
    ),
    "diverge": (
        "Answer again, by an approach that is very different from that of the answer above. First say in a few words "
        "how the answer above was reached, then name a different way to go about it, and last write "
        f"'{CUE}' and the answer it leads to.\n{CUE}"
    ),
}


@dataclass(frozen=True)
class SelfIterationSettings(Settings):
    """Settings of `SelfIteration`. Invariant: as in `Settings`."""

    env: str = ""  # an entry point of the group "rllib_srl.envs", or "package.module:Class"
    env_config: dict[str, Any] = field(default_factory=dict)  # env_config of that environment
    num_steps: Annotated[int, Within(1, 1024)] = 16  # on one request; then the info has can_iterate = False
    # "plain": the inner environment's; "improvement": `improvement`, on improve steps.
    reward: Annotated[str, OneOf(*REWARDS)] = "plain"

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        if self.env:
            return []
        return [f'env is not set; expected "package.module:Class" or one of {", ".join(known_envs())}']


class SelfIteration(Around):
    """One self-iteration step on a request of another environment.

    Invariant: as in `Around`; without a history its texts and rewards are those of the inner environment.
    """

    can_iterate = True

    @property
    def pass_reward(self) -> float | None:
        """Return the inner environment's lowest reward of a pass if its rewards are used unchanged."""
        return getattr(self.env, "pass_reward", None) if self._settings.reward == "plain" else None

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self._settings: SelfIterationSettings = read_settings(SelfIterationSettings, env_config, type(self).__name__)
        super().__init__(self._settings.env, self._settings.env_config)
        if getattr(self.env, "can_iterate", False):
            raise ValueError(f"env = {self._settings.env!r} iterates already; expected the environment inside it")
        if hasattr(self.env, "settle_group"):
            raise ValueError(
                f"env = {self._settings.env!r} is rewarded by its group; expected it around self_iteration"
            )
        self._history: tuple[str, ...] = ()
        self._before: float | None = None  # reward of the current answer, if improvements are rewarded
        self._earned = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """State a request and, with a history, the current answer and the instruction of the step.

        Args:
            seed: of the generator that draws a training prompt when no prompt id is given
            options: "prompt_id", and with it "history": earlier answers; and with that "step": "improve" (the default)
                or "diverge"

        Raises:
            ValueError: unknown option, prompt id or step; a history without a prompt id, or a step without a history.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        prompt_id, history = options.pop("prompt_id", None), _checked(options.pop("history", None) or ())
        step = options.pop("step", "")
        if options:
            raise ValueError(f"reset option {sorted(options)[0]!r} is unknown; expected prompt_id and history, or step")
        if history and prompt_id is None:
            raise ValueError("reset got a history without its prompt_id; expected both")
        if step and (step not in ASKED or not history):
            raise ValueError(
                f"step = {step!r} and {len(history)} answers in history; expected {' or '.join(ASKED)}, and at least 1"
            )
        step = step or "improve"
        is_paid_for_more = bool(history) and step == "improve" and self._settings.reward == "improvement"
        self._history, self._earned = history, 0.0
        self._before = self._reward_of_current(prompt_id) if is_paid_for_more else None
        request, info = self.env.reset(seed=seed, options=None if prompt_id is None else {"prompt_id": prompt_id})
        if history:
            request += history[-1] + text.reply(history[-1], ASKED[step])
        return request, {**info, "can_iterate": len(history) < self._settings.num_steps}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Pass the answer to the inner environment; an improvement is rewarded once the whole reward is known."""
        observation, reward, terminated, truncated, info = self.env.step(self._answer_in(action, len(self._history)))
        if self._before is not None:
            self._earned += float(reward)
            is_over = terminated or truncated
            reward = improvement(self._earned, self._before) if is_over else 0.0
        return observation, reward, terminated, truncated, info

    def _reward_of_current(self, prompt_id: str) -> float:
        """Grade the current answer with the inner environment, as its own turn."""
        self.env.reset(options={"prompt_id": prompt_id})
        return float(self.env.step(self._answer_in(self._history[-1], len(self._history) - 1))[1])

    def _answer_in(self, turn: Any, depth: int) -> Any:
        """Return the part of a turn that the inner environment grades; `depth` is the number of answers before it."""
        return turn.rpartition(CUE)[2] if depth and isinstance(turn, str) else turn


def improvement(reward: float, before: float) -> float:
    """Return max(0, (r_k - r_(k-1)) / (1 - r_(k-1))): the share of the missing reward that the answer adds, in [0, 1].

    Args:
        reward: r_k, of the new answer, in [0, 1]
        before: r_(k-1), of the answer it improves, in [0, 1]; at 1 the result is 0
    """
    return max(0.0, (reward - before) / (1.0 - before)) if before < 1.0 else 0.0


def _checked(history: Any) -> tuple[str, ...]:
    if isinstance(history, str) or not isinstance(history, Sequence) or not all(isinstance(y, str) for y in history):
        raise ValueError(f"history = {history!r}; expected a list of texts")
    return tuple(history)
