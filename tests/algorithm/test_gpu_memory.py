"""The estimate of GPU memory: parameters against meta tensors, activations against autograd, and what is refused."""

import pytest
import torch

from rllib_srl import SRLConfig
from rllib_srl.algorithm.gpu_memory import (
    CARDS,
    GIB,
    check_memory,
    engine_need,
    learner_need,
    memory_errors,
    variant,
    variants,
)
from rllib_srl.algorithm.model_shape import SHAPES, ModelShape
from rllib_srl.algorithm.resources import PlacementError


def flat(**settings):
    return SRLConfig().training(activation_checkpointing=True).update_from_dict(settings)


def llama_of(shape, num_layers=None):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=num_layers or shape.num_layers, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocab, tie_word_embeddings=shape.is_tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_are_those_of_the_model_on_meta_tensors(size, tmp_path):
    with torch.device("meta"):
        model = llama_of(SHAPES[size])
    assert SHAPES[size].num_parameters == sum(one.numel() for one in model.parameters())
    model.config.save_pretrained(tmp_path)
    assert ModelShape.of(tmp_path) == SHAPES[size]


def test_adapters_are_those_that_peft_makes():
    from rllib_srl.engine.adapters import TARGETS, AdapterSpec, add_adapters

    with torch.device("meta"):
        model = llama_of(SHAPES["0.1B"])
    add_adapters(model, AdapterSpec.of(16, None, TARGETS), 0)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert SHAPES["0.1B"].adapter_parameters(16) == trained


@pytest.mark.parametrize(
    "shape", [ModelShape(2, 512, 1536, 8, 2, 1000, True, 64), ModelShape(2, 256, 1024, 8, 8, 1000, True, 32)]
)
def test_activations_are_what_autograd_keeps_for_a_layer(shape):
    def kept(num_layers, num_tokens=256):
        model, storages, alive = llama_of(shape, num_layers), {}, []
        own = {one.untyped_storage().data_ptr() for one in model.parameters()}

        def note(tensor):
            if tensor.untyped_storage().data_ptr() not in own:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                alive.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16):
            model.model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)
        return sum(storages.values())

    copies = 2 * shape.layer_parameters  # counted apart, as "bf16 copies"
    per_token = (kept(3) - kept(2) - copies) / 256
    assert shape.layer_activation_bytes() == pytest.approx(per_token, rel=0.03)


def test_parts_of_a_learner_by_hand():
    shape = SHAPES["8B"]
    num = shape.num_parameters
    full = learner_need(shape, flat()).parts
    assert (full["weights"], full["gradients"], full["optimiser"], full["bf16 copies"]) == (
        4 * num, 4 * num, 8 * num, 2 * num,
    )  # fmt: skip
    sharded = learner_need(shape, flat(fsdp=True, num_learners=8)).parts
    assert (sharded["weights"], sharded["optimiser"]) == (num / 2, num)
    assert sharded["gradients"] == num  # and their sum
    rounded = learner_need(shape, flat(fsdp=True, fsdp_gather_dtype="bfloat16", num_learners=8)).parts
    assert rounded["bf16 copies"] == 2 * (num - 32 * shape.layer_parameters)  # layers come in that format
    assert {**rounded, "bf16 copies": 0} == {**sharded, "bf16 copies": 0}  # the head is the largest unit, in fp32
    small = ModelShape(24, 4096, 16384, 32, 32, 1000, True, 128)
    halves = [learner_need(small, flat(fsdp=True, fsdp_gather_dtype=name, num_learners=8)).parts["gathered layers"]
              for name in ("bfloat16", "float32")]  # fmt: skip
    assert halves == [4 * small.layer_parameters, 8 * small.layer_parameters]
    lora = learner_need(shape, flat(lora_rank=16)).parts
    assert (lora["gradients"], lora["optimiser"]) == tuple(n * shape.adapter_parameters(16) for n in (4, 8))
    assert learner_need(shape, flat(optimizer_name="sgd")).parts["optimiser"] == 0
    for settings, trained, block in [  # the gradient of held answers, and two copies of that of the last block
        ({}, 4 * num, 4 * shape.layer_parameters),
        ({"fsdp": True, "num_learners": 8}, num, shape.layer_parameters / 2),
        ({"lora_rank": 16}, *(4 * shape.adapter_parameters(16) / n for n in (1, 32))),
    ]:
        stages = [{"env": "compare", "iterations": 1}, {"env": "registers"}]
        need = learner_need(shape, flat(replay_retain=1.0, replay_reuse_fraction=0.25, stream=stages, **settings)).parts
        assert need["held gradients"] == trained + 2 * block
    assert learner_need(shape, flat(replay_retain=0.0, stream=stages)).parts["held gradients"] == 0
    all_learned = flat(replay_retain=1.0, envs={"compare": {}, "registers": {}})
    assert learner_need(shape, all_learned).parts["held gradients"] == full["held gradients"] == 0
    planned = learner_need(shape, all_learned.callbacks("contrib.sec")).parts
    assert planned["held gradients"] == 4 * num + 8 * shape.layer_parameters
    half = 4 * num - 2 * 32 * shape.layer_parameters  # layers in bfloat16, the rest in fp32
    for settings, size in [
        ({}, 0),
        ({"kl_coeff": 0.1}, half),
        ({"kl_coeff": 0.1, "compute_dtype": "float32"}, 4 * num),
        ({"kl_coeff": 0.1, "fsdp": True, "num_learners": 8}, half / 8),
        ({"kl_coeff": 0.1, "regularisers": {"distill": {}}}, half),  # both of the start, which is loaded once
        ({"kl_coeff": 0.1, "regularisers": {"distill": {"teacher": "tiny"}}}, 2 * half),
        ({"kl_coeff": 0.1, "regularisers": {"distill": {"teacher": "tiny"}}, "lora_rank": 16}, half),
        ({"kl_coeff": 0.1, "offload_frozen": True}, 0),
    ]:
        assert learner_need(shape, flat(loss="grpo", **settings)).parts["frozen"] == size
    plain, saved = (learner_need(shape, flat(activation_checkpointing=on)).parts["activations"] for on in (False, True))
    assert plain > 8 * saved
    hosted = learner_need(shape, flat(activation_checkpointing="offload")).parts["activations"]
    assert saved - hosted == 4096 * 4 * shape.hidden * (shape.num_layers - 2)
    assert learner_need(shape, flat(optimizer_name="adamw_8bit")).parts["optimiser"] == 2.02 * num


