"""Larger models: adapters, activations computed twice, shards over learners, each against the plain learner."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl.algorithm.validation import config_errors
from rllib_srl.common.remote_calls import Call
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.learner.model_setup import adapters_off
from rllib_srl.learner.scoring import load_causal_lm
from tests.learner.test_regularisers import changed
from tests.small_learner import GROUPS, Gathering, learner_config, learner_group, make_group, relative_gap, update

LORA = {"lora_rank": 4}
STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12])]


@pytest.fixture
def config(random_llama_dir):
    return learner_config(random_llama_dir).training(lr=1e-2, grad_clip=0.5)


def test_computing_activations_again_changes_no_gradient(config, ray_here):
    plain, again = learner_group(config), learner_group(changed(config, activation_checkpointing=True))
    calls = []
    layer = again._learner.model.base_model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    (wanted, _), (own, _) = (update(group, GROUPS) for group in (plain, again))
    assert relative_gap(own[0], wanted[0]) < 1e-6
    num_passes = len(again._learner._micro_batches[False])
    assert len(calls) == 2 * num_passes  # forward, and again backwards
    assert not any(one.training for one in again._learner.model.modules() if isinstance(one, torch.nn.Dropout))


def test_activations_on_the_host_change_no_gradient(config, ray_here, monkeypatch):
    """On a CPU the copies save no memory; on a GPU the same hooks copy to the host."""
    kept = []

    class Noting(torch.autograd.graph.save_on_cpu):
        def __init__(self, **options):
            super().__init__(**options)
            copied = self.pack_hook
            self.pack_hook = lambda tensor: kept.append(tuple(tensor.shape)) or copied(tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Noting)
    plain, moved = learner_group(config), learner_group(config)
    policy = moved._learner.policy
    policy.checkpoint_activations(offload=True)
    (wanted, _), (own, _) = (update(group, GROUPS) for group in (plain, moved))
    assert relative_gap(own[0], wanted[0]) < 1e-6
    passes = moved._learner._micro_batches[False]
    # One tensor a layer and pass, the layer's input; the rest is computed again.
    assert kept == [(1, len(one["token_ids"][0]), 128) for one in passes for _ in policy.model.base_model.layers]


def test_the_reference_is_the_base_without_a_second_copy(config, ray_here):
    group = learner_group(changed(config, **LORA, lr=0.1, kl_coeff=0.1, kl_estimator="k3"))
    learner = group._learner
    assert learner.reference.model is learner.model
    _, first = update(group, GROUPS)
    _, second = update(group, GROUPS)
    assert first["kl"] == pytest.approx(0, abs=1e-7) and second["kl"] > 1e-5
    with torch.no_grad(), adapters_off(learner.model):
        off = learner.model(torch.tensor([[1, 2, 3]])).logits
    base = load_causal_lm(config.model_config["model"])(torch.tensor([[1, 2, 3]])).logits
    torch.testing.assert_close(off, base)
    assert all(one.requires_grad == ("lora_" in name) for name, one in learner.model.named_parameters())


@pytest.mark.slow
def test_shards_have_the_gradients_of_one_process_and_restore_on_any_number(config, ray_here):
    # Adam divides by the gradient's own size: at a large rate it would blow up rounding in gradients near 0.
    config = changed(config, lr=1e-4)
    local = learner_group(config)
    wanted = [update(local, GROUPS) for _ in range(2)]
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.5, learner_class=Gathering)
    sharded = learner_group(two.training(fsdp=True))
    first, _ = update(sharded, GROUPS)
    for one in first:
        assert relative_gap(one, wanted[0][0][0]) < 1e-5
    Learners(sharded).gather(60)
    state = sharded.get_state()
    sent = Learners(sharded)._every(Call.of(GRPOTorchLearner.send, 1), 60, "sending")
    scored = Learners(sharded)._every(Call.of(GRPOTorchLearner.score_canary, [[1, 2, 3, 4]]), 60, "scoring")
    assert sent[1].ref is None and np.array_equal(scored[0][0], scored[1][0])
    second, stats = update(sharded, GROUPS)
    for one in second:
        assert relative_gap(one, wanted[1][0][0]) < 1e-5
    assert stats["loss"] == pytest.approx(wanted[1][1]["loss"], rel=1e-5)
    Learners(sharded).gather(60)
    weights = sharded.get_weights()[DEFAULT_MODULE_ID]
    assert relative_gap(weights, local.get_weights()[DEFAULT_MODULE_ID]) < 1e-5
    other = learner_group(config)  # saved by two, restored by one
    other.set_state(state)
    own, _ = update(other, GROUPS)
    assert relative_gap(own[0], wanted[1][0][0]) < 1e-5
    assert relative_gap(other.get_weights()[DEFAULT_MODULE_ID], weights) < 1e-5
    local_state = learner_group(config)
    update(local_state, GROUPS)
    sharded.set_state(deepcopy(local_state.get_state()))  # and the other way round
    again, _ = update(sharded, GROUPS)
    assert relative_gap(again[0], wanted[1][0][0]) < 1e-5
    sharded.shutdown()


@pytest.mark.slow
def test_a_sharded_learner_without_groups_waits_for_nobody(config, ray_here):
    config = changed(config, lr=0.0)
    two = config.copy(copy_frozen=False).learners(num_learners=2, num_cpus_per_learner=0.5, learner_class=Gathering)
    sharded, local = learner_group(two.training(fsdp=True)), learner_group(config)
    # With one group the second learner has none; stored groups are summed apart.
    for batch in ((GROUPS[:1], ()), (GROUPS, STORED), (GROUPS, STORED[:1])):
        own, _ = update(sharded, *batch)
        wanted, _ = update(local, *batch)
        for one in own:
            assert relative_gap(one, wanted[0]) < 1e-5
    sharded.shutdown()


@pytest.mark.parametrize(("settings", "message"), [
    ({"fsdp": True, "optimizer_name": "adamw_8bit"}, "expected one of adamw, sgd"),
    ({"fsdp": True}, "num_learners = 0; expected at least 2"),
    ({"fsdp": True, "lora_rank": 4}, "fsdp = True with lora_rank = 4; expected one of the two"),
    ({"fsdp": True, "grad_clip_by": "value"}, "expected 'global_norm'"),
    ({"lora_rank": 4, "lora_targets": "q_proj"}, "lora_targets = 'q_proj'; expected names of layers"),
    ({"activation_checkpointing": "offload"}, "expected num_gpus_per_learner above 0: on a CPU they are in host"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_with_the_reason(config, settings, message):
    with pytest.raises(ValueError, match=message):
        changed(config, **settings).validate()


@pytest.mark.parametrize(("lora", "num_gpus", "message"), [
    ({"lora_rank": 600}, 0, "lora_rank = 600; expected at most 512, the highest that vLLM applies"),
    ({"lora_rank": 4, "lora_targets": ["lm_head"]}, 0, r"lora_targets = .*; expected layers inside the decoder"),
    ({"lora_rank": 4}, 1, "lora_send.* with compute_dtype = 'float32'; expected 'bfloat16' on a GPU"),
])  # fmt: skip
def test_adapters_that_vllm_cannot_apply_are_refused_and_merged_ones_taken(config, lora, num_gpus, message):
    config.env_runners(engine="vllm", num_env_runners=1, num_gpus_per_env_runner=num_gpus)
    with pytest.raises(ValueError, match=f"{message}.* or lora_send = 'merged'"):
        changed(config, **lora).validate()
    assert not [line for line in config_errors(changed(config, **lora, lora_send="merged")) if "lora" in line]
