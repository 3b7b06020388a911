#!/usr/bin/env python3
"""Benchmark the novelty of new questions among a million stored ones: the index against brute force, same threads.

    OMP_NUM_THREADS=2 python -m scripts.bench.novelty

    index   Neighbours: vectors added in batches, some deleted, then novelty (mean distance to the k nearest)
    brute   float32 matrix products over blocks of the vectors that are left, partial top k of each; the faster of
            torch's and faiss's, at the best of some block sizes

Both sides answer the same queries in turns. Recall is the share of the true 10 nearest that the index finds; a vector
as near as the tenth counts as found. Vectors are MiniLM's (question_vectors.py); the first call embeds for --minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # not scripts/bench/, whose files would hide packages
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read once, when the libraries are loaded

import numpy as np
import torch

from rllib_srl.replay.diversity.measures import novelty
from rllib_srl.replay.diversity.neighbours import Neighbours
from scripts.bench import common as bench
from scripts.bench.question_vectors import CHUNK, Plan, QuestionVectors, load

LEAST_RATIO, LEAST_RECALL, RECALL_AT, STEP = 10.0, 0.95, 10, 16
_BLOCKS = (4096, 32_768)
_BATCH = 10_000
_SEED = 2

Search = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # queries, k -> rows and similarities


@dataclass
class Figures:
    """The measured figures. Invariant: entry i of each list of seconds is of repeat i."""

    num_stored: int
    num_deleted: int
    num_new: int
    num_real: int
    num_neighbours: int
    num_lists: int = 0
    num_probes: int = 0
    recall: float = 0.0
    novelty_error: float = 0.0  # mean |index - brute|
    build_s: float = 0.0
    delete_s: float = 0.0
    index_bytes: int = 0
    brute: str = ""
    index_s: list[float] = field(default_factory=list)
    brute_s: list[float] = field(default_factory=list)
    index_cpu_s: list[float] = field(default_factory=list)  # of all threads of this process
    brute_cpu_s: list[float] = field(default_factory=list)
    step_index_s: list[float] = field(default_factory=list)  # the same for one training step's new items
    step_brute_s: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Return the speed-up of the index over brute force, one per repeat."""
        return [brute / index for index, brute in zip(self.index_s, self.brute_s, strict=True)]

    @property
    def cpu_ratios(self) -> list[float]:
        """Return the same by processor time, which other processes on the machine disturb less."""
        return [brute / index for index, brute in zip(self.index_cpu_s, self.brute_cpu_s, strict=True)]


