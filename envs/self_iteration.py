"""Answer again: a world around any world, in which an episode improves an earlier answer, or departs from it.

    SelfIteration({"world": "compare", "world_config": {"num_shots": 0}})

    reset(options={"prompt_id": "17, 93, 40"})                     the base task, as the inner world asks it
        Question: Which is largest: 17, 93 or 40?
        Answer: 40
    reset(options={"prompt_id": ..., "history": [" 40\n"], "step": "improve"})      one self-iteration step
        Question: Which is largest: 17, 93 or 40?
        Answer: 40
        That answer can be improved. Keep what is right in it, correct what is wrong, and answer again.
        Answer: 93                                                 graded by the inner world: reward 1

A history holds the policy's earlier answers to the request, oldest first; only the last is shown, so that prompts do
not grow with depth. One episode is one step: a chain of K steps is K episodes, each on the history the last one left.

The transcript style is the inner world's, which a base model continues; no answer is asked for in another format.
Both steps state the request and the current answer. "diverge" further asks for an answer that differs greatly, in the
order: approach so far, another approach, new answer. What counts is what follows the last "Answer:" of such a turn,
all of it where there is none, so that a model which answers at once is graded as well.

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, sections on reward and divergence, appendix B. The wording
is our own. Where an answer with the full reward cannot be improved, the paper's ratio is 0/0; here it is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium

from envs import text
from envs.question import read_settings

GROUP = "rllib_srl.envs"
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
class SelfIterationSettings:
    """Settings of `SelfIteration`. Invariant: `faults` is empty for the settings of a world that exists."""

    world: str = ""  # an entry point of the group "rllib_srl.envs", or "package.module:Class"
    world_config: dict = field(default_factory=dict)  # env_config of that world
    num_steps: int = 16  # self-iteration steps on one request, after which the info says can_iterate = False
    reward: str = "plain"  # "plain": the inner world's; "improvement": the share of what was missing, on improve steps

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = []
        if not self.world:
            faults.append(f'world is not set; expected "package.module:Class" or one of {", ".join(known_worlds())}')
        if not 1 <= self.num_steps <= 1024:
            faults.append(f"num_steps = {self.num_steps}; expected 1 to 1024")
        if self.reward not in REWARDS:
            faults.append(f"reward = {self.reward!r}; expected one of {', '.join(REWARDS)}")
        return faults


class SelfIteration(gymnasium.Env[str, str]):
    """A `gymnasium.Env` that plays one self-iteration step on a request of another world.

    Invariant: without a history it is the inner world, text for text and reward for reward. Prompt ids, splits, domain
    and stop strings are always the inner world's.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    can_iterate = True

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self._settings: SelfIterationSettings = read_settings(SelfIterationSettings, env_config, type(self).__name__)
        self.world = inner_world(self._settings.world, self._settings.world_config)
        if getattr(self.world, "can_iterate", False):
            raise ValueError(f"world = {self._settings.world!r} iterates already; expected the world inside it")
        if hasattr(self.world, "settle_group"):
            raise ValueError(
                f"world = {self._settings.world!r} is paid by its group; expected it around self_iteration, not inside"
            )
        self.domain = str(getattr(self.world, "domain", self._settings.world))
        self.stop_strings: tuple[str, ...] = tuple(getattr(self.world, "stop_strings", ()))
        if hasattr(self.world, "domain_of"):
            self.domain_of = self.world.domain_of
        self._history: tuple[str, ...] = ()
        self._before: float | None = None  # reward of the current answer, where the reward is for improving it
        self._earned = 0.0

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the inner world's prompt ids of `split`, in an order of `seed`."""
        return self.world.prompt_ids(split, seed)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn reward 1 in the base task, and in a step that is paid plainly."""
        return self.world.gold_turns(prompt_id)

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the inner world's tools, for the chat template."""
        return getattr(self.world, "tool_schemas", [])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """State a request and, with a history, the current answer to it and what is asked of the next.

        Args:
            seed: of the generator that draws a training prompt when no prompt id is given
            options: "prompt_id", and with it "history": earlier answers; and with that "step": "improve" (the default)
                or "diverge"

        Raises:
            ValueError: for an unknown option, prompt id or step, or a history or step without what it belongs to.
        """
        super().reset(seed=seed)
        options = dict(options or {})
        prompt_id, history = options.pop("prompt_id", None), _checked(options.pop("history", None) or ())
        step = options.pop("step", "")
        if options:
            raise ValueError(f"reset option {sorted(options)[0]!r} is unknown; expected prompt_id and history, or step")
        if history and prompt_id is None:
            raise ValueError("reset got a history without the prompt_id it belongs to")
        if step and (step not in ASKED or not history):
            raise ValueError(
                f"step = {step!r} on a history of {len(history)} answers; expected {' or '.join(ASKED)}, and an answer"
            )
        step = step or "improve"
        is_paid_for_more = bool(history) and step == "improve" and self._settings.reward == "improvement"
        self._history, self._earned = history, 0.0
        self._before = self._reward_of_current(prompt_id) if is_paid_for_more else None
        request, info = self.world.reset(seed=seed, options=None if prompt_id is None else {"prompt_id": prompt_id})
        if history:
            request += history[-1] + text.reply(history[-1], ASKED[step])
        return request, {**info, "can_iterate": len(history) < self._settings.num_steps}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Hand the answer to the inner world; an improvement is paid once its whole reward is known."""
        observation, reward, terminated, truncated, info = self.world.step(self._answer_in(action, len(self._history)))
        if self._before is not None:
            self._earned += float(reward)
            is_over = terminated or truncated
            reward = improvement(self._earned, self._before) if is_over else 0.0
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """Close the inner world."""
        self.world.close()

    def _reward_of_current(self, prompt_id: str) -> float:
        """Grade the current answer by the inner world, as a turn of its own."""
        self.world.reset(options={"prompt_id": prompt_id})
        return float(self.world.step(self._answer_in(self._history[-1], len(self._history) - 1))[1])

    def _answer_in(self, turn: Any, depth: int) -> Any:
        """Return what the inner world grades of a turn that was written `depth` answers into a history."""
        return turn.rpartition(CUE)[2] if depth and isinstance(turn, str) else turn


def improvement(reward: float, before: float) -> float:
    """Return max(0, (r_k - r_(k-1)) / (1 - r_(k-1))): the share of what was missing that the answer adds, in [0, 1].

    Args:
        reward: r_k, of the new answer, in [0, 1]
        before: r_(k-1), of the one it improves, in [0, 1]; at 1 nothing is left to earn, and the result is 0
    """
    return max(0.0, (reward - before) / (1.0 - before)) if before < 1.0 else 0.0


def _checked(history: Any) -> tuple[str, ...]:
    if isinstance(history, str) or not isinstance(history, Sequence) or not all(isinstance(y, str) for y in history):
        raise ValueError(f"history = {history!r}; expected a list of texts")
    return tuple(history)


def known_worlds() -> list[str]:
    """Return the names of the installed entry points, sorted."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def inner_world(world: str, world_config: Mapping[str, Any]) -> Any:
    """Make the world inside a wrapper.

    Args:
        world: an entry point of the group "rllib_srl.envs", or "package.module:Class"
        world_config: its env_config

    Raises:
        ValueError: no such world, or one that cannot be asked the same again.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    point = EntryPoint(world, world, GROUP) if ":" in world else points.get(world)
    if point is None:
        raise ValueError(f'world = {world!r}; expected "package.module:Class" or one of {", ".join(known_worlds())}')
    try:
        make = point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"world = {world!r} cannot be imported ({type(error).__name__}: {error})") from error
    inner = make(dict(world_config))
    if not hasattr(inner, "prompt_ids"):
        raise ValueError(f"world = {world!r} has no prompt_ids; expected a world that can be asked the same again")
    return inner
