"""Agents on a real engine: what is recorded is what the engine sampled, and how episodes of agents end."""

import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rllib_srl.engine import make_engine
from rllib_srl.engine.model_dir import load_tokenizer
from rllib_srl.engine.models import local_model
from rllib_srl.engine.protocol import Sampling
from rllib_srl.envs.agents.agent import Agent
from rllib_srl.rollout.env_calls import EnvCalls
from rllib_srl.rollout.episodes import LiveEpisode, to_group
from rllib_srl.rollout.transcript import RawTranscript
from rllib_srl.types import Prompt, StopReason

openai = pytest.importorskip("openai")  # vLLM brings it, or the extra `agents`

SHOTS = "Question: Which is largest: 17, 40 or 93?\nAnswer: 93\n\nQuestion: Which is largest: 71, 50 or 12?\nAnswer:"
HOW: dict[str, Any] = {"model": "m", "stop": ["\n"]}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talk(client: Any, task: dict[str, Any]) -> float:
    """Hold four conversations: a continued one, another between, a fork, and one that changes what was said."""
    first = [user(f"{task['seed']} {SHOTS}")]
    answer = client.chat.completions.create(messages=first, **HOW).choices[0].message
    client.chat.completions.create(messages=[user(SHOTS)], max_tokens=3, **HOW)
    earlier = [*first, answer.model_dump()]
    chunks = client.chat.completions.create(messages=[*earlier, user("Question: 1 or 2?\nAnswer:")], stream=True, **HOW)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    client.chat.completions.create(messages=[*earlier, user("Question: 3 or 2?\nAnswer:")], **HOW)
    changed = [*first, {"role": "assistant", "content": f"not {answer.content}"}, user("\nAnswer:")]
    client.chat.completions.create(messages=changed, **HOW)
    return min(1.0, len(said) / 10)


def endless(client: Any, task: dict[str, Any]) -> float:
    while True:
        client.chat.completions.create(messages=[user(SHOTS)], **HOW)


def deaf(client: Any, task: dict[str, Any]) -> float:
    while True:
        try:
            client.chat.completions.create(messages=[user(SHOTS)], **HOW)
        except openai.BadRequestError:
            continue


def graceful(client: Any, task: dict[str, Any]) -> float:
    try:
        return endless(client, task)
    except openai.BadRequestError as error:
        return 0.5 * (error.code == "out_of_calls")


def growing(client: Any, task: dict[str, Any]) -> float:
    messages, again = [user(SHOTS)], user("\nQuestion: Which is largest: 17, 40 or 93?\nAnswer:")
    for _ in range(40):
        answer = client.chat.completions.create(messages=messages, **HOW).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, again]
    return 1.0


def too_long(client: Any, task: dict[str, Any]) -> float:
    client.chat.completions.create(messages=[user(SHOTS * 20)], **HOW)
    return 1.0


def rewriting(client: Any, task: dict[str, Any]) -> float:
    client.chat.completions.create(messages=[user(SHOTS)], **HOW)
    changed = [user(SHOTS), {"role": "assistant", "content": "something else"}, user("\nAnswer:")]
    client.chat.completions.create(messages=changed, **HOW)
    return 1.0


def hanging(client: Any, task: dict[str, Any]) -> float:
    client.chat.completions.create(messages=[user(SHOTS)], **HOW)
    time.sleep(60)
    return 1.0


