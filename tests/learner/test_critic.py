"""Token advantages by GAE against the double sum of its definition, and the clock of the reference by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllib_srl.learner.critic import Critic, gae, set_token_advantages
from rllib_srl.learner.reference import Reference, ReferenceClock


def slow_gae(values, reward, lam):
    """sum_l lambda^l delta_{t+l} of one episode, term by term."""
    deltas = [(values[t + 1] if t + 1 < len(values) else reward) - values[t] for t in range(len(values))]
    return [sum(lam**j * deltas[t + j] for j in range(len(values) - t)) for t in range(len(values))]


def test_gae_by_hand():
    # values .2 .5, return 1: deltas .3 .5; lambda .5: .3 + .25, .5; the second episode: 0 - .4
    got = gae(torch.tensor([0.2, 0.5, 0.4]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([3, 3, 7]), 0.5)
    torch.testing.assert_close(got, torch.tensor([0.55, 0.5, -0.4]))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.floats(0, 1), st.integers(0, 99))
def test_gae_is_its_definition(lengths, lam, seed):
    rng = np.random.default_rng(seed)
    values, rewards = [rng.normal(size=n) for n in lengths], rng.normal(size=len(lengths))
    episode = np.repeat(np.arange(len(lengths)) * 2 + 1, lengths)
    returns = torch.from_numpy(np.repeat(rewards, lengths))
    got = gae(torch.from_numpy(np.concatenate(values)), returns, torch.from_numpy(episode), lam)
    wanted = np.concatenate([slow_gae(v, r, lam) for v, r in zip(values, rewards, strict=True)])
    np.testing.assert_allclose(got.numpy(), wanted, atol=1e-5)


def test_at_lambda_1_the_advantage_is_return_less_value_and_the_target_the_return():
    critic = Critic(2, 0.1, "cpu")
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([[1.0, -1.0]]))
    hidden = torch.tensor([[0.5, 0.1], [0.0, 0.3]])
    batch = {"advantage": torch.tensor([1.0, 1.0, 1.0]), "episode": torch.tensor([0, 0, 0])}
    set_token_advantages(batch, {"hidden": hidden, "row": torch.tensor([0, 1, 0])}, critic, 1.0)
    torch.testing.assert_close(batch["advantage"], torch.tensor([0.6, 1.3, 0.6]))  # values .4, -.3, .4
    torch.testing.assert_close(batch["value_target"], torch.ones(3))


def test_a_critic_learns_what_it_is_told_and_sends_nothing_into_the_policy():
    critic = Critic(2, 0.1, "cpu")
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    fwd_out = {"hidden": hidden, "row": torch.tensor([0, 1])}
    batch = {"scale": torch.tensor([0.5, 0.5]), "value_target": torch.tensor([1.0, -1.0])}
    for _ in range(200):
        critic.loss(batch, fwd_out)[0].backward()
        critic.step()
    torch.testing.assert_close(critic.values(fwd_out).detach(), torch.tensor([1.0, -1.0]), atol=0.05, rtol=0)
    assert hidden.grad is None
    again = Critic(2, 0.1, "cpu")
    again.set_state(critic.get_state())
    torch.testing.assert_close(again.values(fwd_out), critic.values(fwd_out))


def test_a_base_never_moves_and_an_average_moves_on_time():
    assert {ReferenceClock("base", 1, 0.5).rate_at(now, [1.0]) for now in range(1, 9)} == {0.0}
    clock = ReferenceClock("ema", 3, 0.6)
    assert [clock.rate_at(now, [0.0]) for now in range(1, 7)] == [0, 0, 0.6, 0, 0, 0.6]


def test_last_good_moves_when_the_mean_since_the_last_look_is_the_best_so_far():
    clock = ReferenceClock("last_good", 2, 0.5)
    rewards = [0.0, 0.4, 0.1, 0.1, 0.3, 0.3, 0.0, 0.1]  # means .2, .1, .3, .05
    rates = []
    for now, reward in enumerate(rewards, 1):
        rates.append(clock.rate_at(now, [reward]))
        other = ReferenceClock("last_good", 2, 0.5)
        other.set_state(clock.get_state())
        clock = other  # saving and restoring changes nothing
    assert rates == [0, 1.0, 0, 0, 0, 1.0, 0, 0]


def test_an_iteration_without_episodes_is_no_good_one():
    assert ReferenceClock("last_good", 1, 1.0).rate_at(1, []) == 0.0


def test_following_mixes_weights_and_they_travel():
    reference, policy = reference_of(torch.nn.Linear(2, 1)), torch.nn.Linear(2, 1)
    wanted = 0.25 * policy.weight.detach() + 0.75 * reference.model.weight.detach()
    reference.follow(policy, 0.25)
    torch.testing.assert_close(reference.model.weight.detach(), wanted)
    other = reference_of(torch.nn.Linear(2, 1))
    other.set_state(reference.get_state())
    torch.testing.assert_close(other.model.weight, reference.model.weight)
    with pytest.raises(ValueError, match="differ in parameters: bias"):
        reference_of(torch.nn.Linear(2, 1, bias=False)).follow(policy, 0.5)


def reference_of(model):
    return Reference(model, torch.device("cpu"), "float32")
