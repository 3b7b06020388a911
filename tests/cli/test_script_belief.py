"""`srl belief`: exact values as text and as JSON, of chosen prompts, and clear errors."""

from __future__ import annotations

import json

import pytest

from rllib_srl.cli.evaluate import rows_of
from rllib_srl.cli.main import main as srl
from rllib_srl.cli.yardsticks import belief
from rllib_srl.common.environments import WorldError
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
    assert srl(["belief", FAULTS, "--num-prompts", "5", "--split", "train", "--seed", "4", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    world = Faults()
    ids = [prompt_id for _, prompt_id in zip(range(5), world.prompt_ids("train", 4))]
    assert [one["prompt_id"] for one in found["by_prompt"]] == ids and found["num_prompts"] == 5
    values = [world.optimal_values(prompt_id) for prompt_id in ids]
    assert found["with_memory"] == pytest.approx(sum(one.with_memory for one in values) / 5)
    assert found["without_memory"] == pytest.approx(sum(one.without_memory for one in values) / 5)
    assert all(world.optimal_value(one) == value.with_memory for one, value in zip(ids, values, strict=True))


def test_errors_are_one_clear_line(capsys):
    with pytest.raises(WorldError, match="environment 'compare' has no exact values; expected one with optimal_value "):
        belief.run(["compare"])
    with pytest.raises(ValueError, match=r"num_turns = 9; expected 2 to 6"):
        belief.run([FAULTS, "--env-config", '{"num_turns": 9}'])
    assert belief.main(["nothing_like_it"]) == 1 and "is unknown; expected one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        belief.run([FAULTS, "--num-prompts", "0"])
    assert "'0'; expected a number of at least 1" in capsys.readouterr().err


def test_an_evaluation_shows_the_share_of_the_best_policys_reward():
    known = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "by_domain": {}, "pass_k": 0, "iterations": 0}
    rest = {"baselines": {"majority": None, "majority_answers": {}, "chance": None}, "num_prompts": 8, "num_lost": 0}
    figures = {**known, **rest, "reward": 0.45, "optimal_value": 0.9, "optimal_share": 0.5}
    rows = dict(rows_of(figures))
    assert (rows["best policy with memory"], rows["share of its reward"]) == ("0.900", "0.500")
    without = dict(rows_of({name: value for name, value in figures.items() if "optimal" not in name}))
    assert set(rows) - set(without) == {"best policy with memory", "share of its reward"}
