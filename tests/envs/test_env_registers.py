"""Hidden registers: transcripts by hand, what is counted, and that guessing cannot replace reading."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest

from rllib_srl.envs.games.beliefs import OptimalValues, Outcome, Policies, Pomdp
from rllib_srl.envs.games.registers import Registers, reactive_value
from rllib_srl.envs.turns import MOST_TURN_CHARACTERS
from tests.envs.play import played

LARGER = "p=17, c=40, k=93. larger p c"


def make(**settings):
    return Registers({"num_shots": 0, **settings})


def test_an_episode_by_hand():
    world = make(task="larger")
    asked, info = world.reset(options={"prompt_id": LARGER})
    assert asked == "Question: Registers p, c, k. Larger of p and c?\nAction:" and info == {"prompt_id": LARGER}
    assert world.step(" get p\n") == ("p = 17\nAction:", 0.0, False, False, {})
    assert world.step(" get c") == ("\nc = 40\nAction:", 0.0, False, False, {})  # a turn that was cut off
    assert world.step(" answer 40.\n") == ("", 1.0, True, False, {})
    for task_id, wrong in ((LARGER, 17), (LARGER, 93), ("p=17, c=40. read c", 17), ("p=c, c=40, k=93. follow p", 93)):
        assert played(make(), task_id, [f" answer {wrong}\n"]) == [("", 0.0, True, False, {})]
    read, follow = "p=17, c=40. read c", "p=c, c=40, k=93. follow p"
    assert make().reset(options={"prompt_id": read})[0] == "Question: Registers p, c. What is in c?\nAction:"
    assert make().reset(options={"prompt_id": follow})[0] == "Question: Registers p, c, k. Follow p.\nAction:"
    assert [step[0] for step in played(make(), follow, [" get p\n"])] == ["p = c\nAction:"]
    assert make().gold_turns(read) == [" get c\n", " answer 40\n"]
    assert make().gold_turns(follow) == [" get p\n", " get c\n", " answer 40\n"]
    assert make().gold_turns(LARGER) == [" get p\n", " get c\n", " answer 40\n"]


def test_the_smaller_of_two_is_the_opposite_of_the_larger():
    smaller, world = LARGER.replace("larger", "smaller"), make(task="smaller")
    assert world.reset(options={"prompt_id": smaller})[0].endswith("Smaller of p and c?\nAction:")
    assert world.gold_turns(smaller) == [" get p\n", " get c\n", " answer 17\n"]
    assert [played(world, smaller, [f" answer {value}\n"])[0][1] for value in (17, 40, 93)] == [1.0, 0.0, 0.0]
    assert world.split_of(smaller) == world.split_of(LARGER)
    with pytest.raises(ValueError, match="num_turns = 2; expected at least 3"):
        make(task="smaller", num_turns=2)


def test_an_unreadable_turn_is_used_up():
    unknown = "Unknown. Say get and a register, or answer and a number.\nAction:"
    turns = ["hm\n", " get z\n", " answer p\n", " get\n"]
    steps = played(make(), LARGER, turns)
    assert [step[0] for step in steps] == [unknown, "No such register. There are p, c, k.\nAction:", unknown, ""]
    assert steps[-1][1:] == (0.0, False, True, {})  # out of turns with an action: truncated
    assert played(make(), LARGER, [*turns[:3], "?"])[-1][1:] == (0.0, False, True, {"stop_reason": "unparsable"})
    long = " get p" + " " * MOST_TURN_CHARACTERS + "x\n"
    assert played(make(), LARGER, [long])[0][0] == unknown


@pytest.mark.parametrize(
    "prompt_id",
    ["p=17, c=40. larger p", "p=17, c=40. larger p p", "p=17, c=40. read z", "p=17, p=40. read p", "p=17, c=17. read p",
     "p=c, c=40. read p", "p=17, c=40. follow p", "p=c, c=p. follow p", "p=c, c=40. follow c", "p=1, c=40. read p",
     "p=17, c=40. smaller p", "p=17, c=40. smallest p c"],
)  # fmt: skip
def test_impossible_registers_are_refused(prompt_id):
    with pytest.raises(ValueError, match="expected registers and a task"):
        make().reset(options={"prompt_id": prompt_id})


class Pair(Pomdp):
    """The task "larger" with few numbers, as a hidden-state task: reads of any register, then an answer."""

    def __init__(self, num_registers: int, num_values: int):
        self.values = range(num_values)
        self.held = list(permutations(self.values, num_registers))
        self.actions = [f"get {at}" for at in range(num_registers)] + [f"answer {value}" for value in self.values]

    def starts(self):
        return [(1, held, "") for held in self.held]

    def outcomes(self, state, action):
        verb, number = action.split()
        if verb == "get":
            return [Outcome(1, 0, state, f"{number} = {state[int(number)]}")]
        return [Outcome(1, int(int(number) == max(state[:2])), None, "")]


@pytest.mark.parametrize(
    ("num_registers", "num_values", "num_turns"), [(2, 4, 3), (2, 5, 3), (2, 5, 4), (2, 7, 3), (3, 5, 3)]
)
def test_the_value_without_memory_is_that_of_a_search_over_all_policies(num_registers, num_values, num_turns):
    searched = Policies(Pair(num_registers, num_values))
    assert searched.without_memory(num_turns) == reactive_value(num_values, has_spare=False)
    assert searched.with_memory(num_turns) == 1


def test_values_by_hand():
    """Of 20 ordered pairs of 5 numbers: h = 2 wins 3 + 4 first, then 1 (guessed) + 1 + 2 + 3 + 3 = 10, so 17 of 20.

    The search over all policies of three registers and four turns, which takes half a minute, finds 53 / 60 as well.
    """
    assert reactive_value(5, has_spare=False) == Fraction(17, 20)
    assert reactive_value(5, has_spare=True) == Fraction(53, 60)
    assert make(task="larger").optimal_values(LARGER) == OptimalValues(1.0, float(reactive_value(90, has_spare=True)))
    two = make(num_registers=2).optimal_values("p=17, c=40. smaller p c")
    assert two == OptimalValues(1.0, pytest.approx(6031 / 8010, abs=1e-12))
    assert make(num_turns=3).optimal_values(LARGER).without_memory == pytest.approx(6031 / 8010, abs=1e-12)
    for easy in ("p=17, c=40. read c", "p=c, c=40, k=93. follow p"):
        assert make().optimal_values(easy) == OptimalValues(1.0, 1.0) and make().optimal_value(easy) == 1.0
    with pytest.raises(ValueError, match="num_turns = 2; expected at least 3 for 'p=17"):
        make(num_turns=2).optimal_values(LARGER)
