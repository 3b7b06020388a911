"""Customer service: serve a customer's request by changing a shop's database within its policy (tau2-bench, retail).

    # Retail agent policy ...                                        the rules, then the tools
    Customer: You received your order #W2378156 and wish to exchange the mechanical keyboard for ...
    <tool_call>{"name": "find_user_id_by_name_zip", "arguments": {"first_name": "Yusuf", ...}}</tool_call>
    <tool_response>yusuf_rossi_9620</tool_response>
    ...
    <answer>Both items will be exchanged.</answer>                   reward 1 or 0

Reward 1 if the database ends in the state after the ground truth's calls, and the policy's messages contain every piece
of information that the task requires (without case and commas). The customer is simulated by rules, not by a model:
- user = "brief": the whole brief is stated at once;
- user = "asked": the customer states the reason first and, message by message, one more part of its brief (identity,
  what it does not remember, how to be served): the part that shares most words with the policy's message, else the
  next one;
- then each of the next `num_replies` messages of the policy is answered by "Yes, please go ahead.", and one more ends
  the episode.
The texts are the brief's own. A customer that argues or changes its mind would need a model.

The data (rules, database, 114 tasks, their published split) is tau2-bench's, from the package inspect-evals or from a
folder with db.json or db.json.gz, policy.md or policy.txt, tasks.json and, optionally, split_tasks.json.

Source: Barres et al., 2025, arXiv 2506.07982 (tau2-bench); user simulation by a model is left out.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from rllib_srl.envs import text
from rllib_srl.envs.question import Listed, Question
from rllib_srl.envs.settings import OneOf, Within
from rllib_srl.envs.shop.database import TOOL_NAMES, Database, Shop
from rllib_srl.envs.tools.calls import CallError, Said, ToolCall
from rllib_srl.envs.tools.tool import Tool
from rllib_srl.envs.tools.tool_questions import Reply, ToolQuestionEnv, ToolSettings

CONSENT = "Yes, please go ahead."
_SPLIT_NAMES = {"train": "train", "test": "heldout"}
_ASKED = ("reason_for_call", "known_info", "unknown_info", "task_instructions")
_WORD = re.compile(r"[a-z]{4,}|zip")  # shorter words do not identify the requested part


@dataclass(frozen=True)
class RetailSettings(ToolSettings):
    """Settings of `Retail`. Invariant: as in `ToolSettings`."""

    data_dir: str = ""  # a folder of tau2-bench's retail data; empty: that of the package inspect-evals
    num_shots: int = 0
    call_format: str = "xml"
    max_calls: int = 40
    max_result_chars: int = 10_000
    user: Annotated[str, OneOf("brief", "asked")] = "brief"  # all at once, or the rest on request
    num_replies: Annotated[int, Within(0, 50)] = 0  # messages that the customer answers before one ends it
    shows_policy: bool = True  # whether the shop's rules open the prompt

    unused = ("num_shots", "feedback_turns")
    has_many_arguments = True


@dataclass(frozen=True)
class RetailTask:
    """One task. Invariant: every call is of a tool in `TOOL_NAMES`."""

    task_id: str
    parts: tuple[str, ...]  # parts of the brief: the reason first, then the other facts
    calls: tuple[ToolCall, ...]
    told: tuple[str, ...]  # information that the policy must state

    @property
    def brief(self) -> str:
        """Return the customer's whole brief."""
        return " ".join(self.parts)


@dataclass(frozen=True)
class RetailData:
    """The content of a data folder. Invariant: read-only."""

    policy: str
    database: Database
    tasks: Mapping[str, RetailTask]
    splits: Mapping[str, str]  # task id -> "train" or "heldout", as published


