"""scripts/train.py, evaluate.py and episodes.py on the tiny model, end to end in one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from rllib_srl import SRL
from rllib_srl.deadlines import ActorFailure
from scripts import episodes, evaluate, quickstart, train
from scripts.display import Progress
from tests.scripts.conftest import TINY


def iterations_of(directory: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith("events.out")}


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of the run, for tests that change it."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


@pytest.mark.slow
def test_a_run_leaves_what_the_help_promises(trained: Path) -> None:
    files = {"checkpoint_000002", "metrics.jsonl", "replay", "settings.yaml", "transcripts.jsonl"}
    assert names_in(trained) == files
    assert any(trained.glob("events.out.tfevents.*"))
    written = yaml.safe_load((trained / "settings.yaml").read_text())
    assert (written["env_config"], written["lr"], written["seed"]) == ({"num_shots": 0}, 3e-4, 5)
    assert (written["kl_coeff"], written["entropy_coeff"]) == ("preset", 0.0)  # defaults
    assert iterations_of(trained) == [1, 2]


@pytest.mark.slow
def test_resume_continues_the_count_and_exports(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "model"
    flags = ["--iterations", "3", "--lr", "1e-4", "--export", str(model), "--debug"]
    assert train.main(["--resume", str(copied), *flags]) == 0
    assert "iteration 3/3" in capsys.readouterr().out
    assert iterations_of(copied) == [1, 2, 3]
    assert names_in(copied) >= {"checkpoint_000002", "checkpoint_000003"}
    assert yaml.safe_load((copied / "settings.yaml").read_text())["lr"] == 1e-4
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names_in(model)
    assert train.main(["--resume", str(copied), "--iterations", "4", "--export", str(model)]) == 1
    assert "is not empty; expected a new directory" in capsys.readouterr().err
    assert train.main(["--resume", "--out", str(copied)]) == 1
    assert "at iteration 3 already; expected --iterations above that" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_stops_after_the_iteration_with_a_checkpoint(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shown = Progress.iteration

    def press(self: Progress, *figures: float) -> None:
        shown(self, *figures)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "iteration", press)
    assert train.main(["--resume", str(copied), "--iterations", "50"]) == 130
    assert f"stopped after iteration 3 of 50; continue with: python scripts/train.py --resume {copied}" in (
        capsys.readouterr().out
    )
    assert iterations_of(copied) == [1, 2, 3] and "checkpoint_000003" in names_in(copied)


@pytest.mark.slow
def test_a_lost_process_says_how_to_go_on(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(self: SRL) -> None:
        raise ActorFailure("runner 1 died")

    monkeypatch.setattr(SRL, "training_step", fail)
    assert train.main(["--resume", str(copied), "--iterations", "4"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(f"error: runner 1 died\ncontinue with: python scripts/train.py --resume {copied}\n")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused(copied: Path, capsys: pytest.CaptureFixture) -> None:
    (victim,) = copied.glob("checkpoint_000002/algorithm_state.*")
    victim.write_bytes(victim.read_bytes()[:-1])
    for script, flags in ((train, ["--resume", str(copied), "--iterations", "4"]), (evaluate, [str(copied)])):
        assert script.main(flags) == 1
        assert f"checkpoint_000002 is damaged: {victim.name}; use an earlier one" in capsys.readouterr().err
    assert iterations_of(copied) == [1, 2]


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--group_size", "1", "--lr", "1e-5"], ["group_size = 1; expected an integer of at least 2"]),
        (["--env", "nowhere"], ["world 'nowhere' is unknown"]),
        (["--model", "./nowhere"], ["model directory ./nowhere does not exist"]),
        (["--num_cpus_for_main_process", "64"], ["64 CPU (the cluster has 2)"]),
        (["--replay_reuse_fraction", "1.5"], ["replay_reuse_fraction = 1.5; expected a number in [0, 1)"]),
        (["--iterations", "0"], ["iterations = 0; expected an integer of at least 1"]),
        (["--max_turn_tokens", "500", "--clip_low", "2"], ["max_turn_tokens = 500", "clip_low = 2.0"]),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    ray_here, tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], messages: list[str]
) -> None:
    assert train.main([*TINY, "--out", str(tmp_path / "run"), *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    assert all(message in said for message in messages), said
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_evaluate_a_checkpoint_and_a_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = names_in(trained)
    report = tmp_path / "accuracy.json"
    flags = ["--evaluation_duration", "40", "--evaluation_pass_k", "2", "--json", str(report), "--debug"]
    assert evaluate.main([str(trained), *flags]) == 0
    figures = json.loads(report.read_text())
    assert (figures["iteration"], figures["num_prompts"], figures["worlds"]) == (2, 40, ["compare"])
    # The tiny model half knows the world: far above the most frequent answer, and not yet perfect.
    assert 0.4 < figures["accuracy"] < 1 and figures["baselines"]["majority"] < 0.15
    assert figures["accuracy_low"] < figures["accuracy"] < figures["accuracy_high"]
    assert figures["pass_at_1"] <= figures["pass_at_k"]
    assert figures["baselines"]["chance"] == pytest.approx(1 / 3)
    shown = capsys.readouterr().out
    assert f"{figures['accuracy']:.3f}  [{figures['accuracy_low']:.3f}, {figures['accuracy_high']:.3f}]" in shown
    assert "pass@2" in shown and names_in(trained) == before
    model_flags = [*TINY[2:], "--evaluation_duration", "8", "--json", "-", "--debug"]
    assert evaluate.main(["tiny", *model_flags]) == 0
    assert json.loads(capsys.readouterr().out)["what"] == "tiny"


def test_episodes_of_a_real_run(trained: Path, capsys: pytest.CaptureFixture) -> None:
    assert episodes.main([str(trained), "--iteration", "2", "--limit", "1"]) == 0
    head, question, *rest = capsys.readouterr().out.splitlines()
    assert head.startswith("── iteration 2  group 2.0 episode 0  reward ")
    assert "environment │ Question: Which is largest: " in question and any("policy │" in row for row in rest)


@pytest.mark.slow
def test_quickstart_shows_its_table(ray_here, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, report = tmp_path / "quick", tmp_path / "quick.json"
    flags = ["--model", "tiny", "--engine", "transformers", "--iterations", "2", "--out", str(out), "--debug"]
    settings = {**quickstart.SETTINGS, "env_config": {"num_shots": 0}, "num_env_runners": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "SETTINGS", settings | {"evaluation_duration": 20, "num_prompts_per_batch": 4})
        assert quickstart.main([*flags, "--seed", "3", "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    for text in ("before ", "after ", "majority answer", "chance", "reward by iteration", "where the time went"):
        assert text in shown
    figures = json.loads(report.read_text())
    assert (len(figures["reward"]), figures["after"]["num_prompts"]) == (2, 20)
    assert names_in(out) >= {"quickstart.png", "checkpoint_000002", "settings.yaml", "transcripts.jsonl"}
    parts, spans = figures["seconds_by_part"], figures["seconds"]
    assert sum(parts.values()) == pytest.approx(spans["training"] + spans["evaluation"])
    assert quickstart.main([*flags[:-1]]) == 1
    assert "holds a run already" in capsys.readouterr().err
