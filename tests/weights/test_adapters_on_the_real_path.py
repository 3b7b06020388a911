"""Adapters from the learner to the engines in real runs: verified, resumed, and while runners play on."""

from __future__ import annotations

import pytest
import ray
import torch

from rllib_srl.engine.adapters import adapter_tensors
from rllib_srl.engine.canary import FP32_MAX_GAP
from tests.algorithm.test_ahead import ahead_config
from tests.small_worlds import ON_BOTH_ENGINES, small_config, with_engine

pytestmark = pytest.mark.slow
def adapters_of(algo) -> dict[str, torch.Tensor]:
    """Return copies of what the learner trains."""
    model = algo.learner_group._learner.model
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(model)}


def num_bytes(algo) -> int:
    """Return the size of what learner 0 sends."""
    return ray.get(algo.learner_group._learner.send(1).ref).buffer.nbytes


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path / "log").training(lora_rank=4, lr=0.02)


def test_only_adapters_are_sent_and_a_resumed_run_goes_on_bit_for_bit(config, tmp_path):
    algo = config.build_algo()
    results = [algo.train() for _ in range(2)]
    path = algo.save_to_path(tmp_path / "saved")
    wanted, trained, size = algo.train(), adapters_of(algo), num_bytes(algo)
    algo.stop()
    assert size == 4 * sum(tensor.numel() for tensor in trained.values())
    again = config.copy(copy_frozen=False).training(log_directory=str(tmp_path / "again")).build_algo()
    again.restore_from_path(path)
    result = again.train()
    assert result["weight_sync"]["version"] == wanted["weight_sync"]["version"] == 3
    assert all(one["weight_sync"]["canary_max"] <= FP32_MAX_GAP for one in [*results, wanted, result])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in adapters_of(again).items())
    again.stop()
    merged = config.copy(copy_frozen=False).training(lora_rank=4, lora_send="merged").build_algo()
    assert num_bytes(merged) > 5 * size
    merged.stop()


@ON_BOTH_ENGINES
def test_runners_that_play_on_get_adapters(random_llama_dir, tmp_path, ray_here, build, engine):
    config = ahead_config(random_llama_dir, tmp_path, slow_s=0.02)
    algo = build(with_engine(config.training(lora_rank=4, lr=0.02), engine))
    results = [algo.train() for _ in range(4)]
    assert [one["weight_sync"]["version"] for one in results] == [1, 2, 3, 4]
    assert all(one["weight_sync"]["canary_max"] <= FP32_MAX_GAP for one in results)
    assert max(one["rollout"]["lag_max"] for one in results) == 1  # on a busy machine not in every iteration
    assert all(tensor.abs().sum() > 0 for tensor in adapters_of(algo).values())
