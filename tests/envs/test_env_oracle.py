"""An oracle that lies: episodes and values by hand, and values that are earned."""

from itertools import product
from math import prod

import numpy as np
import pytest

from rllib_srl.envs.games.oracle import Inquiry, Oracle
from rllib_srl.types import RIGHT, passed
from tests.envs.play import played

TRUTH, LIE = 19, 0  # faces of a die
FOUR = "12, 35, 47, 81. hidden 47. dice 19 0 19 19 19 19"


def test_an_episode_with_the_oracle_by_hand():
    env = Oracle({"num_shots": 0})
    asked, info = env.reset(options={"prompt_id": FOUR})
    assert asked == (
        "Question: One of 12, 35, 47, 81 is hidden. A reply lies in 10% of cases, a query costs 2%. Which is it?\n"
        "Action:"
    )
    assert info == {"prompt_id": FOUR}
    assert env.step(" above 35\n") == ("above 35: yes\nAction:", 0.0, False, False, {})
    assert env.step(" above 47\n")[0] == "above 47: yes\nAction:"  # the second die: a lie
    assert env.step(" above 47.\n")[0] == "above 47: no\nAction:"
    assert env.step(" answer 47\n") == ("", 0.94, True, False, {"num_queries": 3})
    assert played(env, FOUR, [" answer 81\n"]) == [("", 0.0, True, False, {"num_queries": 0})]
    assert env.gold_turns(FOUR) == [" answer 47\n"]
    honest = Oracle({"num_shots": 0, "lie_percent": 0})
    assert played(honest, FOUR, [" above 35\n", " above 47\n"])[1][0] == "above 47: no\nAction:"


def test_the_right_answer_is_right_after_any_number_of_queries():
    env = Oracle({"num_shots": 0})  # six turns, 2 % a query
    assert env.pass_reward == 0.9
    right = [played(env, FOUR, [" above 35\n"] * k + [" answer 47\n"])[-1][1] for k in range(6)]
    wrong = [played(env, FOUR, [" above 35\n"] * k + [" answer 12\n"])[-1][1] for k in range(6)]
    rewards = np.array([*right, *wrong], np.float32)
    assert passed(rewards, env.pass_reward, RIGHT).tolist() == [True] * 6 + [False] * 6
    assert Oracle({"cost_percent": 50, "num_turns": 3}).pass_reward == 0.01  # a reward of 0 is never a pass


def test_a_turn_that_is_not_an_action_is_used_up_and_costs_nothing():
    env = Oracle({"num_shots": 0})
    usage = "Unknown. Say above and one of 12, 35, 47, or answer and one of 12, 35, 47, 81.\nAction:"
    for turn in ("hm", " above 81", " above 36", " above", " answer 48", " answer", " answer 12 35"):
        steps = played(env, FOUR, [f"{turn}\n", " answer 47\n"])
        assert steps[0][0] == usage and steps[1][1] == 1.0
        last = played(env, FOUR, [f"{turn}\n"] * 6)[-1]
        assert last == ("", 0.0, False, True, {"stop_reason": "unparsable"})
    assert played(env, FOUR, [" above 12\n"] * 6)[-1] == ("", 0.0, False, True, {})  # readable, but no answer


def value(inquiry, turns):
    """Return the expected reward of the best policy, all numbers equally likely."""
    belief = dict.fromkeys(inquiry.answers.values(), 1)
    return inquiry.best(belief, 0, turns)[0] / (len(belief) * 100 * 100**turns)


def test_values_with_the_oracle_by_hand():
    # One query: its reply is true in 90 % of cases, .95 * .9 = .855; no query earns .5.
    assert value(Inquiry((12, 35), 10, 5), 2) == 0.855
    # Up to three: the second agrees with probability .82, and both are true with .81: .9 * .81 = .729; else a third
    # decides: .18 * .85 * .9 = .1377.
    assert value(Inquiry((12, 35), 10, 5), 4) == pytest.approx(0.8667, abs=1e-15)
    # Without lies one query is enough; a query that costs more than it brings is not made.
    assert value(Inquiry((12, 35), 0, 5), 4) == 0.95
    assert value(Inquiry((12, 35), 10, 50), 2) == 0.5


def earned(env, prompt_id):
    """Return the reward of the best policy, which reads the texts of the environment only."""
    inquiry, turns = env.case(prompt_id).inquiry, env.settings.num_turns
    observation, _ = env.reset(options={"prompt_id": prompt_id})
    belief = dict.fromkeys(inquiry.answers.values(), 1)
    for num_queries in range(turns):
        action = inquiry.best(belief, num_queries, turns - num_queries)[1]
        observation, reward, is_over, _, _ = env.step(f" {action}\n")
        if is_over:
            return reward
        belief = inquiry.after(belief, action)[observation.partition("\n")[0]]
    raise AssertionError("the best policy did not answer")


@pytest.mark.parametrize("lie_percent", [0, 10, 25])
def test_the_best_policy_earns_its_value_over_all_numbers_and_lies(lie_percent):
    env = Oracle({"num_numbers": 3, "num_turns": 5, "lie_percent": lie_percent, "num_shots": 0})
    total, lie = 0.0, lie_percent / 100
    for hidden, dice in product((12, 35, 81), product((TRUTH, LIE), repeat=5)):
        weight = prod(lie if die == LIE else 1 - lie for die in dice) / 3
        prompt_id = f"12, 35, 81. hidden {hidden}. dice {' '.join(map(str, dice))}"
        total += weight * earned(env, prompt_id) if weight else 0.0
    assert total == pytest.approx(value(env.case(prompt_id).inquiry, 5), abs=1e-12)


def test_what_is_hidden_has_the_stated_probability_and_does_not_decide_the_split():
    oracle = Oracle()
    dice = [oracle.case(f"12, 35. hidden 35. dice {die} 5 5 5 5 5").lies for die in range(20)]
    assert dice == [frozenset({0})] * 2 + [frozenset()] * 18
    assert oracle.split_of(FOUR) == oracle.split_of(FOUR.replace("hidden 47", "hidden 12").replace("19", "3"))


def test_shots_show_the_best_policy_and_not_the_hidden_answer_alone():
    assert Oracle({"lie_percent": 0}).shot_turns(FOUR) == [" above 35\n", " above 47\n", " answer 47\n"]
    shot = Oracle({"num_shots": 1}).reset(seed=0)[0].partition("\n\n")[0]
    assert shot.count("Action: above ") >= 2 and shot.count("Action: answer ") == 1


@pytest.mark.parametrize(
    "prompt_id",
    ["12, 35. hidden 47. dice 1 1 1 1 1 1", "35, 12. hidden 12. dice 1 1 1 1 1 1", "12. hidden 12. dice 1 1 1 1 1 1",
     "12, 35. hidden 12. dice 1 1 1", "12, 35. hidden 12. dice 1 1 1 1 1 20", "09, 35. hidden 35. dice 1 1 1 1 1 1",
     "12, 12. hidden 12. dice 1 1 1 1 1 1"],
)  # fmt: skip
def test_impossible_tasks_of_the_oracle_are_refused(prompt_id):
    with pytest.raises(ValueError, match="prompt_id = .*; expected 2 to 5 ascending numbers"):
        Oracle({"num_shots": 0}).reset(options={"prompt_id": prompt_id})
