"""The driver's side of the weight sync with scripted engines: all engines in step, few packs, a second look in bf16."""

from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.rollout.batches import Loaded
from rllib_srl.weights.sync import WeightSync

NOISE = 77.0  # stands for weights of noise
RAW = np.linspace(-3, -0.1, 50)


def logps_of(weight):
    """Return the canary's log-probs under a weight: a number stands for a whole model."""
    return [RAW * (1 + weight)]


class Engines:
    """Engines that round: their log-probs differ from the learner's by `noise`."""

    def __init__(self, learner, ids, noise=0.01):
        self.learner, self.ids, self.noise = learner, list(ids), noise
        self.weights = dict.fromkeys(ids, learner.weight)
        self.deaf, self.calls = set(), []

    def rounded(self, runner_id):
        sign = np.where(np.arange(50) % 2, 1, -1)
        return [logps_of(self.weights[runner_id])[0] + sign * self.noise]

    def load_noise(self, ids, timeout_s):
        before = self.fingerprint(ids, timeout_s)
        self.calls.append(("noise", tuple(ids)))
        self.weights |= dict.fromkeys(ids, NOISE)
        noisy = self.fingerprint(ids, timeout_s)
        return {i: (before[i], noisy[i]) for i in ids}

    def fingerprint(self, ids, timeout_s):
        return {i: {"layer": (hash(self.weights[i]),)} for i in ids}

    def start_loading(self, ids, ref, sequences, timeout_s):
        self.calls.append(("load", tuple(ids)))
        return ids, ref

    def loaded(self, loading, timeout_s):
        ids, ref = loading
        answers = {}
        for i in ids:
            if i not in self.deaf:
                self.weights[i] = ref
            answers[i] = Loaded(self.rounded(i), {"get_s": 0.1, "load_s": 0.1})
        return answers


class Learner:
    weight, num_packs = 0.0, 0

    def send(self, version, timeout_s):
        self.num_packs += 1
        return SimpleNamespace(ref=self.weight, seconds={"pack_s": 1.0})

    def score_canary(self, sequences, timeout_s):
        return logps_of(self.weight)


@pytest.fixture
def learner():
    return Learner()


def sync_of(learner, engines, dtype="bfloat16"):
    return WeightSync(learner, engines, [[1, 2]], dtype, 5.0)


@pytest.mark.parametrize("num_engines", [1, 2, 16])
def test_the_start_sends_the_weights_once_for_all_engines(learner, num_engines):
    engines = Engines(learner, range(1, num_engines + 1))
    sync_of(learner, engines).start(0)
    ids = tuple(range(1, num_engines + 1))
    assert engines.calls == [("noise", ids), ("load", ids)]
    assert learner.num_packs == 1
    assert set(engines.weights.values()) == {0.0}


@pytest.mark.parametrize(
    ("version", "has_adapters", "is_found"), [(0, False, True), (0, True, False), (3, False, False)]
)
def test_an_engine_that_has_read_other_files_is_found_at_version_0(learner, version, has_adapters, is_found):
    """A restarted engine holds the weights of version 0, and one with adapters an adapter of zeros."""
    engines = Engines(learner, [1])
    engines.weights = {1: 0.5}
    sync = WeightSync(learner, engines, [[1, 2]], "float32", 5.0, has_adapters)
    engines.noise = 1e-4
    if not is_found:
        sync.start(version)
        assert engines.weights == {1: 0.0}
        return
    with pytest.raises(WeightSyncError, match=r"version 0: self-test: the weights sent are not those .* \[layer"):
        sync.start(version)


def test_the_learner_scores_while_the_engines_load(learner):
    engines, order = Engines(learner, [1]), []
    start, wait = engines.start_loading, engines.loaded
    engines.start_loading = lambda *arguments: order.append("start") or start(*arguments)
    engines.loaded = lambda *arguments: order.append("wait") or wait(*arguments)
    sync = sync_of(learner, engines)
    sync.start(0)
    order.clear()
    learner.score_canary = lambda *arguments: order.append("score") or logps_of(learner.weight)
    sync.sync(1)
    assert order == ["start", "score", "wait"]
    assert sync.seconds.keys() == {"pack_s", "learner_canary_s", "get_s", "load_s"}


def test_a_failing_engine_is_named_among_several(learner):
    engines = Engines(learner, [1, 2, 3])
    engines.deaf = {2}
    with pytest.raises(WeightSyncError, match=r"engine 2: self-test: .* did not take the weights sent \[layer"):
        sync_of(learner, engines).start(0)


def test_a_lost_runner_in_the_self_test_is_a_failure_of_that_runner(learner):
    engines = Engines(learner, [1, 2])
    lost = Failure("died", is_hung=False)
    answer = engines.loaded
    engines.loaded = lambda *arguments: {**answer(*arguments), 2: lost}
    with pytest.raises(RunnerFailure, match="2"):
        sync_of(learner, engines).start(0)


def test_rounding_that_grows_with_training_does_not_end_a_bf16_run(learner, caplog):
    engines = Engines(learner, [1, 2])
    sync = sync_of(learner, engines)
    sync.start(0)
    assert sync.healthy.mean == pytest.approx(0.01)
    learner.weight, engines.noise = 0.5, 0.03  # three times the first gap: a sharper policy rounds worse
    gap, lost = sync.sync(1)
    assert gap.mean == pytest.approx(0.03) and not lost
    assert sync.healthy.mean == pytest.approx(0.03)
    assert set(engines.weights.values()) == {0.5}
    assert "testing the engines again" in caplog.text and "rounding gives mean 0.03" in caplog.text
    loads = len(engines.calls)
    learner.weight = 0.6
    sync.sync(2)
    assert engines.calls[loads:] == [("load", (1, 2))]  # one test, then the new gap is the measure


def test_a_stale_engine_still_ends_a_bf16_run(learner):
    engines = Engines(learner, [1, 2])
    sync = sync_of(learner, engines)
    sync.start(0)
    engines.deaf, learner.weight = {2}, 0.05
    with pytest.raises(WeightSyncError, match="weights version 1: the canary differs"):
        sync.sync(1)
    assert sync.healthy.mean == pytest.approx(0.01)


def test_an_engine_that_missed_one_update_ends_a_bf16_run(learner):
    """It takes the weights of the second test, but held other ones before."""
    engines = Engines(learner, [1])
    sync = sync_of(learner, engines)
    sync.start(0)
    answer = engines.loaded

    def once_deaf(*arguments):
        engines.deaf, engines.loaded = {1}, answer
        try:
            return answer(*arguments)
        finally:
            engines.deaf = set()

    engines.loaded, learner.weight = once_deaf, 0.05
    with pytest.raises(WeightSyncError, match="weights version 1: the canary differs"):
        sync.sync(1)


def test_float32_has_no_second_look(learner):
    engines = Engines(learner, [1], noise=1e-4)
    sync = sync_of(learner, engines, "float32")
    sync.start(0)
    engines.noise = 2e-3
    with pytest.raises(WeightSyncError, match="expected max <= 0.001"):
        sync.sync(1)
