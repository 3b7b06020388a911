"""Frozen policies: their scores against those of fp32 weights, and what they hold on the device."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

from rllib_srl.batch.layout import bare_episode, micro_batch
from rllib_srl.learner import reference
from rllib_srl.learner.reference import FrozenPolicies, FrozenPolicy, Home, round_matrices
from rllib_srl.learner.scoring import as_tensors, autocast, token_logps
from rllib_srl.learner.sharding import decoder_layers
from tests.engine.small_llama import save_random_llama
from tests.learner.test_gather_dtype import KINDS, model_of

CPU = torch.device("cpu")


def batch():
    episodes = [bare_episode([7, 9, 2, 5, 11], 0), bare_episode([7, 9, 4, 2], 1)]
    return as_tensors(micro_batch(episodes, True), CPU, 0.9)


@pytest.mark.parametrize("kind", KINDS)
def test_rounded_matrices_score_as_fp32_weights_under_autocast_bit_for_bit(kind):
    whole = model_of(kind, is_tied=True).requires_grad_(False)
    rounded = deepcopy(whole)
    round_matrices(rounded)
    with torch.no_grad(), autocast(CPU, "bfloat16"):
        wanted = token_logps(whole, batch())
    found = FrozenPolicy(rounded, Home(CPU, "bfloat16")).scores(batch())
    assert all(torch.equal(found[name], wanted[name]) for name in ("logp", "entropy"))
    for name, weight in rounded.named_parameters():
        has_matrix = whole.get_submodule(name.rpartition(".")[0]).weight.ndim == 2
        is_rounded = has_matrix and (".layers." in name or ".h." in name)
        assert weight.dtype == (torch.bfloat16 if is_rounded else torch.float32), name


def test_decoder_layers_are_found_by_their_number_whatever_a_model_calls_them():
    gpt2, opt, llama = (model_of(kind, True) for kind in ("gpt2", "opt", "llama"))
    assert decoder_layers(gpt2) is gpt2.transformer.h and decoder_layers(opt) is opt.model.decoder.layers
    assert decoder_layers(llama) is llama.base_model.layers
    llama.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="its decoder layers were not found; expected a ModuleList of .* = 3 in Llama"):
        round_matrices(llama)


@pytest.mark.parametrize("is_tied", [True, False])
def test_offloaded_weights_are_on_the_device_while_they_score(monkeypatch, is_tied):
    model = model_of("llama", is_tied).requires_grad_(False)
    frozen = FrozenPolicy(model, Home(torch.device("meta"), "float32", is_offloaded=True))
    monkeypatch.setattr(reference, "token_logps", lambda seen, batch: {"head": seen.get_output_embeddings().weight})

    def bytes_on(device):
        held = [*model.parameters(), *model.buffers(), *frozen._copies.values()]
        return sum(one.nbytes for one in held if one.device.type == device)

    whole = bytes_on("cpu")
    assert bytes_on("meta") == 0
    with frozen.on_device():
        assert bytes_on("meta") == bytes_on("cpu") == whole
        assert frozen.scores({})["head"].device.type == "meta"
    assert bytes_on("meta") == 0 and bytes_on("cpu") == whole


def test_policies_are_loaded_once_and_an_offloaded_one_scores_the_same_on_a_cpu(tmp_path):
    source = str(save_random_llama(tmp_path, seed=3))
    policy = SimpleNamespace(model=model_of("llama", True), model_config={"model": source})
    plain, offloaded = (FrozenPolicies(policy, Home(CPU, "float32", False, offloads)) for offloads in (False, True))
    start, teacher = offloaded.load(), offloaded.load(source)
    assert offloaded.load("start") is start and teacher is not start
    with start.on_device(), teacher.on_device():
        found = [start.logp(batch()), teacher.logp(batch())]
    wanted = plain.load().logp(batch())
    assert all(torch.equal(one, wanted) for one in found)
    assert {weight.dtype for weight in plain.load().model.parameters()} == {torch.float32}


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_teacher_with_a_padded_vocabulary_scores_as_without_the_padding(tmp_path, is_tied):
    from transformers import AutoModelForCausalLM

    source = str(save_random_llama(tmp_path / "plain", seed=3, tied=is_tied))
    padded = AutoModelForCausalLM.from_pretrained(save_random_llama(tmp_path / "padded", seed=3, tied=is_tied))
    padded.resize_token_embeddings(320)
    padded.save_pretrained(tmp_path / "padded")
    policy = SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(source), model_config={"model": source})
    frozen = FrozenPolicies(policy, Home(CPU, "float32"))
    wanted, found = (frozen.load(str(tmp_path / name)).scores(batch()) for name in ("plain", "padded"))
    assert torch.equal(found["logp"], wanted["logp"]) and torch.equal(found["entropy"], wanted["entropy"])
    assert not any(weight.requires_grad for weight in frozen.load(str(tmp_path / "padded")).model.parameters())
