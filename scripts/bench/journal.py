#!/usr/bin/env python3
"""Measure the cost of a durable commit beside its lower bound: the same bytes appended to a file and flushed.

    python -m scripts.bench.journal                      both sizes of groups, until each wrote --megabytes

Both sides take turns, commit by commit, on one disk, so that they run under the same load. Old groups are removed as
new ones come, as in a buffer at its capacity. Every `--tidy-every` commits the journal tidies up, as an idle buffer
does. That time belongs to no commit, so ratios are printed without it and with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.journal import REVIEW, Commit, Journal
from rllib_srl.replay.store.records import GROUP, ITEM
from rllib_srl.types import Group, Prompt, StopReason
from scripts.bench import common as bench

NUM_GROUPS = 16  # of a commit, two thirds of them of new prompts
NUM_EPISODES = 8
CAPACITY = 2048  # items, and groups
LEAST_RATIO = 0.2  # the budget is 1 % of an iteration of seconds, and a commit takes milliseconds


@dataclass
class Times:
    """Seconds. Invariant: entry i of both lists is of the same bytes."""

    journal: list[float] = field(default_factory=list)
    append: list[float] = field(default_factory=list)
    tidy: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def ratio(self) -> float:
        """Return the median over commits of append time over journal time: 1 is as fast as an append."""
        return median(b / a for a, b in zip(self.journal, self.append, strict=True))

    def ratio_in_total(self, with_tidy: bool) -> float:
        """Return total append time over total journal time."""
        return sum(self.append) / (sum(self.journal) + with_tidy * sum(self.tidy))


class Traffic:
    """Commits as a buffer at its capacity makes them."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        """Make groups of episodes of `num_tokens` tokens."""
        self._generator, self._num_tokens, self._seq = np.random.default_rng(seed), num_tokens, 0

    def next(self) -> tuple[Commit, bytes]:
        """Return a commit, and the same bytes for a plain file."""
        slots = self._generator.choice(CAPACITY, NUM_GROUPS, replace=False).tolist()
        seqs = range(self._seq, self._seq + NUM_GROUPS)
        self._seq += NUM_GROUPS
        items, groups, reviews = np.zeros(NUM_GROUPS, ITEM), np.zeros(NUM_GROUPS, GROUP), np.zeros(NUM_GROUPS, REVIEW)
        for rows in (items, groups, reviews):
            rows.view(np.uint8)[:] = self._generator.integers(0, 2, rows.view(np.uint8).shape)
        prompts = {slot: Prompt("bench", f"{seq}", "bench") for slot, seq in zip(slots, seqs, strict=True)}
        commit = Commit(
            items=dict(zip(slots, items, strict=True)),
            prompts={slot: prompts[slot] for slot in slots[: 2 * NUM_GROUPS // 3]},
            groups=dict(zip(seqs, groups, strict=True)),
            payloads={seq: encode(self._group(seq)) for seq in seqs},
            removed_groups=[seq - CAPACITY for seq in seqs] if seqs[0] >= CAPACITY else [],
            reviews=reviews[: NUM_GROUPS // 3],
            request=f"{seqs[0]}.add",
            answer={"grades": [3] * NUM_GROUPS, "recall": [0.5] * NUM_GROUPS},
            state={"generator": self._generator.bit_generator.state, "carry": 0.25},
        )
        records = (items.tobytes(), groups.tobytes(), commit.reviews.tobytes())
        texts = repr((commit.prompts, commit.answer, commit.state)).encode()
        return commit, b"".join([*commit.payloads.values(), *records, texts])

    def _group(self, seq: int) -> Group:
        num_tokens = NUM_EPISODES * self._num_tokens
        token_ids_N = self._generator.integers(0, 50_000, num_tokens).astype(np.int32)
        mask_N = np.arange(num_tokens) % self._num_tokens >= self._num_tokens // 3
        return Group(
            group_id=f"bench-{seq}",
            prompt=Prompt("bench", str(seq), "bench"),
            token_ids_N=token_ids_N,
            loss_mask_N=mask_N,
            behaviour_logp_N=np.where(mask_N, -self._generator.random(num_tokens), 0).astype(np.float32),
            offsets=np.arange(NUM_EPISODES + 1) * self._num_tokens,
            rewards_G=self._generator.random(NUM_EPISODES).astype(np.float32),
            versions_G2=np.full((NUM_EPISODES, 2), seq),
            stop_reasons=(StopReason.TERMINATED,) * NUM_EPISODES,
        )


def measure(directory: Path, num_tokens: int, num_bytes: int, tidy_every: int) -> Times:
    """Write about `num_bytes` both ways, after enough commits for removals to have begun."""
    times, traffic = Times(), Traffic(num_tokens, 0)
    file = os.open(directory / "plain", os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC)
    (directory / "journal").unlink(missing_ok=True)
    try:
        with Journal(directory / "journal", ITEM, GROUP) as journal:
            prompts = {slot: Prompt("bench", str(slot)) for slot in range(CAPACITY)}
            journal.commit(Commit(items=dict(enumerate(np.zeros(CAPACITY, ITEM))), prompts=prompts))
            for _ in range(CAPACITY // NUM_GROUPS):
                journal.commit(traffic.next()[0])
            journal.tidy()
            while times.num_bytes < num_bytes:
                turn(times, journal, file, *traffic.next())
                if len(times.journal) % tidy_every == 0:
                    times.tidy.append(seconds(journal.tidy))
    finally:
        os.close(file)
    return times


def turn(times: Times, journal: Journal, file: int, commit: Commit, data: bytes) -> None:
    """Time one commit and one append, in turns one or the other first."""

    def append() -> None:
        os.write(file, data)
        os.fsync(file)

    def store() -> None:
        journal.commit(commit)

    if len(times.journal) % 2:
        times.append.append(seconds(append))
        times.journal.append(seconds(store))
    else:
        times.journal.append(seconds(store))
        times.append.append(seconds(append))
    times.num_bytes += len(data)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(num_tokens: int, times: Times) -> str:
    """Return the measured figures as lines."""
    commits = len(times.journal)
    journal, append = (f"{1e3 * median(t):.2f} ms (worst {1e3 * max(t):.1f})" for t in (times.journal, times.append))
    tidy = f"{1e3 * median(times.tidy):.1f} ms (worst {1e3 * max(times.tidy):.1f})" if times.tidy else "none"
    is_met = times.ratio() >= LEAST_RATIO
    return "\n".join(
        [
            f"{NUM_GROUPS} groups x {NUM_EPISODES} episodes x {num_tokens} tokens: {commits} commits of"
            f" {times.num_bytes / commits / 1e3:.0f} kB",
            f"  commit {journal}, append and fsync {append}",
            f"  {len(times.tidy)} times tidying up between commits: {tidy}",
            f"  throughput beside append and fsync: {times.ratio():.2f} by commit (median;"
            f" {'met' if is_met else 'MISSED'}: at least {LEAST_RATIO}), {times.ratio_in_total(False):.2f} of all"
            f" commits' time, {times.ratio_in_total(True):.2f} with tidying up",
        ]
    )


def main() -> int:
    """Measure and print; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="written by each side, for each size of groups")
    parser.add_argument("--tokens", type=int, nargs="+", default=[120, 1024], help="of an episode")
    parser.add_argument("--tidy-every", type=int, default=20, help="commits between two calls of tidy")
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to be measured")
    bench.add_output(parser)
    arguments = parser.parse_args()
    is_met, figures = True, {}
    for num_tokens in arguments.tokens:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix=".bench_journal_") as directory:
            times = measure(Path(directory), num_tokens, arguments.megabytes * 10**6, arguments.tidy_every)
        print(report(num_tokens, times))
        is_met = is_met and times.ratio() >= LEAST_RATIO
        figures[num_tokens] = {**vars(times), "ratio": times.ratio()}
    bench.write(arguments, "journal", figures)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
