"""Settings with parameters: every way to give them, by value."""

from __future__ import annotations

import argparse
import re

import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.settings import FLAT, GROUPS, SETTINGS, folded, place_of
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.cli.shared.flags import add_settings
from rllib_srl.cli.shared.settings import SettingsError, given_settings, read_value


def test_a_parameter_by_its_flat_name_is_refused_with_its_place():
    for name in filter(place_of, FLAT):
        with pytest.raises(ValueError, match=rf"^{name} = 3; expected {re.escape(place_of(name))}$"):
            SRLConfig().update_from_dict({name: 3})
        assert name not in vars(SRLConfig()) and getattr(SRLConfig(), name) in (FLAT[name].initial, {})


def test_methods_and_files_say_where_a_parameter_is(tmp_path):
    with pytest.raises(TypeError, match=r"kl_coeff; .*use kl=\{'coeff': \.\.\.\}"):
        SRLConfig().training(kl_coeff=0.1)
    with pytest.raises(TypeError, match=r"neighbors; expected no setting of that name"):
        SRLConfig().replay(neighbors=3)
    path = tmp_path / "run.yaml"
    path.write_text("dual_clip: 2.0\n")
    parser = argparse.ArgumentParser()
    add_settings(parser)
    with pytest.raises(SettingsError, match=r"dual_clip: use clip_rule=\{'loss_cap': \.\.\.\}"):
        given_settings(parser.parse_args(["--config", str(path)]))


def test_a_change_of_a_parameter_keeps_the_rule_of_a_resumed_run():
    earlier = {"clip_rule": "dual", "kl": 0.1}
    assert folded({"clip_rule": {"loss_cap": 2.0}}, earlier)["clip_rule"] == {"name": "dual", "loss_cap": 2.0}
    assert folded({"kl": {"estimator": "k2"}}, earlier)["kl"] == {"coeff": 0.1, "estimator": "k2"}


# --- settings with parameters ----------------------------------------------------------------------


@pytest.fixture
def config(random_llama_dir):
    return SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})


def test_the_head_alone_means_the_defaults():
    for name, group in GROUPS.items():
        config = SRLConfig()
        setattr(config, name, {group.head: SETTINGS[name].initial})
        assert vars(config.flat()) | {"_config": 0} == vars(SRLConfig().flat()) | {"_config": 0}


def test_settings_are_few():
    assert len(FLAT) <= 160


def test_parameters_reach_the_settings_in_use(config):
    config.training(clip_rule={"name": "dual", "loss_cap": 2.5}, kl={"coeff": 0.1, "estimator": "k2"}, lora=8)
    config.replay(spacing={"name": "fixed", "interval": 9.0, "desired_retention": 0.8})
    config.replay(selection={"name": "srl", "temperature": 0.0}, diversity={"coeff": 3.0})
    assert faults_of(config) == []
    loss, replay = config.loss_settings(), config.replay_settings()
    assert (loss.clip_rule, loss.dual_clip, loss.kl_coeff, loss.kl_estimator) == ("dual", 2.5, 0.1, "k2")
    assert (replay.spacing, replay.spacing_config, replay.desired_retention) == ("fixed", {"interval": 9.0}, 0.8)
    assert replay.diversity_coeff == 3.0
    assert (replay.selection_config, replay.reuse_selection_config) == ({"temperature": 0.0}, {})
    assert (config.lora_rank, config.flat().advantage) == (8, "preset")


REFUSED = [
    ("kl", {"coef": 0.1}, "kl.coef = 0.1; expected some of coeff, estimator, "),
    ("clip_rule", {"name": "dual", "los_cap": 2.0}, "clip_rule.los_cap = 2.0; expected some of loss_cap; did you mean"),
    ("clip_rule", {"name": "higher", "loss_cap": 3.0}, "expected it only with clip_rule = 'dual', not 'higher'"),
    ("clip_rule", {"name": "dual", "loss_cap": 1}, "clip_rule.loss_cap = 1; expected a number above 1"),
    ("replay_spacing", {"name": "fsrs", "growth": 2}, "replay_spacing.growth = 2; expected some of desired_retention"),
    ("replay_spacing", {"name": "fixed", "intervall": 1}, "did you mean interval?"),
    ("replay_selection", {"name": "uniform", "kappa": 1}, "replay_selection.kappa = 1; expected some of "),
    ("replay_diversity", {"coeff": -1}, "replay_diversity.coeff = -1; expected a number of at least 0"),
    ("kl", -0.1, "kl = -0.1; expected a number of at least 0"),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_a_wrong_parameter_has_one_line_in_the_name_that_was_given(config, name, value, expected):
    (line,) = faults_of(config.update_from_dict({name: value}))
    assert expected in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fsrs"], "fsrs"),
        (["name=fixed", "interval=9"], {"name": "fixed", "interval": 9}),
        (['{"name": "fixed", "interval": 9}'], {"name": "fixed", "interval": 9}),
        ({"name": "fsrs", "desired_retention": "0.8"}, {"name": "fsrs", "desired_retention": 0.8}),
    ],
)
def test_a_flag_takes_a_rule_and_its_parameters(words, expected):
    assert read_value("replay_spacing", words) == expected


def test_a_flag_takes_plain_numbers_and_refuses_others():
    assert read_value("kl", ["0.1"]) == 0.1 and read_value("lora", "8") == 8
    assert read_value("kl", ["coeff=1", "estimator=k2"]) == {"coeff": 1.0, "estimator": "k2"}
