"""Healthy episodes: every id, mask, reward and ending worked out by hand; environments and engine overlap."""

import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rllib_srl.engine.protocol import Sampling
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.episodes import LiveEpisode
from rllib_srl.rollout.transcript import ChatTranscript
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import CHATML, Answering, FakeEnv, ScriptedEngine, make_tokenizer, unplayed


@pytest.fixture
def ids_of(tokenizer):
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def engine_of(tokenizer, ids_of):
    """Return a function: the texts to write, turn by turn (the last one again and again) -> an engine."""

    def make(*texts: str, **settings) -> ScriptedEngine:
        def script(request_id: str, token_ids: list[int]) -> list[int]:
            return ids_of(texts[min(int(request_id.rsplit("/", 1)[1]), len(texts) - 1)])

        return ScriptedEngine(tokenizer, script, **settings)

    return make


def test_a_single_turn_by_hand(play_with, engine_of, ids_of):
    engine = engine_of("x=x\n")
    (episode,) = play_with(unplayed("q1", group_id="group-7"), engine)
    # "ask q1:" is 7 bytes and <bos> (id 0); the turn is 4 bytes; FakeEnv pays one for each "x".
    assert episode.get_observations(0).tolist() == [0, *ids_of("ask q1:")]
    assert episode.get_actions(0).tolist() == ids_of("x=x\n")
    assert episode.get_extra_model_outputs("action_logp", 0).tolist() == [-0.125, -0.25, -0.375, -0.5]
    assert len(episode.get_observations(1)) == 0
    assert (len(episode), episode.get_rewards(0), episode.get_return()) == (1, 2.0, 2.0)
    assert (episode.is_terminated, episode.is_truncated) == (True, False)
    assert episode.get_infos() == [{"turn": 0}, {"turn": 1}]  # what is not plain was left out
    data = episode.custom_data
    assert (data["prompt"].prompt_id, data["group_id"], data["index"]) == ("q1", "group-7", 0)
    assert (data["stop_reason"], data["versions"], data["error"]) == (StopReason.TERMINATED, (7, 7), "")
    assert data["text"] == [("environment", "ask q1:"), ("policy", "x=x\n"), ("environment", "[x=x]")]
    for array in (episode.get_observations(0), episode.get_observations(1), episode.get_actions(0)):
        assert array.dtype == np.int32


def test_the_tokens_of_a_turn_have_the_limits_of_settings_and_context(play_with, engine_of):
    engine = engine_of("x\n")
    sampling = Sampling(max_tokens=999, temperature=0.3, stop=("END",))
    limits = {"max_turn_tokens": 20, "max_episode_tokens": 18}
    list(play_with(unplayed("q1"), engine, sampling=sampling, limits=limits))
    # 8 prompt tokens of 18 leave 10, less than max_turn_tokens.
    assert engine.submitted["g/0/0"][1] == Sampling(10, 0.3, ("END", "\n"))
    (episode,) = play_with(unplayed("q1"), engine_of("xxxxxx", context_length=11))
    assert (len(episode.get_actions(0)), episode.custom_data["stop_reason"]) == (3, StopReason.OUT_OF_TOKENS)


def test_tool_output_joins_the_stream_and_the_next_prompt(play_with, engine_of, ids_of):
    engine = engine_of("look x\n", "xx\n")
    (episode,) = play_with(unplayed("q1"), engine, {"env": lambda: FakeEnv(num_turns=2)})
    first, tool = [0, *ids_of("ask q1:")], ids_of("[look x]")
    assert [o.tolist() for o in episode.get_observations()] == [first, tool, []]
    assert [a.tolist() for a in episode.get_actions()] == [ids_of("look x\n"), ids_of("xx\n")]
    assert list(episode.get_rewards()) == [1.0, 2.0]
    assert engine.submitted["g/0/1"][0] == first + ids_of("look x\n") + tool
    assert engine.submitted["g/0/1"][1].max_tokens == 50
    assert [role for role, _ in episode.custom_data["text"]] == ["environment", "policy"] * 2 + ["environment"]


