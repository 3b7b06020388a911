"""What happens when a learner is lost: how often a run goes back, where to, and what it says; without processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import ActorID
from ray.exceptions import ActorUnavailableError, OwnerDiedError

from rllib_srl.algorithm import checkpointing
from rllib_srl.algorithm.checkpointing import SavedAlgorithm
from rllib_srl.learner.group.learners import LearnerFailure, Learners, _is_broken_connection
from rllib_srl.storage.checkpoints import MANIFEST


class Run(SavedAlgorithm):
    """A run whose iterations and restores fail as told; it logs what is done."""

    def __init__(self, directory, outcomes, checkpoint_every=1):
        self.outcomes, self.log, self._iteration = list(outcomes), [], 3
        self.config = SimpleNamespace(checkpoint_every=checkpoint_every, num_learners=2)
        self._logdir, self.counts = str(directory), Counter(num_runner_restarts=2)
        self.metrics = SimpleNamespace(peek=lambda name, default: self.counts[name] or default)
        self.report = SimpleNamespace(warn=self.log.append, count=lambda name, n: self.counts.update({name: n}))
        self.learners = SimpleNamespace(num=2)
        self.runners = SimpleNamespace(is_local=False)

    def _iterate(self):
        return self.next()

    def _regroup(self):
        pass

    def restore_from_path(self, path, trust):
        self._iteration, self.counts = 2, Counter()  # the checkpoint's
        self.next()
        self.log.append(f"{path.name} {trust}")

    def set_state(self, state):
        self.log.append(state)

    def _sync_restored(self):
        self.next()

    def next(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


DIED = LearnerFailure("learner 1 died while updating")


def saved(directory):
    place = directory / "checkpoint_000002"
    place.mkdir()
    (place / MANIFEST).touch()
    return place


def test_the_newest_checkpoint_is_restored_and_the_iteration_run_again(tmp_path):
    run = Run(tmp_path, [DIED, None, {"reward": 1}])
    run._newest = saved(tmp_path), True
    assert run.step() == {"reward": 1}
    assert run.log == [
        f"{DIED}; starting new learners from {tmp_path / 'checkpoint_000002'} (attempt 1 of 3)",
        "checkpoint_000002 True",
        "training goes on after iteration 2 with 2 of 2 learners",
    ]
    # Restarts are not those of the checkpoint.
    assert run.counts == {"num_learner_rebuilds": 1, "num_iterations_repeated": 1, "num_runner_restarts": 2}


def test_a_learner_that_dies_while_the_checkpoint_is_restored_counts_as_another(tmp_path):
    run = Run(tmp_path, [DIED, LearnerFailure("a learner died while starting"), None, {}])
    run._newest = saved(tmp_path), False
    run.step()
    assert [line for line in run.log if "attempt 2 of 3" in line and line.startswith("a learner died while starting")]
    assert run.counts["num_learner_rebuilds"] == 2 and run.counts["num_iterations_repeated"] == 1


def test_learners_that_always_die_end_the_run(tmp_path):
    run = Run(tmp_path, [DIED, None] * checkpointing.MAX_REBUILDS + [DIED])
    run._newest = saved(tmp_path), False
    with pytest.raises(LearnerFailure, match="^learner 1 died while updating; 3 groups of learners were lost"):
        run.step()
    assert run.outcomes == []


def test_without_checkpoints_the_run_ends_with_the_setting_to_change(tmp_path):
    run = Run(tmp_path, [DIED], checkpoint_every=0)
    with pytest.raises(LearnerFailure, match="there is no checkpoint to go on from: checkpoint_every = 0$"):
        run.step()


def test_before_the_first_checkpoint_the_run_begins_again(tmp_path):
    run = Run(tmp_path, [DIED, None, {}])
    run._begin = {"srl": "state"}
    run.step()
    assert run.log[0] == f"{DIED}; starting new learners from the beginning (attempt 1 of 3)"
    assert run.log[1] == {"srl": "state"}


def test_a_checkpoint_that_tune_has_moved_is_found_and_one_that_is_gone_named(tmp_path):
    run = Run(tmp_path, [DIED, None, {}, DIED])
    run._newest = tmp_path / "temporary", False
    place = saved(tmp_path)
    run.step()
    assert "checkpoint_000002 False" in run.log
    (place / MANIFEST).unlink()
    with pytest.raises(LearnerFailure, match="the last checkpoint, .*/temporary, is gone$"):
        run.step()


def test_groups_that_died_with_their_node_are_a_reason_to_go_back():
    def lost(*args, **kwargs):
        raise OwnerDiedError("00" * 28, None, "")

    learners = Learners(SimpleNamespace(is_local=True, update=lost, _learner=SimpleNamespace(reuse_report=lost)))
    with pytest.raises(LearnerFailure, match="^groups were lost with their node while updating$"):
        learners.update([], {}, 1, 8.0)


@pytest.mark.parametrize(
    ("error", "is_broken"),
    [(RuntimeError("[/third_party/gloo/gloo/tcp/pair.cc:537] Read error"), True), (ValueError("loss is nan"), False)],
)
def test_only_broken_connections_are_taken_for_the_loss_of_a_learner(error, is_broken):
    assert _is_broken_connection(error) is is_broken


def test_a_message_that_is_lost_while_a_checkpoint_is_written_is_a_reason_to_go_back():
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
    run, draining = Run(tmp_path, []), {"other"}
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
    run, target = Run(tmp_path, []), tmp_path / "new/model"
    run.config.sync_timeout_s = 1.0
    run.learners.first_sees = lambda file, timeout_s: Path(file).parent == target and Path(file).is_file()
    run.check_export(target)
    assert target.parent.is_dir() and not target.exists()
    run.learners.first_sees = lambda file, timeout_s: False
    with pytest.raises(FileNotFoundError, match=f"^{target} is not seen by learner 0, .*; expected a directory that"):
        run.check_export(target)
    assert not target.exists()


def test_an_export_that_went_to_another_nodes_disk_is_refused(tmp_path):
    run = Run(tmp_path, [])
    run.config.sync_timeout_s = 1.0
    run.learners.export = lambda directory, timeout_s: None  # wrote where this process cannot read
    with pytest.raises(FileNotFoundError, match="has no model: learner 0 wrote it on its own node; expected"):
        run.export_to_huggingface(tmp_path / "model")
