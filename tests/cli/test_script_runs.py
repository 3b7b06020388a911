"""The directory of a run: what is refused before anything starts."""

import json
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from rllib_srl.algorithm.config import SRLConfig
from rllib_srl.algorithm.named import ALGORITHMS
from rllib_srl.cli import compare, evaluate
from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.runs import (
    RunError,
    find_checkpoint,
    gone_if_it_fails,
    how_to_resume,
    new_directory,
    plan_run,
    resume_or_restart,
    source_of,
)
from rllib_srl.cli.shared.settings import SettingsError
from rllib_srl.cli.shared.training import _resume
from rllib_srl.people.rating_store import RATINGS, RatingStore
from rllib_srl.storage.checkpoints import CheckpointError, seal
from rllib_srl.storage.seal_key import make_key
from tests.people.answers import an_answer

SETTINGS = "env: compare\nenv_config: {}\nenvs: null\nmodel: tiny\nseed: 5\noptimizer_name: adamw\nlr: 0.1\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for iteration in (10, 20, 30):
        place = directory / f"checkpoint_{iteration:06d}"
        place.mkdir(parents=True)
        (place / "weights").write_text(f"{iteration}")
        if iteration < 30:
            seal(place, key=make_key())
    (directory / "settings.yaml").write_text(SETTINGS)
    return directory


@pytest.mark.parametrize("name", ["settings.yaml", "metrics.jsonl", "checkpoint_000010"])
def test_a_directory_in_use_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=f"--out {tmp_path} already has a run; set another, or delete it: no checkpoint"):
        plan_run(tmp_path, None, {"env": "compare"})


def test_what_is_not_an_unused_directory_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"--out {run} already has a run; set another, or resume it: --resume {run}"):
        plan_run(run, None, {"env": "compare"})
    with pytest.raises(CheckpointError, match="settings.yaml is a file; expected a checkpoint, or the directory of a"):
        find_checkpoint(run / "settings.yaml")
    with pytest.raises(RunError, match="is a file"):
        plan_run(run / "settings.yaml", None, {})
    (tmp_path / "empty").mkdir()
    plan = plan_run(tmp_path / "empty", None, {"env": "compare"})
    assert (plan.directory, plan.checkpoint, plan.values) == (tmp_path / "empty", None, {"env": "compare"})
    assert new_directory("my.module:Env").name.startswith("my.module-Env-")


def test_resume_takes_the_newest_finished_checkpoint_and_its_settings(run: Path) -> None:
    plan = plan_run(None, run, {"lr": 0.2, "seed": 5})
    assert (plan.directory, plan.checkpoint) == (run, run / "checkpoint_000020")
    assert (plan.values["lr"], plan.values["env"], plan.values["seed"]) == (0.2, "compare", 5)
    assert how_to_resume(run) == f"continue with: {command('train', '--resume', run)}"
    assert how_to_resume(run, "--export", run / "a b").endswith(f" --resume {run} --export '{run}/a b'")


def test_auto_resumes_the_newest_checkpoint_or_starts_in_an_unused_directory(run: Path, tmp_path: Path) -> None:
    assert resume_or_restart(run) == run and plan_run(run, run, {}).checkpoint == run / "checkpoint_000020"
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty"):
        assert resume_or_restart(tmp_path / name) is None


def test_auto_sets_an_attempt_without_a_checkpoint_aside(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("the user's")
    for attempt in ("1", "2"):
        (tmp_path / "metrics.jsonl").write_text("")
        (tmp_path / "replay").mkdir()
        (tmp_path / "replay" / "memory.db").write_text(attempt)
        (tmp_path / "checkpoint_000010").mkdir()  # unfinished
        assert resume_or_restart(tmp_path) is None
        assert plan_run(tmp_path, None, {"env": "compare"}).checkpoint is None
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "earlier-attempts"}
    kept = {path.name: (path / "replay/memory.db").read_text() for path in (tmp_path / "earlier-attempts").iterdir()}
    assert kept == {"1": "1", "2": "2"}


def test_ratings_go_to_another_directory_once(run: Path, tmp_path: Path) -> None:
    """An attempt there was lost before its first checkpoint, after somebody had rated."""
    with RatingStore(run / RATINGS) as store:
        store.rate(an_answer(1), "good")
    plan = plan_run(tmp_path / "second", run / "checkpoint_000020", {})
    plan.directory.mkdir()
    algo = MagicMock(iteration=20)
    for num in (1, 2):
        _resume(algo, plan, run / "checkpoint_000020", MagicMock())
        with RatingStore(plan.directory / RATINGS) as store:
            assert len(store.all()) == num
            store.rate(an_answer(2), "bad")


def test_resume_refuses_to_change_what_is_trained_on_what(run: Path) -> None:
    with pytest.raises(RunError) as caught:
        plan_run(None, run, {"env": "lookup", "seed": 6, "lr": 0.2})
    assert str(caught.value).splitlines()[1:] == ["  env = 'lookup'; expected 'compare'", "  seed = 6; expected 5"]


def test_the_files_of_a_resumed_run_may_have_moved(run: Path) -> None:
    data = {"path": "/old/place/rows.jsonl", "reward": "/old/place/own.py:f", "num_shots": 0}
    settings = SETTINGS.replace("compare", "question_file").replace("{}", json.dumps(data))
    (run / "settings.yaml").write_text(settings)
    moved = {"path": "/new/rows.jsonl", "reward": "/new/own.py:f", "num_shots": 0}
    assert plan_run(None, run, {"env_config": moved}, trust=True).values["env_config"] == moved
    for other in ({**moved, "path": "/new/others.jsonl"}, {**moved, "reward": "/new/own.py:g"}):
        with pytest.raises(RunError, match=r"env_config = .*expected"):
            plan_run(None, run, {"env_config": other}, trust=True)


