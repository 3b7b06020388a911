"""Learners that gather layers in bfloat16 (`fsdp.gather_dtype`): what they send, and the gradients of one learner.

Gradients equal those of the same passes with weights gathered in fp32, up to the order of sums in fp32 (`EQUAL`):
autocast rounds matrices before each product anyway. Learners that share a batch make other passes than one learner, so
that sums are rounded in another order: they are no further from one learner in bfloat16 than `BOUND` times that is from
one learner in fp32.
"""

from __future__ import annotations

import socket
from collections import Counter

import pytest
import torch

from tests.small_learner import GROUPS, Gathering, learner_config, learner_group, make_group, relative_gap, update

STORED = [make_group(11, 5, [6, 2]), make_group(12, 9, [3, 1, 12])]
EQUAL, BOUND = 1e-6, 2.0
KINDS = ("gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3")
LATER = 1e-3  # after an update: a weight that differs in its last digit may be rounded to another bfloat16

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


class Counting(Gathering):
    """Counts the elements that FSDP gathers and sums in its updates, by number format."""

    def build(self):
        super().build()
        self.gathered, self.summed = Counter(), Counter()
        gather, reduce = torch.distributed.all_gather_single, torch.distributed.reduce_scatter_single

        def counted_gather(*args, **kwargs):
            whole = kwargs["output"] if "output" in kwargs else args[0]
            self.gathered[str(whole.dtype)] += whole.numel()
            return gather(*args, **kwargs)

        def counted_reduce(*args, **kwargs):
            own = kwargs["input"] if "input" in kwargs else args[1]
            self.summed[str(own.dtype)] += own.numel()
            return reduce(*args, **kwargs)

        torch.distributed.all_gather_single = counted_gather
        torch.distributed.reduce_scatter_single = counted_reduce

    def counts(self):
        """Return the counts, and the formats of the weights and gradients that are kept."""
        assert self.can_share_prefixes  # its check computes in fp32
        own = list(self.model.parameters())
        kept = {str(one.dtype) for one in [*own, *(parameter.grad for parameter in own if parameter.grad is not None)]}
        return dict(self.gathered), dict(self.summed), kept


def config_of(model_dir, dtype, **settings):
    config = learner_config(model_dir).env_runners(num_env_runners=1)
    settings |= {"optimizer_name": "sgd", "lr": 1e-2}  # AdamW's first step is the sign of a gradient, however small
    return config.training(kl={"coeff": 0.05, "estimator": "k3"}, compute_dtype=dtype, **settings)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_layers_are_sent_in_bfloat16_and_nothing_else_changes(random_llama_dir, ray_here):
    one, exact = (learner_group(config_of(random_llama_dir, dtype)) for dtype in ("bfloat16", "float32"))
    pairs = []
    for gather_dtype in ("bfloat16", "float32"):
        fsdp = {"gather_dtype": gather_dtype}
        config = config_of(random_llama_dir, "bfloat16", fsdp=fsdp).learners(num_learners=2, num_cpus_per_learner=0.25)
        pairs.append(learner_group(config.learners(learner_class=Counting)))
    try:
        for at, batch in enumerate([(GROUPS, STORED), (GROUPS[:1], ()), (GROUPS, ())]):  # of one group a shard is empty
            (found, stats), (wanted, wanted_stats) = (update(pair, *batch) for pair in pairs)
            gaps = [relative_gap(*both) for both in zip(found, wanted, strict=True)]
            assert max(gaps) < (EQUAL if at == 0 else LATER), (at, gaps)
            for name in ("loss", "kl", "entropy"):
                assert stats[name] == pytest.approx(wanted_stats[name], rel=1e-4, abs=1e-6), name
            (alone,), _ = update(one, *batch)
            (full,), _ = update(exact, *batch)
            assert 0 < relative_gap(found[0], alone) < BOUND * relative_gap(alone, full)
        (gathered, summed, kept), _ = (answer.get() for answer in pairs[0].foreach_learner(lambda one: one.counts()))
        assert kept == {"torch.float32"}
        assert {*summed} == {"torch.float32"} and {*gathered} == {"torch.float32", "torch.bfloat16"}
        named = one._learner.model.named_parameters()
        num = sum(weight.numel() for name, weight in named if ".layers." in name and weight.ndim == 2)
        num_passes, rest = divmod(gathered["torch.bfloat16"], num)
        assert num_passes >= 1 and rest == 0  # the matrices of all layers, and nothing else
    finally:
        for pair in pairs:
            pair.shutdown()


def compare(rank, port):
    """Compare gathering in both formats with a whole model, in one of two processes; raises where they differ."""
    from rllib_srl.learner.reference import Root
    from rllib_srl.learner.scoring import autocast, token_logps
    from rllib_srl.learner.sharding import shard, whole

    device = torch.device("cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for kind in KINDS:
        one, split = model_of(kind, True), model_of(kind, True)
        for name, weight in [*one.named_parameters(), *split.named_parameters()]:
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
        for name, gradient in whole(iter(own.items())):
            assert (gradient - wanted[name]).norm() < EQUAL * wanted[name].norm(), (kind, name)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_every_kind_of_model_has_the_gradients_of_the_whole_model():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(compare, (port,), nprocs=2)


@pytest.mark.parametrize(("dtype", "given", "message"), [
    ("float32", "bfloat16", "fsdp.gather_dtype = 'bfloat16' with compute_dtype = 'float32'; expected"),
    ("bfloat16", "float16", "fsdp.gather_dtype = 'float16'; expected one of 'float32', 'bfloat16'"),
])  # fmt: skip
def test_formats_that_cannot_work_are_refused(random_llama_dir, dtype, given, message):
    config = learner_config(random_llama_dir).env_runners(num_env_runners=1).learners(num_learners=2)
    with pytest.raises(ValueError, match=message):
        config.training(compute_dtype=dtype, fsdp={"gather_dtype": given}).validate()
