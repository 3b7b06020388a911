"""Infrastructure failures: each costs its own episode, names itself in one line, and leaves nothing behind."""

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl.engine.protocol import EngineBrokenError, EngineError
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.types import StopReason
from tests.rollout.fakes import Answering, FakeEnv, ScriptedEngine, misbehave, unplayed
from tests.waiting import wait_until


@pytest.fixture
def engine(tokenizer):
    text = tokenizer("x\n", add_special_tokens=False)["input_ids"]
    return ScriptedEngine(tokenizer, lambda request_id, token_ids: text)


def by_prompt(episodes) -> dict:
    return {episode.custom_data["prompt"].prompt_id: episode for episode in episodes}


def hanging(episodes, calls: EnvCalls, num: int) -> list:
    """Play the `num` episodes that do not hang, and only then let calls time out."""
    ended = [next(episodes) for _ in range(num)]
    calls.timeout_s = 0.5
    return [*ended, *episodes]


CALLS = [("crash", "reset"), ("exit", "step"), ("sleep", "step"), ("loop", "reset"), ("stubborn", "step")]


@pytest.mark.slow
@pytest.mark.parametrize(("mischief", "place"), CALLS)
def test_a_failing_call_costs_its_episode_only(play_with, engine, calls, mischief, place):
    bad = f"{mischief}-{place}"
    is_hang = mischief in ("sleep", "loop", "stubborn")
    played = play_with(unplayed("q1", bad, "q2", "q3"), engine)
    episodes = by_prompt(hanging(played, calls, 3) if is_hang else played)
    reasons = {name: episode.custom_data["stop_reason"] for name, episode in episodes.items() if name != bad}
    assert reasons == dict.fromkeys(("q1", "q2", "q3"), StopReason.TERMINATED)
    data = episodes[bad].custom_data
    assert data["stop_reason"] is (StopReason.ENV_TIMEOUT if is_hang else StopReason.ENV_CRASHED)
    turn = 1 if place == "step" else 0
    assert data["error"].startswith(f"environment 'env', prompt '{bad}', turn {turn}, {place}: ")
    assert {"crash": "KeyError: 'no luck", "exit": "SystemExit: 3"}.get(mischief, "within 0.5 s") in data["error"]
    assert "\n" not in data["error"]
    # What the policy wrote is kept, without a reward; an episode that never began has one empty observation.
    assert (len(episodes[bad]), episodes[bad].get_return(), episodes[bad].is_done) == (turn, 0.0, True)
    assert len(episodes[bad].get_observations(-1)) == 0
    assert calls.num_abandoned == int(is_hang)
    # Three healthy instances wait; a crashed one is closed, a hung one is left alone.
    assert calls.pool.num_idle == 3
    calls.poll(30.0)  # until the crashed one is closed
    assert sorted(env.num_closed for env in FakeEnv.made) == ([0, 0, 0, 0] if is_hang else [0, 0, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("mischief", "reason"), [("crash", StopReason.ENV_CRASHED), ("loop", StopReason.ENV_TIMEOUT)])
def test_a_failing_constructor_costs_its_episodes_only(play_with, engine, calls, mischief, reason):
    envs = {"env": FakeEnv, "bad": lambda: FakeEnv(mischief=f"{mischief}-construct")}
    live = unplayed("q1") + unplayed("q2", env_id="bad", group_id="h")
    played = play_with(live, engine, envs)
    episodes = by_prompt(hanging(played, calls, 1) if reason is StopReason.ENV_TIMEOUT else played)
    assert episodes["q1"].custom_data["stop_reason"] is StopReason.TERMINATED
    assert episodes["q2"].custom_data["stop_reason"] is reason
    assert episodes["q2"].custom_data["error"].startswith("environment 'bad', prompt 'q2', turn 0, construct: ")


class _Refuses:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def _never() -> bool:
    misbehave("loop-step", "step")
    return True


HOSTILE_STEPS = [
    ((None, 0, True, False, {}), "the observation is of type NoneType; expected a str"),
    (("\ud800", 0, False, False, {}), "the observation cannot be encoded as UTF-8"),
    (("", float("nan"), True, False, {}), "the reward is nan; expected a finite number"),
    (("", 10**400, True, False, {}), "the reward is inf; expected a finite number"),
    (("", "1.0", True, False, {}), "the reward is of type str; expected a number"),
    (("", 1j, True, False, {}), "the reward is of type complex; expected a number"),
    (("", 0, _Refuses(), False, {}), "RuntimeError: neither"),
    (("", 0, True, False, None), "the info is of type NoneType; expected a dict"),
    (("", 0, True, False, {"stop_reason": "env_crashed"}), "info[\"stop_reason\"] = 'env_crashed'; expected one of"),
    (("", 0, True, {}), "step returned of type tuple with 4 entries; expected (observation, reward"),
    (None, "step returned of type NoneType; expected (observation, reward"),
]
HOSTILE_RESETS = [
    ("text", "reset returned of type str; expected (observation, info)"),
    ((1, {}), "the observation is of type int; expected a str"),
]
HOSTILE = [(*row, to_reset) for to_reset, rows in enumerate((HOSTILE_STEPS, HOSTILE_RESETS)) for row in rows]


@pytest.mark.parametrize(("answer", "message", "to_reset"), HOSTILE)
def test_hostile_answers_are_crashes_that_say_what_was_expected(play_with, engine, answer, message, to_reset):
    envs = {"env": FakeEnv, "bad": lambda: Answering(answer, to_reset)}
    live = unplayed("q1") + unplayed("q2", env_id="bad", group_id="h")
    episodes = by_prompt(play_with(live, engine, envs))
    assert episodes["q1"].custom_data["stop_reason"] is StopReason.TERMINATED
    assert episodes["q2"].custom_data["stop_reason"] is StopReason.ENV_CRASHED
    assert message in episodes["q2"].custom_data["error"] and len(episodes["q2"]) == 1 - to_reset


def test_an_answer_that_hangs_when_looked_at_times_out(play_with, engine, calls):
    calls.timeout_s = 0.5
    endless = type("Hanging", (), {"__bool__": lambda self: _never()})()
    (episode,) = play_with(unplayed("q1"), engine, {"env": lambda: Answering(("", 0, endless, False, {}))})
    assert episode.custom_data["stop_reason"] is StopReason.ENV_TIMEOUT


def test_a_string_in_disguise_is_read_as_the_string_it_is(play_with, engine):
    class Disguised(str):
        def __str__(self) -> str:
            raise RuntimeError

    answer = (Disguised("end"), True, True, 0, {})
    (episode,) = play_with(unplayed("q1"), engine, {"env": lambda: Answering(answer)})
    assert type(episode.custom_data["text"][-1][1]) is str
    assert (episode.custom_data["text"][-1], episode.get_return()) == (("environment", "end"), 1.0)


def test_an_engine_that_refuses_a_request_costs_its_episode(play_with, engine):
    def script(request_id: str, token_ids: list[int], write=engine.script):
        if request_id == "g/1/0":
            raise EngineError("no room")
        return write(request_id, token_ids)

    engine.script = script
    episodes = by_prompt(play_with(unplayed("q1", "q2", "q3"), engine))
    reasons = {name: episode.custom_data["stop_reason"] for name, episode in episodes.items()}
    assert reasons == {"q1": StopReason.TERMINATED, "q2": StopReason.ENGINE_FAILED, "q3": StopReason.TERMINATED}
    assert episodes["q2"].custom_data["error"].endswith("turn 0, writing: EngineError: no room")
    assert len(episodes["q2"].get_observations(0)) == 8  # the prompt nobody answered


def test_an_engine_that_fails_in_a_step_costs_what_it_was_writing(play_with, engine, calls):
    step = engine.step

    def failing_step():
        if engine.num_steps == 1:
            engine.num_steps += 1
            raise RuntimeError("out of memory\nhelp")
        return step()

    engine.step = failing_step
    episodes = list(play_with(unplayed("q1", "q2", "q3"), engine, limits={"max_concurrent": 2}))
    reasons = Counter(episode.custom_data["stop_reason"] for episode in episodes)
    assert reasons == {StopReason.ENGINE_FAILED: 2, StopReason.TERMINATED: 1}
    error = next(e.custom_data["error"] for e in episodes if e.custom_data["error"])
    assert error == "the engine failed while generating 2 turns: RuntimeError: out of memory help"
    assert engine.num_running() == 0
    assert calls.pool.num_idle == 2  # the environments did nothing wrong


@pytest.mark.parametrize("method", ["step", "submit"])
def test_a_broken_engine_ends_the_play(play_with, engine, calls, method):
    def broken(*args):
        raise EngineBrokenError("a worker died")

    setattr(engine, method, broken)
    with pytest.raises(EngineBrokenError, match="a worker died"):
        list(play_with(unplayed("q1", "q2"), engine))
    assert engine.num_running() == 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"logp": np.array([-1, np.nan], np.float32)}, "has a log-prob that is not finite and <= 0"),
    ({"logp": np.array([-1, 0.5], np.float32)}, "has a log-prob that is not finite and <= 0"),
    ({"logp": np.array([-1], np.float32)}, "has 2 tokens and 1 log-probs"),
    ({"token_ids": np.empty(0, np.int32), "logp": np.empty(0, np.float32)}, "has 0 tokens and 0 log-probs"),
    ({"reason": "aborted"}, "was aborted by the engine"),
])  # fmt: skip
def test_an_unusable_turn_is_the_engines_failure(play_with, engine, changes, message):
    step = engine.step
    engine.step = lambda: [replace(turn, **changes) for turn in step()]
    (episode,) = play_with(unplayed("q1"), engine)
    assert episode.custom_data["stop_reason"] is StopReason.ENGINE_FAILED
    assert episode.custom_data["error"].startswith(f"turn g/0/0 of the engine {message}")


