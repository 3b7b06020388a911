"""srl tune: studies are listed; searches are checked, and run side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllib_srl.cli import tune
from rllib_srl.cli.tuning import search as study_search
from rllib_srl.tune_configs import Search
from tests.cli.conftest import TINY

SEARCHES = sorted(name for name in tune.studies() if isinstance(tune.load(name), Search))


def test_studies_are_listed_with_their_questions(capsys: pytest.CaptureFixture) -> None:
    assert tune.main([]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert dict(listed)["learning_rate"].startswith("At which learning rate does a small model learn")
    assert all(question.endswith("?") for question in tune.studies().values())


def searched(name: str, **given: object) -> Search:
    search = tune.load(name)
    assert isinstance(search, Search)
    return study_search.with_settings(search, given)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_is_valid_and_varies_what_it_says(name: str) -> None:
    study = searched(name)
    assert all("grid_search" in getattr(study.param_space, varied) for varied in study.varied)
    num_trials, needed = study_search.checked_trials(study)
    assert num_trials >= 2 and needed["CPU"] > 0
    for iterations in (2, study.iterations):
        assert study.scheduler is None or study.scheduler(iterations).metric == "env_runners/episode_return_mean"
    assert not study.metric.startswith("evaluation/") or study.param_space.evaluation_interval == study.iterations


def test_flags_replace_what_is_varied() -> None:
    study = searched("learning_rate", lr=1e-5, iterations=3, model="tiny")
    assert (study.varied, study.iterations, study.param_space.evaluation_interval) == (("seed",), 3, 3)
    assert study_search.checked_trials(study) == (2, {"CPU": 2.0})


def test_trials_at_once_are_bounded_by_the_scarcest_resource() -> None:
    assert study_search.num_at_once({"CPU": 0.5, "GPU": 1.0}, {"CPU": 16.0, "GPU": 3.0}) == 3
    assert study_search.num_at_once({"CPU": 0.1}, {"CPU": 0.3}) == 3
    assert study_search.num_at_once({"GPU": 1.0}, {"CPU": 16.0}) == 0


def test_a_line_names_the_settings_that_led_to_its_result(capsys: pytest.CaptureFixture) -> None:
    copied = SimpleNamespace(config={"lr": 9e-5})  # the trial has just copied another: Tune's scheduler hears first
    result = {"config": {"lr": 1e-4}, "training_iteration": 6, "env_runners": {"episode_return_mean": 0.5}}
    study_search.Lines(replace(searched("learning_rate"), varied=("lr",))).on_trial_result(6, [], copied, result)
    assert capsys.readouterr().out == "lr=0.0001: iteration 6/10  reward 0.50\n"


@pytest.mark.slow
def test_two_trials_run_at_once_and_resume_keeps_them(ray_here, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    # One process a trial: a CPU each, so that both fit the two there are.
    flags = [*TINY[:-2], "--iterations", "2", "--evaluation_duration", "20", "--storage", str(tmp_path), "--debug"]
    assert tune.main(["learning_rate", *flags]) == 0
    shown = capsys.readouterr().out
    assert "2 trials, each 2 iterations on 1 CPU; 2 in parallel" in shown
    assert "seed=1: iteration 2/2" in shown and "seed=2: iteration 2/2" in shown
    rows = [row.split() for row in shown.splitlines() if row.strip().startswith(("1 ", "2 "))]
    assert sorted(row[0] for row in rows[1:]) == ["1", "2"] and all(0 < float(row[1]) <= 1 for row in rows[1:])
    assert tune.main(["learning_rate", *flags, "--resume"]) == 0
    assert "iteration 1/2" not in capsys.readouterr().out
