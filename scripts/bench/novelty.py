#!/usr/bin/env python3
"""Benchmark the neighbours of the memory: time per call, recall and memory, by number and dimension of the vectors.

    python -m scripts.bench.novelty                                      this checkout beside a flat index of faiss
    python -m scripts.bench.novelty --against main --cases 65536x256     and beside the class of a commit, in turns

    vectors   generated questions, hashed as the memory hashes prompts (NgramEmbedder); the queries are held out
    round     remove B vectors, set B others under their ids, search the k nearest of B queries
    recall    share of the true 10 nearest that a search finds; a vector as near as the tenth counts as found

Times are processor time of one thread, which other work on the machine disturbs less. The budget is that of the
quick-start: B = 16, a share of its iteration of 2 s. Exit status 1: this checkout is above it, or its recall below .95.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when the libraries are loaded
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from rllib_srl.envs.games.lookup import Lookup
from rllib_srl.envs.math.compare import Compare
from rllib_srl.envs.math.reasoning_gym_env import ReasoningGym
from rllib_srl.envs.question import QuestionWorld
from rllib_srl.replay.diversity.embedders import NgramEmbedder
from rllib_srl.replay.diversity.neighbours import Neighbours
from scripts.bench import common as bench

ROOT = Path(__file__).resolve().parents[2]
CASES = ("4096x64", "4096x576", "32768x256", "65536x64", "65536x256", "65536x576", "1000000x64")
BATCHES = (16, 48, 256)
ITERATION_S, LEAST_RECALL, RECALL_AT, NUM_NEIGHBOURS = 2.0, 0.95, 10, 8
DATASETS = (
    *("aiw", "basic_arithmetic", "calendar_arithmetic", "chain_sum", "complex_arithmetic"),
    *("count_bits", "count_primes", "decimal_chain_sum", "family_relationships", "fraction_simplification", "gcd"),
    *("lcm", "letter_counting", "prime_factorization", "products", "sentence_reordering", "simple_equations"),
    *("spell_backward", "syllogism", "time_intervals", "word_sequence_reversal"),
)
_POOL = 16_384  # entries an environment of reasoning-gym holds at most
_AT_ONCE = 8192
_SEED = 1


@dataclass
class Figures:
    """The figures of one side in one case; milliseconds by batch size."""

    side: str
    num_vectors: int
    dim: int
    build_s: float = 0.0
    longest_call_s: float = 0.0  # of the build: a fit
    num_bytes: int = 0
    recall: float = 0.0
    remove_ms: dict[int, list[float]] = field(default_factory=dict)
    set_ms: dict[int, list[float]] = field(default_factory=dict)
    search_ms: dict[int, list[float]] = field(default_factory=dict)

    def total_ms(self, batch: int) -> float:
        """Return the median time of all calls of an iteration."""
        return sum(median(values[batch]) for values in (self.remove_ms, self.set_ms, self.search_ms))

    @property
    def is_within_budget(self) -> bool:
        """Return whether the smallest batch takes at most 1 % of an iteration; 2 % beyond 65,536 vectors."""
        return self.total_ms(min(self.search_ms)) <= 1e3 * ITERATION_S * (0.01 if self.num_vectors <= 65_536 else 0.02)


# --- vectors --------------------------------------------------------------------------------------


def questions(num_questions: int, split: str) -> list[str]:
    """Return distinct questions in a seeded order: up to half from reasoning-gym, the rest in equal parts of four."""
    pool = min(_POOL, max(32, -(-num_questions // (2 * len(DATASETS)))))
    few: dict[str, Any] = {"num_shots": 0}
    large: list[QuestionWorld] = [
        Compare({"num_numbers": 3, **few}),
        Compare({"num_numbers": 4, "highest": 999, **few}),
        Lookup({"num_pairs": 2, **few}),
        Lookup({"num_pairs": 3, **few}),
    ]
    texts: dict[str, None] = {}

    def take(world: QuestionWorld, most: int) -> None:
        prompt_ids = islice(world.prompt_ids(split, _SEED), most)
        texts.update((world.question(prompt_id).text, None) for prompt_id in prompt_ids)

    for name in DATASETS:
        take(ReasoningGym({"dataset": name, "pool_size": pool, "multiline": True, **few}), pool)
    for index, world in enumerate(large):
        take(world, max(0, -(-(num_questions - len(texts)) // (len(large) - index))))
    if len(texts) < num_questions:
        raise ValueError(f"num_questions = {num_questions}; the environments have {len(texts)}")
    listed = list(texts)
    return [listed[row] for row in np.random.default_rng(_SEED).permutation(len(listed))[:num_questions]]


def embedded(texts: Sequence[str], dim: int) -> np.ndarray:
    """Return one vector per text, [len(texts), D] float32; its bytes are the tokens."""
    embedder = NgramEmbedder(dim=dim)
    streams = [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]
    parts = [embedder.vectors(streams[start : start + _AT_ONCE]) for start in range(0, len(streams), _AT_ONCE)]
    return np.concatenate([np.empty((0, dim), np.float32), *parts])


class FlatFaiss:
    """A flat index of faiss by id, with the three calls that are measured; exact, without ranking in float64."""

    def __init__(self, dim: int) -> None:
        import faiss

        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    def set(self, ids_K: np.ndarray, vectors_KD: np.ndarray) -> None:
        """Add vectors under new ids."""
        self._index.add_with_ids(vectors_KD, ids_K)

    def remove(self, ids_K: np.ndarray) -> None:
        """Remove vectors."""
        self._index.remove_ids(ids_K)

    def nearest(self, vectors_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and similarities of the k most similar vectors of each query, [Q, k]."""
        similarity_QK, ids_QK = self._index.search(vectors_QD, k)
        return ids_QK, similarity_QK


