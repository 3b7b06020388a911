"""Studies as they are written down: every one can be run, says what differs, and refuses what does not fit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.tuning import tune
from rllib_srl.cli.tuning.tune import config_of, errors_of_trials, planned, shortened
from rllib_srl.studies.records import read_study, write_study

COMPARISONS = {name: tune.load(name) for name in tune.studies()}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_study_asks_one_question_of_arms_at_an_equal_budget(name, tmp_path):
    study = COMPARISONS[name]
    assert study.name == name and study.errors() == [] and study.question.endswith("?") and len(study.answered_by) > 80
    assert study.question == tune.studies()[name]
    assert len({json.dumps(arm.settings, sort_keys=True) for arm in study.arms}) == len(study.arms)
    if "stream" in study.settings:
        assert sum(stage["tokens"] for stage in study.settings["stream"]) == study.budget
    assert not any("stream" in arm.settings or "model" in arm.settings for arm in study.arms)
    assert errors_of_trials(study) == []
    write_study(tmp_path, study)
    assert read_study(tmp_path).fingerprint == study.fingerprint


def test_a_trial_gets_the_settings_of_study_arm_and_seed(tmp_path):
    plan = planned(COMPARISONS["replay"], {"model": "tiny", "max_turns": 5}, tmp_path)
    config = config_of(plan, "fifo", 3)
    assert (config["max_turns"], config["seed"], config["replay_selection"]) == (5, 3, "fifo")
    assert config["checkpoint_every"] == 0  # the trial writes its own
    assert config["_study"] == {"directory": str(tmp_path), "arm": "fifo", "seed": 3, "checkpoint_every": 10}
    assert plan.trials()[: len(plan.arms)] == [(arm, 1) for arm in plan.arms]


def refusal(*args, study="replay", **changes) -> str:
    with pytest.raises(RunError) as caught:
        planned(COMPARISONS[study], changes.pop("given", {}), Path("nowhere"), **changes)
    return str(caught.value)


def test_bad_input_is_one_clear_error():
    both = refusal(arms=["unifrom"], seeds=[99])
    assert "arm 'unifrom' is unknown; expected some of uniform, no_replay" in both and "did you mean uniform?" in both
    assert "seed 99 is unknown; expected some of 1, 2, 3, 4, 5, 6" in both
    errors = replace(COMPARISONS["replay"], budget=5).errors()
    assert "expected 5 stages in tokens that sum to the budget of 5" in errors[0]
    assert "group_size = 1; expected" in refusal(given={"group_size": 1})
    varied = refusal(given={"replay_selection": "per"})
    assert "replay_selection: set by the arms (balanced, fifo, high_reward, per, srl)" in varied
    assert "seed: fixed by the study; expected --seeds" in refusal(given={"seed": 3})


def test_a_typo_in_the_settings_of_an_arm_names_the_arm_and_the_setting():
    study = COMPARISONS["replay"]
    arms = [replace(arm, settings={**arm.settings, "replay_capasity": 3}) if arm.name == "uniform" else arm
            for arm in study.arms]  # fmt: skip
    (error,) = errors_of_trials(replace(study, arms=tuple(arms)))
    assert error == "arm uniform: replay_capasity = 3; expected no setting of that name; did you mean replay_capacity?"


def test_a_short_study_has_two_arms_two_seeds_and_two_stages():
    for study in COMPARISONS.values():
        short = shortened(study).checked()
        assert (len(short.arms), len(short.seeds), short.num_stages, short.budget) == (2, 2, 2, 1600)
        assert short.fingerprint != study.fingerprint and errors_of_trials(short) == []
