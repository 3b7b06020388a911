"""SelfLabel: majorities by hand and against a naive twin, what training and evaluation see, and groups that fail."""

import time
from collections import Counter
from collections.abc import Iterator

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.common.environments import resolve
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.engine.protocol import Sampling
from rllib_srl.envs.wrappers.self_label import SelfLabel, agreement, plain_vote
from rllib_srl.rollout.env_calls import EnvCalls, settle
from rllib_srl.rollout.episodes import LiveEpisode, to_group
from rllib_srl.rollout.player import Limits
from rllib_srl.rollout.transcript import RawTranscript
from rllib_srl.types import Prompt, StopReason
from tests.rollout.fakes import FakeEnv, ScriptedEngine, make_tokenizer, play
from tests.small_envs import small_config, watch

COMPARE = "rllib_srl.envs.math.compare:Compare"
PROMPT_ID = "17, 93, 40"


def make(**changes):
    return SelfLabel({"env": COMPARE, "env_config": {"num_shots": 0}, **changes})


@pytest.mark.parametrize(("votes", "least", "ties", "expected"), [
    ("babaa.", 3, "none", [0, 1, 0, 1, 1, 0]), ("abab", 2, "none", [0, 0, 0, 0]),  # a tie
    ("abcd", 1, "first", [1, 0, 0, 0]), ("baba", 2, "first", [1, 0, 1, 0]),
    ("a...", 2, "none", [0, 0, 0, 0]),  # one vote is no majority
    ("....", 1, "first", [0, 0, 0, 0]), ("", 1, "none", []),  # nothing can be read
])  # fmt: skip
def test_majorities_by_hand(votes, least, ties, expected):
    given_votes = [None if vote == "." else vote for vote in votes]
    assert agreement(given_votes, str.__eq__, least, ties) == expected


@given(st.lists(st.sampled_from(["a", "b", "c", None]), max_size=9), st.integers(1, 4))
def test_a_count_says_the_same(votes, least):
    counts = Counter(vote for vote in votes if vote is not None).most_common()
    best = [vote for vote, count in counts if count == counts[0][1] and count >= least]
    assert agreement(votes, str.__eq__, least, "none") == [float([vote] == best) for vote in votes]


def test_a_group_is_settled_by_what_the_inner_env_reads(tmp_path):
    env = make()
    turns = [[" 40\n"], [" 40.\n"], [" 93\n"], ["hm\n"], []]
    assert env.settle_group(PROMPT_ID, turns) == [1.0, 1.0, 0.0, 0.0, 0.0]  # 93 is right, and has no say
    path = tmp_path / "q.jsonl"
    path.write_text('{"problem": "Expand (x+1)^2.", "answer": "x^2+2x+1"}\n')
    config = {"path": str(path), "num_shots": 0, "deadline_s": 20.0}
    env = SelfLabel({"env": "rllib_srl.envs.math.question_file:QuestionFile", "env_config": config})
    (prompt_id,) = [i for split in ("train", "heldout") for i in env.prompt_ids(split, 0)]
    turns = [[r" \boxed{x+1}"], [" 1+x"], [" x^2+2x+1"], [""]]
    assert env.settle_group(prompt_id, turns) == [1.0, 1.0, 0.0, 0.0]


