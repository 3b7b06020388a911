"""Advantages of silent groups by entropy (RL-ZVP): by hand, and their gradient."""

from __future__ import annotations

import pytest
import torch

from rllib_srl.losses import CLIP_RULES, LossSettings, Tokens, entropy_shaped

ENTROPY = torch.tensor([0.2, 0.6, 0.5, 0.2, 0.9])
EPISODE = torch.tensor([4, 4, 7, 7, 7])
RIGHT, WRONG = 0.1, -0.1
ADVANTAGE = torch.tensor([RIGHT, RIGHT, WRONG, WRONG, WRONG])


def test_right_tokens_gain_by_entropy_and_wrong_ones_lose_by_certainty():
    """0.1 H for the right episode; -0.1 (0.9 - H) for the wrong one."""
    got = entropy_shaped(ADVANTAGE, ENTROPY, EPISODE)
    torch.testing.assert_close(got, torch.tensor([0.02, 0.06, -0.04, -0.07, 0.0]))


def test_the_maximum_is_that_of_each_episode():
    both_wrong = torch.full((5,), WRONG)
    got = entropy_shaped(both_wrong, ENTROPY, EPISODE)
    torch.testing.assert_close(got, torch.tensor([-0.04, 0.0, -0.04, -0.07, 0.0]))


def test_a_single_token_gains_if_right_and_stays_if_wrong():
    for advantage, expected in ((RIGHT, 0.05), (WRONG, 0.0)):
        got = entropy_shaped(torch.tensor([advantage]), torch.tensor([0.5]), torch.tensor([0]))
        assert got.item() == pytest.approx(expected)


def test_no_gradient_flows_through_the_entropy():
    """At ratio 1 the gradient of the loss in logp is -A_t; the entropy gets none."""
    entropy_N, logp_N = ENTROPY.clone().requires_grad_(), torch.full((5,), -1.0).requires_grad_()
    advantage_N = entropy_shaped(ADVANTAGE, entropy_N, EPISODE)
    assert not advantage_N.requires_grad
    ratio_N = (logp_N - logp_N.detach()).exp()
    loss_N, _ = CLIP_RULES["higher"](Tokens(ratio_N, advantage_N, logp_N, None), LossSettings.made())
    loss_N.sum().backward()
    torch.testing.assert_close(logp_N.grad, torch.tensor([-0.02, -0.06, 0.04, 0.07, 0.0]))
    assert entropy_N.grad is None
