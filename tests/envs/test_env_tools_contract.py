"""What installed worlds with tools have beyond the contract of test_envs.py: votes, settings, second tries."""

from __future__ import annotations

from itertools import islice

import pytest

from rllib_srl.envs.functions.bfcl import Bfcl
from rllib_srl.envs.functions.function_call import FunctionCall
from rllib_srl.envs.shop.retail import Retail
from tests.envs import world_table

WITH_TOOLS = ("bfcl", "function_call", "retail", "retrieval", "word_problem_tool")
CASES = {name: case for name, case in world_table.cases().items() if name.split()[0] in WITH_TOOLS}


@pytest.mark.parametrize("name", CASES)
def test_episodes_vote_with_what_they_come_to(name):
    path, row = CASES[name]
    if absent := world_table.missing(row):
        pytest.skip(f"{', '.join(absent)} not installed")
    world, twin = (world_table.made(path, row, feedback_turns=0) for _ in range(2))
    prompt_id, another = islice(world.prompt_ids("train", 0), 2)
    turns = world.gold_turns(prompt_id)
    vote = world.vote(prompt_id, turns)
    assert vote is not None and vote == twin.vote(prompt_id, turns)
    assert world.vote(prompt_id, [""]) is None
    assert world.vote(prompt_id, world.gold_turns(another)) != vote or not vote


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
