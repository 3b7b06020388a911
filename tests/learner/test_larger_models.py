"""Adapters and shards through the whole path: a remote vLLM engine, checkpoints, learners of another number."""

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.algorithm.checkpointing import MODULE
from rllib_srl.engine.canary import FP32_MAX_GAP
from rllib_srl.learner.model_setup import merged
from rllib_srl.learner.scoring import load_causal_lm
from rllib_srl.storage.weight_file import WEIGHTS, read_weights
from tests.losses.kl_by_hand import captured, k3_mean
from tests.small_envs import small_config, watch

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path / "log").env_runners(num_env_runners=1)
    return config.env_runners(engine="vllm", engine_kv_cache_gib=0.125, num_cpus_per_env_runner=1)


def agreed(result):
    return result["weight_sync"]["canary_max"] <= FP32_MAX_GAP


@pytest.mark.timeout(600)
@pytest.mark.parametrize("send", ["adapter", "merged"])
def test_adapters_train_against_an_engine_that_gets_them(config, random_llama_dir, build, send):
    base = dict(load_causal_lm(str(random_llama_dir)).named_parameters())
    config.training(lora_rank=4, lora_send=send, lr=0.02, kl_coeff=0.01, kl_estimator="k3")
    algo = build(config)
    model = algo.learner_group._learner.model
    seen = captured(algo, lambda: {name: tensor.clone() for name, tensor in merged(model)})
    results = [algo.train() for _ in range(3)]
    own = {name.replace(".base_layer.", "."): p.detach().clone() for name, p in model.named_parameters()}
    assert [one["weight_sync"]["version"] for one in results] == [1, 2, 3] and all(map(agreed, results))
    assert all(torch.equal(own[name], base[name]) for name in base)  # bit for bit
    kls = [one["learners"][DEFAULT_MODULE_ID]["kl"] for one in results]
    assert kls == pytest.approx([k3_mean(random_llama_dir, *one, base) for one in seen], rel=1e-3, abs=1e-6)
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[1] > 1e-4
    # The engine wrote with what was sent.
    assert results[2]["learners"][DEFAULT_MODULE_ID]["rollout_logp_abs_diff"] < 1e-4
    moved = [name for name in base if not torch.equal(seen[2][1][name], base[name])]
    assert moved and all(name.split(".")[-2] in config.lora_targets for name in moved)


@pytest.mark.timeout(900)
def test_two_sharded_learners_go_on_as_one_and_as_two(config, build, tmp_path):
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.25).training(fsdp=True)
    algo = two.build_algo()
    try:
        seen = watch(algo)
        results = [algo.train() for _ in range(2)]
        path = algo.save_to_path(tmp_path / "saved")
        wanted = algo.train()
        algo.restore_from_path(path)
        again = algo.train()
        drawn = prompts_of(seen[-2])
        assert prompts_of(seen[-1]) == drawn
    finally:
        algo.stop()
    assert all(map(agreed, results)) and agreed(again)
    for name in ("loss", "rollout_logp_abs_diff", "num_tokens"):
        losses = [one["learners"][DEFAULT_MODULE_ID][name] for one in (again, wanted)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-7)
    saved = read_weights(tmp_path / "saved" / MODULE / WEIGHTS)
    one = build(config)
    learner = one.learner_group._learner
    for restore in (one.restore_weights, one.restore_from_path):
        restore(path)
        assert (one.version, one.iteration) == (2, 2)
        for name, parameter in learner.module[DEFAULT_MODULE_ID].named_parameters():
            assert np.array_equal(parameter.detach().numpy(), saved[name])
    (optimizer,) = learner._named_optimizers.values()
    assert all(float(state["step"]) == 2.0 and state["exp_avg_sq"].any() for state in optimizer.state.values())
    seen, result = watch(one), one.train()
    assert agreed(result) and prompts_of(seen[0]) == drawn
    assert result["learners"][DEFAULT_MODULE_ID]["num_nonfinite_gradients"] == 0


def prompts_of(batch):
    return [group.prompt.key for group in batch.groups]
