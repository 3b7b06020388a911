"""Every kind of model that tensor parallelism accepts, split over two processes and compared with the whole model."""

from __future__ import annotations

import json
import socket

import pytest
import torch

from rllib_srl.learner.fsdp.tensor_parallel import KINDS, faults_of

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


def gradients_of(model, forward):
    num = 24
    ids = torch.randint(0, 288, (2, num), generator=torch.Generator().manual_seed(1))
    predictor = torch.cat([torch.arange(5, num - 1), num + torch.arange(8, num - 1)])
    batch = {
        "token_ids": ids, "position_ids": torch.arange(num).expand(2, -1), "attention_mask": torch.ones_like(ids),
        "predictor": predictor, "target": ids.flatten()[predictor + 1], "temperature": 0.9,
    }  # fmt: skip
    out = forward(batch)
    loss = out["logp"] @ torch.linspace(-1, 1, len(predictor)) + 0.3 * out["entropy"].sum()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(rank, port, cases):
    """Compare split and whole models in one of two processes; raises where they differ."""
    from rllib_srl.learner.fsdp.sharding import norm_of_shards, shard, summed_shards, whole
    from rllib_srl.learner.reference import Root
    from rllib_srl.learner.scoring import token_logps

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for kind, is_tied in cases:
        one, split = model_of(kind, is_tied), model_of(kind, is_tied)
        wanted_loss, wanted = gradients_of(one, lambda batch, model=one: token_logps(model, batch))
        root = Root(split)
        shard(root, split, torch.device("cpu"), tensor_parallel=2)
        loss, own = gradients_of(split, root)
        parts = summed_shards(list(own.values()))
        size = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        assert abs(loss - wanted_loss) < 1e-5 * abs(wanted_loss), kind
        assert abs(norm_of_shards(parts) - size) < 1e-5 * size, kind
        for name, gradient in whole(iter(zip(own, parts, strict=True))):
            assert (gradient - wanted[name]).norm() < 1e-5 * wanted[name].norm(), (kind, name)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_kind_has_the_gradients_of_the_whole_model():
    cases = [(kind, is_tied) for kind in KINDS for is_tied in (True, False)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(compare, (port, cases), nprocs=2)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_attention_heads": 6, "num_key_value_heads": 3}, "a divisor of the model's number of key-value heads, 3"),
    ({"num_key_value_heads": None, "num_attention_heads": 5}, "key-value heads, 5"),
    ({"vocab_size": 289}, "a divisor of the model's number of tokens of the vocabulary, 289"),
    ({"model_type": "gpt2"}, "a model of the kinds gemma2, gemma3_text, llama, mistral, qwen2, qwen3, not 'gpt2'"),
])  # fmt: skip
def test_a_model_that_cannot_be_split_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    assert not list(faults_of(tmp_path, 2))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}))
    assert any(message in line for line in faults_of(tmp_path, 2))
