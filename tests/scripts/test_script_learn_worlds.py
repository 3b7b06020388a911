"""The tiny model learns a world of each kind on the real engine: held-out reward rises above its interval."""

from __future__ import annotations

import json

import pytest

from scripts import learn_worlds
from scripts.make_tiny_model import make


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", sorted(learn_worlds.WORLDS))
def test_held_out_reward_rises(world, tmp_path, capsys):
    make()
    figures = tmp_path / "figures.json"
    flags = ["--worlds", world, "--model", "tiny", "--engine", "vllm", "--out", str(tmp_path / "run")]
    status = learn_worlds.main([*flags, "--json", str(figures)])
    found = json.loads(figures.read_text())[world]
    assert found["after"]["num_prompts"] == learn_worlds.TINY["evaluation_duration"]
    assert found["after"]["accuracy"] > found["before"]["accuracy_high"], found
    assert found["after"]["accuracy"] > (found["majority"] or 0.0)
    assert status == 0
    assert "rose" in capsys.readouterr().out


def test_every_kind_of_world_is_there_and_every_setting_is_one():
    assert {world.kind for world in learn_worlds.WORLDS.values()} == {"mathematics", "tool use", "hidden state"}
    from scripts.settings import build_config

    for name, world in learn_worlds.WORLDS.items():
        for settings in (world.settings, learn_worlds.TINY | dict(world.tiny)):
            values = {**learn_worlds.SETTINGS, "env": name, **settings}
            build_config({key: value for key, value in values.items() if key != "iterations"}).validate()
