"""An engine that does not take its weights stops `train` with an error that names version and tensors."""

from __future__ import annotations

import dataclasses

import pytest

from rllib_srl.engine import WeightSyncError, unpack
from rllib_srl.rollout.env_runner import LLMEnvRunner
from tests.engine.test_faults import LAYER, stale_layer, swapped_keys_and_values
from tests.small_worlds import small_config


class SkipsSyncs(LLMEnvRunner):
    """Claims to have loaded the weights of every update, and of no self-test."""

    num_loads = 0

    def load_weights(self, ref, *args, **kwargs):
        self.num_loads += 1
        load = self.engine.load_weights
        if self.num_loads > 1:  # the self-test's
            self.engine.load_weights = lambda bundle: setattr(self.engine, "version", bundle.version)
        try:
            return super().load_weights(ref, *args, **kwargs)
        finally:
            self.engine.load_weights = load


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


def tampered(monkeypatch, change):
    """Let engines load what `change` makes of each (name, tensor)."""

    def loaded(bundle):
        for name, tensor in unpack(bundle):
            yield from change(name, tensor)

    monkeypatch.setattr("rllib_srl.engine.transformers_engine.unpack", loaded)


def train(algo, num_iterations):
    return [algo.train() for _ in range(num_iterations)]


def test_a_fault_in_loading_stops_the_start(config, monkeypatch):
    tampered(monkeypatch, stale_layer)
    with pytest.raises(WeightSyncError, match="version 0") as caught:
        config.build_algo()
    assert caught.value.tensors and all(name.startswith(LAYER) for name in caught.value.tensors)


@pytest.mark.slow
def test_a_fault_that_comes_later_stops_training(config, monkeypatch):
    algo = config.training(compute_dtype="bfloat16").build_algo()
    assert algo.train()["weight_sync"]["version"] == 1
    tampered(monkeypatch, swapped_keys_and_values)
    with pytest.raises(WeightSyncError, match=r"version [2-5]: .*the canary differs|the canary differs.*version [2-5]"):
        train(algo, 4)
    algo.stop()


@pytest.mark.slow
def test_a_skipped_sync_stops_training(config):
    algo = config.env_runners(env_runner_cls=SkipsSyncs).build_algo()
    with pytest.raises(WeightSyncError, match="version [1-4]"):
        train(algo, 4)
    algo.stop()


@pytest.mark.slow
def test_a_damaged_receipt_stops_training_and_names_the_tensor(config):
    """Through a remote runner the error arrives as it was raised, not as Ray's wrapper."""
    algo = config.env_runners(env_runner_cls=LosesATensor, num_env_runners=1).build_algo()
    with pytest.raises(WeightSyncError, match="version 1") as caught:
        algo.train()
    assert caught.value.tensors == (LAYER + "mlp.up_proj.weight",) and caught.value.version == 1
    assert "\n" not in str(caught.value)
    algo.stop()
