"""Round trips: rewards by hand, the exact optimum against all trips, and gold moves for every number of places."""

from __future__ import annotations

import random
from itertools import islice, permutations

import pytest

from rllib_srl.envs.games.tour import Tour, length, reversed_between, shortest
from tests.envs.world_play import played

SQUARE = "0,0 4,4 4,0 0,4"  # crossed: 8 + 4 + 8 + 4 = 24 around; the square itself is 16


def test_an_episode_by_hand():
    world = Tour({"num_shots": 0})
    asked, _ = world.reset(options={"prompt_id": SQUARE})
    assert asked == (
        "Question: Shorten the round trip. Steps along the grid: A 0,0; B 4,4; C 4,0; D 0,4.\n"
        "A B C D: length 24, best 24.\nMove:"
    )
    assert world.step(" reverse B C\n") == ("", 1.0, True, False, {"best_length": 16, "shortest": 16})
    assert world.gold_turns(SQUARE) == [" reverse B C\n"]


def test_the_reward_is_the_share_of_what_could_be_saved():
    # Places on a line, visited 0 3 1 4 2: legs 3 + 2 + 3 + 2 + 2 = 12; the shortest goes there and back: 8.
    line = "0,0 3,0 1,0 4,0 2,0"
    world = Tour({"num_shots": 0, "num_turns": 4})
    assert played(world, line, [" reverse B C\n"])[0][:3] == ("", 1.0, True)  # 0 1 3 4 2: 1 + 2 + 1 + 2 + 2 = 8
    # 0 3 1 2 4: 3 + 2 + 1 + 2 + 4 = 12, and back; nothing is saved.
    steps = played(world, line, [" reverse D E\n", " reverse D E\n", " reverse A A\n", " reverse A A\n"])
    assert steps[0][0] == "A B C E D: length 12, best 12.\nMove:"
    assert steps[3][1:4] == (0.0, False, True)
    # A crossed hexagon: start 26, after one move 22, shortest 18 (all by |dx| + |dy|).
    six = "0,0 4,0 0,2 4,2 2,4 2,0"
    first, best = length([(0, 0), (4, 0), (0, 2), (4, 2), (2, 4), (2, 0)], range(6)), 16
    assert (first, shortest(((0, 0), (4, 0), (0, 2), (4, 2), (2, 4), (2, 0)))[0]) == (4 + 6 + 4 + 4 + 4 + 2, best)
    after = length([(0, 0), (4, 0), (4, 2), (0, 2), (2, 4), (2, 0)], range(6))  # 4 + 2 + 4 + 4 + 4 + 2 = 20
    stopped = played(Tour({"num_shots": 0}), six, [" reverse C D\n", " reverse C D\n", " stop\n"])
    assert stopped[0][0] == "A B D C E F: length 20, best 20.\nMove:" and after == 20
    assert stopped[1][0] == "A B C D E F: length 24, best 20.\nMove:"
    assert stopped[-1][1] == pytest.approx((first - 20) / (first - best))  # the best, not the last


def test_what_is_no_move_is_told_so():
    world = Tour({"num_shots": 0, "num_turns": 4})
    for turn in ("reverse A", "reverse A Z", "reverse a b", "swap A B", "reverse A B C", ""):
        steps = played(world, SQUARE, [turn + "\n"] * 4)
        assert steps[0][0].startswith("Unknown. Say reverse and two of A B C D, or stop.\nA B C D: length 24")
        assert steps[-1][1:4] == (0.0, False, True) and steps[-1][4]["stop_reason"] == "unparsable"


def test_a_stop_at_once_earns_nothing():
    assert played(Tour({"num_shots": 0}), SQUARE, ["stop\n"])[0][1:3] == (0.0, True)


@pytest.mark.parametrize("num", [4, 5, 6, 7])
def test_the_shortest_is_that_of_all_trips(num):
    generator = random.Random(num)
    for _ in range(12):
        places = tuple((generator.randrange(9), generator.randrange(9)) for _ in range(num))
        best, trip = shortest(places)
        assert best == min(length(list(places), (0, *rest)) for rest in permutations(range(1, num)))
        assert length(list(places), trip) == best and sorted(trip) == list(range(num)) and trip[0] == 0


@pytest.mark.parametrize("num_places", [4, 6, 9])
def test_gold_moves_take_at_most_two_less_than_places(num_places):
    world = Tour({"num_places": num_places, "num_turns": num_places - 2, "num_shots": 0})
    for prompt_id in islice(world.prompt_ids("train", 0), 30):
        gold = world.gold_turns(prompt_id)
        assert len(gold) <= num_places - 2
        assert played(world, prompt_id, gold)[-1][1:3] == (1.0, True)


def test_reversing_twice_is_nothing_and_names_in_either_order_are_the_same():
    trip = [0, 3, 1, 4, 2]
    assert reversed_between(trip, 3, 4) == reversed_between(trip, 4, 3) == [0, 4, 1, 3, 2]
    assert reversed_between(reversed_between(trip, 3, 4), 3, 4) == trip


@pytest.mark.parametrize("prompt_id", ["0,0 4,0 4,4 0,4", "0,0 0,0 1,1 2,2", "0,0 1,1", "0,0 4,4 4,0 0,x", SQUARE * 9])
def test_impossible_trips_are_refused(prompt_id):
    with pytest.raises(ValueError, match="in an order that is not the shortest"):
        Tour({"num_shots": 0}).reset(options={"prompt_id": prompt_id})


def test_settings_are_checked_all_at_once():
    with pytest.raises(ValueError, match="num_places = 10; expected 4 to 9; side = 3; .*; num_turns = 6; expected at"):
        Tour({"num_places": 10, "side": 3})