def test_sampled_tokens_are_never_tokenised_again(play_with, tokenizer, ids_of):
    split = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "b")]
    assert ids_of("ab") == [tokenizer.convert_tokens_to_ids("ab")]  # the trap: another spelling of the same text
    engine = ScriptedEngine(tokenizer, lambda request_id, token_ids: split)
    (episode,) = play_with(unplayed("q1"), engine, {"env": lambda: FakeEnv(num_turns=2)})
    assert [a.tolist() for a in episode.get_actions()] == [split, split]
    assert engine.submitted["g/0/1"][0] == [0, *ids_of("ask q1:"), *split, *ids_of("[ab]")]
    assert episode.custom_data["text"][1] == ("policy", "ab")


def test_chat_turns_end_with_their_token_and_earlier_ids_stay(play_with):
    """The token is the template's, also where the model's own is another: the engine is told to end a turn with it."""
    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    tokenizer.eos_token = "<eos>"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = [*tokenizer("7", add_special_tokens=False)["input_ids"], end]
    engine = ScriptedEngine(tokenizer, lambda request_id, token_ids: answer)
    env = {"env": lambda: FakeEnv(num_turns=2)}
    (episode,) = play_with(unplayed("q1"), engine, env, transcript=ChatTranscript(tokenizer))
    stream = [t for pair in zip(episode.get_observations(), episode.get_actions()) for ids in pair for t in ids]
    user, assistant = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}"
    text = user.format("ask q1:") + assistant.format("7<|im_end|>\n")
    assert tokenizer.decode(stream) == text + user.format("[7]") + assistant.format("7<|im_end|>")
    assert [(sampling.end_ids, sampling.stop) for _, sampling in engine.submitted.values()] == [((end,), ())] * 2


@pytest.mark.parametrize(("texts", "num_turns", "limits", "reason", "rewards"), [
    (["x\n"], 3, {"max_turns": 3}, StopReason.TERMINATED, [1, 1, 1]),
    (["x\n"], 3, {"max_turns": 2}, StopReason.OUT_OF_TURNS, [1, 1]),
    (["xxx\n"], 1, {"max_turn_tokens": 2}, StopReason.OUT_OF_TOKENS, [2]),  # cut off, graded, over
    (["xxx\n", "x"], 2, {"max_turn_tokens": 2}, StopReason.TERMINATED, [2, 1]),  # cut off, but not at the end
    (["xxx\n"], 2, {"max_episode_tokens": 10}, StopReason.OUT_OF_TOKENS, [2]),  # 8 of prompt, room for 2
    # 8 of prompt, 2 of turn, 3 of "[x]": one more must fit for another turn.
    (["x\n"], 3, {"max_episode_tokens": 13}, StopReason.OUT_OF_TOKENS, [1]),
    (["x\n"], 3, {"max_episode_tokens": 14}, StopReason.OUT_OF_TOKENS, [1, 1]),
])  # fmt: skip
def test_each_limit_ends_an_episode_with_its_rewards(play_with, engine_of, texts, num_turns, limits, reason, rewards):
    (episode,) = play_with(unplayed("q1"), engine_of(*texts), {"env": lambda: FakeEnv(num_turns)}, limits)
    assert episode.custom_data["stop_reason"] is reason
    assert list(episode.get_rewards()) == rewards
    assert len(episode.get_observations(-1)) == 0
    assert episode.is_done
    assert episode.is_terminated == (sum(rewards) > 0 and len(rewards) == num_turns)
    assert sum(map(len, [*episode.get_observations(), *episode.get_actions()])) <= limits.get("max_episode_tokens", 500)


@pytest.mark.parametrize(("answer", "reason", "is_terminated"), [
    (("", 0.25, False, True, {}), StopReason.TRUNCATED, False),
    (("", 0.25, True, True, {}), StopReason.TERMINATED, True),
    (("", 0.25, True, False, {"stop_reason": "unparsable"}), StopReason.UNPARSABLE, True),
    (("", 0.25, False, True, {"stop_reason": StopReason.TOOL_TIMEOUT}), StopReason.TOOL_TIMEOUT, False),
    (("", 0.25, False, True, {"stop_reason": "env_timeout"}), StopReason.ENV_TIMEOUT, False),
])  # fmt: skip
def test_endings_the_environment_names(play_with, engine_of, answer, reason, is_terminated):
    (episode,) = play_with(unplayed("q1"), engine_of("x"), {"env": lambda: Answering(answer)})
    assert (episode.custom_data["stop_reason"], episode.get_return()) == (reason, 0.25)
    assert (episode.is_terminated, episode.is_truncated) == (is_terminated, not is_terminated)


