"""The environment `verifiers`: real environments of the library on the real endpoint; the test plays the policy.

The library conflicts with the pins (setup.cfg), so most of these tests run in their own environment only:

    pip install 'rllib_srl[dev,verifiers]' && python -m pytest tests/envs/test_verifiers.py
"""

import asyncio
import json
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rllib_srl.envs.agents import loops, verifiers_env
from rllib_srl.envs.agents.endpoint import Ended, endpoint
from rllib_srl.envs.agents.environment import AgentError
from rllib_srl.envs.agents.loops import Coroutine, EventLoop
from rllib_srl.envs.agents.verifiers_env import RewardRangeError, Verifiers
from rllib_srl.envs.agents.verifiers_tasksets import Played
from tests.envs.http_server import http_server
from tests.waiting import wait_until


def installed() -> str:
    try:
        return ".".join(metadata.version("verifiers").split(".")[:2])
    except metadata.PackageNotFoundError:
        return ""


needs_tasksets = pytest.mark.skipif(installed() != "0.4", reason="no verifiers 0.4; see the module")


def asked(info: dict[str, Any]) -> dict[str, Any]:
    return json.loads(info["conversation"])  # type: ignore[no-any-return]


@pytest.fixture
def taskset(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # a taskset is a module at the top level
    made: list[Verifiers] = []

    def build(**harness: Any) -> Verifiers:
        made.append(Verifiers({"load": "verifiers-tasks", "args": taskset_args(**harness)}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def taskset_args(**harness: Any) -> dict[str, Any]:
    return {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "verifiers-tasks", **harness}}}


@needs_tasksets
def test_how_rollouts_of_a_taskset_end(taskset: Any) -> None:
    env = taskset(fails=True)
    env.reset()
    with pytest.raises(AgentError, match="the harness broke"):
        env.answer_call("1", "stop", 3, 1)
    env = taskset()
    env.reset()
    with pytest.raises(AgentError, match="no more calls"):
        env.refuse_call("out_of_calls", "no more calls")
    names = endpoint()._named
    assert not names  # of episodes that have ended
    env.reset()
    assert len(names) == 1
    env.abandon()
    assert not names


@needs_tasksets
@pytest.mark.parametrize(("load", "args", "message"), [
    ("no-such", {}, "taskset 'no-such' not found"),
    ("verifiers-tasks", {"id": "best-of-n"}, "is a BestOfNEnv; expected an environment of one agent"),
    ("verifiers-tasks", {"agent": {"model": "x"}}, "gives its agent its own model"),
    ("verifiers-tasks", {"agent": {"retries": {"max_retries": 2}}}, "repeats failed rollouts"),
    ("verifiers-tasks", {"agent": {"speed": 2}}, "failed"),
])  # fmt: skip
@pytest.mark.usefixtures("taskset")
def test_tasksets_that_cannot_be_played_are_refused(load: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Verifiers({"load": load, "args": args})


def rule(messages: list[dict[str, Any]], answers: dict[str, str]) -> str:
    """Return the next answer of a policy that is right at once, later, or never, by the question."""
    question = messages[0]["content"]
    num_wrong, tries = sum(map(ord, question)) % 4, sum(one["role"] == "assistant" for one in messages)
    return f" {answers[question]}" if tries == num_wrong else f" {tries}"


def completion(body: dict[str, Any], answers: dict[str, str]) -> tuple[int, bytes]:
    """Return what a server of that policy answers to the library's own evaluation."""
    message = {"role": "assistant", "content": rule(body["messages"], answers)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    made = {"id": "a", "object": "chat.completion", "created": 1, "model": "m"}
    return 200, json.dumps({**made, "choices": [choice], "usage": usage}).encode()


@needs_tasksets
@pytest.mark.slow
def test_training_and_the_librarys_own_evaluation_grade_episodes_alike(
    taskset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same policy plays 200 tasks once as an environment, and once as the library evaluates a model."""
    import verifiers.v1 as vf

    env = taskset(num_tries=3)
    train, held = ([*env.prompt_ids(split, 1)] for split in ("train", "heldout"))
    assert len({*train, *held}) == 200 and 15 <= len(held) <= 50 and env.domain == "verifiers-tasks"
    tasks = env._loaded._tasks
    answers = {task.data.prompt: task.data.answer for task in tasks.values()}
    trained = {}
    for key in tasks:
        _, info = env.reset(options={"prompt_id": key})
        reward, is_over = 0.0, False
        while not is_over:
            _, reward, is_over, _, info = env.answer_call(rule(asked(info)["messages"], answers), "stop", 3, 1)
        trained[key] = reward, info["reward/correct"]
    config = vf.resolve_env_config({**taskset_args(num_tries=3), "taskset": {"id": "verifiers-tasks"}})
    monkeypatch.setenv("PARITY_API_KEY", "none")

    async def evaluate(url: str) -> dict[str, tuple[float, float]]:
        evaluated, own = {}, vf.load_environment(config)
        client = vf.EvalClientConfig(base_url=url, api_key_var="PARITY_API_KEY")
        async with own.serving():
            for task in own.taskset:
                episode = await own.run_episode(task, vf.ModelContext(model="m", client=client))
                (trace,) = episode.traces
                evaluated[str(task.key)] = trace.reward, trace.rewards["correct"].score
        return evaluated

    with http_server(lambda body: completion(body, answers)) as (url, _):
        evaluated = asyncio.run(evaluate(f"{url}/v1"))
    assert trained == evaluated and len(trained) == 200
    assert {reward for reward, _ in trained.values()} == {0.0, 0.25, 0.5, 1.0}


@pytest.mark.parametrize(("found", "message"), [(None, "needs the package"), ("0.3.2", "verifiers 0.3.2 is installed")])
def test_the_wrong_version_is_named(monkeypatch: pytest.MonkeyPatch, found: str | None, message: str) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(verifiers_env, "version", version)
    with pytest.raises(ValueError, match=message):
        Verifiers({"load": "x"})


def test_rewards_are_scaled() -> None:
    env = Verifiers.__new__(Verifiers)
    env.settings = verifiers_env.VerifiersSettings(load="x", low=-1.0, high=3.0)
    assert env.outcome(Played(1.0, {"f": 2.0})) == (0.5, {"reward/f": 2.0})
    assert [env.outcome(Played(one, {}))[0] for one in (-1, 3.0, 3.0000001)] == [0, 1, 1]
    for wrong in (None, "1", float("nan")):
        with pytest.raises(AgentError, match="expected a number"):
            env.outcome(Played(wrong, {}))
    with pytest.raises(RewardRangeError):
        env.outcome(Played(-1.1, {}))


def test_a_blocked_loop_is_given_up_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, free = EventLoop("blocked"), EventLoop("free")
    begun: list[str] = []
    ended: list[Ended] = []

    async def block() -> None:
        begun.append("block")
        time.sleep(60)

    async def fail() -> None:
        raise KeyError("no")

    async def sleep() -> None:
        begun.append("sleep")
        await asyncio.sleep(60)

    programs = [Coroutine(blocked, block, ended.append), Coroutine(free, sleep, ended.append)]
    programs.append(Coroutine(free, fail, ended.append))
    for program in programs:
        program.start()
    assert wait_until(lambda: len(begun) == 2 and len(ended) == 1)
    for program, answer_s in zip(programs, (0.3, 30.0, 30.0)):
        monkeypatch.setattr(loops, "_ANSWER_S", answer_s)
        program.stop()
    assert wait_until(lambda: len(ended) == 2)
    assert (blocked.is_lost, free.is_lost) == (True, False)
    assert [one.error for one in ended] == ["KeyError: 'no'", "it was cancelled"]
