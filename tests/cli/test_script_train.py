"""srl train, evaluate and quickstart on the tiny model, end to end in one process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rllib_srl.algorithm.checkpointing import MODULE
from rllib_srl.cli import evaluate, export, quickstart, train
from rllib_srl.cli.shared import training
from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.display import Progress
from rllib_srl.common.remote_calls import ActorFailure
from rllib_srl.storage.checkpoints import seal, verify_own, verify_sealed
from rllib_srl.storage.event_file import EventFile
from rllib_srl.storage.weight_file import WEIGHTS, read_weights
from tests.algorithm.poison import poisoned
from tests.cli.conftest import TINY
from tests.cli.test_script_stopping import iterations_in


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith("events.out")}


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copied"))


@pytest.mark.smoke
@pytest.mark.slow
def test_a_run_leaves_what_the_help_promises(trained: Path) -> None:
    files = {"checkpoint_000002", "metrics.jsonl", "replay", "settings.yaml", "transcripts.jsonl"}
    assert names_in(trained) == files
    assert len(list(trained.glob("events.out.tfevents.*"))) == 1
    written = yaml.safe_load((trained / "settings.yaml").read_text())
    assert (written["env_config"], written["lr"], written["seed"]) == ({"num_shots": 0}, 3e-4, 5)
    assert (written["kl_coeff"], written["entropy_coeff"]) == ("preset", 0.0)  # defaults
    assert "\nkl_coeff: preset  # 0.0\n" in (trained / "settings.yaml").read_text()
    assert iterations_in(trained) == [1, 2]


@pytest.mark.smoke
@pytest.mark.slow
def test_resume_continues_the_count_and_exports(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "model"
    flags = ["--iterations", "3", "--lr", "1e-4", "--export", str(model), "--debug"]
    with (copied / "metrics.jsonl").open("a") as lost:  # after the checkpoint, by a run that was killed
        lost.write('{"iteration": 3}\n{"iter')
    events = EventFile(copied)
    events.add_scalar("env_runners/num_groups", 9.0, 3)
    events.flush()
    assert train.main(["--resume", str(copied), *flags]) == 0
    shown = capsys.readouterr().out
    assert "removed 1 lines of metrics.jsonl about iterations after 2" in shown and "iteration 3/3" in shown
    assert iterations_in(copied) == [1, 2, 3]
    events = EventAccumulator(str(copied)).Reload().Scalars("env_runners/num_groups")
    assert [event.step for event in events] == [1, 2, 3]
    assert names_in(copied) >= {"checkpoint_000002", "checkpoint_000003"}
    assert yaml.safe_load((copied / "settings.yaml").read_text())["lr"] == 1e-4
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names_in(model)
    assert train.main(["--resume", str(copied), "--iterations", "4", "--export", str(model)]) == 1
    assert "is not empty; expected a new one" in capsys.readouterr().err


@pytest.mark.slow
def test_auto_makes_up_the_export_of_a_complete_run(copied: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """One that was cut off, too; then the command ends at once."""
    flags, model = ["--out", str(copied), "--resume", "auto", "--iterations", "2"], tmp_path / "model"
    model.mkdir()
    for name in (".partial", "model.safetensors"):
        (model / name).touch()
    assert train.main([*flags, "--export", str(model), "--debug"]) == 0
    assert iterations_in(copied) == [1, 2] and len(load_file(model / "model.safetensors")) > 9
    assert ".partial" not in names_in(model) >= {"config.json", "tokenizer.json"}
    monkeypatch.setattr(training, "started", None)
    for more in (["--export", str(model)], []):
        capsys.readouterr()
        assert train.main([*flags, *more, "--debug"]) == 0
        assert capsys.readouterr().out == f"complete    {copied} has all 2 iterations\n"
    assert train.main(["--resume", str(copied), "--iterations", "2"]) == 1
    assert "iterations = 2; expected more than the 2 that" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stopped_and_a_lost_run_say_how_to_go_on(copied, monkeypatch, capsys):
    shown = Progress.iteration

    def press(self: Progress, *figures: float) -> None:
        shown(self, *figures)
        if figures[0] == 4:
            raise ActorFailure("runner 1 died")
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "iteration", press)
    assert train.main(["--resume", str(copied), "--iterations", "50"]) == 130
    assert f"stopped after iteration 3 of 50; continue with: {command('train', '--resume', copied)}" in (
        capsys.readouterr().out
    )
    assert iterations_in(copied) == [1, 2, 3] and "checkpoint_000003" in names_in(copied)
    assert train.main(["--resume", str(copied), "--iterations", "50"]) == 1
    said = capsys.readouterr().err
    assert said.endswith(f"error: runner 1 died\ncontinue with: {command('train', '--resume', copied)}\n")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_foreign_checkpoint_is_data_unless_it_is_trusted(trained, copied, tmp_path, capsys):
    marker, checkpoint = tmp_path / "marker", copied / "checkpoint_000002"
    poisoned(checkpoint, marker)
    flags = ["--evaluation_duration", "8", "--json", "-", "--debug"]
    figures = []
    for run in (trained, copied):
        assert evaluate.main([str(run), *flags]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    differ = {name for name in figures[0] if figures[0][name] != figures[1][name]}
    assert differ == {"what"} and figures[0]["iteration"] == 2
    model = tmp_path / "model"
    assert export.main([str(copied), str(model)]) == 0
    exported, stored = load_file(model / "model.safetensors"), read_weights(checkpoint / MODULE / WEIGHTS)
    assert all(np.array_equal(stored[f"model.{name}"], array) for name, array in exported.items())
    before = names_in(copied)
    capsys.readouterr()
    assert train.main(["--resume", str(copied), "--iterations", "3"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: checkpoint {checkpoint} was sealed with another key than ")
    assert "pass --trust-checkpoint" in said and names_in(copied) == before and not marker.exists()
    shutil.rmtree(checkpoint)
    shutil.copytree(trained / "checkpoint_000002", checkpoint)
    seal(checkpoint, verify_sealed(checkpoint))  # without a key: nobody's
    assert train.main(["--resume", str(copied), "--iterations", "3", "--trust-checkpoint", "--debug"]) == 0
    assert iterations_in(copied) == [1, 2, 3]
    verify_own(copied / "checkpoint_000003")  # what it writes from now on is this user's


@pytest.mark.parametrize(("flags", "messages"), [
    (["--num_cpus_for_main_process", "64"], ["64 CPU (the cluster has 2)"]),
    (["--model", "nobody/nothing"], ["  model = 'nobody/nothing'; ", "HF_HUB_OFFLINE is set"]),
    (["--iterations", "0", "--group_size", "1"], ["iterations = 0; expected an", "group_size = 1; expected an"]),
    (["--max_turn_tokens", "500", "--clip_low", "2"], ["max_turn_tokens = 500", "clip_low = 2.0"]),
])  # fmt: skip
def test_bad_input_is_one_message_and_leaves_nothing(ray_here, tmp_path, capsys, flags, messages):
    assert train.main([*TINY, "--out", str(tmp_path / "run"), *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    assert all(message in said for message in messages), said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_evaluate_a_checkpoint_and_a_model(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before = names_in(trained)
    report = tmp_path / "accuracy.json"
    flags = ["--evaluation_duration", "40", "--evaluation_pass_k", "2", "--json", str(report), "--debug"]
    assert evaluate.main([str(trained), *flags]) == 0
    figures = json.loads(report.read_text())
    assert (figures["iteration"], figures["num_prompts"], figures["envs"]) == (2, 40, ["compare"])
    # The tiny model half knows the environment: far above the most frequent answer, and not yet perfect.
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


def assert_works_elsewhere(line: str, directory: Path) -> None:
    """A printed command works from any directory, without the repository on the path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = {"cwd": directory, "env": environment}
    ended = subprocess.run(["bash", "-c", line], **where, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0 and ended.stdout, (line, ended.stderr)


@pytest.mark.slow
def test_quickstart_shows_its_table(ray_here, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "quick"
    flags = ["--model", "tiny", "--engine", "transformers", "--iterations", "2", "--out", str(out), "--debug"]
    settings = {**quickstart.SETTINGS, "env_config": {"num_shots": 0}, "num_env_runners": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "SETTINGS", settings | {"evaluation_duration": 20, "num_prompts_per_batch": 4})
        assert quickstart.main([*flags, "--seed", "3"]) == 0
    shown = capsys.readouterr().out
    for text in ("before ", "after ", "majority answer", "chance", "reward by iteration", "revisited"):
        assert text in shown
    assert names_in(out) >= {"checkpoint_000002", "settings.yaml", "transcripts.jsonl"}
    commands = re.findall(rf"(?:{re.escape(str(Path(sys.executable).parent))}/\w+|(?<=  )srl) .*", shown)
    expected = ("tensorboard", " memory list ", " report ")
    assert [any(name in line for line in commands) for name in expected] == [True] * 3
    for line in commands:
        assert_works_elsewhere(line + (" --inspect" if "tensorboard" in line else ""), tmp_path)  # else it serves on
    found = re.search(r"before +([\d.]+)  \[.*\n +after +([\d.]+)", shown)
    title = f"Held-out accuracy {found[1]} .* before training, {found[2]} .* after iteration 2"
    assert re.search(title, (out / "report.html").read_text())
    (_,) = out.glob("events.out.tfevents.*")
    accuracy = EventAccumulator(str(out)).Reload().Scalars("evaluation/accuracy")
    assert [(event.step, f"{event.value:.3f}") for event in accuracy] == [(0, found[1]), (2, found[2])]
    assert quickstart.main([*flags[:-1]]) == 1
    assert "already has a run" in capsys.readouterr().err
