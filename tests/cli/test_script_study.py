"""A study end to end: killed in the middle, resumed without repeating a trial, and reported."""

from pathlib import Path

import pytest

from rllib_srl.cli import report
from rllib_srl.cli.tuning import stream, tune
from rllib_srl.studies.records import Results, read_results
from tests.cli.killing import killed_when

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
    assert tune.main(["replay", "--storage", str(tmp_path / "none"), "--resume"]) == 1
    assert "has no study to resume" in capsys.readouterr().err
    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume", "--max-turns", "5"]) == 1
    assert "holds another study" in capsys.readouterr().err

    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume", "--debug"]) == 0
    shown = capsys.readouterr().out
    assert f"{4 - len(before)} of 4 trials to run" in shown
    assert "uniform replay" in shown and "Undecided" in shown and f" report {directory}" in shown
    for name in before:  # no line of progress about a trial that was finished
        arm, _, seed = name.removesuffix(".jsonl").partition("--")
        assert f"{arm} seed {seed}:" not in shown
    results = read_results(directory)
    assert [(trial.arm, trial.seed, trial.is_finished) for trial in results.trials] == [
        (arm, seed, True) for arm in ("uniform", "no_replay") for seed in (1, 2)
    ]
    after = finished_files(results)
    assert {name: after[name] for name in before} == before
    for trial in results.trials:
        assert [one.stage for one in trial.evaluations] == [-1, 0, 1]
        assert results.study.budget <= trial.evaluations[-1].num_generated_tokens < results.study.budget * 1.5
    first = {(trial.arm, trial.seed): trial.evaluations[0].accuracy for trial in results.trials}
    for seed in (1, 2):  # the same model answers the same held-out prompts
        assert first["uniform", seed] == first["no_replay", seed]
    assert not list((directory / "runs").glob("*"))

    assert tune.main(["replay", "--short", "--storage", str(tmp_path), "--resume"]) == 0
    assert "all trials are finished" in capsys.readouterr().out
    assert report.main([str(directory)]) == 0
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "uniform replay" in page and "no replay" in page and "generated tokens" in page


def test_what_a_study_fixes_is_refused_and_not_in_the_help(capsys):
    for program, first in ((tune, ["replay"]), (stream, [])):
        with pytest.raises(SystemExit):
            program.main(["--help-all"])
        shown = capsys.readouterr().out
        assert not [name for name in tune.REFUSED if f"--{name} " in shown] and "--lr " in shown
        assert program.main([*first, "--seed", "3", "--env", "compare"]) == 1
        said = capsys.readouterr().err
        assert "  env: fixed by the study" in said and "  seed: fixed by the study; expected --seeds\n" in said


def test_studies_are_listed_with_their_questions(capsys):
    assert tune.main([]) == 0
    assert "  replay  " in capsys.readouterr().out
    assert all(question.endswith("?") for question in tune.studies().values())