# --- measuring ------------------------------------------------------------------------------------


def of_commit(commit: str) -> Callable[[int], Any]:
    """Return the class `Neighbours` as it is in a commit of this repository."""
    path = "rllib_srl/replay/diversity/neighbours.py"
    text = subprocess.run(
        ["git", "-C", str(ROOT), "show", f"{commit}:{path}"], check=True, capture_output=True, timeout=60
    ).stdout
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "neighbours_of_commit.py"
        file.write_bytes(text)
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    neighbours: Callable[[int], Any] = module.Neighbours
    return neighbours


def timed(call: Callable[[], Any]) -> float:
    """Return the processor time of a call, seconds."""
    start = time.process_time()
    call()
    return time.process_time() - start


def resident_bytes() -> int:
    """Return the resident memory of this process, without what was freed (on Linux with glibc)."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def built(create: Callable[[int], Any], vectors_ND: np.ndarray, figures: Figures) -> Any:
    """Return an index of the vectors that grew batch by batch, as in training."""
    before, index = resident_bytes(), create(vectors_ND.shape[1])
    for first in range(0, len(vectors_ND), _AT_ONCE):
        rows = np.arange(first, min(first + _AT_ONCE, len(vectors_ND)))
        seconds = timed(partial(index.set, rows, vectors_ND[rows]))
        figures.build_s += seconds
        figures.longest_call_s = max(figures.longest_call_s, seconds)
    figures.num_bytes = resident_bytes() - before
    return index


def least_similarities(vectors_ND: np.ndarray, queries_QD: np.ndarray, k: int) -> np.ndarray:
    """Return the similarity of each query's true k-th nearest, [Q, 1]."""
    best_QK = np.empty((len(queries_QD), 0), np.float32)
    for start in range(0, len(vectors_ND), 8 * _AT_ONCE):
        part_QN = queries_QD @ vectors_ND[start : start + 8 * _AT_ONCE].T
        best_QK = -np.sort(-np.concatenate([best_QK, part_QN], axis=1), axis=1)[:, :k]
    return best_QK[:, -1:]


