"""Search on a GPU: with a stand-in for faiss's GPU functions, since none is here, and the checks at the start."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from rllib_srl.replay.diversity import card
from rllib_srl.replay.diversity.neighbours import Neighbours
from rllib_srl.replay.settings import ReplaySettings


@pytest.fixture
def on_card(monkeypatch):
    """Let faiss search on the CPU where it is asked to on a GPU; return the sizes of the searches."""
    sizes = []

    class Resources:
        def setTempMemory(self, size):
            assert size == 256 * 2**20

    def knn_gpu(resources, queries, vectors, k, metric, vectorsMemoryLimit):
        assert isinstance(resources, Resources) and vectorsMemoryLimit == 2**30
        sizes.append((len(queries), len(vectors), k))
        return faiss.knn(queries, vectors, k, metric=metric)

    monkeypatch.setattr(card, "_resources", [])
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    return sizes


def test_a_card_finds_what_the_cpu_finds_and_trains_no_lists(on_card):
    vectors_ND = np.random.default_rng(1).standard_normal((600, 16)).astype(np.float32)
    ours, exact = Neighbours(16, exact_up_to=256, device="gpu"), Neighbours(16)
    for index in (ours, exact):
        index.set(np.arange(0, 1200, 2), vectors_ND)
        index.remove([0, 10, 400])
    found, wanted = (index.nearest(vectors_ND[:40], 5, np.arange(0, 80, 2)) for index in (ours, exact))
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1], wanted[1])
    assert on_card == [(40, 597, 14)] and ours.is_exact
    big = Neighbours(16, exact_up_to=256)
    big.set(np.arange(600), vectors_ND)
    assert big.save_state()["lists"] is not None  # a run on the CPU goes on on a card
    restored = Neighbours(16, exact_up_to=256, device="gpu")
    restored.load_state(big.save_state(), np.arange(600), vectors_ND)
    assert restored.is_exact and len(restored) == 600
    assert Neighbours(16, device="gpu").nearest(vectors_ND[:2], 3)[0].tolist() == [[-1] * 3] * 2


def test_the_check_passes_on_a_card_that_computes_right_and_names_one_that_does_not(on_card, monkeypatch):
    card.check_card()
    right = faiss.knn_gpu
    monkeypatch.setattr(faiss, "knn_gpu", lambda *args, **how: (None, right(*args, **how)[1] + 1))
    with pytest.raises(ValueError, match="other neighbours on the GPU than numpy"):
        card.check_card()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(ValueError, match="expected a GPU that the memory's process can see, or 'cpu'"):
        card.check_card()


@pytest.mark.skipif(hasattr(faiss, "StandardGpuResources"), reason="faiss is built for GPUs")
def test_faiss_for_cpus_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"faiss built for GPUs in place of faiss-cpu .*rllib_srl\[faiss-gpu\]"):
        card.check_card()


def test_only_a_memory_that_is_on_searches_on_a_gpu():
    assert ReplaySettings(diversity_device="gpu").searches_on_gpu
    assert not ReplaySettings(diversity_device="gpu", capacity=0).searches_on_gpu
    assert not ReplaySettings().searches_on_gpu
