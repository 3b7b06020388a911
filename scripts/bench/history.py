"""Measure what the history of prompts and its baseline add to an iteration of the quick-start: 16 groups of 8.

    python -m scripts.bench.history                 a memory of 65,536 items
    python -m scripts.bench.history --items 2000    a quick look

History is timed inside the buffer's `add`: reading it before the call, updating items and domains, and its share of the
state of three commits. The baseline is timed beside that of `advantage="group"`, for the same batch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np

from rllib_srl.batch.advantage_estimator import AdvantageEstimator
from rllib_srl.losses import LossSettings
from rllib_srl.replay.history import after_visit
from rllib_srl.replay.visits import Visit
from rllib_srl.types import Group, GroupMeta, Prompt
from scripts.bench.buffer_sides import made_group
from scripts.bench.buffer_sizes import NOW, fill, opened
from scripts.bench.common import add_output, verdict, write

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 16, 8, 12
COMMITS = 3  # of an iteration: due, add, sample
ITERATION_S = 2.0  # of the quick-start, on two cores
MOST = 0.005  # share of an iteration that history and baseline may take


@dataclass
class Times:
    """Milliseconds an iteration. Invariant: entry i of every list is of the same iteration."""

    add: list[float] = field(default_factory=list)  # the whole call
    history: list[float] = field(default_factory=list)  # the part of it that is history, and `COMMITS` states
    posterior: list[float] = field(default_factory=list)
    group: list[float] = field(default_factory=list)

    @property
    def added(self) -> float:
        """Return the median milliseconds that history and baseline add."""
        return median(self.history) + max(0.0, median(self.posterior) - median(self.group))


def measure(directory: Path, num_items: int, num_iterations: int) -> Times:
    """Time iterations of a buffer of `num_items`, half of whose groups are of stored prompts."""
    fill(directory, num_items)
    buffer, times, generator = opened(directory, num_items), Times(), np.random.default_rng(0)
    for iteration in range(num_iterations + 2):  # two to warm up
        groups = [_group(num_items, iteration, n, generator) for n in range(NUM_GROUPS)]
        history: list[float] = []
        own: dict[str, Callable[..., Any]]
        own = {"histories": buffer.ingestion.histories, "_note": buffer.ingestion._note}
        with mock.patch("rllib_srl.replay.ingest.after_visit", _timed(after_visit, history)):
            vars(buffer.ingestion).update({name: _timed(method, history) for name, method in own.items()})
            begin = time.perf_counter()
            visits = buffer.add(groups, NOW + iteration)
            added = 1e3 * (time.perf_counter() - begin)
            for name in own:
                del vars(buffer.ingestion)[name]
        states: list[float] = []
        _timed(buffer.domain_statistics.get_state, states)()
        batch = [_estimated(rule, groups, visits) for rule in ("posterior", "group")]
        if iteration >= 2:
            times.add.append(added)
            times.history.append(sum(history) + COMMITS * states[0])
            times.posterior.append(batch[0])
            times.group.append(batch[1])
    buffer.close()
    return times


def _group(num_items: int, iteration: int, n: int, generator: np.random.Generator) -> Group:
    number = (iteration * NUM_GROUPS + n) % num_items + (num_items if n % 2 else 0)  # every second one is new
    group = made_group(number, GROUP_SIZE, NUM_TOKENS, generator)
    versions = np.full((GROUP_SIZE, 2), NOW + iteration)
    return replace(
        group, group_id=f"{NOW + iteration}.{n}", prompt=Prompt("bench", str(number), "bench"), versions_G2=versions
    )


def _timed(method: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            into.append(1e3 * (time.perf_counter() - begin))

    return timed


def _estimated(rule: str, groups: Sequence[Group], visits: Sequence[Visit]) -> float:
    """Return the milliseconds of one estimate."""
    estimator = AdvantageEstimator(LossSettings.made(advantage=rule), 0.9, seed=0)
    metas = [GroupMeta.of(group, group) for group in groups]
    rewards = estimator.shaped_rewards(metas, 1)
    histories = [visit.history for visit in visits] if rule == "posterior" else []
    times: list[float] = []
    _timed(estimator.estimate, times)(metas, rewards, None, [()] * len(metas), [], {}, histories)
    return times[0]


def summary(times: Times, num_items: int) -> str:
    """Return both sides and the share of an iteration."""
    share = times.added / 1e3 / ITERATION_S
    return (
        f"{num_items} items, medians of {len(times.add)} iterations in ms: add {median(times.add):.2f}, of it history "
        f"{median(times.history):.2f}; advantages of posterior {median(times.posterior):.2f}, of group "
        f"{median(times.group):.2f}\nhistory and baseline add {times.added:.2f} ms, {share:.2%} of an iteration of "
        f"{ITERATION_S:g} s; at most {MOST:.1%}: {verdict(share <= MOST)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the summary; return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--items", type=int, default=65_536)
    parser.add_argument("--iterations", type=int, default=40)
    add_output(parser)
    arguments = parser.parse_args(argv)
    for name in ("items", "iterations"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} = {getattr(arguments, name)}; expected at least 1")
    with tempfile.TemporaryDirectory(prefix="rllib_srl_bench_") as directory:
        times = measure(Path(directory) / "memory", arguments.items, arguments.iterations)
    print(summary(times, arguments.items))
    write(arguments, "history", {**vars(times), "added": times.added})
    return int(times.added / 1e3 / ITERATION_S > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
