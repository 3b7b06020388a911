"""The k nearest: by hand, beside a search by sorting, and the same by numpy and by faiss."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.diversity import neighbours
from rllib_srl.replay.diversity.embedders import normalised
from rllib_srl.replay.diversity.neighbours import check_card, diversity, nearest, novelty
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import StoreError
from scripts.memory_laws import check_valid
from tests.replay.groups import a_buffer, a_group, a_prompt


def unit(generator, num, dim=4) -> np.ndarray:
    return normalised(generator.standard_normal((num, dim)))


def test_similarities_worked_by_hand():
    ids_N, stored = np.array([0, 3, 7, 9]), normalised(np.array([[0, 2], [1, 0], [3, 3], [0, 0]]))
    ids, similarity = nearest(np.eye(2)[:1], ids_N, stored, 2)
    assert ids.tolist() == [[3, 7]] and similarity == pytest.approx(np.array([[1, np.sqrt(0.5)]]))
    ids, _ = nearest(np.eye(2)[[0, 0]], ids_N, stored, 1, [3, -1])
    assert ids.tolist() == [[7], [3]]
    ids, similarity = nearest(np.eye(2)[:1], ids_N, stored, 4, [3])
    assert ids.tolist() == [[7, 0, 9, -1]] and np.isnan(similarity[0]).tolist() == [False] * 3 + [True]
    assert similarity[0, 1:3].tolist() == [0, 0]  # equal ones are ordered by id, and zeros are unlike everything
    assert np.isnan(nearest(np.eye(2), np.array([], int), np.zeros((0, 0)), 2)[1]).all()
    with pytest.raises(ValueError, match="vectors have 3 numbers; expected 2, as those stored"):
        nearest(np.eye(3), ids_N, stored, 1)


@settings(max_examples=40)
@given(st.sets(st.integers(0, 40), max_size=20), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_a_sort_gives_the_same_answers(ids, seed, are_many, has_faiss):
    generator, ids_N = np.random.default_rng(seed), np.array(sorted(ids), np.int64)
    stored, queries, excluded = unit(generator, len(ids)), unit(generator, 3), [0, 1, -1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "NUMPY_UP_TO", -1 if are_many else 100)
        if not has_faiss:
            patch.setattr(neighbours, "find_spec", lambda name: None)
            patch.setitem(sys.modules, "faiss", None)
        patch.setattr(neighbours, "_MOST_SIMILARITIES", 30)  # blocks of one to three queries
        found, similarity = nearest(queries, ids_N, stored, 5, excluded)
    for q, query in enumerate(queries.astype(np.float64)):
        pairs = sorted((-float(v.astype(np.float64) @ query), i) for i, v in zip(ids_N.tolist(), stored))
        expected = [(i, -minus) for minus, i in pairs if i != excluded[q]][:5]
        assert found[q].tolist() == [i for i, _ in expected] + [-1] * (5 - len(expected))
        assert similarity[q][: len(expected)] == pytest.approx([s for _, s in expected], abs=1e-12)


def test_a_card_that_is_missing_or_wrong_is_refused(monkeypatch):
    """With a faiss that searches on the CPU where it is asked to on a GPU."""
    faiss = pytest.importorskip("faiss")

    class Resources:
        def setTempMemory(self, num_bytes):
            assert num_bytes == 256 * 2**20

    def knn_gpu(resources, queries, vectors, k, metric, vectorsMemoryLimit):
        return faiss.knn(queries, vectors, k, metric=metric)

    monkeypatch.setattr(neighbours, "_resources", [])
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources, raising=False)
    monkeypatch.setattr(faiss, "knn_gpu", knn_gpu, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
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


NAN = np.nan


def rows(buffer):
    return buffer.tables.items[buffer.tables.slots()]


def test_parts_worked_by_hand():
    assert novelty(np.array([[1.0, 0.5], [0.25, NAN], [NAN, NAN], [-1.0, -1.0]])) == pytest.approx([0.25, 0.75, 1, 1])
    # k of 8 successes: S = k (8 - k) / 64, and 4 S at most 1
    variance = [k * (8 - k) / 64 for k in range(9)]
    assert diversity(variance, np.zeros(9)) == pytest.approx([2 * s for s in variance])
    assert diversity([0.25, 0.0, 5.0], np.array([0.5, 0.5, 0.0])) == pytest.approx([0.75, 0.25, 0.5])


@settings(max_examples=40)
@given(st.lists(st.floats(-1, 1) | st.just(NAN), min_size=1, max_size=9), st.floats(0, 1e6))
def test_diversity_is_bounded(similarity, variance):
    found = diversity(np.array([variance]), novelty(np.array([similarity])))
    assert 0 <= found[0] <= 1


def test_an_item_is_not_compared_with_itself():
    buffer = a_buffer(embedding="ngram")
    buffer.add([a_group(0, 1), a_group(1, 1)], 1)
    assert rows(buffer)["novelty"].tolist() == [1, 1]  # nothing was stored before
    buffer.add([a_group(0, 2)], 2)
    assert rows(buffer)["novelty"][0] > 0.8  # to the other; its own earlier vector is closer
    assert buffer.add([replace(a_group(0, 3), prompt=a_prompt(2))], 3)[0].is_new
    assert rows(buffer)["novelty"][2] < 0.8  # to p0, of the same words


@pytest.mark.parametrize(("given", "expected"), [
    ({}, "ngram"),
    ({"capacity": 0}, None),
    ({"selection": "uniform"}, None),
    ({"selection": "uniform", "reuse_selection": "srl"}, "ngram"),
    ({"diversity_coeff": 0.0}, None),
    ({"diversity_coeff": 0.0, "eviction": "least_diverse"}, "ngram"),
    ({"diversity_coeff": 0.0, "embedding": "ngram"}, "ngram"),
    ({"diversity_coeff": 0.0, "embedding": "ngram", "capacity": 0}, None),
])  # fmt: skip
def test_items_are_embedded_where_something_needs_it(given, expected):
    assert ReplaySettings(**given).embedding_used == expected


def test_without_diversity_nothing_is_embedded():
    script = (
        "import sys, numpy as np\n"
        "from rllib_srl.replay.rllib import RLlibReplayBuffer\n"
        "from tests.replay.groups import a_group\n"
        "buffer = RLlibReplayBuffer(admit=None, diversity_coeff=0.0)\n"
        "buffer.add([a_group(i, 1, i) for i in range(4)], 1)\n"
        "assert buffer.draw_prompts(2, 2) and buffer.draw_groups(2, 2) and buffer.embedder is None\n"
        "assert not buffer.tables.items[buffer.tables.slots()]['has_vector'].any()\n"
        "assert not len(buffer.tables.vectors[0])\n"
        "heavy = {'faiss', 'torch', 'transformers', 'pandas', 'ray.rllib', 'rllib_srl.contrib'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def a_memory(directory, **given):
    return SRLReplayBuffer(directory=directory, capacity=64, admit=None, run="r", **given)


def test_a_memory_keeps_the_embedding_that_it_was_written_with(tmp_path):
    off, remedies = {"diversity_coeff": 0.0}, ("expected diversity_coeff = 0, no", "expected embedding = 'ngram', or a")
    for name, first, second, remedy in (("off", off, {}, remedies[0]), ("on", {}, off, remedies[1])):
        buffer = a_memory(tmp_path / name, **first)
        buffer.add([a_group(0, 1)], 1)
        buffer.snapshot(tmp_path / f"{name}.copy")
        buffer.close()
        with pytest.raises((ValueError, StoreError), match=f"was written with embedding .* {remedy}"):
            a_memory(tmp_path / name, **second)
        with pytest.raises((ValueError, StoreError), match="this memory was written with embedding"):
            a_memory(None, **second).restore(tmp_path / f"{name}.copy")
        again = a_memory(tmp_path / name, **{**off, "embedding": "ngram"} if first == {} else first)
        check_valid(again)
        again.close()
