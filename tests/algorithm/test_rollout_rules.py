"""How many episodes a prompt gets and what silent groups are trained on, through `algo.train()`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rllib_srl.batch.estimators import group, has_signal
from tests.losses import slow_loss
from tests.small_worlds import small_config


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path).training(lr=0.0)


@pytest.fixture
def build(tmp_path):
    """Return a function that builds an algorithm with a log directory of its own, and stop all of them afterwards."""
    built = []

    def of(config, **training):
        own = config.copy(copy_frozen=False).training(**training)
        built.append(own.training(log_directory=str(tmp_path / f"log{len(built)}")).build_algo())
        return built[-1]

    yield of
    for algo in built:
        algo.stop()


# --- silent groups ------------------------------------------------------------------------------------------------


def token_advantages(learner):
    """Return the token advantages of the last update by episode of its shard."""
    found = {}
    for one in learner._micro_batches[False]:
        for episode in one["episode"].unique().tolist():
            found[episode] = one["advantage"][one["episode"] == episode].tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_silent_groups_are_trained_on_by_entropy(config, build, lora):
    """Every group of two answers is trained on; the entropies are those of a separate forward pass."""
    algo = build(config, group_size=2, num_prompts_per_batch=8, silent_groups={"name": "zvp", "coeff": 0.3}, lora=lora)
    shards, learn = [], algo._learn
    algo._learn = lambda given: shards.extend(given) or learn(given)
    result = algo.train()
    learner = algo.learner_group._learner
    groups, found = shards[0].groups(), token_advantages(learner)
    assert len(groups) == 8 == result["env_runners"]["num_groups"]
    num_silent = sum(not has_signal(one.rewards_G) for one in groups)
    assert 0 < num_silent == result["num_groups_entropy_shaped"] < 8
    episode = 0
    for one in groups:
        for g in range(one.size):
            told = slow_loss.told(learner.model, None, one, g, 0.0, False)
            entropy = np.array([h.item() for h in told.entropy])
            if has_signal(one.rewards_G):
                expected = np.full(told.num, group(one.rewards_G.astype(float))[g])
            elif one.rewards_G[g] == 1:
                expected = 0.3 * entropy
            else:
                expected = -0.3 * (entropy.max() - entropy)
            np.testing.assert_allclose(found[episode], expected, atol=1e-5)
            episode += 1


@pytest.mark.slow
def test_silent_groups_alone_change_the_weights(config, build):
    """All answers are right: plain GRPO has nothing to train on, RL-ZVP has."""
    config.environment(env_config={"pay": 1.0}).training(lr=1e-3)
    for silent_groups, num_empty in (("skip", 1), ("zvp", 0)):
        algo = build(config, silent_groups=silent_groups)
        before = torch.cat([p.detach().flatten().clone() for p in algo.learner_group._learner.model.parameters()])
        result = algo.train()
        after = torch.cat([p.detach().flatten() for p in algo.learner_group._learner.model.parameters()])
        assert result["num_empty_batches"] == num_empty
        assert before.equal(after) == (silent_groups == "skip")
