"""Single-turn function calling: the calls of a turn are compared with the expected ones, and never executed.

    Tools:
    set_timer(minutes: int, label: str = ...) - Start a kitchen timer.
    get_weather(city: str, day: int, unit: str = 'celsius') - Get the weather forecast for a city.
    Question: Set a timer for 12 minutes called tea.
    Tool: set_timer(minutes=12, label='tea')             reward 1; in another order of arguments or calls too
                                                         another call 0; neither call nor answer: unparsable

With `num_calls` = 0 no offered tool fits, and the right turn is "Answer: none": any turn that makes no call.
Questions are our own (12,478 requests, and all sets of `num_calls` of them), BFCL's, or those of a file like BFCL's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Annotated, Any

from rllib_srl.envs.functions.call_files import PACKAGED, CallRow, call_rows, packaged_paths
from rllib_srl.envs.functions.call_questions import FUNCTIONS, NUM_REQUESTS, request
from rllib_srl.envs.math.compare import combination
from rllib_srl.envs.question import Question
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.tools.calls import Said, ToolCall
from rllib_srl.envs.tools.matching import do_match
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings

NOTHING = "none"


@dataclass(frozen=True)
class FunctionCallSettings(ToolSettings):
    """Settings of `FunctionCall`. Invariant: as in `ToolSettings`."""

    num_calls: Annotated[int, Within(0, 3)] = 1  # calls that a request asks for
    num_tools: Annotated[int, Within(1, len(FUNCTIONS) - 1)] = 3  # tools that are offered
    bfcl: Annotated[str, OneOf("", *PACKAGED)] = ""  # a single-turn category of bfcl-eval instead
    path: str = ""  # or a file like BFCL's
    answers_path: str = ""  # and its possible answers; empty: no question expects a call
    bad_rows: Annotated[str, OneOf("refuse", "skip")] = "refuse"  # the file, or "skip" the row, as of bfcl-eval

    has_many_arguments = True

    def errors(self) -> list[str]:
        """Return one error message for each setting that does not fit the others."""
        errors = super().errors()
        if not self.bfcl and not self.path and self.num_calls > self.num_tools:
            errors.append(f"num_calls = {self.num_calls}; expected at most num_tools = {self.num_tools}")
        if self.bfcl and self.path:
            errors.append(f"bfcl = {self.bfcl!r} with path = {self.path!r}; expected one of the two")
        if self.answers_path and not self.path:
            errors.append(f"answers_path = {self.answers_path!r} without path; expected both or neither")
        return errors


class FunctionCall(ToolQuestionEnv):
    """Requests whose calls are compared and not executed.

    Invariant: a prompt id is the numbers of its requests, as in "17" or "17, 93"; or the id of its row.
    """

    domain = "function_call"
    votes_by_calls = True
    settings_class = FunctionCallSettings
    settings: FunctionCallSettings

    def _prepare(self) -> None:
        super()._prepare()
        self._rows: Mapping[str, CallRow] = {}
        self.row_errors: tuple[str, ...] = ()  # of the rows that were left out
        settings = self.settings
        if settings.bfcl or settings.path:
            paths = packaged_paths(settings.bfcl) if settings.bfcl else (settings.path, settings.answers_path)
            self._rows, self.row_errors = call_rows(*paths, bool(settings.bfcl) or settings.bad_rows == "skip")
        self._row_ids = list(self._rows)
        self._made_row: tuple[str, CallRow] | None = None

    @property
    def num_questions(self) -> int:
        """Return the number of questions in both splits, without the shots."""
        return self._num_ids() - self.settings.num_shots

    def _num_ids(self) -> int:
        return len(self._row_ids) or comb(NUM_REQUESTS, max(self.settings.num_calls, 1))

    def _prompt_id(self, number: int) -> str:
        if self._row_ids:
            return self._row_ids[number]
        return ", ".join(map(str, combination(number, NUM_REQUESTS, max(self.settings.num_calls, 1))))

    def question(self, prompt_id: str) -> Question:
        """Return the request, with its offered tools if the prompt shows them."""
        row = self._row(prompt_id)
        listed = "".join(f"{tool.signature()} - {tool.description}\n" for tool in self.tools(prompt_id))
        shown = "" if self.settings.tools_in == "template" else f"Tools:\n{listed}"
        return Question(f"{shown}Question: {row.request}", NOTHING, NOTHING, canonical=row.request)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Return 1 for an answer in words if no call was expected, else 0; None for an empty answer."""
        return float(not self._row(prompt_id).expected) if answer else None

    def tools(self, prompt_id: str) -> Sequence[Tool]:
        """Return the tools offered with a request."""
        return [Tool.declared(schema, _never_called) for schema in self._row(prompt_id).schemas]

    def gold_calls(self, prompt_id: str) -> list[ToolCall]:
        """Return the expected calls, all for one turn."""
        return self._row(prompt_id).gold_calls()

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the one turn that earns reward 1."""
        calls = self.gold_calls(prompt_id)
        return [self.format.call(*calls) if calls else self.format.answer(NOTHING)]

    def _request(self, question: Question) -> str:
        return f"{question.text}\n"

    def _opening(self) -> str:
        assert self._question is not None
        preface = self.format.instructions([]).replace("Tools:\n", "", 1) if self.settings.tools_in == "prompt" else ""
        return preface + self._header + self._request(self._question)

    def _wrong_turn(self, question: Question) -> str:
        calls_nothing = self.settings.num_calls and not self._rows
        return self.format.answer(NOTHING) if calls_nothing else self.format.call(ToolCall(FUNCTIONS[0].name))

    def _solution(self, prompt_id: str) -> str:
        return self.gold_turns(prompt_id)[0].removesuffix("\n")

    def _taken(self, action: str) -> Reply:
        said = self.format.read(action, self._tools)
        if said.calls:
            return self._compared(action, said.calls)
        return self._unreadable(action, said.error) if said.error else self._answered(action, said)

    def _answered(self, action: str, said: Said) -> Reply:
        return self._graded(action, said.answer or said.text.strip())  # any text is an answer without a call

    def _compared(self, action: str, calls: Sequence[ToolCall]) -> Reply:
        row = self._row(self._asked_id)
        typed = [self._typed(call) for call in calls]
        return self._rewarded(action, float(bool(row.expected) and do_match(typed, row.expected, row.docs)))

    def _typed(self, call: ToolCall) -> ToolCall:
        """Return a call whose text values are converted to the types in the tool's schema."""
        tool = self._tools.get(call.name)
        return call if tool is None or not call.is_text else ToolCall(call.name, (), tool.read(call))

    # --- the questions ------------------------------------------------------------------------

    def _row(self, prompt_id: str) -> CallRow:
        if self._made_row is not None and self._made_row[0] == prompt_id:  # one episode asks for its row several times
            return self._made_row[1]
        row = self._rows.get(prompt_id) if self._rows else self._generated(prompt_id)
        if row is None:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected the id of a row such as {self._row_ids[0]!r}")
        self._made_row = (prompt_id, row)
        return row

    def _generated(self, prompt_id: str) -> CallRow:
        numbers = _numbers(prompt_id, max(self.settings.num_calls, 1))
        asked = [request(number) for number in numbers]
        wanted = {query.function.name: query.function for query in asked}
        others = [function for function in FUNCTIONS if function.name not in wanted]
        generator = random.Random(f"tools of {prompt_id}")
        offered = list(wanted.values()) if self.settings.num_calls else []
        offered += generator.sample(others, max(self.settings.num_tools - len(offered), 0))
        generator.shuffle(offered)
        return CallRow(
            row_id=prompt_id,
            request=" ".join(query.text for query in asked),
            docs=tuple(function.doc for function in offered),
            expected=tuple(query.expected for query in asked) if self.settings.num_calls else (),
        )


def _numbers(prompt_id: Any, num_chosen: int) -> list[int]:
    parts = prompt_id.split(", ") if isinstance(prompt_id, str) else []
    is_plain = all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts)
    numbers = [int(part) for part in parts] if is_plain else []
    if len(numbers) != num_chosen or sorted(set(numbers)) != numbers or numbers[-1] >= NUM_REQUESTS:
        raise ValueError(
            f"prompt_id = {prompt_id!r}; expected {num_chosen} ascending numbers below {NUM_REQUESTS}, as in '17' or "
            "'17, 93'"
        )
    return numbers


def _never_called() -> None:
    """Placeholder for a function that is only described."""
