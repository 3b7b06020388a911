"""Results as files: what is written is read again, a killed trial goes on, what is broken or foreign is refused."""

import json
from dataclasses import replace

import pytest

from rllib_srl.studies.records import (
    STUDY_FILE,
    ResultsError,
    TrialWriter,
    read_results,
    read_study,
    read_trial,
    write_study,
)
from tests.studies.synthetic import evaluations_of, small_study, write_synthetic

STUDY = small_study(seeds=(1, 2), arms=("srl", "no_replay"))


@pytest.fixture
def directory(tmp_path, quick):
    return write_synthetic(tmp_path, STUDY)


def test_what_is_written_is_read_again(directory):
    results = read_results(directory)
    assert results.study == STUDY and results.study.fingerprint == STUDY.fingerprint
    trials = [("srl", 1), ("srl", 2), ("no_replay", 1), ("no_replay", 2)]
    assert [(one.arm, one.seed) for one in results.trials] == trials and results.finished == set(trials)
    assert list(results.of("srl")[1].evaluations) == list(evaluations_of(STUDY, "srl", 2))
    before = (directory / STUDY_FILE).read_bytes()
    write_study(directory, STUDY)
    assert (directory / STUDY_FILE).read_bytes() == before


def test_another_study_is_kept_out(directory):
    other = replace(STUDY, primary=replace(STUDY.primary, measures=("forgetting",)))
    with pytest.raises(ResultsError, match=r"study\.json: holds another study"):
        write_study(directory, other)
    plain = json.loads((directory / STUDY_FILE).read_text())
    plain["primary"]["measures"] = ["forgetting"]
    (directory / STUDY_FILE).write_text(json.dumps(plain))  # changed afterwards: it has no trials
    with pytest.raises(ResultsError, match=r"--1\.jsonl, line 1: study = .*expected .*the study in study.json"):
        read_results(directory)


def test_a_killed_trial_goes_on_from_its_checkpoint(tmp_path, quick):
    write_study(tmp_path, STUDY)
    whole = list(evaluations_of(STUDY, "srl", 1))
    TrialWriter(tmp_path, STUDY, "srl", 1).add(whole[0])  # without a checkpoint it starts anew
    killed = TrialWriter(tmp_path, STUDY, "srl", 1)
    for one in whole[:9]:
        killed.add(one)
    path = read_trial(tmp_path, STUDY, "srl", 1).path
    path.write_text(path.read_text()[:-40])  # the last line was cut off
    (trial,) = read_results(tmp_path).trials
    assert not trial.is_finished and list(trial.evaluations) == whole[:8] and read_results(tmp_path).finished == set()
    again = TrialWriter(tmp_path, STUDY, "srl", 1, from_iteration=15)
    for one in whole:
        if one.iteration > 15:
            again.add(one)
    (trial,) = read_results(tmp_path).trials
    assert list(trial.evaluations) == whole and trial.is_finished
    with pytest.raises(ResultsError, match="is finished; it is not run again"):
        TrialWriter(tmp_path, STUDY, "srl", 1)


def _with(line, **changes):
    return json.dumps({**json.loads(line), **changes})


@pytest.mark.parametrize("broken, message", [
    (lambda line: "{", "line 2: value: Invalid JSON"),
    (lambda line: line.replace('"seconds"', '"secs"'), "line 2: seconds: Field required.*secs: Unexpected"),
    (lambda line: _with(line, peak_bytes=-1), "line 2: peak_bytes: Input should be greater than or equal to 0"),
    (lambda line: _with(line, accuracy={"maths": 1.0}), r"line 2: accuracy of \['maths'\]; expected \['chain_sum'"),
    (lambda line: _with(line, stage=5), "line 2: stage = 5; expected -1 to 4"),
])  # fmt: skip
def test_a_broken_file_is_named_with_line_and_field(directory, broken, message):
    path = read_trial(directory, STUDY, "srl", 1).path
    first, second, *rest = path.read_text().splitlines()
    path.write_text("".join(line + "\n" for line in (first, broken(second), *rest)))
    with pytest.raises(ResultsError, match=message) as caught:
        read_results(directory)
    assert str(path) in str(caught.value)


def test_a_directory_that_holds_no_study_is_refused(tmp_path):
    with pytest.raises(ResultsError, match=r"study\.json does not exist; expected the results directory"):
        read_results(tmp_path)
    (tmp_path / STUDY_FILE).write_text("{}")
    with pytest.raises(ResultsError, match="name: Field required; question: Field required"):
        read_study(tmp_path)
