"""Measure what a draw by `signal` takes when every stored item is a candidate, beside a draw by `srl` from its sample.

    python -m scripts.bench.selection                 a memory of 65,536 items in 16 domains, 16 slots
    python -m scripts.bench.selection --items 2000    a quick look

Rules draw in turns from the same rows, without the journal; times are those of the processor. What history and baseline
add to an iteration (`scripts/bench/history.py`) is measured in the same run: rule and baseline together have one bound.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from rllib_srl.replay.domain_statistics import DomainStatistics
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.pool import Surprise
from rllib_srl.replay.selection.sampler import Draws
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store.items import ItemStore
from rllib_srl.replay.store.records import SCHEDULED
from rllib_srl.types import Prompt
from scripts.bench import history
from scripts.bench.common import add_output, verdict, write
from scripts.bench.history import ITERATION_S, MOST

NOW, NUM_SLOTS, NUM_DOMAINS = 1000, 16, 16
SIDES = ("srl", "signal", "signal, posterior", "greso", "mopps", "spo")


def filled(num_items: int) -> ItemStore:
    """Return a store of items, one in ten never played, with histories that differ."""
    generator, store = np.random.default_rng(0), ItemStore(num_items, 2)
    for number in range(num_items):
        store.add_item(number << 20, Prompt("bench", str(number)), f"domain {number % NUM_DOMAINS}", 1)
    visits_N = np.where(generator.random(num_items) < 0.1, 0, generator.integers(1, 12, num_items))
    is_played_N = visits_N > 0
    store.update_many(
        store.slots(),
        status=SCHEDULED,
        visits=visits_N,
        reps=visits_N,
        last_review=np.where(is_played_N, generator.integers(1, NOW, num_items), 1),
        last_drawn=np.where(is_played_N, generator.integers(1, NOW, num_items), 0),
        due=generator.uniform(NOW, 2 * NOW, num_items),
        interval=generator.uniform(1, 200, num_items),
        stability=generator.uniform(1, 200, num_items),
        num_silent=np.where(is_played_N, generator.integers(0, 9, num_items), 0),
        num_unsolved=np.where(is_played_N, generator.integers(0, 30, num_items), 0),
        cost=np.where(is_played_N, generator.uniform(20, 200, num_items), 0),
        history_count=np.where(is_played_N, 8.0, 0),
        history_sum=np.where(is_played_N, generator.uniform(0, 8, num_items), 0),
        version=np.where(is_played_N, generator.integers(1, NOW, num_items), 0),
    )
    store.commit()
    return store


def measure(num_items: int, num_draws: int) -> dict[str, list[float]]:
    """Return the milliseconds of draws by each rule, which take turns."""
    store, generator = filled(num_items), np.random.default_rng(1)
    draws = {}
    for side in SIDES:
        settings = ReplaySettings(selection=side.partition(",")[0], capacity=num_items)
        surprise = Surprise(8, 2.0) if side.endswith("posterior") else None
        draws[side] = Draws(settings, store, Recall(settings, store), DomainStatistics(), surprise)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for n in range(num_draws + 2):  # two to warm up
        for side in SIDES:
            begin = time.thread_time()
            found = draws[side].items(NUM_SLOTS, NOW + n, generator)
            took = 1e3 * (time.thread_time() - begin)
            assert len(found) == min(NUM_SLOTS, num_items)
            if n >= 2:
                times[side].append(took)
    return times


def summary(times: dict[str, list[float]], added_ms: float, num_items: int) -> str:
    """Return the medians of all rules, and the share of an iteration."""
    worst = max(median(times[side]) for side in SIDES[1:3])
    share = (worst + added_ms) / 1e3 / ITERATION_S
    listed = ", ".join(f"{side.replace(', ', ' with ')} {median(took):.2f}" for side, took in times.items())
    return (
        f"{num_items} items, medians of {len(times['signal'])} draws of {NUM_SLOTS} in ms: {listed}\n"
        f"signal and the baseline from history take {worst:.2f} + {added_ms:.2f} ms, {share:.2%} of an iteration of "
        f"{ITERATION_S:g} s; at most {MOST:.1%}: {verdict(share <= MOST)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--items", type=int, default=65_536)
    parser.add_argument("--draws", type=int, default=40)
    add_output(parser)
    arguments = parser.parse_args(argv)
    for name in ("items", "draws"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} = {getattr(arguments, name)}; expected at least 1")
    times = measure(arguments.items, arguments.draws)
    with tempfile.TemporaryDirectory(prefix="rllib_srl_bench_") as directory:
        added_ms = history.measure(Path(directory) / "memory", arguments.items, arguments.draws).added
    print(summary(times, added_ms, arguments.items))
    write(arguments, "selection", {**times, "history and baseline": added_ms})
    worst = max(median(times[side]) for side in SIDES[1:3])
    return int((worst + added_ms) / 1e3 / ITERATION_S > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