def test_the_deadline_ends_everything_wherever_it_is(play_with, tokenizer, monkeypatch):
    def script(request_id: str, token_ids: list[int]):
        return [9] * (100_000 if request_id.startswith("g/1") else 2)

    def clock() -> float:
        """Pass the deadline when all the others are where they should be, however slow the machine is."""
        is_there = {("turn", "g/0/0"), ("turn", "g/2/0"), ("submit", "g/1/0")} <= set(engine.log)
        return time.monotonic() + 1000.0 * (is_there and any(env.turn for env in FakeEnv.made))

    monkeypatch.setattr(
        "rllib_srl.rollout.player.time",
        SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter, sleep=time.sleep),
    )
    engine = ScriptedEngine(tokenizer, script, context_length=200_000, step_s=0.005)
    calls = EnvCalls(1, 600.0)
    live = unplayed("loop-step", "writing", "queued", "unstarted", "unstarted")
    limits = {"max_concurrent": 3, "max_turn_tokens": 100_000, "max_episode_tokens": 200_000}
    episodes = list(play_with(live, engine, limits=limits, deadline_s=500.0, calls=calls))
    assert sorted(e.custom_data["index"] for e in episodes) == [0, 1, 2, 3, 4]
    assert {e.custom_data["stop_reason"] for e in episodes} == {StopReason.ABORTED}
    doing = {e.custom_data["index"]: e.custom_data["error"] for e in episodes}
    for index, where in enumerate(("1, step", "0, writing", "1, step", "0, not started", "0, not started")):
        assert f"turn {where}: deadline_s = 500 passed" in doing[index]
    assert [len(e) for e in sorted(episodes, key=lambda e: e.custom_data["index"])] == [1, 0, 1, 0, 0]
    assert (engine.num_running(), calls.num_open - 1) == (0, 0)  # the open one closes the queued one's instance
    assert wait_until(lambda: calls.num_hanging == 0)
    assert calls.num_abandoned == 1
    calls.close()


def test_a_caller_that_stops_listening_leaves_nothing_running(play_with, tokenizer):
    lengths = {"g/0/0": 1, "g/1/0": 400, "g/2/0": 400}
    engine = ScriptedEngine(tokenizer, lambda request_id, ids: [9] * lengths[request_id], step_s=0.001)
    step = engine.step
    engine.step = lambda: step() if len(engine.submitted) == 3 else []
    calls = EnvCalls(2, 30.0)
    episodes = play_with(unplayed("q1", "q2", "q3"), engine, limits={"max_turn_tokens": 400}, calls=calls)
    assert next(episodes).custom_data["index"] == 0
    episodes.close()
    assert (engine.num_running(), calls.num_open) == (0, 0)
    assert sorted(name for what, name in engine.log if what == "abort") == ["g/1/0", "g/2/0"]
    assert calls.pool.num_idle == 3
    calls.close()
