"""What a user names is found in the current directory, kept as an absolute file, and belongs to the sealed code."""

import sys
from pathlib import Path

import pytest

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.cli import train
from rllib_srl.cli.shared.settings import build_config, given_settings
from rllib_srl.common.environments import resolve
from rllib_srl.common.loading import (
    LoadError,
    functions_in,
    load,
    load_function,
    with_whole_paths,
    with_whole_rules,
    without_users_rules,
)
from rllib_srl.common.rules import Rules
from rllib_srl.losses.policy import CLIP_RULES

ENV = "class Env:\n    def __init__(self, env_config):\n        self.c = env_config\n"
RULE = "def double(x, settings=None):\n    return 2 * x\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with my_rule.py and my_env.py."""
    (tmp_path / "my_rule.py").write_text(RULE)
    (tmp_path / "my_env.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("form", ["my_rule:double", "my_rule.py:double", "{here}/my_rule.py:double"])
def test_a_rule_and_a_reward_are_found_in_the_same_ways(here: Path, form: str) -> None:
    rules, name = Rules("kind", {"single": lambda x: x}), form.format(here=here)
    assert rules.error(name) == "" and rules.named(name)(4) == 8
    assert load_function(name) is rules.named(name)  # one file is imported once


@pytest.mark.parametrize("form", ["my_env:Env", "my_env.py:Env"])
def test_an_environment_is_found_too(here: Path, form: str) -> None:
    assert resolve(form)({"a": 1}).c == {"a": 1}


def test_a_file_of_the_current_directory_comes_before_an_installed_module(here: Path) -> None:
    (here / "colorsys.py").write_text(RULE)
    assert load("colorsys:double")(3) == 6
    with pytest.raises(LoadError, match=r"colorsys has no 'hls_to_rgb'; it has double"):
        load("colorsys:hls_to_rgb")


def test_a_missing_module_says_where_it_was_looked_for(here: Path) -> None:
    said = Rules("kind", {}).error("my_rulle:double")
    assert said.endswith(f"no module 'my_rulle', neither in the current directory {here} nor installed")
    (here / "needy.py").write_text("import not_there_\n")
    assert Rules("kind", {}).error("needy:f").endswith("imported: ModuleNotFoundError: No module named 'not_there_'")


def test_settings_keep_the_absolute_file(here: Path) -> None:
    whole = f"{here}/my_rule.py:double"
    given = {
        "clip_rule": "my_rule:double",
        "correction": "my_rule.py:double",
        "regularisers": {"my_rule:double": {"coeff": 1.0}, "l2": 0.1, "contrib.greso:x": 1.0},
        "replay_admit": ["secrets", "my_rule:double"],
        "replay_selection": "math:sqrt",
        "seed": 1,
    }
    expected = {**given, "clip_rule": whole, "correction": whole, "replay_admit": ["secrets", whole]}
    expected["regularisers"] = {whole: {"coeff": 1.0}, "l2": 0.1, "contrib.greso:x": 1.0}
    assert with_whole_rules(given) == expected == with_whole_paths(given)
    assert functions_in(expected) == [whole, "math:sqrt"]
    assert with_whole_paths({"reward": "my_rule:double"}) == {"reward": whole}


def test_code_that_a_checkpoint_must_list() -> None:
    settings = {"env": "my_env.py:Env", "envs": {"a": {"reward": "r:f"}, "b:W": {}}, "advantage": "contrib.x:y"}
    assert functions_in(settings) == ["b:W", "my_env.py:Env", "r:f"]


def test_a_run_that_does_not_train_has_none_of_the_users_rules() -> None:
    given = {"clip_rule": "a.py:f", "advantage": "mean_only", "regularisers": {"a:R": 1.0}, "seed": 1}
    assert without_users_rules(given) == {"clip_rule": "higher", "advantage": "mean_only", "seed": 1}


def test_a_rule_of_the_command_line_is_found_again_from_another_directory(here: Path, monkeypatch) -> None:
    words = ["--env", "compare", "--model", "tiny", "--max_episode_tokens", "256", "--clip_rule", "my_rule:double"]
    values = given_settings(train.main.parse(words))
    assert values["clip_rule"] == f"{here}/my_rule.py:double"
    (other := here / "other").mkdir()
    monkeypatch.chdir(other)
    config = build_config(values)
    assert config_errors(config) == [] and CLIP_RULES.named(config.clip_rule)(21, None) == 42
