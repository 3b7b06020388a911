"""Names of settings: each is flat, stands in one place, and has an effect or is refused or warned of."""

import argparse
import logging

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.settings import SETTINGS
from rllib_srl.algorithm.validation import config_errors, warnings_of
from rllib_srl.cli.shared.flags import add_settings
from rllib_srl.cli.shared.settings import SettingsError, all_settings, given_settings


def test_settings_are_few():
    assert len(all_settings()) <= 160


def test_the_first_part_of_a_name_and_nested_yaml_lead_to_the_flat_names(tmp_path):
    with pytest.raises(TypeError, match=r"kl; expected no setting of that name here; use kl_coeff or kl_estimator or"):
        SRLConfig().training(kl={"coeff": 0.1})
    with pytest.raises(TypeError, match=r"neighbors; expected no setting of that name"):
        SRLConfig().replay(neighbors=3)
    path = tmp_path / "run.yaml"
    path.write_text("lora: {rank: 8}\ntraining: {lr: 1e-5}\n")
    parser = argparse.ArgumentParser()
    add_settings(parser)
    with pytest.raises(SettingsError) as caught:
        given_settings(parser.parse_args(["--config", str(path)]))
    assert str(caught.value).splitlines()[1:] == [
        "  lora: write lora_rank without this heading: names are flat",
        "  training: write lr without this heading: names are flat",
    ]


# Each setting that belongs to another: a value, and the settings with which it is read.
BELONGING = {
    "in_flight": (40, {"max_lag": 1, "num_env_runners": 1}),
    "slice_s": (2.0, {"max_lag": 1, "num_env_runners": 1}),
    "late": ("drop", {"max_lag": 1, "num_env_runners": 1}),
    "fsdp_gather_dtype": ("bfloat16", {"fsdp": True, "num_learners": 2, "compute_dtype": "bfloat16"}),
    "lora_alpha": (4.0, {"lora_rank": 4}),
    "lora_targets": (("q_proj",), {"lora_rank": 4}),
    "lora_send": ("merged", {"lora_rank": 4}),
    "dual_clip": (2.0, {"clip_rule": "dual"}),
    "clip_delta": (5.0, {"clip_rule": "two_sided"}),
    "cispo_bounds": ((0.0, 4.0), {"loss": "cispo"}),
    "tis_clip_max": (3.0, {"correction": "sequence_tis", "ratio_level": "sequence"}),
    "correction_window": ((0.1, 2.0), {"correction": "mis"}),
    "sequence_window": ((0.9, 1.1), {"loss": "mis_po"}),
    "kl_in_reward": (True, {"kl_coeff": 0.1}),
    "kl_on_reused": ("weighted", {"kl_coeff": 0.1}),
    "prior_weight": (1.0, {"advantage": "posterior"}),
    "min_surprise": (0.2, {"advantage": "posterior"}),
    "surprise_scale": ("none", {"advantage": "posterior"}),
    "replay_retain_answers": (4, {"replay_retain": 1.0}),
    "replay_retain_window": (4, {"replay_retain": 1.0}),
    "replay_desired_retention": (0.8, {"replay_spacing": "fsrs"}),
    "replay_iterations_per_day": (2.0, {"replay_spacing": "fixed"}),
}


def test_each_setting_that_belongs_to_another_is_listed():
    assert set(BELONGING) == {name for name, row in SETTINGS.items() if row.needs}


@pytest.mark.parametrize("name", BELONGING)
def test_a_setting_is_refused_without_the_one_that_it_belongs_to(config, name):
    value, beside = BELONGING[name]
    default = {"tis_clip_max": {"correction": "none"}}.get(name, {})
    off = config.replay("uniform").copy(copy_frozen=False).update_from_dict({name: value, **default})
    (line,) = config_errors(off)
    needed = SETTINGS[name].needs[0]
    assert line.startswith(f"{name} = {value!r} with {needed} = ") and f"; expected it only with {needed} " in line
    assert config_errors(config.update_from_dict({name: value, **beside})) == []


