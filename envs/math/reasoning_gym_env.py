"""The procedural datasets of reasoning-gym, one question per episode.

    ReasoningGym({"dataset": "chain_sum", "config": {"max_terms": 2}, "num_shots": 4})

    Question: State the final answer to the following arithmetic problem: 4 + 3 =
    Answer: 7                                       reward 1

An environment is the distinct questions among the first `pool_size` entries of its dataset: reasoning-gym
repeats questions (one-digit sums of two terms are 200 questions), and one question must have one prompt id.

Some graders of reasoning-gym run the answer as Python code, which must never happen to a policy's text:
- graders that only do so to give partial credit: the answer is compared as text instead;
- graders that read arithmetic: only digits, + - * / and brackets reach the grader;
- graders that read algebra: envs/math/grading.py compares formulas; the constant of an integral may be left out.

Two graders reward wrong answers and are replaced: game_of_life_halting accepts any text for "True", coin_flip
accepts "0" for any probability (and would compute "1e999999999" without end).

Not supported are boxnet and rush_hour, which have no reference answer, and composite;
several datasets are mixed by `.environment(envs=..., mixture=...)` instead.
Single entries without an answer (base_conversion writes 0 as an empty text; a program of ab may end in
an empty text) are left out of the pool.

Source: Stojanovski et al., 2025, arXiv 2505.24760, and the package reasoning-gym.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.math import grading
from rllib_srl.envs.math.answer_text import plain
from rllib_srl.envs.math.quantity import numbers_in
from rllib_srl.envs.math.reasoning_gym_data import SIZE, answer_of, make_dataset, question_of
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings, integer_in
from rllib_srl.envs.settings import Within

COMPARED_AS_TEXT = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
READ_AS_ALGEBRA = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
PAID_FOR_ANY_TEXT = frozenset({"game_of_life_halting"})
READ_AS_NUMBER = {"coin_flip": Fraction(1, 10_000)}  # dataset -> tolerance of a right answer

_CONSTANT = re.compile(r"\s*\+\s*[cC]\s*$")
_NUM_PROBED = 64  # entries checked before a dataset is refused for having no answers
_SUCCESS = 0.999  # reasoning-gym gives partial credit for an answer that contains the right one
_ARITHMETIC = re.compile(r"[0-9+\-*/() ]{1,100}", re.ASCII)
_MAX_ANSWER_CHARS = 10_000
_MAX_POOL_SIZE = 16_384  # the entries beyond are for shots


@dataclass(frozen=True)
class ReasoningGymSettings(QuestionSettings):
    """Settings of `ReasoningGym`. Invariant: as in `QuestionSettings`."""

    dataset: str = ""  # name of a dataset in reasoning-gym
    config: dict[str, Any] = field(default_factory=dict)  # of the dataset, in reasoning-gym's own words
    level: int | None = None  # of all attributes of the dataset's curriculum; `config` overrides what it sets
    levels: dict[str, Any] = field(default_factory=dict)  # of single attributes of the curriculum, by name
    pool_size: Annotated[int, Within(1, _MAX_POOL_SIZE)] = 4096  # entries of the dataset that the environment uses
    graded: bool = False  # partial credit counts as reward
    multiline: bool = False  # answers have several lines and end with a blank one

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = [
            f"config has {name}; expected it unset, because the environment sets it"
            for name in sorted({"seed", "size"} & set(self.config))
        ]
        if not self.dataset:
            errors.append("dataset is not set; expected a name from reasoning-gym such as 'chain_sum'")
        return errors


class ReasoningGym(QuestionEnv):
    """Questions of one dataset of reasoning-gym.

    Invariant: a prompt id is JSON with dataset, configuration and index, so it names the same
    question in an environment whose level has changed.
    """

    settings_class = ReasoningGymSettings
    settings: ReasoningGymSettings
    defaults: Mapping[str, Any] = {}  # settings of a named environment

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        super().__init__({**self.defaults, **(env_config or {})})

    @property
    def num_questions(self) -> int:
        """Return the exact number of distinct questions in the pool, without the shots."""
        return sum(self._texts[index] not in self._shot_texts for index in self._pool())

    def _prepare(self) -> None:
        self.domain = self.settings.dataset
        if self.settings.multiline:
            self.stop_strings = ("\n\n",)
        self._datasets: dict[str, Any] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._texts: dict[int, str] = {}
        self._indices: list[int] | None = None
        self._probe()

    def _probe(self) -> None:
        # Refuse an unplayable dataset here and not in the middle of training.
        first = self._dataset(self._id(0))
        for index in range(_NUM_PROBED):
            if answer_of(first[index], self.settings.dataset):
                self.question(self._id(index))
                return
        raise ValueError(f"dataset {self.settings.dataset!r} has no reference answers; expected another one")

    def _draw_shots(self) -> list[Question]:
        # Shots lie beyond every pool: making an environment does not need the pool, whose size changes no shot.
        shots: dict[str, Question] = {}
        order = text.shuffled(SIZE - _MAX_POOL_SIZE, f"shots:{self.settings.shots_seed}")
        for _, index in zip(range(100 * self.settings.num_shots), order):
            if len(shots) == self.settings.num_shots:
                break
            prompt_id = self._id(_MAX_POOL_SIZE + index)
            if answer_of(self._entry(prompt_id), self.settings.dataset):
                question = self.question(prompt_id)
                shots.setdefault(question.text, question)
        if len(shots) < self.settings.num_shots:
            raise ValueError(
                f"num_shots = {self.settings.num_shots}; {self.settings.dataset} has {len(shots)} questions"
            )
        return list(shots.values())

    def _num_ids(self) -> int:
        return len(self._pool())

    def _prompt_id(self, number: int) -> str:
        return self._id(self._pool()[number])

    def _id(self, index: int) -> str:
        parts: dict[str, Any] = {"dataset": self.settings.dataset, "index": index}
        if self.settings.config:
            parts["config"] = self.settings.config
        if self.settings.level is not None:
            parts["level"] = self.settings.level
        if self.settings.levels:
            parts["levels"] = self.settings.levels
        return json.dumps(parts, sort_keys=True)

    def _pool(self) -> list[int]:
        """Return the indices of the distinct questions that have an answer: the first of equal ones."""
        if self._indices is None:
            first: dict[str, int] = {}
            dataset = self._dataset(self._id(0))
            for index in range(self.settings.pool_size):
                entry = dataset[index]
                if answer_of(entry, self.settings.dataset):
                    first.setdefault(question_of(entry), index)
            self._texts = {index: text for text, index in first.items()}
            self._indices = list(self._texts)
        return self._indices

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        entry = self._entry(prompt_id)
        name = self.settings.dataset
        asked, answer = question_of(entry), answer_of(entry, name)
        if not answer:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected an entry that has an answer in dataset {name!r}")
        if not self.settings.multiline and "\n" in answer:
            raise ValueError(f"dataset {name!r} has answers of several lines; set multiline = True")
        return Question(asked, answer, wrong=_wrong(answer), canonical=asked)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return reasoning-gym's grade, 0 below success unless `graded`; None for an answer it cannot read."""
        if not answer or len(answer) > _MAX_ANSWER_CHARS:
            return None
        entry, name = self._entry(prompt_id), self.settings.dataset
        if name in READ_AS_NUMBER:
            return _near(entry["answer"], answer, READ_AS_NUMBER[name])
        if name in COMPARED_AS_TEXT or name in PAID_FOR_ANY_TEXT:
            right = entry.get("metadata", {}).get("valid_answers") or [entry["answer"]]
            return float(answer in right)
        if name in READ_AS_ALGEBRA:
            return grading.grade(_CONSTANT.sub("", entry["answer"]), _CONSTANT.sub("", answer), kind="symbolic")
        if name in READ_AS_ARITHMETIC and ("**" in answer or not _ARITHMETIC.fullmatch(answer)):
            return None
        score = self._dataset(prompt_id).score_answer
        try:
            grade = float(score(answer, entry))
        except Exception:  # a hundred graders fail on odd answers with any exception
            return None
        if not self.settings.graded:
            return float(grade >= _SUCCESS)
        return min(max(grade, 0.0), 1.0)

    def _entry(self, prompt_id: str) -> dict[str, Any]:
        parts = self._parts(prompt_id)
        if prompt_id not in self._entries:  # one episode asks for its entry several times
            self._entries = {prompt_id: self._dataset(prompt_id)[parts["index"]]}
        return self._entries[prompt_id]

    def _parts(self, prompt_id: str) -> dict[str, Any]:
        expected = f'{{"dataset": "{self.settings.dataset}", "index": 17}}, perhaps with "config", "level" and "levels"'
        try:
            parts: Any = json.loads(prompt_id)
        except (ValueError, TypeError, RecursionError):
            parts = None
        known = isinstance(parts, dict) and parts.keys() <= {"dataset", "index", "config", "level", "levels"}
        if not known or parts.get("dataset") != self.settings.dataset or parts.get("index") not in range(SIZE):
            raise ValueError(f"prompt_id = {prompt_id!r}; expected {expected}")
        checked: dict[str, Any] = parts
        return checked

    def _dataset(self, prompt_id: str) -> Any:
        parts = self._parts(prompt_id)
        config, level, levels = parts.get("config", {}), parts.get("level"), parts.get("levels", {})
        key = json.dumps([config, level, levels], sort_keys=True)
        if key not in self._datasets:
            self._datasets[key] = make_dataset(self.settings.dataset, config, level, levels)
        return self._datasets[key]


def _near(right: str, answer: str, tolerance: Fraction) -> float | None:
    """Return 1 for a number within `tolerance` and 1 % of the right one, 0 for another, None for no number."""
    values = numbers_in(plain(answer))
    wanted = numbers_in(right)
    return float(any(abs(a - b) <= min(tolerance, abs(b) / 100) for a in values for b in wanted)) if values else None


def _wrong(answer: str) -> str:
    value = integer_in(answer)
    return "unknown" if value is None else str(value + 1)


class ChainSum(ReasoningGym):
    """Sums and differences of small numbers. Invariant: as in `ReasoningGym`."""

    defaults = {"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}}

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for the right number, 0 for another, None for no number."""
        return None if integer_in(answer) is None else super().grade(prompt_id, answer.removesuffix("."))


class Products(ChainSum):
    """Products of two small numbers. Invariant: as in `ReasoningGym`."""

    defaults = {"dataset": "products", "config": {"max_digits": 1}}
