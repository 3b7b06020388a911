"""What torch computes on a card, against the CPU, without Ray and vLLM; with SRL_TEST_DEVICE=cpu on the CPU."""

import copy
import os

import numpy as np
import pytest
import torch

from rllib_srl.batch.layout import bare_episode, micro_batch
from rllib_srl.engine.sync import pack, unpack
from rllib_srl.learner.scoring import as_tensors, token_logps
from scripts.gpu.learner import make_model, streams
from scripts.gpu.random_model import SHORT

DEVICE = os.environ.get("SRL_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a card")
]


@pytest.fixture(scope="module")
def model():
    """Return a small Llama on the device."""
    return make_model(SHORT, DEVICE)


def logps_of(model, sequences, device, shares):
    one = micro_batch([bare_episode(ids, index) for index, ids in enumerate(sequences)], shares)
    return token_logps(model, as_tensors(one, torch.device(device), 1.0))["logp"]


@pytest.mark.parametrize("num_tokens", [160, 400, 1000])
def test_tries_on_the_card_score_as_padded_rows_on_the_cpu(model, num_tokens):
    sequences = streams(num_tokens, SHORT.vocab, num_tokens)
    model.zero_grad(set_to_none=True)
    found = logps_of(model, sequences, DEVICE, True)
    found.mean().backward()
    twin = copy.deepcopy(model).to("cpu")
    twin.zero_grad(set_to_none=True)
    wanted = logps_of(twin, sequences, "cpu", False)
    wanted.mean().backward()
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), atol=1e-4, rtol=1e-4)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_packed_from_the_card_have_the_bits_of_their_cast(model, dtype):
    bundle = pack(model.named_parameters(), 1, dtype)
    again = pack(copy.deepcopy(model).to("cpu").named_parameters(), 1, dtype)
    assert bundle.tensors == again.tensors  # names, shapes, places and checksums
    own = dict(model.named_parameters())
    assert all(torch.equal(sent, own[name].detach().to(sent.dtype).cpu()) for name, sent in unpack(bundle))


def test_faiss_on_the_card_finds_the_neighbours_of_numpy():
    faiss = pytest.importorskip("faiss")
    from rllib_srl.replay.diversity.embedders import normalised
    from rllib_srl.replay.diversity.neighbours import check_card, nearest

    if DEVICE == "cuda" and not hasattr(faiss, "StandardGpuResources"):
        pytest.skip("faiss is built for CPUs")
    if DEVICE == "cuda":
        check_card()
    rng = np.random.default_rng(0)
    vectors, queries = (normalised(rng.standard_normal((num, 48))) for num in (3000, 50))
    devices = ("cpu", "gpu" if DEVICE == "cuda" else "cpu")
    found = [nearest(queries, np.arange(3000), vectors, 5, device=device)[0] for device in devices]
    assert np.array_equal(*found)
