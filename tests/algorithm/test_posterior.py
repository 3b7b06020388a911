"""The baseline from history through `algo.train()`: the values that reach the learner, groups of one, and resuming."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.algorithm.test_reuse_today import check_values
from tests.small_memory import go, memory_config, weights_of
from tests.small_worlds import Even

PARAMETERS = {"name": "posterior", "prior_weight": 3.0, "min_surprise": 0.2}
HISTORY = ("history_sum", "history_count", "num_silent", "is_solved")


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.5, reuse_fraction=0.0)
    config.environment(env_config={"num_prompts": 12}).replay(history_half_life=2.0)
    return config.training(advantage=PARAMETERS, group_size=3, num_prompts_per_batch=6)


def item_rows(algo):
    buffer = algo.memory.process.actor
    rows = buffer.tables.items[buffer.tables.slots()]
    return [[int(row["key"]), *(row[name].item() for name in HISTORY)] for row in rows]


def check_all(iterations, sizes):
    """Check history, advantages and counts; return how many silent groups were trained on."""
    check_values(iterations, least=0.2, weight=3.0)
    for one in iterations:
        assert {group.size for group in one.played} <= set(sizes)
        trained = {group.group_id for _, group, _ in one.trained}
        tokens = {group.group_id: int(group.loss_mask_N.sum()) for group in one.played}
        share = sum(tokens[i] for i in trained) / sum(tokens.values())
        assert one.result["env_runners"]["live_token_share"] == pytest.approx(share)
        for origin in ("fresh", "revisit"):
            ids = [group.group_id for group in one.played if group.origin == origin and group.group_id in trained]
            assert one.replay[f"num_signal_{origin}"] == len(ids)
            assert one.replay[f"num_tokens_{origin}"] == sum(tokens[i] for i in ids)
    assert max(Counter(group.prompt.key for one in iterations for group in one.played).values()) > 1  # some came back
    num_skipped = sum(len(one.played) - len(one.trained) for one in iterations)
    assert iterations[-1].result["num_groups_unsurprising"] == num_skipped
    return sum(np.ptp(group.rewards_G) == 0 for one in iterations for _, group, _ in one.trained)


@pytest.mark.slow
def test_advantages_that_reach_the_learner_are_those_of_the_history(config, build):
    algo = build(config)
    before = weights_of(algo)
    iterations = go(algo, 6)
    assert check_all(iterations, [3]) > 0  # silent groups were trained on
    assert not np.array_equal(weights_of(algo), before)
    replay = iterations[-1].replay
    assert 0 < replay["surprise_mean"] < 1


@pytest.mark.slow
def test_groups_of_one_are_played_graded_and_trained_on(config, build):
    config = config.copy(copy_frozen=False).replay(spacing="fsrs")
    algo = build(config, group_size=1, num_prompts_per_batch=12)
    before = weights_of(algo)
    iterations = go(algo, 5)
    assert check_all(iterations, [1]) == sum(len(one.trained) for one in iterations) > 0
    assert not np.array_equal(weights_of(algo), before)
    assert all(visit.grade > 0 for one in iterations for visit in one.visits.values())
    last = iterations[-1]
    assert last.result["env_runners"]["num_groups_dropped"] == 0
    num = Counter(group.origin for one in iterations for _, group, _ in one.trained)
    assert last.replay["revisit_share_signal"] == pytest.approx(num["revisit"] / num.total()) and num["revisit"]


class Fragile(Even):
    """As `Even`, but half of all answers, right or wrong, crash the environment."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action and ord(action[0]) % 4 < 2:
            raise RuntimeError("fragile")
        return super().step(action)


@pytest.mark.slow
def test_a_single_episode_that_infrastructure_leaves_is_trained_on(config, build):
    config.environment("tests.algorithm.test_posterior:Fragile", env_config={"num_prompts": 12})
    algo = build(config)
    iterations = go(algo, 5)
    check_all(iterations, [1, 2, 3])
    sizes = [group.size for one in iterations for _, group, _ in one.trained]
    assert 1 in sizes and 2 in sizes
    num_dropped = sum(one.result["env_runners"]["num_groups_dropped"] for one in iterations)
    assert num_dropped == 30 - sum(len(one.played) for one in iterations) > 0  # only of those without an episode


@pytest.mark.slow
def test_a_resumed_run_has_the_same_history(config, build, tmp_path):
    config.replay(reuse_fraction=0.2)
    algo = build(config)
    go(algo, 3)
    algo.save_to_path(tmp_path / "three")
    straight = go(algo, 3)
    again = build(config)
    again.restore_from_path(tmp_path / "three")
    resumed = go(again, 3)
    assert item_rows(again) == item_rows(algo)
    assert np.array_equal(weights_of(again), weights_of(algo))
    for one, other in zip(straight, resumed, strict=True):
        assert {i: visit.history for i, visit in one.visits.items()} == {
            i: visit.history for i, visit in other.visits.items()
        }
        assert one.replay["surprise_mean"] == other.replay["surprise_mean"]
