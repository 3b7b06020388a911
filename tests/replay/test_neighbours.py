"""The k nearest: by hand, beside a dictionary searched by sorting, and the same by numpy and by faiss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.diversity import neighbours
from rllib_srl.replay.diversity.neighbours import Neighbours, check_card

DIM = 4


def naive(vectors: dict[int, np.ndarray], query: np.ndarray, k: int, excluded: int) -> list[tuple[int, float]]:
    """Return the k nearest by a sort in float64."""
    pairs = [(-float(v.astype(np.float64) @ query), i) for i, v in vectors.items() if i != excluded]
    return [(i, -minus) for minus, i in sorted(pairs)[:k]]


def unit(generator, num, dim=DIM) -> np.ndarray:
    vectors = generator.standard_normal((num, dim)).astype(np.float32)
    return neighbours.normalised(vectors)


def test_similarities_worked_by_hand():
    found = Neighbours(2)
    found.set([3, 0, 7], np.array([[1, 0], [0, 2], [3, 3]]))
    ids, similarity = found.nearest(np.array([[1, 0]]), 2)
    assert ids.tolist() == [[3, 7]] and similarity == pytest.approx(np.array([[1, np.sqrt(0.5)]]))
    ids, _ = found.nearest(np.array([[1, 0], [1, 0]]), 1, [3, -1])
    assert ids.tolist() == [[7], [3]]
    assert found.ids().tolist() == [0, 3, 7] and len(found) == 3
    ids, similarity = found.nearest(np.eye(2)[:1], 4, [3])
    assert ids.tolist() == [[7, 0, -1, -1]] and np.isnan(similarity[0]).tolist() == [False, False, True, True]
    assert np.isnan(Neighbours(2).nearest(np.eye(2), 2)[1]).all()


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)), max_size=12),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_a_dictionary_gives_the_same_answers(history, seed, by_faiss):
    generator, kept, found = np.random.default_rng(seed), {}, Neighbours(DIM)
    for is_set, ids in history:
        if is_set:
            vectors = unit(generator, len(ids))
            found.set(ids, vectors)
            kept |= dict(zip(ids, vectors, strict=True))
        else:
            known = [i for i in ids if i in kept]
            found.remove(known)
            for i in known:
                del kept[i]
    assert found.ids().tolist() == sorted(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "NUMPY_UP_TO", -1 if by_faiss else 100)
        queries, excluded = unit(generator, 3), [0, 1, -1]
        ids, similarity = found.nearest(queries, 5, excluded)
    for q in range(3):
        expected = naive(kept, queries[q].astype(np.float64), 5, excluded[q])
        assert ids[q].tolist() == [i for i, _ in expected] + [-1] * (5 - len(expected))
        assert similarity[q][: len(expected)] == pytest.approx([s for _, s in expected], abs=1e-12)


def test_numpy_and_faiss_find_the_same_and_the_order_of_arrival_decides_nothing(monkeypatch):
    generator = np.random.default_rng(3)
    vectors, queries = unit(generator, 3000, 64), unit(generator, 50, 64)
    order = generator.permutation(3000)
    one, other = Neighbours(64), Neighbours(64)
    one.set(np.arange(3000), vectors)
    for part in np.split(order, 6):
        other.set(part, vectors[part])
    expected = one.nearest(queries, 8)
    monkeypatch.setattr(neighbours, "_MOST_SIMILARITIES", 1000)  # blocks of one query
    for limit in (10_000, 100):  # numpy, faiss
        monkeypatch.setattr(neighbours, "NUMPY_UP_TO", limit)
        found = other.nearest(queries, 8)
        assert np.array_equal(found[0], expected[0]) and np.array_equal(found[1], expected[1])


def test_vectors_that_do_not_fit_are_refused():
    found = Neighbours(3)
    with pytest.raises(ValueError, match=r"vectors have shape \(1, 2\); expected rows of 3"):
        found.set([0], np.ones((1, 2)))
    with pytest.raises(ValueError, match="1 vectors are not finite"):
        found.nearest(np.array([[np.nan, 0, 0]]), 1)


# --- on a GPU: with a stand-in for faiss's functions, since none is here ---------------------------


@pytest.fixture
def card(monkeypatch):
    """Let faiss search on the CPU where it is asked to on a GPU; return the sizes of the searches."""
    faiss, sizes = pytest.importorskip("faiss"), []

    class Resources:
        def setTempMemory(self, num_bytes):
            assert num_bytes == 256 * 2**20

    def knn_gpu(resources, queries, vectors, k, metric, vectorsMemoryLimit):
        sizes.append((len(queries), len(vectors), k))
        return faiss.knn(queries, vectors, k, metric=metric)

    monkeypatch.setattr(neighbours, "_resources", [])
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    return sizes


def test_a_search_on_a_card_finds_what_numpy_finds(card):
    generator = np.random.default_rng(0)
    vectors, queries = unit(generator, 500, 16), unit(generator, 7, 16)
    on_card, on_cpu = Neighbours(16, "gpu"), Neighbours(16)
    for found in (on_card, on_cpu):
        found.set(np.arange(500), vectors)
        found.remove([3, 4])
    assert np.array_equal(on_card.nearest(queries, 5)[0], on_cpu.nearest(queries, 5)[0])
    assert card == [(7, 498, 14)]


def test_a_card_that_is_missing_or_wrong_is_refused(card, monkeypatch):
    import faiss

    check_card()
    right = faiss.knn_gpu
    monkeypatch.setattr(faiss, "knn_gpu", lambda *args, **how: (None, right(*args, **how)[1] + 1))
    with pytest.raises(ValueError, match="faiss finds other neighbours on the GPU than numpy"):
        check_card()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    with pytest.raises(ValueError, match="expected a GPU that the memory's process can see, or 'cpu'"):
        check_card()
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with pytest.raises(ValueError, match=r"faiss built for GPUs in place of faiss-cpu .*rllib_srl\[faiss-gpu\]"):
        check_card()
