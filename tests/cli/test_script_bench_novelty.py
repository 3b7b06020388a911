"""The novelty benchmark in a short mode: its figures belong together, and the cache is continued."""

from __future__ import annotations

import json
from statistics import median

import numpy as np
import pytest

from rllib_srl.replay.diversity.embedders import packaged_sentence_model
from scripts.bench import novelty as bench_novelty
from scripts.bench import question_vectors

SHORT = ["--num-stored", "1200", "--num-new", "24", "--chunk", "128", "--exact-up-to", "400", "--num-repeats", "2"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Keep vectors where no other run sees them."""
    try:
        packaged_sentence_model()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("RLLIB_SRL_CACHE", str(tmp_path / "cache"))
    # Few worlds: most of the time would go to making reasoning-gym's pools.
    monkeypatch.setattr(question_vectors, "DATASETS", ("chain_sum", "basic_arithmetic"))
    return tmp_path


@pytest.mark.slow
def test_figures_belong_together_and_the_cache_is_continued(cache, capsys):
    path = cache / "figures.json"
    command = [*SHORT, "--minutes", "0", "--json", str(path)]
    assert bench_novelty.main([*command, "--least", "1e9"]) == 1
    assert "at least 1e+09 at a recall of 0.95: MISSED" in capsys.readouterr().out
    assert json.loads(path.read_text())["num_real"] == 128

    assert bench_novelty.main([*command, "--minutes", "0.0005", "--least", "0"]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert figures["num_real"] == 256
    assert "256 are embeddings of distinct questions (21.3%), the rest lies between two" in printed
    assert "1,200 stored, 120 of them deleted, 1,080 left" in printed
    assert figures["recall"] >= 0.95
    assert 0 < figures["num_probes"] < figures["num_lists"]
    assert figures["novelty_error"] < 0.01
    expected = [brute / index for index, brute in zip(figures["index_s"], figures["brute_s"], strict=True)]
    assert figures["ratios"] == pytest.approx(expected)
    assert f"ratio   {median(expected):.1f} " in printed


@pytest.mark.parametrize("name", ["torch", "faiss"])
def test_brute_force_finds_the_nearest(name):
    generator = np.random.default_rng(0)
    rows, queries = (generator.standard_normal((num, 16)).astype(np.float32) for num in (1000, 7))
    search = bench_novelty.torch_search(rows, 300) if name == "torch" else bench_novelty.faiss_search(rows)
    found, similarity = search(queries, 5)
    order = np.argsort(-(queries @ rows.T), axis=1)[:, :5]
    assert np.array_equal(found, order)
    assert similarity == pytest.approx(np.take_along_axis(queries @ rows.T, order, axis=1), abs=1e-4)


def test_questions_are_distinct_seeded_and_split(monkeypatch):
    monkeypatch.setattr(question_vectors, "DATASETS", ("chain_sum", "coin_flip"))
    texts, labels = question_vectors.questions(500, "train")
    assert len(set(texts)) == len(texts) == len(labels) == 500
    assert texts == question_vectors.questions(500, "train")[0]
    assert set(texts).isdisjoint(question_vectors.questions(100, "heldout")[0])
    for text, label in zip(texts, labels, strict=True):
        if label == 2:
            assert text.startswith("Which is largest: ")


def test_what_is_made_up_lies_between_two_questions_of_one_world():
    real = np.eye(4, dtype=np.float32)
    made = question_vectors.interpolated(real, np.array([0, 1, 0, 1]), 200)
    assert np.linalg.norm(made, axis=1) == pytest.approx(np.ones(200), abs=1e-6)
    # Worlds 0 and 1 have the axes 0, 2 and 1, 3: what is left beside the own world's is noise.
    energy = np.sort(np.square(np.stack([made[:, [0, 2]], made[:, [1, 3]]])).sum(axis=2), axis=0)
    assert energy[0].max() < 0.05 and energy[0].min() > 0
