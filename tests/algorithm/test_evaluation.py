"""Evaluation beyond greedy accuracy: figures of several answers by hand, and on the real path of a run."""

import numpy as np
import pytest

from rllib_srl.algorithm.evaluation import _mean_pass, diversity_of, summary
from rllib_srl.common.statistics import pass_at_k, pass_hat_k, wilson_interval
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group
from tests.small_envs import small_config, watch


def test_diversity_by_hand():
    # Of 3 pairs 2 differ; of 1 pair none does, spaces aside; one answer alone has no pair.
    assert diversity_of([["7", "7", "8"], [" 4 2\n", "4  2"], ["1"]]) == pytest.approx((2 / 3 + 0) / 2)
    assert np.isnan(diversity_of([["1"], []])) and np.isnan(diversity_of([]))


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
    assert np.isnan(_mean_pass([together], 4, pass_hat_k))


def test_a_run_reports_what_sampled_answers_add(random_llama_dir, tmp_path, ray_here, build):
    config = small_config(random_llama_dir, tmp_path).evaluation(evaluation_duration=6, evaluation_pass_k=3)
    algo = build(config)
    seen = watch(algo)
    results, again = algo.evaluate(), algo.evaluate()
    plain = list(algo.play(algo.source.heldout(1), as_groups=False, num_transcripts=0))
    greedy, sampled, repeated, _, _ = seen
    prompts = [group.prompt.prompt_id for group in greedy.groups]
    assert prompts == [group.prompt.prompt_id for group in repeated.groups] and len(set(prompts)) == 6
    assert all(int(prompt.split()[1]) % 2 == 1 for prompt in prompts)  # `Even` holds the odd numbers out
    assert results["accuracy"] == again["accuracy"]
    assert results["pass_hat_k"] == pytest.approx(np.mean([group.rewards_G.min() >= 0.999 for group in sampled.groups]))
    assert results["pass_at_k"] == pytest.approx(np.mean([group.rewards_G.max() >= 0.999 for group in sampled.groups]))
    assert results["answer_diversity"] == pytest.approx(diversity_of(list(sampled.answers.values())))
    assert 0 < results["answer_diversity"] <= 1
    assert {len(answers) for answers in sampled.answers.values()} == {3}
    assert all(not batch.answers for batch in plain)
