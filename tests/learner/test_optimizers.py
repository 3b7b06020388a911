"""Optimisers in the learner: eight-bit state steps as AdamW does, is saved, and what cannot run says why."""

from copy import deepcopy

import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.learner import model_setup as optimizers
from tests.small_envs import small_config
from tests.small_learner import GROUPS, Recording, learner_group, relative_gap, update


@pytest.fixture
def config(random_llama_dir, tmp_path):
    return small_config(random_llama_dir, tmp_path).env_runners(max_episode_tokens=128).training(lr=1e-3)


def trained(config, name, num_updates=3):
    own = config.copy(copy_frozen=False).training(optimizer_name=name, weight_decay=0.01)
    group = learner_group(own.learners(learner_class=Recording))
    for _ in range(num_updates):
        update(group, GROUPS)
    return group


def weights_of(group):
    return {name: array.copy() for name, array in group.get_weights()[DEFAULT_MODULE_ID].items()}


def state_of(group):
    (optimizer,) = group._learner._named_optimizers.values()
    tensors = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
    return optimizer.state, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_eight_bit_state_steps_as_adamw_does(config, ray_here):
    plain, small = trained(config, "adamw"), trained(config, "adamw_8bit")
    start = weights_of(trained(config, "adamw", num_updates=0))
    moved = {name: array - start[name] for name, array in weights_of(plain).items()}
    gap = relative_gap({name: array - start[name] for name, array in weights_of(small).items()}, moved)
    assert 1e-6 < gap < 0.05  # rounded to eight bits, else the same
    state, num_bytes = state_of(small)
    large = [entry for parameter, entry in state.items() if parameter.numel() >= 4096]
    assert large and all(entry["state1"].dtype == entry["state2"].dtype == torch.uint8 for entry in large)
    assert num_bytes < 0.35 * state_of(plain)[1]


def test_state_is_saved_and_restored_bit_for_bit(config, ray_here):
    moments, name = ("state1", "state2"), "adamw_8bit"
    group, other = trained(config, name), trained(config, name, num_updates=0)
    other.set_state(deepcopy(group.get_state()))
    for one in (group, other):
        update(one, GROUPS)
    assert relative_gap(weights_of(other), weights_of(group)) == 0
    (found, _), (wanted, _) = state_of(other), state_of(group)
    for left, right in zip(found.values(), wanted.values(), strict=True):
        assert left.keys() == right.keys() and left["step"] == right["step"]
        for moment in set(moments) & set(left):  # bitsandbytes keeps small tensors in float32 under the same names
            assert left[moment].dtype == right[moment].dtype and torch.equal(left[moment], right[moment])
        assert moments[0] in left


@pytest.mark.parametrize(("name", "options"), [
    ("adamw", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("adamw_8bit", {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("sgd", {}),
])  # fmt: skip
def test_a_resumed_learner_has_the_options_and_the_rate_of_its_settings(config, name, options):
    state = learner_group(config.training(optimizer_name=name, lr=1e-4)).get_state()
    given = {key.replace("betas", "adam_betas"): value for key, value in options.items()}
    for lr, rate in ((5e-4, 5e-4), ([[0, 1.0], [9, 2.0]], 1e-4)):  # a schedule goes on from the rate of the checkpoint
        group = learner_group(config.copy(copy_frozen=False).training(lr=lr, **given))
        group.set_state(deepcopy(state))
        (optimizer,) = group._learner._named_optimizers.values()
        (found,) = optimizer.param_groups
        assert {key: found[key] for key in ("lr", *options)} == {"lr": rate, **options}


@pytest.mark.parametrize("name", sorted(optimizers.PAGED))
def test_paging_needs_a_gpu(config, name):
    assert config_errors(config.training(optimizer_name=name)) == [
        f"optimizer_name = {name!r}; expected num_gpus_per_learner above 0: on a CPU there is nothing to page"
    ]
    assert optimizers.error_of(name, num_gpus=0.5) is None


def test_a_missing_package_is_named(config, monkeypatch):
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None)
    (line,) = config_errors(config.training(optimizer_name="adamw_8bit"))
    assert "expected the package bitsandbytes: pip install 'rllib_srl[optimizers]'" in line
    assert optimizers.error_of("adamw", 0) is None
