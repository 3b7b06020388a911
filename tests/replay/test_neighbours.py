"""Neighbours against a dictionary, approximate search against exact, a restored index against the one saved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.diversity import neighbours
from rllib_srl.replay.diversity.embedders import normalised
from rllib_srl.replay.diversity.measures import novelty
from rllib_srl.replay.diversity.neighbours import Neighbours


class NaiveNeighbours:
    """A dictionary of unit vectors, searched one by one in float64."""

    def __init__(self) -> None:
        self.vectors: dict[int, np.ndarray] = {}

    def set(self, ids, vectors) -> None:
        self.vectors.update(zip(map(int, ids), normalised(vectors), strict=True))

    def nearest(self, query, k, exclude=-1) -> tuple[list[int], list[float]]:
        query = normalised(query[None])[0].astype(np.float64)
        found = [(-np.clip((v * query).sum(), -1, 1), slot) for slot, v in self.vectors.items() if slot != exclude]
        found = sorted(found)[:k]
        return [slot for _, slot in found], [-negative for negative, _ in found]


def mixture(num: int, dim: int, seed: int) -> np.ndarray:
    """Return vectors that lie around 20 centres, as questions of 20 kinds do."""
    generator = np.random.default_rng(seed)
    centres = np.random.default_rng(7).standard_normal((20, dim))
    vectors = centres[generator.integers(20, size=num)] + 0.6 * generator.standard_normal((num, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def recall_at(found: Neighbours, exact: Neighbours, queries: np.ndarray, k: int) -> float:
    """Return the share of the true k nearest found; one as near as the k-th counts."""
    least = exact.nearest(queries, k)[1][:, -1:]
    return float((found.nearest(queries, k)[1] >= least - 1e-9).mean())


@pytest.fixture(scope="module")
def large() -> tuple[Neighbours, Neighbours]:
    """Return 3,000 vectors of which a third were removed or replaced, searched approximately and exactly."""
    approximate = Neighbours(32, exact_up_to=1024)
    exact = Neighbours(32)
    vectors = mixture(4000, 32, seed=1)
    for one in (approximate, exact):
        for start in range(0, 3000, 250):
            one.set(np.arange(start, start + 250), vectors[start : start + 250])
        one.remove(np.arange(0, 3000, 5))
        one.set(np.arange(1, 3000, 7), vectors[3000 : 3000 + len(range(1, 3000, 7))])
    return approximate, exact


def test_distances_worked_by_hand():
    found = Neighbours(2)
    found.set([5, 2, 9], np.array([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]))
    # Cosines with (3, 4) / 5: 0.6 to (1, 0), 0.8 to (0, 1), -0.6 to (-1, 0).
    ids, similarity = found.nearest(np.array([[3.0, 4.0]]), 3)
    assert ids.tolist() == [[2, 5, 9]]
    assert similarity[0] == pytest.approx([0.8, 0.6, -0.6])
    assert novelty(1.0 - found.nearest(np.array([[3.0, 4.0]]), 2)[1]) == pytest.approx([0.3])
    # The mean of (1, 0), (0, 1) and (-1, 0).
    assert found.centroid() == pytest.approx([0, 1 / 3])


def test_fewer_than_k_are_said_to_be_missing():
    found = Neighbours(2)
    ids, similarity = found.nearest(np.eye(2), 3)
    assert (ids == -1).all() and np.isnan(similarity).all()
    assert found.nearest(np.empty((0, 2)), 3)[0].shape == (0, 3)
    assert found.centroid().tolist() == [0, 0]
    assert found.cluster_share(np.eye(2)).tolist() == [0, 0]
    found.set([0, 1], np.eye(2))
    ids, similarity = found.nearest(np.eye(2), 3, exclude_ids=[0, 1])
    assert ids.tolist() == [[1, -1, -1], [0, -1, -1]]
    assert similarity[:, 0].tolist() == [0, 0] and np.isnan(similarity[:, 1:]).all()


def test_equal_similarities_are_ordered_by_id_and_zeros_are_unlike_everything():
    found = Neighbours(2)
    found.set([7, 3, 5, 1], np.array([[1.0, 1], [1, 1], [1, 1], [0, 0]]))
    assert found.nearest(np.array([[2.0, 2.0]]), 4)[0].tolist() == [[3, 5, 7, 1]]
    assert found.nearest(np.array([[2.0, 2.0], [0, 0]]), 4)[1][:, 3].tolist() == [0, 0]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True)),
        st.tuples(st.just("remove"), st.integers(1, 4)),
        st.tuples(st.just("ask"), st.integers(1, 6)),
    ),
    max_size=25,
)


@settings(max_examples=60)
@given(operations, st.integers(0, 2**31))
def test_a_dictionary_gives_the_same_answers(history, seed):
    generator = np.random.default_rng(seed)
    found, naive = Neighbours(3), NaiveNeighbours()
    for name, argument in history:
        if name == "set":
            # Few coordinates: equal vectors and vectors of zeros come up.
            vectors = generator.integers(-2, 3, (len(argument), 3)).astype(np.float32)
            found.set(argument, vectors)
            naive.set(argument, vectors)
        elif name == "remove":
            gone = list(naive.vectors)[:argument]
            found.remove(gone)
            for slot in gone:
                del naive.vectors[slot]
        else:
            queries, exclude = generator.integers(-2, 3, (3, 3)), generator.integers(-1, 13, 3)
            ids, similarity = found.nearest(queries, argument, exclude)
            for row in range(3):
                slots, expected = naive.nearest(queries[row], argument, exclude[row])
                missing = argument - len(slots)
                assert ids[row].tolist() == slots + missing * [-1]
                assert similarity[row, : len(slots)].tolist() == expected
                assert np.isnan(similarity[row, len(slots) :]).all()
        assert found.ids().tolist() == sorted(naive.vectors)
        assert len(found) == len(naive.vectors)
        if naive.vectors:
            assert found.centroid() == pytest.approx(np.mean(list(naive.vectors.values()), axis=0), abs=1e-6)


@pytest.mark.parametrize("dim", [5, 576])
def test_novelty_of_a_full_memory_equals_the_naive_one_by_value(dim):
    """Slots are reused as in a memory at its capacity: 1,500 vectors, a tenth replaced per round, some emptied."""
    generator, capacity = np.random.default_rng(dim), 1500
    found, naive = Neighbours(dim), NaiveNeighbours()

    def drawn(num: int) -> np.ndarray:
        if dim == 5:  # many duplicates, ties and zero vectors
            return generator.integers(-1, 2, (num, dim)).astype(np.float32)
        return generator.standard_normal((num, dim)).astype(np.float32)

    for slots in (np.arange(capacity), *(generator.choice(capacity, 150, replace=False) for _ in range(3))):
        vectors = drawn(len(slots))
        found.set(slots, vectors)
        naive.set(slots, vectors)
        gone = generator.choice(found.ids(), 40, replace=False)
        found.remove(gone)
        for slot in gone.tolist():
            del naive.vectors[slot]
        queries, exclude = drawn(10), generator.integers(-1, capacity, 10)
        mine = found.nearest(queries, 8, exclude)[1]
        theirs = [naive.nearest(query, 8, slot)[1] for query, slot in zip(queries, exclude.tolist(), strict=True)]
        assert mine.tolist() == theirs
        assert novelty(1.0 - mine).tolist() == novelty(1.0 - np.array(theirs)).tolist()


@pytest.mark.parametrize("num_columns", [64, 640, 1280, 6400])
def test_the_largest_of_a_row_are_those_of_a_sort(num_columns):
    similarity_QN = np.random.default_rng(0).standard_normal((7, num_columns)).astype(np.float32)
    similarity_QN[0, :70] = 9.0  # the largest all lie in the first two blocks
    found = neighbours._largest(similarity_QN, 17)
    expected = -np.sort(-similarity_QN, axis=1)[:, :17]
    assert np.array_equal(-np.sort(-np.take_along_axis(similarity_QN, found, axis=1), axis=1), expected)
    assert all(len(set(row)) == 17 for row in found.tolist())


def test_approximate_search_finds_most_after_deletions_and_replacements(large):
    approximate, exact = large
    assert not approximate.is_exact and exact.is_exact
    queries = mixture(300, 32, seed=2)
    # One list in 16 is searched, one of the 16 here; the clusters of the vectors are 20.
    assert 0.5 < recall_at(approximate, exact, queries, 10) < 1
    ids, similarity = approximate.nearest(queries, 10)
    assert np.isin(ids, exact.ids()).all()
    products = np.einsum("qkd,qd->qk", exact.vectors(exact.ids())[np.searchsorted(exact.ids(), ids)], queries)
    assert similarity == pytest.approx(products, abs=1e-5)
    assert (np.diff(similarity, axis=1) <= 0).all()


@pytest.mark.slow
def test_approximate_search_finds_nearly_all_of_many():
    vectors, queries = mixture(70_000, 32, seed=1), mixture(300, 32, seed=2)
    approximate, exact = Neighbours(32), Neighbours(32, exact_up_to=100_000)
    for one in (approximate, exact):
        one.set(np.arange(70_000), vectors)
    assert not approximate.is_exact and exact.is_exact
    assert approximate.fits == (70_000, 512)
    assert recall_at(approximate, exact, queries, 10) >= 0.9


def test_a_removed_or_replaced_vector_is_not_found_again(large):
    approximate, _ = large
    slot = int(approximate.ids()[10])
    (before,) = approximate.vectors([slot])
    assert approximate.nearest(before[None], 1)[0].item() == slot
    approximate.set([slot], -before[None])
    assert approximate.nearest(before[None], 1)[0].item() != slot
    assert approximate.nearest(-before[None], 1)[0].item() == slot
    approximate.remove([slot])
    assert slot not in approximate.nearest(-before[None], 50)[0]
    approximate.set([slot], before[None])


def test_all_neighbours_are_found_where_the_lists_searched_hold_too_few(large, monkeypatch):
    approximate, exact = large
    monkeypatch.setattr(approximate, "_exact_up_to", 0)
    few = exact.ids()[:5]
    rest = exact.ids()[5:]
    kept = rest, approximate.vectors(rest)
    for one in large:
        one.remove(rest)
        query = one.vectors(few[:1])
        assert one.nearest(query, 5)[0].tolist()[0][0] == few[0]
        assert sorted(one.nearest(query, 5)[0][0]) == few.tolist()
        assert sorted(one.nearest(query, 5, few[:1])[0][0]) == [-1, *few[1:].tolist()]
        one.set(*kept)


@pytest.mark.parametrize("which", [0, 1])
def test_a_restored_index_gives_the_same_answers_and_goes_on_alike(large, which):
    saved = large[which]
    state, order = saved.save_state(), np.random.default_rng(3).permutation(saved.ids())
    restored = Neighbours(32, exact_up_to=saved._exact_up_to)
    restored.load_state(state, order, saved.vectors(order))
    queries = mixture(200, 32, seed=4)
    for one, other in zip(saved.nearest(queries, 8), restored.nearest(queries, 8), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(saved.centroid(), restored.centroid())
    assert np.array_equal(saved.cluster_share(queries), restored.cluster_share(queries))
    assert len(saved) == len(restored) and saved.is_exact == restored.is_exact
    gone = order[:50]
    kept = saved.vectors(gone)
    for one in (saved, restored):
        one.remove(gone)
    assert np.array_equal(saved.cluster_share(queries), restored.cluster_share(queries))
    assert np.array_equal(saved.nearest(queries, 8)[0], restored.nearest(queries, 8)[0])
    saved.set(gone, kept)


def test_a_state_of_the_earlier_index_is_restored():
    """It has two more names, and its lists may have been fitted below `exact_up_to`: then search is exact."""
    vectors = mixture(300, 8, seed=5)
    lists = neighbours.fit_centroids(vectors, 32, seed=0)
    clusters = neighbours.fit_centroids(vectors, 16, seed=0)
    state = {"dim": 8, "clusters_fitted_at": 256, "clusters": clusters, "lists_fitted_at": 257, "lists": lists}
    found = Neighbours(8)
    found.load_state({**state, "num_probes": 3}, np.arange(300), vectors)
    exact = Neighbours(8)
    exact.set(np.arange(300), vectors)
    assert found.is_exact and np.array_equal(found.nearest(vectors, 5)[0], exact.nearest(vectors, 5)[0])
    size_C = np.bincount(neighbours.nearest_centroids(vectors, clusters), minlength=16)
    assert found.cluster_share(clusters) == pytest.approx(size_C / 300)


def test_the_order_of_arrival_decides_nothing():
    vectors, queries = mixture(300, 16, seed=5), mixture(40, 16, seed=6)
    forward, shuffled = Neighbours(16, exact_up_to=256), Neighbours(16, exact_up_to=256)
    forward.set(np.arange(300), vectors)
    order = np.random.default_rng(0).permutation(300)
    shuffled.set(order, vectors[order])
    assert not forward.is_exact
    for one, other in zip(forward.nearest(queries, 5), shuffled.nearest(queries, 5), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(forward.centroid(), shuffled.centroid())
    assert np.array_equal(forward.cluster_share(queries), shuffled.cluster_share(queries))


def test_clusters_are_fitted_again_at_an_eightfold_size_and_lists_once():
    vectors = mixture(3000, 8, seed=8)
    found = Neighbours(8, exact_up_to=256)
    found.set(np.arange(256), vectors[:256])
    assert found.is_exact and found.fits == (256, 0)
    found.set([256], vectors[256:257])
    assert not found.is_exact and found.fits == (256, 4)
    lists = found.save_state()["lists"]
    found.set(np.arange(257, 2047), vectors[257:2047])
    assert found.fits == (256, 4)
    found.set([2047], vectors[2047:2048])
    assert found.fits == (2048, 4)
    assert found.save_state()["lists"] is lists


def test_search_is_exact_again_after_removals():
    vectors = mixture(600, 8, seed=8)
    found, exact = Neighbours(8, exact_up_to=500), Neighbours(8)
    for one in (found, exact):
        one.set(np.arange(600), vectors)
        one.remove(np.arange(0, 600, 5))
    assert len(found) == 480 and found.is_exact
    assert np.array_equal(found.nearest(vectors, 9)[0], exact.nearest(vectors, 9)[0])


def test_a_vector_is_as_rare_as_its_cluster_is_small():
    found = Neighbours(3, num_clusters=2)
    generator = np.random.default_rng(0)
    near_x = [1, 0, 0] + 0.05 * generator.standard_normal((90, 3))
    near_y = [0, 1, 0] + 0.05 * generator.standard_normal((10, 3))
    found.set(np.arange(20), near_x[:20])
    assert found.cluster_share(np.eye(3)).tolist() == [1, 1, 1]  # too few to tell clusters apart
    found.set(np.arange(20, 100), np.concatenate([near_x[20:], near_y]))
    assert found.cluster_share(np.eye(3)[:2]) == pytest.approx([0.9, 0.1])
    found.remove(np.arange(90, 95))
    assert found.cluster_share(np.eye(3)[:2]) == pytest.approx([90 / 95, 5 / 95])


def test_a_cluster_does_not_depend_on_the_vectors_assigned_with_it():
    vectors = mixture(500, 384, seed=9)
    centroids = neighbours.fit_centroids(vectors, 16, seed=0)
    # A vector half way between two centroids, up to rounding: a matrix product in float32 may say either.
    ties = centroids[:15] + centroids[1:]
    queries = np.concatenate([vectors, (ties / np.linalg.norm(ties, axis=1, keepdims=True)).astype(np.float32)])
    together = neighbours.nearest_centroids(queries, centroids)
    alone = np.concatenate([neighbours.nearest_centroids(queries[i : i + 1], centroids) for i in range(len(queries))])
    assert np.array_equal(together, alone)


def test_clusters_are_those_of_the_mixture(capfd):
    vectors = mixture(2000, 64, seed=10)
    centroids = neighbours.fit_centroids(vectors, 20, seed=0)
    assert np.array_equal(centroids, neighbours.fit_centroids(vectors, 20, seed=0))
    assert capfd.readouterr() == ("", "")
    naive = (vectors.astype(np.float64) @ centroids.T.astype(np.float64)).argmax(axis=1)
    assert np.array_equal(neighbours.nearest_centroids(vectors, centroids), naive)
    assert np.linalg.norm(centroids, axis=1) == pytest.approx(np.ones(20), abs=1e-6)
    assert np.bincount(naive, minlength=20).min() > 0
    own = (vectors * centroids[naive]).sum(axis=1).mean()
    assert own > (vectors @ vectors[:20].T).max(axis=1).mean() + 0.05


@pytest.mark.parametrize("seed", [2**31, 2**32 - 1, 2**63])
def test_a_seed_may_be_larger_than_what_faiss_takes(seed):
    vectors = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    centroids = neighbours.fit_centroids(vectors, 8, seed)
    assert centroids.shape == (8, 8) and np.array_equal(centroids, neighbours.fit_centroids(vectors, 8, seed % 2**31))


@pytest.mark.parametrize("vectors", [np.zeros((40, 3)), np.ones((40, 3)), np.repeat(np.eye(3), [38, 1, 1], axis=0)])
def test_clusters_of_equal_vectors_are_whole(vectors):
    """With fewer distinct vectors than clusters, equal vectors share a cluster, and no centroid is nan."""
    found = Neighbours(3)
    found.set(np.arange(40), vectors)
    assert np.isfinite(found.save_state()["clusters"]).all()
    share = found.cluster_share(vectors)
    assert share[0] >= np.mean((vectors == vectors[0]).all(axis=1))


def test_faiss_keeps_its_number_of_threads():
    import faiss

    before = faiss.omp_get_max_threads()
    found = Neighbours(8, exact_up_to=256)
    found.set(np.arange(300), mixture(300, 8, seed=11))
    found.nearest(mixture(5, 8, seed=12), 3)
    assert faiss.omp_get_max_threads() == before


def test_a_missing_faiss_is_named(monkeypatch):
    monkeypatch.setattr(neighbours, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="faiss is not installed; expected faiss-cpu"):
        Neighbours(8)


def test_bad_values_are_named_together():
    with pytest.raises(ValueError, match=r"dim = 0.*exact_up_to = 63.*num_clusters = 0"):
        Neighbours(0, exact_up_to=63, num_clusters=0)
    found = Neighbours(2)
    found.set([1], np.ones((1, 2)))
    for call, message in (
        (lambda: found.set([0, 0], np.eye(2)), "2 entries, 1 of them distinct"),
        (lambda: found.set([-1], np.ones((1, 2))), "1 entries below 0"),
        (lambda: found.set([0], np.eye(2)), r"shape \(2, 2\); expected 1 rows of 2"),
        (lambda: found.set([0], np.array([[np.nan, 1]])), "1 vectors are not finite"),
        (lambda: found.remove([1, 4]), "no vector is stored under 1 of 2 ids, such as 4"),
        (lambda: found.vectors([0]), "no vector is stored under 1 of 1 ids, such as 0"),
        (lambda: found.nearest(np.eye(2), 0), "k = 0; expected at least 1"),
        (lambda: found.nearest(np.eye(2), 1, [1]), "exclude_ids has 1 entries, vectors_QD has 2"),
        (lambda: found.load_state(Neighbours(3).save_state(), [], np.ones((0, 3))), "dim = 3"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert found.ids().tolist() == [1]