def test_parts_of_an_engine_by_hand():
    shape = SHAPES["8B"]
    need = engine_need(shape, flat(max_episode_tokens=4096)).parts
    assert need["weights"] == 2 * shape.num_parameters
    assert need["KV cache"] == 4096 * 131072  # 32 layers x 8 heads x 128 x 2 x 2 bytes: 128 KiB a token
    halves = engine_need(shape, flat(engine_tensor_parallel_size=2, max_episode_tokens=4096)).parts
    assert halves["weights"] == need["weights"] / 2 and halves["KV cache"] == need["KV cache"] / 2


def test_known_answers():
    """Full training of 8B needs 16 bytes for each parameter: no one card; 1.5B trains on one of 80 GiB."""

    def fits(size, num_gpus, gib, **changes):
        return not variant(SHAPES[size], flat(), "", num_gpus, gib * GIB, **changes).errors

    assert fits("1.5B", 1, 80) and fits("0.5B", 1, 24) and not fits("1.5B", 1, 24)
    assert not fits("8B", 2, 141) and fits("8B", 2, 80, lora_rank=16)
    assert fits("8B", 9, 80, fsdp=True, num_learners=8) and not fits("8B", 3, 80, fsdp=True, num_learners=2)


def test_what_fits_on_a_card_fits_on_a_larger_one():
    for shape in SHAPES.values():
        for num_gpus in (1, 2, 5):
            by_card = [[not one.errors for one in variants(shape, flat(), num_gpus, gib * GIB)] for gib in CARDS]
            assert by_card == sorted(by_card)


def test_a_run_that_does_not_fit_is_refused_with_what_to_change():
    config = SRLConfig().env_runners(num_gpus_per_env_runner=1).learners(num_learners=1, num_gpus_per_learner=1)
    with pytest.raises(PlacementError) as caught:
        check_memory(SHAPES["8B"], config, 80.0 * GIB)
    message = str(caught.value)
    assert message.startswith("a learner needs 1") and "optimiser 59.8" in message and "on a GPU of 80 GiB" in message
    assert message.endswith(
        "expected activation_checkpointing = True, lora_rank = 16, fsdp = True with num_learners above 1 or "
        "micro_batch_tokens below 4096"
    )
    check_memory(SHAPES["8B"], config.copy(copy_frozen=False).training(check_resources=False), 80.0 * GIB)
    check_memory(SHAPES["8B"], config, None)  # this machine has no GPU
    check_memory(None, config, 1.0)  # a model without these sizes


def test_an_engine_that_does_not_fit_its_share_is_refused():
    config = flat(num_gpus_per_env_runner=0.6, num_gpus_per_learner=0.4, colocate=True, lora_rank=16)
    (line, *_) = memory_errors(SHAPES["8B"], config, 24 * GIB)
    assert line.startswith("an engine needs 1") and "within engine_memory_utilization = 0.45 of a GPU of 24 GiB" in line


def test_turns_are_advised_where_they_make_room():
    """A learner of 3B beside an engine that keeps .45 of the card; 8B would not fit beside a sleeping one either."""
    config = flat(num_gpus_per_env_runner=0.6, num_gpus_per_learner=0.4, colocate=False, activation_checkpointing=True)
    (line,) = memory_errors(SHAPES["3B"], config, 80 * GIB)
    assert "next to an engine that keeps 36.0 GiB" in line and "; expected colocate = True, lora_rank = 16, " in line
    config.colocate = True
    assert list(memory_errors(SHAPES["3B"], config, 80 * GIB)) == []
    config.colocate = False
    (line, *_) = memory_errors(SHAPES["8B"], config, 80 * GIB)
    assert "; expected lora_rank = 16, " in line


def test_colocation_counts_both_when_weights_are_tested():
    config = flat(num_gpus_per_env_runner=0.6, num_gpus_per_learner=0.4, engine_memory_utilization=0.9)
    config.colocate = True
    lines = list(memory_errors(SHAPES["1.5B"], config, 80 * GIB))
    assert lines == [
        "learner and engine need 85.5 GiB together when weights are tested on a GPU of 80 GiB; expected "
        "a lower engine_memory_utilization, or a GPU for each"
    ]
