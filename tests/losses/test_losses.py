"""Losses against the golden fixture of two answers with advantages +1 and -1, by hand, and the laws they obey."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.losses.bapo import bounds_of, masses, path_of
from rllib_srl.losses.clip import CLIP_RULES, Tokens
from rllib_srl.losses.kl import KL_REWARDS, k1, k2, k3, k3_k2
from rllib_srl.losses.ratio import (
    CORRECTIONS,
    RATIO_LEVELS,
    REUSE_CORRECTIONS,
    correction_of,
    episode_mean,
    is_on_policy,
    ratio_of,
)
from rllib_srl.losses.settings import LossSettings

NEW = torch.tensor([-0.5, -1.0, -0.2, -0.7, -2.0, -0.1])
OLD = torch.tensor([-1.0, -1.1, -0.3, -0.2, -1.5, -0.1])
ENGINE = torch.tensor([-1.0, -2.0, -0.3, -0.2, -3.0, -0.1])
REFERENCE = torch.tensor([-0.6, -1.0, -0.2, -0.9, -1.5, -0.3])
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0])
EPISODE = torch.tensor([0, 0, 1, 1, 1, 1])
E = math.exp


def surrogate(rule, settings=None, logp=NEW, anchor=OLD, advantage=ADVANTAGE, level="token", bounds=None):
    """Return loss, gradient and weight of the fixture under a clip rule."""
    logp = logp.clone().requires_grad_()
    ratio_N = ratio_of(level, logp, anchor, EPISODE)
    loss_N, weight_N = CLIP_RULES[rule](Tokens(ratio_N, advantage, logp, bounds), settings or LossSettings.made())
    loss_N.sum().backward()
    return loss_N.detach(), logp.grad, weight_N


def close(a, b):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float32), atol=1e-6, rtol=0)


# --- clip rules -------------------------------------------------------------------------------------------------

# Ratios of NEW to OLD: e^.5 = 1.648721, e^.1 = 1.105171 | e^.1, e^-.5 = .606531, e^-.5, 1.
SAPO_P = 4 / (1 + E(-(E(0.5) - 1))), 4 / (1 + E(-(E(0.1) - 1)))
SAPO_N = [4 / 1.05 / (1 + E(-1.05 * (r - 1))) for r in (E(0.1), E(-0.5), E(-0.5), 1.0)]
BY_HAND = {
    "symmetric": ({}, [-1.2, -1.105171, 1.105171, 0.8, 0.8, 1]),
    "higher": ({}, [-1.28, -1.105171, 1.105171, 0.8, 0.8, 1]),
    "dual": ({"dual_clip": 1.05}, [-1.28, -1.105171, 1.05, 0.8, 0.8, 1]),  # only the bad token above 1.05 is held
    "two_sided": ({"clip_delta": 1.5}, [-1.28, -1.105171, 1.105171, 0.8, 0.8, 1]),
    "cispo": ({}, [0.5 * 1.648721, 1.105171, -0.2 * 1.105171, -0.7 * 0.606531, -2 * 0.606531, -0.1]),
    "sapo": ({}, [-SAPO_P[0], -SAPO_P[1], *SAPO_N]),
    "none": ({}, [-1.648721, -1.105171, 1.105171, 0.606531, 0.606531, 1]),
}


@pytest.mark.parametrize("rule", BY_HAND)
def test_each_rule_by_hand(rule):
    changed, expected = BY_HAND[rule]
    close(surrogate(rule, LossSettings.made(**changed))[0], expected)


def test_golden_means():
    """GRPO -.113146, DAPO .233333, Dr.GRPO .0875, clip-higher .22, CISPO -.004856 and -.122644."""
    loss_N = surrogate("symmetric")[0]
    assert (loss_N[:2].mean() + loss_N[2:].mean()).item() / 2 == pytest.approx(-0.113146, abs=1e-6)
    assert loss_N.mean().item() == pytest.approx(0.233333, abs=1e-6)
    assert loss_N.sum().item() / (2 * 8) == pytest.approx(0.0875, abs=1e-6)
    assert surrogate("higher")[0].mean().item() == pytest.approx(0.22, abs=1e-6)
    assert surrogate("cispo")[0].mean().item() == pytest.approx(-0.004856, abs=1e-6)
    narrow = LossSettings.made(cispo_bounds=(0.8, 1.28))
    assert surrogate("cispo", narrow)[0].mean().item() == pytest.approx(-0.122644, abs=1e-6)


@pytest.mark.parametrize("rule", sorted(CLIP_RULES))
def test_the_weight_is_what_the_gradient_is_worth(rule):
    """Of a wide spread of ratios, so that every clip of every rule bites somewhere."""
    logp = torch.linspace(-4, -0.01, 40)
    anchor, advantage = torch.full((40,), -1.5), torch.tensor([1.0, -0.5] * 20)
    leaf = logp.clone().requires_grad_()
    tokens = Tokens((leaf - anchor).exp(), advantage, leaf, (0.7, 1.4))
    loss_N, weight_N = CLIP_RULES[rule](tokens, LossSettings.made(dual_clip=1.5, clip_delta=2.0))
    loss_N.sum().backward()
    torch.testing.assert_close(leaf.grad, -advantage * weight_N, atol=1e-5, rtol=1e-5)
    assert rule in ("sapo", "none", "cispo") or (weight_N == 0).any()


@pytest.mark.parametrize("level", sorted(RATIO_LEVELS))
@pytest.mark.parametrize("rule", sorted(CLIP_RULES))
def test_on_policy_every_rule_has_the_gradient_of_reinforce(rule, level):
    _, gradient, _ = surrogate(rule, logp=OLD, level=level, bounds=(0.7, 1.4))
    torch.testing.assert_close(gradient, -ADVANTAGE)


def test_two_sided_bounds_the_loss_of_a_bad_token_that_became_likely():
    logp, anchor, advantage = torch.tensor([-0.1]), torch.tensor([-3.0]), torch.tensor([-1.0])
    logp = logp.requires_grad_()
    ratio_N = (logp - anchor).exp()  # e^2.9 = 18.17
    loss_N, weight_N = CLIP_RULES["two_sided"](Tokens(ratio_N, advantage, logp), LossSettings.made())
    loss_N.sum().backward()
    assert (loss_N.item(), logp.grad.item(), weight_N.item()) == (4.0, 0.0, 0.0)
    assert CLIP_RULES["higher"](Tokens(ratio_N.detach(), advantage, logp), LossSettings.made())[0].item() > 18


# --- ratio levels -----------------------------------------------------------------------------------------------


def test_levels_of_the_ratio_by_hand():
    # differences .5, .1 | .1, -.5, -.5, 0: sums .6 and -.9, means .3 and -.225
    close(ratio_of("sequence", NEW, OLD, EPISODE), [E(0.6)] * 2 + [E(-0.9)] * 4)
    close(ratio_of("geometric", NEW, OLD, EPISODE), [E(0.3)] * 2 + [E(-0.225)] * 4)
    close(ratio_of("token", NEW, OLD, EPISODE), (NEW - OLD).exp())


def test_the_gradient_of_an_episodes_ratio_is_shared_by_its_tokens():
    """The mean of the carried ratio over an episode has the gradient of the geometric ratio itself."""
    logp, plain = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    cuts, carried_N = (slice(2), slice(2, 6)), ratio_of("geometric", logp, OLD, EPISODE)
    (torch.stack([carried_N[cut].mean() for cut in cuts]) * torch.tensor([1.0, -2.0])).sum().backward()
    exact = torch.stack([(plain - OLD)[cut].mean().exp() for cut in cuts])
    (exact * torch.tensor([1.0, -2.0])).sum().backward()
    torch.testing.assert_close(logp.grad, plain.grad)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_episodes_of_one_token_have_the_token_ratio(level):
    alone = torch.arange(6)
    torch.testing.assert_close(ratio_of(level, NEW, OLD, alone), ratio_of("token", NEW, OLD, alone))


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


# --- corrections ------------------------------------------------------------------------------------------------

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


def test_correction_stays_finite_when_the_engine_gave_no_chance():
    prox_N, behaviour_N = torch.tensor([0.0]), torch.tensor([-1e4])
    assert torch.isfinite(REUSE_CORRECTIONS["truncate"](prox_N, behaviour_N, (0.5, float("inf")))[1]).all()


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_no_window_swallows_what_is_not_a_number(name):
    """A mask that drops it would train on the rest as if nothing had happened."""
    broken = OLD.clone()
    broken[1] = float("nan")
    weight_N = correction_of(LossSettings.made(correction=name), broken, ENGINE, EPISODE)
    assert name in ("none", "mis_po") or weight_N[1].isnan()
    assert name != "mis_po" or weight_N[1] == 1  # kept, so that the surrogate beside it is not lost


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
    close(weight_N * surrogate("higher", anchor=anchor_N)[0], expected)
    assert not REUSE_CORRECTIONS[correction](OLD.clone().requires_grad_(), ENGINE, (0.5, 2.0))[1].requires_grad


def test_a_mask_looks_at_both_ends_and_a_truncation_at_one():
    behaviour_N, prox_N = torch.zeros(3), torch.tensor([0.25, 0.75, 3.0]).log()
    assert REUSE_CORRECTIONS["mask"](prox_N, behaviour_N, (0.5, 2.0))[1].tolist() == [0, 0.75, 0]
    assert REUSE_CORRECTIONS["truncate"](prox_N, behaviour_N, (0.5, 2.0))[1].tolist() == [0.25, 0.75, 2]


@pytest.mark.parametrize("correction", sorted(REUSE_CORRECTIONS))
def test_no_correction_weighs_tokens_of_the_policy_itself(correction):
    anchor_N, weight_N = REUSE_CORRECTIONS[correction](OLD, OLD, (0.5, 2.0))
    _, gradient, _ = surrogate("higher", logp=OLD, anchor=anchor_N)
    torch.testing.assert_close(weight_N * gradient, -ADVANTAGE)


def test_the_off_policy_mask_drops_bad_episodes_that_the_policy_has_left():
    # mean of ENGINE - NEW: episode 0 (-.5 - 1) / 2 = -.75, episode 1 (-.1 + .5 - 1 + 0) / 4 = -.15
    far = ENGINE + 2.0  # 1.25 and 1.85
    assert is_on_policy(0.5, NEW, far, ADVANTAGE, EPISODE).tolist() == [True, True, False, False, False, False]
    assert is_on_policy(1.86, NEW, far, ADVANTAGE, EPISODE).all()
    assert is_on_policy(0.5, NEW, ENGINE, ADVANTAGE, EPISODE).all()
    assert is_on_policy(None, NEW, far, ADVANTAGE, EPISODE).all()
    assert is_on_policy(0.5, torch.full((6,), float("nan")), far, ADVANTAGE, EPISODE).all()


# --- KL ---------------------------------------------------------------------------------------------------------


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


def test_k1_as_a_loss_has_no_gradient_on_average():
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    logp = logits.log_softmax(0)
    (logp.exp().detach() * k1(logp, torch.zeros(3))).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(3), atol=1e-7, rtol=0)


# --- BAPO -------------------------------------------------------------------------------------------------------


def share_along_the_path(mode, ratios, advantages, **settings):
    settings = LossSettings.made(clip_rule="bapo", bapo_mode=mode, **settings)
    columns = (torch.tensor(column, dtype=torch.float64) for column in (ratios, advantages, [0.0] * len(ratios)))
    table = masses(settings, *columns)
    return settings, table, bounds_of(settings, table)


def test_the_papers_search_by_hand():
    """rho along the path .3200 .3378 .3562 .3750 .3944 .4143: five upper steps, 1.2 + 5 * .05 = 1.45."""
    ratios, advantages = [1.5, 0.7, 1.1, 0.5, 1.3, 1.25], [1.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    _, table, (bounds, steps) = share_along_the_path("paper", ratios, advantages)
    shares = [p / abs(p - n) for p, n in table[:6].tolist()]
    assert shares == pytest.approx([0.32, 0.3378, 0.3562, 0.375, 0.3944, 0.4143], abs=5e-5)
    assert (bounds, steps) == ((0.6, pytest.approx(1.45)), 5)


def test_a_batch_without_positives_runs_to_the_end_and_stops():
    _, table, (bounds, steps) = share_along_the_path("paper", [0.9, 1.1], [-1.0, -1.0])
    assert len(table) == 36 + 15 + 1 and steps == 36 + 15
    assert bounds == (pytest.approx(0.9), pytest.approx(3.0))


def test_first_bounds_are_kept_where_the_share_is_there_already():
    for mode in ("paper", "released", "active"):
        assert share_along_the_path(mode, [1.0, 1.0], [1.0, -1.0])[2] == ((0.6, 1.2), 0)


TOY = [1.0, 0.65, 0.7, 0.5, 0.3, 0.85, 0.9, 1.0], [1.0] + [-1.0] * 7


@pytest.mark.parametrize(
    "mode, expected",
    [
        # c_low .6 .7 .8 .9: in the two originals raising it moves the share the wrong way, in "active" the right one
        ("paper", [0.233, 0.220, 0.202, 0.185]),
        ("released", [0.189, 0.180, 0.168, 0.156]),
        ("active", [0.196, 0.225, 0.267, 0.345]),
    ],
)
def test_which_way_the_lower_bound_moves_the_share(mode, expected, monkeypatch):
    monkeypatch.setattr("rllib_srl.losses.bapo.LOW", (0.6, 0.9, 0.1))
    monkeypatch.setattr("rllib_srl.losses.bapo.HIGH", (1.2, 1.2, 0.05))
    settings, table, _ = share_along_the_path(mode, *TOY)
    assert [low for low, _ in path_of(settings)] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    against = {"paper": lambda p, n: abs(p - n), "released": lambda p, n: n, "active": lambda p, n: p + n}[mode]
    assert [p / against(p, n) for p, n in table.tolist()] == pytest.approx(expected, abs=6e-4)


def test_released_raises_the_lower_bound_first_and_paper_weighs_by_the_engines_probability():
    assert path_of(LossSettings.made(bapo_mode="released"))[1] == (pytest.approx(0.62), 1.2)
    assert path_of(LossSettings.made(bapo_mode="paper"))[1] == (0.6, pytest.approx(1.25))
    assert path_of(LossSettings.made(bapo_mode="paper"))[4] == (0.6, 1.4)  # 1.2 + 4 * .05 is above it
    one = torch.ones(1)
    for mode, mass in (("paper", 0.5), ("released", 1.0), ("active", 1.0)):
        table = masses(LossSettings.made(bapo_mode=mode), one, one, one * math.log(0.5))
        assert table[0, 0].item() == pytest.approx(mass)


def test_the_bounds_reach_the_loss():
    close(surrogate("bapo", bounds=(0.9, 1.5))[0], [-1.5, -1.105171, 1.105171, 0.9, 0.9, 1])
    with pytest.raises(ValueError, match="without bounds"):
        surrogate("bapo")
