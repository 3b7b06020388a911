"""What worlds of one question do beyond the contract of tests/envs/test_envs.py: shots, feedback, tries, counts."""

from __future__ import annotations

import pytest

from rllib_srl.envs import text
from rllib_srl.envs.games.copy_words import CopyWords
from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.reasoning_gym_env import ChainSum, Products, ReasoningGym
from rllib_srl.envs.tools.word_problem import WordProblem
from tests.envs.world_play import first_ids

WORLDS = {
    "compare": (Compare, {}),
    "lookup": (Lookup, {"num_shots": 0}),
    "reasoning_gym": (ReasoningGym, {"dataset": "spell_backward", "pool_size": 300, "level": 0}),
}


@pytest.fixture(params=WORLDS, name="make")
def _make(request):
    world_class, env_config = WORLDS[request.param]
    return lambda **changes: world_class({**env_config, **changes})


def play(world, turns, **options):
    """Return observations, rewards and the last info of an episode of `turns`."""
    observation, _ = world.reset(options=options)
    observations, rewards, info = [observation], [], {}
    for turn in turns:
        observation, reward, terminated, truncated, info = world.step(turn)
        observations.append(observation)
        rewards.append(reward)
        assert not truncated
    return observations, rewards, terminated, info


def test_a_wrong_answer_earns_nothing_and_an_empty_one_is_unparsable(make):
    world = make(feedback_turns=0)
    for prompt_id in first_ids(world):
        _, rewards, terminated, info = play(world, [f" {world.question(prompt_id).wrong}\n"], prompt_id=prompt_id)
        assert (rewards, terminated, info.get("stop_reason")) == ([0.0], True, None)
    for turn in ("", " ", "\n", "\n\n 7", "   \n7\n"):
        _, rewards, terminated, info = play(world, [turn], prompt_id=prompt_id)
        assert (rewards, terminated, info) == ([0.0], True, {"stop_reason": "unparsable"}), turn


def test_what_follows_the_newline_does_not_count(make):
    world = make()
    prompt_id = first_ids(world)[0]
    (gold,) = world.gold_turns(prompt_id)
    assert play(world, [gold + "Question: more\nAnswer: 0"], prompt_id=prompt_id)[1] == [1.0]
    assert play(world, [gold.strip()], prompt_id=prompt_id)[1] == [1.0]


def test_feedback_gives_further_tries_for_part_of_the_reward(make):
    world = make(feedback_turns=2, retry_reward=0.25)
    prompt_id = first_ids(world)[0]
    wrong, (gold,) = f" {world.question(prompt_id).wrong}\n", world.gold_turns(prompt_id)
    assert play(world, [gold], prompt_id=prompt_id)[1] == [1.0]
    again = "Wrong. Try again.\nAnswer:"
    observations, rewards, terminated, info = play(world, [wrong, wrong, gold], prompt_id=prompt_id)
    assert observations[1:] == [again, again, ""]
    assert (rewards, terminated, info) == ([0.0, 0.0, 0.25], True, {})
    _, rewards, terminated, info = play(world, [wrong, "", wrong], prompt_id=prompt_id)
    assert (rewards, terminated, info) == ([0.0, 0.0, 0.0], True, {})
    *_, info = play(world, [wrong, wrong, ""], prompt_id=prompt_id)
    assert info == {"stop_reason": "unparsable"}
    observations, *_ = play(world, ["0 and no newline"], prompt_id=prompt_id)
    assert observations[1] == "\n" + again  # feedback starts on a line of its own


def test_the_shots_show_feedback_where_there_is_some(make):
    for feedback_turns in (0, 1):
        prompt, _ = make(feedback_turns=feedback_turns, num_shots=4).reset(seed=0)
        assert prompt.count("Question: ") == 5
        assert prompt.count("Wrong. Try again.\nAnswer:") == 2 * feedback_turns
        assert "\n\n\n" not in prompt


def test_replayed_tries_count(make):
    world = make(feedback_turns=2)
    prompt_id = first_ids(world)[0]
    wrong, (gold,) = f" {world.question(prompt_id).wrong}\n", world.gold_turns(prompt_id)
    world.reset(options={"prompt_id": prompt_id, "history": [wrong, "x"]})
    assert world.step(gold)[1:3] == (world.settings.retry_reward, True)
    world.reset(options={"prompt_id": prompt_id, "history": [wrong, "x"]})
    assert world.step(wrong)[2]


@pytest.mark.parametrize(("world", "num_questions"), [
    (Compare({"num_numbers": 2, "lowest": 0, "highest": 9}), 90 - 4),
    (Compare({"num_numbers": 3, "lowest": 5, "highest": 12, "num_shots": 1}), 336 - 1),
    (ChainSum(), None),
    (Products({"num_shots": 0}), 100),
    (CopyWords({"num_words": 2, "num_shots": 3}), None),
    (WordProblem({"num_steps": 1, "lowest": 2, "highest": 4, "num_shots": 3}), None),
    (ReasoningGym({"dataset": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "num_shots": 0}), 200),
])  # fmt: skip
def test_num_questions_is_what_the_splits_hold(world, num_questions):
    ids = [prompt_id for split in text.SPLITS for prompt_id in world.prompt_ids(split, 0)]
    assert len({world.question(prompt_id).text for prompt_id in ids}) == len(ids) == world.num_questions
    assert num_questions in (None, len(ids))
