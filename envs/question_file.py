"""Questions from a file: GSM8K, MATH, AIME, CHAMP or your own, in JSONL, JSON, CSV or Parquet, local or from the hub.

    QuestionFile({"path": "gsm8k/train.jsonl", "heldout_path": "gsm8k/test.jsonl", "num_shots": 4})

    Question: A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?
    Answer: 3                                       reward 1; "3.0" and "\\boxed{3}" as well; 4: 0; nothing: unparsable

    with style = "reasoned" the turn is as long as it needs to be, and its last answer counts:
    Answer: It takes 2/2=1 bolt of white fiber. So the total is 2+1=3 bolts.
    #### 3

Which fields are read is told in envs/question_rows.py, what counts as right in envs/math_grading.py.

The reward is (1 - format_weight) x content + format_weight x format, where content is 1 for a right answer and format
is 1 for one that is marked as `answer_format` asks; both are in the info, apart. With `needs_format` an answer marked
otherwise has content 0.

Without `heldout_path` a fixed share of the questions is held out. A question that stands in both files is held out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs import text
from envs.math_grading import KINDS, Stated, choice_in, final_answer, grade, numbers_in, plain
from envs.math_pool import symbolic_pool
from envs.question import Listed, Question, QuestionSettings, QuestionWorld
from envs.question_rows import LETTERS, SUFFIXES, Problem, RowFault, problem_of, rows_of

STYLES = ("direct", "reasoned")
BAD_ROWS = ("refuse", "skip")
# How a turn states its answer under each `answer_format`.
_STATED = {"any": "{}", "boxed": "\\boxed{{{}}}", "hashes": "#### {}", "phrase": "The answer is {}."}
_MAX_FAULTS_SHOWN = 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionFileSettings(QuestionSettings):
    """Settings of `QuestionFile`. Invariant: as in `QuestionSettings`."""

    path: str = ""  # the data file
    heldout_path: str = ""  # a second one, whose questions are the held-out ones
    hub_id: str = ""  # a data set of the Hugging Face hub, within which the paths are then
    question_field: str = ""  # where it is none of those that are known
    answer_field: str = ""
    bad_rows: str = "refuse"  # or "skip": use the rest, and log what was left out
    domain: str = ""  # what continual learning counts; "": the name of the file
    kind: str = "auto"  # which answers count: see `envs.math_grading.grade`
    style: str = "direct"  # one line, or "reasoned"
    answer_format: str = "any"  # how the answer is to be marked: "any", "boxed", "hashes" or "phrase"
    format_weight: float = 0.0  # share of the reward that is for the format
    needs_format: bool = False  # an answer in another format is no answer
    deadline_s: float = 2.0  # of symbolic grading

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        faults = super().faults()
        if not self.path:
            faults.append(f"path is not set; expected a file that ends in {', '.join(SUFFIXES)}")
        known = {"bad_rows": BAD_ROWS, "kind": KINDS, "style": STYLES, "answer_format": tuple(_STATED)}
        for name, values in known.items():
            if getattr(self, name) not in values:
                faults.append(f"{name} = {getattr(self, name)!r}; expected one of {', '.join(values)}")
        if not 0 <= self.format_weight <= 1:
            faults.append(f"format_weight = {self.format_weight}; expected 0 to 1")
        if (self.format_weight or self.needs_format) and self.answer_format == "any":
            faults.append(f"answer_format = 'any' is always kept; expected {', '.join(list(_STATED)[1:])} to pay for")
        if not 0 < self.deadline_s <= 60:
            faults.append(f"deadline_s = {self.deadline_s}; expected more than 0, at most 60")
        return faults


class QuestionFile(Listed, QuestionWorld):
    """Questions with a mathematical answer, read from a file.

    Invariant: a prompt id is a hash of the question's text, so it means the same question wherever that stands.
    """

    settings_class = QuestionFileSettings
    settings: QuestionFileSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of distinct questions, shots left out."""
        return len(self._ids) - len(self._shot_texts)

    def _prepare(self) -> None:
        settings = self.settings
        self.stop_strings = ("\n",) if settings.style == "direct" else ("\nQuestion:",)
        self.domain = settings.domain or Path(settings.path).stem
        self.num_skipped = self.num_repeated = 0
        self._problems = self._read(settings.path)
        self._heldout = self._read(settings.heldout_path) if settings.heldout_path else {}
        self._problems |= self._heldout
        self._ids = list(self._problems)
        self._parts: dict[str, float] = {}

    def _read(self, path: str) -> dict[str, Problem]:
        """Return the problems of a file by prompt id.

        Raises:
            ValueError: naming the broken rows, or a file that has no good one.
        """
        local = local_file(self.settings.hub_id, path)
        about = local.stat()
        read = _problems_in(
            local, about.st_mtime_ns, about.st_size, self.settings.question_field, self.settings.answer_field
        )
        if read.faults and (self.settings.bad_rows == "refuse" or not read.problems):
            raise ValueError(f"file {path!r}: {_told(read.faults)}; mend them, or set bad_rows = 'skip'")
        if not read.problems:
            raise ValueError(f"file {path!r} has no rows; expected questions")
        self.num_skipped += len(read.faults)
        self.num_repeated += read.num_repeated
        return dict(read.problems)

    def _shot_ids(self) -> list[str]:
        order = text.shuffled(len(self._ids), f"shots:{self.settings.shots_seed}")
        usable = (self._ids[number] for number in order if self._ids[number] not in self._heldout)
        return [prompt_id for _, prompt_id in zip(range(self.settings.num_shots), usable)]

    def split_of(self, prompt_id: str) -> str:
        """Return "train", "heldout" or "shots"; with a file of held-out questions it alone decides what is held out."""
        split = super().split_of(prompt_id)
        if split == "shots" or not self._heldout:
            return split
        return "heldout" if prompt_id in self._heldout else "train"

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        problem = self._problem(prompt_id)
        return Question(
            text=problem.question,
            answer=self._written(problem, problem.answer),
            wrong=self._written(problem, _wrong(problem)) if self.settings.style == "direct" else _wrong(problem),
            canonical=problem.question,
        )

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turn that earns reward 1."""
        return [f" {self.question(prompt_id).answer}{self.stop_strings[0]}"]

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return the reward of an answer: content and format, each in its share; None for one that cannot be read."""
        problem, stated = self._problem(prompt_id), self._stated(answer)
        kind = "choice" if problem.is_choice else self.settings.kind
        content = grade(problem.answer, stated.answer, kind, self.settings.deadline_s)
        has_format = self.settings.answer_format in ("any", stated.marker)
        if self.settings.needs_format and not has_format:
            content = None if content is None else 0.0
        self._parts = {"content_reward": content or 0.0, "format_reward": float(has_format and content is not None)}
        if content is None:
            return None
        weight = self.settings.format_weight
        return (1 - weight) * content + weight * has_format

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return the answer that an episode states, without asking whether it is right; None for none."""
        return plain(self._stated(self.answer_in(turns[-1])).answer) or None if turns else None

    def is_same_vote(self, prompt_id: str, vote: str, other: str) -> bool:
        """Say whether two answers mean the same."""
        kind = "choice" if self._problem(prompt_id).is_choice else self.settings.kind
        return grade(vote, other, kind, self.settings.deadline_s) == 1.0

    def _begin_episode(self) -> None:
        symbolic_pool().warm()

    def _graded(self, action: str, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super()._graded(action, answer)
        return observation, reward, terminated, truncated, {**info, **self._parts}

    def _problem(self, prompt_id: str) -> Problem:
        if prompt_id not in self._problems:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected one of the {len(self._ids)} of this file")
        return self._problems[prompt_id]

    def _stated(self, answer: str) -> Stated:
        return final_answer(answer, self.settings.answer_format)

    def _written(self, problem: Problem, answer: str) -> str:
        """Return a turn that states an answer as the settings ask."""
        marked = _STATED[self.settings.answer_format].format(answer)
        if self.settings.style == "direct":
            return " ".join(marked.split())
        solved = self._stated(problem.solution)
        is_marked = solved.marker in _STATED and self.settings.answer_format in ("any", solved.marker)
        if is_marked and plain(solved.answer) == plain(answer):
            return problem.solution
        marked = _STATED["hashes"].format(answer) if self.settings.answer_format == "any" else marked
        return f"{problem.solution}\n{marked}" if problem.solution else marked


@dataclass(frozen=True)
class _Read:
    """What a data file holds. Invariant: nobody changes `problems`, for all worlds of a process share it."""

    problems: Mapping[str, Problem]  # by prompt id
    faults: tuple[str, ...]  # a line for each broken row
    num_repeated: int  # rows that ask and answer what an earlier one does


@lru_cache(maxsize=16)
def _problems_in(path: Path, mtime_ns: int, num_bytes: int, question_field: str, answer_field: str) -> _Read:
    """Read a data file; a runner makes many worlds of one file. Time and size are there to see that it has changed."""
    problems: dict[str, Problem] = {}
    faults, num_repeated = [], 0
    for number, row in rows_of(path):
        try:
            problem = problem_of(row, question_field, answer_field)
            first = problems.setdefault(_id(problem.question), problem)
            if first.answer != problem.answer:
                raise RowFault("answer", "is not that of an earlier row which asks the same")
            num_repeated += first is not problem
        except RowFault as fault:
            faults.append(f"row {number}, {fault}")
    if faults:
        logger.warning("file %s: %d rows cannot be used: %s", path, len(faults), _told(faults))
    return _Read(problems, tuple(faults), num_repeated)


def local_file(hub_id: str, path: str) -> Path:
    """Return where a data file lies, fetched from the hub where it is named.

    Raises:
        ValueError: there is no such file, or the hub cannot be reached; the message says what may be done.
    """
    if not hub_id:
        local = Path(path).expanduser()
        if not local.is_file():
            raise ValueError(f"path = {path!r} is no file; expected one that ends in {', '.join(SUFFIXES)}")
        return local
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub_id, path, repo_type="dataset"))
    except Exception as error:  # the hub's client raises those of several HTTP libraries
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ValueError(
            f"hub_id = {hub_id!r}, path = {path!r} cannot be fetched ({reason}); expected a data set with that file "
            "and a network, or download it elsewhere and set path to the local file alone"
        ) from error


def _wrong(problem: Problem) -> str:
    letter = choice_in(problem.answer) if problem.is_choice else None
    if letter is not None:
        return LETTERS[(LETTERS.index(letter) + 1) % 2]
    numbers = numbers_in(plain(problem.answer))
    if not numbers:
        return "unknown"
    return str(numbers[0] + 1)


def _id(question: str) -> str:
    return hashlib.blake2b(" ".join(question.split()).encode(), digest_size=12).hexdigest()


def _told(faults: Sequence[str]) -> str:
    more = f"; and {len(faults) - _MAX_FAULTS_SHOWN} more rows" if len(faults) > _MAX_FAULTS_SHOWN else ""
    return "; ".join(faults[:_MAX_FAULTS_SHOWN]) + more
