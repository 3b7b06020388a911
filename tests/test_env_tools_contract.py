"""One contract for the worlds with tools: seeds, splits, gold turns, hostile turns, histories, nothing shared."""

from __future__ import annotations

import importlib.util
import random
import time
from itertools import islice

import gymnasium
import pytest
from gymnasium.error import ResetNeeded

from envs import text
from envs.bfcl import Bfcl
from envs.function_call import FunctionCall
from envs.retail import Retail
from envs.retrieval import Retrieval

WORLDS = {
    "function_call": (FunctionCall, {}),
    "function_call, two calls with feedback": (FunctionCall, {"num_calls": 2, "feedback_turns": 1}),
    "function_call, no call": (FunctionCall, {"num_calls": 0, "call_format": "json"}),
    "function_call of BFCL": (FunctionCall, {"bfcl": "parallel", "num_shots": 0, "call_format": "python"}),
    "retrieval": (Retrieval, {}),
    "retrieval, one hop in lines": (Retrieval, {"num_hops": 1, "call_format": "line", "feedback_turns": 1}),
    "bfcl": (Bfcl, {}),
    "bfcl with missing functions": (Bfcl, {"category": "miss_func", "call_format": "xml"}),
    "retail": (Retail, {}),
}
NEEDS = {"function_call of BFCL": "bfcl_eval", "bfcl": "bfcl_eval", "retail": "inspect_evals"}
NEEDS["bfcl with missing functions"] = "bfcl_eval"
MOST_TURNS = 300

MALFORMED = [
    "\x00",
    "\ud800",
    "🦊" * 50,
    "1" * 100_000,
    "٣",
    "nan",
    "__import__('os').getcwd()",
    "(" * 5000,
    "[" * 5000,
    "{'a': 1}",
    "\r",
    "a" * 10**7,
    "Tool: f(" + "9" * 10**6,
    "Tool: f(__import__('os').system('true'))",
    "[f(lambda: 0)]",
    "<search>" + "a" * 10**6 + "</search>",
    "<tool_call>{" * 1000,
    '{"name": "f", "arguments": {"a": NaN}}',
    "Tool: __class__()",
    "[__init__()]",
]


@pytest.fixture(params=WORLDS, name="make")
def _make(request):
    """Return a function that makes the world, with settings changed as asked."""
    package = NEEDS.get(request.param)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    world_class, env_config = WORLDS[request.param]
    return lambda **changes: world_class({**env_config, **changes})


def first_ids(world, split="train", seed=0, count=30):
    return list(islice(world.prompt_ids(split, seed), count))


def played(world, prompt_id, turns, **options):
    """Return the last step of an episode of `turns`, and all rewards."""
    world.reset(options={"prompt_id": prompt_id, **options})
    rewards = []
    for turn in turns:
        step = world.step(turn)
        rewards.append(step[1])
        if step[2] or step[3]:
            break
    return step, rewards


def test_it_is_a_gymnasium_environment_of_text(make):
    world = make()
    assert isinstance(world, gymnasium.Env)
    observation, info = world.reset(seed=1)
    assert observation in world.observation_space and observation.endswith("\n")
    assert isinstance(info["prompt_id"], str) and isinstance(world.domain, str)
    assert isinstance(world.stop_strings, tuple)


def test_a_seed_decides_the_question_and_no_more(make):
    world = make()
    drawn = [world.reset(seed=seed)[0] for seed in (5, 6, 5)]
    assert drawn[0] == drawn[2] == make().reset(seed=5)[0] != drawn[1]
    assert all(world.split_of(world.reset(seed=seed)[1]["prompt_id"]) == "train" for seed in range(10))


def test_prompt_ids_are_each_question_once_in_an_order_of_their_seed(make):
    world = make()
    ids = first_ids(world, seed=3, count=300)
    assert ids == first_ids(make(), seed=3, count=300) != first_ids(world, seed=4, count=300)
    assert len({world.question(prompt_id).text for prompt_id in ids}) == len(ids)


def test_the_splits_share_no_question_whatever_the_seeds(make):
    world = make()
    train, heldout = (
        {world.question(i).text for seed in (0, 1) for i in first_ids(world, split, seed, 500)} for split in text.SPLITS
    )
    assert train and heldout and not train & heldout


def test_the_gold_turns_earn_one_in_both_splits(make):
    world = make()
    for prompt_id in first_ids(world, "train", count=15) + first_ids(world, "heldout", count=15):
        turns = world.gold_turns(prompt_id)
        (observation, *_, terminated, truncated, info), rewards = played(world, prompt_id, turns)
        assert (observation, terminated, truncated, info) == ("", True, False, {})
        assert rewards == [0.0] * (len(turns) - 1) + [1.0]