def test_what_an_environment_says_of_the_end(play_with, engine_of):
    env = {"env": lambda: Answering(("", 0.0, False, True, {"stop_reason": "env_timeout"}))}
    (episode,) = play_with(unplayed("q1"), engine_of("xxxx"), env, {"max_turn_tokens": 2})
    assert episode.custom_data["stop_reason"] is StopReason.ENV_TIMEOUT
    env = {"env": lambda: Answering(("on", 0, False, False, {"stop_reason": "none yet"}))}
    (episode,) = play_with(unplayed("q1"), engine_of("x"), env, {"max_turns": 2})
    assert (len(episode), episode.custom_data["stop_reason"]) == (2, StopReason.OUT_OF_TURNS)


def test_versions_span_the_episode(play_with, engine_of):
    engine = engine_of("x\n")
    episodes = play_with(unplayed("q1", "q2"), engine, {"env": lambda: FakeEnv(num_turns=2)})

    def bump() -> None:
        engine.version += len(engine.submitted) == 3  # between the first turns and the last second one

    engine.script = lambda request_id, ids, write=engine.script: (bump(), write(request_id, ids))[1]
    versions = sorted(episode.custom_data["versions"] for episode in episodes)
    assert versions[0][0] == 7
    assert versions[-1] == (7, 8)


def test_history_and_seeds_reach_the_environment(play_with, engine_of):
    (episode,) = play_with(unplayed("q1", history=("one ", "two ")), engine_of("x"))
    assert episode.custom_data["text"][0] == ("environment", "one two ask q1:")

    class Foreign:
        def reset(self, *, seed=None, options=None):
            return f"seed {seed} options {options}", {}

        def step(self, action):
            return "", 1, True, False, {}

    live = [*unplayed("41", "word", "-1"), LiveEpisode(Prompt("env", "7", step="improve"), "h", 0)]
    episodes = list(play_with(live, engine_of("x"), {"env": Foreign}))
    by_prompt = {episode.custom_data["prompt"].prompt_id: episode.custom_data for episode in episodes}
    assert by_prompt["41"]["text"][0] == ("environment", "seed 41 options None")
    assert by_prompt["word"]["stop_reason"] is StopReason.ENV_CRASHED
    assert "prompt_id = 'word' with 0 turns of history; expected a seed" in by_prompt["word"]["error"]
    assert by_prompt["-1"]["stop_reason"] is StopReason.ENV_CRASHED
    assert "with 0 turns of history and step 'improve'; expected a seed" in by_prompt["7"]["error"]


def test_a_step_reaches_the_environment_only_when_there_is_one(play_with, engine_of):
    class Asked(FakeEnv):
        can_iterate = True

        def reset(self, *, seed=None, options=None):
            return str(sorted(options.items())), {}

    envs = {"env": Asked}
    prompt = Prompt("env", "q1", history=("x",), step="diverge")
    live = [LiveEpisode(prompt, "g", 0), LiveEpisode(replace(prompt, step=""), "h", 0)]
    said = {e.custom_data["group_id"]: e for e in play_with(live, engine_of("x"), envs)}
    known = "('history', ['x']), ('prompt_id', 'q1')"
    assert said["g"].custom_data["text"][0][1] == f"[{known}, ('step', 'diverge')]"
    assert said["h"].custom_data["text"][0][1] == f"[{known}]"
    assert said["g"].custom_data["prompt"].step == "diverge"
    assert said["g"].get_infos(0) == {"can_iterate": True}


def test_a_wrapped_environment_keeps_its_contract(play_with, engine_of):
    import gymnasium as gym

    engine = engine_of("x\n")
    (episode,) = play_with(unplayed("q1"), engine, {"env": lambda: gym.Wrapper(FakeEnv())})
    assert (episode.get_return(), engine.submitted["g/0/0"][1].stop) == (1.0, ("\n",))


