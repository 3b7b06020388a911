"""The baseline from history through `algo.train()`: values that reach the learner, groups of one, resuming."""

import numpy as np
import pytest

from tests.small_envs import Even
from tests.small_memory import go, memory_config, weights_of

HALF_LIFE, WEIGHT, LEAST = 2.0, 2.0, 0.3


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.6, reuse_fraction=0.25)
    config.environment(env_config={"num_prompts": 16})
    config.replay(history_half_life=HALF_LIFE, max_age=4, reuse_selection="uniform")
    config.training(advantage="posterior", prior_weight=WEIGHT, min_surprise=LEAST)
    return config.training(group_size=1, num_prompts_per_batch=12)


def surprise_of(group, history):
    total, num, mean = history
    rewards_G = group.rewards_G.astype(float)
    baseline_G = (WEIGHT * mean + total + rewards_G.sum() - rewards_G) / (WEIGHT + num + len(rewards_G) - 1)
    return rewards_G - baseline_G


def check_values(iterations):
    """Check the advantages of played and reused groups against their histories, which come from the memory.

    tests/replay/test_history.py compares those with a list of all visits. Return the reused groups.
    """
    reused = []
    for one in iterations:
        surprises = {group.group_id: surprise_of(group, one.visits[group.group_id].history) for group in one.played}
        spread = max(0.05, float(np.sqrt(np.mean(np.concatenate(list(surprises.values())) ** 2))))
        surprises |= {meta.group_id: surprise_of(meta, meta.history) for meta in one.reused}
        trained = {group.group_id: advantage_G for _, group, advantage_G in one.trained}
        for name, surprise_G in surprises.items():
            is_live = np.abs(surprise_G / spread).max() >= LEAST
            assert (name in trained) == is_live
            if is_live:
                np.testing.assert_allclose(trained[name], surprise_G / spread, atol=1e-6)
        reused += [meta for meta in one.reused if meta.group_id in trained]
        tokens = {group.group_id: int(group.loss_mask_N.sum()) for group in one.played}
        share = sum(num for name, num in tokens.items() if name in trained) / sum(tokens.values())
        assert one.result["env_runners"]["live_token_share"] == pytest.approx(share)
    num_live = sum(origin != "reuse" for one in iterations for origin, _, _ in one.trained)
    num_skipped = sum(len(one.played) for one in iterations) - num_live
    assert iterations[-1].result["num_groups_unsurprising"] == num_skipped
    return reused


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_played_and_reused_groups_are_judged_by_the_history_of_today(config, build, size):
    algo = build(config, group_size=size)
    before = weights_of(algo)
    iterations = go(algo, 6)
    reused = check_values(iterations)
    num_left_out = iterations[-1].result["num_reuses_unsurprising"]
    assert iterations[-1].replay["num_reuses"] == len(reused) + num_left_out and len(reused) >= 4
    assert any(np.ptp(group.rewards_G) == 0 for group in reused)  # zero-variance groups were a surprise
    assert 0 < iterations[-1].replay["surprise_mean"] < 1
    assert iterations[-1].result["env_runners"]["num_groups_dropped"] == 0
    assert not np.array_equal(weights_of(algo), before)


class Fragile(Even):
    """As `Even`, but half of all answers, right or wrong, crash the environment."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action and ord(action[0]) % 4 < 2:
            raise RuntimeError("fragile")
        return super().step(action)


@pytest.mark.slow
def test_a_single_episode_that_infrastructure_leaves_is_trained_on(config, build):
    config.environment(f"{__name__}:Fragile", env_config={"num_prompts": 12}).replay(reuse_fraction=0.0)
    algo = build(config, group_size=3, num_prompts_per_batch=6)
    iterations = go(algo, 5)
    check_values(iterations)
    sizes = {group.size for one in iterations for _, group, _ in one.trained}
    assert {1, 2} <= sizes <= {1, 2, 3}
    num_dropped = sum(one.result["env_runners"]["num_groups_dropped"] for one in iterations)
    assert num_dropped == 30 - sum(len(one.played) for one in iterations) > 0  # only of those without an episode
