"""RECAP: the published weights by hand, and a run in which they reach the advantages."""

import numpy as np
import pytest

from rllib_srl.contrib.recap import Recap, convergence, instability, recap_weights, scaled_softmax


class Soon(Recap):
    """Weighs after four losses."""

    window = 2


def test_recap_weights_are_the_published_ones_of_two_windows():
    score_K = 0.5 * np.array([1 + 0.1, 0.8 + 0.3, 0.5 + 0.05])
    assert scaled_softmax(score_K, 5) == pytest.approx([1.018, 1.018, 0.964], abs=5e-4)
    assert scaled_softmax(score_K, 1) == pytest.approx([1.087, 1.087, 0.826], abs=5e-4)
    assert scaled_softmax(score_K, 0.1) == pytest.approx([1.453, 1.453, 0.093], abs=1e-3)
    falling, flat = [0.8, 0.8, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5]
    assert convergence(falling) == pytest.approx(0.5, abs=1e-5) and convergence(flat) == 1.0
    assert instability(falling) == pytest.approx(0.2 / 1.2, abs=1e-5) and instability(flat) == 0.0
    assert convergence([0.0] * 4) == 1.0 and instability([0.0] * 4) == 0.0
    weights = recap_weights({"falling": falling, "flat": flat, "new": [0.9, 0.1, 0.9]}, 2, 0.5, 1.0)
    # alpha = 1: scores .5 and 1, apart by .5 / .5 = 1: 2 sigma(1) = 1.46212
    assert weights == pytest.approx({"falling": 0.53788, "flat": 1.46212, "new": 1.0}, abs=1e-4)
    assert recap_weights({"a": flat, "b": flat}, 2, 5, 0.5) == {"a": 1.0, "b": 1.0}
    assert recap_weights({"a": [9.0, *falling], "b": flat}, 2, 0.5, 1.0)["a"] == weights["falling"]
    shaky = recap_weights({"shaky": [0.9, 0.1, 0.9, 0.1], "flat": flat}, 2, 1.0, 0.5)
    assert shaky["shaky"] > 1 and recap_weights({"s": [0.9, 0.1, 0.9, 0.1], "f": flat}, 2, 1.0, 1.0)["s"] == 1.0


@pytest.mark.slow
def test_weights_reach_the_advantages(two_domains, build, monkeypatch):
    seen = []
    monkeypatch.setattr("rllib_srl.algorithm.srl.weighted", lambda compared, weights: seen.append(weights) or compared)
    algo = build(two_domains.callbacks(Soon))
    results = [algo.train() for _ in range(5)]
    assert seen[0] == {} and seen[1] == {"even": 1.0, "odd": 1.0}
    assert seen[4] != {"even": 1.0, "odd": 1.0} and sum(seen[4].values()) == pytest.approx(2)
    assert results[-1]["planner"]["loss_weight"].keys() == {"even", "odd"}
