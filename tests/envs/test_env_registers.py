"""Hidden registers: transcripts by hand, what is counted, and that guessing cannot replace reading."""

from __future__ import annotations

from itertools import islice

import pytest

from rllib_srl.envs.games.registers import Registers
from rllib_srl.envs.turns import MOST_TURN_CHARACTERS

LARGER = "p=17, c=40, k=93. larger p c"


def played(world, prompt_id, turns):
    world.reset(options={"prompt_id": prompt_id})
    return [world.step(turn) for turn in turns]


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
    smaller = LARGER.replace("larger", "smaller")
    world = make(task="smaller")
    asked, _ = world.reset(options={"prompt_id": smaller})
    assert asked == "Question: Registers p, c, k. Smaller of p and c?\nAction:"
    assert world.gold_turns(smaller) == [" get p\n", " get c\n", " answer 17\n"]
    for value, reward in ((17, 1.0), (40, 0.0), (93, 0.0)):
        assert played(world, smaller, [f" answer {value}\n"]) == [("", reward, True, False, {})]
    assert world.num_questions == make(task="larger").num_questions
    assert next(world.prompt_ids("train", 0)).split(". ")[1].startswith("smaller ")
    assert world.split_of(smaller) == world.split_of(LARGER)
    with pytest.raises(ValueError, match="num_turns = 2; expected at least 3"):
        make(task="smaller", num_turns=2)


def test_a_turn_that_is_no_action_is_used_up():
    unknown = "Unknown. Say get and a register, or answer and a number.\nAction:"
    turns = ["hm\n", " get z\n", " answer p\n", " get\n"]
    steps = played(make(), LARGER, turns)
    assert [step[0] for step in steps] == [unknown, "No such register. There are p, c, k.\nAction:", unknown, ""]
    assert steps[-1][1:] == (0.0, False, True, {})  # out of turns with an action: truncated
    assert played(make(), LARGER, [*turns[:3], "?"])[-1][1:] == (0.0, False, True, {"stop_reason": "unparsable"})
    long = " get p" + " " * MOST_TURN_CHARACTERS + "x\n"
    assert played(make(), LARGER, [long])[0][0] == unknown


def test_questions_are_counted_by_hand():
    # 26 * 25 * 24 names in order, 90 * 89 * 88 numbers in order, 3 registers to ask for; two or all of them are shots
    assert make().num_questions == 26 * 25 * 24 * 90 * 89 * 88 * 3
    assert make(task="larger", num_shots=2).num_questions == 26 * 25 * 24 * 90 * 89 * 88 * 6 - 2
    assert make().chance == 1 / 90
    for split, least in (("train", 2000), ("heldout", 200)):
        assert len(set(islice(make().prompt_ids(split, 0), least))) == least


def test_the_prompt_does_not_tell_and_reading_does():
    world = make()
    seen: dict[str, set[str]] = {}
    for number in range(10, 60):
        asked = world.reset(options={"prompt_id": f"p={number}, c=99. read p"})[0]
        seen.setdefault(asked, set()).add(world.step(" get p\n")[0])
    ((_, told),) = seen.items()  # one prompt
    assert len(told) == 50


def test_what_is_asked_of_the_same_registers_stays_in_one_split():
    world = make(task="larger")
    ids = [f"p=17, c=40, k=93. larger {a} {b}" for a in "pck" for b in "pck" if a != b]
    assert len({world.split_of(prompt_id) for prompt_id in [*ids, "c=40, k=93, p=17. larger c k"]}) == 1


@pytest.mark.parametrize(
    "prompt_id",
    ["p=17, c=40. larger p", "p=17, c=40. larger p p", "p=17, c=40. read z", "p=17, p=40. read p", "p=17, c=17. read p",
     "p=c, c=40. read p", "p=17, c=40. follow p", "p=c, c=p. follow p", "p=c, c=40. follow c", "p=1, c=40. read p",
     "p=17, c=40. smaller p", "p=17, c=40. smallest p c"],
)  # fmt: skip
def test_impossible_registers_are_refused(prompt_id):
    with pytest.raises(ValueError, match="expected registers and a task"):
        make().reset(options={"prompt_id": prompt_id})


def test_settings_are_checked_all_at_once():
    with pytest.raises(ValueError) as caught:
        Registers({"num_registers": 1, "task": "larger", "num_turns": 2, "num_shots": 65})
    for fault in ("num_shots = 65", "num_registers = 1; expected 2 to 8", "num_turns = 2; expected at least 3"):
        assert fault in str(caught.value)
    with pytest.raises(ValueError, match="task = 'sum'; expected one of read, larger, smaller, follow"):
        make(task="sum")
