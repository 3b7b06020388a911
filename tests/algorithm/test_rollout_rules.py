"""How many episodes a prompt gets and what silent groups are trained on, through `algo.train()`."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rllib_srl.algorithm.srl import _deal
from rllib_srl.batch.calibration import FADE
from rllib_srl.batch.estimators import group, has_signal
from rllib_srl.rollout.knapsack import group_sizes
from rllib_srl.types import Prompt
from tests.losses import slow_loss
from tests.small_memory import SCHEDULED, go, memory_config
from tests.small_worlds import ON_BOTH_ENGINES, Even, small_config, watch, with_engine


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path).training(lr=0.0)


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


# --- screening ----------------------------------------------------------------------------------------------------


def screened(config, screen_size=2, **training):
    return config.training(rollout={"name": "screening", "screen_size": screen_size}, **training)


@pytest.mark.slow
@ON_BOTH_ENGINES
def test_only_prompts_with_a_mixed_screen_are_completed_and_trained_on(config, build, engine):
    with_engine(config, engine)
    algo = build(screened(config, num_prompts_per_batch=12, group_size=5))
    seen, shards = watch(algo), []
    algo._learn = lambda given: shards.extend(given) or False
    result = algo.train()
    groups = seen[0].groups
    mixed = {one.group_id for one in groups if has_signal(one.rewards_G[:2])}
    assert {len(one.rewards_G) for one in groups if one.group_id in mixed} == {5}
    assert {len(one.rewards_G) for one in groups if one.group_id not in mixed} == {2}
    assert 0 < len(mixed) < 12 and seen[0].screened_out == {one.group_id for one in groups} - mixed
    trained = {one.group_id: a for one, a in zip(shards[0].groups(), shards[0].advantages, strict=True)}
    assert set(trained) == mixed
    for one in groups:
        if one.group_id in mixed:
            np.testing.assert_allclose(trained[one.group_id], group(one.rewards_G.astype(float)), atol=1e-6)
    num_out = 12 - len(mixed)
    assert shards[0].num_episodes == 5 * len(mixed)
    counts = result["rollout"]
    assert (counts["num_screened_out"], counts["num_episodes_saved"]) == (num_out, 3 * num_out)
    assert (counts["group_size_min"], counts["group_size_max"]) == (2, 5)
    assert counts["prompt_return_mean"] == pytest.approx(np.mean([one.rewards_G.mean() for one in groups]))
    runs = result["env_runners"]
    assert (runs["num_groups_with_signal"], runs["num_groups_without_signal"]) == (len(mixed), num_out)
    assert runs["num_generated_tokens"] == sum(one.num_loss_tokens_G.sum() for one in groups)
    assert runs["num_episodes"] == 5 * len(mixed) + 2 * num_out


class Generous(Even):
    """Pays 1 for every answer, some of them after a second turn."""

    def reset(self, **kwargs):
        """Ask."""
        self.is_second = False
        return super().reset(**kwargs)

    def step(self, action):
        """Pay, or ask again."""
        _, reward, *_ = super().step(action)
        is_over, self.is_second = self.is_second or reward > 0, True
        return ("" if is_over else "again: "), float(is_over), is_over, False, {}


@pytest.mark.slow
def test_a_silent_screen_with_a_length_penalty_is_not_trained_on(config, build):
    """The penalty makes the shaped rewards of equal answers differ; a screen is judged by plain rewards."""
    config.environment("tests.algorithm.test_rollout_rules:Generous").env_runners(max_turns=2)
    config.training(overlong_penalty=1.0, overlong_share=1.0, num_prompts_per_batch=8)
    assert build(config).train()["num_empty_batches"] == 0
    algo = build(screened(config))
    seen = watch(algo)
    assert algo.train()["num_empty_batches"] == 1
    assert any(np.ptp(one.num_loss_tokens_G) for one in seen[0].groups)


@pytest.mark.slow
def test_further_prompts_are_screened_until_the_batch_is_full(config, build):
    algo = build(screened(config, num_prompts_per_batch=6, dynamic_sampling_tries=20))
    seen, shards = watch(algo), []
    algo._learn = lambda given: shards.extend(given) or False
    result = algo.train()
    groups = [one for batch in seen for one in batch.groups]
    assert len(shards[0].group_refs) == 6 == sum(len(one.rewards_G) == 4 for one in groups)
    assert result["num_prompts_resampled"] == len(groups) - 6 == result["rollout"]["num_screened_out"] > 0
    assert len({one.group_id for one in groups}) == len(groups)


@pytest.mark.slow
def test_screened_out_prompts_are_visits_that_the_memory_grades(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path, **SCHEDULED).replay(reuse_fraction=0.0)
    algo = build(screened(config, num_prompts_per_batch=8))
    iterations = go(algo, 2)
    for one in iterations:
        assert len(one.metas) == 8 == len(one.visits)
        sizes = set()
        for meta in one.metas:
            visit = one.visits[meta.group_id]
            sizes.add(len(meta.rewards_G))
            assert (visit.refused, visit.pass_rate) == ("", pytest.approx(meta.rewards_G.mean()))
            assert visit.grade > 0
        assert sizes == {2, 4}
        assert {len(group.rewards_G) for _, group, _ in one.trained} == {4}
    stored = [row for row in algo.memory._shards[0].buffer.store.groups if row["size"]]
    assert sorted({int(row["size"]) for row in stored}) == [2, 4]
    assert all(row["variance"] == 0 for row in stored if row["size"] == 2)
    # The calibration is of all visits, those that are not trained on too.
    num, _, observed = np.sum(algo.advantage_estimator.calibration.get_state()["sums"], axis=0)
    first, second = (sum(meta.rewards_G.mean() for meta in one.metas) for one in iterations)
    assert (num, observed) == (pytest.approx(8 * FADE + 8), pytest.approx(first * FADE + second))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "screening", "knapsack"])
def test_rollouts_that_depend_on_silence_are_warned_where_there_is_none(
    random_llama_dir, tmp_path, ray_here, build, monkeypatch, caplog, name
):
    for bound, value in (("NUM_JUDGED", 8), ("MANY", 1.1), ("FEW", 1.0)):
        monkeypatch.setattr(f"rllib_srl.algorithm.silent_groups.{bound}", value)
    config = memory_config(random_llama_dir, tmp_path).training(num_prompts_per_batch=8, rollout=name)
    with caplog.at_level(logging.WARNING, "rllib_srl"):
        build(config).train()
    assert ("cannot save more than that share" in caplog.text) == (name != "full")


class Ranked(Even):
    """Pays by rank within the group: the last of the answers that are played together gets 1, the others 0."""

    def settle_group(self, prompt_id, turns):
        """Return the rewards of a group."""
        return [float(at == len(turns) - 1) for at in range(len(turns))]


@pytest.mark.slow
def test_group_rewards_are_settled_for_the_screen_and_again_for_the_whole_group(config, build):
    algo = build(screened(config.environment("tests.algorithm.test_rollout_rules:Ranked")))
    seen = watch(algo)
    algo.train()
    assert [one.rewards_G.tolist() for one in seen[0].groups] == [[0, 0, 0, 1]] * 4


@pytest.mark.slow
def test_evaluation_is_not_screened(config, build):
    result = build(screened(config)).evaluate()
    assert result["num_prompts"] == 8 == result["env_runners"]["num_episodes"]


# --- group sizes by expected signal -------------------------------------------------------------------------------


@pytest.fixture
def knapsack(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path, revisit_fraction=0.5, spacing="none")
    config.training(lr=1e-5, num_prompts_per_batch=8, group_size=4, loss="grpo")
    return config.training(rollout={"name": "knapsack", "smallest": 2, "largest": 11})


def watch_estimates(algo):
    """Return a list that the estimates of each round of prompts are added to."""
    seen, pass_rates = [], algo.memory.pass_rates

    def watched(prompts):
        seen.append((list(prompts), pass_rates(prompts)))
        return seen[-1][1]

    algo.memory.pass_rates = watched
    return seen


@pytest.mark.slow
@ON_BOTH_ENGINES
def test_groups_of_unequal_sizes_go_the_whole_way(knapsack, build, engine):
    """Sizes follow the estimates before the batch; advantages, weights, memory and metrics take each group as it is."""
    with_engine(knapsack, engine)
    algo = build(knapsack)
    estimates, shards, learn = watch_estimates(algo), [], algo._learn
    algo._learn = lambda given: shards.append(given[0]) or learn(given)
    iterations = go(algo, 5)
    assert {len(one.played) for one in iterations} == {8}
    reused_sizes = set()
    for one, (prompts, beta_P2), shard in zip(iterations, estimates, shards, strict=True):
        sizes = [played.size for played in one.played]
        assert [played.prompt for played in one.played] == prompts
        assert sizes == group_sizes(beta_P2, 32, 2, 11).tolist() and sum(sizes) == 32
        counts = one.result["rollout"]
        assert (counts["group_size_min"], counts["group_size_max"]) == (min(sizes), max(sizes))
        assert (counts["num_screened_out"], counts["num_episodes_saved"]) == (0, 0)
        assert one.result["env_runners"]["num_episodes"] == 32
        num_played = sum(g.size for origin, g, _ in one.trained if origin != "reuse")
        for (origin, trained, advantage_G), scale in zip(one.trained, shard.scales, strict=True):
            np.testing.assert_allclose(advantage_G, group(trained.rewards_G.astype(float)), atol=1e-6)
            if origin == "reuse":
                reused_sizes.add(trained.size)
            else:
                np.testing.assert_allclose(scale, 1 / (num_played * trained.num_loss_tokens_G()))
        for meta in one.metas:
            assert one.visits[meta.group_id].pass_rate == pytest.approx(meta.rewards_G.mean())
    assert estimates[0][1].tolist() == [[1, 1]] * 8 and len({g.size for g in iterations[0].played}) == 1
    assert len({g.size for one in iterations[2:] for g in one.played}) > 2
    assert reused_sizes and (engine == "vllm" or len(reused_sizes) > 1)
    rows = algo.memory._shards[0].buffer.store.groups
    assert set(rows["size"][rows["size"] > 0].tolist()) == {g.size for one in iterations for g in one.played}
    assert iterations[-1].result["learners"]["default_policy"]["num_nonfinite_gradients"] == 0


@pytest.mark.slow
def test_known_prompts_get_their_own_estimates(knapsack, build):
    """A revisited prompt is estimated by its own visits, a fresh one by its domain."""
    algo = build(knapsack)
    estimates = watch_estimates(algo)
    for one in go(algo, 3):
        prompts, beta_P2 = estimates.pop(0)
        assert prompts[: len(one.revisits)] == one.revisits
        fresh = beta_P2[len(one.revisits) :]
        assert (fresh.sum(1) == pytest.approx(2)) and (fresh == fresh[0]).all()
        assert (beta_P2[: len(one.revisits)].sum(1) > 2.5).all()


@pytest.mark.slow
def test_resampled_prompts_have_a_budget_of_their_own(knapsack, build):
    algo = build(knapsack, dynamic_sampling_tries=3)
    estimates, seen = watch_estimates(algo), watch(algo)
    for _ in range(3):
        algo.train()
    assert len(estimates) > 3
    assert sum(len(g.rewards_G) for batch in seen for g in batch.groups) == 4 * sum(len(p) for p, _ in estimates)
    assert all(len(g.rewards_G) <= 11 for batch in seen for g in batch.groups)


@pytest.mark.slow
def test_evaluation_has_one_episode_of_each_prompt(knapsack, build):
    assert build(knapsack).evaluate()["env_runners"]["num_episodes"] == 8


def test_prompts_are_dealt_by_their_episodes():
    prompts = {f"1.{slot}": Prompt("w", str(slot)) for slot in range(5)}
    equal = _deal(prompts, dict.fromkeys(prompts, 1), [3, 7])
    assert {i: list(share) for i, share in equal.items()} == {3: ["1.0", "1.2", "1.4"], 7: ["1.1", "1.3"]}
    sizes = dict(zip(prompts, (2, 9, 2, 2, 2), strict=True))
    shares = _deal(prompts, sizes, [3, 7])
    assert {i: list(share) for i, share in shares.items()} == {3: ["1.1"], 7: ["1.0", "1.2", "1.3", "1.4"]}
    assert list(_deal({"1.0": prompts["1.0"]}, {"1.0": 4}, [3, 7])) == [3]


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["screening", "knapsack"])
def test_two_runners_and_a_memory_of_two_shards_do_the_same(knapsack, build, rollout):
    config = knapsack.env_runners(num_env_runners=2).learners(num_learners=1).replay(num_shards=2)
    algo = build(config, rollout=rollout)
    seen = watch(algo)
    for _ in range(2):
        seen.clear()
        counts = algo.train()["rollout"]
        assert {len(batch.groups) > 0 for batch in seen} == {True} and len(seen) == 2
        sizes = [len(group.rewards_G) for batch in seen for group in batch.groups]
        out = [group_id for batch in seen for group_id in batch.screened_out]
        assert counts["num_screened_out"] == len(out) == sizes.count(2) * (rollout == "screening")
        assert sum(sizes) == 32 - 2 * len(out)
