"""The learner: tries equal padding, and any number of learners equals one process, gradient by gradient."""

from dataclasses import replace

import numpy as np
import pytest
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.batch.shard import build_shards
from rllib_srl.types import GroupMeta
from tests.small_learner import ADVANTAGES, GROUPS, learner_config, learner_group, make_group, relative_gap, update

STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12]), make_group(13, 2, [4, 4])]


@pytest.fixture
def config(random_llama_dir):
    sgd = learner_config(random_llama_dir).training(optimizer_name="sgd", lr=1.0, grad_clip=None)
    return sgd.training(tis_clip_max=1.1)


def train_once(config):
    """Return the gradient and the statistics of one update."""
    (gradient,), stats = update(learner_group(config), GROUPS)
    return gradient, stats


def test_a_trie_has_the_gradient_of_padding(config, ray_here):
    shared, stats = train_once(config)
    padded, padded_stats = train_once(config.copy(copy_frozen=False).training(prefix_sharing=False))
    assert relative_gap(shared, padded) < 1e-5
    assert stats["num_computed_tokens"] < 0.6 * padded_stats["num_computed_tokens"]


@pytest.mark.parametrize("how", [{}, {"prefix_sharing": False}, {"micro_batch_tokens": 10_000}])
def test_the_conversations_of_an_episode_do_not_see_each_other(config, ray_here, how):
    """Three episodes of one conversation each, and the same three as one episode, have the same gradient."""
    parts = make_group(21, 7, [5, 9, 3])
    lengths = parts.lengths_G()
    starts = [0, int(lengths[0]), int(lengths[0] + lengths[1])]
    single = {"rewards_G": parts.rewards_G[:1], "versions_G2": parts.versions_G2[:1], "stop_reasons": ("terminated",)}
    whole = replace(parts, offsets=np.array([0, lengths.sum()]), extra={"conversations": {"0": starts}}, **single)
    joined = replace(whole, extra={})  # the mutant: one sequence
    for one in (whole, joined):
        replace(one, stop_reasons=parts.stop_reasons[:1]).check_valid()
    group = learner_group(config.copy(copy_frozen=False).training(**how, lr=0.0))
    try:
        (apart,), _ = update(group, [parts, GROUPS[0]], advantages=[np.full(3, 0.7), ADVANTAGES[0]])
        same = [np.full(1, 0.7), ADVANTAGES[0]]
        gradients = [update(group, [one, GROUPS[0]], advantages=same)[0][0] for one in (whole, joined)]
    finally:
        group.shutdown()
    assert relative_gap(gradients[0], apart) < 1e-5 < 0.05 < relative_gap(gradients[1], apart)


@pytest.mark.slow
def test_learners_agree_on_reused_groups(config, ray_here):
    """Also where one learner of two has none, where nothing else is trained on, and where there are none at all."""
    batches = [(GROUPS, STORED), (GROUPS, STORED[:1]), ([], STORED[:1]), (GROUPS[:1], STORED), (GROUPS, [])]
    config = config.training(lr=0.0)
    runs = []
    for num_learners in (0, 1, 2):
        own = config.copy(copy_frozen=False).learners(num_learners=num_learners, num_cpus_per_learner=0.5)
        group = learner_group(own)
        runs.append([update(group, *batch) for batch in batches])
        group.shutdown()
    for run in runs[1:]:
        for (gradients, stats), (wanted, wanted_stats) in zip(run, runs[0], strict=True):
            for one in gradients:
                assert relative_gap(one, wanted[0]) < 1e-5
            compared = {"loss", "num_tokens", *(name for name in stats if name.startswith("reuse/"))}
            for name in compared - {"reuse/num_computed_tokens"}:  # fewer prefixes are shared in smaller shards
                assert stats[name] == pytest.approx(wanted_stats[name], rel=1e-5, abs=1e-7), name
    assert runs[0][1][1]["reuse/gradient_norm"] > 0.01 and runs[0][4][1]["reuse/gradient_norm"] == 0


def test_a_non_finite_gradient_skips_the_step_and_is_counted(config, ray_here):
    group = learner_group(config)
    before = {name: array.copy() for name, array in group.get_weights()[DEFAULT_MODULE_ID].items()}
    _, stats = update(group, GROUPS, advantages=[np.full(one.size, np.inf) for one in GROUPS])
    assert relative_gap(group.get_weights()[DEFAULT_MODULE_ID], before) == 0
    assert stats["num_nonfinite_gradients"] == 1


def test_several_epochs_move_away_from_the_policy_that_started(config, ray_here):
    """The second epoch's ratio is taken against the weights before the first: the clip must bite."""
    config = config.training(num_epochs=3, lr=5.0, clip_low=1e-4, clip_high=1e-4)
    assert train_once(config)[1]["clip_fraction"] > 0.2


def test_making_room_and_taking_it_back_changes_nothing(config, ray_here):
    """Three updates with the optimiser moved out and in between equal three without."""
    config = config.training(optimizer_name="adamw", lr=1e-3)
    weights = []
    for moves in (False, True):
        group = learner_group(config)
        for _ in range(3):
            update(group, GROUPS)
            if moves:
                group._learner.offload()
                assert all(p.grad is None for p in group._learner.model.parameters())
                group._learner.onload()
        weights.append(group.get_weights()[DEFAULT_MODULE_ID])
    assert relative_gap(*weights) == 0


def test_a_learner_without_groups_has_no_kl_for_the_reward(config):
    learner = learner_group(config.training(kl_coeff=0.1, kl_estimator="k1"))._learner
    shards = build_shards([GroupMeta.of(GROUPS[1], GROUPS[1])], ADVANTAGES[1:2], 2, 30)
    (kl_G,), nothing = (learner.episode_kl(shard) for shard in shards)
    assert len(kl_G) == 2 and nothing == []