def test_a_slow_environment_delays_nobody_else(play_with, engine_of, tokenizer):
    release = threading.Event()

    class Slow(FakeEnv):
        def step(self, action: str):
            if self.prompt_id == "slow":
                release.wait(60)
            return super().step(action)

    calls = EnvCalls(2, 60.0)
    engine = engine_of("x\n")
    episodes = play_with(unplayed("slow", "a", "b", "c"), engine, {"env": lambda: Slow(num_turns=3)}, calls=calls)
    first = [next(episodes) for _ in range(3)]
    assert sorted(e.custom_data["prompt"].prompt_id for e in first) == ["a", "b", "c"]
    num_turns = Counter(name.split("/")[1] for what, name in engine.log if what == "turn")
    assert num_turns == {"0": 1, "1": 3, "2": 3, "3": 3}
    release.set()
    (last,) = episodes
    assert (last.custom_data["prompt"].prompt_id, last.get_return()) == ("slow", 3.0)
    calls.close()


def test_a_finished_turn_is_answered_while_others_are_written(play_with, tokenizer, ids_of):
    def script(request_id: str, token_ids: list[int]) -> list[int]:
        return ids_of("y" * 300 if request_id.startswith("g/0") else "x\n")

    engine = ScriptedEngine(tokenizer, script, step_s=0.001)
    step = engine.step

    def patient_step():
        """Begin with the long turn, and end it last: only then are the steps the same on a busy machine."""
        num_ended = sum(what == "turn" for what, _ in engine.log)
        is_early = "g/0/0" not in engine.submitted or (engine.num_steps == 299 and num_ended < 6)
        return [] if is_early else step()

    engine.step = patient_step
    envs = {"env": lambda: FakeEnv(num_turns=3)}
    limits = {"max_turn_tokens": 300, "max_episode_tokens": 320}
    episodes = list(play_with(unplayed("long", "q1", "q2"), engine, envs, limits))
    assert [e.custom_data["index"] for e in episodes][-1] == 0
    turns = [name for what, name in engine.log if what == "turn"]
    assert turns[-1] == "g/0/0"
    assert sorted(turns[:-1]) == [f"g/{i}/{turn}" for i in (1, 2) for turn in (0, 1, 2)]
    assert engine.num_steps == 300 or engine.num_steps == 301  # the long turn never waited for an environment


def test_200_episodes_share_8_workers_and_no_instance(play_with, engine_of):
    before = set(threading.enumerate())
    calls = EnvCalls(8, 30.0)
    envs = {"env": lambda: FakeEnv(num_turns=3)}
    limits = {"max_concurrent": 16}
    for _ in range(2):  # the second play finds the instances of the first
        live = unplayed(*(f"q{i}" for i in range(200)))
        episodes = list(play_with(live, engine_of("x\n"), envs, limits, calls=calls))
        assert sorted(e.custom_data["index"] for e in episodes) == list(range(200))
        assert {(e.custom_data["stop_reason"], e.get_return()) for e in episodes} == {(StopReason.TERMINATED, 3.0)}
    assert len(FakeEnv.made) <= 16
    assert sum(env.num_resets for env in FakeEnv.made) == 400
    assert calls.pool.num_idle == len(FakeEnv.made)
    assert len(set(threading.enumerate()) - before) == 8
    calls.close()
    assert set(threading.enumerate()) <= before
    assert [env.num_closed for env in FakeEnv.made] == [1] * len(FakeEnv.made)


def test_unknown_environments_and_prompts_without_room_are_named(play_with, engine_of, calls):
    with pytest.raises(ValueError, match="env_id = 'mars'; expected one of 'env'"):
        play_with(unplayed("q1", env_id="mars"), engine_of("x"))
    engine = engine_of("x\n")
    episodes = [*unplayed("q1234"), *unplayed("q1", group_id="other")]
    played = play_with(episodes, engine, limits={"max_episode_tokens": 10})
    found = {one.custom_data["prompt"].prompt_id: one for one in played}
    assert found["q1"].custom_data["stop_reason"] is not StopReason.PROMPT_TOO_LONG
    long = found["q1234"].custom_data
    assert long["stop_reason"] is StopReason.PROMPT_TOO_LONG and long["stop_reason"].is_infrastructure
    assert long["error"] == (
        "prompt 'q1234' of environment 'env' has 11 tokens; expected 1 to 9, so that a turn fits "
        "max_episode_tokens = 10"
    )
    assert len(engine.submitted) == 1 and calls.num_open == 0


def test_an_environment_that_hears_turns_gets_their_tokens_and_version_first(play_with, engine_of, ids_of):
    heard = []

    class Hearing(FakeEnv):
        def hear_turn(self, token_ids, version):
            heard.append((list(token_ids), version))

        def step(self, text):
            heard.append(text)
            return super().step(text)

    list(play_with(unplayed("q1"), engine_of("x\n"), {"env": lambda: Hearing(num_turns=2)}))
    assert heard == [(ids_of("x\n"), 7), "x\n"] * 2


