"""Training on stored groups: what each is worth in the gradient, what is said of it, and what the memory gets back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rllib_srl.batch.shard import build_shards
from rllib_srl.learner.objective import SUMS, episode_drift, first_pass, played_loss, reused_loss, statistics
from rllib_srl.losses.settings import LossSettings
from rllib_srl.types import GroupMeta
from tests.losses.test_losses import ADVANTAGE, ENGINE, NEW, OLD
from tests.small_learner import GROUPS, advantages_of, learner_config, learner_group, make_group, relative_gap, update

STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12])]
EPISODE = torch.tensor([4, 4, 7, 7, 7, 7])


def by_hand(config, max_logp_gap=None, objective=reused_loss):
    batch = {
        "is_reused": objective is reused_loss, "token_ids": torch.zeros(1, 9), "advantage": ADVANTAGE,
        "scale": torch.full((6,), 0.5), "behaviour_logp": ENGINE, "episode": EPISODE,
    }  # fmt: skip
    first_pass(batch, OLD, max_logp_gap)
    logp = NEW.clone().requires_grad_()
    loss, sums = objective(batch, {"logp": logp, "entropy": torch.zeros(6)}, config)
    loss.backward()
    return loss.item(), logp.grad, statistics({name: float(sums.get(name, 0.0)) for name in SUMS})


def test_loss_gradient_and_statistics_by_hand():
    # A weight is what -A grad(logp) is multiplied by, 0 where the clip bites: with A > 0 at a ratio to the stored
    # log-probs above 1.28, with A < 0 below 0.8.
    total, weights = 3.063453, [0, 0, 1.105171, 0, 2.718282, 1]
    loss, gradient, stats = by_hand(LossSettings.made())
    assert loss == pytest.approx(0.5 * total, abs=1e-6)
    torch.testing.assert_close(gradient, -0.5 * ADVANTAGE * torch.tensor(weights), atol=1e-6, rtol=0)
    assert stats["reuse/loss"] == pytest.approx(total / 6, abs=1e-6)  # a mean over tokens, whatever the scale
    assert stats["reuse/clip_fraction"] == pytest.approx(np.mean(np.equal(weights, 0)))
    assert stats["reuse/ess"] == pytest.approx(np.sum(weights) ** 2 / (6 * np.sum(np.square(weights))), abs=1e-6)
    # e^.5 + e^1 + e^.1 + e^-.5 + e^1 + 1 = 9.796986
    assert stats["reuse/ratio"] == pytest.approx(9.796986 / 6, abs=1e-6)
    assert stats["reuse/drift"] == pytest.approx((0.9 + 1.5) / 6, abs=1e-6)
    assert (stats["reuse/num_tokens"], stats["reuse/num_computed_tokens"], stats["reuse/num_episodes"]) == (6, 9, 2)
    assert stats["loss"] == stats["num_tokens"] == stats["reuse/num_left_out"] == 0


def test_an_episode_beyond_the_drift_weighs_nothing():
    # mean |OLD - ENGINE|: episode 4 (0 + .9) / 2 = .45, episode 7 (0 + 0 + 1.5 + 0) / 4 = .375
    torch.testing.assert_close(episode_drift(OLD, ENGINE, EPISODE), torch.tensor([0.45] * 2 + [0.375] * 4))
    _, gradient, stats = by_hand(LossSettings.made(), max_logp_gap=0.4)
    torch.testing.assert_close(gradient, 0.5 * torch.tensor([0, 0, 1.105171, 0, 2.718282, 1]), atol=1e-6, rtol=0)
    assert stats["reuse/loss"] == pytest.approx((1.105171 + 0.8 + 2.718282 + 1) / 6, abs=1e-6)  # still over all six
    assert (stats["reuse/num_left_out"], stats["reuse/left_out"]) == (1, 0.5)
    assert stats["reuse/ratio"] == pytest.approx((1.105171 + 0.606531 + 2.718282 + 1) / 4, abs=1e-6)
    assert stats["reuse/clip_fraction"] == 0.25
    none = by_hand(LossSettings.made(), max_logp_gap=0.3)
    assert none[0] == none[2]["reuse/ess"] == 0 and none[2]["reuse/left_out"] == 1


def test_reused_tokens_have_no_kl_term_and_played_ones_do():
    """A reused micro-batch carries no `ref_logp` at all, as a played one then must."""
    assert by_hand(LossSettings.made(kl_coeff=1.0))[0] == by_hand(LossSettings.made())[0]
    with pytest.raises(KeyError, match="ref_logp"):
        by_hand(LossSettings.made(kl_coeff=1.0), objective=played_loss)


def metas(played, reused):
    return [GroupMeta.of(g, g) for g in played] + [replace(GroupMeta.of(g, g), origin="reuse") for g in reused]


def shards_of(played, reused, num_shards):
    groups = metas(played, reused)
    return build_shards(groups, [advantages_of(g.ref) for g in groups], num_shards, 30)


def test_shards_know_the_whole_batch_and_reuse_moves_no_played_group():
    plain, both = shards_of(GROUPS, [], 2), shards_of(GROUPS, STORED[:1], 2)
    assert [shard.num_reused_tokens for shard in both] == [8, 8]
    assert sorted(shard.is_reused_P.sum() for shard in both) == [0, 1]
    for a, b in zip(plain, both, strict=True):
        assert [g.group_id for g in b.groups() if g.group_id != "g11"] == [g.group_id for g in a.groups()]


@pytest.fixture(scope="module")
def learners(random_llama_dir, ray_here):
    group = learner_group(learner_config(random_llama_dir).training(optimizer_name="sgd", lr=0.0, grad_clip=None))
    yield group
    group.shutdown()


@pytest.fixture
def learner(learners):
    """Return the learner; settings changed in a test are as before after it."""
    one = learners._learner
    one.config = (kept := one.config).copy(copy_frozen=False)
    yield one
    one.config = kept


def gradient(learners, played, reused=(), **arguments):
    return update(learners, played, reused, **arguments)[0][0]


def length(tree):
    return np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in tree.values()))


def as_the_policy_writes(learner, group, gap_G=None):
    """Return `group` with the learner's own log-probs as the stored ones, those of episode g lower by `gap_G[g]`."""
    logps = learner.scorer.score([group.stream(g).tolist() for g in range(group.size)])
    logp_N = np.concatenate([np.concatenate([[0], logp - gap]) for logp, gap in zip(logps, gap_G or [0] * group.size)])
    return replace(group, behaviour_logp_N=np.where(group.loss_mask_N, logp_N, 0).astype(np.float32))


