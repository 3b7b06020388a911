"""Runners that come back without the weights, die again while they are restored, or die asleep; without processes."""

import pickle
from functools import partial
from types import SimpleNamespace

import pytest

from rllib_srl import SRL, SRLConfig
from rllib_srl.common.remote_calls import ActorFailure, Failure, RunnerFailure
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.rollout.rollouts import MAX_TRIES, Rollouts
from tests.replay.groups import a_group

DIED = Failure("died (killed)", is_hung=False)


class Restarted(LLMEnvRunner):
    """Has the weights of its files."""

    def __init__(self):
        self.engine = SimpleNamespace(version=0)


def test_a_runner_plays_only_with_the_weights_it_is_asked_to():
    assert Restarted().play_groups(3, {"1.0": a_group(1).prompt}, 2, seed=1) == (None, [])


class Fakes:
    """What an algorithm needs to restore runners: a log of what is done, and how often restoring fails first."""

    _engines_at_rest = SRL._engines_at_rest

    def __init__(self, num_failures=0, dead=()):
        self.log, self.num_failures, self.dead = [], num_failures, dict(dead)
        self.config = SimpleNamespace(sync_timeout_s=1.0, num_learners=0, colocate=True)
        notes = SimpleNamespace(warn=lambda line: None, count=lambda name, n: self.log.append(name))
        runners = SimpleNamespace(
            ids=[1, 2],
            revive=lambda i, failure, s: self.log.append(f"revive {i}"),
            sleep=partial(self.each, "sleep"),
            wake_up=partial(self.each, "wake_up"),
        )
        self.rollouts = Rollouts(runners, SRLConfig(), 2, 0, self.start, notes)
        self.rollouts.version = self.version = 7
        self.learners = SimpleNamespace(onload=lambda timeout_s: None, offload=lambda timeout_s: None)

    def start(self, version, ids):
        self.log.append(f"weights {version} to {ids}")
        if self.num_failures:
            self.num_failures -= 1
            raise RunnerFailure(ids[0], DIED, "testing weights")

    def each(self, method, ids, timeout_s):
        self.log.append(f"{method} {sorted(ids)}")
        return {i: DIED for i in ids if self.dead.pop((method, i), False)}


def test_a_runner_that_always_dies_ends_the_run_by_name():
    algo = Fakes(num_failures=99)
    with pytest.raises(ActorFailure, match=r"^runner 1 died \(killed\) while testing weights$") as caught:
        algo.rollouts.restore({1: DIED})
    assert algo.log.count("revive 1") == MAX_TRIES
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.runner_id, again.failure, str(again)) == (1, DIED, str(caught.value))


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_a_runner_that_dies_before_it_sleeps_or_wakes_is_restored(method):
    algo = Fakes(dead={(method, 2): True})
    with algo._engines_at_rest():
        algo.log.append("learn")
    restored = ["revive 2", "num_runner_restarts", "weights 7 to [2]"]
    if method == "sleep":
        assert algo.log == ["sleep [1, 2]", *restored, "sleep [2]", "learn", "wake_up [1, 2]"]
    else:
        assert algo.log == ["sleep [1, 2]", "learn", "wake_up [1, 2]", *restored]


@pytest.mark.parametrize(("takes_turns", "expected"), [(True, ["offload", "sync 7"]), (False, ["sync 7"])])
def test_a_restored_optimiser_makes_room_before_weights_are_sent(takes_turns, expected):
    """It is restored onto the learner's GPU; with turns an awake engine has no room for it there."""
    algo = Fakes()
    algo.config.colocate = takes_turns
    algo.learners = SimpleNamespace(offload=lambda timeout_s: algo.log.append("offload"))
    algo.weight_sync = SimpleNamespace(sync=lambda version: (algo.log.append(f"sync {version}"), {}))
    SRL._sync_restored(algo)
    assert algo.log == expected
