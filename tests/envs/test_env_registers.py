"""Hidden registers: transcripts by hand, what is counted, and that guessing cannot replace reading."""

import pytest

from rllib_srl.envs.games.registers import Registers
from rllib_srl.envs.turns import MOST_TURN_CHARACTERS
from tests.envs.play import played

LARGER = "p=17, c=40, k=93. larger p c"


def make(**settings):
    return Registers({"num_shots": 0, **settings})


def test_an_episode_by_hand():
    env = make(task="larger")
    asked, info = env.reset(options={"prompt_id": LARGER})
    assert asked == "Question: Registers p, c, k. Larger of p and c?\nAction:" and info == {"prompt_id": LARGER}
    assert env.step(" get p\n") == ("p = 17\nAction:", 0.0, False, False, {})
    assert env.step(" get c") == ("\nc = 40\nAction:", 0.0, False, False, {})  # a turn that was cut off
    assert env.step(" answer 40.\n") == ("", 1.0, True, False, {})
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
    smaller, env = LARGER.replace("larger", "smaller"), make(task="smaller")
    assert env.reset(options={"prompt_id": smaller})[0].endswith("Smaller of p and c?\nAction:")
    assert env.gold_turns(smaller) == [" get p\n", " get c\n", " answer 17\n"]
    assert [played(env, smaller, [f" answer {value}\n"])[0][1] for value in (17, 40, 93)] == [1.0, 0.0, 0.0]
    assert env.split_of(smaller) == env.split_of(LARGER)
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
