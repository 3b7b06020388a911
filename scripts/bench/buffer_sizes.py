"""Measure how the buffer's calls scale: the same calls on a small and on a large buffer, in turns.

A journal is filled in bulk and opened like any other; after that only the buffer's own calls are made. Groups are
small and on disk. Half of the items are scheduled, half wait; all groups may be drawn. Vectors are left out:
scripts/bench/novelty.py measures their search.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.replay.journal.codec import encode
from rllib_srl.replay.journal.journal import Commit, Journal
from rllib_srl.replay.journal.transaction import JOURNAL
from rllib_srl.replay.store.records import GROUP, ITEM, SCHEDULED, WAITING, Header, key_of
from rllib_srl.types import Group, Prompt
from scripts.bench.buffer_sides import SETTINGS, made_group

CALLS = ("due", "sample", "add", "review")
NUM_VISITS, NUM_REUSES, NUM_PLAYED = 4, 5, 16  # of an iteration of the quick-start
NOW = 1000  # iteration in which the measuring begins
CHUNK = 10_000
SPAN = 2000  # iterations over which due dates are spread


@dataclass
class Sizes:
    """The measured times and sizes. Invariant: entry i of every list of one call is of the same iteration."""

    num_small: int
    num_large: int
    wall: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [[], []] for name in CALLS})
    cpu: dict[str, list[list[float]]] = field(default_factory=lambda: {name: [[], []] for name in CALLS})
    state_bytes: float = 0.0  # of an item: row, columns and key
    resident_bytes: float = 0.0  # an item's, of the large buffer's process, prompts aside
    prompt_bytes: float = 0.0  # an item's prompt
    fill_s: float = 0.0
    open_s: float = 0.0

    def ratio(self, name: str, of_cpu: bool = False) -> float:
        """Return the median time of a call on the large buffer over that on the small one."""
        small, large = (self.cpu if of_cpu else self.wall)[name]
        return median(large) / median(small)


def fill(directory: Path, num_items: int, span: int = SPAN) -> None:
    """Write a journal of `num_items` items with one group each, their due dates spread over `span` iterations."""
    generator = np.random.default_rng(0)
    empty = opened(directory, num_items)
    empty.due(0, 1)  # so that the journal holds a whole state
    empty.close()
    group = made_group(0, 2, 4, generator)
    payload = encode(group)
    with Journal(directory / JOURNAL, ITEM, GROUP, is_durable=False) as journal:
        for start in range(0, num_items, CHUNK):
            numbers = range(start, min(start + CHUNK, num_items))
            prompts = {n: Prompt("bench", str(n), "bench") for n in numbers}
            journal.commit(
                Commit(
                    items=dict(zip(numbers, _items(prompts, generator, span))),
                    prompts=prompts,
                    groups=dict(zip(numbers, _groups(np.array(numbers), group, len(payload)))),
                    payloads=dict.fromkeys(numbers, payload),
                )
            )
            journal.tidy()
        journal.commit(Commit(state={"store": Header(num_items, num_items, ("bench",)).to_json()}))


def opened(directory: Path, num_items: int) -> SRLReplayBuffer:
    """Open a buffer with room for the items that the measurement adds."""
    return SRLReplayBuffer(directory=directory, capacity=2 * num_items + 8192, **SETTINGS)


def _items(prompts: dict[int, Prompt], generator: np.random.Generator, span: int) -> np.ndarray:
    num = len(prompts)
    rows_N = np.zeros(num, ITEM)
    rows_N["key"] = [key_of(prompt) for prompt in prompts.values()]
    rows_N["seq"] = list(prompts)
    rows_N["status"] = np.where(rows_N["seq"] % 2, SCHEDULED, WAITING)
    rows_N["interval"] = rows_N["stability"] = generator.uniform(1, span, num)
    rows_N["difficulty"] = 5
    rows_N["last_review"] = rows_N["created"] = NOW - 1 - generator.integers(0, NOW // 2, num)
    rows_N["due"] = rows_N["last_review"] + rows_N["interval"]
    rows_N["reps"] = rows_N["visits"] = rows_N["streak"] = rows_N["num_groups"] = 1
    rows_N["alpha"], rows_N["beta"] = generator.uniform(0.5, 8, (2, num))
    rows_N["group_size"], rows_N["num_success"] = 8, generator.integers(0, 9, num)
    rows_N["pass_rate"] = rows_N["reward"] = rows_N["num_success"] / 8
    rows_N["variance"], rows_N["nll"], rows_N["diversity"] = 0.1, 0.5, generator.random(num)
    return rows_N


def _groups(slots_N: np.ndarray, group: Group, num_bytes: int) -> np.ndarray:
    rows_N = np.zeros(len(slots_N), GROUP)
    rows_N["seq"] = rows_N["slot"] = slots_N
    rows_N["born"], rows_N["num_bytes"], rows_N["size"] = NOW - 1, num_bytes, group.size
    rows_N["num_success"], rows_N["reward"], rows_N["variance"], rows_N["abs_advantage"] = 1, 0.5, 0.25, 0.7
    rows_N["num_tokens"], rows_N["num_loss_tokens"] = len(group.token_ids_N), int(group.loss_mask_N.sum())
    return rows_N


def measure(directory: Path, num_small: int, num_large: int, num_iterations: int) -> Sizes:
    """Time the calls of some iterations on both buffers, in turns."""
    sizes = Sizes(num_small, num_large)
    buffers = []
    for num in (num_small, num_large):
        begin = time.perf_counter()
        fill(directory / str(num), num)
        filled, before = time.perf_counter(), resident()
        buffers.append(opened(directory / str(num), num))
        sizes.fill_s, sizes.open_s = filled - begin, time.perf_counter() - filled
    store = buffers[1].store
    some = range(0, num_large, -(-num_large // 1000))
    sizes.prompt_bytes = _bytes_of_prompts([store.prompt_of(slot) for slot in some])
    sizes.resident_bytes = (resident() - before) / num_large - sizes.prompt_bytes
    sizes.state_bytes = store.nbytes / num_large - GROUP.itemsize
    gc.freeze()  # else a collection in a call on the small buffer would traverse the large one's prompts
    runs = [calls(buffer, num) for buffer, num in zip(buffers, (num_small, num_large), strict=True)]
    warm_up = max(1, num_iterations // 4)
    for iteration in range(warm_up + num_iterations):
        order = (0, 1) if iteration % 2 else (1, 0)
        for which in order:
            for name, (wall, cpu) in next(runs[which])[0].items():
                if iteration >= warm_up:
                    sizes.wall[name][which].append(wall)
                    sizes.cpu[name][which].append(cpu)
    for buffer in buffers:
        buffer.close()
    gc.unfreeze()
    return sizes


def calls(buffer: SRLReplayBuffer, num_items: int) -> Iterator[tuple[dict[str, tuple[float, float]], list[str]]]:
    """Yield one iteration after another: seconds and processor seconds of each call by name, and what was drawn."""
    generator = np.random.default_rng(1)
    now, fresh = NOW, num_items
    while True:
        now += 1
        prompts, due = timed(buffer.due, NUM_VISITS, now, f"{now}.due")
        played = [made_group(int(prompt.prompt_id), 8, 16, generator, now) for prompt in prompts]
        played += [made_group(fresh + i, 8, 16, generator, now) for i in range(NUM_PLAYED - len(played))]
        fresh += NUM_PLAYED
        _, add = timed(buffer.add, played, now, f"{now}.add")
        reused, sample = timed(buffer.sample, NUM_REUSES, now, f"{now}.sample")
        keys = [Prompt("bench", str(n)).key for n in generator.choice(num_items, NUM_PLAYED, replace=False).tolist()]
        _, review = timed(buffer.rate, dict.fromkeys(keys, 0.8), now, f"{now}.rate")
        buffer.tidy()
        drawn = [prompt.prompt_id for prompt in prompts] + [group.prompt.prompt_id for group in reused]
        yield {"due": due, "sample": sample, "add": add, "review": review}, drawn


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, tuple[float, float]]:
    """Return what a call returns, and its seconds and processor seconds."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = call(*arguments)
    return result, (time.perf_counter() - begin, time.process_time() - begin_cpu)


def resident() -> int:
    """Return the resident bytes of this process, after releasing what can be released."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bytes_of_prompts(prompts: list[Prompt]) -> float:
    """Return the mean bytes per prompt; shared objects count once."""
    parts: dict[int, Any] = {}
    for prompt in prompts:
        for part in (prompt, vars(prompt), *vars(prompt).values(), *prompt.history):
            parts[id(part)] = part
    return sum(map(sys.getsizeof, parts.values())) / len(prompts)
