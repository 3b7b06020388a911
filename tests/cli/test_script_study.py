"""A study end to end: killed in the middle, resumed without repeating a trial, and reported."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.tune import Trainable
from ray.tune.result import SHOULD_CHECKPOINT

from rllib_srl.cli import report
from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.tuning import study as study_run
from rllib_srl.cli.tuning import tune
from rllib_srl.cli.tuning.plan import Plan
from rllib_srl.storage.checkpoints import CheckpointError, seal
from rllib_srl.storage.seal_key import make_key
from rllib_srl.studies.recording import write_study
from rllib_srl.studies.results import Results, read_results
from rllib_srl.studies.trial import CONFIG, run_path
from tests.cli.killing import killed_when
from tests.studies.synthetic import small_study, write_synthetic

PATIENCE_S = 600  # for the first finished trial, on two busy cores


def is_between_trials(directory: Path) -> bool:
    if not (directory / "study.json").exists():
        return False
    trials = read_results(directory).trials
    return any(trial.is_finished for trial in trials) and any(not trial.is_finished for trial in trials)


def finished_files(results: Results) -> dict[str, bytes]:
    return {trial.path.name: trial.path.read_bytes() for trial in results.trials if trial.is_finished}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_study_is_killed_resumed_and_reported(ray_here, tmp_path, capsys):
    directory = tmp_path / "replay_short"
    command = ["-m", "rllib_srl.cli", "tune", "replay", "--short", "--storage", str(tmp_path)]
    killed_when(command, lambda: is_between_trials(directory), PATIENCE_S)
    before = finished_files(read_results(directory))
    assert 1 <= len(before) <= 3
    assert tune.main(["replay", "--short", "--storage", str(tmp_path)]) == 1
    assert "already has this study" in capsys.readouterr().err
    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume", "--max-turns", "5"]) == 1
    assert "holds another study" in capsys.readouterr().err

    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume", "--debug"]) == 0
    shown = capsys.readouterr().out
    assert f"{4 - len(before)} of 4 trials to run" in shown
    assert "uniform" in shown and "primary comparison" in shown
    for name in before:  # no line of progress about a trial that was finished
        arm, _, seed = name.removesuffix(".jsonl").partition("--")
        assert f"{arm} seed {seed}:" not in shown
    results = read_results(directory)
    assert [(trial.header.arm, trial.header.seed, trial.is_finished) for trial in results.trials] == [
        (arm, seed, True) for arm in ("uniform", "no_replay") for seed in (1, 2)
    ]
    after = finished_files(results)
    assert {name: after[name] for name in before} == before
    for trial in results.trials:
        assert [row.stage for row in trial.rows] == [-1, -1, 0, 0, 1, 1]
        assert results.study.budget <= trial.rows[-1].num_generated_tokens < results.study.budget * 1.5
        assert all(row.num_prompts == 16 for row in trial.rows)
    first = {(t.header.arm, t.header.seed): [row.accuracy for row in t.rows[:2]] for t in results.trials}
    for seed in (1, 2):  # the same model answers the same held-out prompts
        assert first["uniform", seed] == first["no_replay", seed]
    assert not list((directory / "runs").glob("*"))

    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume"]) == 0
    assert "all trials are finished" in capsys.readouterr().out
    assert report.main([str(directory)]) == 0
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "uniform replay" in page and "no replay" in page and "generated tokens" in page


@pytest.mark.slow
def test_bad_input_of_a_study_is_one_clear_error_before_anything_starts(tmp_path, capsys):
    def refusal(*words: str) -> str:
        assert tune.main([*words, "--storage", str(tmp_path)]) == 1
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().err

    assert "arm 'unifrom' is unknown" in refusal("replay", "--arms", "unifrom")
    assert "group_size = 1; expected" in refusal("replay", "--group_size", "1")
    assert "has no study to resume" in refusal("replay", "--resume")


def test_the_answer_shows_every_arm_the_verdict_and_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: None)
    study = small_study(seeds=range(1, 8), arms=("srl", "no_replay"))
    write_synthetic(tmp_path, study, skip=[("no_replay", 7)])
    study_run.show(Plan(study, ("srl", "no_replay"), study.seeds, tmp_path))
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1] for line in shown.splitlines() if line.startswith("  ")}
    assert (rows["srl"], rows["no_replay"]) == ("7/7", "6/7")
    assert "primary comparison, srl against no_replay: undecided" in shown
    assert "no replay: 1 of 7 trials are not finished" in shown
    assert f"report: {command('report', tmp_path)}" in shown


def test_studies_are_listed_with_their_questions(capsys):
    assert tune.main([]) == 0
    assert "  replay  " in capsys.readouterr().out
    assert all(question.endswith("?") for question in tune.studies().values())


def test_trials_at_once_are_bounded_by_the_scarcest_resource():
    assert study_run.num_at_once({"CPU": 0.5, "GPU": 1.0}, {"CPU": 16.0, "GPU": 3.0}) == 3
    assert study_run.num_at_once({"CPU": 0.1}, {"CPU": 0.3}) == 3 and study_run.num_at_once({"GPU": 1.0}, {}) == 0


class Begun(Exception):
    """The study has come to the point where Ray starts."""


@pytest.mark.parametrize(("key", "is_refused"), [(None, True), (b"o" * 32, True), ("own", False)])
def test_checkpoints_of_others_are_refused_before_anything_starts(tmp_path, monkeypatch, key, is_refused):
    def begin(verbose):
        raise Begun

    study = small_study(seeds=(1,), arms=("srl", "no_replay"))
    plan = Plan(study, ("srl", "no_replay"), (1,), tmp_path)
    write_study(tmp_path, study)
    monkeypatch.setattr(tune, "planned", lambda *_: plan)
    monkeypatch.setattr(study_run, "start_ray", begin)
    path = run_path(tmp_path, "no_replay", 1) / "checkpoint_000002"
    path.mkdir(parents=True)
    (path / "state").write_bytes(b"weights")
    seal(path, {}, make_key() if key == "own" else key)
    words = ["replay", "--resume", "--storage", str(tmp_path)]
    with pytest.raises(CheckpointError if is_refused else Begun) as caught:
        tune.run(tune.parse(words))
    if is_refused:
        told = str(caught.value)
        assert f"checkpoint {path} " in told and "pass --trust-checkpoint" in told and "\n" not in told
    with pytest.raises(Begun):
        tune.run(tune.parse([*words, "--trust-checkpoint"]))


@pytest.mark.parametrize("trust", [False, True])
def test_trials_take_the_trust_that_was_given(tmp_path, monkeypatch, trust):
    study = small_study(seeds=(1,), arms=("srl", "no_replay"))
    configs = []
    monkeypatch.setattr(study_run, "config_of", lambda plan, arm, seed, directory, trust: (arm, trust))
    monkeypatch.setattr(study_run, "fit", lambda asked, *_: configs.extend(asked) or SimpleNamespace(errors=[]))
    plan = Plan(study, ("srl", "no_replay"), (1,), tmp_path)
    assert study_run.play(plan, plan.trials(), study_run.Run(False, trust, False, 1)) == []
    assert configs == [("srl", trust), ("no_replay", trust)]


class Mortal(Trainable):
    """Takes three steps and notes each in a file; the process dies once, in the second."""

    def setup(self, config):
        self.told, self.at = config[CONFIG], 0
        self.notes = Path(self.told["notes"])

    def step(self):
        self.at += 1
        has_died = self.notes.with_suffix(".died")
        if self.at == 2 and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with self.notes.open("a") as file:
            file.write(f"{self.at}\n")
        return {"done": self.at == 3, SHOULD_CHECKPOINT: True}

    def save_checkpoint(self, directory):
        (Path(directory) / "at").write_text(str(self.at))

    def load_checkpoint(self, directory):
        self.at = int((Path(directory) / "at").read_text())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_trial_that_dies_once_goes_on_from_its_checkpoint(ray_here, tmp_path, monkeypatch):
    monkeypatch.setattr(study_run, "StudyTrial", Mortal)
    told = {"_study": {"arm": "replay", "seed": 1}, "notes": str(tmp_path / "notes")}
    results = study_run.fit([told], tmp_path / "tune", "run", [], False, 1)
    assert (tmp_path / "notes").read_text().split() == ["1", "2", "3"] and not results.errors
