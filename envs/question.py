"""Base class for environments that ask one question with one right answer, optionally with retries.

    reset  ->  "<shots>Question: 3 + 4\nAnswer:"
    step(" 8\n")  ->  "Wrong. Try again.\nAnswer:", 0.0        only with feedback_turns > 0
    step(" 7\n")  ->  "", reward, terminated

A subclass returns its number of questions, maps a number to a prompt id and a prompt id to a `Question`. This module
implements the rest: shots, splits, prompt order, feedback and replay of a history.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import gymnasium

from rllib_srl.envs import text
from rllib_srl.envs.settings import Settings, Within, read_settings

_DONE_GRADE = 0.999  # partial credit below this does not count as a success


@dataclass(frozen=True)
class Question:
    """One question.

    Invariant: `answer` earns grade 1 and `wrong` earns less; equal `text` means the same question.
    """

    text: str
    answer: str
    wrong: str  # well-formed but wrong, for the shots that show what feedback looks like
    canonical: str  # text whose hash decides the split


@dataclass(frozen=True)
class QuestionSettings(Settings):
    """Settings of every question environment. Invariant: as in `Settings`."""

    num_shots: Annotated[int, Within(0, 64)] = 4  # solved questions before the one that is asked
    shots_seed: int = 0  # which questions they are
    feedback_turns: Annotated[int, Within(0, 16)] = 0  # further tries after a wrong answer
    retry_reward: Annotated[float, Within(0, 1)] = 0.5  # share of the reward of a right answer on a further try
    instruction: str = ""  # text before the shots and the question, in its own paragraph
    system_prompt: str = ""  # a chat's system message; in text it stands before everything else


class QuestionEnv(gymnasium.Env[str, str]):
    """A `gymnasium.Env` that asks one question per episode.

    Invariant: the same settings and prompt id give the same texts and rewards in every process, and
    instances share no mutable state.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    stop_strings: tuple[str, ...] = ("\n",)
    settings_class: ClassVar[type[QuestionSettings]] = QuestionSettings
    domain: str = "question"
    again: str = text.WRONG  # reply to a wrong answer when another try is left

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        self.observation_space = text.TextSpace()
        self.action_space = text.TextSpace()
        self.settings: QuestionSettings = read_settings(self.settings_class, env_config, type(self).__name__)
        self._prepare()
        shots = self._draw_shots()
        self._shot_texts = frozenset(question.text for question in shots)
        self._header = "".join(self._shot(index, question) for index, question in enumerate(shots))
        self._question: Question | None = None
        self._num_tries = 0

    @property
    @abstractmethod
    def num_questions(self) -> int:
        """Return the number of distinct questions in both splits together, without the shots."""

    @property
    def chance(self) -> float | None:
        """Return the probability that a well-formed guess is right; None where it is not meaningful."""
        return None

    @abstractmethod
    def _num_ids(self) -> int:
        """Return the number of prompt ids."""

    @abstractmethod
    def _prompt_id(self, number: int) -> str:
        """Return the prompt id of question `number`, 0 <= number < _num_ids(); all ids are different questions."""

    @abstractmethod
    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`. Raises `ValueError` if this environment has no such question."""

    @abstractmethod
    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return the grade of an answer in [0, 1], or None if it cannot be read."""

    def _prepare(self) -> None:
        """Set up what the settings require, before the shots are drawn."""

    def _draw_shots(self) -> list[Question]:
        shots = [self.question(prompt_id) for prompt_id in self._shot_ids()]
        if len(shots) < self.settings.num_shots:
            raise ValueError(f"num_shots = {self.settings.num_shots}; expected at most {len(shots)} (all questions)")
        return shots

    def _shot_ids(self) -> list[str]:
        order = text.shuffled(self._num_ids(), f"shots:{self.settings.shots_seed}")
        return [self._prompt_id(number) for _, number in zip(range(self.settings.num_shots), order)]

    @property
    def system_prompt(self) -> str:
        """Return the system prompt of every episode; the transcript places it."""
        return self.settings.system_prompt

    def _instruction(self) -> str:
        """Return the text before the shots, "" for none."""
        return self.settings.instruction

    def _request_of(self, question: Question) -> str:
        """Return the text of a question up to where its answer begins."""
        return text.asked(question.text)

    def _shot(self, index: int, question: Question) -> str:
        # Every second shot shows a wrong answer first, so that both kinds of episode appear in the prompt.
        retried = self.settings.feedback_turns > 0 and index % 2 == 1
        return text.solved(self._request_of(question), *([question.wrong] if retried else []), question.answer)

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        """Yield the prompt ids of `split`, each question once.

        Args:
            split: "train" or "heldout"; the two share no question, whatever the seeds
            seed: of the order
        """
        text.check_split(split)
        for number in text.shuffled(self._num_ids(), f"{split}:{seed}"):
            prompt_id = self._prompt_id(number)
            if self.split_of(prompt_id) == split:
                yield prompt_id

    @property
    def shot_ids(self) -> tuple[str, ...]:
        """Return the prompt ids of the shots."""
        return tuple(self._shot_ids())

    def split_of(self, prompt_id: str) -> str:
        """Return "train", "heldout", or "shots" for a question that every prompt already shows with its answer."""
        question = self.question(prompt_id)
        return "shots" if question.text in self._shot_texts else text.split_of(question.canonical)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turns that earn reward 1."""
        return [f" {self.question(prompt_id).answer}{self.stop_strings[0]}"]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Ask a question and return the transcript so far.

        Args:
            seed: of the generator that draws a training question when no prompt id is given
            options: "prompt_id", and with it "history": turns of the policy to be replayed

        Raises:
            ValueError: for an unknown option or prompt id, or a history that ends the episode.
        """
        super().reset(seed=seed)
        prompt_id, history = text.reset_options(options)
        if prompt_id is None:
            prompt_id = next(self.prompt_ids("train", int(self.np_random.integers(2**31))), None)
            if prompt_id is None:
                raise ValueError(f"{type(self).__name__} trains on none of {self._num_ids()} questions; expected more")
        self._question, self._num_tries, self._asked_id = self.question(prompt_id), 0, prompt_id
        self._begin_episode()
        said = self._instruction()
        transcript = (f"{said}\n\n" if said else "") + self._opening()
        return transcript + text.replayed(self.step, history, prompt_id), {"prompt_id": prompt_id}

    def _begin_episode(self) -> None:
        """Set up the episode of `self._question`, before its prompt is stated."""

    def _opening(self) -> str:
        """Return the prompt-side text of the episode, up to where the policy's first turn begins."""
        assert self._question is not None
        return self._header + self._request_of(self._question)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade one turn; return the reply, the reward, and whether the episode is over."""
        text.check_step(action, self._question is not None)
        return self._taken(action)

    def _taken(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take a turn of an episode under way."""
        return self._graded(action, self.answer_in(action))

    def _graded(self, action: str, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grade the answer that a turn states; end the episode, or ask again."""
        return self._rewarded(action, self.grade(self._asked_id, answer))

    def _rewarded(self, action: str, grade: float | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return the result of a turn with this grade: end the episode, or ask again."""
        share = self.settings.retry_reward if self._num_tries else 1.0
        self._num_tries += 1
        succeeded = grade is not None and grade >= _DONE_GRADE
        if not succeeded and self._num_tries <= self.settings.feedback_turns:
            return text.reply(action, self.again), 0.0, False, False, {}
        self._question = None
        info = {"stop_reason": "unparsable"} if grade is None else {}
        return "", share * (grade or 0.0), True, False, info

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return the final answer of an episode, right or wrong, in a form that equal answers share.

        None stands for an answer that cannot be read.
        """
        answer = self.answer_in(turns[-1]) if turns else ""
        if self.grade(prompt_id, answer) is None:
            return None
        value = integer_in(answer)
        return " ".join(answer.casefold().split()) if value is None else str(value)

    def answer_in(self, turn: str) -> str:
        """Return the answer stated in a turn: the text up to the stop string, without white space around it."""
        return turn.split(self.stop_strings[0], 1)[0].strip()


class Listed:
    """Mixin of a question environment whose prompt ids are a list.

    Invariant: `_ids` exists before the shots are drawn, and never changes.
    """

    _ids: Sequence[str]
    settings: QuestionSettings

    @property
    def num_questions(self) -> int:
        """Return the number of questions in both splits, without the shots."""
        return len(self._ids) - self.settings.num_shots

    def _num_ids(self) -> int:
        return len(self._ids)

    def _prompt_id(self, number: int) -> str:
        return self._ids[number]


def integer_in(answer: str) -> int | None:
    """Return the integer that `answer` states, or None; a final full stop is ignored."""
    digits = answer.removesuffix(".")
    if not digits.removeprefix("-").isdecimal() or not digits.isascii() or len(digits) > 30:
        return None
    return int(digits)
