"""Losses against the golden fixture of two answers with advantages +1 and -1, by hand, and the laws they obey."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.losses.kl import KL_REWARDS, k1, k2, k3, k3_k2
from rllib_srl.losses.policy import CLIP_RULES, CORRECTIONS, RATIO_LEVELS, Tokens, correction_of, episode_mean, ratio_of
from rllib_srl.losses.settings import LossSettings

NEW = torch.tensor([-0.5, -1.0, -0.2, -0.7, -2.0, -0.1])
OLD = torch.tensor([-1.0, -1.1, -0.3, -0.2, -1.5, -0.1])
ENGINE = torch.tensor([-1.0, -2.0, -0.3, -0.2, -3.0, -0.1])
REFERENCE = torch.tensor([-0.6, -1.0, -0.2, -0.9, -1.5, -0.3])
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
EPISODE = torch.tensor([0, 0, 1, 1, 1, 1])
E = math.exp


def surrogate(rule, settings=None, logp=NEW, anchor=OLD, advantage=ADVANTAGE, level="token"):
    """Return loss, gradient and weight of the fixture under a clip rule."""
    logp = logp.clone().requires_grad_()
    ratio_N = ratio_of(level, logp, anchor, EPISODE)
    loss_N, weight_N = CLIP_RULES[rule](Tokens(ratio_N, advantage, logp), settings or LossSettings.made())
    loss_N.sum().backward()
    return loss_N.detach(), logp.grad, weight_N


def close(a, b):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float32), atol=1e-6, rtol=0)


# Ratios of NEW to OLD: e^.5 = 1.648721, e^.1 = 1.105171 | e^.1, e^-.5 = .606531, e^-.5, 1.
SAPO_P = 4 / (1 + E(-(E(0.5) - 1))), 4 / (1 + E(-(E(0.1) - 1)))
SAPO_N = [4 / 1.05 / (1 + E(-1.05 * (r - 1))) for r in (E(0.1), E(-0.5), E(-0.5), 1.0)]
BY_HAND = {
    "symmetric": ({}, [-1.2, -1.105171, 1.105171, 0.8, 0.8, 1]),
    "higher": ({}, [-1.28, -1.105171, 1.105171, 0.8, 0.8, 1]),
    "dual": ({"dual_clip": 1.05}, [-1.28, -1.105171, 1.05, 0.8, 0.8, 1]),  # only the bad token above 1.05 is held
    "two_sided": ({"clip_high": 0.05, "clip_delta": 1.08}, [-1.05, -1.05, 1.08, 0.8, 0.8, 1]),
    "cispo": ({}, [0.5 * 1.648721, 1.105171, -0.2 * 1.105171, -0.7 * 0.606531, -2 * 0.606531, -0.1]),
    "cispo, narrow": ({"cispo_bounds": (0.8, 1.28)}, [0.5 * 1.28, 1.105171, -0.2 * 1.105171, -0.7 * 0.8, -1.6, -0.1]),
    "sapo": ({}, [-SAPO_P[0], -SAPO_P[1], *SAPO_N]),
    "none": ({}, [-1.648721, -1.105171, 1.105171, 0.606531, 0.606531, 1]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_each_rule_by_hand(name):
    """The published golden means follow: GRPO .233333 over tokens, clip-higher .22, CISPO -.004856, narrow -.122644."""
    changed, expected = BY_HAND[name]
    close(surrogate(name.partition(",")[0], LossSettings.made(**changed))[0], expected)


@pytest.mark.parametrize("rule", sorted(CLIP_RULES))
def test_the_weight_is_what_the_gradient_is_worth(rule):
    """Of a wide spread of ratios, so that every clip of every rule bites somewhere."""
    logp = torch.linspace(-4, -0.01, 40)
    anchor, advantage = torch.full((40,), -1.5), torch.tensor([1.0, -0.5] * 20)
    leaf = logp.clone().requires_grad_()
    tokens = Tokens((leaf - anchor).exp(), advantage, leaf)
    loss_N, weight_N = CLIP_RULES[rule](tokens, LossSettings.made(dual_clip=1.5, clip_delta=2.0))
    loss_N.sum().backward()
    torch.testing.assert_close(leaf.grad, -advantage * weight_N, atol=1e-5, rtol=1e-5)
    assert rule in ("sapo", "none", "cispo") or (weight_N == 0).any()


@pytest.mark.parametrize("level", sorted(RATIO_LEVELS))
@pytest.mark.parametrize("rule", sorted(CLIP_RULES))
def test_on_policy_every_rule_has_the_gradient_of_reinforce(rule, level):
    _, gradient, _ = surrogate(rule, logp=OLD, level=level)
    torch.testing.assert_close(gradient, -ADVANTAGE)


def test_levels_of_the_ratio_by_hand():
    # differences .5, .1 | .1, -.5, -.5, 0: sums .6 and -.9, means .3 and -.225
    close(ratio_of("sequence", NEW, OLD, EPISODE), [E(0.6)] * 2 + [E(-0.9)] * 4)
    close(ratio_of("geometric", NEW, OLD, EPISODE), [E(0.3)] * 2 + [E(-0.225)] * 4)
    close(ratio_of("token", NEW, OLD, EPISODE), (NEW - OLD).exp())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(0, 1000))
def test_episode_means_do_not_care_for_order(episodes, seed):
    episode_N = torch.tensor(episodes)
    value_N = torch.randn(len(episodes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean_N = episode_mean(value_N, episode_N)
    for e in set(episodes):
        of_e = value_N[episode_N == e].mean().item()
        assert mean_N[episode_N == e].tolist() == pytest.approx([of_e] * episodes.count(e))
    shuffle = torch.randperm(len(episodes), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(episode_mean(value_N[shuffle], episode_N[shuffle]), mean_N[shuffle])


# Ratios of OLD to ENGINE: 1, e^.9 = 2.459603 | 1, 1, e^1.5 = 4.481689, 1; products those, geometric e^.45, e^.375.
WEIGHTS = {
    "none": ({}, [1, 1, 1, 1, 1, 1]),
    "tis": ({}, [1, 2, 1, 1, 2, 1]),
    "sequence_tis": ({"tis_clip_max": 3.0}, [2.459603] * 2 + [3] * 4),
    "mis": ({"correction_window": (0.5, 4.0)}, [1, 2.459603, 1, 1, 0, 1]),
    "sequence_mask": ({"correction_window": (0.5, 3.0)}, [2.459603] * 2 + [0] * 4),
    "geometric_mask": ({"sequence_window": (0.9, 1.5)}, [0, 0, 1, 1, 2, 1]),  # e^.45 = 1.57, e^.375 = 1.45
    "mis_po": ({"correction_window": (0.5, 2.0), "sequence_window": (0.9, 1.5)}, [0, 0, 1, 1, 0, 1]),
}


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_each_correction_by_hand(name):
    changed, expected = WEIGHTS[name]
    settings = LossSettings.made(correction=name, **changed)
    weight_N = correction_of(settings, OLD.clone().requires_grad_(), ENGINE, EPISODE)
    close(weight_N, expected)
    assert not weight_N.requires_grad


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_no_window_swallows_what_is_not_a_number(name):
    """A mask that drops it would train on the rest as if nothing had happened."""
    broken = OLD.clone()
    broken[1] = float("nan")
    weight_N = correction_of(LossSettings.made(correction=name), broken, ENGINE, EPISODE)
    assert name in ("none", "mis_po") or weight_N[1].isnan()
    assert name != "mis_po" or weight_N[1] == 1  # kept, so that the surrogate beside it is not lost


def test_kl_estimators_on_the_fixture():
    means = [k(NEW, REFERENCE).mean().item() for k in (k1, k2, k3, k3_k2)]
    assert means == pytest.approx([0, 0.028333, 0.031837, 0.031837], abs=1e-6)


def test_k2_has_the_gradient_of_the_reverse_kl_and_k3_is_unbiased():
    logits, other = torch.tensor([0.3, -0.2, 0.9], requires_grad=True), torch.tensor([0.1, 0.4, -0.3])
    logp, ref_logp = logits.log_softmax(0), other.log_softmax(0)
    exact = (logp.exp() * (logp - ref_logp)).sum()
    want = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    # Enumerating the samples: E over tokens of the estimator's gradient at a fixed sample.
    for estimator, is_exact in ((k2, True), (k3_k2, True), (k3, False), (k1, False)):
        expected = (logp.exp().detach() * estimator(logp, ref_logp)).sum()
        got = torch.autograd.grad(expected, logits, retain_graph=True)[0]
        assert torch.allclose(got, want, atol=1e-6) == is_exact, estimator.__name__
    assert (logp.exp() * k3(logp, ref_logp)).sum().item() == pytest.approx(exact.item(), abs=1e-6)
    assert (k3(NEW, REFERENCE) >= 0).all()


def test_kl_in_a_reward_by_hand():
    """Log-ratios .5 and -1: k1 -.5, k2 .125 + .5, k3 (e^-.5 + .5 - 1) + (e - 1 - 1); the row of docs/losses.md."""
    d, none = torch.tensor([0.5, -1.0]), torch.zeros(2)
    sums = {name: estimator(d, none).sum().item() for name, estimator in KL_REWARDS.items()}
    assert sums == {"k1": -0.5, "k2": 0.625, "k3": pytest.approx(0.8248125, abs=1e-6)}
    rewards = [1 - 0.1 * one for one in sums.values()]
    assert rewards == pytest.approx([1.05, 0.9375, 0.9175], abs=1e-4)
