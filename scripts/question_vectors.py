"""A million MiniLM vectors of generated questions, for scripts/bench_novelty.py: made once, kept in the cache.

    worlds -> distinct questions, shuffled -> SentenceEncoder -> <cache>/novelty/<plan>/vectors.f32, chunk by chunk

A call embeds for at most `most_s` seconds and continues where the last one stopped. What is still missing then is
made up by `interpolated`, and the share is reported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not scripts/, whose files would hide packages

import numpy as np

from envs.compare import Compare
from envs.lookup import Lookup
from envs.question import QuestionWorld
from envs.reasoning_gym_env import ReasoningGym
from rllib_srl.models import cache_root
from rllib_srl.replay.sentences import SentenceEncoder

DATASETS = (
    *("aiw", "basic_arithmetic", "calendar_arithmetic", "chain_sum", "complex_arithmetic"),
    *("count_bits", "count_primes", "decimal_chain_sum", "family_relationships", "fraction_simplification", "gcd"),
    *("lcm", "letter_counting", "prime_factorization", "products", "sentence_reordering", "simple_equations"),
    *("spell_backward", "syllogism", "time_intervals", "word_sequence_reversal"),
)
CHUNK = 8192
_POOL = 16_384  # entries a world of reasoning-gym holds at most
_SEED = 1


@dataclass(frozen=True)
class Plan:
    """How many questions to embed. Invariant: equal plans give equal texts in equal order."""

    num_stored: int
    num_new: int

    def directory(self) -> Path:
        """Return where the vectors are kept."""
        text = json.dumps([self.num_stored, self.num_new, DATASETS, _SEED, 1])
        return cache_root() / "novelty" / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def worlds(num_questions: int) -> list[tuple[QuestionWorld, int]]:
    """Return worlds, each with the number of questions it gives: a third from reasoning-gym where there are enough."""
    pool = min(_POOL, max(32, -(-num_questions // (2 * len(DATASETS)))))
    few: dict = {"num_shots": 0}
    gym = [ReasoningGym({"dataset": name, "pool_size": pool, "multiline": True, **few}) for name in DATASETS]
    large = [
        Compare({"num_numbers": 3, **few}),
        Compare({"num_numbers": 4, "highest": 999, **few}),
        Lookup({"num_pairs": 2, **few}),
        Lookup({"num_pairs": 3, **few}),
    ]
    return [(world, pool) for world in gym] + [(world, num_questions) for world in large]


def questions(num_questions: int, split: str) -> tuple[list[str], np.ndarray]:
    """Return distinct questions in a seeded order, and the number of the world of each."""
    texts: dict[str, int] = {}
    sources = worlds(num_questions)
    gym, large = sources[: len(DATASETS)], sources[len(DATASETS) :]
    for index, (world, most) in enumerate(gym):
        texts.update((text, index) for text in islice(_texts(world, split), most))
    for index, (world, _) in enumerate(large):
        share = -(-(num_questions - len(texts)) // (len(large) - index))
        texts.update((text, len(gym) + index) for text in islice(_texts(world, split), max(0, share)))
    order = np.random.default_rng(_SEED).permutation(len(texts))[:num_questions]
    listed, labels = list(texts), np.fromiter(texts.values(), np.int32, len(texts))
    if len(order) < num_questions:
        raise ValueError(f"num_questions = {num_questions}; the worlds have {len(order)}")
    return [listed[row] for row in order], labels[order]


def _texts(world: QuestionWorld, split: str) -> Iterator[str]:
    return (world.question(prompt_id).text for prompt_id in world.prompt_ids(split, _SEED))


@dataclass(frozen=True)
class QuestionVectors:
    """Embedded questions. Invariant: the first `num_real` of `stored_ND` are embeddings, the rest interpolated."""

    stored_ND: np.ndarray
    new_QD: np.ndarray  # of the held-out split: none of them is stored
    num_real: int


def load(plan: Plan, most_s: float, chunk: int, say: Callable[[str], None]) -> QuestionVectors:
    """Return the vectors of `plan`, embedding what is missing for about `most_s` seconds, and one chunk at least."""
    directory = plan.directory()
    directory.mkdir(parents=True, exist_ok=True)
    encoder = SentenceEncoder(dtype="bfloat16", batch_size=128)
    new_texts, _ = questions(plan.num_new, "heldout")
    new_QD, _ = _embedded(encoder, directory / "new", new_texts, float("inf"), chunk, say)
    texts, labels = questions(plan.num_stored, "train")
    stored_ND, num_real = _embedded(encoder, directory / "stored", texts, most_s, chunk, say)
    stored_ND = np.array(stored_ND)
    if num_real < len(stored_ND):
        stored_ND[num_real:] = interpolated(stored_ND[:num_real], labels[:num_real], len(stored_ND) - num_real)
    return QuestionVectors(stored_ND, np.array(new_QD), num_real)


def _embedded(
    encoder: SentenceEncoder, base: Path, texts: list[str], most_s: float, chunk: int, say: Callable[[str], None]
) -> tuple[np.ndarray, int]:
    """Continue the file of vectors of `texts`; return it and how many of its rows are done."""
    progress = base.with_suffix(".json")
    num_done = json.loads(progress.read_text())["num_done"] if progress.exists() else 0
    shape = (len(texts), encoder.dim)
    vectors = np.memmap(base.with_suffix(".f32"), np.float32, "r+" if num_done else "w+", shape=shape)
    start, began = time.perf_counter(), num_done
    while num_done < len(texts) and (num_done == 0 or time.perf_counter() - start < most_s):
        part = texts[num_done : num_done + chunk]
        vectors[num_done : num_done + len(part)] = encoder.encode(part)
        vectors.flush()
        num_done += len(part)
        progress.write_text(json.dumps({"num_done": num_done}))
        rate = (num_done - began) / (time.perf_counter() - start)
        say(f"  {base.name}: {num_done:,} of {len(texts):,} questions embedded, {rate:.0f} a second")
    return vectors, num_done


def interpolated(real_ND: np.ndarray, label_N: np.ndarray, num: int) -> np.ndarray:
    """Return made-up vectors: t a + (1 - t) b + noise, normalised; a and b two questions of one world.

    t is uniform in [0.2, 0.8]; the noise has a length of about 0.05, so that no vector lies exactly between two.
    """
    generator = np.random.default_rng(_SEED)
    dim, by_world = real_ND.shape[1], np.argsort(label_N, kind="stable")
    first_N = np.searchsorted(label_N[by_world], label_N)
    size_N = np.bincount(label_N)[label_N]
    made_KD = np.empty((num, dim), np.float32)
    for start in range(0, num, CHUNK):
        size = min(CHUNK, num - start)
        a_K = generator.integers(len(real_ND), size=size)
        b_K = by_world[first_N[a_K] + (generator.random(size) * size_N[a_K]).astype(np.int64)]
        t_K1 = generator.uniform(0.2, 0.8, (size, 1)).astype(np.float32)
        noise_KD = generator.standard_normal((size, dim)).astype(np.float32) * np.float32(0.05 / dim**0.5)
        mixed_KD = t_K1 * real_ND[a_K] + (1 - t_K1) * real_ND[b_K] + noise_KD
        made_KD[start : start + size] = mixed_KD / np.linalg.norm(mixed_KD, axis=1, keepdims=True)
    return made_KD


def main() -> int:
    """Embed ahead of the benchmark."""
    parser = argparse.ArgumentParser(description="Embed generated questions into the cache.")
    parser.add_argument("--num-stored", type=int, default=1_000_000)
    parser.add_argument("--num-new", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    plan = Plan(arguments.num_stored, arguments.num_new)
    print(plan.directory(), flush=True)
    load(plan, 60 * arguments.minutes, CHUNK, lambda line: print(line, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
