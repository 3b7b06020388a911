"""Each way to use the memory and to fill a batch, by name, on vLLM and the learner: values recomputed from rewards.

The gradient of each update is that of a slow loss, episode by episode, with the advantages that the rewards give.

One engine serves all tests. Each algorithm verifies, before it plays, that the engine has the weights of its learner.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

from rllib_srl.engine import pack
from rllib_srl.learner.scoring import load_causal_lm
from rllib_srl.rollout import env_runner
from tests.algorithm.test_reuse_today import HALF_LIFE, LEAST, WEIGHT, check_values
from tests.losses import slow_loss
from tests.small_learner import Recording, relative_gap
from tests.small_memory import go, memory_config, weights_of
from tests.small_worlds import with_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
NUM_PROMPTS, SLOTS = 10, 4
EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"


@pytest.fixture(scope="module")
def engines():
    """Return the engines that were started, by their settings: one, which is closed at the end."""
    found: dict = {}
    yield found
    for _, close in found.values():
        close()
    assert len(found) == 1


@pytest.fixture
def config(engines, random_llama_dir, tmp_path, ray_here, monkeypatch):
    """Return settings on vLLM with a pool of 10 prompts, 4 a batch."""
    make_engine = env_runner.make_engine

    def shared(kind, model_dir, **settings):
        assert kind == "vllm"
        key = str(model_dir), repr(sorted(settings.items()))
        if key in engines:  # with the weights of another run
            weights = load_causal_lm(model_dir).named_parameters()
            engines[key][0].load_weights(pack(weights, version=0, dtype="float32"))
            return engines[key][0]
        engine = make_engine(kind, model_dir, **settings)
        engines[key] = engine, engine.close
        engine.close = lambda: None
        return engine

    monkeypatch.setattr(env_runner, "make_engine", shared)
    config = memory_config(random_llama_dir, tmp_path / "log", reuse_fraction=0.0)
    config.environment(env_config={"num_prompts": NUM_PROMPTS}).training(num_prompts_per_batch=SLOTS, loss="grpo")
    config.learners(learner_class=Recording)
    return with_engine(config, "vllm")


def train(algo, num):
    """Train, and return the iterations; each gradient is that of the slow loss, and the weights have changed."""
    learner, learn, models, gradients = algo.learner_group._learner, algo._learn, [], []

    def watched_learn(shards):
        models.append(copy.deepcopy(learner.model))
        is_updated = learn(shards)
        gradients.append(learner.gradients() if is_updated else None)
        return is_updated

    algo._learn, before = watched_learn, weights_of(algo)
    iterations = go(algo, num)
    del algo._learn
    assert not np.array_equal(weights_of(algo), before)
    assert any(one.trained for one in iterations)
    for one, model, gradient in zip(iterations, models, gradients, strict=True):
        assert (gradient is not None) == bool(one.trained)
        if one.trained:
            assert relative_gap(gradient, slow_gradient(algo.config, model, one.trained)) < 1e-4
    return iterations


def slow_gradient(config, model, groups):
    """Return the gradient of the slow loss of groups with their advantages."""
    settings = config.loss_settings()
    episodes = [
        slow_loss.told(model, None, of, g, float(advantage_G[g]), origin == "reuse")
        for origin, of, advantage_G in groups
        for g in range(of.size)
    ]
    return slow_loss.gradient(model, settings, episodes, 1.0)


def test_posterior_and_its_reuse(config, build):
    """Groups of one: every advantage, also of reused groups, from a list of all visits and their rewards."""
    config.replay(revisit_fraction=0.6, reuse_fraction=0.25, min_buffer_size=4, selection="uniform")
    config.replay(history_half_life=HALF_LIFE, reuse_selection="uniform", max_age=4)
    advantage = {"name": "posterior", "prior_weight": WEIGHT, "min_surprise": LEAST}
    algo = build(config, advantage=advantage, group_size=1, num_prompts_per_batch=8)
    iterations = train(algo, 4)
    assert len(check_values(iterations)) >= 4