def test_answers_that_come_together_are_written_to_together(play_with, engine_of):
    class OneByOne(EnvCalls):
        """Hands out what has ended one call at a time, and nothing to who does not wait."""

        held: list = []

        def poll(self, timeout_s: float):
            while self.num_open:
                self.held += super().poll(timeout_s)
            return [self.held.pop(0)] if self.held and timeout_s > 0 else []

    calls = OneByOne(2, 30.0)
    engine = engine_of("x\n")
    assert len(list(play_with(unplayed(*"abcdef"), engine, calls=calls))) == 6
    assert [what for what, _ in engine.log] == ["submit"] * 6 + ["turn"] * 6
    calls.close()


def test_the_system_prompt_of_an_episode_reaches_the_chat(play_with):
    class Polite(FakeEnv):
        system_prompt = "Be polite."
        pass_reward = 2 / 3

    tokenizer = make_tokenizer(chat_template=CHATML, with_bos=False)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    engine = ScriptedEngine(tokenizer, lambda request_id, token_ids: [end])
    (episode,) = play_with(unplayed("q1"), engine, {"env": Polite}, transcript=ChatTranscript(tokenizer))
    text = tokenizer.decode(episode.get_observations(0).tolist())
    assert text.startswith("<|im_start|>system\nBe polite.<|im_end|>\n<|im_start|>user\nask q1:")
    assert episode.custom_data["text"][:2] == [("system", "Be polite."), ("environment", "ask q1:")]
    assert episode.custom_data["pass_reward"] == 2 / 3


BAD = [("system_prompt", 7), ("system_prompt", "\ud800"), ("pass_reward", "much"), ("stop_strings", "\n")]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_an_environment_says_of_an_episode_is_checked(play_with, engine_of, name, value):
    env = type("Bad", (FakeEnv,), {name: value})
    (episode,) = play_with(unplayed("q1"), engine_of("x"), {"env": env})
    assert episode.custom_data["stop_reason"] is StopReason.ENV_CRASHED and name in episode.custom_data["error"]


@pytest.mark.parametrize("is_reproducible", [True, False])
def test_the_clock_decides_nothing_where_an_engine_is_reproducible(play_with, engine_of, is_reproducible):
    delays = random.Random(1)

    class Late(FakeEnv):
        """Takes its time, another one in each call."""

        def reset(self, **kwargs: Any):
            time.sleep(delays.uniform(0, 0.02))
            return super().reset(**kwargs)

        def step(self, action: str):
            time.sleep(delays.uniform(0, 0.02))
            return super().step(action)

    happened, used, envs = [], EnvCalls(4, 30.0), {"env": lambda: Late(num_turns=2)}
    list(play_with(unplayed("a", "b"), engine_of("xy\n"), envs, calls=used))  # two instances are idle afterwards
    for calls in (used, EnvCalls(4, 30.0)):
        engine = engine_of("xy\n")
        engine.is_reproducible = is_reproducible
        episodes = list(play_with(unplayed(*"abcdef"), engine, envs, calls=calls))
        calls.close()
        happened.append((engine.log, engine.num_steps, [episode.custom_data["index"] for episode in episodes]))
    if is_reproducible:
        first = [*(("submit", f"g/{n}/0") for n in range(6)), *(("turn", f"g/{n}/0") for n in range(6))]
        assert happened[0] == happened[1] and happened[0][0][:12] == first and happened[0][1:] == (6, [*range(6)])
    else:
        assert happened[0] != happened[1]


def test_a_reproducible_engine_waits_for_a_hanging_environment_no_longer_than_its_timeout(play_with, engine_of):
    engine = engine_of("x\n")
    engine.is_reproducible = True
    calls, start = EnvCalls(2, 3.0), time.monotonic()
    episodes = list(play_with(unplayed("q1", "sleep-step", "q2"), engine, calls=calls))
    reasons = {e.custom_data["index"]: e.custom_data["stop_reason"] for e in episodes}
    assert reasons == {0: StopReason.TERMINATED, 1: StopReason.ENV_TIMEOUT, 2: StopReason.TERMINATED}
    assert time.monotonic() - start < 40
    calls.close()
