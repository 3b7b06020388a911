"""Settings with parameters and former names: every way to give them, by value."""

from __future__ import annotations

import pickle

import pytest
import yaml

from rllib_srl import SRLConfig
from rllib_srl.algorithm import settings as tables
from rllib_srl.algorithm.settings import ALIASES, FLAT, GROUPS, RENAMED_VALUES, SETTINGS, folded
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.cli.shared.settings import SettingsError, build_config, read_value

# Values by flat name where changing the default by its type does not give a valid one.
VALUES = {
    "advantage": "mean_only",
    "engine_num_threads": 3,
    "engine_memory_utilization": 0.4,
    "lora_alpha": 8.0,
    "lora_targets": ("q_proj",),
    "cispo_bounds": (0.5, 4.0),
    "tis_clip_max": 3.0,
    "correction": "none",
    "kl_coeff": 0.1,
    "kl_in_reward": True,
    "kl_estimator": "k2",
    "correction_window": (0.4, 3.0),
    "sequence_window": (0.9, 1.1),
    "replay_selection_config": {"temperature": 0.5},
    "replay_spacing_config": {"maximum_interval": 9.0},
    "ratio_anchor": "bypass",
    "replay_max_logp_gap": 0.5,
}


def flat_name(old):
    """Return the flat name of what a former name stands for."""
    setting, _, key = ALIASES[old].partition(".")
    if old in FLAT:
        return old
    return GROUPS[setting].flat[key] if key else setting


def value_of(old):
    name = flat_name(old)
    default = FLAT[name].default
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, tuple):
        return default[:1] if isinstance(default[0], str) else tuple(x * 1.01 for x in default)
    return f"other_{default}" if isinstance(default, str) else default + 1


def read(config, old):
    """Return the value that the package reads."""
    return getattr(config.flat(), flat_name(old))


def method_of(config, old):
    """Return the grouped method that took a former name, and the name there."""
    for part, prefix in (("replay", "replay_"), ("planner", "planner_")):
        if old.startswith(prefix):
            return getattr(config, part), old.removeprefix(prefix)
    return (config.env_runners if old in tables.ENV_RUNNERS else config.training), old


def given_by_method(old, value):
    config = SRLConfig()
    method, name = method_of(config, old)
    return method(**{name: value})


def given_in_old_state(old, value):
    state = {**SRLConfig().get_state(), **{name: FLAT[name].default for name in ALIASES if name in FLAT}}
    return SRLConfig.from_state(pickle.loads(pickle.dumps({**state, old: value})))


def as_text(value):
    return yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True).split("\n...")[0]


WAYS = {
    "method": given_by_method,
    "tune": lambda old, value: SRLConfig().update_from_dict({old: value}),
    "command line": lambda old, value: build_config({old: read_value(old, as_text(value))}),
    "file": lambda old, value: build_config({old: read_value(old, value)}),
    "checkpoint": given_in_old_state,
    "settings.yaml": lambda old, value: build_config(folded({old: value})),
}


@pytest.mark.parametrize("old", ALIASES)
def test_a_former_name_sets_the_new_place_however_it_comes(old, caplog, monkeypatch):
    value = value_of(old)
    readers = FLAT[flat_name(old)].rules
    for way, given in WAYS.items():
        if way == "settings.yaml" and readers:
            continue  # a file of a run has no parameters that its rule does not read
        monkeypatch.setattr(tables, "_warned", set())
        caplog.clear()
        config = given(old, value)
        found = read(config, old)
        assert (tuple(found) if isinstance(found, list) else found) == value, way
        assert getattr(config, old) == found
        lines = [line for line in caplog.messages if line.startswith(f"{old} is the former name of ")]
        assert len(lines) == (way != "settings.yaml"), way
        assert old not in vars(config) and ALIASES[old].partition(".")[0] in vars(config)
        config.copy(copy_frozen=False)
        assert read(SRLConfig().update_from_dict(config.to_dict()), old) == found


def test_a_warning_comes_once(caplog, monkeypatch):
    monkeypatch.setattr(tables, "_warned", set())
    for cap in (2.0, 3.5):
        SRLConfig().training(dual_clip=cap)
    assert caplog.messages == ["dual_clip is the former name of clip_rule={'loss_cap': ...}, which means the same"]


@pytest.mark.parametrize(("name", "old", "new"), [(n, *pair) for n, v in RENAMED_VALUES.items() for pair in v.items()])
def test_former_values_are_replaced(name, old, new):
    assert getattr(SRLConfig().update_from_dict({name: old}), name) == new


@pytest.mark.parametrize("values", [{"clip_rule": {"name": "dual", "loss_cap": 2.0}, "dual_clip": 3.5}])
def test_a_former_name_beside_the_new_form_is_one_error(values):
    for order in (values, dict(reversed(values.items()))):
        with pytest.raises(ValueError, match=r"^dual_clip = 3.5 and clip_rule = \{.*\}; expected one of the two"):
            SRLConfig().training(**order)
        with pytest.raises(SettingsError, match="dual_clip = 3.5 and clip_rule"):
            build_config(order)


