"""Learners that gather layers in bfloat16 (`fsdp_gather_dtype`): loss and gradients are those of the whole model.

Autocast rounds matrices before each product anyway, so that gradients are equal up to the order of sums in fp32.
"""

import socket

import pytest
import torch

from tests.small_learner import learner_config

EQUAL = 1e-6
KINDS = ("gemma2", "gemma3_text", "gpt2", "llama", "mistral", "opt", "qwen2", "qwen3")

SIZES = {
    "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.12,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def model_of(kind, is_tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    from rllib_srl.learner.trie_attention import register

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=is_tied)
    return AutoModelForCausalLM.from_config(config, attn_implementation=register()).eval()


def batch_of():
    num = 24
    ids = torch.randint(0, 288, (2, num), generator=torch.Generator().manual_seed(1))
    predictor = torch.cat([torch.arange(5, num - 1), num + torch.arange(8, num - 1)])
    return {
        "token_ids": ids, "position_ids": torch.arange(num).expand(2, -1), "attention_mask": torch.ones_like(ids),
        "predictor": predictor, "target": ids.flatten()[predictor + 1], "temperature": 0.9,
    }  # fmt: skip


def gradients_of(model, forward):
    out = forward(batch_of())
    loss = out["logp"] @ torch.linspace(-1, 1, len(out["logp"])) + 0.3 * out["entropy"].sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(rank, port):
    """Compare gathering in both formats with a whole model, in one of two processes; raises where they differ.

    A frozen policy, rounded, sharded and offloaded, scores as the whole model does.
    """
    from rllib_srl.learner.reference import FrozenPolicy, Home, Root, round_matrices
    from rllib_srl.learner.scoring import autocast, token_logps
    from rllib_srl.learner.sharding import shard, whole

    device = torch.device("cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for kind in KINDS:
        one, split, still = (model_of(kind, True) for _ in range(3))
        for name, weight in [pair for model in (one, split, still) for pair in model.named_parameters()]:
            if weight.ndim == 1:  # numbers that bfloat16 does not hold
                noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(name)))
                weight.data.add_(0.3 * noise)
        root = Root(split)
        shard(root, split, device, gather_dtype="bfloat16")
        found = []
        for model, forward in ((one, lambda batch, model=one: token_logps(model, batch)), (split, root)):

            def in_bf16(batch, forward=forward):
                with autocast(device, "bfloat16"):
                    return forward(batch)

            found.append(gradients_of(model, in_bf16))
        (wanted_loss, wanted), (loss, own) = found
        assert loss == wanted_loss, kind
        round_matrices(still.requires_grad_(False))
        frozen = FrozenPolicy(still, Home(device, "bfloat16", is_sharded=True, is_offloaded=True))
        with torch.no_grad(), autocast(device, "bfloat16"), frozen.on_device():
            assert torch.equal(frozen.logp(batch_of()), token_logps(one, batch_of())["logp"]), kind
        for name, gradient in whole(iter(own.items())):
            assert (gradient - wanted[name]).norm() < EQUAL * wanted[name].norm(), (kind, name)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_kind_of_model_has_the_gradients_of_the_whole_model():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(compare, (port,), nprocs=2)


def test_a_format_below_that_of_the_products_is_refused(random_llama_dir):
    config = learner_config(random_llama_dir).env_runners(num_env_runners=1).learners(num_learners=2)
    with pytest.raises(ValueError, match="fsdp_gather_dtype = 'bfloat16' with compute_dtype = 'float32'; expected"):
        config.training(fsdp=True, fsdp_gather_dtype="bfloat16").validate()
