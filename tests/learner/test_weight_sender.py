"""The learner's side of the weight sync: its canary on packed matrices, and the check that they are the policy's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rllib_srl.engine import WeightSyncError, pack
from rllib_srl.learner import weight_sender
from rllib_srl.learner.scoring import Scorer, load_causal_lm, token_logps
from rllib_srl.learner.weight_sender import WeightSender, cast_matrices, check_packed

CANARY = [[5, 9, 2, 40, 7, 7], [11, 3, 8]]


class Policy(torch.nn.Module):
    """The module that the learner trains, without RLlib."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return token_logps(self.model, batch)


@pytest.fixture
def model(random_llama_dir):
    return load_causal_lm(str(random_llama_dir))


def sender_of(model, monkeypatch, dtype="bfloat16"):
    """Return a sender without an object store, and the weights that each of its passes was given."""
    scorer, given = Scorer(Policy(model), torch.device("cpu"), dtype, is_sharded=False), []

    def score(sequences, **weights):
        given.append(weights)
        return scorer.score(sequences, **weights)

    monkeypatch.setattr(weight_sender.ray, "put", lambda bundle: bundle)
    return WeightSender(model, dtype, score, is_first=True), scorer, given


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.03)


def equal(logps, others):
    return len(logps) == len(others) and all(np.array_equal(*pair) for pair in zip(logps, others, strict=True))


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_canary_on_packed_matrices_is_that_of_autocast_in_every_bit(model, monkeypatch, is_tied):
    if not is_tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 1.1)
    sender, scorer, given = sender_of(model, monkeypatch)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    sender.send(1)
    assert equal(sender.score_sent(1, CANARY), scorer.score(CANARY))
    matrices = given[0]["weights"]
    linear = {f"{path}.weight" for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assert matrices.keys() == linear and "lm_head.weight" in linear  # no pass of its own cast them
    assert all(one.dtype == torch.bfloat16 for one in matrices.values())
    for name, parameter in model.named_parameters():  # the same objects with the same values
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])


def test_each_version_is_scored_with_its_own_weights(model, monkeypatch):
    sender, scorer, _ = sender_of(model, monkeypatch)
    scored = []
    for version in (1, 2):
        step(model)
        sender.send(version)
        scored.append(sender.score_sent(version, CANARY))
        assert equal(scored[-1], scorer.score(CANARY))
    assert not equal(*scored)


def test_float32_needs_no_packed_matrices(model, monkeypatch):
    sender, scorer, given = sender_of(model, monkeypatch, "float32")
    sender.send(1)
    assert equal(sender.score_sent(1, CANARY), scorer.score(CANARY)) and given == [{}]


def test_weights_that_moved_after_they_were_packed_are_found(model, monkeypatch):
    sender, _, _ = sender_of(model, monkeypatch)
    sender.send(1)
    step(model)
    with pytest.raises(WeightSyncError, match="version 1: the packed weights are not those in training") as caught:
        sender.score_sent(1, CANARY)
    assert set(caught.value.tensors) == dict(model.named_parameters()).keys()
    with pytest.raises(WeightSyncError, match="version 2: the last bundle is of version 1"):
        sender.score_sent(2, CANARY)


def spoilt(bundle, name, rows):
    """Return a bundle in which the lowest bit of some rows of a tensor is flipped."""
    spec = next(spec for spec in bundle.tensors if spec.name == name)
    buffer = bundle.buffer.copy()
    width = spec.num_bytes // spec.shape[0]
    for row in rows:
        buffer[spec.offset + row * width] ^= 1
    return dataclasses.replace(bundle, buffer=buffer)


@pytest.mark.parametrize("is_vector", [False, True])
def test_a_row_in_64_of_a_matrix_is_checked_and_each_in_turn_and_vectors_are_checked_whole(is_vector):
    own = {"first": torch.randn(3, 5), "matrix": torch.randn(130, 4), "vector": torch.randn(130)}
    good, name = pack(own.items(), 0, "bfloat16"), "vector" if is_vector else "matrix"
    for version in range(70):
        check_packed(dataclasses.replace(good, version=version), own, version)
        for row in (3, 67):  # of the same 64
            bundle = dataclasses.replace(spoilt(good, name, [row]), version=version)
            if not is_vector and version not in (3, 67):
                check_packed(bundle, own, version)
                continue
            with pytest.raises(WeightSyncError) as caught:
                check_packed(bundle, own, version)
            assert caught.value.tensors == (name,)
        with pytest.raises(WeightSyncError):  # 64 rows in turn are found by any version
            check_packed(dataclasses.replace(spoilt(good, name, range(5, 69)), version=version), own, version)


def test_a_weight_that_is_not_a_number_equals_itself(model):
    own = dict(model.named_parameters())
    with torch.no_grad():
        own["model.norm.weight"][0] = float("nan")
    check_packed(pack(own.items(), 16, "bfloat16"), own, 16)


def test_the_matrices_are_views_of_the_bundle(model):
    bundle = pack(model.named_parameters(), 0, "bfloat16")
    start = bundle.buffer.ctypes.data
    for matrix in cast_matrices(model, bundle).values():
        assert start <= matrix.data_ptr() < start + bundle.buffer.nbytes
