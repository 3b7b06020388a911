"""The grid world: sight and moves by hand, and what memory is worth there, by exact values of two kinds of policy."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest

from rllib_srl.envs.games.beliefs import Policies
from rllib_srl.envs.games.grid import Grid, Maze, MazeTask

BY_HAND = "1..2/#.##/#S##"


def policies_of(rows, sight=1):
    return Policies(MazeTask(Maze(rows.split("/")), sight))


def play(world, policies, pair, choose):
    """Play one start with a belief that what is seen narrows down; `choose(belief, turns left)` moves."""
    (row, column), door = pair
    prompt_id = f"{world.canonical_rows} from {row},{column} door {door}"
    observation, _ = world.reset(options={"prompt_id": prompt_id})
    beliefs = policies.first
    for turns in range(world.settings.num_turns, 0, -1):
        belief = beliefs[observation.removesuffix("\nMove:").rpartition("\n")[2]]
        move = choose(belief, turns)
        observation, reward, terminated, truncated, _ = world.step(f" {move}\n")
        if terminated or truncated:
            return reward
        beliefs = policies.after(belief, move)[1]
    raise AssertionError("the turns are used up and the episode goes on")


def mean_reward(rows, choose_of, **settings):
    """Return the mean reward of a policy over all starts and doors of a maze, played in the world itself."""
    world = Grid({"num_shots": 0, **settings})
    world.canonical_rows = rows
    policies = policies_of(rows)
    choose = choose_of(policies)
    pairs = [pair for _, pair, _ in policies.pomdp.starts()]
    return sum(play(world, policies, pair, choose) for pair in pairs) / len(pairs)


def test_an_episode_by_hand():
    world = Grid({"num_shots": 0})
    asked, _ = world.reset(options={"prompt_id": f"{BY_HAND} from 0,2 door 2"})
    assert asked == (
        "Question: Maze: # wall, S sign, 1 and 2 doors. You stand on a hidden free cell. "
        "The sign names the right door.\n"
        "1 . . 2\n# . # #\n# S # #\nFree cells you see: n 0, e 1, s 0, w 1\nMove:"
    )
    assert world.step(" n\n")[0] == "Free cells you see: n 0, e 1, s 0, w 1\nMove:"  # a wall: nothing moves
    assert world.step(" w\n")[0] == "Free cells you see: n 0, e 1, s 1, w 1\nMove:"
    assert world.step("down\n")[0].startswith("Unknown. Say n, e, s or w.\nFree cells you see: n 0, e 1, s 1")
    assert world.step(" s\n")[0] == "Free cells you see: n 1, e 0, s 1, w 0\nMove:"
    assert world.step(" s\n")[0] == "Free cells you see: n 1, e 0, s 0, w 0. The sign says 2.\nMove:"
    for move in "nne":
        assert world.step(f" {move}\n")[1:4] == (0.0, False, False)
    assert world.step(" e\n") == ("", 1.0, True, False, {})
    assert Grid().gold_turns(f"{BY_HAND} from 0,2 door 1") == [f" {move}\n" for move in "wssnnw"]
    world.reset(options={"prompt_id": f"{BY_HAND} from 0,2 door 1"})
    assert world.step(" e\n")[1:4] == (0.0, True, False)  # the wrong door
    assert Maze(BY_HAND.split("/")).seen((0, 1), 3) == (0, 2, 2, 1)  # sight 3 looks along free cells to the next wall


def test_values_by_hand():
    policies = policies_of(BY_HAND)
    # Starts: 0,1 and 0,2 and 1,1, each with door 1 or 2. By the sign 0,2 takes 3 turns there and 3 or 4 back, 0,1 takes
    # 2 there and 3 or 4 back, 1,1 takes 1 there and 3 or 4 back. In 7 turns all six are won.
    assert policies.with_memory(7) == 1.0
    # In 6: 0,2 goes by the sign and wins door 1 (3 + 3) only, or guesses at once: one of two either way.
    assert policies.with_memory(6) == Fraction(5, 6)
    # In 1: from 0,1 and from 0,2 a guess wins one of two, from 1,1 no door is in reach.
    assert policies.with_memory(1) == Fraction(2, 6)
    # Without memory the way from the sign on is the same whatever it said: one door of two, for each start.
    assert policies.without_memory(7) == policies.without_memory(40) == 1 / 2


def test_memory_is_worth_half_of_all():
    world = Grid({"num_shots": 0})
    values = [world.optimal_values(prompt_id) for prompt_id in islice(world.prompt_ids("train", 0), 2)]
    assert all(each.without_memory <= 1 / 2 for each in values)
    assert sum(each.with_memory for each in values) / 2 > 0.9


@pytest.mark.parametrize(("rows", "num_turns"), [(BY_HAND, 7), ("2#.1/..../#S#.", 8)])
def test_the_optimum_is_what_its_own_moves_earn(rows, num_turns):
    optimum = policies_of(rows).with_memory(num_turns)
    earned = mean_reward(rows, lambda p: lambda belief, turns: p.best(belief, turns)[1], num_turns=num_turns)
    assert earned == pytest.approx(optimum) and optimum > 0.5


@pytest.mark.parametrize(
    "prompt_id",
    [f"{BY_HAND} from 0,0 door 1", f"{BY_HAND} from 2,1 door 1", f"{BY_HAND} from 0,2 door 3",
     f"{BY_HAND} from 1,0 door 1", "1..2/#.##/#S.# from 0,2 door 2", "1S.2/#.## from 0,2 door 2",
     "1.12/#.##/#S## from 0,1 door 1", "1..2/#.## from 0,1",
     "1..2/#.#/#S## from 0,2 door 2", "1..2/#.##/#S##/###. from 0,2 door 2"],
)  # fmt: skip
def test_impossible_mazes_are_refused(prompt_id):
    with pytest.raises(ValueError, match="expected a "):
        Grid({"num_shots": 0}).reset(options={"prompt_id": prompt_id})
    Grid({"num_shots": 0}).reset(options={"prompt_id": f"{BY_HAND} from 0,2 door 1"})
