"""Regularisers through `algo.train()`: ends of stages, weights that are held, and, with retention, exact resumes."""

import numpy as np
import pytest

from rllib_srl.learner.regularisers.weights import L2
from tests.algorithm.test_resume import assert_same, go_on
from tests.algorithm.test_retention import EVEN, ODD, RETAIN
from tests.small_memory import memory_config

OWN = "tests.algorithm.test_regularisers:Own"
ALL = {"ewc": {"coeff": 1.0, "episodes": 6}, "l2": 1e-3, "lwf": 0.5, OWN: 1e-3}
STAGES = [{**EVEN, "iterations": 2}, {**ODD, "iterations": 2}, EVEN]


class Own(L2):
    """A user's own term."""


def weights_of(algo):
    return {name: one.detach().clone() for name, one in algo.learner_group._learner.policy.named_parameters()}


def distance(state, weights):
    """Return the distance of weights from the anchor by importance, as EWC measures it."""
    gaps = {name: (weights[name].numpy() - one) ** 2 for name, one in state["anchor"].items()}
    return sum(float((state["importance"][name] * gap).sum()) for name, gap in gaps.items())


@pytest.mark.slow
def test_stages_end_weights_are_held_and_a_run_resumes_exactly(random_llama_dir, ray_here, build, tmp_path):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.5)
    config.env, config.env_config = None, {}
    config.environment(stream=STAGES)
    free, held = build(config), build(config, regularisers={"ewc": 1e4})
    for algo in (free, held):
        go_on(algo, 2)
    state = held.learner_group._learner.get_state()["regularisers"]["ewc"]
    assert distance(state, weights_of(held)) == 0  # measured at the end of the stage, after its last update
    assert all(np.array_equal(weights_of(free)[name].numpy(), one) for name, one in state["anchor"].items())
    for algo in (free, held):
        go_on(algo, 2)  # another domain
    assert distance(state, weights_of(held)) < 0.8 * distance(state, weights_of(free))
    algo = build(config.copy(copy_frozen=False).replay(**RETAIN), regularisers=ALL, num_epochs=2)
    results = [algo.train() for _ in range(3)]
    learned = [result["learners"]["default_policy"] for result in results]
    assert [result.get("num_importance_episodes", 0) for result in results] == [0, 8, 8]  # two whole groups of four
    assert learned[1]["regularisers/ewc"] == 0 and learned[2]["regularisers/lwf_tokens"] > 0
    assert learned[2]["regularisers/Own"] == learned[2]["regularisers/l2"] > 0
    algo.save_to_path(tmp_path / "three")
    whole = go_on(algo, 2)
    algo.restore_from_path(tmp_path / "three")
    assert_same(go_on(algo, 2), whole)
