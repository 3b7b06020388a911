"""Score answers with a user's reward functions, within a timeout, and check each value.

    rewards = Rewards.load("my_module:f", timeout_s=8.0)
    rewards.score("2 + 2?", "4", {"question": "2 + 2?", "answer": "4"})      Scored(total=1.0, parts={"f": 1.0})

Forms of a function:
    row     f(prompt, answer, row) -> number                       prompt: the question; row: of the file, all columns
    trl     f(completions, prompts, **columns) -> [number or None] lists of one entry; messages for a row of messages
    verl    f(data_source, solution_str, ground_truth, extra_info) -> number, or a dict with "score"
    batch   f(prompts, answers, rows) -> [number]                  lists of what several episodes ask at about one time

Functions are called from several threads at once. They may be async: all such functions of a process share one event
loop. A value that is not a finite number from `low` to `high`, rounding aside, an exception or a timeout is a
`RewardError`; its message names function, row and answer. The names of parameters are checked when functions are
loaded, those of columns by `check_columns`.

A function of the form "trl" gets those of its parameters that it names, or all if it takes `**kwargs`: prompts,
completions, the columns, completion_ids (the tokens as sampled) and trainer_state (`TrainerState`). With None it
abstains: its weight goes to the others.
"""

from __future__ import annotations

import copy
import json
import math
import numbers
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rllib_srl.common.loading import load_function
from rllib_srl.envs.posting import seconds_left
from rllib_srl.envs.rewards.batching import Gathered, gathered
from rllib_srl.envs.rewards.calling import (
    TIMEOUTS,
    NoReward,
    called_within,
    cut,
    error_of_call,
    listed,
    parameters_of,
)
from rllib_srl.envs.rewards.remote import RemoteReward
from rllib_srl.envs.rewards.settings import RewardSettings, read_rewards

