"""The worlds that are to be learned: one of each kind, under settings that exist, judged by held-out reward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rllib_srl.cli.shared.settings import build_config
from scripts import learn_worlds


@pytest.mark.parametrize("name", sorted(learn_worlds.WORLDS))
def test_every_setting_is_one(name):
    arguments = SimpleNamespace(model=None, seed=2, iterations=None, engine="transformers")
    values = learn_worlds.settings_of(name, arguments)
    assert (values["env"], values["seed"], values["model"]) == (name, 2, "smollm2-135m")
    config = build_config({key: value for key, value in values.items() if key != "iterations"})
    config.validate()
    assert set(config.world_creators()) == {name}


def test_there_is_a_world_of_each_kind():
    assert {world.kind for world in learn_worlds.WORLDS.values()} == {"mathematics", "tool use", "hidden state"}


@pytest.mark.parametrize(
    ("after", "majority", "rose"), [(0.61, 0.5, True), (0.60, 0.5, False), (0.65, 0.7, False), (0.61, None, True)]
)
def test_a_reward_rises_above_its_interval_and_the_most_frequent_answer(after, majority, rose):
    outcome = SimpleNamespace(
        before={"accuracy_high": 0.6}, after={"accuracy": after}, baselines=SimpleNamespace(majority=majority)
    )
    assert learn_worlds.is_learned(outcome) is rose
