"""Weights in real runs: an engine that does not take them stops `train` by name, and adapters are sent alone."""

import dataclasses

import pytest
import ray
import torch

from rllib_srl.engine.adapters import adapter_tensors
from rllib_srl.engine.canary import FP32_MAX_GAP
from rllib_srl.engine.sync import WeightSyncError
from rllib_srl.rollout.env_runner import LLMEnvRunner
from tests.engine.test_errors import LAYER, stale_layer, swapped_keys_and_values, tampered
from tests.small_envs import small_config


class LosesATensor(LLMEnvRunner):
    """Receives bundles in which, after the self-test, one byte of one tensor is wrong."""

    num_loads = 0

    def load_weights(self, ref, *args, **kwargs):
        self.num_loads += 1
        load = self.engine.load_weights

        def load_damaged(bundle):
            buffer = bundle.buffer.copy()
            spec = next(spec for spec in bundle.tensors if spec.name == LAYER + "mlp.up_proj.weight")
            buffer[spec.offset] ^= 1
            load(dataclasses.replace(bundle, buffer=buffer))

        if self.num_loads > 1:
            self.engine.load_weights = load_damaged
        try:
            return super().load_weights(ref, *args, **kwargs)
        finally:
            self.engine.load_weights = load


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    # Steps that move the policy by more than rounding does, in bf16 too.
    return small_config(random_llama_dir, tmp_path).training(lr=0.02, num_prompts_per_batch=16)


def test_an_error_in_loading_stops_the_start(config, monkeypatch):
    tampered(monkeypatch, None, stale_layer)
    with pytest.raises(WeightSyncError, match="version 0") as caught:
        config.build_algo()
    assert caught.value.tensors and all(name.startswith(LAYER) for name in caught.value.tensors)


@pytest.mark.slow
def test_an_error_that_comes_later_stops_training(config, build, monkeypatch):
    algo = build(config, compute_dtype="bfloat16")
    assert algo.train()["weight_sync"]["version"] == 1
    tampered(monkeypatch, None, swapped_keys_and_values)
    with pytest.raises(WeightSyncError, match=r"version [2-5]: .*the canary differs|the canary differs.*version [2-5]"):
        [algo.train() for _ in range(4)]


@pytest.mark.slow
def test_a_damaged_receipt_stops_training_and_names_the_tensor(config, build):
    """Through a remote runner the error arrives as it was raised, not as Ray's wrapper."""
    algo = build(config.env_runners(env_runner_cls=LosesATensor, num_env_runners=1))
    with pytest.raises(WeightSyncError, match="version 1") as caught:
        algo.train()
    assert caught.value.tensors == (LAYER + "mlp.up_proj.weight",) and caught.value.version == 1
    assert "\n" not in str(caught.value)


def adapters_of(algo) -> dict[str, torch.Tensor]:
    """Return copies of what the learner trains."""
    model = algo.learner_group._learner.model
    return {name: tensor.detach().clone() for name, tensor in adapter_tensors(model)}


def num_bytes(algo) -> int:
    """Return the size of what learner 0 sends."""
    return ray.get(algo.learner_group._learner.send(1).ref).buffer.nbytes


@pytest.mark.slow
def test_only_adapters_are_sent_and_a_resumed_run_goes_on_bit_for_bit(random_llama_dir, ray_here, tmp_path):
    config = small_config(random_llama_dir, tmp_path / "log").training(lora_rank=4, lr=0.02)
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
