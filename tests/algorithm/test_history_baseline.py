"""The baseline from history through `algo.train()`: values that reach the learner, groups of one, resuming."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.small_memory import check_memory, go, memory_config, weights_of
from tests.small_worlds import Even

HALF_LIFE, WEIGHT, LEAST = 2.0, 2.0, 0.3


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path / "log", revisit_fraction=0.6, reuse_fraction=0.25)
    config.environment(env_config={"num_prompts": 16})
    config.replay(history_half_life=HALF_LIFE, max_age=4, reuse_selection="uniform")
    config.training(advantage="posterior", prior_weight=WEIGHT, min_surprise=LEAST)
    return config.training(group_size=1, num_prompts_per_batch=12)


class Visits:
    """All visits of a run, in order."""

    def __init__(self):
        self.groups = []
        self._keys, self._of_items = set(), set()

    def note(self, groups, visits):
        """Add the groups of an iteration; those of a prompt without an item, as all were refused, are in no history."""
        self.groups += groups
        for group in groups:
            if not visits[group.group_id].refused:
                self._keys.add(group.prompt.key)
            if group.prompt.key in self._keys:
                self._of_items.add(group.group_id)

    def history(self, own, version):
        """Return s and n of a group as of `version`, without the group itself, and m; before its visit if it is new."""
        others = [group for group in self.groups if group.group_id != own.group_id]
        past = [one for one in others if one.prompt.key == own.prompt.key and one.group_id in self._of_items]
        rho = [0.5 ** ((version - int(group.versions_G2.min())) / HALF_LIFE) for group in past]
        total = sum(r * float(group.rewards_G.sum()) for r, group in zip(rho, past, strict=True))
        num = sum(r * group.size for r, group in zip(rho, past, strict=True))
        of = [(0.97**age, group.rewards_G.mean()) for age, group in enumerate(reversed(self.groups))]
        mean = np.average([r for _, r in of], weights=[w for w, _ in of]) if of else 0.5
        return total, num, float(mean)


def surprise_of(group, history, weight):
    total, num, mean = history
    rewards_G = group.rewards_G.astype(float)
    baseline_G = (weight * mean + total + rewards_G.sum() - rewards_G) / (weight + num + len(rewards_G) - 1)
    return rewards_G - baseline_G


def check_values(iterations, least=LEAST, weight=WEIGHT):
    """Check advantages of played and reused groups against a list of all visits; return the reused groups."""
    visits, reused = Visits(), []
    for one in iterations:
        version = int(one.played[0].versions_G2.min())
        surprises = {}
        for group in one.played:
            history = visits.history(group, version)
            assert one.visits[group.group_id].history == pytest.approx(history, abs=1e-6)
            surprises[group.group_id] = surprise_of(group, history, weight)
        spread = max(0.05, float(np.sqrt(np.mean(np.concatenate(list(surprises.values())) ** 2))))
        visits.note(one.played, one.visits)
        trained = {group.group_id: (origin, advantage_G) for origin, group, advantage_G in one.trained}
        for group in one.played:
            is_live = np.abs(surprises[group.group_id] / spread).max() >= least
            assert (group.group_id in trained) == is_live
            if is_live:
                np.testing.assert_allclose(trained[group.group_id][1], surprises[group.group_id] / spread, atol=1e-6)
        for meta in one.reused:
            history = visits.history(meta, version)
            assert meta.history == pytest.approx(history, abs=1e-6)
            (own,) = [group for group in visits.groups if group.group_id == meta.group_id]
            expected_G = surprise_of(own, history, weight) / spread
            is_live = np.abs(expected_G).max() >= least
            assert (meta.group_id in trained) == is_live
            if is_live:
                np.testing.assert_allclose(trained[meta.group_id][1], expected_G, atol=1e-6)
                reused.append(own)
    return reused


def check_counts(iterations):
    """Check what is reported of played groups: how many were trained on, and how many loss tokens they have."""
    for one in iterations:
        trained = {group.group_id for _, group, _ in one.trained}
        tokens = {group.group_id: int(group.loss_mask_N.sum()) for group in one.played}
        live = [name for name in tokens if name in trained]
        share = sum(tokens[name] for name in live) / sum(tokens.values())
        assert one.result["env_runners"]["live_token_share"] == pytest.approx(share)
        for origin in ("fresh", "revisit"):
            ids = [group.group_id for group in one.played if group.origin == origin and group.group_id in trained]
            assert one.replay[f"num_signal_{origin}"] == len(ids)
            assert one.replay[f"num_tokens_{origin}"] == sum(tokens[name] for name in ids)
    num_live = sum(origin != "reuse" for one in iterations for origin, _, _ in one.trained)
    num_skipped = sum(len(one.played) for one in iterations) - num_live
    assert iterations[-1].result["num_groups_unsurprising"] == num_skipped
    assert max(Counter(group.prompt.key for one in iterations for group in one.played).values()) > 1  # some came back


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_played_and_reused_groups_are_judged_by_the_history_of_today(config, build, size):
    algo = build(config, group_size=size)
    before = weights_of(algo)
    iterations = go(algo, 6)
    reused = check_values(iterations)
    check_counts(iterations)
    num_left_out = iterations[-1].result["num_reuses_unsurprising"]
    assert iterations[-1].replay["num_reuses"] == len(reused) + num_left_out and len(reused) >= 4
    assert any(np.ptp(group.rewards_G) == 0 for group in reused)  # silent groups were a surprise
    assert 0 < iterations[-1].replay["surprise_mean"] < 1
    assert iterations[-1].result["env_runners"]["num_groups_dropped"] == 0
    assert not np.array_equal(weights_of(algo), before)
    check_memory(algo)


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
    check_counts(iterations)
    sizes = {group.size for one in iterations for _, group, _ in one.trained}
    assert {1, 2} <= sizes <= {1, 2, 3}
    num_dropped = sum(one.result["env_runners"]["num_groups_dropped"] for one in iterations)
    assert num_dropped == 30 - sum(len(one.played) for one in iterations) > 0  # only of those without an episode
