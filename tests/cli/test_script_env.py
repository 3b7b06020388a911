"""Being the policy: turns from piped input, rewards and stop reasons shown, a clean end when the input ends."""

import io

import pytest

from rllib_srl.cli import env

COMPARE = ["rllib_srl.envs.math.compare:Compare", "--env-config", '{"num_shots": 0}', "--prompt-id", "17, 93, 40"]
REGISTERS = ["rllib_srl.envs.games.registers:Registers", "--env-config", '{"num_shots": 0, "task": "larger"}']


def said(capsys, argv, typed=""):
    assert env.run(env.main.parse(argv), io.StringIO(typed)) == 0
    return capsys.readouterr().out


def test_a_turn_is_graded_and_the_ending_named(capsys):
    out = said(capsys, COMPARE, " 93\n")
    assert out.splitlines() == [
        "── rllib_srl.envs.math.compare:Compare",
        "Question: Which is largest: 17, 93 or 40?",
        "Answer:",
        "reward 1",
        "ended as terminated after 1 turns, return 1, prompt id: 17, 93, 40",
        "",
    ]
    assert "reward 0\nended as unparsable after 1 turns, return 0, " in said(capsys, COMPARE, "hm\n")


def test_several_turns_and_the_next_prompt(capsys):
    out = said(capsys, [*REGISTERS, "--prompt-id", "p=17, c=40, k=93. larger p c"], " get c\nwhat\n answer 40\n")
    assert "c = 40\nAction:\nreward 0\nUnknown. Say get" in out
    assert "reward 1\nended as terminated after 3 turns, return 1, prompt id: p=17, c=40, k=93. larger p c\n" in out
    out = said(capsys, [*REGISTERS, "--split", "heldout", "--seed", "3"], " answer 1\n")
    assert out.count("── ") == 2 and "ended as terminated after 1 turns" in out
    assert out.endswith("end of input\n")


def test_gold_plays_itself(capsys):
    out = said(capsys, [*REGISTERS, "--gold"])
    assert out.count("> ") == 3 and "return 1, prompt id: " in out


@pytest.mark.parametrize("typed", ["", " get p"])
def test_the_end_of_input_is_a_clean_end(capsys, typed):
    out = said(capsys, REGISTERS, typed)
    assert out.count("── ") == 1 and "ended as" not in out


def test_text_that_steers_a_terminal_is_shown_and_not_sent(capsys):
    out = said(capsys, [*REGISTERS, "--prompt-id", "p=17, c=40, k=93. larger p c"], "\x1b[2Jget p\\nget c\n")
    assert "\x1b" not in out
