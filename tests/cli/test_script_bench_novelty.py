"""The novelty benchmark in a short mode: its figures belong together, and its vectors are those it describes."""

from __future__ import annotations

import json
import subprocess
from statistics import median

import numpy as np
import pytest

from rllib_srl.replay.diversity.neighbours import Neighbours
from scripts.bench import novelty as bench_novelty


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Use few environments and collect no garbage before memory is read: these would take most of the time."""
    monkeypatch.setattr(bench_novelty.gc, "collect", lambda: 0)
    monkeypatch.setattr(bench_novelty, "DATASETS", ("chain_sum", "basic_arithmetic"))


def test_figures_belong_together(tmp_path, capsys):
    path = tmp_path / "figures.json"
    command = ["--cases", "600x16", "700x8", "--num-repeats", "3", "--json", str(path)]
    assert bench_novelty.main(command) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()[:-1]
    figures = json.loads(path.read_text())
    assert [one["side"] for one in figures] == ["flat faiss", "here"] * 2
    first, second = figures[1::2]
    assert (first["num_vectors"], first["dim"], second["num_vectors"], second["dim"]) == (600, 16, 700, 8)
    assert first["recall"] == 1.0 and 0 < first["longest_call_s"] <= first["build_s"]
    for one, text in zip((first, second), rows[1::2], strict=True):
        calls = [one[name]["16"] for name in ("remove_ms", "set_ms", "search_ms")]
        assert all(len(values) == 3 for values in calls)
        total = sum(median(values) for values in calls)
        assert f"{total / 20:.2f} %, met" in text and len(text.split("|")) == len(header.split("|"))


def test_a_miss_of_the_budget_or_of_recall_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(bench_novelty, "ITERATION_S", 1e-9)
    assert bench_novelty.main(["--cases", "300x8", "--num-repeats", "1"]) == 1
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(bench_novelty, "DATASETS", ("chain_sum",))
    monkeypatch.setattr(bench_novelty, "LEAST_RECALL", 1.1)
    assert bench_novelty.main(["--cases", "300x8", "--num-repeats", "1"]) == 1


def test_a_commit_is_measured_beside_this_checkout(capsys):
    command = ["git", "-C", bench_novelty.ROOT, "rev-parse", "HEAD"]
    if subprocess.run(command, capture_output=True, timeout=60).returncode:
        pytest.skip("not a git checkout")
    assert bench_novelty.of_commit("HEAD") is not Neighbours
    assert bench_novelty.main(["--cases", "300x8", "--num-repeats", "1", "--against", "HEAD"]) == 0
    printed = capsys.readouterr().out
    assert "| 300 | 8 | HEAD |" in printed and "| 300 | 8 | here |" in printed


def test_the_flat_index_finds_what_this_checkout_finds():
    vectors, queries = np.split(bench_novelty.embedded(bench_novelty.questions(240, "train"), 32), [200])
    ours, flat = Neighbours(32), bench_novelty.FlatFaiss(32)
    for index in (ours, flat):
        index.set(np.arange(200), vectors)
        index.remove(np.arange(50))
    assert flat.nearest(queries, 5)[1] == pytest.approx(ours.nearest(queries, 5)[1], abs=1e-6)


def test_the_least_similarity_is_that_of_a_sort():
    generator = np.random.default_rng(0)
    rows, queries = (generator.standard_normal((num, 16)).astype(np.float32) for num in (1000, 7))
    expected = np.sort(queries @ rows.T, axis=1)[:, -5:-4]
    assert bench_novelty.least_similarities(rows, queries, 5) == pytest.approx(expected, abs=1e-4)


def test_questions_are_distinct_seeded_and_split():
    texts = bench_novelty.questions(500, "train")
    assert len(set(texts)) == len(texts) == 500
    assert texts == bench_novelty.questions(500, "train")
    assert set(texts).isdisjoint(bench_novelty.questions(100, "heldout"))
    assert sum(text.startswith("Which is largest: ") for text in texts) > 100


def test_vectors_have_norm_1():
    vectors = bench_novelty.embedded(["How much is 3 + 4?", "Which is largest: 1 or 2?"], 64)
    assert vectors.shape == (2, 64) and np.linalg.norm(vectors, axis=1) == pytest.approx(1.0)
