"""srl contrib health: measures and gates by hand; the same model is healthy, a broken one is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rllib_srl.cli.main import main as srl
from rllib_srl.contrib.health import (
    OPENINGS,
    UNHEALTHY,
    Measured,
    Shift,
    gate_of_measure,
    gate_of_share,
    judged,
    measures_of,
    paired_shift,
)
from rllib_srl.engine.models import local_model
from rllib_srl.people.gates import Change, Outcome

SETTINGS = [
    *("--engine", "transformers", "--compute_dtype", "float32", "--max_turn_tokens", "8"),
    *("--max_episode_tokens", "256", "--domains", "compare={num_shots: 0}", "--prompts", "24"),
]


def test_measures_by_hand() -> None:
    logp = np.log(np.array([0.5, 0.125]))
    assert measures_of([5, 6], logp) == {"repetition": 0.0, "length": 2.0, "entropy": pytest.approx(2 * np.log(2))}
    assert measures_of([1, 2, 3, 4, 1, 2, 3, 4], logp)["repetition"] == pytest.approx(1 / 5)  # 1234 2341 3412 4123 1234
    assert measures_of([7] * 10, logp)["repetition"] == pytest.approx(6 / 7)
    assert len(set(OPENINGS)) == 40


@pytest.mark.parametrize(("after", "low", "high", "outcome"), [
    (0.25, 0.01, 0.09, Outcome.PASSED),  # more, within the range of 0 to .3
    (0.35, -0.02, 0.32, Outcome.PASSED),  # beyond by estimate, but 0 is not excluded
    (0.35, 0.05, 0.25, Outcome.BAD),
    (0.60, 0.30, 0.50, Outcome.HARMFUL),  # the whole interval, .5 to .7, lies above .3
])  # fmt: skip
def test_the_gate_of_a_measure_at_its_boundaries(after: float, low: float, high: float, outcome: Outcome) -> None:
    assert gate_of_measure("repetition", Shift(40, 0.2, after, low, high)).outcome is outcome


@pytest.mark.parametrize(("low", "at", "high", "outcome"), [
    (-0.09, -0.05, -0.03, Outcome.HARMFUL),
    (-0.09, -0.05, -0.01, Outcome.BAD),
    (-0.09, -0.05, 0.01, Outcome.PASSED),  # not significant
    (-0.03, -0.02, -0.01, Outcome.PASSED),  # significant, within the margin
])  # fmt: skip
def test_the_gate_of_a_share_at_its_boundaries(low: float, at: float, high: float, outcome: Outcome) -> None:
    change = Change(1000, 500, 500 + round(1000 * at), 0.5, 0.5 + at, low, high)
    assert gate_of_share("compare", change, 0.02).outcome is outcome


def test_a_shift_is_paired() -> None:
    before = {str(at): float(at) for at in range(20)}
    shift = paired_shift(before, {key: value + 1 for key, value in before.items()})
    assert (shift.num, shift.change, shift.low, shift.high) == (20, 1.0, 1.0, 1.0)  # no spread left


def test_each_measure_is_judged() -> None:
    right = {str(at): True for at in range(40)}
    before = Measured({"sums": right, "format": right}, {"entropy": {str(at): 3.0 for at in range(40)}})
    wrong = {key: int(key) >= 30 for key in right}  # 30 of 40 are lost
    after = Measured({"sums": wrong, "format": right}, {"entropy": {str(at): 0.1 for at in range(40)}})
    changes, verdicts = judged(before, after, 0.05)
    assert changes["sums"].change == -0.75 and changes["format"].change == 0.0
    outcomes = {verdict.domain: verdict.outcome for verdict in verdicts}
    assert outcomes == {"sums": Outcome.HARMFUL, "format": Outcome.PASSED, "entropy": Outcome.HARMFUL}


@pytest.mark.slow
def test_a_model_is_as_healthy_as_itself_and_a_broken_one_is_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken = tmp_path / "model"  # with its last layer norm scaled to 0, every token is equally likely
    shutil.copytree(local_model("tiny"), broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] *= 0.0
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert srl(["contrib", "health", "tiny", "tiny", *SETTINGS, "--debug"]) == 0
    assert "healthy: no significant harm is seen" in capsys.readouterr().out
    assert srl(["contrib", "health", "tiny", str(broken), *SETTINGS, "--json", "-", "--debug"]) == UNHEALTHY
    found = json.loads(capsys.readouterr().out)
    outcomes = {verdict["domain"]: verdict["outcome"] for verdict in found["verdicts"]}
    assert outcomes["compare"] == outcomes["format"] == outcomes["entropy"] == "harmful"
    assert found["changes"]["compare"]["after"] == 0.0 and found["changes"]["compare"]["num"] == 24
    assert found["changes"]["entropy"]["num"] == 40 and 0 < found["changes"]["entropy"]["before"] < 8


@pytest.mark.parametrize(("flags", "message"), [
    (["tiny"], "tiny is a model; expected a second one, or a run's directory"),
    (["tiny", "./nowhere"], "model directory ./nowhere does not exist"),
    (["tiny", "tiny", "--domains", "nowhere"], "environment 'nowhere' is unknown"),
    (["tiny", "tiny", "--env", "compare", "--domains", "lookup"], "expected one of the two"),
    (["tiny", "tiny", "--lr", "1e-3"], "lr: not a setting of playing; expected some of"),
])  # fmt: skip
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    assert srl(["contrib", "health", *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("error:") == 1