def built(vectors: QuestionVectors, num_deleted: int, exact_up_to: int, figures: Figures) -> Neighbours:
    """Return an index of the stored vectors that grew batch by batch, as in training, followed by deletions."""
    before = resident_bytes()
    index = Neighbours(vectors.stored_ND.shape[1], exact_up_to=exact_up_to)
    start = time.perf_counter()
    for first in range(0, len(vectors.stored_ND), _BATCH):
        rows = np.arange(first, min(first + _BATCH, len(vectors.stored_ND)))
        index.set(rows, vectors.stored_ND[rows])
    figures.build_s = time.perf_counter() - start
    gone = np.random.default_rng(_SEED).permutation(len(vectors.stored_ND))[:num_deleted]
    start = time.perf_counter()
    for first in range(0, num_deleted, _BATCH):
        index.remove(gone[first : first + _BATCH])
    figures.delete_s = time.perf_counter() - start
    figures.index_bytes = resident_bytes() - before
    state = index.save_state()
    figures.num_lists = 0 if state["lists"] is None else len(state["lists"])
    figures.num_probes = state["num_probes"]
    return index


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def torch_search(live_ND: np.ndarray, block: int) -> Search:
    """Return brute force over blocks of rows: a product into a buffer that fits the cache, then its top k."""
    live, buffer = torch.from_numpy(live_ND), torch.empty(0)

    def search(queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal buffer
        queries = torch.from_numpy(queries_QD)
        best, rows = torch.full((len(queries), 0), 0.0), torch.full((len(queries), 0), 0)
        for start in range(0, len(live), block):
            part = live[start : start + block]
            if buffer.shape != (len(queries), len(part)):
                buffer = torch.empty(len(queries), len(part))
            torch.mm(queries, part.T, out=buffer)
            top, at = torch.topk(buffer, min(k, len(part)), sorted=False)
            best, rows = torch.cat([best, top], 1), torch.cat([rows, at + start], 1)
        top, at = torch.topk(best, k)
        return rows.gather(1, at).numpy(), top.numpy()

    return search


def faiss_search(live_ND: np.ndarray) -> Search:
    """Return faiss's own brute force."""
    import faiss

    def search(queries_QD: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        similarity_QK, rows_QK = faiss.knn(queries_QD, live_ND, k, metric=faiss.METRIC_INNER_PRODUCT)
        return rows_QK, similarity_QK

    return search


def best_brute(live_ND: np.ndarray, queries_QD: np.ndarray) -> tuple[str, Search]:
    """Return the fastest brute force, tried on at most a tenth of the vectors (but on 50,000)."""
    part_ND = live_ND[: max(50_000, len(live_ND) // 10)]

    def searches(rows_ND: np.ndarray) -> Iterator[tuple[str, Search]]:
        for block in _BLOCKS:
            yield f"torch, blocks of {block}", torch_search(rows_ND, block)
        yield "faiss.knn", faiss_search(rows_ND)

    seconds = {}
    for name, search in searches(part_ND):
        search(queries_QD[:10], RECALL_AT)
        seconds[name] = min(timed(partial(search, queries_QD, RECALL_AT))[0] for _ in range(2))
    fastest = min(seconds, key=lambda name: seconds[name])
    return fastest, dict(searches(live_ND))[fastest]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds a call took, and its answer."""
    start = time.perf_counter()
    answer = call()
    return time.perf_counter() - start, answer


def measure(index: Neighbours, vectors: QuestionVectors, num_repeats: int, figures: Figures) -> None:
    """Time both sides in turns, and compare their answers."""
    k, queries_QD = figures.num_neighbours, vectors.new_QD
    live_ND = index.vectors(index.ids())
    figures.brute, brute = best_brute(live_ND, queries_QD)
    for repeat in range(num_repeats):
        step_QD = queries_QD[(repeat * STEP) % max(1, len(queries_QD) - STEP) :][:STEP]
        start = time.process_time()
        seconds, mine = timed(lambda: novelty(index.distances(queries_QD, k)))
        figures.index_s.append(seconds)
        figures.index_cpu_s.append(time.process_time() - start)
        start = time.process_time()
        seconds, theirs = timed(lambda: novelty(1.0 - brute(queries_QD, k)[1]))
        figures.brute_s.append(seconds)
        figures.brute_cpu_s.append(time.process_time() - start)
        figures.novelty_error = float(np.abs(np.subtract(mine, theirs)).mean())
        figures.step_index_s.append(timed(partial(index.distances, step_QD, k))[0])
        figures.step_brute_s.append(timed(partial(brute, step_QD, k))[0])
    least_Q1 = brute(queries_QD, RECALL_AT)[1].min(axis=1, keepdims=True)
    figures.recall = float((index.nearest(queries_QD, RECALL_AT)[1] >= least_Q1 - 1e-6).mean())


def lines(figures: Figures, least_ratio: float) -> list[str]:
    """Return the figures as text."""
    live = figures.num_stored - figures.num_deleted
    found = "exact" if figures.num_lists == 0 else f"{figures.num_probes} of {figures.num_lists} lists probed"
    met = bench.verdict(median(figures.ratios) >= least_ratio and figures.recall >= LEAST_RECALL)
    return [
        f"{figures.num_new:,} new questions, k = {figures.num_neighbours}, {figures.num_stored:,} stored, "
        f"{figures.num_deleted:,} of them deleted, {live:,} left",
        f"vectors {figures.num_real:,} are embeddings of distinct questions "
        f"({figures.num_real / figures.num_stored:.1%})"
        + ("" if figures.num_real == figures.num_stored else ", the rest lies between two of one world, plus noise"),
        f"index   built in {figures.build_s:.1f} s, deletions {figures.delete_s:.2f} s, {found}, "
        f"{figures.index_bytes / 2**20:,.0f} MiB ({figures.index_bytes / figures.num_stored:,.0f} bytes a vector)",
        f"index   {bench.spread(figures.index_s, 3)} s",
        f"brute   {bench.spread(figures.brute_s, 3)} s ({figures.brute})",
        f"recall  {figures.recall:.4f} at {RECALL_AT}; novelty is off by {figures.novelty_error:.5f} on average",
        f"ratio   {bench.spread(figures.ratios, 1)} over {len(figures.ratios)} repeats; "
        f"at least {least_ratio:g} at a recall of {LEAST_RECALL}: {met}",
        f"        {bench.spread(figures.cpu_ratios, 1)} by processor time",
        f"a step  of {STEP} new items: index {1e3 * median(figures.step_index_s):.1f} ms, "
        f"brute {1e3 * median(figures.step_brute_s):.1f} ms",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the index is too slow or finds too little."""
    parser = argparse.ArgumentParser(description="Compare novelty by index with novelty by brute force.")
    parser.add_argument("--num-stored", type=int, default=1_000_000)
    parser.add_argument("--num-new", type=int, default=1000)
    parser.add_argument("--deleted", type=float, default=0.1, help="share of the stored ones")
    parser.add_argument("--num-neighbours", type=int, default=8)
    parser.add_argument("--num-repeats", type=int, default=5)
    parser.add_argument("--exact-up-to", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="to embed what the cache lacks")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="questions embedded between two looks at the clock")
    parser.add_argument("--least", type=float, default=LEAST_RATIO, help="exit status 1 below this ratio")
    parser.add_argument("--json", type=Path, help="also write every figure here")
    arguments = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    plan = Plan(arguments.num_stored, arguments.num_new)
    vectors = load(plan, 60 * arguments.minutes, arguments.chunk, say)
    figures = Figures(
        num_stored=arguments.num_stored,
        num_deleted=round(arguments.deleted * arguments.num_stored),
        num_new=arguments.num_new,
        num_real=vectors.num_real,
        num_neighbours=arguments.num_neighbours,
    )
    index = built(vectors, figures.num_deleted, arguments.exact_up_to, figures)
    measure(index, vectors, arguments.num_repeats, figures)
    say("\n".join(lines(figures, arguments.least)))
    say(bench.conditions("float32"))
    if arguments.json:
        written = {**asdict(figures), "ratios": figures.ratios}
        arguments.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0 if median(figures.ratios) >= arguments.least and figures.recall >= LEAST_RECALL else 1


if __name__ == "__main__":
    sys.exit(main())
