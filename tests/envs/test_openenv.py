"""The environment `openenv_experimental` against real servers with their errors."""

import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rllib_srl.envs.servers import openenv
from rllib_srl.envs.servers.links import ServerError
from rllib_srl.envs.servers.openenv import OpenEnv, RewardRangeError, SeedError

websockets = pytest.importorskip("websockets.sync.server")  # vLLM brings it, or the extra `envs`

TIMEOUT_S = 30.0  # of every environment that is not late on purpose; a busy machine may stall for seconds
LATE_S = 60.0  # how long a late server waits before it answers


class Guess:
    """Asks for the sum of two numbers, three tries; the first word of a wrong turn is shown again."""

    def reset(self, data: dict[str, Any], is_seeded: bool = True) -> dict[str, Any]:
        generator = random.Random(data["seed"] if is_seeded else None)
        self.a, self.b = generator.randrange(1000), generator.randrange(1000)
        self.num_steps = 0
        return self.shown(f"{self.a} + {self.b} =", None, False)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if set(action) != {"message"}:
            raise ValueError("message")
        self.num_steps += 1
        is_right = action["message"].strip() == str(self.a + self.b)
        return self.shown(f"not {action['message']}", 1.0 if is_right else -0.1, is_right or self.num_steps == 3)

    def shown(self, text: str, reward: float | None, is_done: bool) -> dict[str, Any]:
        return {"observation": {"said": {"text": text}, "metadata": {}}, "reward": reward, "done": is_done}


BUSY = [0]  # how many resets a busy server still refuses
ENDED = threading.Event()  # of the tests: nobody waits for a late server then
ODD = {"garbage": "{", "odd": '{"type": "observation", "data": {"done": 3}}'}


def hold_session(socket: Any) -> None:
    """Answer one client, with the reason that the path names."""
    reason, guess = socket.request.path.split("/")[1], Guess()
    for asked in map(json.loads, socket):
        kind, data = asked["type"], asked.get("data", {})
        if kind == "close" or (kind, reason) == ("step", "gone"):
            return
        if kind == "step" and reason == "late":
            ENDED.wait(LATE_S)
        if (kind, reason) == ("reset", "busy") and BUSY[0] > 0:
            BUSY[0] -= 1
            answer = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
        else:
            try:
                shown = guess.reset(data, reason != "unseeded") if kind == "reset" else guess.step(data)
                answer = {"type": "observation", "data": shown}
            except ValueError as error:
                answer = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": str(error)}}
        socket.send(ODD[reason] if kind == "step" and reason in ODD else json.dumps(answer))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with websockets.serve(hold_session, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.socket.getsockname()[1]
        ENDED.set()


@pytest.fixture
def make(port: int) -> Iterator[Any]:
    openenv._checked.clear()
    made: list[OpenEnv] = []

    def build(reason: str = "plain", **settings: Any) -> OpenEnv:
        url = f"ws://127.0.0.1:{port}/{reason}/ws"
        how = {"action": {"message": "{turn}"}, "observation": "said.text", "low": -0.3, "timeout_s": TIMEOUT_S}
        made.append(OpenEnv({"url": url, **how, **settings}))
        return made[-1]

    yield build
    for env in made:
        env.close()


def total_of(question: str) -> str:
    a, b = question.removesuffix(" =").split(" + ")
    return str(int(a) + int(b))


def test_an_episode_by_value(make: Any) -> None:
    env = make(stop=["\n"], system_prompt="Add.", domain="sums")
    question, info = env.reset(seed=4)
    assert question == make().reset(seed=4)[0] != make().reset(seed=6)[0] and info == {}
    assert (env.stop_strings, env.system_prompt, env.domain) == (("\n",), "Add.", "sums")
    shown, reward, is_over, _, _ = env.step("1")
    assert (shown, is_over) == ("not 1", False) and reward == pytest.approx(0.2 / 1.3)  # -.1 of -.3 to 1
    _, reward, is_over, is_cut, _ = env.step(total_of(question))
    assert (is_over, is_cut) == (True, False) and reward == pytest.approx(1.2 / 1.3 - 0.2 / 1.3)
    question, _ = env.reset(seed=4)  # the session is used again
    rewards = [env.step("no")[1] for _ in range(3)]
    assert sum(rewards) == pytest.approx(0.0) and env.reset(seed=4)[0] == question


def test_without_a_template_the_turn_is_the_action(make: Any) -> None:
    env = make(action={}, observation="")
    shown = json.loads(env.reset(seed=2)[0])
    assert shown["metadata"] == {} and shown["said"]["text"].endswith("=")
    env.step(json.dumps({"message": "1"}))
    for turn in ("no JSON", "[1]", "[" * 5000, json.dumps({"word": "1"})):  # the last one is refused by the server
        env.reset(seed=2)
        paid = env.step(json.dumps({"message": "1"}))[1]
        _, reward, is_over, _, info = env.step(turn)
        assert is_over and reward == -paid and info["stop_reason"] == "unparsable"
    wrong = make(action={"word": "{turn}"})
    wrong.reset(seed=2)
    with pytest.raises(ServerError, match="message"):  # a wrong template is not the policy's reason
        wrong.step("1")


@pytest.mark.parametrize(("reason", "message"), [
    ("late", "no answer to a step within timeout_s = 3"), ("gone", "the connection broke during a step"),
    ("garbage", "is not JSON"), ("odd", "is not valid; expected"),
])  # fmt: skip
def test_a_failed_step_says_why_and_the_next_episode_is_whole(make: Any, reason: str, message: str) -> None:
    env = make(reason, **({"timeout_s": 3.0} if reason == "late" else {}))
    start = time.monotonic()
    question, _ = env.reset(seed=2)
    with pytest.raises(ServerError, match=message):
        env.step("1")
    assert env.reset(seed=2)[0] == question and time.monotonic() - start < LATE_S - 5


def test_a_reset_is_repeated_and_a_step_is_not(make: Any) -> None:
    BUSY[0] = 2
    assert make("busy").reset(seed=2)[0].endswith("=") and BUSY[0] == 0
    BUSY[0] = 10**6
    with pytest.raises(ServerError, match=r"full.*set max_concurrent_episodes.*\(tried \d+ times in 3 s\)"):
        make("busy", timeout_s=3.0).reset(seed=2)


def test_what_cannot_be_trained_on_ends_the_run(make: Any) -> None:
    with pytest.raises(SeedError, match="expected the same"):
        make("unseeded").reset(seed=2)
    assert make("unseeded", checks_seed=False).reset(seed=2)
    env = make(high=0.5)
    question, _ = env.reset(seed=2)
    with pytest.raises(RewardRangeError, match=r"add up to 1; expected low = -0\.3 to high = 0\.5"):
        env.step(total_of(question))
    assert SeedError.ends_run and RewardRangeError.ends_run
    with pytest.raises(ServerError, match="the server's observation has text"):
        make(observation="said.word").reset(seed=2)
    with pytest.raises(ServerError, match=r"no connection .* \(tried \d+ times"):
        OpenEnv({"url": "ws://127.0.0.1:9/ws", "timeout_s": 3.0}).reset(seed=2)
    with pytest.raises(ValueError, match="url = 'http://127.0.0.1:9'; expected ws://host:port/ws"):
        OpenEnv({"url": "http://127.0.0.1:9"})
