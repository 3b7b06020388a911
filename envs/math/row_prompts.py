"""Prompts made of rows: their ids, and what environments have in common whose questions are rows.

A prompt id is a hash of the question, so it names the same question in every file. If the row was kept, for a reward
function, two rows that ask the same and differ otherwise are two prompts: they may be graded differently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rllib_srl.envs.math.data_files import RowError
from rllib_srl.envs.math.question_rows import Problem
from rllib_srl.envs.question import Listed, Question

CONTRADICTION = "differs from that of an earlier row with the same question"


def id_of(question: str, row: Mapping[str, Any] | None = None) -> str:
    """Return the prompt id of a question, or of a row that differs from an earlier one with the same question."""
    text = " ".join(question.split()) + (json.dumps(row, sort_keys=True, default=str) if row else "")
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()


def add_problem(problems: dict[str, Problem], problem: Problem) -> bool:
    """Add a problem by its prompt id; return False if it is there already.

    Raises:
        RowError: an earlier row has the same question and another answer.
    """
    first = problems.setdefault(id_of(problem.question), problem)
    if first is problem:
        return True
    if (whole := id_of(problem.question, problem.row)) != id_of(problem.question, first.row):
        first = problems.setdefault(whole, problem)
    elif first.answer != problem.answer:
        raise RowError("answer", CONTRADICTION)
    return first is problem


class RowPrompts(Listed):
    """Mixin of a question environment whose questions are rows. Invariant: `_problems` has the row of each prompt."""

    _problems: Mapping[str, Problem]
    _question: Question | None
    _asked_id: str

    def data_question(self, prompt_id: str) -> tuple[str, str]:
        """Return the question of a row and its answer."""
        problem = self._problem(prompt_id)
        return problem.question, problem.answer

    @property
    def system_prompt(self) -> str:
        """Return the system prompt of the row that is asked, else that of the settings."""
        asked = self._asked
        return asked.system if asked and asked.system else self.settings.system_prompt

    @property
    def _asked(self) -> Problem | None:
        return self._problems.get(self._asked_id) if self._question else None

    def _problem(self, prompt_id: str) -> Problem:
        if prompt_id not in self._problems:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected one of this environment's {len(self._problems)}")
        return self._problems[prompt_id]