def test_what_the_policy_itself_wrote_is_reused_as_if_played(learners, learner):
    stored = [as_the_policy_writes(learner, group) for group in STORED]
    reused, stats = update(learners, [], stored)
    assert relative_gap(reused[0], gradient(learners, stored)) < 1e-5
    assert stats["reuse/ess"] == pytest.approx(1, abs=1e-5) and stats["reuse/ratio"] == pytest.approx(1, abs=1e-5)
    assert stats["reuse/drift"] < 1e-5 and stats["reuse/clip_fraction"] == 0 and stats["num_tokens"] == 0


def test_more_reused_groups_leave_the_played_gradient_as_it_is(learners, learner):
    learner.config.replay_max_logp_gap = None
    plain = gradient(learners, GROUPS)
    for stored in (STORED[:1], STORED):
        both, alone = gradient(learners, GROUPS, stored), gradient(learners, [], stored)
        assert relative_gap({name: both[name] - alone[name] for name in both}, plain) < 1e-5
    once, twice = gradient(learners, GROUPS, STORED), gradient(learners, GROUPS, STORED * 2)
    assert relative_gap(twice, once) < 1e-5  # the same groups twice have the same mean


def test_statistics_of_played_tokens_know_nothing_of_reused_ones(learners, learner):
    plain, both = update(learners, GROUPS)[1], update(learners, GROUPS, STORED)[1]
    names = ("loss", "policy_loss", "clip_fraction", "correction", "rollout_logp_abs_diff", "entropy", "num_tokens")
    for name in names:
        assert both[name] == plain[name]
    assert (plain["reuse/num_tokens"], both["reuse/num_tokens"]) == (0, 24)
    assert both["total_loss"] == pytest.approx(both["loss"] + both["reuse/loss"], abs=1e-6)


def test_the_norm_is_that_of_the_reused_part_alone(learners, learner):
    learner.config.replay_max_logp_gap = None
    _, stats = update(learners, GROUPS, STORED)
    alone = gradient(learners, [], STORED)
    assert stats["reuse/gradient_norm"] == pytest.approx(length(alone), rel=1e-5)
    assert length(alone) > 1e-3


def test_exactly_the_episode_that_drifted_is_left_out_and_reported(learners, learner):
    """Episodes of one group share prefixes and micro-batches; its last one was written by a policy far away."""
    learner.config.replay_max_logp_gap = 1.0
    near = as_the_policy_writes(learner, STORED[0])
    far = as_the_policy_writes(learner, STORED[1], gap_G=[0, 0.5, 1.5])
    gradients, stats = update(learners, GROUPS, [near, far])
    assert (stats["reuse/num_left_out"], stats["reuse/left_out"]) == (1, pytest.approx(1 / 5))
    assert learner.num_left_out() == {"g12": 1}
    advantages = [advantages_of(group) for group in (*GROUPS, near, far)]
    assert advantages[-1][2] != 0
    advantages[-1][2] = 0.0
    learner.config.replay_max_logp_gap = None
    assert relative_gap(gradients[0], gradient(learners, GROUPS, [near, far], advantages=advantages)) < 1e-6


def test_an_empty_batch_and_one_without_loss_tokens_train_nothing(learners, learner):
    mute = replace(STORED[0], loss_mask_N=np.zeros_like(STORED[0].loss_mask_N))
    for reused in ([], [mute]):
        gradients, stats = update(learners, [], reused)
        assert length(gradients[0]) == 0 and stats["reuse/gradient_norm"] == 0
