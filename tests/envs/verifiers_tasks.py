"""A taskset of verifiers 0.4 for tests, and a harness that plays it in the process: up to `num_tries` turns."""

import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

ASKED = "Question: Which is largest: {}, {} or {}?\nAnswer:"
SHOTS = f"{ASKED.format(17, 40, 93)} 93\n\n{ASKED.format(71, 50, 12)} 71\n\n"
AGAIN = "\nWrong. Try again.\nAnswer:"


class Question(vf.TaskData):
    """A question with its answer."""

    answer: str = ""


class Largest(vf.Task[Question]):
    """Which number is largest?"""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Return 1 for a right answer, .5 on the second try, .25 on the third."""
        said = [str(one.content or "").strip() for one in trace.branches[-1].messages if one.role == "assistant"]
        return 0.5 ** (len(said) - 1) * float(bool(said) and said[-1] == self.data.answer)


class Numbers(vf.Taskset[Largest]):
    """Two hundred questions."""

    def load(self) -> Iterator[Largest]:
        generator = random.Random(1)
        for _ in range(200):
            three = generator.sample(range(10, 100), 3)
            data = Question(prompt=SHOTS + ASKED.format(*three), answer=str(max(three)))
            yield Largest(data, self.config.task)


class TriesConfig(vf.HarnessConfig):
    """Settings of the harness."""

    num_tries: int = 1
    fails: bool = False


class Tries(vf.Harness[TriesConfig]):
    """Asks, and asks again after a wrong answer."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, *more: Any
    ) -> vf.ProgramResult:
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(self.config.num_tries):
                how = {"model": ctx.model, "messages": messages, "stop": ["\n"], "max_tokens": 8}
                answer = (await client.chat.completions.create(**how)).choices[0].message.content
                if self.config.fails:
                    return vf.ProgramResult(exit_code=3, stdout="", stderr="the harness broke")
                if str(answer).strip() == data.answer:
                    break
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": AGAIN}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Numbers", "Tries"]
