"""A player in slices: episodes go on from one to the next, with new ones and other weights between them."""

import time

import pytest

from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.env_runner import GroupsInPlay
from rllib_srl.rollout.player import Limits, Player
from rllib_srl.rollout.transcript import RawTranscript
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import FakeEnv, ScriptedEngine
from tests.waiting import wait_until

STEP_S = 0.02
CALL_S = 60.0  # timeout of an environment's call; "sleep-step" takes as long
PROMPT_S = 45.0  # of a slice that waits for no such call


class PatientEngine(ScriptedEngine):
    """Takes no step before the environments have answered: what ends in which order is the same on a busy machine."""

    calls: EnvCalls | None = None

    def step(self):
        calls = self.calls
        assert calls is None or wait_until(lambda: calls._done.qsize() == calls.num_open)
        return super().step()


@pytest.fixture
def in_play(tokenizer):
    """Return groups in play on an engine that takes `STEP_S` a token: "xx\\n" for a short prompt, 20 for a long one."""

    def script(request_id, token_ids):
        text = "x" * 19 + "\n" if "long" in tokenizer.decode(token_ids) else "xx\n"
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    calls = EnvCalls(4, CALL_S)
    engine = PatientEngine(tokenizer, script, step_s=STEP_S)
    engine.calls = calls
    player = Player(
        engine=engine, envs={"env": FakeEnv}, transcript=RawTranscript(tokenizer),
        sampling=Sampling(max_tokens=1, temperature=0.7),
        limits=Limits(max_turns=4, max_turn_tokens=50, max_episode_tokens=500), calls=calls, is_ordered=False,
    )  # fmt: skip
    yield GroupsInPlay(player)
    player.close()
    calls.close(1.0)


def prompts(*ids: str) -> dict[str, Prompt]:
    return {f"1.{name}": Prompt("env", name, "env") for name in ids}


def to_the_end(in_play, slices_s=0.1):
    ended = []
    while len(in_play):
        ended += in_play.advance(time.monotonic() + slices_s)
    return ended


def to_the_first(in_play, slices_s):
    ended = []
    while not ended:
        ended = in_play.advance(time.monotonic() + slices_s)
    return ended


def test_a_group_is_returned_once_when_its_last_episode_has_ended(in_play):
    start = time.monotonic()  # a group's seconds begin when it is added
    in_play.add(prompts("a"), 2, deadline_s=60, revisits=["1.a"])
    in_play.add(prompts("long b"), 3, deadline_s=60, shown=["1.long b"])
    first = to_the_first(in_play, 8 * STEP_S)
    first_s = time.monotonic() - start
    assert [one.group_id for one in first] == ["1.a"] and len(in_play) == 1
    assert in_play._player.engine.num_steps <= 3 + 8  # at the latest when the slice in which it ended is over
    second = to_the_end(in_play)
    assert [one.group_id for one in second] == ["1.long b"]
    marks = [(one.size, one.is_revisit, one.is_shown) for one in (*first, *second)]
    assert marks == [(2, True, False), (3, False, True)]
    assert [episode.custom_data["index"] for episode in second[0].episodes] == [0, 1, 2]
    assert [float(episode.get_return()) for one in (*first, *second) for episode in one.episodes] == [2, 2, 19, 19, 19]
    assert second[0].seconds >= 20 * STEP_S and first[0].seconds <= first_s


def test_new_groups_join_between_slices(in_play):
    in_play.add(prompts("long"), 1, deadline_s=60)
    in_play.advance(time.monotonic() + 2 * STEP_S)
    in_play.add(prompts("a"), 2, deadline_s=60)
    assert set(in_play.prompts) == {"1.long", "1.a"}
    assert [one.group_id for one in to_the_end(in_play)] == ["1.a", "1.long"]


def test_a_slice_ends_with_enough_groups_and_loses_none(in_play, monkeypatch):
    in_play.add(prompts("a", "b", "c"), 2, deadline_s=60)
    monkeypatch.setattr("rllib_srl.rollout.player._REST_S", 20.0)
    found = [in_play.advance(time.monotonic() + 60, enough=1) for _ in range(3)]
    assert [len(ended) for ended in found] == [1, 1, 1] and len(in_play) == 0
    assert {one.group_id for ended in found for one in ended} == {"1.a", "1.b", "1.c"}
    assert in_play.advance(time.monotonic() + 60) == []  # at once


def test_only_the_overdue_are_aborted(in_play):
    in_play.add(prompts("long a"), 1, deadline_s=4 * STEP_S)
    in_play.add(prompts("long b"), 1, deadline_s=60)
    first, second = to_the_end(in_play)
    assert (first.group_id, second.group_id) == ("1.long a", "1.long b")
    reasons = [one.episodes[0].custom_data["stop_reason"] for one in (first, second)]
    assert reasons == [StopReason.ABORTED, StopReason.TERMINATED]
    assert f"deadline_s = {4 * STEP_S:g} passed" in first.episodes[0].custom_data["error"]


def test_closing_frees_engine_and_environments(in_play):
    in_play.add(prompts("long", "a"), 2, deadline_s=60)
    in_play.advance(time.monotonic() + 2 * STEP_S)
    in_play.close()
    assert len(in_play) == 0 and in_play._player.num_unfinished == 0
    assert in_play._player.engine.num_running() == 0 and in_play.advance(time.monotonic() + 60) == []


def test_a_slice_ends_when_all_episodes_wait(in_play):
    in_play._player.engine.calls = None
    in_play.add(prompts("sleep-step"), 2, deadline_s=120)
    start = time.monotonic()
    assert in_play.advance(start + 50) == []  # long before 50 s, and before the call has timed out
    assert time.monotonic() - start < PROMPT_S and len(in_play) == 1
    assert in_play.take_seconds()["environment_s"] > 0 == in_play.take_seconds()["environment_s"]
    in_play.add(prompts("a"), 1, deadline_s=60)
    assert [one.group_id for one in to_the_first(in_play, 0.1)] == ["1.a"]
    in_play._player.calls.timeout_s = 0.5
    (group,) = to_the_end(in_play)
    assert (group.group_id, group.episodes[0].custom_data["stop_reason"]) == ("1.sleep-step", StopReason.ENV_TIMEOUT)
