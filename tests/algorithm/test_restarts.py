"""Runners that come back without the weights, die again while they are restored, or die asleep; without processes."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from rllib_srl import SRL
from rllib_srl.algorithm.srl import MAX_TRIES
from rllib_srl.common.remote_calls import ActorFailure, Failure, RunnerFailure
from rllib_srl.rollout.env_runner import LLMEnvRunner, RunnerBatch
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group

DIED = Failure("died (killed)", is_silent=False)


class Played(LLMEnvRunner):
    """Has played one group, whatever it is asked."""

    def __init__(self, version):
        self.engine = SimpleNamespace(version=version)

    def play_groups(self, as_groups=True):
        group = a_group(1)
        metas = [GroupMeta.of(group, group if as_groups else None)]
        return RunnerBatch(self.engine.version, metas, 0, {}, 4, [], [])


def test_a_runner_plays_only_with_the_weights_it_is_asked_to():
    batch, groups = Played(3).play_groups_apart(3)
    assert batch.version == 3 and [meta.ref for meta in batch.groups] == [None]
    assert [group.group_id for group in groups] == [meta.group_id for meta in batch.groups]
    assert Played(0).play_groups_apart(3) == (None, [])  # restarted: it has the weights of its files


class Fakes:
    """What an algorithm needs to restore runners: a log of what is done, and how often restoring fails first."""

    _restore_runners, _engines_at_rest, _asked_runners = (
        SRL._restore_runners,
        SRL._engines_at_rest,
        SRL._asked_runners,
    )

    def __init__(self, num_failures=0, dead=()):
        self.log, self.num_failures, self.dead = [], num_failures, dict(dead)
        self.version = 7
        self.config = SimpleNamespace(start_timeout_s=1.0, sync_timeout_s=1.0, num_learners=0, colocate=True)
        self.report = SimpleNamespace(warn=lambda line: None, count=lambda name, n: self.log.append(name))
        self.runners = SimpleNamespace(
            ids=[1, 2], revive=lambda i, failure, s: self.log.append(f"revive {i}"), each=self.each, all=self.each
        )
        self.weight_sync = SimpleNamespace(start=self.start)
        learner = SimpleNamespace(take_room=lambda: None, make_room=lambda: None)
        self.learner_group = SimpleNamespace(is_local=True, _learner=learner)

    def start(self, version, ids):
        self.log.append(f"weights {version} to {ids}")
        if self.num_failures:
            self.num_failures -= 1
            raise RunnerFailure(ids[0], DIED, "testing weights")

    def each(self, method, kwargs, timeout_s, what=""):
        self.log.append(f"{method} {sorted(kwargs)}")
        return [(i, DIED if self.dead.pop((method, i), False) else None) for i in kwargs]


def test_a_runner_that_dies_while_it_is_restored_is_restored_again():
    algo = Fakes(num_failures=2)
    algo._restore_runners({1: DIED})
    assert algo.log == ["revive 1", "num_runner_restarts", "weights 7 to [1]"] * 3


def test_a_runner_that_always_dies_ends_the_run_by_name():
    algo = Fakes(num_failures=99)
    with pytest.raises(ActorFailure, match=r"^runner 1 died \(killed\) while testing weights$") as caught:
        algo._restore_runners({1: DIED})
    assert algo.log.count("revive 1") == MAX_TRIES
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.runner_id, again.failure, str(again)) == (1, DIED, str(caught.value))


@pytest.mark.parametrize("method", ["rest", "rise"])
def test_a_runner_that_dies_before_it_sleeps_or_wakes_is_restored(method):
    algo = Fakes(dead={(method, 2): True})
    with algo._engines_at_rest():
        algo.log.append("learn")
    restored = ["revive 2", "num_runner_restarts", "weights 7 to [2]"]
    if method == "rest":
        assert algo.log == ["rest [1, 2]", *restored, "rest [2]", "learn", "rise [1, 2]"]
    else:
        assert algo.log == ["rest [1, 2]", "learn", "rise [1, 2]", *restored]
