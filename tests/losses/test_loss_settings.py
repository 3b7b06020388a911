"""Settings of the loss: what presets fill in, what wins, and which contradictions are refused with their reason."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.batch.advantages import ADVANTAGES
from rllib_srl.losses.policy import CLIP_RULES, CORRECTIONS
from rllib_srl.losses.settings import PRESETS, LossSettings

TABLE = LossSettings.table()


# What tells each preset from the defaults, by the names of the papers.
MARKS = {
    None: ("group", "token", "higher", 0.2, 0.28, "token_mean", "decoupled", "tis"),
    "grpo": ("group", "token", "symmetric", 0.2, 0.2, "sequence_mean", "decoupled", "tis"),
    "dr_grpo": ("mean_only", "token", "symmetric", 0.2, 0.2, "constant", "decoupled", "tis"),
    "dapo": ("group", "token", "higher", 0.2, 0.28, "token_mean", "decoupled", "tis"),
    "gspo": ("group", "geometric", "higher", 3e-4, 4e-4, "sequence_mean", "decoupled", "none"),
    "cispo": ("group", "token", "cispo", 0.2, 0.28, "token_mean", "decoupled", "tis"),
    "rloo": ("leave_one_out", "token", "none", 0.2, 0.28, "constant", "decoupled", "tis"),
    "mis_po": ("group", "token", "none", 0.2, 0.28, "token_mean", "decoupled", "mis_po"),
}
NAMES = ("advantage", "ratio_level", "clip_rule", "clip_low", "clip_high", "aggregation", "ratio_anchor", "correction")


@pytest.mark.parametrize("loss", MARKS)
def test_a_preset_is_its_row_and_has_no_error(config, loss):
    settings = config.training(loss=loss).loss_settings()
    assert tuple(getattr(settings, name) for name in NAMES) == MARKS[loss]
    assert config_errors(config) == []
    config.validate()
    assert config.loss_settings() == settings


def test_an_explicit_setting_wins_whatever_the_order(config):
    for order in ({"loss": "gspo", "clip_low": 0.2}, {"clip_low": 0.2, "loss": "gspo"}):
        settings = config.copy(copy_frozen=False).training(**order).loss_settings()
        assert (settings.clip_low, settings.clip_high) == (0.2, 4e-4)  # 0.2 is the default too, and was asked for
    config.training(loss="gspo").validate()
    again = config.copy(copy_frozen=False).training(loss="cispo")
    assert again.loss_settings().ratio_level == "token"  # a checked config has not turned its preset into settings


def test_presets_fill_in_what_is_left_alone(config):
    settings = config.loss_settings()
    beside = {"kl_in_reward": False, "longest_answer": 512}  # worked out from others
    assert {name: getattr(settings, name) for name in TABLE} == {n: row.default for n, row in TABLE.items()} | beside
    dapo = config.copy(copy_frozen=False).training(loss="dapo").loss_settings()
    assert (dapo.dynamic_sampling_tries, dapo.overlong_penalty) == (10, 1.0)
    cispo = config.copy(copy_frozen=False).training(loss="cispo").loss_settings()
    assert cispo.cispo_bounds == (0.0, 5.0)  # the bound itself, not 1 + 5
    mis_po = config.training(loss="mis_po").loss_settings()
    assert (mis_po.correction_window, mis_po.sequence_window) == ((0.5, 2.0), (0.996, 1.001))
    assert (mis_po.kl_coeff, mis_po.kl_estimator) == (1e-3, "k3")


def test_every_preset_sets_settings_that_are_left_to_it():
    assert set(PRESETS) == set(MARKS) - {None}
    left = {name for name, row in TABLE.items() if row.is_preset}
    assert all(set(preset) <= left for preset in PRESETS.values())
    for loss, preset in PRESETS.items():
        LossSettings.made(loss=loss, **preset)  # each value is in its range


def test_the_longest_answer_is_what_the_turns_allow(config):
    assert config.env_runners(max_turns=3, max_turn_tokens=7).loss_settings().longest_answer == 21
    assert config.training(longest_answer=5).loss_settings().longest_answer == 5
    assert config.training(longest_answer=None).env_runners(max_episode_tokens=16).loss_settings().longest_answer == 16


CONTRADICTIONS = [
    ({"loss": "gspo", "correction": "tis"}, "the ratio is per episode, so its correction is too"),
    ({"ratio_level": "sequence"}, "correction = 'tis' with ratio_level = 'sequence'"),
    ({"ratio_anchor": "bypass"}, "correction = 'tis' with ratio_anchor = 'bypass'; expected 'none'"),
    ({"clip_rule": "symmetric", "clip_high": 0.3}, "clip_high = 0.3 with clip_rule = 'symmetric'"),
    ({"clip_rule": "cispo", "clip_low": 0.1}, "clip_low = 0.1 with clip_rule = 'cispo'; expected no clip_low"),
    ({"clip_rule": "two_sided", "clip_delta": 1.2}, "clip_delta = 1.2; expected more than 1 + clip_high"),
    ({"kl_coeff": 0.1, "kl_estimator": "k1", "kl_on_reused": "weighted"}, "k1's gradient has mean 0"),
    ({"kl_coeff": 0.1, "kl_estimator": "k1", "kl_in_reward": False}, "expected another estimator: k1's gradient"),
    ({"kl_coeff": 0.1, "kl_estimator": "k3_k2", "kl_in_reward": True}, "expected one of 'k1', 'k2', 'k3': it differs"),
    ({"kl_coeff": 0.1, "kl_in_reward": True, "kl_on_reused": "weighted"}, "expected kl_in_reward = False"),
]


@pytest.mark.parametrize(("settings", "reason"), CONTRADICTIONS)
def test_contradictions_are_refused_with_the_reason(config, settings, reason):
    assert any(reason in line for line in config_errors(config.update_from_dict(settings)))
    with pytest.raises(ValueError, match="SRLConfig is invalid"):
        config.validate()


@pytest.mark.parametrize("settings", [
    {"loss": "gspo", "correction": "sequence_mask"}, {"ratio_anchor": "bypass", "correction": "none"},
    {"kl_coeff": 0.1, "kl_estimator": "k1"}, {"kl_coeff": 0.1, "kl_estimator": "k2", "kl_in_reward": True},
    {"clip_rule": "symmetric", "clip_low": 0.3, "clip_high": 0.3},
])  # fmt: skip
def test_what_fits_together_passes(config, settings):
    assert config_errors(config.update_from_dict(settings)) == []


def test_the_document_of_losses_names_every_one_of_them():
    """A name without a row in docs/losses.md is one that nobody finds."""
    text = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    rows = " ".join(line for line in text.splitlines() if line.startswith("|"))
    tables = (CLIP_RULES, CORRECTIONS, ADVANTAGES, PRESETS)
    choices = [row.kind for row in TABLE.values() if get_origin(row.kind) is Literal]
    names = {name for table in (*tables, *map(get_args, choices)) for name in table} - {"off", "weighted"}
    settings = set(TABLE) - {"loss", "longest_answer", "correction_window", "sequence_window"}
    settings -= {"clip_low", "clip_high", "dual_clip", "clip_delta", "cispo_bounds", "tis_clip_max"}
    assert [name for name in sorted({*names, *settings} - {"kl_coeff"}) if f"`{name}`" not in rows] == []
    assert [name for name in TABLE if name not in text] == []


def test_a_rule_registered_here_is_refused_where_learners_are_other_processes(config, monkeypatch):
    monkeypatch.setitem(CLIP_RULES, "mine", CLIP_RULES["none"])
    assert config_errors(config.training(clip_rule="mine").learners(num_learners=0)) == []
    (line,) = config_errors(config.learners(num_learners=1))
    assert line.startswith("clip_rule = 'mine', registered in this process, with num_learners = 1; expected its import")
    assert config_errors(config.training(clip_rule="rllib_srl.losses.policy:CLIP_RULES")) != []
    assert config_errors(config.training(clip_rule="tests.learner.test_losses_in_the_learner:doubled")) == []