_TRL_NAMES = ("prompts", "completions", "completion_ids", "trainer_state")
_NAMES = {  # of the arguments of a form
    "row": ("prompt", "answer", "row"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "batch": ("prompts", "answers", "rows"),
}
_SHOWN_FORMS = {"completions": "trl", "solution_str": "verl", "answers": "batch", "answer": "row"}  # by a parameter
MOST_LATE = 32  # calls of a function that may be late before a run ends in any case: their threads may never end
_ROUNDING = 1e-6  # share of its range by which a value may lie outside: the last digits of a float32
_SHOWN = {"reason": 160, "row": 110, "answer": 60}  # most characters of each in a message


class RewardError(ValueError):
    """A reward function gave no reward. `ends_run`: the run ends with this message, else the episode is dropped."""

    def __init__(self, message: str, ends_run: bool = True):
        super().__init__(message)
        self.ends_run = ends_run

    def __reduce__(self) -> tuple[type[RewardError], tuple[str, bool]]:
        """Support pickling: a runner raises it in the driver."""
        return type(self), (str(self), self.ends_run)


@dataclass(frozen=True)
class TrainerState:
    """What functions of TRL ask the trainer for. Invariant: `global_step` counts the updates of the policy so far."""

    global_step: int
    is_world_process_zero: bool = True


@dataclass(frozen=True)
class Scored:
    """The reward of an answer. Invariant: `total` is in [0, 1]; `parts` has the value of each function as returned."""

    total: float
    parts: Mapping[str, float]


class Rewards:
    """Reward functions with their weights. Invariant: `score` returns only rewards that every function gave."""

    def __init__(
        self, functions: Sequence[tuple[RewardSettings, Callable[..., Any]]], timeout_s: float, on_error: str = "stop"
    ):
        """Take functions with their settings.

        Args:
            functions: at least one
            timeout_s: of all functions for one answer, in seconds
            on_error: "stop" ends the run when a function gives no reward, "drop" leaves the episode out
        """
        self._functions, self._timeout_s, self._ends_run = list(functions), timeout_s, on_error == "stop"
        self._columns: frozenset[str] = frozenset()
        self._num_late = 0

    @classmethod
    def load(
        cls,
        given: str | Mapping[str, Any] | Sequence[Any],
        timeout_s: float,
        retries: int = 2,
        concurrency: int = 8,
        on_error: str = "stop",
    ) -> Rewards:
        """Return the functions that settings name.

        Args:
            given: as in `read_rewards`
            timeout_s: of all functions for one answer, in seconds
            retries: further requests to a server after one that failed
            concurrency: requests that may be open to a server
            on_error: as in the constructor

        Raises:
            RewardError: a function cannot be loaded, or its settings are wrong; all at once.
        """
        every, errors = read_rewards(given)
        functions: list[tuple[RewardSettings, Callable[..., Any]]] = []
        for spec in every if not errors else ():
            try:
                if spec.is_remote:
                    functions.append((spec, RemoteReward(spec.function, retries, concurrency)))
                    continue
                function = load_function(spec.function)
                if reason := _error_of_parameters(spec, function):
                    errors.append(reason)
                    continue
                functions.append((spec, gathered(spec.function, function) if spec.form == "batch" else function))
            except ValueError as error:
                errors.append(str(error))
        if errors:  # it ends a run: a file may be missing where the runners are
            raise RewardError("; ".join(errors))
        return cls(functions, timeout_s, on_error)

    @classmethod
    def of_function(cls, function: Callable[..., Any], timeout_s: float) -> Rewards:
        """Return the reward of one function f(prompt, answer, row), given as an object.

        Raises:
            RewardError: it does not take these arguments.
        """
        spec = RewardSettings(getattr(function, "__name__", type(function).__name__))
        if reason := _error_of_parameters(spec, function):
            raise RewardError(reason)
        return cls([(spec, function)], timeout_s)

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the rows have the columns that functions of the form "trl" need; a row without one has None there.

        Args:
            columns: of all rows together

        Raises:
            RewardError: names the functions and the columns that are missing.
        """
        self._columns = frozenset(columns)
        errors = []
        for spec, function in self._functions:
            needed = [name for name, is_needed in parameters_of(function)[0].items() if is_needed]
            missing = [name for name in needed if name not in {*_TRL_NAMES, *columns}] if spec.form == "trl" else []
            if missing:
                known = ", ".join((*_TRL_NAMES, *sorted(self._columns - {"prompt", "completion"})))
                errors.append(
                    f"reward {spec.function!r} needs the parameter{'s' if len(missing) > 1 else ''} "
                    f"{', '.join(missing)}, but the data has no such column; form = 'trl' gives {known}: rename a "
                    "column, or give the parameter a default"
                )
        if errors:
            raise RewardError("; ".join(errors))

    def score(
        self,
        prompt: str,
        answer: str,
        row: Mapping[str, Any],
        messages: Sequence[Any] = (),
        turn: tuple[Sequence[int], int] | None = None,
        right: str = "",
    ) -> Scored:
        """Return the reward of an answer.

        Args:
            prompt: the question
            answer: what the policy wrote
            row: of the file; each call gets a copy
            messages: of a conversational row
            turn: the tokens of the answer as sampled, and the version of the weights; None if no engine wrote it
            right: the answer of the row as the environment reads it, for functions of the form "verl"; "": none

        Raises:
            RewardError: a function gave no reward, or all of them abstained.
        """
        parts, total, weight, deadline = {}, 0.0, 0.0, time.monotonic() + self._timeout_s
        for spec, function in self._functions:
            try:
                arguments = _ARGUMENTS[spec.form](prompt, answer, copy.deepcopy(dict(row)), messages, right)
                if spec.form == "trl":
                    arguments = self._chosen(function, arguments, turn)
                value = _VALUES[spec.form](self._called(function, arguments, deadline))
                if value is None and spec.form == "trl":
                    continue
                value = _number(value, spec)
            except NoReward as error:
                raise self._error(spec, str(error), row, answer) from error.__cause__
            parts[spec.label] = value
            weight += spec.weight
            total += spec.weight * (value - spec.low) / (spec.high - spec.low)
        if not weight:
            others = ", and so did every other function" if len(self._functions) > 1 else ""
            raise self._error(self._functions[0][0], f"returned None{others}; expected a number", row, answer)
        return Scored(min(1.0, max(0.0, total / weight)), parts)

    def _chosen(
        self, function: Callable[..., Any], arguments: dict[str, Any], turn: tuple[Sequence[int], int] | None
    ) -> dict[str, Any]:
        """Return the arguments of a function of TRL that it takes.

        Raises:
            NoReward: it needs tokens, and no engine wrote the answer.
        """
        named, takes_others = parameters_of(function)
        known = {**{name: [None] for name in self._columns - {"prompt", "completion"}}, **arguments}
        if turn is not None:
            known |= {"completion_ids": [list(turn[0])], "trainer_state": TrainerState(turn[1])}
        for name in ("completion_ids", "trainer_state"):
            if named.get(name) and name not in known:
                raise NoReward(
                    f"needs {name}, which only the answers of an engine have; give the parameter a default"
                )
        return {name: value for name, value in known.items() if takes_others or name in named}

    def _called(self, function: Callable[..., Any], arguments: Mapping[str, Any], deadline: float) -> Any:
        try:
            if isinstance(function, RemoteReward | Gathered):
                return function(**arguments, deadline=deadline)
            return called_within(seconds_left(deadline), function, arguments)
        except NoReward:
            raise
        except TIMEOUTS as error:
            self._num_late += getattr(error, "num_late", 1)
            raise NoReward(f"gave no reward within reward_timeout_s = {self._timeout_s:g}") from error
        except SystemExit as error:
            raise NoReward(f"raised SystemExit: {error}") from error
        except Exception as error:  # a user's function may raise anything
            raise NoReward(f"raised {type(error).__name__}: {' '.join(str(error).split())}") from error

    def _error(self, spec: RewardSettings, reason: str, row: Mapping[str, Any], answer: str) -> RewardError:
        written = json.dumps(row, ensure_ascii=False, default=str)
        message = (
            f"reward {spec.function!r} {cut(reason, _SHOWN['reason'])}; row {cut(written, _SHOWN['row'])}, "
            f"answer {cut(repr(answer), _SHOWN['answer'])}"
        )
        if self._ends_run:
            return RewardError(f"{message}; on_reward_error = 'drop' leaves such episodes out")
        return RewardError(message, ends_run=self._num_late > MOST_LATE)


def _error_of_parameters(spec: RewardSettings, function: Callable[..., Any]) -> str:
    """Return why a function does not take the arguments of its form, "" if it does."""
    if spec.form == "trl":
        named, takes_others = parameters_of(function)
        reason = "" if takes_others or "completions" in named else f"it has no parameter 'completions': {sorted(named)}"
    else:
        reason = error_of_call(function, _NAMES[spec.form])
    if not reason:
        return ""
    names = parameters_of(function)[0]
    other = next((form for name, form in _SHOWN_FORMS.items() if name in names and form != spec.form), "")
    hint = f"set form = {other!r}, or rename its parameters" if other else "rename its parameters, or set form"
    arguments = ", ".join(_NAMES.get(spec.form, ("prompts", "completions", "the columns")))
    return f"reward {spec.function!r}: form = {spec.form!r} gives it {arguments}, but {reason}; {hint}"


def _of_row(prompt: str, answer: str, row: dict[str, Any], messages: Sequence[Any], right: str) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, "row": row}


def _of_trl(prompt: str, answer: str, row: dict[str, Any], messages: Sequence[Any], right: str) -> dict[str, Any]:
    columns = {str(name): [value] for name, value in row.items() if name not in ("prompt", "completion")}
    if messages:
        arguments: dict[str, Any] = {
            "prompts": [list(messages)],
            "completions": [[{"role": "assistant", "content": answer}]],
        }
    else:
        arguments = {"prompts": [prompt], "completions": [answer]}
    return {**columns, **arguments}


def _of_verl(prompt: str, answer: str, row: dict[str, Any], messages: Sequence[Any], right: str) -> dict[str, Any]:
    model = row.get("reward_model")
    if isinstance(model, str) and model.lstrip().startswith("{"):  # as tables write it
        with suppress(ValueError):
            model = json.loads(model)
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    if truth is None:
        truth = right or row.get("answer")  # one that the environment cannot read, such as a list, as it is
    extra = row.get("extra_info")
    return {
        "data_source": row.get("data_source"), "solution_str": answer, "ground_truth": truth, "extra_info": extra
    }  # fmt: skip


_ARGUMENTS = {"row": _of_row, "trl": _of_trl, "verl": _of_verl, "batch": _of_row}


def _only(value: Any) -> Any:
    return listed(value, 1, "completion")[0]


def _score_of(value: Any) -> Any:
    if isinstance(value, Mapping) and "score" not in value:
        raise NoReward(f"returned a dict with {', '.join(map(str, value)) or 'nothing'}; expected 'score' in it")
    return value["score"] if isinstance(value, Mapping) else value


def _same(value: Any) -> Any:
    return value


_VALUES: dict[str, Callable[[Any], Any]] = {"row": _same, "trl": _only, "verl": _score_of, "batch": _same}


def _number(value: Any, spec: RewardSettings) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # of an array or a tensor without dimensions
    if value is None:
        raise NoReward("returned None; expected a number: does every path of it end in a return?")
    if not isinstance(value, numbers.Real):
        raise NoReward(f"returned {cut(repr(value), 60)}, a {type(value).__name__}; expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoReward(f"returned {number}; expected a finite number")
    within = min(spec.high, max(spec.low, number))
    if abs(number - within) > _ROUNDING * (spec.high - spec.low):
        raise NoReward(
            f"returned {value!r}; expected {spec.low:g} to {spec.high:g}: set low and high to the range of its values"
        )
    return within