def test_envs_without_votes_compare_the_text_after_the_last_answer():
    assert plain_vote([" North \nmore"], ("\n",)) == "north"
    assert plain_vote(["move", "I think. Answer:  go  North."], ("\n",)) == "go north"
    assert plain_vote(["\n"], ("\n",)) is None
    assert plain_vote([], ("\n",)) is None
    nested = SelfLabel({"env": "self_iteration", "env_config": {"env": COMPARE}})
    assert nested.settle_group(PROMPT_ID, [["By size. Answer: 93\n"], [" 93\n"], [" 17\n"]]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("outer", ["self_label", "self_iteration"])
def test_the_domains_of_an_environment_reach_through_its_wrappers(outer):
    config = {"env": "recall", "env_config": {"num_facts": 20, "num_stages": 2}}
    source = PromptSource({"w": resolve(outer)}, {"w": config}, {"w": 1.0}, seed=0)
    assert {prompt.domain for prompt in source.draw(30)} == {"stage_0", "stage_1"}


class Letters(FakeEnv):
    """Two turns; the environment itself pays 5 a turn; groups are paid for the number of letters of each episode."""

    asked: list = []
    mischief = ""

    def step(self, action):
        observation, _, is_over, *rest = super().step(action)
        return observation, 5.0, is_over, *rest

    def settle_group(self, prompt_id, turns):
        Letters.asked.append((prompt_id, turns))
        if prompt_id in ("hangs", "raises", "short"):
            self.failed = prompt_id
        if prompt_id == "hangs":
            time.sleep(60)
        if prompt_id == "raises":
            raise RuntimeError("no majority today")
        if prompt_id == "short":
            return [1.0]
        return [float(len("".join(one).replace("\n", ""))) for one in turns]


@pytest.fixture(name="played")
def _played():
    """Return what plays prompts twice each and settles them; group id -> episodes."""
    tokenizer, made = make_tokenizer(), []

    def played(prompt_ids, envs=None, timeout_s=60.0):
        made.append(calls := EnvCalls(4, timeout_s))
        FakeEnv.made.clear()
        Letters.asked.clear()
        envs = envs or {"env": lambda: Letters(num_turns=2)}

        def written(request_id, token_ids):
            said = "x\n" if "/0/" in request_id else "xyz\n"
            return tokenizer(said, add_special_tokens=False)["input_ids"]

        live = [LiveEpisode(Prompt("env", i), f"g-{i}", n) for i in prompt_ids for n in (0, 1)]
        episodes = list(
            play(
                live, engine=ScriptedEngine(tokenizer, written), envs=envs,
                transcript=RawTranscript(tokenizer), sampling=Sampling(max_tokens=1),
                limits=Limits(max_turns=4, max_turn_tokens=50, max_episode_tokens=500), calls=calls, deadline_s=60.0,
            )
        )  # fmt: skip
        settle(episodes[::-1], envs=envs, calls=calls, deadline_s=40.0)
        groups: dict = {}
        for episode in episodes:
            groups.setdefault(episode.custom_data["group_id"], []).append(episode)
        return groups

    played.calls = made
    yield played
    for calls in made:
        calls.close(1.0)


def test_a_settled_reward_stands_in_place_of_the_envs(played):
    groups = played(["q1", "q2"])
    for prompt_id in ("q1", "q2"):
        group = to_group(Prompt("env", prompt_id), f"g-{prompt_id}", groups[f"g-{prompt_id}"])
        assert group is not None
        assert group.rewards_G.tolist() == [2.0, 6.0]  # letters of both turns, and no 5
    assert [list(e.get_rewards()) for e in sorted(groups["g-q1"], key=lambda e: e.id_)] == [[0.0, 2.0], [0.0, 6.0]]
    assert sorted(Letters.asked) == [(i, [["x\n", "x\n"], ["xyz\n", "xyz\n"]]) for i in ("q1", "q2")]


def test_only_valid_episodes_vote(played):
    class Crashing(Letters):
        def step(self, action):
            if action.startswith("xyz"):
                raise RuntimeError("infrastructure")
            return super().step(action)

    groups = played(["q1"], {"env": lambda: Crashing(num_turns=2)})
    assert Letters.asked == [("q1", [["x\n", "x\n"]])]
    reasons = {e.custom_data["index"]: e.custom_data["stop_reason"] for e in groups["g-q1"]}
    assert reasons == {0: StopReason.TERMINATED, 1: StopReason.ENV_CRASHED}


@pytest.mark.slow
def test_a_group_that_cannot_be_settled_is_lost_and_the_others_are_not(played):
    groups = played(["raises", "short", "hangs", "q1"], timeout_s=5.0)
    told = {
        group: {(e.custom_data["stop_reason"], e.custom_data["error"]) for e in episodes}
        for group, episodes in groups.items()
    }
    where = "environment 'env', prompt '{}', settle_group: "
    assert told["g-raises"] == {(StopReason.ENV_CRASHED, where.format("raises") + "RuntimeError: no majority today")}
    ((reason, error),) = told["g-short"]
    assert reason is StopReason.ENV_CRASHED and "returned rewards of shape (1,); expected 2 finite numbers" in error
    ((reason, error),) = told["g-hangs"]
    assert reason is StopReason.ENV_TIMEOUT and "did not return within 5 s" in error
    assert sorted(e.get_return() for e in groups["g-q1"]) == [2.0, 6.0]
    assert to_group(Prompt("env", "raises"), "g-raises", groups["g-raises"]) is None
    # Nobody plays in an instance that failed, or that a thread may still be inside of.
    idle = [instance.env for instance in played.calls[0].pool.drain()]
    assert idle and not {env.failed for env in idle if hasattr(env, "failed")}


class Parity(gym.Env):
    """Votes with whether the answer has an even first character, and pays 0.5 for anything."""

    domain = "parity"

    def __init__(self, env_config=None):
        pass

    def prompt_ids(self, split: str, seed: int) -> Iterator[str]:
        return (f"{split} {number}" for number in range(30))

    def reset(self, *, seed=None, options=None):
        return f"{options['prompt_id'] if options else 'train 0'}: ", {}

    def step(self, action):
        return "", 0.5, True, False, {}

    def vote(self, prompt_id, turns):
        return str(ord(turns[-1][0]) % 2) if turns and turns[-1] else None


@pytest.mark.slow
def test_training_sees_the_majority_and_evaluation_the_gold(tmp_path, random_llama_dir, build):
    config = small_config(random_llama_dir, tmp_path)
    config.environment("rllib_srl.envs.wrappers.self_label:SelfLabel", env_config={"env": f"{__name__}:Parity"})
    returns = []
    config.callbacks(on_episode_end=lambda *, episode, **kwargs: returns.append(float(episode.get_return())))
    algo = build(config)
    seen = watch(algo)
    algo.train()
    groups = [group for batch in seen for group in batch.groups]
    assert len(groups) == 4
    paid = [group.rewards_G.tolist() for group in groups]
    # Two answers and four votes: 4 or 3 agree, or it is a tie and nobody is paid; less where a turn is empty.
    assert all(set(rewards) <= {0.0, 1.0} and sum(rewards) != 1 for rewards in paid)
    assert any(sum(rewards) >= 2 for rewards in paid)
    assert sorted(returns) == sorted(reward for rewards in paid for reward in rewards)
    assert algo.evaluate()["env_runners"]["episode_return_mean"] == 0.5
