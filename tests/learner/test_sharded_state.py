"""Shards of two learners restore on two, on one and on none, bit for bit; and a whole state restores on two."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.common.remote_calls import Call
from rllib_srl.learner.group.learners import Learners
from rllib_srl.storage.checkpoints import CheckpointError
from tests.small_learner import GROUPS, Recording, learner_group, update
from tests.small_worlds import small_config


class Telling(Recording):
    """Tells its own part of everything that a checkpoint must keep."""

    def postprocess_gradients(self, gradients_dict):
        self.kept = {}
        return super(Recording, self).postprocess_gradients(gradients_dict)

    def told(self):
        """Return weights and optimiser state, whole, by name; every learner must be asked."""
        found = {}
        for name, parameter in self.model.named_parameters():
            (optimizer,) = self._named_optimizers.values()
            for kind, value in {"weight": parameter, **optimizer.state[parameter]}.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}/{kind}"] = whole.detach().clone().numpy()
        return found, float(optimizer.param_groups[0]["lr"])


@pytest.fixture
def build(random_llama_dir, tmp_path, ray_here):
    """Return a function: number of learners -> a learner group, which has FSDP2 from two on."""
    groups = []

    def of(num_learners, **training):
        config = small_config(random_llama_dir, tmp_path).training(lr=1e-3, micro_batch_tokens=60, **training)
        config.env_runners(num_env_runners=1, max_episode_tokens=128).training(fsdp=num_learners >= 2)
        config.learners(num_learners=num_learners, num_cpus_per_learner=0.25, learner_class=Telling)
        groups.append(learner_group(config))
        return groups[-1]

    yield of
    for group in groups:
        if not group._is_shut_down:
            group.shutdown()


def ask(group, method, *arguments):
    return Learners(group)._every(Call.of(method, *arguments), 60, method.__name__)


def assert_same(told, wanted):
    (found, lr), (expected, expected_lr) = told, wanted
    assert found.keys() == expected.keys() and lr == expected_lr
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


@pytest.mark.slow
def test_shards_of_two_restore_on_two_and_on_one(build, tmp_path):
    two = build(2)
    for _ in range(2):
        update(two, GROUPS)
    ask(two, Telling.save_shards, str(tmp_path))
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(sizes) == 2
    assert abs(sizes[0] - sizes[1]) < 0.1 * sum(sizes)  # neither holds the whole
    wanted, *_ = ask(two, Telling.told)
    steps = [array for name, array in wanted[0].items() if name.endswith("/step")]
    assert steps and all(step == 2.0 for step in steps)
    assert len(wanted[0]) == 4 * len(steps)  # weight, exp_avg, exp_avg_sq, step of each parameter
    for num_learners in (1, 0):
        other = build(num_learners)
        ask(other, Telling.load_shards, str(tmp_path))
        for told in ask(other, Telling.told):
            assert_same(told, wanted)
        other.shutdown()
    update(two, GROUPS)
    further, *_ = ask(two, Telling.told)
    assert not np.array_equal(*(one[0]["model.embed_tokens.weight/weight"] for one in (further, wanted)))
    ask(two, Telling.load_shards, str(tmp_path))
    assert_same(ask(two, Telling.told)[1], wanted)
    update(two, GROUPS)
    assert_same(ask(two, Telling.told)[0], further)  # and goes on as if it had never stopped


@pytest.mark.slow
def test_the_state_of_one_restores_on_two(build):
    one = build(0)
    update(one, GROUPS)
    two = build(2)
    two.set_state(deepcopy(one.get_state()))
    for told in ask(two, Telling.told):
        assert_same(told, ask(one, Telling.told)[0])


def test_a_module_that_waits_for_its_shards_computes_nothing(build):
    """As after restoring a part of a checkpoint: training on from other weights would go unnoticed."""
    group = build(0)
    module = group._learner.module[DEFAULT_MODULE_ID]
    module.leave_to_shards()
    state = module.gathered
    assert len(state) == 1
    module.set_state(state)
    with pytest.raises(RuntimeError, match="the weights lie in the checkpoint's learner_shards"):
        group._learner.scorer.score([[1, 2, 3]])


@pytest.fixture
def shards(build, tmp_path):
    """Return shards as one learner alone would write them, and the learner."""
    is_ours = not torch.distributed.is_initialized()  # an engine in this process leaves a group of one behind
    if is_ours:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    assert torch.distributed.get_world_size() == 1
    try:
        group = build(0)
        update(group, GROUPS)
        ask(group, Telling.save_shards, str(tmp_path / "shards"))
        yield tmp_path / "shards", group
    finally:
        if is_ours:
            torch.distributed.destroy_process_group()


def test_shards_of_one_restore_on_one(shards, build):
    directory, group = shards
    other = build(0)
    ask(other, Telling.load_shards, str(directory))
    assert_same(ask(other, Telling.told)[0], ask(group, Telling.told)[0])


def test_weights_alone_are_taken_whatever_the_optimiser(shards, build):
    directory, group = shards
    other = build(0, optimizer_name="sgd")
    ask(other, Telling.load_shards, str(directory), True)
    (wanted, _), (found, _) = ask(group, Telling.told)[0], ask(other, Telling.told)[0]
    weights = {name for name in wanted if name.endswith("/weight")}
    assert weights and weights == {name for name in found if name.endswith("/weight")}
    assert all(np.array_equal(found[name], wanted[name]) for name in weights)


def test_shards_of_another_optimiser_or_model_change_nothing(shards, build):
    directory, _ = shards
    other = build(0, optimizer_name="sgd", lora_rank=2)
    before = {name: p.clone() for name, p in other._learner.model.named_parameters()}
    with pytest.raises(ValueError, match="state of AdamW; expected SGD") as caught:
        ask(other, Telling.load_shards, str(directory))
    assert "model.embed_tokens.weight: unknown" in str(caught.value)
    assert all(p.equal(before[name]) for name, p in other._learner.model.named_parameters())


def test_shards_that_are_missing_or_damaged_are_named(shards, build, tmp_path):
    directory, _ = shards
    other = build(0)
    with pytest.raises(CheckpointError, match="index.json cannot be read"):
        ask(other, Telling.load_shards, str(tmp_path / "nowhere"))
    (file,) = directory.glob("*.safetensors")
    file.write_bytes(b"\x80\x04]\x94.")  # a pickle, which is never opened as one
    with pytest.raises(CheckpointError, match="a shard in .* cannot be read"):
        ask(other, Telling.load_shards, str(directory))
    file.unlink()
    with pytest.raises(CheckpointError, match="has 0 of 1 shards; expected all of them: learners on several machines"):
        ask(other, Telling.load_shards, str(directory))


def test_shards_hold_no_pickle(shards):
    directory, _ = shards
    assert {file.suffix for file in directory.iterdir()} == {".json", ".safetensors"}
