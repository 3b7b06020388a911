"""A call names a method of the remote class and runs the target's own; proxies keep timeouts, order and messages."""

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from rllib_srl.common import remote_calls
from rllib_srl.common.remote_calls import ActorFailure, Call, Failure, Place, RunnerFailure, end_family, family_of
from rllib_srl.engine.protocol import EngineBrokenError
from rllib_srl.learner.group import learners as learner_group
from rllib_srl.learner.group.learners import Learners
from rllib_srl.rollout import runner_group
from rllib_srl.rollout.batches import Loaded, RunnerBatch
from rllib_srl.rollout.runner_group import RunnerGroup
from rllib_srl.types import GroupMeta, ListedRef
from tests.replay.groups import a_group

DIED = Failure("died (killed)", is_hung=False)


class Counter:
    def add(self, number: int, *, times: int = 1) -> int:
        return number * times

    def split(self, number: int) -> tuple[int, str]:
        return number, "second"


class Broken:
    def fail(self) -> None:
        raise EngineBrokenError("vLLM failed in a step: a worker died\ndetails")


class Doubling(Counter):
    def add(self, number: int, *, times: int = 1) -> int:
        return 2 * super().add(number, times=times)


class Remote:
    """A method of an actor handle: notes its arguments, and answers with a reference that is the answer itself."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def options(self, num_returns):
        return self

    def remote(self, *arguments, **named):
        self.calls.append((arguments, named))
        return self.answer


@pytest.fixture
def arrived(monkeypatch):
    """Replace `gather`: a reference is its own value, and the timeouts are noted."""
    timeouts = []

    def gather(references, timeout_s):
        timeouts.append(timeout_s)
        return iter(references.items())

    for module in (runner_group, learner_group):
        monkeypatch.setattr(module, "gather", gather)
    return timeouts


@pytest.mark.slow
def test_a_broken_process_is_a_failure_and_must_be_killed(ray_here):
    actor = ray.remote(Broken).options(num_cpus=0).remote()
    expected = Failure("cannot continue (vLLM failed in a step: a worker died)", is_hung=True)
    assert dict(remote_calls.gather({5: Call.of(Broken.fail).submit(actor)}, 60)) == {5: expected}
    ray.kill(actor)


@pytest.mark.slow
def test_two_return_values_are_two_references(ray_here):
    actor = ray.remote(Doubling).options(num_cpus=0).remote()
    first, second = Call.of(Counter.split, 3).submit_both(actor)
    assert dict(remote_calls.gather({5: first}, 60)) == {5: 3} and ray.get(second, timeout=60) == "second"
    assert dict(remote_calls.gather({5: Call.of(Counter.add, 3).submit(actor)}, 60)) == {5: 6}
    ray.kill(actor)


def runners_of(*actors) -> RunnerGroup:
    manager = SimpleNamespace(actors=lambda: dict(enumerate(actors, 1)))
    return RunnerGroup(SimpleNamespace(local_env_runner=None, _worker_manager=manager))


def batch(group) -> RunnerBatch:
    return RunnerBatch(4, [GroupMeta.of(group, None)], 0, {}, 1, [], [])


def test_played_groups_are_references_into_the_second_value(arrived):
    group = a_group(1)
    played, restarted = Remote([batch(group), "groups"]), Remote([None, "none"])
    runners = runners_of(SimpleNamespace(play_groups=played), SimpleNamespace(play_groups=restarted))
    arguments = {i: {"prompts": {"1.0": group.prompt}, "group_size": 2, "seed": i} for i in (1, 2)}
    answers = dict(runners.play_groups(arguments, 4, 7.0))
    assert [meta.ref for meta in answers[1].groups] == [ListedRef("groups", 0)]
    assert answers[2] == Failure("was restarted and does not have the current weights", is_hung=False)
    assert played.calls == [((4,), arguments[1])] and restarted.calls == [((4,), arguments[2])]
    assert arrived == [7.0]


def test_a_result_that_is_missing_is_a_failure_or_an_exception_by_name(arrived):
    loaded = Loaded([], {})
    methods = ("load_weights", "load_noise", "fingerprint", "check_started", "sleep")
    dead = SimpleNamespace(**dict.fromkeys(methods, Remote(DIED)))
    well = SimpleNamespace(load_weights=Remote(loaded), check_started=Remote(None), sleep=Remote(None))
    runners = runners_of(well, dead)
    pending = runners.start_loading([1, 2], "bundle", [[1]], 9.0)
    assert well.load_weights.calls == [(("bundle", [[1]], 9.0), {})] and arrived == []  # begun, not waited for
    assert runners.loaded(pending, 9.0) == {1: loaded, 2: DIED}
    assert runners.sleep([1, 2], 5.0) == {2: DIED} and runners.sleep([1], 5.0) == {}
    for call, what in (
        (lambda: runners.load_noise([2], 6.0), r"testing weights \(noise\)"),
        (lambda: runners.fingerprint([2], 6.0), r"testing weights \(fingerprint\)"),
        (lambda: runners.check_started(6.0), "starting"),
    ):
        with pytest.raises(RunnerFailure, match=rf"^runner 2 died \(killed\) while {what}$"):
            call()
    assert arrived == [9.0, 5.0, 5.0, 6.0, 6.0, 6.0]


def sleeping_as(name: str, program: str = "sleep", arguments: Sequence[str] = ("60",)) -> subprocess.Popen:
    """Start a process of a name; its name shows a moment after its start."""
    process = subprocess.Popen([name, *arguments], executable=shutil.which(program))
    while not Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(name.encode()):
        time.sleep(0.01)
    return process


def test_a_worker_is_ended_with_what_it_started_on_its_own_node_only(monkeypatch):
    """The workers of an engine outlive their runner if they are stopped; a process that is not Ray's is left alone."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    worker = sleeping_as("ray::IDLE", "sh", ["-c", "sleep 60 & wait"])
    other = sleeping_as("sleep")
    try:
        while not (children := psutil.Process(worker.pid).children()):
            time.sleep(0.01)
        (child,) = children
        assert family_of(Place("elsewhere", worker.pid)) == [] == family_of(Place("here", other.pid))
        family = family_of(Place("here", worker.pid))
        assert [one.pid for one in family] == [worker.pid, child.pid]
        child.suspend()
        end_family(family)
        assert worker.wait(60) == -signal.SIGKILL
        child.wait(60)
        end_family(family)  # they are gone
        assert family_of(Place("here", worker.pid)) == [] and other.poll() is None
    finally:
        for process in (worker, other):
            process.kill()
            process.wait(60)


def test_a_dead_learner_is_named_with_what_it_did(arrived):
    workers = [SimpleNamespace(take_saved=Remote(answer)) for answer in (True, DIED)]
    manager = SimpleNamespace(actors=lambda: dict(enumerate(workers)))
    config = SimpleNamespace(num_learners=2, fsdp=False)
    group = SimpleNamespace(is_local=False, _workers=workers, _worker_manager=manager, config=config)
    with pytest.raises(ActorFailure, match=r"^learner 1 died \(killed\) while writing a checkpoint$"):
        Learners(group).take_saved(8.0)
