"""scripts/golden.py: which numbers of two runs are compared, and which places are named where they differ."""

from __future__ import annotations

import json
import math

import pytest

from scripts import golden


def test_every_number_but_times_is_compared():
    result = {
        "env_runners": {"num_steps": 3, "play_s": 1.5, "stop_reason": {"terminated": 2}},
        "learners": {"default_policy": {"loss": 0.25, "learner_throughput": 7.0, "note": "text"}},
        "num_env_steps_sampled_lifetime": 9,
        "timers": {"plan": 0.1},
    }
    found = golden.comparable(result)
    assert found == {
        "env_runners/num_steps": 3,
        "env_runners/stop_reason/terminated": 2,
        "learners/default_policy/loss": 0.25,
        "num_env_steps_sampled_lifetime": 9,
    }


def test_an_evaluation_is_compared_whole():
    assert golden.comparable({"accuracy": 0.5, "play_s": 2.0}) == {"accuracy": 0.5}


def test_differences_name_their_place():
    one = {"results": [{"a": 1.0, "b": math.nan}, {"a": 2.0}], "weights": "x"}
    other = {"results": [{"a": 1.0, "b": math.nan}, {"a": 3.0, "c": 0.0}], "weights": "x"}
    assert list(golden.differences(one, one)) == []
    assert list(golden.differences(one, other)) == ["/results[1]/a: 2.0 here, 3.0 there", "/results[1]/c: only there"]
    assert list(golden.differences({"a": 1e-10}, {"a": 2e-10})) == []
    assert list(golden.differences({"a": 1}, {"a": 1.0 + 1e-8})) == ["/a: 1 here, 1.00000001 there"]
    assert list(golden.differences({"said": [1]}, {"said": [1, 2]})) == ["/said: [1] here, [1, 2] there"]


def test_transcripts_are_compared_without_times(tmp_path):
    line = {"reward": 1.0, "turns": [{"role": "policy", "text": " 4"}], "play_s": 0.5}
    (tmp_path / "transcripts.jsonl").write_text(json.dumps(line) + "\n")
    assert golden.transcripts(tmp_path) == [{"reward": 1.0, "turns": [{"role": "policy", "text": " 4"}]}]
    assert golden.transcripts(tmp_path / "none") == []


@pytest.mark.parametrize("argv", [[], ["--against", "main", "--record", "x.json"]])
def test_one_of_two_ways_to_run_is_asked_for(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        golden.main(argv)
    assert caught.value.code == 2 and "expected --against COMMIT or --record FILE" in capsys.readouterr().err
