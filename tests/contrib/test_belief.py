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
from rllib_srl.envs.games.faults import Faults

FAULTS = "rllib_srl.envs.games.faults:Faults"
BY_HAND = "A 20, B 30. AB. dice 9 9"  # one test of both parts: .95 * (.56 + .24) with memory (test_env_inquiry.py)


def test_one_prompt_by_hand(capsys, tmp_path):
    to = tmp_path / "values.json"
    argv = [FAULTS, "--prompt-id", BY_HAND, "--env-config", '{"cost_percent": 5}', "--json", str(to)]
    assert belief.run(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{FAULTS}: expected reward of the best policies, mean over 1 prompt"
    assert lines[1].split() == ["with", "memory", "0.7600"]
    found = json.loads(to.read_text())
    (one,) = found["by_prompt"]
    assert one["prompt_id"] == BY_HAND and one["with_memory"] == pytest.approx(0.95 * 0.8)
    assert found["worth_of_memory"] == pytest.approx(one["with_memory"] - one["without_memory"])


def test_means_over_the_prompts_of_a_split(capsys):
    flags = ["--num-prompts", "5", "--split", "train", "--seed", "4", "--json", "-"]
    assert srl(["contrib", "belief", FAULTS, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    world = Faults()
    ids = [prompt_id for _, prompt_id in zip(range(5), world.prompt_ids("train", 4))]
    assert [one["prompt_id"] for one in found["by_prompt"]] == ids and found["num_prompts"] == 5
    values = [world.optimal_values(prompt_id) for prompt_id in ids]
    assert found["with_memory"] == pytest.approx(sum(one.with_memory for one in values) / 5)
    assert found["without_memory"] == pytest.approx(sum(one.without_memory for one in values) / 5)


def test_errors_are_one_clear_line(capsys):
    with pytest.raises(WorldError, match="environment 'compare' has no exact values; expected one with optimal_values"):
        belief.run(["compare"])
    with pytest.raises(ValueError, match=r"num_turns = 9; expected 2 to 6"):
        belief.run([FAULTS, "--env-config", '{"num_turns": 9}'])
    assert belief.main(["nothing_like_it"]) == 1 and "is unknown; expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        belief.run([FAULTS, "--num-prompts", "0"])
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
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(env or Faults())), 5)


def test_wrappers_of_make_are_looked_through_and_another_states_its_own_values():
    (inside,) = belief.values_of(made(), "faults", [BY_HAND])
    assert inside.with_memory == Faults().optimal_values(BY_HAND).with_memory > 0
    (outside,) = belief.values_of(TimeLimit(Valued(made()), 5), "faults", [BY_HAND])
    assert outside.with_memory == 2 * inside.with_memory
    with pytest.raises(WorldError, match="environment 'doubled' has no exact values"):
        next(belief.values_of(Doubled(Faults()), "doubled", [BY_HAND]))