def test_an_empty_answer_earns_nothing(make):
    world = make(feedback_turns=0)
    for turn in ("", " ", "\n\n"):
        (_, _, terminated, _, info), rewards = played(world, first_ids(world)[0], [turn] * MOST_TURNS)
        assert (terminated, sum(rewards), info) == (True, 0.0, {"stop_reason": "unparsable"})


def test_a_malformed_turn_is_rewarded_and_never_crashes_or_stalls(make):
    world = make(feedback_turns=0)
    prompt_id = first_ids(world)[0]
    for turn in MALFORMED:
        start = time.monotonic()
        (observation, *_, terminated, truncated, _), rewards = played(world, prompt_id, [turn + "\n"] * MOST_TURNS)
        assert terminated or truncated, ascii(turn[:20])
        assert observation.encode() is not None and all(0 <= reward <= 1 for reward in rewards)
        assert time.monotonic() - start < 20, ascii(turn[:20])


def test_a_history_is_replayed_tools_included(make):
    world, other = make(), make()
    for prompt_id in first_ids(world, count=8):
        turns = world.gold_turns(prompt_id)
        if len(turns) > 1:
            transcript, _ = world.reset(options={"prompt_id": prompt_id})
            transcript += turns[0] + world.step(turns[0])[0]
            replayed, _ = other.reset(options={"prompt_id": prompt_id, "history": turns[:1]})
            assert replayed == transcript
            assert [other.step(turn)[1] for turn in turns[1:]][-1] == 1.0
        with pytest.raises(ValueError, match="ends the episode of prompt"):
            other.reset(options={"prompt_id": prompt_id, "history": turns})


def test_parallel_instances_share_nothing(make):
    one, other = make(), make()
    ids = first_ids(one, count=2)
    one.reset(options={"prompt_id": ids[0]})
    other.reset(options={"prompt_id": ids[1]})
    turns = [one.gold_turns(ids[0]), one.gold_turns(ids[1])]
    rewards: list[list[float]] = [[], []]
    for number in range(max(map(len, turns))):  # in turns
        for world, mine, seen in zip((one, other), turns, rewards, strict=True):
            if number < len(mine):
                seen.append(world.step(mine[number])[1])
    assert [seen[-1] for seen in rewards] == [1.0, 1.0]


def test_stepping_out_of_turn_is_refused(make):
    world = make()
    with pytest.raises(ResetNeeded):
        world.step("x")
    prompt_id = first_ids(world)[0]
    played(world, prompt_id, world.gold_turns(prompt_id))
    with pytest.raises(ResetNeeded):
        world.step("x")
    world.reset(seed=0)
    with pytest.raises(TypeError, match="a turn is a int; expected text"):
        world.step(7)


@pytest.mark.parametrize("prompt_id", ["", "no such prompt", "{}", "[]", "1, 1", "99999999", 7])
def test_an_unknown_prompt_is_refused(make, prompt_id):
    with pytest.raises(ValueError, match="prompt_id = .*; expected"):
        make().reset(options={"prompt_id": prompt_id})


def test_playing_draws_nothing_from_the_global_generator(make):
    random.seed(1)
    before = random.getstate()
    world = make()
    world.reset(seed=0)
    world.step("x\n")
    first_ids(world)
    assert random.getstate() == before


def test_episodes_vote_with_what_they_come_to(make):
    world = make(feedback_turns=0)
    prompt_id = first_ids(world)[0]
    turns = world.gold_turns(prompt_id)
    vote = world.vote(prompt_id, turns)
    assert vote is not None and vote == make(feedback_turns=0).vote(prompt_id, turns)
    assert world.vote(prompt_id, [""]) is None
    other = world.gold_turns(first_ids(world)[1])
    assert world.vote(prompt_id, other) != vote or not vote


def test_a_setting_that_a_world_has_no_use_for_is_refused():
    with pytest.raises(ValueError) as caught:
        Retail({"feedback_turns": 1, "num_shots": 2, "call_format": "tags"})
    for part in ("feedback_turns = 1; expected 0", "num_shots = 2; expected 0", "call_format = 'tags'"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="forgiven_turns = 1; expected 0"):
        Bfcl({"forgiven_turns": 1})


def test_a_wrong_call_may_be_tried_again():
    world = FunctionCall({"feedback_turns": 1})
    _, info = world.reset(seed=0)
    assert world.step("Answer: none\n")[:3] == ("Wrong. Try again.\n", 0.0, False)
    assert world.step(world.gold_turns(info["prompt_id"])[0])[1] == world.settings.retry_reward
    assert world.reset(seed=0)[0].count("Answer: none\nWrong. Try again.\nTool: ") == 2
