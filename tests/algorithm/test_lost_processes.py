"""What a run says when a process is gone that it cannot replace; without processes."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import ActorID
from ray.exceptions import ActorDiedError, ActorUnavailableError, OwnerDiedError, RayTaskError, RuntimeEnvSetupError

from rllib_srl.algorithm import checkpointing
from rllib_srl.algorithm.checkpointing import SavedAlgorithm
from rllib_srl.common.remote_calls import ProcessLost, is_loss
from rllib_srl.engine.protocol import EngineBrokenError
from rllib_srl.learner.group.learners import LearnerFailure, Learners, _is_broken_connection
from rllib_srl.storage.checkpoints import MANIFEST


class Run(SavedAlgorithm):
    """A run in a directory, without processes; `ended` counts how often its learners were ended."""

    def __init__(self, directory):
        self._logdir, self.ended, self.log = str(directory), 0, []
        self.config = SimpleNamespace(sync_timeout_s=1.0)
        self.report = SimpleNamespace(warn=self.log.append)
        self.learners = SimpleNamespace(end=self._end)

    def _end(self):
        self.ended += 1


def saved(directory: Path, iteration: int) -> str:
    place = directory / f"checkpoint_{iteration:06d}"
    place.mkdir()
    (place / MANIFEST).touch()
    return str(place)


def test_a_loss_ends_the_learners_and_names_the_newest_checkpoint(tmp_path):
    run, died = Run(tmp_path), LearnerFailure("learner 1 died while updating")
    assert str(run.lost(died)) == f"{died}; no checkpoint was written yet (checkpoint_every): start the run again"
    newest = [saved(tmp_path, 2), saved(tmp_path, 3)][-1]
    error = run.lost(died)
    assert str(error) == f"{died}; stop this algorithm and resume with SRL.from_checkpoint({newest!r})"
    run._newest = Path(saved(tmp_path / ".." / tmp_path.name, 9))  # written by the user, or restored
    assert run.lost(died).checkpoint == str(run._newest)
    run._newest = tmp_path / "moved by Tune"
    assert run.lost(died).checkpoint.endswith("checkpoint_000009")
    assert run.ended == 4
    again = pickle.loads(pickle.dumps(error))  # a trial of Tune raises it in another process
    assert (type(again), str(again), again.reason) == (ProcessLost, str(error), str(died))


@pytest.mark.parametrize(("error", "is_one"), [
    (ActorDiedError(), True),
    (EngineBrokenError("vLLM failed in a step"), True),
    (RayTaskError("f", "Traceback", ActorDiedError()), True),
    (RayTaskError("f", "Traceback", ValueError("bad input")), False),
    (RuntimeEnvSetupError("no such package"), False),
    (ValueError("loss is nan"), False),
    (OSError(28, "No space left on device"), False),
])  # fmt: skip
def test_only_lost_processes_are_losses(error, is_one):
    assert is_loss(error) is is_one


def test_groups_that_died_with_their_node_are_a_loss():
    def lost(*args, **kwargs):
        raise OwnerDiedError("00" * 28, None, "")

    learners = Learners(SimpleNamespace(is_local=True, update=lost))
    with pytest.raises(LearnerFailure, match="^groups were lost with their node while updating$"):
        learners.update([], {}, 1, 8.0)


def test_only_broken_connections_are_taken_for_the_loss_of_a_learner():
    assert _is_broken_connection(RuntimeError("[/third_party/gloo/gloo/tcp/pair.cc:537] Read error"))
    assert not _is_broken_connection(ValueError("loss is nan"))


def test_a_message_that_is_lost_while_a_checkpoint_is_written_is_a_loss():
    ids = [bytes([n]) * 16 for n in range(3)]
    learners = object.__new__(Learners)
    workers = [SimpleNamespace(_actor_id=ActorID(one)) for one in ids[:2]]
    learners._group = SimpleNamespace(is_local=False, _workers=workers)
    told = "^learner 1 could not be reached while writing a checkpoint$"
    with pytest.raises(LearnerFailure, match=told), learners.unreachable_reported("writing a checkpoint"):
        raise ActorUnavailableError("socket closed", ids[1])
    with pytest.raises(ActorUnavailableError), learners.unreachable_reported("writing a checkpoint"):
        raise ActorUnavailableError("socket closed", ids[2])  # no learner


def test_the_drain_notice_of_a_learners_node_leads_to_one_checkpoint(tmp_path, monkeypatch):
    run, draining = Run(tmp_path), {"other"}
    run.learners.nodes = {"a" * 12, "b" * 12}
    monkeypatch.setattr(checkpointing, "draining_nodes", lambda: draining)
    monkeypatch.setattr(checkpointing.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    assert not run._is_drain_noticed()
    draining |= {"b" * 12}
    assert run._is_drain_noticed() and not run._is_drain_noticed()
    draining |= {"here"}
    assert run._is_drain_noticed() and not run._is_drain_noticed()
    assert run.log == [f"Ray drains node {name} of this run; writing a checkpoint" for name in ("bbbbbbbb", "here")]


def test_an_export_to_a_directory_that_learner_0_does_not_see_is_refused_before_training(tmp_path):
    run, target = Run(tmp_path), tmp_path / "new/model"
    run.learners.first_sees = lambda file, timeout_s: Path(file).parent == target and Path(file).is_file()
    run.check_export(target)
    assert target.parent.is_dir() and not target.exists()
    run.learners.first_sees = lambda file, timeout_s: False
    with pytest.raises(FileNotFoundError, match=f"^learner 0, .* cannot see {target}; expected a directory that"):
        run.check_export(target)
    assert not target.exists()


def test_an_export_that_went_to_another_nodes_disk_is_refused(tmp_path):
    run = Run(tmp_path)
    run.learners.export = lambda directory, timeout_s: None  # wrote where this process cannot read
    with pytest.raises(FileNotFoundError, match="has no model: learner 0 wrote it on its own node; expected"):
        run.export_to_huggingface(tmp_path / "model")
