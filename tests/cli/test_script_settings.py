"""Settings from YAML and flags: types, order, and refusals that name everything at once."""

from pathlib import Path

import pytest

from rllib_srl.algorithm.settings import SETTINGS
from rllib_srl.cli import train
from rllib_srl.cli.shared import settings
from rllib_srl.cli.shared.settings import SettingsError, build_config, given_settings, read_value
from scripts import settings_doc


def given(*argv: str) -> dict:
    return given_settings(train.main.parse(list(argv)))


def test_help_names_every_setting_with_its_default_and_meaning(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        train.main.parse(["--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for name in {*SETTINGS} - {"log_directory"}:
        assert f"--{name} " in shown
    assert "--clip_high VALUE upper clip bound of the ratio is 1 + clip_high (default: 0.28)" in shown
    assert "sets its loss, groups and memory" in shown and "preset of the loss alone: grpo" in shown
    assert "settings of the environment, such as num_shots=4 (default: {})" in shown
    assert "(default: smollm2-135m)" in shown and "(default: none)" in shown
    assert "--log_directory" not in shown


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "3e-5", 3e-5), ("lr", [[0, 1e-5], [100, 0]], [[0, 1e-5], [100, 0]]), ("lr", 1, 1.0),
        ("group_size", "16", 16), ("colocate", "true", True),
        ("max_episode_tokens", "none", None), ("clip_high", "1", 1.0), ("clip_high", "preset", "preset"),
        ("clip_rule", "none", "none"), ("correction_window", "[0.5, 2]", (0.5, 2)), ("seed", "7", 7),
        ("model", "123", "123"),
        ("env_config", ["num_numbers=2", "pool=[1, 2]"], {"num_numbers": 2, "pool": [1, 2]}),
        ("env_config", '{"num_numbers": 2}', {"num_numbers": 2}),
        ("envs", ["compare={num_numbers: 2}", "lookup={}"], {"compare": {"num_numbers": 2}, "lookup": {}}),
        ("mixture", {"compare": 0.5}, {"compare": 0.5}),
        *(("env_config", [f"given={text}"], {"given": text}) for text in (
            "End with #### and it.", "a\nb", "Question: {question}\nAnswer:", "Note: be brief.", "007", "yes", "12:30",
            "- one", "*bold*", "", "~")),
        *(("env_config", [f"given={text}"], {"given": value}) for text, value in (
            ('"a\\nb: c"', "a\nb: c"), ("'7'", "7"), ("-.5e1", -5.0), ("0", 0), ("True", True), ("none", None))),
    ],
)  # fmt: skip
def test_values_take_the_type_of_their_setting(name: str, text: object, value: object) -> None:
    read = read_value(name, text)
    assert read == value and type(read) is type(value)


def test_all_values_of_a_wrong_kind_are_named_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        given("--group_size", "many", "--check_resources", "maybe", "--env_config", "num_numbers", "--lr", "1e-5")
    assert str(caught.value).splitlines() == [
        "invalid settings:",
        "  env_config = ['num_numbers']; expected name=value pairs, or one JSON object",
        "  group_size = 'many'; expected an integer of at least 2, or of 1 with advantage = 'posterior' or 'none'",
        "  check_resources = 'maybe'; expected True or False",
    ]


def test_flags_go_before_the_file_and_dashes_are_underscores(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("env: compare\nenv_config: {num_numbers: 2}\nlr: 3e-5\ngroup_size: 4\niterations: 7\n")
    values = given("--config", str(path), "--group-size", "16", "--kl_coeff=0.1")
    in_file = {"env": "compare", "env_config": {"num_numbers": 2}, "lr": 3e-5, "iterations": 7}
    assert values == {**in_file, "group_size": 16, "kl_coeff": 0.1}
    assert train.main.parse(["--lr", "-1e-5", "--seed", "3"]).lr == "-1e-5"  # a value, and not a flag


def test_the_document_of_settings_is_current() -> None:
    assert settings_doc.main(["--check"]) == 0, "run python scripts/settings_doc.py"
    names = {line.split("`")[1] for line in settings_doc.document().splitlines() if line.startswith("| `")}
    assert names >= {*SETTINGS}


def test_every_default_is_that_of_a_new_config() -> None:
    config = build_config({})
    for name, row in settings.all_settings().items():
        if name not in ("model", "callbacks", *settings.RunSettings.table(), *settings.SHORTHANDS):
            assert getattr(config, name) == row.initial, name