def test_a_former_name_joins_the_rule_in_either_order():
    for order in ({"clip_rule": "dual", "dual_clip": 2.0}, {"dual_clip": 2.0, "clip_rule": "dual"}):
        config = SRLConfig().training(**order)
        assert config.clip_rule == {"name": "dual", "loss_cap": 2.0}
        assert folded(order) == {"clip_rule": {"name": "dual", "loss_cap": 2.0}}


def test_a_change_of_a_parameter_keeps_the_rule_of_a_resumed_run():
    earlier = {"clip_rule": "dual", "kl": 0.1}
    assert folded({"dual_clip": 2.0}, earlier)["clip_rule"] == {"name": "dual", "loss_cap": 2.0}
    assert folded({"kl": {"estimator": "k2"}}, earlier)["kl"] == {"coeff": 0.1, "estimator": "k2"}


# --- settings with parameters ----------------------------------------------------------------------


@pytest.fixture
def config(random_llama_dir):
    return SRLConfig().environment("compare").rl_module(model_config={"model": str(random_llama_dir)})


@pytest.mark.parametrize("name", GROUPS)
def test_the_head_alone_means_the_defaults(name):
    group, config = GROUPS[name], SRLConfig()
    head = SETTINGS[name].default
    setattr(config, name, {group.head: head})
    assert vars(config.flat()) | {"_config": 0} == vars(SRLConfig().flat()) | {"_config": 0}


def test_flat_settings_are_few():
    assert len(SETTINGS) <= 110


def test_parameters_reach_the_settings_in_use(config):
    config.training(clip_rule={"name": "dual", "loss_cap": 2.5}, kl={"coeff": 0.1, "estimator": "k2"}, lora=8)
    config.replay(spacing={"name": "sm2", "maximum_interval": 9.0, "desired_retention": 0.8})
    config.replay(selection={"name": "srl", "temperature": 0.0}, diversity={"neighbours": 3})
    config.planner(objective={"name": "recap", "mix": 0.25}, adapt={"name": "revisit", "rate": 0.2})
    assert faults_of(config) == []
    loss, replay, planner = config.loss_settings(), config.replay_settings(), config.planner_settings()
    assert (loss.clip_rule, loss.dual_clip, loss.kl_coeff, loss.kl_estimator) == ("dual", 2.5, 0.1, "k2")
    assert (replay.spacing, replay.spacing_config, replay.desired_retention) == ("sm2", {"maximum_interval": 9.0}, 0.8)
    assert replay.neighbours == 3
    assert (replay.selection_config, replay.reuse_selection_config) == ({"temperature": 0.0}, {})
    assert (planner.objective, planner.recap_mix, planner.adapt, planner.adapt_rate) == ("recap", 0.25, "revisit", 0.2)
    assert (config.lora_rank, config.flat().advantage) == (8, "preset")


REFUSED = [
    ("clip_rule", {"name": "dual", "los_cap": 2.0}, "clip_rule.los_cap = 2.0; expected some of loss_cap; did you mean"),
    ("clip_rule", {"name": "higher", "loss_cap": 3.0}, "expected it only with clip_rule = 'dual', not 'higher'"),
    ("clip_rule", {"name": "dual", "loss_cap": 1}, "clip_rule.loss_cap = 1; expected a number above 1"),
    ("replay_spacing", {"name": "sm2", "growth": 2}, "replay_spacing.growth = 2; expected some of desired_retention"),
    ("replay_spacing", {"name": "sm2", "maximal_interval": 1}, "did you mean maximum_interval?"),
    ("replay_selection", {"name": "uniform", "kappa": 1}, "replay_selection.kappa = 1; expected some of "),
    ("replay_diversity", {"neighbours": 0}, "replay_diversity.neighbours = 0; expected an integer of at least 1"),
    ("planner_adapt", {"name": "revisit", "min_ess": 0.5}, "planner_adapt.min_ess = 0.5; expected it only with"),
    ("kl", -0.1, "kl = -0.1; expected a number of at least 0"),
    ("replay_neighbours", 0, "replay_neighbours = 0; expected an integer of at least 1"),
    ("replay_early", 3, "replay_early = 3; expected True or False"),
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_a_wrong_parameter_has_one_line_in_the_name_that_was_given(config, name, value, expected):
    (line,) = faults_of(config.update_from_dict({name: value}))
    assert expected in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sm2"], "sm2"),
        (["name=sm2", "maximum_interval=9"], {"name": "sm2", "maximum_interval": 9}),
        (['{"name": "sm2", "maximum_interval": 9}'], {"name": "sm2", "maximum_interval": 9}),
        ({"name": "sm2", "desired_retention": "0.8"}, {"name": "sm2", "desired_retention": 0.8}),
    ],
)
def test_a_flag_takes_a_rule_and_its_parameters(words, expected):
    assert read_value("replay_spacing", words) == expected


def test_a_flag_takes_plain_numbers_and_refuses_others():
    assert read_value("kl", ["0.1"]) == 0.1 and read_value("lora", "8") == 8
    assert read_value("kl", ["coeff=1", "reference_every=5"]) == {"coeff": 1.0, "reference_every": 5}
    with pytest.raises(ValueError, match="reference_every to be a number"):
        read_value("kl", ["reference_every=soon"])