def hasty(client: Any, task: dict[str, Any]) -> float:
    """Leave one call before it is answered, and make another."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.1).chat.completions.create(messages=[user(SHOTS)], **HOW)
    client.chat.completions.create(messages=[user(SHOTS)], **HOW)
    return 1.0


class Spied:
    """An engine that keeps what it was given and what it sampled."""

    def __init__(self, engine: Any, step_s: float = 0.0):
        self.engine, self.prompts, self.turns, self.step_s = engine, {}, {}, step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request_id: str, token_ids: list[int], sampling: Sampling) -> None:
        self.prompts[request_id] = list(token_ids)
        self.engine.submit(request_id, token_ids, sampling)

    def step(self) -> list[Any]:
        time.sleep(self.step_s)
        turns = self.engine.step()
        self.turns.update({turn.request_id: turn for turn in turns})
        return turns


BOTH = ["transformers", pytest.param("vllm", marks=pytest.mark.engine)]


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind = getattr(request, "param", "transformers")
    settings = {"kv_cache_gib": 0.125, "num_threads": 1} if kind == "vllm" else {}
    made = make_engine(kind, local_model("tiny"), context_length=256, dtype="float32", seed=1, **settings)
    yield made
    made.close()


@pytest.fixture
def play(play_with: Any, engine: Any) -> Any:
    """Return a function that plays episodes of an agent of this file; it returns them and the engine."""
    calls = EnvCalls(8, 60.0)
    transcript = RawTranscript(load_tokenizer(local_model("tiny")))

    def run(function: Any, num: int = 1, deadline_s: float = 120.0, limits: Any = None, step_s=0.0, **settings) -> Any:
        spied = Spied(engine, step_s)
        calls.timeout_s = settings.pop("timeout_s", 60.0)
        episodes = play_with(
            [LiveEpisode(Prompt("agent", "4"), "g", index) for index in range(num)], spied,
            {"agent": partial(Agent, {"agent": f"{__name__}:{function.__name__}", **settings})},
            {"max_turns": 6, "max_turn_tokens": 8, "max_episode_tokens": 256, **(limits or {})}, calls=calls,
            deadline_s=deadline_s, transcript=transcript, sampling=Sampling(max_tokens=1, temperature=1.0),
        )  # fmt: skip
        return sorted(episodes, key=lambda episode: episode.custom_data["index"]), spied

    yield run
    calls.close(1.0)


pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("engine", BOTH, indirect=True)
def test_what_is_recorded_is_what_was_sampled(play: Any) -> None:
    episodes, spied = play(talk, num=6)
    group = to_group(Prompt("agent", "4"), "g", episodes)
    assert group is not None and group.size == 6
    group.check_valid()
    sampled = defaultdict(list)
    for request_id, turn in spied.turns.items():
        sampled[int(request_id.split("/")[1])].append((request_id, turn))
    for g, episode in enumerate(episodes):
        assert episode.custom_data["stop_reason"] is StopReason.TERMINATED
        info = episode.get_infos(-1)
        counts = {name: info[f"agent/num_{name}"] for name in ("calls", "conversations", "rewritten", "refused")}
        assert counts == {"calls": 5, "conversations": 4, "rewritten": 2, "refused": 0}
        turns = dict(zip((0, 2, 1, 3, 4), episode.get_actions(), strict=True))  # the continued conversation comes first
        logps = dict(zip((0, 2, 1, 3, 4), episode.get_extra_model_outputs("action_logp"), strict=True))
        cuts = [*group.starts(g), int(group.lengths_G()[g])]
        streams = [group.stream(g)[a:b].tolist() for a, b in pairwise(cuts)]
        assert len(sampled[g]) == 5 and len(streams) == 4
        for request_id, turn in sampled[g]:
            n = int(request_id.split("/")[2])
            assert turns[n].tolist() == turn.token_ids.tolist() and logps[n].tolist() == turn.logp.tolist()
            whole = spied.prompts[request_id] + turn.token_ids.tolist()
            assert whole in [stream[: len(whole)] for stream in streams]
        assert len(turns[1]) <= 3
        mask = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
        assert mask.sum() == sum(map(len, turns.values()))
        logp = group.behaviour_logp_N[group.offsets[g] : group.offsets[g + 1]]
        for stream, (a, b) in zip(streams, pairwise(cuts), strict=True):  # each by itself, as the learner sees it
            scored = np.concatenate([[0], spied.score([stream])[0]])
            np.testing.assert_allclose(logp[a:b][mask[a:b]], scored[mask[a:b]], atol=2e-3)


@pytest.mark.parametrize(("function", "settings", "reason", "num_turns", "reward", "error"), [
    (endless, {}, StopReason.OUT_OF_TURNS, 6, 0, "the episode has used 6 calls (max_turns)"),
    (deaf, {}, StopReason.OUT_OF_TURNS, 6, 0, "more than 8 calls were refused"),
    (graceful, {}, StopReason.TERMINATED, 6, 0.5, ""),
    (growing, {"max_turns": 60}, StopReason.OUT_OF_TOKENS, None, 0, "so that a turn fits max_episode_tokens = 256"),
    (too_long, {}, StopReason.ENV_CRASHED, 0, 0, "expected 1 to 255"),
    (rewriting, {"history": "refuse"}, StopReason.ENV_CRASHED, 1, 0, "change an earlier part"),
    (hanging, {"timeout_s": 3.0}, StopReason.ENV_TIMEOUT, 0, 0, "env_timeout_s"),
])  # fmt: skip
def test_how_episodes_end(play, function, settings, reason, num_turns, reward, error):
    limits = {name: settings[name] for name in settings if name == "max_turns"}
    given = {name: value for name, value in settings.items() if name not in limits}
    (episode,), _ = play(function, limits=limits, **given)
    assert episode.custom_data["stop_reason"] is reason, episode.custom_data["error"]
    assert error in episode.custom_data["error"] and bool(error) == bool(episode.custom_data["error"])
    assert len(episode) == num_turns if num_turns is not None else len(episode) >= 2
    assert episode.get_return() == reward
    group = to_group(Prompt("agent", "4"), "g", [episode], at_least=1)
    assert (group is None) == reason.is_infrastructure


def test_a_call_that_its_agent_has_left_is_not_trained_on(play):
    (episode,), spied = play(hasty, step_s=0.3)
    assert episode.custom_data["stop_reason"] is StopReason.TERMINATED and len(episode) == 1
    assert episode.get_infos(-1)["agent/num_unheard"] == len(spied.turns) - 1


def test_the_deadline_ends_agents_wherever_they_are(play):
    start = time.monotonic()
    episodes, _ = play(hanging, num=3, deadline_s=1.0)
    assert time.monotonic() - start < 50  # their calls time out, and return, after 60 s
    assert {episode.custom_data["stop_reason"] for episode in episodes} == {StopReason.ABORTED}