@pytest.mark.parametrize(("settings", "expected"), [
    ({"replay_spacing": "fsrs", "replay_spacing_config": {"growth": 2}}, "fsrs' has no parameters ['growth']"),
    ({"replay_spacing": "fixed", "replay_spacing_config": {"intervall": 1}}, "did you mean interval?"),
    ({"replay_selection": "uniform", "replay_selection_config": {"kappa": 1}}, "expected none: it has no parameters"),
])  # fmt: skip
def test_a_wrong_parameter_of_a_rule_has_one_line(config, settings, expected):
    (line,) = config_errors(config.update_from_dict(settings))
    assert line.startswith(f"{[*settings][-1]} = ") and expected in line


def test_rules_of_groups_are_refused_with_groups_of_one():
    config = SRLConfig().environment("compare").training(group_size=1, advantage="posterior")
    config.replay(selection="per", selection_config={"alpha": 1.0})
    (line,) = config_errors(config)
    assert line.startswith("replay_selection = 'per' with group_size = 1; expected ")
    config.replay(selection="uniform", selection_config={}, reuse_fraction=0.25, reuse_selection="per")
    (line,) = config_errors(config)
    assert line.startswith("replay_reuse_selection = 'per' with group_size = 1; expected ")
    assert config_errors(config.replay(reuse_selection_config={"by": "reward"})) == []
    assert config_errors(config.training(group_size=2)) == []


REUSED, REVISITED = ({f"replay_{kind}_fraction": 0.1} for kind in ("reuse", "revisit"))
STAGES = [{"env": "compare", "iterations": 1}, {"env": "registers"}]
IDLE = {  # a value, and settings with which it is read
    "replay_reuse_selection": ("per", REUSED), "replay_max_uses": (9, REUSED), "replay_max_age": (9, REUSED),
    "replay_max_logp_gap": (None, REUSED), "kl_on_reused": ("weighted", {**REUSED, "kl_coeff": 0.1}),
    "replay_selection": ("per", REVISITED), "replay_min_recall_interval": (2, REVISITED),
    "replay_domains": ("last", REUSED), "replay_diversity_coeff": (0.4, {**REVISITED, "replay_selection": "srl"}),
    "longest_answer": (9, {"aggregation": "constant"}), "replay_retain": (2.0, {"env": None, "stream": STAGES}),
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_settings_without_effect_are_warned_of(name):
    value, beside = IDLE[name]
    off = {"replay_revisit_fraction": 0.0, "kl_coeff": beside.get("kl_coeff", 0.0)}
    config = SRLConfig().environment("compare").replay("uniform").update_from_dict({**off, name: value})
    assert [line.partition(" has no effect")[0] for line in warnings_of(config)] == [f"{name} = {value!r}"]
    drawn = config.update_from_dict(beside)
    assert warnings_of(drawn) == [] and config_errors(drawn) == []


def test_warnings_have_the_users_names_and_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr("rllib_srl.algorithm.settings._warned", set())
    config = SRLConfig().environment("compare", env_config={"num_shots": 0}).rl_module(model_config={"model": "tiny"})
    config.replay("uniform", history_half_life=3.0, spacing="fixed")
    config.env_runners(max_turn_tokens=8, max_episode_tokens=128)
    with caplog.at_level(logging.WARNING, "rllib_srl"):
        config.validate()
        config.copy(copy_frozen=False).validate()  # as a run does
    starts = "replay_history_half_life = 3.0 changes metrics only", "replay_spacing = 'fixed' with replay_selection = "
    found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("replay_")]
    assert len(found) == 2 and all(line.startswith(start) for line, start in zip(found, starts, strict=True))
    assert warnings_of(SRLConfig().environment("compare")) == []


@pytest.mark.parametrize("given", [{"spacing": "fsrs"}, {"diversity_coeff": 0.5}, {"retain": 1.0}])
def test_a_default_that_a_named_memory_replaces_is_warned_of_if_given_again(given):
    (name, value), config = next(iter(given.items())), SRLConfig().environment("compare")
    (line,) = warnings_of(config.copy().replay("uniform", **given))
    assert line.startswith(f"replay_{name} = {value!r} ")
    assert warnings_of(config.replay(**{**given, "selection": "uniform"})) == []
    (line,) = warnings_of(config.replay(retain_answers=8))
    assert line.startswith("replay_retain_answers = 8 has no effect without a stream")
