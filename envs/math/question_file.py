"""Questions from files: GSM8K, MATH, ARC, verl, TRL or your own, in JSONL, JSON, CSV or Parquet, here or on the hub.

    QuestionFile({"path": "gsm8k/train.jsonl", "heldout_path": "gsm8k/test.jsonl", "num_shots": 4})

    Question: A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?
    Answer: 3                                       reward 1; "3.0" and "\\boxed{3}" as well; 4: 0; nothing: unparsable

    with style = "reasoned" a turn may have any length, and its last answer counts:
    Answer: It takes 2/2=1 bolt of white fiber. So the total is 2+1=3 bolts.
    #### 3

    with prompt_template = "Topic: {topic}\\nQ: {question}\\nA:", instruction and system_prompt:
    Work it out.                                    the instruction; the system prompt is the chat's system message

    Topic: sewing
    Q: A robe takes ...
    A: 3

envs/math/question_rows.py describes the fields of a row, data_files.py the files, docs/grading.md the grading.

The turns of an assistant before a row's question are history: part of the prompt (`opening_messages`), not trained on.

The reward is (1 - format_weight) x content + format_weight x format, where content is 1 for a right answer and format
is 1 for an answer marked as `answer_format` requires; the info has both. With `needs_format` an answer marked
otherwise has content 0.

The last step's info holds the answer as read and the expected answer (`parsed`, `expected`). If no solved question
shows how to mark the answer, the prompt explains it.

With `reward`, functions of the user's own grade the answers instead (envs/rewards/scoring.py); rows then need no right
answer. The info of the last step has the value of each function as "reward/<name>".

Without `heldout_path` a fixed share of the questions is held out. A question in both files is held out; the callback
`contrib.contamination` finds those that repeat a held-out one in a longer text.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.math.answer_text import plain
from rllib_srl.envs.math.classes import KINDS, class_of
from rllib_srl.envs.math.data_files import RowError, rows_of
from rllib_srl.envs.math.data_place import PACKED, SUFFIXES, local_files, stem_of
from rllib_srl.envs.math.final_answers import graded, read, shown
from rllib_srl.envs.math.grading import choice_in, grade
from rllib_srl.envs.math.marks import final_answer
from rllib_srl.envs.math.pool import symbolic_pool
from rllib_srl.envs.math.prompt_template import DEFAULT, QUESTION, PromptTemplate
from rllib_srl.envs.math.quantity import is_same_quantity, numbers_in, quantity_of
from rllib_srl.envs.math.question_rows import (
    ANSWER_FIELDS,
    LETTERS,
    SOLUTION_FIELDS,
    Problem,
    problem_of,
)
from rllib_srl.envs.math.row_prompts import RowPrompts, add_problem, id_of
from rllib_srl.envs.question import Question, QuestionEnv, QuestionSettings
from rllib_srl.envs.rewards.scoring import Rewards
from rllib_srl.envs.rewards.settings import ON_ERROR, read_rewards
from rllib_srl.envs.settings import OneOf, Within

# Template of a stated answer for each `answer_format`.
_STATED = {
    "any": "{}",
    "boxed": "\\boxed{{{}}}",
    "tags": "<answer>{}</answer>",
    "hashes": "#### {}",
    "phrase": "The answer is {}.",
}
# Patterns that show that the user's text already explains how to mark the answer.
_MARKS = {"boxed": "\\boxed", "tags": "<answer>", "hashes": "####", "phrase": "answer is"}
_MAX_INFO_CHARS = 200  # most characters of an answer in the info
_ASKS = {
    "boxed": "Write the final answer as \\boxed{...}.",
    "tags": "Write the final answer as <answer>...</answer>.",
    "hashes": "Write #### and then the final answer.",
    "phrase": 'Write "The answer is" and then the final answer.',
}
_MAX_FAULTS_SHOWN = 20
_PLACE = re.compile(r"row \d+( of [^,]+)?")
_MAX_ANSWER_CHARS = 1_000_000  # a longer answer earns 0 without a call of a reward function

_OF_REWARD = ("reward_timeout_s", "reward_retries", "reward_concurrency", "on_reward_error", "pass_reward")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuestionFileSettings(QuestionSettings):
    """Settings of `QuestionFile`. Invariant: as in `QuestionSettings`."""

    path: str = ""  # the data file, or a folder of them
    heldout_path: str = ""  # a second one, whose questions are the held-out ones
    hub_id: str = ""  # a data set of the Hugging Face hub; the paths are then files or splits of it ("main/train")
    question_field: str = ""  # where it is none of those that are known
    answer_field: str = ""
    bad_rows: Annotated[str, OneOf("refuse", "skip")] = "refuse"  # "skip": use the rest, and log what was left out
    domain: str = ""  # what continual learning counts; "": the name of the file
    kind: Annotated[str, OneOf(*KINDS)] = "auto"  # which answers count: see `rllib_srl.envs.math.grading.grade`
    style: Annotated[str, OneOf("direct", "reasoned")] = "direct"  # one line, or as long as needed
    prompt_template: str = DEFAULT  # of a question, with {question} and other fields of its row
    answer_format: Annotated[str, OneOf(*_STATED)] = "any"  # required mark of the answer
    format_weight: Annotated[float, Within(0, 1)] = 0.0  # share of the reward that is for the format
    needs_format: bool = False  # an answer in another format does not count
    deadline_s: Annotated[float, Within(0, 60, is_open=True)] = 2.0  # of symbolic grading
    reward: Any = ""  # reward functions in place of grading, by name: envs/rewards/settings.py
    # Of all functions for one answer, less than the runner's env_timeout_s.
    reward_timeout_s: Annotated[float, Within(0, 3600, is_open=True)] = 8.0
    reward_retries: Annotated[int, Within(0, 20)] = 2  # further requests to a server after one that failed
    reward_concurrency: Annotated[int, Within(1, 1024)] = 8  # requests that a process may have open to a server
    # "stop" the run when a function gives no reward, or "drop" the episode.
    on_reward_error: Annotated[str, OneOf(*ON_ERROR)] = "stop"
    # With reward: lowest one that counts as a pass; 0: 1 in accuracies, and replay_pass_reward.
    pass_reward: Annotated[float, Within(0, 1)] = 0.0

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = (
            []
            if self.path
            else [f"path is not set; expected a file that ends in {', '.join((*SUFFIXES, *PACKED))}, or a folder"]
        )
        template = PromptTemplate(self.prompt_template)
        errors += template.errors
        answer_names = {*ANSWER_FIELDS, *SOLUTION_FIELDS, self.answer_field.casefold()}
        if leaks := [name for name in template.fields if name.casefold() in answer_names]:
            errors.append(f"prompt_template names {{{leaks[0]}}}, which reveals the answer; expected other fields")
        if (self.format_weight or self.needs_format) and self.answer_format == "any":
            errors.append(f"answer_format = 'any' fits every answer; expected one of {', '.join(list(_STATED)[1:])}")
        has_reward = self.reward != ""
        errors += read_rewards(self.reward)[1] if has_reward else []
        mine = {each.name: each.default for each in dataclasses.fields(QuestionFileSettings)}
        unread = ("kind", "answer_format", "format_weight", "needs_format") if has_reward else _OF_REWARD
        why = "with reward, whose functions grade" if has_reward else "without reward"
        return errors + [
            f"{name} = {getattr(self, name)!r}; expected {mine[name]!r} {why}"
            for name in unread
            if getattr(self, name) != mine[name]
        ]


class QuestionFile(RowPrompts, QuestionEnv):
    """Questions with a mathematical answer, read from a file.

    Invariant: prompt ids are those of `id_of`.
    """

    settings_class = QuestionFileSettings
    settings: QuestionFileSettings

    @property
    def num_questions(self) -> int:
        """Return the exact number of distinct questions, without the shots."""
        return len(self._ids) - len(self._shot_texts)

    @property
    def num_skipped(self) -> int:
        """Return the number of rows that were left out."""
        return len(self.row_errors)

    def _prepare(self) -> None:
        settings = self.settings
        self._template = PromptTemplate(settings.prompt_template)
        # Text with which a base model begins its own question: the template's first label, if any.
        label, *_ = self._template.start.splitlines() or [""]
        self._next_one = f"\n{label}" if label.endswith(":") else "\nQuestion:"
        self.stop_strings = ("\n",) if settings.style == "direct" else (self._next_one,)
        self.domain = settings.domain or stem_of(settings.path)
        self.num_repeated = 0
        self.row_errors: list[str] = []  # a line for each row that was left out
        self.row_notes: list[str] = []  # a line for each row that is used and deserves a look
        self._rewards = None
        if settings.reward != "":
            limits = (settings.reward_timeout_s, settings.reward_retries, settings.reward_concurrency)
            if settings.pass_reward:
                self.pass_reward = settings.pass_reward
            self._rewards = Rewards.load(settings.reward, *limits, on_error=settings.on_reward_error)
        self._problems = self._read(settings.path)
        self._heldout = self._read(settings.heldout_path) if settings.heldout_path else {}
        self._heldout_questions = {id_of(problem.question) for problem in self._heldout.values()}
        self._problems |= self._heldout
        self._ids = list(self._problems)
        self._parts: dict[str, Any] = {}
        self._turn: tuple[list[int], int] | None = None

    def _read(self, path: str) -> dict[str, Problem]:
        """Return the problems of a file by prompt id.

        Raises:
            ValueError: names the broken rows, or a file without a usable row.
        """
        files = tuple((file, (about := file.stat()).st_mtime_ns, about.st_size)
                      for file in local_files(self.settings.hub_id, path))  # fmt: skip
        others = tuple(name for name in self._template.fields if name != QUESTION)
        fields = (self.settings.question_field, self.settings.answer_field)
        is_skipping = self.settings.bad_rows == "skip"
        held = _problems_in(files, *fields, others, self._rewards is not None, is_skipping)
        known_names = {name.casefold() for name in held.names}
        if held.names and (unknown := [name for name in others if name.casefold() not in known_names]):
            known, named = ", ".join(sorted(known_names)), ", ".join(f"{{{name}}}" for name in unknown)
            raise ValueError(f"prompt_template names {named}; expected question, or a field of {path!r}: {known}")
        if held.errors and not (is_skipping and held.problems):
            raise ValueError(f"file {path!r}: {_grouped(held.errors)}; fix them, or set bad_rows = 'skip'")
        if not held.problems:
            raise ValueError(f"file {path!r} has no rows; expected questions")
        if self._rewards is not None:
            self._rewards.check_columns(held.names)
        self.row_errors += held.errors
        self.row_notes += held.notes
        self.num_repeated += held.num_repeated
        return dict(held.problems)

    def _shot_ids(self) -> list[str]:
        order = text.shuffled(len(self._ids), f"shots:{self.settings.shots_seed}")
        usable = (self._ids[number] for number in order if not self._is_heldout(self._ids[number]))
        return [prompt_id for _, prompt_id in zip(range(self.settings.num_shots), usable)]

    def split_of(self, prompt_id: str) -> str:
        """Return "train", "heldout" or "shots"; if there is a held-out file, it alone decides what is held out."""
        split = super().split_of(prompt_id)
        if split == "shots" or not self._heldout:
            return split
        return "heldout" if self._is_heldout(prompt_id) else "train"

    def _is_heldout(self, prompt_id: str) -> bool:
        return prompt_id in self._heldout or id_of(self._problem(prompt_id).question) in self._heldout_questions

    def _draw_shots(self) -> list[Question]:
        shots = super()._draw_shots()
        if any(not question.answer for question in shots):
            raise ValueError(f"num_shots = {self.settings.num_shots}; expected 0: rows without an answer show none")
        return shots

    @property
    def opening_messages(self) -> list[dict[str, str]]:
        """Return the prompt of the row that is asked as a conversation, if it has history; else [].

        Instruction and shots stand in front of the first message of the user; a template is that of the last.
        """
        asked = self._asked
        if asked is None or not asked.has_history:
            return []
        said = [dict(message) for message in asked.messages if message["role"] != "system"]
        if self.settings.prompt_template != DEFAULT:
            said[-1]["content"] = self._template.filled({**asked.fields, QUESTION: said[-1]["content"]})
        before = self._instruction()
        said[0]["content"] = (f"{before}\n\n" if before else "") + self._header + said[0]["content"]
        return said

    def size_of(self, prompt_id: str) -> int:
        """Return a number of bytes that a prompt does not exceed, without its chat template; quicker than a reset."""
        problem = self._problem(prompt_id)
        shared = (self._instruction(), self._header, self.settings.prompt_template, self.settings.system_prompt)
        texts = (*shared, problem.system, problem.question, *problem.fields.values())
        return sum(len(text.encode("utf-8", "replace")) + 16 for text in texts)

    def hear_turn(self, token_ids: Sequence[int], version: int) -> None:
        """Take the tokens of the next turn and the version of the weights that wrote it, for reward functions."""
        self._turn = (list(token_ids), version)

    @property
    def step_timeout_s(self) -> float:
        """Return the seconds that a turn may take before an answer is graded; 0 if grading needs no reserve."""
        return self.settings.reward_timeout_s if self._rewards else 0.0

    def question(self, prompt_id: str) -> Question:
        """Return the question of `prompt_id`."""
        problem = self._problem(prompt_id)
        is_verbatim = bool(problem.messages) and self.settings.prompt_template == DEFAULT
        verbatim = f"{problem.question}\nAssistant:" if problem.has_history else problem.question
        filled = self._template.filled({**problem.fields, QUESTION: problem.question})
        return FileQuestion(
            text=problem.question,
            request=verbatim if is_verbatim else filled,
            answer=self._written(problem, problem.answer),
            wrong=self._written(problem, _wrong(problem)) if self.settings.style == "direct" else _wrong(problem),
            canonical=problem.question,
        )

    def gold(self, prompt_id: str) -> tuple[str, str]:
        """Return the right answer of a row, "" without one, and the kind of comparison."""
        problem = self._problem(prompt_id)
        return problem.answer, self._kind(problem)

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the turn that earns reward 1; with a reward function, the answer of the row if it has one."""
        answer = self.question(prompt_id).answer
        return [f" {answer}{self.stop_strings[0]}"] if answer else []

    def answer_in(self, turn: str) -> str:
        """Return a turn's text up to the next question; in a chat it may have many lines in any style."""
        return turn.split(self._next_one, 1)[0].strip()

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return the weighted sum of content and format, or the reward of the user's functions; None if unreadable.

        Raises:
            RewardError: a reward function gave no reward.
        """
        if self._rewards:
            return self._scored(self._problem(prompt_id), answer)
        problem, wanted = self._problem(prompt_id), self.settings.answer_format
        verdict = graded(
            problem.answer, answer, wanted, self._kind(problem), self.settings.deadline_s, question=problem.question
        )
        content, has_format = verdict.grade, wanted in ("any", verdict.reading.marker)
        if self.settings.needs_format and not has_format:
            content = None if content is None else 0.0
        self._parts = {
            "content_reward": content or 0.0,
            "format_reward": float(has_format and content is not None),
            "parsed": shown(verdict.reading.answers)[:_MAX_INFO_CHARS],
            "expected": self._written(problem, problem.answer, is_short=True)[:_MAX_INFO_CHARS],
        }
        if content is None:
            return None
        weight = self.settings.format_weight
        return (1 - weight) * content + weight * has_format

    def _scored(self, problem: Problem, answer: str) -> float | None:
        assert self._rewards is not None
        self._parts = {}
        if len(answer) > _MAX_ANSWER_CHARS:
            return None
        about = (problem.row, problem.messages, self._turn, problem.answer)
        scored = self._rewards.score(problem.question, answer, *about)
        self._parts = {f"reward/{name}": value for name, value in scored.parts.items()}
        return scored.total

    def vote(self, prompt_id: str, turns: Sequence[str]) -> str | None:
        """Return the answer that an episode states, right or wrong; None for none."""
        if not turns:
            return None
        if self._rewards:
            return " ".join(self.answer_in(turns[-1]).casefold().split()) or None
        problem = self._problem(prompt_id)
        name = class_of(problem.answer, self._kind(problem))
        answers = read(self.answer_in(turns[-1]), name, self.settings.answer_format, problem.question).answers
        return plain(answers[0]) or None if len(answers) == 1 else None

    def is_same_vote(self, prompt_id: str, vote: str, other: str) -> bool:
        """Return whether two answers mean the same."""
        if self._rewards:
            return vote == other
        kind = self._kind(self._problem(prompt_id))
        return grade(vote, other, kind, self.settings.deadline_s) == 1.0

    def _begin_episode(self) -> None:
        self._turn = None
        if not self._rewards:
            symbolic_pool().warm()

    def _graded(self, action: str, answer: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super()._graded(action, answer)
        self._turn = None
        return observation, reward, terminated, truncated, {**info, **self._parts}

    def _kind(self, problem: Problem) -> str:
        return "choice" if problem.is_choice else self.settings.kind

    def _instruction(self) -> str:
        """Return the instruction and, unless it is shown elsewhere, how to mark the answer."""
        settings = self.settings
        said = settings.instruction
        mark = _MARKS.get(settings.answer_format, "")
        shown_text = "".join((said, settings.system_prompt, settings.prompt_template)).casefold()
        if not mark or settings.num_shots or mark in shown_text:
            return said
        return f"{said}\n{_ASKS[settings.answer_format]}".lstrip("\n")

    def _request_of(self, question: Question) -> str:
        assert isinstance(question, FileQuestion)
        return question.request

    def _written(self, problem: Problem, answer: str, is_short: bool = False) -> str:
        """Return a turn that states an answer as the settings require, without its solution if it must be short."""
        marked = _STATED[self.settings.answer_format].format(answer)
        if self.settings.style == "direct" or is_short:
            return " ".join(marked.split())
        solved = final_answer(problem.solution, self.settings.answer_format)
        is_marked = solved.marker in _STATED and self.settings.answer_format in ("any", solved.marker)
        if is_marked and plain(solved.answer) == plain(answer) and self._states(problem, problem.solution):
            return problem.solution
        marked = _STATED["hashes"].format(answer) if self.settings.answer_format == "any" else marked
        whole = f"{problem.solution}\n{marked}"
        # A solution with a second final answer would earn 0, so it is not shown.
        return whole if problem.solution and (answer != problem.answer or self._states(problem, whole)) else marked

    def _states(self, problem: Problem, turn: str) -> bool:
        """Return whether a turn states the right answer and no other."""
        name = class_of(problem.answer, self._kind(problem))
        answers = read(turn, name, self.settings.answer_format, problem.question).answers
        right, number = plain(problem.answer), quantity_of(problem.answer, is_gold=True)
        stated = [quantity_of(each) for each in answers]
        return bool(answers) and all(
            plain(each) == right or (number is not None and said is not None and is_same_quantity(number, said))
            for each, said in zip(answers, stated, strict=True)
        )


@dataclass(frozen=True)
class FileQuestion(Question):
    """A question of a file. Invariant: as in `Question`; `request` is the filled template."""

    request: str = ""


@dataclass(frozen=True)
class _Read:
    """The content of a data file. Invariant: `problems` is read-only: all environments of a process share it."""

    problems: Mapping[str, Problem]  # by prompt id
    errors: tuple[str, ...]  # a line for each broken row
    num_repeated: int  # rows that ask and answer what an earlier one does
    notes: tuple[str, ...]  # a line for each row that is used and deserves a look
    names: frozenset[str]  # of the fields that any row has


@lru_cache(maxsize=16)
def _problems_in(
    files: tuple[tuple[Path, int, int], ...],
    question_field: str,
    answer_field: str,
    others: tuple[str, ...] = (),
    has_reward: bool = False,
    is_skipping: bool = False,
) -> _Read:
    """Read data files once for all environments of a runner; time and size are cache keys that detect changes."""
    problems: dict[str, Problem] = {}
    errors, notes, num_repeated, names = [], [], 0, set()
    for place, row in _placed([file for file, _, _ in files]):
        names |= {str(name).strip() for name in row} if isinstance(row, Mapping) else set()
        try:
            problem = problem_of(row, question_field, answer_field, others, has_reward)
            num_repeated += not add_problem(problems, problem)
            notes += [f"{place} {note}" for note in problem.notes]
        except RowError as error:
            errors.append(f"{place}, {error}")
    path = files[0][0] if len(files) == 1 else files[0][0].parent
    if errors and is_skipping:
        logger.warning("file %s: %d rows cannot be used: %s", path, len(errors), _grouped(errors))
    if notes:
        logger.warning("file %s: %d rows deserve a look: %s", path, len(notes), _grouped(notes))
    return _Read(problems, tuple(errors), num_repeated, tuple(notes), frozenset(names))


def _placed(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield each row with its place: "row 3" or, with several files, "row 3 of train-00001.jsonl"."""
    for file in files:
        of_file = f" of {file.name}" if len(files) > 1 else ""
        for number, row in rows_of(file):
            yield f"row {number}{of_file}", row


def _wrong(problem: Problem) -> str:
    letter = choice_in(problem.answer) if problem.is_choice else None
    if letter is not None:
        return LETTERS[(LETTERS.index(letter) + 1) % 2]
    numbers = numbers_in(plain(problem.answer))
    if not numbers:
        return "unknown"
    return str(numbers[0] + 1)


def _grouped(errors: Sequence[str]) -> str:
    """Return the lines of rows in one; of those that say the same the first, and the number of the others."""
    alike: dict[str, list[str]] = {}
    for line in errors:
        alike.setdefault(line.removeprefix(place[0]) if (place := _PLACE.match(line)) else line, []).append(line)
    shown = list(alike.values())[:_MAX_FAULTS_SHOWN]
    left = len(errors) - sum(map(len, shown))
    more = [f" (the same in {len(g) - 1} more row{'s' * (len(g) > 2)})" if len(g) > 1 else "" for g in shown]
    lines = [group[0] + also for group, also in zip(shown, more, strict=True)]
    return "; ".join(lines) + (f"; and {left} more rows" if left else "")
