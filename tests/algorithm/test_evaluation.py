"""Evaluation beyond greedy accuracy: figures of several answers by hand, and on the real path of a run."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_srl import SRLConfig
from rllib_srl.algorithm.evaluation import _mean_pass, diversity_of, figures_of_chains, refuse_without_pool, summary
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.common.statistics import pass_at_k, pass_hat_k, wilson_interval
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.wrappers.fixed_pool import FixedPool
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group
from tests.small_worlds import small_config, watch

ITERATING = {"world": "tests.small_worlds:Even", "world_config": {"num_prompts": 6}, "num_steps": 4}


def test_chains_by_hand():
    """Four chains of three answers: one corrected, one spoiled, one right all along, one half right to the end."""
    reward_AK = np.array([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.5]])
    # Gains of the last over the first: 1, -1, 0 and .5; right from .999 on, so that .5 corrects nothing.
    is_right_AK = reward_AK >= 0.999
    figures = figures_of_chains(reward_AK, is_right_AK)
    assert figures == {"iteration_gain": 0.125, "net_corrections": 0, "num_chains": 4}
    assert figures_of_chains(reward_AK[[0, 2, 3]], is_right_AK[[0, 2, 3]])["net_corrections"] == 1
    # Where .5 is a pass, the last chain is corrected as well, and its gain stays.
    assert figures_of_chains(reward_AK, reward_AK >= 0.5) == {**figures, "net_corrections": 1}
    none = figures_of_chains(np.zeros((0, 3)), np.zeros((0, 3), bool))
    assert none["num_chains"] == 0 and np.isnan([none["iteration_gain"], none["net_corrections"]]).all()


def test_diversity_by_hand():
    # Of 3 pairs 2 differ; of 1 pair none does, spaces aside; one answer alone has no pair.
    assert diversity_of([["7", "7", "8"], [" 4 2\n", "4  2"], ["1"]]) == pytest.approx((2 / 3 + 0) / 2)
    assert np.isnan(diversity_of([["1"], []])) and np.isnan(diversity_of([]))


def test_pass_by_hand():
    """k = 2: of 4 answers 3 right, C(3, 2) / C(4, 2) = 1/2 and 1 - 0; of 4 one right, 0 and 1 - C(3, 2) / 6 = 1/2."""
    groups = [a_group(0, rewards=(1.0, 1.0, 1.0, 0.0)), a_group(1, rewards=(0.0, 1.0, 0.0, 0.9))]
    metas = [GroupMeta.of(group, None) for group in groups]
    assert _mean_pass(metas, 2, pass_hat_k) == pytest.approx(0.25)
    assert _mean_pass(metas, 2, pass_at_k) == pytest.approx(0.75)
    assert np.isnan(_mean_pass(metas, 5, pass_hat_k))


@pytest.mark.parametrize(("mark", "right"), [(2 / 3, [True, True, False]), (None, [True, False, False])])
def test_a_right_answer_is_a_pass_of_its_environment(mark, right):
    """Grades 4, 3 and 2 of 4 are rewards of 1, .667 and .333; a rubric passes from grade 3 on."""
    extra = {} if mark is None else {"pass_reward": mark}
    rewards = np.float32([1, 2 / 3, 1 / 3])
    metas = [GroupMeta.of(a_group(i, rewards=[r], extra=extra), None) for i, r in enumerate(rewards)]
    assert [bool(meta.is_right_G()[0]) for meta in metas] == right
    results = summary(metas, 4)
    assert results["accuracy"] == pytest.approx(sum(right) / 3) and results["num_lost"] == 1
    assert (results["accuracy_low"], results["accuracy_high"]) == wilson_interval(sum(right), 3)
    assert [found["accuracy"] for found in results["by_domain"].values()] == [pytest.approx(sum(right) / 3)]
    together = GroupMeta.of(a_group(0, rewards=rewards, extra=extra), None)
    assert _mean_pass([together], 1, pass_at_k) == pytest.approx(sum(right) / 3)
    assert _mean_pass([together], 2, pass_hat_k) == pytest.approx(1 / 3 if sum(right) == 2 else 0)


@pytest.mark.slow
def test_the_accuracy_on_the_pool_is_of_its_own_prompts_by_right_answers(ray_here, tmp_path):
    """A pool with wrong answers beside an environment without a pool; some of the greedy answers are right."""
    pool = {"environments": {"largest": "compare", "sums": "chain_sum"}, "num_prompts_per_kind": 15}
    worlds = {"pool": {**pool, "wrong_answers": 0.3}, "compare": {"num_shots": 0}}
    config = SRLConfig().environment(worlds=worlds).rl_module(model_config={"model": "tiny"})
    config.env_runners(engine="transformers", num_env_runners=0, max_turn_tokens=16, max_episode_tokens=256)
    config.training(compute_dtype="float32").evaluation(evaluation_duration=6)
    config.training(num_prompts_per_batch=4, group_size=2, checkpoint_every=0, log_directory=str(tmp_path))
    algo = config.build_algo()
    seen = watch(algo)
    results = algo.evaluate_pool()
    played, seen[:] = [group for batch in seen for group in batch.groups], []
    again = algo.evaluate_pool()
    algo.stop()
    own = FixedPool(worlds["pool"])
    assert len(own.wrong_ids) == 9 or len(own.wrong_ids) == 10
    assert sorted(group.prompt.prompt_id for group in played) == sorted(own.pool_ids())
    assert all(group.rewards_G.shape == (1,) for group in played)
    right = {group.prompt.prompt_id: bool(group.rewards_G[0] >= 0.999) for group in played}
    assert 0 < sum(right.values()) < 30
    assert results["accuracy"] == pytest.approx(sum(right.values()) / 30) and again == results
    assert (results["accuracy_low"], results["accuracy_high"]) == wilson_interval(sum(right.values()), 30)
    assert (results["num_prompts"], results["num_lost"]) == (30, 0)
    assert results["by_domain"] == {
        kind: {"accuracy": pytest.approx(np.mean([right[i] for i in right if i.startswith(kind)])), "num_prompts": 15}
        for kind in ("largest", "sums")
    }


def test_an_environment_without_a_pool_is_refused():
    pool = FixedPool({"environments": {"largest": "compare"}, "num_prompts": 4})
    refuse_without_pool({"compare": Compare(), "pool": pool})
    with pytest.raises(ValueError, match="environment 'compare' has no pool to evaluate; expected 'pool', 'recall'"):
        refuse_without_pool({"compare": Compare()})
    with pytest.raises(ValueError, match="environments 'a', 'b' have no pool to evaluate"):
        refuse_without_pool({"a": Compare(), "b": Compare()})


@pytest.fixture
def build(random_llama_dir, tmp_path, ray_here):
    built = []

    def of(env="rllib_srl.envs.wrappers.self_iteration:SelfIteration", env_config=ITERATING, **evaluation) -> SRLConfig:
        config = small_config(random_llama_dir, tmp_path / f"log{len(built)}").environment(env, env_config=env_config)
        config.env_runners(max_episode_tokens=512).evaluation(evaluation_duration=6, **evaluation)
        built.append(config.build_algo())
        return built[-1]

    yield of
    for algo in built:
        algo.stop()


def test_a_run_reports_what_further_answers_add(build):
    algo = build(evaluation_pass_k=3, evaluation_iterations=2)
    seen = watch(algo)
    results = algo.evaluate()
    greedy, sampled, first, second = seen
    # Answers build on each other: the second step shows the whole first one to the world, and asks for more.
    said = {group.prompt.prompt_id: greedy.answers[group.group_id][0] for group in greedy.groups}
    assert [group.prompt.history for group in first.groups] == [(said[g.prompt.prompt_id],) for g in first.groups]
    for group in second.groups:
        (before,) = [g for g in first.groups if g.prompt.prompt_id == group.prompt.prompt_id]
        assert group.prompt.history == (*before.prompt.history, first.answers[before.group_id][0])
        assert group.prompt.step == before.prompt.step == "improve"
    rewards = {g.prompt.prompt_id: [float(g.rewards_G[0])] for g in greedy.groups}
    for batch in (first, second):
        for group in batch.groups:
            rewards[group.prompt.prompt_id].append(float(group.rewards_G[0]))
    reward_AK = np.array(list(rewards.values()))
    assert reward_AK.shape == (6, 3) and results["num_chains"] == 6
    assert results["iteration_gain"] == pytest.approx((reward_AK[:, 2] - reward_AK[:, 0]).mean())
    is_right = reward_AK >= 0.999
    wrong_to_right = int((~is_right[:, 0] & is_right[:, 2]).sum())
    assert results["net_corrections"] == wrong_to_right - int((is_right[:, 0] & ~is_right[:, 2]).sum())
    # Sampled answers: those of k = 3 that are all right, and pairs that differ.
    assert results["pass_hat_k"] == pytest.approx(np.mean([group.rewards_G.min() >= 0.999 for group in sampled.groups]))
    assert results["pass_at_k"] == pytest.approx(np.mean([group.rewards_G.max() >= 0.999 for group in sampled.groups]))
    assert results["answer_diversity"] == pytest.approx(diversity_of(list(sampled.answers.values())))
    assert 0 < results["answer_diversity"] <= 1
    assert {len(answers) for answers in sampled.answers.values()} == {3}
    assert all(not batch.answers for batch in algo.play(algo.source.heldout(1), as_groups=False, num_transcripts=0))


@pytest.mark.parametrize(("env", "env_config", "num"), [
    ("tests.small_worlds:Even", {}, 1),
    ("rllib_srl.envs.wrappers.self_iteration:SelfIteration", {**ITERATING, "reward": "improvement"}, 1),
    ("rllib_srl.envs.wrappers.self_iteration:SelfIteration", ITERATING, 5),
], ids=["a world that cannot", "paid for improving", "too often"])  # fmt: skip
def test_a_world_that_cannot_iterate_so_often_is_named(build, env, env_config, num):
    with pytest.raises(ValueError, match=rf"evaluation_iterations = {num}; expected 0, or an environment 'self_iter"):
        build(env, env_config, evaluation_iterations=num)


def test_counts_are_checked_early(random_llama_dir, tmp_path):
    config = small_config(random_llama_dir, tmp_path).evaluation(evaluation_iterations=-1)
    assert "evaluation_iterations = -1; expected an integer of at least 0" in faults_of(config)