def test_an_earlier_checkpoint_needs_a_new_directory(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"would overwrite checkpoint_000020: set a new directory"):
        plan_run(None, run / "checkpoint_000010", {})
    plan = plan_run(tmp_path / "other", run / "checkpoint_000010", {})
    assert (plan.directory, plan.checkpoint) == (tmp_path / "other", run / "checkpoint_000010")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="already has a run"):
        plan_run(tmp_path, run / "checkpoint_000010", {})


def test_a_checkpoint_that_somebody_else_sealed_needs_trust(run: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "their.key"
    seal(run / "checkpoint_000020", key=make_key(theirs))
    with pytest.raises(CheckpointError, match=r"sealed with another key than .*seal.key.*pass --trust-checkpoint"):
        plan_run(None, run, {})
    assert plan_run(None, run, {}, trust=True).is_trusted
    assert not plan_run(None, run, {"seal_key_file": str(theirs)}).is_trusted
    # Which key is believed is the user's to say: the run's own settings may come with the checkpoint.
    (run / "settings.yaml").write_text(SETTINGS + f"seal_key_file: {theirs}\n")
    with pytest.raises(CheckpointError, match="sealed with another key than"):
        plan_run(None, run, {})
    assert "seal_key_file" not in plan_run(None, run, {}, trust=True).values


def test_missing_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; expected a checkpoint, or the directory of a run"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        find_checkpoint(tmp_path / "empty")
    assert how_to_resume(tmp_path / "empty").endswith(f"finished; --out {tmp_path / 'empty'} can be used again")
    (tmp_path / "empty/metrics.jsonl").touch()
    assert how_to_resume(tmp_path / "empty").startswith("no checkpoint was written yet")


def test_a_source_is_a_checkpoint_with_its_settings_or_a_model(run: Path, tmp_path: Path) -> None:
    for what, iteration in ((run, 20), (run / "checkpoint_000010", 10)):
        source = source_of(str(what))
        assert source.checkpoint == run / f"checkpoint_{iteration:06d}"
        assert (source.settings["model"], source.settings["lr"]) == ("tiny", 0.1)
    assert source_of("owner/name") == (None, {"model": "owner/name"})
    (tmp_path / "mine").mkdir()
    with pytest.raises(CheckpointError, match=r"mine has neither a run \(settings.yaml\) nor a model \(config.json\)"):
        source_of(tmp_path / "mine")
    (tmp_path / "mine/config.json").touch()
    assert source_of(tmp_path / "mine") == (None, {"model": str(tmp_path / "mine")})
    with pytest.raises(CheckpointError, match="minee does not exist; did you mean .*mine"):
        source_of(tmp_path / "minee")
    (run / "settings.yaml").unlink()
    with pytest.raises(RunError, match="run has no settings.yaml; expected a run of srl train"):
        source_of(run)
    assert source_of(run, needs_settings=False) == (run / "checkpoint_000020", {})


def test_a_file_of_settings_does_not_choose_what_is_evaluated(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    path, models = tmp_path / "run.yaml", []
    path.write_text("model: owner/another\niterations: 9\nmax_failures: 1\nlr: 0.2\n")

    def stop(config: SRLConfig) -> None:
        models.append((config.model_config["model"], config.lr))
        raise SettingsError("enough")

    for program, what in ((evaluate, [run]), (compare, [run, "tiny"])):
        monkeypatch.setattr(program, "check", stop)
        assert program.main([*map(str, what), "--config", str(path)]) == 1
        note = f"note: this command does not use these settings of {path}: model, iterations, max_failures\n"
        assert capsys.readouterr().err == f"{note}error: enough\n"
    assert models == [("tiny", 0.2)] * 2  # the run's


def test_a_run_that_fails_before_an_iteration_leaves_no_directory(run: Path, tmp_path: Path) -> None:
    error = KeyboardInterrupt

    def fail(directory: Path) -> None:
        with gone_if_it_fails(directory):
            (directory / "replay").mkdir(parents=True)
            (directory / "events").write_text("")
            raise error

    empty = tmp_path / "empty"
    empty.mkdir()
    for directory in (tmp_path / "new", empty, run):
        with pytest.raises(error):
            fail(directory)
    assert not (tmp_path / "new").exists()
    assert empty.is_dir() and not list(empty.iterdir())
    assert (run / "events").exists() and (run / "checkpoint_000020").exists()  # what lies there may be a run
    with suppress(error), gone_if_it_fails(tmp_path / "trained"):
        (tmp_path / "trained").mkdir()
        (tmp_path / "trained/metrics.jsonl").touch()  # an iteration has finished
        raise error
    with suppress(error), gone_if_it_fails(tmp_path / "lost", is_kept=lambda one: isinstance(one, error)):
        (tmp_path / "lost").mkdir()  # a supervisor starts it again
        raise error
    with gone_if_it_fails(tmp_path / "new"):
        (tmp_path / "new").mkdir()
    assert all((tmp_path / name).exists() for name in ("trained", "lost", "new"))


def test_what_a_resumed_run_cannot_do_is_said_before_anything_starts(run: Path) -> None:
    seal(run / "checkpoint_000030", {"has_memory": True, "iteration": 30}, make_key())
    plan = plan_run(None, run, {"replay_capacity": 9})
    plan.refuse_done(31)
    with pytest.raises(RunError, match="iterations = 30; expected more than the 30 that"):
        plan.refuse_done(30)
    with pytest.raises(RunError, match="checkpoint has a memory.*leave out replay_capacity .*algorithm.*loss = 'dapo'"):
        plan_run(None, run, ALGORITHMS["dapo"])
