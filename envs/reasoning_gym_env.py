"""The procedural datasets of reasoning-gym, one question an episode.

    ReasoningGym({"dataset": "chain_sum", "config": {"max_terms": 2}, "num_shots": 4})

    Question: State the final answer to the following arithmetic problem: 4 + 3 =
    Answer: 7                                       reward 1

A world is the first `pool_size` entries of its dataset, each distinct question once: reasoning-gym
repeats itself (one-digit sums of two terms are 200 questions), and one question must have one prompt id.

Some graders of reasoning-gym run the answer as Python code, which text of a policy must never be:
- where that only serves to give partial credit, the answer is compared as text instead;
- where it is how arithmetic is read, only digits, + - * / and brackets reach the grader;
- where it is how algebra is read, the dataset is refused.

Source: Stojanovski et al., 2025, arXiv 2505.24760, and the package reasoning-gym.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from envs import text
from envs.question import Question, QuestionSettings, QuestionWorld, integer_in

COMPARED_AS_TEXT = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
REFUSED = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})

_SUCCESS = 0.999  # reasoning-gym gives partial credit for an answer that contains the right one
_ARITHMETIC = re.compile(r"[0-9+\-*/() ]{1,100}", re.ASCII)
_MAX_ANSWER_CHARS = 10_000
_SEED = 0  # of every dataset: the index in it is what varies
_SIZE = 20_000  # of every dataset, for some make other entries at another size; word_ladder takes no more
_MAX_POOL_SIZE = 16_384  # the entries beyond are for shots


@dataclass(frozen=True)
class ReasoningGymSettings(QuestionSettings):
    """Settings of `ReasoningGym`. Invariant: as in `QuestionSettings`."""

    dataset: str = ""  # a name that reasoning-gym knows
    config: dict = field(default_factory=dict)  # of the dataset, in reasoning-gym's own words
    level: int | None = None  # of the dataset's curriculum; `config` overrides what it sets
    pool_size: int = 4096  # entries of the dataset that make up the world
    graded: bool = False  # partial credit counts as reward
    multiline: bool = False  # answers have several lines and end with a blank one

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = super().faults()
        if not self.dataset:
            faults.append("dataset is not set; expected a name from reasoning-gym such as 'chain_sum'")
        if not 1 <= self.pool_size <= _MAX_POOL_SIZE:
            faults.append(f"pool_size = {self.pool_size}; expected 1 to {_MAX_POOL_SIZE}")
        for name in sorted({"seed", "size"} & set(self.config)):
            faults.append(f"config sets {name}, which the world sets itself; leave it out")
        return faults


class ReasoningGym(QuestionWorld):
    """Questions of one dataset of reasoning-gym.

    Invariant: a prompt id is JSON that names dataset, configuration and index, so it means the same
    question in a world whose level has been changed since.
    """

    settings_class = ReasoningGymSettings
    settings: ReasoningGymSettings
    defaults: Mapping[str, Any] = {}  # settings of a named world

    def __init__(self, env_config: Mapping[str, Any] | None = None):
        super().__init__({**self.defaults, **(env_config or {})})

    @property
    def num_questions(self) -> int:
        """Return the exact number of distinct questions in the pool, shots left out."""
        return sum(self._texts[index] not in self._shot_texts for index in self._pool())

    def _prepare(self) -> None:
        self.domain = self.settings.dataset
        if self.settings.multiline:
            self.stop_strings = ("\n\n",)
        self._datasets: dict[str, Any] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._texts: dict[int, str] = {}
        self._indices: list[int] | None = None
        self.question(self._id(0))  # a dataset that cannot be played is refused here and not in mid-training

    def _draw_shots(self) -> list[Question]:
        # They lie beyond every pool, so that making a world does not call for the pool, and its size changes no shot.
        shots: dict[str, Question] = {}
        order = text.shuffled(_SIZE - _MAX_POOL_SIZE, f"shots:{self.settings.shots_seed}")
        for _, index in zip(range(100 * self.settings.num_shots), order):
            if len(shots) == self.settings.num_shots:
                break
            question = self.question(self._id(_MAX_POOL_SIZE + index))
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
        return json.dumps(parts, sort_keys=True)

    def _pool(self) -> list[int]:
        """Return the indices of the distinct questions: of equal ones the first."""
        if self._indices is None:
            first: dict[str, int] = {}
            dataset = self._dataset(self._id(0))
            for index in range(self.settings.pool_size):
                first.setdefault(_question_text(dataset[index]), index)
            self._texts = {index: text for text, index in first.items()}
            self._indices = list(self._texts)
        return self._indices

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        entry = self._entry(prompt_id)
        asked, answer = _question_text(entry), entry["answer"]
        name = self.settings.dataset
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(f"dataset {name!r} states no answers, so it cannot be played here")
        if not self.settings.multiline and "\n" in answer.strip():
            raise ValueError(f"dataset {name!r} has answers of several lines; set multiline = True")
        return Question(asked, answer.strip(), wrong=_wrong(answer.strip()), canonical=asked)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return reasoning-gym's grade, 0 below success unless `graded`; None for an answer it cannot read."""
        if not answer or len(answer) > _MAX_ANSWER_CHARS:
            return None
        entry, name = self._entry(prompt_id), self.settings.dataset
        if name in COMPARED_AS_TEXT:
            right = entry.get("metadata", {}).get("valid_answers") or [entry["answer"]]
            return float(answer in right)
        if name in READ_AS_ARITHMETIC and ("**" in answer or not _ARITHMETIC.fullmatch(answer)):
            return None
        try:
            grade = float(self._dataset(prompt_id).score_answer(answer, entry))
        except Exception:  # graders of a hundred datasets choke on odd answers in as many ways
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
        expected = f'{{"dataset": "{self.settings.dataset}", "index": 17}}, perhaps with "config" and "level"'
        try:
            parts = json.loads(prompt_id)
        except (json.JSONDecodeError, TypeError):
            parts = None
        known = isinstance(parts, dict) and parts.keys() <= {"dataset", "index", "config", "level"}
        if not known or parts.get("dataset") != self.settings.dataset or parts.get("index") not in range(_SIZE):
            raise ValueError(f"prompt_id = {prompt_id!r}; expected {expected}")
        return parts

    def _dataset(self, prompt_id: str) -> Any:
        parts = self._parts(prompt_id)
        config, level = parts.get("config", {}), parts.get("level")
        key = json.dumps([config, level], sort_keys=True)
        if key not in self._datasets:
            self._datasets[key] = make_dataset(self.settings.dataset, config, level)
        return self._datasets[key]


