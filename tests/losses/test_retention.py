"""The KL of retention, worked by hand: two tokens, k = 0, 1 and 2, values and gradients."""

import math

import numpy as np
import pytest
import torch

from rllib_srl.losses.retention import Retention, make_target, scales, tensors_of, token_kl, top_kl

TOKEN = torch.tensor([0])  # sampled at each of the one step below


def logits_of(*probabilities):
    """Return logits [1, V] of a distribution, with gradient."""
    return torch.tensor([probabilities]).log().requires_grad_()


def loss_and_gradient(top_k, stored, current, token=0, weight=1.0):
    """Return the loss of one answer of one token, and its gradient with respect to the logits."""
    retention, tokens = Retention(weight, top_k), torch.tensor([token])
    target = retention.target(logits_of(*stored), tokens)
    logits = logits_of(*current)
    loss = retention.loss([logits], [tokens], [target], [""])
    return loss.item(), torch.autograd.grad(loss, logits)[0][0].tolist()


@pytest.mark.parametrize("top_k", [1, 2])  # with two tokens: one and the rest, or both and no rest
def test_one_of_two_tokens_and_the_rest_are_the_whole_kl(top_k):
    # p = (3/4, 1/4), q = (1/2, 1/2): KL = 3/4 log(3/2) + 1/4 log(1/2); gradient of the logits q - p.
    loss, gradient = loss_and_gradient(top_k, (0.75, 0.25), (0.5, 0.5))
    assert loss == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=3e-4)
    assert gradient == pytest.approx([-0.25, 0.25], abs=1e-3)


def test_without_stored_tokens_the_sampled_one_decides():
    # d = log(1/2) - log(3/4) = log(2/3): exp(d) - d - 1; gradient (exp(d) - 1) d log q = -1/3 (1 - q, -q).
    loss, gradient = loss_and_gradient(0, (0.75, 0.25), (0.5, 0.5))
    assert loss == pytest.approx(2 / 3 - math.log(2 / 3) - 1, abs=1e-3)
    assert gradient == pytest.approx([-1 / 6, 1 / 6], abs=1e-3)


def test_the_rest_is_one_class():
    # p = (1/2 | 1/2), q = (1/4 | 3/4): 1/2 log 2 + 1/2 log(2/3), less than over all three tokens.
    loss, gradient = loss_and_gradient(1, (0.5, 0.4, 0.1), (0.25, 0.25, 0.5))
    assert loss == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=3e-4)
    # q_0 - p_0 = -1/4; the rest's 1/4 falls on the others in proportion to q, 1 : 2
    assert gradient == pytest.approx([-0.25, 0.25 / 3, 0.5 / 3], abs=1e-3)
    # p = (1/2, 1/4 | 1/4), q = (1/4, 1/4 | 1/2): 1/2 log 2 + 0 + 1/4 log(1/2)
    assert loss_and_gradient(2, (0.5, 0.25, 0.25), (0.25, 0.25, 0.5))[0] == pytest.approx(0.25 * math.log(2), abs=3e-4)


@pytest.mark.parametrize("top_k", [0, 1, 2, 3])
def test_at_the_target_loss_and_gradient_are_zero(top_k):
    loss, gradient = loss_and_gradient(top_k, (0.5, 0.4, 0.1), (0.5, 0.4, 0.1))
    assert loss == pytest.approx(0.0, abs=3e-4) and gradient == pytest.approx([0.0] * 3, abs=2e-3)


def test_the_temperature_is_that_of_sampling():
    cold = Retention(1.0, 2, temperature=0.5)
    target = cold.target(logits_of(0.75, 0.25), TOKEN)  # squares: 9/10, 1/10
    assert np.exp(target.logp_Tk[0].astype(float)).tolist() == pytest.approx([0.9, 0.1], abs=1e-3)
    assert cold.loss([logits_of(0.75, 0.25)], [TOKEN], [target], [""]).item() == pytest.approx(0.0, abs=3e-4)


def test_a_domain_counts_by_its_tokens_and_each_domain_fully():
    # a: answers of 1 and 3 tokens, mean length 2; mean of KL_y / 2 over 2 answers = sum of KL_t / 4. b: one of 5.
    assert scales([1, 3, 5], ["a", "a", "b"], 2.0) == [0.5, 0.5, 0.4]
    retention, one, three = Retention(2.0, 1), torch.tensor([0]), torch.tensor([0, 1, 0])
    stored = [logits_of(0.75, 0.25), torch.tensor([[0.6, 0.4]] * 3).log()]
    targets = [retention.target(logits, tokens) for logits, tokens in zip(stored, (one, three), strict=True)]
    current = [logits_of(0.5, 0.5), torch.tensor([[0.5, 0.5]] * 3).log().requires_grad_()]
    kl = [loss_and_gradient(1, p, (0.5, 0.5))[0] for p in ((0.75, 0.25), (0.6, 0.4))]
    together = retention.loss(current, [one, three], targets, ["a", "a"]).item()
    assert together == pytest.approx(2.0 * (kl[0] + 3 * kl[1]) / 4, abs=3e-4)
    apart = retention.loss(current, [one, three], targets, ["a", "b"]).item()
    assert apart == pytest.approx(2.0 * (kl[0] + kl[1]), abs=3e-4)


def test_a_target_is_stored_in_half_precision():
    logits, tokens = torch.randn(7, 50, generator=torch.manual_seed(1)), torch.arange(7)
    target, logp_TV = Retention(1.0, 16).target(logits, tokens, "g", 2), logits.log_softmax(-1)
    assert (target.group_id, target.episode, target.ids_Tk.dtype, target.logp_Tk.dtype) == ("g", 2, "int32", "float16")
    assert target.num_bytes == 7 * (16 * 6 + 2)
    ids_Tk, logp_Tk, sampled_T = tensors_of(target, torch.device("cpu"))
    assert torch.allclose(logp_Tk, logp_TV.topk(16).values, atol=2e-3) and torch.equal(ids_Tk, logp_TV.topk(16).indices)
    assert torch.allclose(sampled_T, logp_TV[torch.arange(7), tokens], atol=2e-3)


def test_a_policy_that_gives_a_stored_token_nothing_is_pushed_back():
    empty = make_target("g", 0, torch.zeros(1, 0), torch.zeros(1, 0), torch.tensor([-1.0]))
    _, stored_Tk, stored_T = tensors_of(empty, torch.device("cpu"))
    logp = torch.tensor([-90.0], requires_grad=True)
    kl = token_kl(stored_Tk, torch.zeros(1, 0), stored_T, logp)
    assert torch.isfinite(kl).all()
    stored = torch.tensor([[0.75, 0.25]]).log()
    logp = torch.tensor([[-90.0, -1e-30]]).requires_grad_()
    (gradient,) = torch.autograd.grad(top_kl(stored, logp).sum(), logp)
    assert torch.isfinite(gradient).all() and gradient[0, 0] == pytest.approx(-0.75)


@pytest.mark.parametrize("values", [{"weight": -1.0}, {"top_k": -1}, {"temperature": 0.0}])
def test_values_out_of_range_are_named(values):
    with pytest.raises(ValueError, match="expected weight >= 0"):
        Retention(**values)


def test_more_tokens_than_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="top_k = 3; expected at most 2"):
        Retention(1.0, 3).target(logits_of(0.75, 0.25), TOKEN)
