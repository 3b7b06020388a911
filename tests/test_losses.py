"""Losses against the golden fixture of two answers with advantages +1 and -1, and the laws of the estimators."""

from __future__ import annotations

import pytest
import torch

from rllib_srl.losses import REUSE_CORRECTIONS, clipped_policy_loss, importance_correction, k1, k2, k3

NEW = torch.tensor([-0.5, -1.0, -0.2, -0.7, -2.0, -0.1])
OLD = torch.tensor([-1.0, -1.1, -0.3, -0.2, -1.5, -0.1])
ENGINE = torch.tensor([-1.0, -2.0, -0.3, -0.2, -3.0, -0.1])
REFERENCE = torch.tensor([-0.6, -1.0, -0.2, -0.9, -1.5, -0.3])
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])


def test_symmetric_clip_token_by_token():
    loss_N, is_clipped_N = clipped_policy_loss(NEW, OLD, ADVANTAGE, 0.2, 0.2)
    # ratios e^.5, e^.1 | e^.1, e^-.5, e^-.5, 1; the first is held at 1.2, the fourth and fifth at .8
    expected = torch.tensor([-1.2, -1.105171, 1.105171, 0.8, 0.8, 1.0])
    torch.testing.assert_close(loss_N, expected, atol=1e-6, rtol=0)
    assert is_clipped_N.tolist() == [True, False, False, True, True, False]
    assert loss_N.mean().item() == pytest.approx(0.233333, abs=1e-6)  # DAPO's token mean


def test_clip_higher_moves_only_the_upper_bound():
    loss_N, _ = clipped_policy_loss(NEW, OLD, ADVANTAGE, 0.2, 0.28)
    assert loss_N.mean().item() == pytest.approx(0.22, abs=1e-6)


def test_a_clipped_token_has_no_gradient_and_others_have_that_of_the_ratio():
    logp = NEW.clone().requires_grad_()
    clipped_policy_loss(logp, OLD, ADVANTAGE, 0.2, 0.2)[0].sum().backward()
    ratio = (NEW - OLD).exp()
    expected = torch.where(torch.tensor([False, True, True, False, False, True]), -ADVANTAGE * ratio, 0.0)
    torch.testing.assert_close(logp.grad, expected)


@pytest.mark.parametrize("clip_low, clip_high", [(0.2, 0.2), (0.2, 0.28), (1.0, 5.0)])
def test_on_policy_every_clip_has_the_gradient_of_reinforce(clip_low, clip_high):
    logp = OLD.clone().requires_grad_()
    clipped_policy_loss(logp, OLD, ADVANTAGE, clip_low, clip_high)[0].sum().backward()
    torch.testing.assert_close(logp.grad, -ADVANTAGE)


def test_truncated_importance_correction():
    # ratios of learner to engine: 1, 2.4596, 1, 1, 4.4817, 1
    free = importance_correction(OLD, ENGINE, float("inf"))
    torch.testing.assert_close(free, torch.tensor([1, 2.459603, 1, 1, 4.481689, 1]), atol=1e-5, rtol=0)
    assert importance_correction(OLD, ENGINE, 2.0).tolist() == [1, 2, 1, 1, 2, 1]
    assert not importance_correction(OLD.clone().requires_grad_(), ENGINE, 2.0).requires_grad


def test_correction_stays_finite_when_the_engine_gave_no_chance():
    assert torch.isfinite(importance_correction(torch.tensor([0.0]), torch.tensor([-1e4]), float("inf"))).all()


# Ratios of NEW to ENGINE: e^.5, e^1 | e^.1, e^-.5, e^1, 1; of OLD to ENGINE: 1, 2.4596 | 1, 1, 4.4817, 1.
@pytest.mark.parametrize(
    "correction, expected",
    [
        ("clip", [-1.28, -1.28, 1.105171, 0.8, 2.718282, 1.0]),  # a ratio that rose with A < 0 is not held
        ("truncate", [-1.28, -2.210342, 1.105171, 0.8, 1.6, 1.0]),  # those of NEW to OLD, times 1 2 1 1 2 1
        ("mask", [-1.28, 0.0, 1.105171, 0.8, 0.0, 1.0]),  # the same, times 1 0 1 1 0 1
    ],
)
def test_corrections_of_reused_tokens(correction, expected):
    anchor_N, weight_N = REUSE_CORRECTIONS[correction](OLD, ENGINE, (0.5, 2.0))
    loss_N, _ = clipped_policy_loss(NEW, anchor_N, ADVANTAGE, 0.2, 0.28)
    torch.testing.assert_close(weight_N * loss_N, torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_mask_looks_at_both_ends_and_a_truncation_at_one():
    behaviour_N, prox_N = torch.zeros(3), torch.tensor([0.25, 0.75, 3.0]).log()
    assert REUSE_CORRECTIONS["mask"](prox_N, behaviour_N, (0.5, 2.0))[1].tolist() == [0, 0.75, 0]
    assert REUSE_CORRECTIONS["truncate"](prox_N, behaviour_N, (0.5, 2.0))[1].tolist() == [0.25, 0.75, 2]


@pytest.mark.parametrize("correction", sorted(REUSE_CORRECTIONS))
def test_no_correction_weighs_tokens_of_the_policy_itself(correction):
    logp = OLD.clone().requires_grad_()
    anchor_N, weight_N = REUSE_CORRECTIONS[correction](OLD, OLD, (0.5, 2.0))
    (weight_N * clipped_policy_loss(logp, anchor_N, ADVANTAGE, 0.2, 0.28)[0]).sum().backward()
    torch.testing.assert_close(logp.grad, -ADVANTAGE)


def test_kl_estimators_on_the_fixture():
    means = [k(NEW, REFERENCE).mean().item() for k in (k1, k2, k3)]
    assert means == pytest.approx([0, 0.028333, 0.031837], abs=1e-6)


def test_k2_has_the_gradient_of_the_reverse_kl_and_k3_is_unbiased():
    logits, other = torch.tensor([0.3, -0.2, 0.9], requires_grad=True), torch.tensor([0.1, 0.4, -0.3])
    logp, ref_logp = logits.log_softmax(0), other.log_softmax(0)
    exact = (logp.exp() * (logp - ref_logp)).sum()
    want = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    # Enumerating the samples: E over tokens of the estimator's gradient at a fixed sample.
    got = torch.autograd.grad((logp.exp().detach() * k2(logp, ref_logp)).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(got, want)
    assert (logp.exp() * k3(logp, ref_logp)).sum().item() == pytest.approx(exact.item(), abs=1e-6)
    assert (k3(NEW, REFERENCE) >= 0).all()