def measure(
    sides: dict[str, Callable[[int], Any]],
    num_vectors: int,
    texts: Sequence[str],
    new: Sequence[str],
    dim: int,
    num_repeats: int,
) -> list[Figures]:
    """Measure all sides of a case in turns."""
    vectors_ND, queries_QD = embedded(texts[:num_vectors], dim), embedded(new, dim)
    generator = np.random.default_rng(_SEED)
    found = [Figures(name, num_vectors, dim) for name in sides]
    indexes = [built(create, vectors_ND, one) for create, one in zip(sides.values(), found, strict=True)]
    least_Q1 = least_similarities(vectors_ND, queries_QD, RECALL_AT)
    for index, one in zip(indexes, found, strict=True):
        one.recall = float((index.nearest(queries_QD, RECALL_AT)[1] >= least_Q1 - 1e-6).mean())
    for _ in range(num_repeats):
        for batch in BATCHES:
            ids = generator.choice(num_vectors, batch, replace=False)
            queries = queries_QD[generator.choice(len(queries_QD), batch, replace=False)]
            for index, one in zip(indexes, found, strict=True):
                calls: tuple[tuple[dict[int, list[float]], Callable[[], Any]], ...] = (
                    (one.remove_ms, partial(index.remove, ids)),
                    (one.set_ms, partial(index.set, ids, queries)),
                    (one.search_ms, partial(index.nearest, queries, NUM_NEIGHBOURS)),
                )
                for values, call in calls:
                    values.setdefault(batch, []).append(1e3 * timed(call))
    return found


HEADER = """\
| vectors | D | side | remove, set, search 16, ms | 48 | 256 | share of 2 s | recall@10 | build (longest), s | MiB |
|---|---|---|---|---|---|---|---|---|---|"""


def row(figures: Figures) -> str:
    """Return the figures as a row of the table."""
    calls = [
        ", ".join(f"{median(ms[batch]):.1f}" for ms in (figures.remove_ms, figures.set_ms, figures.search_ms))
        for batch in BATCHES
    ]
    return (
        f"| {figures.num_vectors:,} | {figures.dim} | {figures.side} | {' | '.join(calls)} "
        f"| {figures.total_ms(BATCHES[0]) / ITERATION_S / 10:.2f} %, {bench.verdict(figures.is_within_budget)} "
        f"| {figures.recall:.3f} | {figures.build_s:.1f} ({figures.longest_call_s:.1f}) "
        f"| {figures.num_bytes / 2**20:,.0f} |"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if this checkout takes too long or finds too little."""
    parser = argparse.ArgumentParser(description="Measure the neighbours of the memory.")
    parser.add_argument("--cases", nargs="+", default=CASES, help="NUMBERxDIMENSION of the vectors")
    parser.add_argument("--against", metavar="COMMIT", help="also measure the class of this commit")
    parser.add_argument("--num-repeats", type=int, default=5)
    bench.add_output(parser)
    arguments = parser.parse_args(argv)
    cases = [tuple(map(int, case.split("x"))) for case in arguments.cases]
    sides = {arguments.against: of_commit(arguments.against)} if arguments.against else {}
    sides |= {"flat faiss": FlatFaiss, "here": Neighbours}
    texts, new = questions(max(num for num, _ in cases), "train"), questions(max(BATCHES), "heldout")
    print(HEADER, flush=True)
    found: list[Figures] = []
    for num, dim in cases:
        found += measure(sides, num, texts, new, dim, arguments.num_repeats)
        print("\n".join(row(one) for one in found[-len(sides) :]), flush=True)
    print(bench.conditions("float32"))
    bench.write(arguments, "novelty", [asdict(one) for one in found])
    ours = [one for one in found if one.side == "here"]
    return 0 if all(one.is_within_budget and one.recall >= LEAST_RECALL for one in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
