"""`RolloutsAhead` over runners that delay, die and rest at random: nothing is lost, doubled or played at rest."""

import random
import time
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.common.remote_calls import Failure
from rllib_srl.rollout import ahead as ahead_module
from rllib_srl.rollout.ahead import RolloutsAhead
from rllib_srl.rollout.batches import RunnerBatch, Slice
from rllib_srl.rollout.runner_group import PendingSlice
from rllib_srl.types import Prompt

SIZE = 2  # episodes of a group


class Runners:
    """Runners whose groups take one to three slices of up to 2 ms, and which die in `death` of their slices.

    Invariant: `now` is the version of the weights, changed by the test while no slice is played.
    """

    def __init__(self, rng: random.Random, num: int, death: float) -> None:
        self.ids, self.now = list(range(1, num + 1)), 0
        self.began: dict[str, int] = {}  # group -> version
        self.num_lost = self.num_in_slice = 0
        self._rng, self._death = rng, death
        self._playing: dict[int, dict[str, tuple[int, int]]] = {i: {} for i in self.ids}  # slices left and episodes
        self._ready_at: dict[int, float] = {}  # by answer

    def start_slice(self, runner_id, version, slice_s, enough, begin) -> PendingSlice:
        assert version == self.now and runner_id not in self._ready_at
        self.num_in_slice += 1
        own = self._playing[runner_id]
        for group_id in begin["prompts"] if begin else ():
            assert group_id not in own
            own[group_id] = self._rng.randint(1, 3), begin["group_size"]
            self.began[group_id] = self.now
        self._ready_at[runner_id] = time.monotonic() + self._rng.uniform(0, 0.002)
        return PendingSlice(runner_id, runner_id, None)

    def wait(self, answers, num_returns, timeout):
        first = min(answers, key=self._ready_at.__getitem__)
        time.sleep(max(0.0, self._ready_at[first] - time.monotonic()))
        return [first], [one for one in answers if one != first]

    def slice_of(self, pending, timeout_s) -> Slice | Failure:
        del self._ready_at[pending.answer]
        self.num_in_slice -= 1
        own = self._playing[pending.runner_id]
        if self._rng.random() < self._death:
            own.clear()
            self.num_lost += 1
            return Failure("died", is_hung=False)
        left = {group_id: (num - 1, size) for group_id, (num, size) in own.items()}
        ended = [group_id for group_id, (num, _) in left.items() if not num]
        self._playing[pending.runner_id] = {group_id: one for group_id, one in left.items() if one[0]}
        batches = {one: RunnerBatch(self.began[one], [], 0, {one: 1}, 1, [], []) for one in ended}
        return Slice(batches, {}, len(left) - len(ended))


def launch(ahead: RolloutsAhead, names: list[str], rng: random.Random) -> None:
    """Launch each group on the runner with the fewest episodes, as the algorithm does."""
    for name in names:
        loads = ahead.loads()
        prompt = Prompt("env", name)
        arguments = {"prompts": {name: prompt}, "group_size": SIZE, "seed": None}
        ahead.launch(min(loads, key=loads.__getitem__), arguments)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_runners=st.integers(1, 3),
    death=st.sampled_from([0.0, 0.05, 0.3]),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
)
def test_every_group_is_delivered_once_and_lags_by_the_updates_since_it_began(seed, num_runners, death, sizes):
    rng = random.Random(seed)
    runners, delivered, restarts = Runners(rng, num_runners, death), Counter(), Counter()
    launched: dict[str, int] = {}  # group -> version
    original, ahead_module.ray = ahead_module.ray, SimpleNamespace(wait=runners.wait)

    def restore(lost):
        restarts.update(list(lost))
        ahead.restarted(lost)

    ahead = RolloutsAhead(runners, restore, slice_s=0.002, timeout_s=30.0, max_tries=10**6)

    def take(num):
        in_order = [one.group_id for one in ahead.outstanding]
        batches = ahead.take(num)
        names = [next(iter(batch.stop_reasons)) for batch in batches]
        assert len(names) == min(num, len(in_order)) and names == sorted(names, key=in_order.index)
        delivered.update(names)
        for name, batch in zip(names, batches, strict=True):
            # played again after a death, a group has no token of the version it was first launched with
            assert launched[name] <= batch.version == runners.began[name] <= runners.now

    try:
        for at, num in enumerate(sizes):
            names = [f"{at}.{slot}" for slot in range(2 * num if at == 0 else num)]
            launched.update(dict.fromkeys(names, runners.now))
            launch(ahead, names, rng)
            take(num)
            if rng.random() < 0.2:
                ahead.finish()
            with ahead.at_rest():
                assert runners.num_in_slice == 0
                time.sleep(rng.uniform(0, 0.002))
                runners.now = ahead.version = runners.now + 1
                assert runners.num_in_slice == 0
        take(10**6)
    finally:
        ahead.close()
        ahead_module.ray = original
    assert set(delivered.values()) == {1} and sum(delivered.values()) == sizes[0] + sum(sizes)
    assert not ahead.outstanding
    assert death or not restarts


class HungRunner:
    """Runner 1, whose third slice never ends; after a restart its fifth ends the group."""

    ids: ClassVar = [1]

    def __init__(self) -> None:
        self.num = 0
        self.is_hung = False

    def start_slice(self, runner_id, version, slice_s, enough, begin) -> PendingSlice:
        self.num += 1
        self.is_hung = self.num == 3
        return PendingSlice(runner_id, self.num, None)

    def wait(self, answers, num_returns, timeout):
        time.sleep(timeout)
        return ([], answers) if self.is_hung else (answers, [])

    def slice_of(self, pending, timeout_s) -> Slice:
        if self.num < 5:
            return Slice({}, {}, 1)
        return Slice({"a": RunnerBatch(0, [], 0, {"a": 1}, 1, [], [])}, {}, 0)


def test_a_runner_that_hangs_after_the_wait_began_is_restarted(monkeypatch):
    runner, restarts = HungRunner(), []
    monkeypatch.setattr(ahead_module, "ray", SimpleNamespace(wait=runner.wait))

    def restore(lost):
        restarts.extend((runner_id, failure.is_hung) for runner_id, failure in lost.items())
        ahead.restarted(lost)

    ahead = RolloutsAhead(runner, restore, slice_s=0.1, timeout_s=1.0, max_tries=3)
    try:
        launch(ahead, ["a"], random.Random(0))
        assert [list(batch.stop_reasons) for batch in ahead.take(1)] == [["a"]]
    finally:
        ahead.close()
    assert restarts == [(1, True)]


def test_coming_to_rest_outlasts_a_slice_that_hangs(monkeypatch):
    runner = HungRunner()
    monkeypatch.setattr(ahead_module, "ray", SimpleNamespace(wait=runner.wait))
    ahead = RolloutsAhead(runner, lambda lost: ahead.restarted(lost), slice_s=0.1, timeout_s=1.0, max_tries=3)
    try:
        launch(ahead, ["a"], random.Random(0))
        deadline = time.monotonic() + 30
        while not runner.is_hung and time.monotonic() < deadline:
            time.sleep(0.001)
        with ahead.at_rest():
            assert runner.num == 3
        assert [list(batch.stop_reasons) for batch in ahead.take(1)] == [["a"]]
    finally:
        ahead.close()
