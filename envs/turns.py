"""Base class for environments of several turns: action and reply, until the task is done or the turns are used up.

    reset  ->  "<shots>Question: Registers p, c, k. What is in c?\nAction:"
    step(" get c\n")       ->  "c = 40\nAction:", 0.0
    step(" answer 40\n")   ->  "", 1.0, terminated                   after `num_turns` turns: truncated

A subclass maps a number to a prompt id that holds the whole task, begins a task, and answers one turn. This module
implements the rest: shots (tasks played by their gold turns), splits, prompt order and replay of a history.

The transcript only grows: texts are concatenated, and earlier text never changes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import gymnasium

from rllib_srl.envs import text
from rllib_srl.envs.settings import Settings, Within, read_settings

MOST_TURN_CHARACTERS = 1000  # no valid action is longer; a longer turn is read as an unknown action


@dataclass(frozen=True)
class TurnSettings(Settings):
    """Settings of every environment of several turns. Invariant: as in `Settings`."""

    num_shots: Annotated[int, Within(0, 64)] = 2  # tasks played out in the prompt before the task itself
    shots_seed: int = 0  # which tasks they are
    num_turns: Annotated[int, Within(1, 256)] = 4  # turns of an episode


@dataclass(frozen=True)
class Answer:
    """The environment's reply to one turn. Invariant: only the last reply of an episode has a reward."""

    said: str = ""  # without the cue
    reward: float = 0.0
    is_over: bool = False
    is_read: bool = True  # False: the turn is not a valid action
    info: dict[str, Any] = field(default_factory=dict)


class TurnEnv(gymnasium.Env[str, str]):
    """A `gymnasium.Env` in which an episode takes up to `num_turns` turns of one line each.

    Invariant: the same settings, prompt id and turns give the same texts and rewards in every process, and instances
    share no mutable state.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    stop_strings: tuple[str, ...] = ("\n",)
    settings_class: ClassVar[type[TurnSettings]] = TurnSettings
    domain: str = "turns"
    opening: ClassVar[str] = "Question: "  # first word of a task
    cue: ClassVar[str] = "Action:"  # where the policy's turn begins

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self.settings = read_settings(self.settings_class, env_config, type(self).__name__)
        self._num_left = 0
        self._header = ""
        shots = self._draw_shots()
        self._shot_questions = frozenset(self.canonical(prompt_id) for prompt_id in shots)
        self._header = "".join(self._shot(prompt_id) for prompt_id in shots)
        self._num_left = 0

    @abstractmethod
    def _num_ids(self) -> int:
        """Return the number of values that `_prompt_id` accepts."""

    @abstractmethod
    def _prompt_id(self, number: int) -> str | None:
        """Return prompt id `number`, 0 <= number < _num_ids(), or None if it is not a task; no two are the same."""

    @abstractmethod
    def canonical(self, prompt_id: str) -> str:
        """Return the text that decides the split of a task: equal for tasks whose solutions reveal each other.

        Raises:
            ValueError: this environment has no such task.
        """

    @abstractmethod
    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return turns that earn reward 1."""

    def shot_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that a shot shows: the gold turns, if a policy can choose them from what it sees."""
        return self.gold_turns(prompt_id)

    @abstractmethod
    def begin(self, prompt_id: str) -> str:
        """Set up a task and return its opening text, without the cue.

        Raises:
            ValueError: this environment has no such task.
        """

    @abstractmethod
    def answer(self, action: str) -> Answer:
        """Return the reply to one action, as `action_in` reads it; a turn that is too long to be an action is ""."""

    def action_in(self, turn: str) -> str:
        """Return the action stated in a turn."""
        return turn.split(self.stop_strings[0], 1)[0].strip()

    def at_the_end(self) -> tuple[float, dict[str, Any]]:
        """Return reward and info of an episode that used up its turns."""
        return 0.0, {}

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of `split`, each task once.

        Args:
            split: "train" or "heldout"; the two share no task, whatever the seeds
            seed: of the order
        """
        text.check_split(split)
        for prompt_id in self._shuffled(f"{split}:{seed}"):
            if self.split_of(prompt_id) == split:
                yield prompt_id

    def split_of(self, prompt_id: str) -> str:
        """Return "train", "heldout", or "shots" for a task that every prompt already shows played."""
        canonical = self.canonical(prompt_id)
        return "shots" if canonical in self._shot_questions else text.split_of(canonical)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Set a task and return the transcript so far.

        Args:
            seed: of the generator that draws a training task when no prompt id is given
            options: "prompt_id", and with it "history": turns of the policy to be replayed

        Raises:
            ValueError: for an unknown option or prompt id, or a history that ends the episode.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if prompt_id is None:
            prompt_id = next(self.prompt_ids("train", int(self.np_random.integers(2**31))), None)
            if prompt_id is None:
                raise ValueError(f"{type(self).__name__} trains on none of {self._num_ids()} tasks; expected more")
        transcript = self._header + self._started(prompt_id)
        return transcript + text.replayed(self.step, history, prompt_id), {"prompt_id": prompt_id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer one turn; return the reply, the reward, and whether the episode is over."""
        text.check_step(action, self._num_left > 0)
        line = self.action_in(action)
        answer = self.answer(line if len(line) <= MOST_TURN_CHARACTERS else "")
        self._num_left = 0 if answer.is_over else self._num_left - 1
        if answer.is_over:
            return "", answer.reward, True, False, answer.info
        if self._num_left:
            return text.reply(action, self._with_cue(answer.said)), 0.0, False, False, answer.info
        reward, info = self.at_the_end()
        unread = {} if answer.is_read else {"stop_reason": "unparsable"}
        return "", reward, False, True, {**answer.info, **info, **unread}

    def _draw_shots(self) -> list[str]:
        wanted = self.settings.num_shots
        drawn = [prompt_id for _, prompt_id in zip(range(wanted), self._shuffled(f"shots:{self.settings.shots_seed}"))]
        if len(drawn) < wanted:
            raise ValueError(f"num_shots = {wanted}; expected at most {len(drawn)} (all tasks)")
        return drawn

    def _shot(self, prompt_id: str) -> str:
        turns = self.shot_turns(prompt_id)
        transcript = self._started(prompt_id)
        for turn in turns:
            transcript += turn + self.step(turn)[0]
        return f"{transcript}\n"

    def _shuffled(self, seed: str) -> Iterator[str]:
        for number in text.shuffled(self._num_ids(), seed):
            prompt_id = self._prompt_id(number)
            if prompt_id is not None:
                yield prompt_id

    def _started(self, prompt_id: str) -> str:
        introduction = self.begin(prompt_id)
        self._num_left = self.settings.num_turns
        return self.opening + self._with_cue(introduction)

    def _with_cue(self, said: str) -> str:
        return f"{said}\n{self.cue}"
