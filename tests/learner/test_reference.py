"""The clock of the reference by hand, and how its weights follow the policy's."""

from __future__ import annotations

import pytest
import torch

from rllib_srl.learner.reference import Reference, ReferenceClock


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
