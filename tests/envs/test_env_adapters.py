"""Foreign games: textarena and textworld by hand, what they do to a process, and what is said without them."""

from __future__ import annotations

import random
import sys
from itertools import islice

import pytest

from rllib_srl.envs.games.textarena_env import GAMES, TextArena
from rllib_srl.envs.games.textworld_env import TextWorld


@pytest.mark.parametrize(("make", "name"), [
    (lambda: TextArena({"game": "Mastermind-v0"}).reset(seed=0), "textarena"),
    (lambda: TextWorld().reset(options={"prompt_id": "3.4.3 1"}), "textworld"),
])  # fmt: skip
def test_a_missing_package_is_named_with_how_to_get_it(monkeypatch, make, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"environment '{name}' needs {name} .*; pip install 'rllib_srl\[envs\]'"):
        make()


def test_settings_are_checked_all_at_once():
    with pytest.raises(ValueError, match="game = 'Chess-v0'; expected one of 2048-v0, .*; pool_size = 1; expected"):
        TextArena({"game": "Chess-v0", "pool_size": 1})
    with pytest.raises(ValueError, match="num_shots = 2; expected 0 for 'Sudoku-v0-easy', whose gold"):
        TextArena({"game": "Sudoku-v0-easy", "num_shots": 2})
    with pytest.raises(ValueError, match="num_rooms = 0; .*quest_length = 30; .*states_goal = 'none'; .*num_turns"):
        TextWorld({"num_rooms": 0, "quest_length": 30, "states_goal": "none"})


def test_a_game_by_hand():
    pytest.importorskip("textarena")
    world = TextArena({"game": "GuessTheNumber-v0"})
    asked, _ = world.reset(options={"prompt_id": "GuessTheNumber-v0 17"})
    assert asked.startswith("You are Player 0. You are playing Guess The Number.\n") and "Question" not in asked
    (gold,) = world.gold_turns("GuessTheNumber-v0 17")
    number = int(gold.strip("[]"))
    other = 1 if number > 1 else 2
    said, *rest = world.step(f"[{other}]")
    assert said == "\nThe target number is higher.\n" and rest == [0.0, False, False, {}]
    assert world.step(f"I say [{number}]")[1:3] == (1.0, True)
    world.reset(options={"prompt_id": "GuessTheNumber-v0 17"})
    assert "invalid move" in world.step("no number]")[0]
    _, reward, terminated, _, info = world.step("again none]")
    assert (reward, terminated, info["stop_reason"]) == (0.0, True, "unparsable")


def test_a_turn_that_makes_the_game_fail_is_unparsable():
    pytest.importorskip("textarena")
    world = TextArena({"game": "GuessTheNumber-v0"})
    world.reset(options={"prompt_id": "GuessTheNumber-v0 17"})
    world._game.step = lambda action: int("9" * 5000)  # as textarena does with what stands in brackets
    _, reward, terminated, _, info = world.step("[9]")
    assert (reward, terminated, info["stop_reason"]) == (0.0, True, "unparsable")
    assert info["reason"] == "the game failed: ValueError"


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_each_game_plays_the_same_whatever_else_draws(game):
    pytest.importorskip("textarena")
    turns = ["[1]", "[up]", "[5 5]", "[Hit]", "[continue]", "[left]", "[1 2 3 4]"]

    def played():
        world = TextArena({"game": game, "pool_size": 40})
        train, heldout = (list(world.prompt_ids(split, 0)) for split in ("train", "heldout"))
        assert train and not set(train) & set(heldout)
        said = [world.reset(options={"prompt_id": train[0]})[0]]
        for turn in turns:
            random.random()  # the process goes on drawing
            observation, reward, terminated, truncated, _ = world.step(turn)
            said.append(observation)
            assert 0.0 <= reward <= 1.0
            if terminated or truncated:
                break
        return said

    random.seed(3)
    first, state = played(), random.getstate()
    random.seed(4)
    assert played() == first
    random.seed(3)
    for _ in range(len(first) - 1):
        random.random()
    assert random.getstate() == state  # what the game drew is not seen outside


def test_each_hidden_number_is_one_task():
    pytest.importorskip("textarena")
    world = TextArena({"game": "GuessTheNumber-v0", "pool_size": 500})
    gold = [world.gold_turns(i)[0] for split in ("train", "heldout") for i in world.prompt_ids(split, 0)]
    assert sorted(int(turn.strip("[]")) for turn in gold) == list(range(1, 21))


@pytest.fixture(name="adventure", scope="module")
def _adventure(tmp_path_factory):
    pytest.importorskip("textworld")
    directory = str(tmp_path_factory.mktemp("games"))
    world = TextWorld({"directory": directory, "num_rooms": 2, "num_objects": 3, "quest_length": 2, "num_turns": 4})
    yield world
    world.close()


@pytest.mark.slow
def test_an_adventure_by_hand(adventure):
    asked, _ = adventure.reset(options={"prompt_id": "2.3.2 5"})
    gold = adventure.gold_turns("2.3.2 5")
    assert len(gold) == 2 and asked.endswith("\n>") and asked.count("-= ") == 1
    assert "\n\n" not in asked and "$$" not in asked  # no banner
    said, reward, *_ = adventure.step(" dance wildly\n")
    assert said == "That's not a verb I recognise.\n>" and reward == 0.0
    assert adventure.step(gold[0])[1:4] == (0.0, False, False)
    assert adventure.step(gold[1]) == ("", 1.0, True, False, {})


def test_turns_run_out_and_control_characters_do_nothing(adventure):
    adventure.reset(options={"prompt_id": "2.3.2 5"})
    assert adventure.step("\x00\x1b\n")[0] == "Say a command.\n>"
    for turn in ("look\n", "look\n"):
        assert adventure.step(turn)[1:4] == (0.0, False, False)
    assert adventure.step("look\n")[1:4] == (0.0, False, True)


def test_a_compiled_game_is_kept(adventure, monkeypatch):
    first = adventure.reset(options={"prompt_id": "2.3.2 5"})[0]
    monkeypatch.setattr(TextWorld, "_compile", None)  # calling it would fail
    again = TextWorld({"directory": adventure.settings.directory})
    assert again.reset(options={"prompt_id": "2.3.2 5"})[0] == first
    again.close()


@pytest.mark.parametrize("prompt_id", ["2.3.2", "0.3.2 5", "2.3.99 5", "2.3.2 x", "../../etc 1", "2.3.2 5\n"])
def test_an_unknown_adventure_is_refused(prompt_id):
    with pytest.raises(ValueError, match="expected rooms, objects, quest length and seed"):
        TextWorld().reset(options={"prompt_id": prompt_id})


def test_prompt_ids_need_no_compiler():
    assert len(set(islice(TextWorld().prompt_ids("heldout", 0), 100))) == 100
