"""The driver's side of the weight sync with scripted engines: all engines in step, few packs, a second look in bf16."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rllib_srl.common.remote_calls import Failure, RunnerFailure
from rllib_srl.engine.canary import CanaryGap
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.rollout.env_runner import Loaded
from rllib_srl.weights.sync import WeightSync
from rllib_srl.weights.transports import ObjectStoreTransport

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

    def score(self, ids, sequences, timeout_s):
        self.calls.append(("score", tuple(ids)))
        return {i: self.rounded(i) for i in ids}

    def fingerprint(self, ids, timeout_s):
        return {i: {"layer": (hash(self.weights[i]),)} for i in ids}

    def load_weights(self, ids, ref, learner_logps, sequences, timeout_s):
        self.calls.append(("load", tuple(ids)))
        answers = {}
        for i in ids:
            if i not in self.deaf:
                self.weights[i] = ref
            answers[i] = Loaded(CanaryGap.between(self.rounded(i), learner_logps), {"get_s": 0.1, "load_s": 0.1})
        return answers


class Learner:
    """A learner whose model is one number."""

    weight, num_packs = 0.0, 0

    def send(self, version, sequences, scale, timeout_s):
        self.num_packs += 1
        weight = self.weight + scale * 10
        return SimpleNamespace(ref=weight, logps=logps_of(weight), seconds={"pack_s": 1.0})

    def score_at(self, sequences, scale, timeout_s):
        return logps_of(self.weight + scale * 10)


@pytest.fixture
def learner():
    return Learner()


def sync_of(learner, engines, dtype="bfloat16"):
    transport = ObjectStoreTransport(learner, engines, [[1, 2]], 5.0)
    return WeightSync(transport, engines, [[1, 2]], dtype, 5.0)


@pytest.mark.parametrize("num_engines", [1, 2, 16])
def test_the_start_sends_each_set_of_weights_once_for_all_engines(learner, num_engines):
    engines = Engines(learner, range(1, num_engines + 1))
    sync_of(learner, engines).start(0)
    ids = tuple(range(1, num_engines + 1))
    assert engines.calls == [("score", ids), ("load", ids), ("score", ids), ("load", ids), ("score", ids)]
    assert learner.num_packs == 2  # the perturbed and the true weights, however many engines there are
    assert set(engines.weights.values()) == {0.0}


def test_an_update_scores_the_first_tokens_only_and_is_held_to_their_gap(learner):
    engines = Engines(learner, [1], noise=np.where(np.arange(50) < 15, 0.01, 0.05))
    scored = []
    send, load = learner.send, engines.load_weights
    learner.send = lambda version, sequences, *rest: scored.append(sequences) or send(version, sequences, *rest)

    def load_and_compare(ids, ref, logps, sequences, timeout_s):
        scored.append(sequences)
        loaded = load(ids, ref, logps, sequences, timeout_s)
        gap = CanaryGap.between(*[[part[:15] for part in parts] for parts in (engines.rounded(1), logps)])
        return {i: replace(one, gap=gap) for i, one in loaded.items()}

    engines.load_weights = load_and_compare
    tokens = [list(range(51)), [7, 8, 9]]
    sync = WeightSync(ObjectStoreTransport(learner, engines, tokens, 5.0), engines, tokens, "bfloat16", 5.0)
    sync.start(0)
    assert sync.healthy.mean == pytest.approx((15 * 0.01 + 35 * 0.05) / 50)
    assert sync.healthy_update.mean == pytest.approx(0.01)
    scored.clear()
    gap, _ = sync.sync(1)
    assert scored == [[list(range(16)), [7, 8, 9]]] * 2 and gap.mean == pytest.approx(0.01)
    engines.noise = 0.016  # below the mean of the whole canary, above 1.5 times that of its first tokens
    packs = learner.num_packs
    sync.sync(2)
    assert learner.num_packs > packs + 1  # a second self-test


def test_a_failing_engine_is_named_among_several(learner):
    engines = Engines(learner, [1, 2, 3])
    engines.deaf = {2}
    with pytest.raises(WeightSyncError, match=r"engine 2: self-test: parts of the engine kept .* \[layer"):
        sync_of(learner, engines).start(0)


def test_a_lost_runner_in_the_self_test_is_a_failure_of_that_runner(learner):
    engines = Engines(learner, [1, 2])
    lost = Failure("died", is_silent=False)
    answer = engines.load_weights
    engines.load_weights = lambda ids, *rest: {**answer(ids, *rest), 2: lost}
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
    assert "testing the engines again" in caplog.text and "gap is now mean 0.03" in caplog.text
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
    answer = engines.load_weights

    def once_deaf(ids, *rest):
        engines.deaf, engines.load_weights = {1}, answer
        try:
            return answer(ids, *rest)
        finally:
            engines.deaf = set()

    engines.load_weights, learner.weight = once_deaf, 0.05
    with pytest.raises(WeightSyncError, match="weights version 1: the canary differs"):
        sync.sync(1)


def test_float32_has_no_second_look(learner):
    engines = Engines(learner, [1], noise=1e-4)
    sync = sync_of(learner, engines, "float32")
    sync.start(0)
    engines.noise = 2e-3
    with pytest.raises(WeightSyncError, match="expected max <= 0.001"):
        sync.sync(1)
