"""Exact values of environments in wrappers: those of `gymnasium.make` are looked through, all others are not."""

from __future__ import annotations

from types import SimpleNamespace

import gymnasium
import pytest
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from rllib_srl.common.environments import WorldError
from rllib_srl.common.optimal import has_values, peeled, values_of
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.envs.games.faults import Faults


class Doubled(gymnasium.RewardWrapper):
    """Pays twice as much."""

    def reward(self, reward):
        return 2 * reward


class Valued(Doubled):
    """The same, with the values of what it pays."""

    def optimal_values(self, prompt_id):
        inner = self.unwrapped.optimal_values(prompt_id)
        return SimpleNamespace(with_memory=2 * inner.with_memory, without_memory=2 * inner.without_memory)

    def optimal_value(self, prompt_id):
        return self.optimal_values(prompt_id).with_memory


class Shorter(TimeLimit):
    """A subclass of a wrapper of gymnasium's is not that wrapper."""


def made(env=None):
    """Return an environment in the wrappers of `gymnasium.make`."""
    return TimeLimit(OrderEnforcing(PassiveEnvChecker(env or Faults())), 5)


def test_the_wrappers_of_make_are_looked_through():
    env, inside = made(), Faults()
    prompt_id = next(inside.prompt_ids("heldout", 0))
    assert isinstance(peeled(env), Faults) and has_values(env)
    (found,) = values_of(env, "faults", [prompt_id])
    assert found.with_memory == inside.optimal_value(prompt_id) > 0


@pytest.mark.parametrize("env", [Doubled(Faults()), TimeLimit(Doubled(made()), 5), Shorter(Faults(), 5)])
def test_another_wrapper_hides_the_values_of_the_environment_inside(env):
    assert not has_values(env)
    with pytest.raises(WorldError, match="environment 'doubled' has no exact values"):
        next(values_of(env, "doubled", ["any"]))


def test_a_wrapper_states_the_values_of_what_it_pays():
    def source_of(wrap):
        return PromptSource({"faults": lambda env_config: wrap(Faults(env_config))}, {}, {"faults": 1.0}, 0)

    (prompt,) = source_of(made).heldout(1)
    inner = Faults().optimal_value(prompt.prompt_id)
    assert [source_of(wrap).optimal_value(prompt) for wrap in (made, Valued, Doubled)] == [inner, 2 * inner, None]
    (found,) = values_of(TimeLimit(Valued(made()), 5), "faults", [prompt.prompt_id])
    assert found.with_memory == 2 * inner
