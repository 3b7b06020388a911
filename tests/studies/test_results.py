"""Results as files: what is written is read again, a killed trial goes on, what is broken or foreign is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rllib_srl.studies.recording import finished_trials, open_trial, write_study
from rllib_srl.studies.results import STUDY_FILE, ResultsError, read_results, read_study, trial_path
from tests.studies.synthetic import evaluations_of, small_study, write_synthetic

STUDY = small_study(seeds=(1, 2), arms=("srl", "no_replay"))


@pytest.fixture
def directory(tmp_path, quick):
    return write_synthetic(tmp_path, STUDY)


def test_what_is_written_is_read_again(directory):
    results = read_results(directory)
    assert results.study == STUDY and results.study.fingerprint == STUDY.fingerprint
    assert [(t.header.arm, t.header.seed) for t in results.trials] == [
        ("srl", 1), ("srl", 2), ("no_replay", 1), ("no_replay", 2)
    ]  # fmt: skip
    expected = [row for rows in evaluations_of(STUDY, "srl", 2) for row in rows]
    assert list(results.of("srl")[1].rows) == expected and results.of("srl")[1].header.settings["seed"] == 2


def test_writing_the_same_study_again_changes_nothing(directory):
    before = (directory / STUDY_FILE).read_bytes()
    write_study(directory, STUDY)
    assert (directory / STUDY_FILE).read_bytes() == before


def test_another_study_is_kept_out(directory):
    other = replace(STUDY, primary=replace(STUDY.primary, measures=("forgetting",)))
    assert other.fingerprint != STUDY.fingerprint
    with pytest.raises(ResultsError, match=r"study\.json: holds another study"):
        write_study(directory, other)
    with pytest.raises(ResultsError, match="holds another study"):
        open_trial(directory, other, "srl", 1, {})


def test_a_study_that_was_changed_afterwards_has_no_trials(directory):
    plain = json.loads((directory / STUDY_FILE).read_text())
    plain["primary"]["measures"] = ["forgetting"]
    (directory / STUDY_FILE).write_text(json.dumps(plain))
    with pytest.raises(ResultsError, match=r"--1\.jsonl, row 1: study = .*changed afterwards"):
        read_results(directory)


def _start(tmp_path, upto):
    """Begin a trial and write its evaluations up to an iteration."""
    write_study(tmp_path, STUDY)
    with open_trial(tmp_path, STUDY, "srl", 1, {"lr": 1e-3}) as trial:
        for rows in evaluations_of(STUDY, "srl", 1):
            if rows[0].iteration <= upto:
                trial.add(rows)
    return trial_path(tmp_path, "srl", 1)


def test_a_killed_trial_goes_on_from_its_checkpoint(tmp_path, quick):
    path = _start(tmp_path, upto=30)
    path.write_text(path.read_text()[:-40])  # the last line was cut off
    (trial,) = read_results(tmp_path).trials
    assert not trial.is_finished and trial.rows[-1].iteration == 27  # an evaluation that is not whole does not count
    assert finished_trials(tmp_path, STUDY) == set()
    with open_trial(tmp_path, STUDY, "srl", 1, {"lr": 5.0}, from_iteration=20) as again:
        for rows in evaluations_of(STUDY, "srl", 1):
            if rows[0].iteration > 20:
                again.add(rows)
        again.finish()
    (trial,) = read_results(tmp_path).trials
    assert list(trial.rows) == [row for rows in evaluations_of(STUDY, "srl", 1) for row in rows]
    assert trial.is_finished and trial.header.settings == {"lr": 1e-3}
    assert finished_trials(tmp_path, STUDY) == {("srl", 1)}
    with pytest.raises(ResultsError, match="is finished; it is not run again"):
        open_trial(tmp_path, STUDY, "srl", 1, {})


def test_a_trial_without_a_checkpoint_starts_anew(tmp_path, quick):
    _start(tmp_path, upto=30)
    with open_trial(tmp_path, STUDY, "srl", 1, {"lr": 2.0}):
        pass
    (trial,) = read_results(tmp_path).trials
    assert trial.rows == () and trial.header.settings == {"lr": 2.0}


def test_a_row_with_faults_is_not_written(tmp_path, quick):
    path = _start(tmp_path, upto=0)
    before = path.read_text()
    rows = next(evaluations_of(STUDY, "srl", 1))
    with open_trial(tmp_path, STUDY, "no_replay", 1, {}) as trial:
        with pytest.raises(ValueError, match=r"(?s)accuracy = 1\.2; expected less than or equal to 1.*peak_bytes = -1"):
            trial.add([replace(rows[0], accuracy=1.2, peak_bytes=-1, parse_rate=None), *rows[1:]])
        with pytest.raises(ValueError, match="accuracy = nan; expected a finite number"):
            trial.add([replace(rows[0], accuracy=float("nan")), *rows[1:]])
        with pytest.raises(ValueError, match=r"expected each of chain_sum, .* once"):
            trial.add(rows[1:])
    assert path.read_text() == before and not read_results(tmp_path).trials[1].rows


BROKEN = [
    (lambda lines: lines[:3] + ["{"] + lines[4:], "row 4: is not JSON"),
    (lambda lines: [lines[0], lines[1].replace('"accuracy"', '"acuracy"'), *lines[2:]], "row 2: .*acuracy is unknown"),
    (lambda lines: [lines[0], _with(lines[1], accuracy=-0.1), *lines[2:]], r"accuracy = -0\.1; expected greater"),
    (lambda lines: [lines[0], _with(lines[1], domain="maths"), *lines[2:]], "row 2: domain = 'maths'; expected one of"),
    (lambda lines: [lines[0], _with(lines[1], stage=5), *lines[2:]], "row 2: stage = 5; expected -1 to 4"),
    (lambda lines: [lines[0], lines[2], *lines[2:]], "row 2: domain = .*expected each once"),
    (lambda lines: [*lines[:5], *lines[6:]], "num_rows = 105; expected 104"),
    (lambda lines: lines[1:], "row 1: kind is row; expected trial"),
    (lambda lines: [*lines[:1], lines[-1], *lines[1:]], "row 2: kind is end; expected a row here"),
    (lambda lines: [_with(lines[0], seed=7), *lines[1:]], "seed = 7; expected the file name's"),
    (lambda lines: [], "is empty; expected a header line"),
]


def _with(line, **changes):
    return json.dumps({**json.loads(line), **changes})


@pytest.mark.slow
@pytest.mark.parametrize("broken, message", BROKEN)
def test_a_broken_file_is_named_with_row_and_field(directory, broken, message):
    path = trial_path(directory, "srl", 1)
    path.write_text("".join(line + "\n" for line in broken(path.read_text().splitlines())))
    with pytest.raises(ResultsError, match=message) as caught:
        read_results(directory)
    assert str(path) in str(caught.value)


def test_a_directory_that_holds_no_study_is_refused(tmp_path):
    with pytest.raises(ResultsError, match=r"study\.json does not exist; expected the results directory"):
        read_results(tmp_path)
    (tmp_path / STUDY_FILE).write_text("{}")
    with pytest.raises(ResultsError, match=r"(?s)name is missing.*question is missing"):
        read_study(tmp_path)


def test_a_trial_under_a_foreign_name_is_refused(directory):
    trial_path(directory, "srl", 1).rename(directory / "trials" / "fifo--1.jsonl")
    with pytest.raises(ResultsError, match=r"fifo--1\.jsonl, row 1: arm = 'srl'"):
        read_results(directory)
