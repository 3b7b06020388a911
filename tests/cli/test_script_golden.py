"""scripts/golden.py: which numbers of two runs are compared, and which places are named where they differ."""

import math

import pytest

from scripts import golden


def test_differences_name_their_place():
    one = {"results": [{"a": 1.0, "b": math.nan}, {"a": 2.0}], "weights": "x"}
    other = {"results": [{"a": 1.0, "b": math.nan}, {"a": 3.0}], "weights": "x"}
    assert list(golden.differences(one, one)) == []
    assert list(golden.differences(one, other)) == ["/results[1]/a: 2.0 here, 3.0 there"]
    assert list(golden.differences({"a": 1e-10}, {"a": 2e-10})) == []
    result = {"timers": {"plan": 0.1}, "env_runners": {"num_steps": 3, "play_s": 1.5, "note": "text"}}
    assert golden.comparable(result) == {"env_runners/num_steps": 3}
    assert list(golden.differences({"a": 1}, {"a": 1.0 + 1e-8})) == ["/a: 1 here, 1.00000001 there"]
    assert list(golden.differences({"said": [1]}, {"said": [1, 2]})) == ["/said: [1] here, [1, 2] there"]


def side(weights: str = "x", sums: float = 1.0, **metrics: float) -> dict:
    return {"results": [metrics], "said": [], "weights": weights, "sums": {"w": [sums, 2.0]}}


def test_metrics_of_one_side_are_listed_and_are_not_a_difference():
    state, found = golden.verdict("default", side(a=1.0, new=2.0), side(a=1.0, gone=3.0))
    assert found == [] and state == "equal (1 metrics; 0 episodes; weights x; only here: new; only there: gone)"
    state, found = golden.verdict("default", side(a=1.0), side(a=2.0))
    assert state.startswith("1 differences") and found == ["/results[0]/a: 1.0 here, 2.0 there"]


def test_weights_of_vllm_may_differ_in_the_last_bits():
    assert golden.verdict("vllm", side("x", 1.0), side("y", 1.0 + 1e-12))[1] == []
    assert len(golden.verdict("vllm", side("x", 1.0), side("y", 1.0 + 1e-6))[1]) == 1
    assert len(golden.verdict("default", side("x"), side("y"))[1]) == 1


def test_an_expected_change_is_listed_with_its_reason(monkeypatch):
    known = golden.Expected("srl|per", r"/results\[\d+\]/a\b", "a is measured before the update")
    monkeypatch.setattr(golden, "EXPECTED", (known,))
    state, found = golden.verdict("per", side(a=1.0, b=1.0), side(a=2.0, b=2.0))
    assert found == ["/results[0]/b: 1.0 here, 2.0 there"]
    assert "1 expected differences: a is measured before the update" in state
    assert len(golden.verdict("default", side(a=1.0), side(a=2.0))[1]) == 1


def ahead(**changes: float) -> dict:
    """Return a recording of two iterations in which every invariant is kept."""
    result = {
        "env_runners/num_groups": 6.0,
        "env_runners/num_groups_dropped": 0.0,
        "rollout/lag_max": 1.0,
        "rollout/late_share": 0.0,
    }
    said = [{"group_id": f"{now}.{slot}", "index": i} for now in (1, 2) for slot in range(6) for i in range(4)]
    return {"results": [result, {**result, "env_runners/num_episodes_lifetime": 48.0, **changes}], "said": said}


@pytest.mark.parametrize(("changes", "line"), [
    ({}, None),
    ({"rollout/late_share": 0.5}, "iteration 2: a lag of 1 and a late share that disagrees"),
    ({"env_runners/num_groups_dropped": 1.0}, "iteration 2: 6 groups and the dropped ones are not 6"),
    ({"env_runners/num_episodes_lifetime": 47.0}, "48 transcripts, 47 episodes, 12 groups of 4"),
])  # fmt: skip
def test_a_run_that_plays_ahead_is_checked_by_invariants(changes, line):
    assert list(golden.broken(ahead(**changes), 1)) == ([line] if line else [])


def test_an_episode_that_comes_twice_breaks_an_invariant():
    twice = ahead()
    twice["said"][-1] = twice["said"][0]
    assert list(golden.broken(twice, 1)) == ["1 episodes were trained on twice"]
