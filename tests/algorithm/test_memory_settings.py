"""Settings of the memory beside those of the run: errors and warnings in the names that the user gave."""

from __future__ import annotations

import logging

from rllib_srl import SRLConfig
from rllib_srl.algorithm.validation import faults_of, warnings_of


def of_one(**replay) -> SRLConfig:
    config = SRLConfig().environment("compare").training(group_size=1, advantage="posterior")
    return config.replay(**replay)


def test_rules_of_groups_are_refused_with_groups_of_one():
    config = of_one(selection="per", selection_config={"alpha": 1.0})
    (line,) = faults_of(config)
    assert line.startswith("replay_selection = 'per' with group_size = 1; expected ")
    assert faults_of(config.training(group_size=2)) == []


def test_groups_of_one_without_the_baseline_from_history_are_one_error():
    lines = faults_of(of_one(selection="per").training(advantage="group"))
    assert lines == ["group_size = 1; expected an integer of at least 2, or advantage = 'posterior' or 'none'"]


def test_settings_without_draws_are_warned_of():
    config = SRLConfig().environment("compare").replay(revisit_fraction=0.0, selection="per", max_uses=9)
    starts = [f"replay_{name} = {value!r} has no effect" for name, value in (("max_uses", 9), ("selection", "per"))]
    assert [line.partition(" with")[0] for line in warnings_of(config)] == starts
    drawn = config.replay(revisit_fraction=0.1, reuse_fraction=0.1)
    assert warnings_of(drawn) == [] and faults_of(drawn) == []


def test_warnings_have_the_users_names_and_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr("rllib_srl.algorithm.settings._warned", set())
    config = SRLConfig().environment("compare", env_config={"num_shots": 0}).rl_module(model_config={"model": "tiny"})
    config.replay(history_half_life=3.0, spacing="fsrs")
    config.env_runners(max_turn_tokens=8, max_episode_tokens=128)
    with caplog.at_level(logging.WARNING, "rllib_srl"):
        config.validate()
        config.copy(copy_frozen=False).validate()  # as a run does
    starts = ["replay_history_half_life = 3.0 changes metrics only", "replay_spacing = 'fsrs' with replay_selection = "]
    found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("replay_")]
    assert len(found) == 2 and all(line.startswith(start) for line, start in zip(found, starts, strict=True))
    assert warnings_of(SRLConfig().environment("compare")) == []