class Retail(Listed, ToolQuestionEnv):
    """Customer requests, graded by the final state of the database. Invariant: a prompt id is a task's id."""

    domain = "retail"
    votes_by_calls = True
    settings_class = RetailSettings
    settings: RetailSettings

    def _prepare(self) -> None:
        super()._prepare()
        self._data = retail_data(self.settings.data_dir)
        self._ids = list(self._data.tasks)

    def question(self, prompt_id: str) -> Question:
        """Return the customer's brief; no text is its right answer."""
        brief = self._task(prompt_id).brief
        return Question(brief, answer="done", wrong="done", canonical=brief)

    def split_of(self, prompt_id: str) -> str:
        """Return the published split of a task, or a split by its text if none is published."""
        return self._data.splits.get(prompt_id) or super().split_of(prompt_id)

    def grade(self, prompt_id: str, answer: str) -> float | None:
        """Raise: the database is graded, not an answer in words."""
        raise NotImplementedError("Retail grades the state of its database")

    def tools(self, prompt_id: str) -> Sequence[Callable[..., Any] | Tool]:
        """Return the tools of a new shop for this episode."""
        return [Tool.of(function, is_bounded=True) for function in Shop(self._data.database).tools()]

    def gold_turns(self, prompt_id: str) -> list[str]:
        """Return the gold turns: questions if user = "asked", the ground truth's calls, and the required statements."""
        task = self._task(prompt_id)
        message = self.format.answer(f"Done. {' '.join(task.told)}".strip())
        asked = [self.format.answer("What else should I know?")] * len(self._untold_of(task))
        return asked + [self.format.call(call) for call in task.calls] + [message] * (1 + self.settings.num_replies)

    def _begin_episode(self) -> None:
        super()._begin_episode()
        self._shop, self._said = Shop(self._data.database), list[str]()
        self._untold, self._num_agreed = self._untold_of(self._task(self._asked_id)), 0
        self._tools = {name: replace(tool, function=getattr(self._shop, name)) for name, tool in self._tools.items()}

    def _opening(self) -> str:
        policy = f"{self._data.policy.strip()}\n\n" if self.settings.shows_policy else ""
        task = self._task(self._asked_id)
        said = task.brief if self.settings.user == "brief" else task.parts[0]
        return f"{policy}{self._instructions()}Customer: {said}\n"

    def _untold_of(self, task: RetailTask) -> list[str]:
        return list(task.parts[1:]) if self.settings.user == "asked" else []

    def _reply(self, message: str) -> str | None:
        """Return the customer's reply; None if it has nothing more to say."""
        if self._untold:
            asked = set(_WORD.findall(message.lower()))
            reply = max(self._untold, key=lambda part: len(asked & set(_WORD.findall(part.lower()))))
            self._untold.remove(reply)
            return reply
        self._num_agreed += 1
        return CONSENT if self._num_agreed <= self.settings.num_replies else None

    def _answered(self, action: str, said: Said) -> Reply:
        self._said.append(said.answer if said.answer is not None else said.text)
        if (reply := self._reply(self._said[-1])) is not None:
            return text.reply(action, f"Customer: {reply}\n"), 0.0, False, False, {}
        task = self._task(self._asked_id)
        speech = "\n".join(self._said).lower().replace(",", "")
        has_told = all(fact.lower().replace(",", "") in speech for fact in task.told)
        is_right = has_told and self._shop.changes() == self._expected(task)
        self._question, self._tools = None, {}
        return "", float(is_right), True, False, {}

    def _expected(self, task: RetailTask) -> Mapping[Any, Any]:
        shop = Shop(self._data.database)
        for call in task.calls:
            try:
                getattr(shop, call.name)(**call.kwargs)
            except CallError:  # a ground truth may hold calls that the shop refuses, as in tau2-bench
                continue
        return shop.changes()

    def _task(self, prompt_id: Any) -> RetailTask:
        if not isinstance(prompt_id, str) or prompt_id not in self._data.tasks:
            raise ValueError(f"prompt_id = {prompt_id!r}; expected the id of a task such as {self._ids[0]!r}")
        return self._data.tasks[prompt_id]


@lru_cache(maxsize=4)
def retail_data(data_dir: str) -> RetailData:
    """Read a folder of tau2-bench's retail data, or the package's data.

    Raises:
        ValueError: there is no data, or a file or row is broken; the message names file, row and field.
    """
    folder = Path(data_dir) if data_dir else _packaged()
    tasks_path = _first(folder, "tasks.json")
    tasks = [_task(row, number, tasks_path) for number, row in enumerate(_loaded(tasks_path), start=1)]
    database = _loaded(_first(folder, "db.json", "db.json.gz"))
    missing = {"products", "users", "orders"} - set(database)
    if missing:
        raise ValueError(f"{folder}/db.json has no {', '.join(sorted(missing))}; expected tau2-bench's retail database")
    splits = folder / "split_tasks.json"
    published = _loaded(splits) if splits.exists() else {}
    by_id = {
        str(task_id): _SPLIT_NAMES[name] for name, ids in published.items() if name in _SPLIT_NAMES for task_id in ids
    }
    policy = _first(folder, "policy.md", "policy.txt").read_text(encoding="utf-8")
    return RetailData(policy, database, {task.task_id: task for task in tasks}, by_id)


def _packaged() -> Path:
    spec = importlib.util.find_spec("inspect_evals")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "tau2" / "data" / "domains" / "retail"
        if folder.is_dir():
            return folder
    raise ValueError(
        "data_dir is not set, and the package inspect-evals is not installed; expected a folder of tau2-bench's retail "
        "data (data/tau2/domains/retail of its repository), or pip install --no-deps inspect-evals (the package tau2 "
        "of PyPI is something else)"
    )


def _first(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"data_dir = {str(folder)!r} has no {' or '.join(names)}; expected tau2-bench's retail data")


def _loaded(path: Path) -> Any:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); expected tau2-bench's retail data") from None


def _task(row: Any, number: int, path: Path) -> RetailTask:
    try:
        instructions = row["user_scenario"]["instructions"]
        stated = [instructions] if isinstance(instructions, str) else [instructions.get(field) for field in _ASKED]
        parts = tuple(" ".join(str(part).split()) for part in stated if part and str(part).strip(" ."))
        criteria = row["evaluation_criteria"]
        calls = [ToolCall(action["name"], (), dict(action["arguments"])) for action in criteria.get("actions") or ()]
        facts = tuple(str(fact) for fact in criteria.get("communicate_info") or ())
        task_id = str(row["id"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, row {number}: field {error} is missing or broken") from None
    unknown = sorted({call.name for call in calls} - set(TOOL_NAMES))
    if unknown or not parts:
        raise ValueError(f"{path}, row {number}: actions {unknown} are unknown, or the instructions are empty")
    return RetailTask(task_id, parts, tuple(calls), facts)
