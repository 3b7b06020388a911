"""Environments of verifiers (below 0.4) for tests: one turn, several turns, tools, and some that are refused."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import datasets
import verifiers as vf

ASKED = "Question: Which is largest: {}, {} or {}?\nAnswer:"
SHOTS = f"{ASKED.format(17, 40, 93)} 93\n\n{ASKED.format(71, 50, 12)} 71\n\n"


def rows(num: int, seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    drawn = [generator.sample(range(10, 100), 3) for _ in range(num)]
    asked = [SHOTS + ASKED.format(*three) for three in drawn]
    return [{"question": one, "answer": str(max(three))} for one, three in zip(asked, drawn, strict=True)]


def said(completion: Any) -> str:
    return str(completion[-1].content or "").strip()


def correct(completion: Any, answer: str) -> float:
    return float(said(completion) == answer)


def short(completion: Any) -> float:
    return float(len(said(completion)) <= 2)


HOW: dict[str, Any] = {"sampling_args": {"stop": ["\n"], "max_tokens": 8, "temperature": 0.3}}


def single(num: int = 200, held: int = 0, weight: float = 0.0, **more: Any) -> vf.Environment:
    rubric = vf.Rubric(funcs=[correct, short], weights=[1.0, weight])
    evaluated = {"eval_dataset": datasets.Dataset.from_list(rows(held, 2))} if held else {}
    return vf.SingleTurnEnv(
        dataset=datasets.Dataset.from_list(rows(num, 1)), rubric=rubric, **evaluated, **{**HOW, **more}
    )


class Again(vf.MultiTurnEnv):
    """A wrong answer gets another try, three in all."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "\nWrong. Try again.\nAnswer:"}]

    @vf.stop
    async def is_right(self, state: Any) -> bool:
        return bool(state["trajectory"]) and said(state["trajectory"][-1]["completion"]) == state["answer"]


def tries(completion: Any, answer: str, state: Any) -> float:
    return correct(completion, answer) * (1.0, 0.5, 0.25)[len(state["trajectory"]) - 1]


def multi(num: int = 200) -> vf.Environment:
    return Again(dataset=datasets.Dataset.from_list(rows(num, 1)), rubric=vf.Rubric(funcs=[tries]), max_turns=3, **HOW)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def tool() -> vf.Environment:
    asked = [{"question": "What is 2 + 3?", "answer": "5"}]
    shown = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
    return vf.ToolEnv(
        tools=[add], dataset=datasets.Dataset.from_list(asked), rubric=vf.Rubric(funcs=[correct]), max_turns=4,
        system_prompt="Use the tool.", few_shot=shown,
    )  # fmt: skip


def together(completions: list[Any]) -> list[float]:
    return [1.0 / len(completions)] * len(completions)


def group() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=datasets.Dataset.from_list(rows(4, 1)), rubric=vf.Rubric(funcs=[together]))


def only_evaluated() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=datasets.Dataset.from_list(rows(4, 1)), rubric=vf.Rubric(funcs=[correct]))


def broken(path: str = "") -> vf.Environment:
    raise KeyError(path)


def nothing() -> Any:
    return 3


class Failing(vf.SingleTurnEnv):
    async def setup_state(self, state: Any) -> Any:
        await self.get_model_response(state, state["prompt"])
        raise vf.SandboxError("the sandbox is gone")


def failing() -> vf.Environment:
    return Failing(dataset=datasets.Dataset.from_list(rows(4, 1)), rubric=vf.Rubric(funcs=[correct]))


def blocking_reward(completion: Any) -> float:
    if re.search("block", said(completion)):
        time.sleep(60)
    return 1.0


def blocking() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=datasets.Dataset.from_list(rows(4, 1)), rubric=vf.Rubric(funcs=[blocking_reward]))
