"""`srl contrib belief`: exact values as text and as JSON, of chosen prompts, and clear errors."""

from __future__ import annotations

import json
from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rllib_srl.cli.main import main as srl
from rllib_srl.common.environments import WorldError
from rllib_srl.contrib import belief
from rllib_srl.envs.games.oracle import Oracle

ORACLE = "rllib_srl.envs.games.oracle:Oracle"
SETTINGS = {"num_turns": 4, "cost_percent": 5}
BY_HAND = "12, 35. hidden 12. dice 19 19 19 19"  # .8667 with memory, .855 without (test_env_oracle.py)


def test_one_prompt_by_hand(capsys, tmp_path):
    to = tmp_path / "values.json"
    argv = [ORACLE, "--prompt-id", BY_HAND, "--env-config", json.dumps(SETTINGS), "--json", str(to)]
    assert belief.run(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{ORACLE}: expected reward of the best policies, mean over 1 prompt"
    assert lines[1].split() == ["with", "memory", "0.8667"]
    found = json.loads(to.read_text())
    (one,) = found["by_prompt"]
    assert one["prompt_id"] == BY_HAND and one["with_memory"] == pytest.approx(0.8667)
    assert found["worth_of_memory"] == pytest.approx(0.8667 - 0.855)


def test_means_over_the_prompts_of_a_split(capsys):
    flags = ["--num-prompts", "5", "--split", "train", "--seed", "4", "--json", "-"]
    assert srl(["contrib", "belief", ORACLE, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    world = Oracle()
    ids = [prompt_id for _, prompt_id in zip(range(5), world.prompt_ids("train", 4))]
    assert [one["prompt_id"] for one in found["by_prompt"]] == ids and found["num_prompts"] == 5
    values = [world.optimal_values(prompt_id) for prompt_id in ids]
    assert found["with_memory"] == pytest.approx(sum(one.with_memory for one in values) / 5)
    assert found["without_memory"] == pytest.approx(sum(one.without_memory for one in values) / 5)


def test_errors_are_one_clear_line(capsys):
    with pytest.raises(WorldError, match="environment 'compare' has no exact values; expected one with optimal_values"):
        belief.run(["compare"])
    with pytest.raises(ValueError, match=r"num_turns = 9; expected 2 to 6"):
        belief.run([ORACLE, "--env-config", '{"num_turns": 9}'])
    assert belief.main(["nothing_like_it"]) == 1 and "is unknown; expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        belief.run([ORACLE, "--num-prompts", "0"])
    assert "'0'; expected a number of at least 1" in capsys.readouterr().err


class Doubled(gymnasium.RewardWrapper):
    """Pays twice as much."""

    def reward(self, reward):
        return 2 * reward


class Valued(Doubled):
    """The same, with the values of what it pays."""

    def optimal_values(self, prompt_id):
        inner = self.unwrapped.optimal_values(prompt_id)
        return SimpleNamespace(with_memory=2 * inner.with_memory, without_memory=2 * inner.without_memory)


def made(env=None):
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(env or Oracle(SETTINGS))), 5)


def test_wrappers_of_make_are_looked_through_and_another_states_its_own_values():
    (inside,) = belief.values_of(made(), "oracle", [BY_HAND])
    assert inside.with_memory == Oracle(SETTINGS).optimal_values(BY_HAND).with_memory > 0
    (outside,) = belief.values_of(TimeLimit(Valued(made()), 5), "oracle", [BY_HAND])
    assert outside.with_memory == 2 * inside.with_memory
    with pytest.raises(WorldError, match="environment 'doubled' has no exact values"):
        next(belief.values_of(Doubled(Oracle(SETTINGS)), "doubled", [BY_HAND]))