def make_dataset(name: str, config: Mapping[str, Any], level: int | None) -> Any:
    """Return a dataset of reasoning-gym.

    Raises:
        ValueError: if there is no such dataset, setting or level, or its grader would run answers as code.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    if name not in DATASETS:
        raise ValueError(f"dataset = {name!r}; expected one of reasoning-gym's {', '.join(sorted(DATASETS))}")
    if name in REFUSED:
        raise ValueError(f"dataset = {name!r} is refused: its grader runs the answer as code")
    dataset_class, config_class = DATASETS[name]
    wanted: dict[str, Any] = {}
    if level is not None:
        if name not in CURRICULA:
            raise ValueError(f"level = {level}; expected None, for dataset {name!r} has no curriculum")
        curriculum = create_curriculum(name)
        highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
        if not 0 <= level <= highest:
            raise ValueError(f"level = {level}; expected 0 to {highest} for dataset {name!r}")
        curriculum.set_global_level(level)
        wanted = asdict(curriculum.generate_configuration())
    known = config_class.__dataclass_fields__
    for key in config:
        if key not in known:
            raise ValueError(f"config of dataset {name!r} has no {key!r}; expected {', '.join(sorted(known))}")
    try:
        return dataset_class(config_class(**{**wanted, **config, "seed": _SEED, "size": _SIZE}))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"config of dataset {name!r} is refused: {error}") from error


def _question_text(entry: dict[str, Any]) -> str:
    return str(entry["question"]).strip()


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
