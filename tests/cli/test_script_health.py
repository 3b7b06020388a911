"""srl health on the tiny model: the same model is healthy, a broken one is not, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rllib_srl.cli.continual import health
from rllib_srl.engine.models import local_model
from rllib_srl.studies.health import harness

SETTINGS = [
    *("--engine", "transformers", "--compute_dtype", "float32", "--max_turn_tokens", "8"),
    *("--max_episode_tokens", "256"),
]
OWN = ["--parts", "domains", "degeneration", "--domains", "compare={num_shots: 0}", "--prompts", "24", *SETTINGS]
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'rllib_srl[health]'"
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    """Return the tiny model with its last layer norm scaled to 0: every token is equally likely."""
    directory = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(local_model("tiny"), directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] *= 0.0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.slow
def test_a_model_is_as_healthy_as_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert health.main(["tiny", "tiny", *OWN, "--json", str(tmp_path / "health.json"), "--debug"]) == 0
    assert "healthy: no significant harm is seen" in capsys.readouterr().out
    found = json.loads((tmp_path / "health.json").read_text())
    assert set(found["accuracy"]) == {"compare", "format"} and found["accuracy"]["compare"]["num"] == 24
    assert {name: shift["change"] for name, shift in found["degeneration"].items()} == {
        "repetition": 0.0, "length": 0.0, "entropy": 0.0
    }  # fmt: skip
    assert found["degeneration"]["entropy"]["num"] == 40 and 0 < found["degeneration"]["entropy"]["before"] < 8
    assert [verdict["outcome"] for verdict in found["verdicts"]] == ["passed"] * 5


@pytest.mark.slow
def test_a_broken_model_fails_its_gates(broken: Path, capsys: pytest.CaptureFixture) -> None:
    assert health.main(["tiny", str(broken), *OWN, "--json", "-", "--debug"]) == health.UNHEALTHY
    found = json.loads(capsys.readouterr().out)
    outcomes = {verdict["domain"]: verdict["outcome"] for verdict in found["verdicts"]}
    assert outcomes["compare"] == outcomes["format"] == outcomes["entropy"] == "harmful"
    assert found["accuracy"]["compare"]["after"] == 0.0


@pytest.mark.slow
def test_a_run_is_compared_with_the_model_it_started_from(trained: Path, capsys: pytest.CaptureFixture) -> None:
    flags = ["--parts", "domains", "degeneration", "--prompts", "8", "--max_drop", "0.9", "--json", "-", "--debug"]
    assert health.main([str(trained), *flags]) in (0, health.UNHEALTHY)
    found = json.loads(capsys.readouterr().out)
    assert found["before"] == "tiny" and found["after"].endswith("checkpoint_000002")
    assert found["accuracy"]["compare"]["num"] == 8  # the run's own environment


@needs_lm_eval
@pytest.mark.slow
def test_the_harness_answers_every_question_offline(broken: Path) -> None:
    tasks = harness.read_tasks(harness.own_tasks())
    right, wrong = (harness.run_tasks(model, tasks, "float32") for model in (local_model("tiny"), broken))
    assert {name: len(found) for name, found in right.items()} == {task.name: task.num for task in tasks}
    assert sum(right["srl_grammar"].values()) != sum(wrong["srl_grammar"].values())
    assert not any(wrong["srl_sums"].values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tiny", "--parts", "degeneration"], "tiny is a model; expected a second one to compare it with"),
        (["tiny", "tiny", "--parts", "looks"], "parts = looks; expected some of tasks, domains, degeneration"),
        (["tiny", "./nowhere", "--parts", "degeneration"], "model directory ./nowhere does not exist"),
        (["tiny", "tiny", "--parts", "degeneration", "--domains", "compare"], "expected the part 'domains' with it"),
        (["tiny", "tiny", "--parts", "domains", "--domains", "nowhere"], "environment 'nowhere' is unknown"),
        (["tiny", "tiny", "--parts", "domains", "--env", "compare", "--domains", "lookup"], "expected one of the two"),
        (["tiny", "tiny", "--parts", "degeneration", "--lr", "1e-3"], "lr: not a setting of playing; expected some of"),
        (["tiny", "tiny", "--parts", "domains", "--prompts", "0"], "prompts = 0; expected at least 1"),
        (["tiny", "tiny", "--parts", "degeneration", *SETTINGS, "--prompt_format", "chat"], "chat template"),
    ],
)
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture, flags: list[str], message: str) -> None:
    assert health.main(flags) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("error:") == 1


def test_tasks_without_lm_eval_name_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    assert health.main(["tiny", "tiny"]) == 1
    assert "pip install 'rllib_srl[health]'" in capsys.readouterr().err
