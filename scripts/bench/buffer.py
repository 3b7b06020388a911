#!/usr/bin/env python3
"""Benchmark the replay buffer: group draws against two other buffers, scaling with items, cost per iteration, disk.

    python -m scripts.bench.buffer                       all four sections
    python -m scripts.bench.buffer --sections draw       one of: draw, size, iteration, journal
    python -m scripts.bench.buffer --short               small sizes, seconds

    draw        whole groups into one contiguous batch, beside RLlib's prioritised buffer and cpprb's, also in actors
    size        due, sample, add and review with a million items beside ten thousand; bytes per item
    iteration   all calls of the buffer's actor in one iteration of the quick-start
    journal     durable commits beside a plain append (scripts/bench/journal.py)

All sides of a ratio run in turns, and a ratio is the median over repeats. A draw of ours is durable before it is
answered, while the others' draws are lost with their process; the gap between wall and processor time is the wait for
the disk. cpprb is needed for this script only: `pip install cpprb`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.display import table
from rllib_srl.replay.store.records import GROUP, ITEM
from scripts.bench import buffer_iteration, buffer_sides, buffer_sizes
from scripts.bench import common as bench
from scripts.bench import journal as bench_journal

SECTIONS = ("draw", "size", "iteration", "journal")
NUM_EPISODES = 8
LEAST_RLLIB, LEAST_CPPRB = 20.0, 1.0  # our tokens a second over theirs
MOST_GROWTH = 2.0  # of a call's time from the small to the large buffer
MOST_STATE = 384  # bytes of an item with the columns of one group; the dictionary of keys takes 110 of them
MOST_BUSY = 20.0  # milliseconds an iteration


@dataclass(frozen=True)
class Plan:
    """The sizes of a measurement."""

    num_stored: int = 1024  # groups
    num_drawn: tuple[int, ...] = (16, 256)  # groups in a draw; the bounds are about the last
    num_tokens: int = 1024  # of an episode
    num_repeats: int = 9
    num_small: int = 10_000  # items
    num_large: int = 1_000_000
    num_iterations: int = 40
    megabytes: int = 300  # of the journal


SHORT = Plan(32, (2, 8), 64, 3, 500, 2000, 6, 2)


@dataclass
class Draws:
    """Rates in million tokens a second. Invariant: entry i of every list is of the same repeat."""

    num_drawn: int
    rates: dict[str, list[float]] = field(default_factory=dict)  # "side" or "side, actor"
    cpu_rates: dict[str, list[float]] = field(default_factory=dict)  # by processor time of this process

    def ratios(self, side: str, where: str = "") -> list[float]:
        """Return our rate over that of a side, here or in actors, one per repeat."""
        return [a / b for a, b in zip(self.rates[f"ours{where}"], self.rates[f"{side}{where}"], strict=True)]


def sides_of(groups: Sequence[Any], directory: str, say: Callable[[str], None]) -> dict[str, buffer_sides.Side]:
    """Return every available side, filled; print why another is not available."""
    kinds: dict[str, Any] = {"rllib, a row a token": buffer_sides.RLlibTokens, "rllib": buffer_sides.RLlibTurns}
    try:
        import cpprb  # noqa: F401

        kinds["cpprb"] = buffer_sides.Cpprb
    except ImportError as error:
        say(f"cpprb is left out: {error}; expected `pip install cpprb`, which this script alone needs")
    try:
        import torchrl.data  # noqa: F401

        say("TorchRL is installed and skipped: it has no side here")
    except (ImportError, OSError, RuntimeError) as error:
        say(f"TorchRL is skipped: it cannot be imported: {error}")
    sides: dict[str, buffer_sides.Side] = {"ours": buffer_sides.Ours(groups, directory)}
    sides |= {name: kind(groups) for name, kind in kinds.items()}
    sides["ours, actor"] = buffer_sides.OursInActor(groups, directory)
    sides |= {f"{name}, actor": buffer_sides.InActor(kind, groups) for name, kind in kinds.items()}
    return sides


def measure_draws(plan: Plan, directory: str, say: Callable[[str], None]) -> list[Draws]:
    """Let all sides draw in turns, after one draw each to warm up."""
    generator = np.random.default_rng(0)
    groups = [buffer_sides.made_group(i, NUM_EPISODES, plan.num_tokens, generator) for i in range(plan.num_stored)]
    sides, found = sides_of(groups, directory, say), []
    try:
        for num_drawn in plan.num_drawn:
            draws, batch = Draws(num_drawn), buffer_sides.Batch.of(NUM_EPISODES * num_drawn, plan.num_tokens)
            for repeat in range(-1, plan.num_repeats):
                names = list(sides) if repeat % 2 else list(sides)[::-1]
                for name in names:
                    begin, begin_cpu = time.perf_counter(), time.process_time()
                    num_tokens = sides[name].copy(sides[name].take(num_drawn), batch)
                    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
                    if repeat >= 0:
                        draws.rates.setdefault(name, []).append(num_tokens / seconds / 1e6)
                        draws.cpu_rates.setdefault(name, []).append(num_tokens / cpu / 1e6)
            found.append(draws)
    finally:
        for side in sides.values():
            side.close()
    return found


def lines_of_draws(found: Sequence[Draws], plan: Plan) -> tuple[list[str], bool]:
    """Return the rates as lines, and whether the bounds hold."""
    rows: list[tuple[str, ...]] = [("million tokens/s", *(f"{d.num_drawn} groups" for d in found), "by processor time")]
    for name in found[-1].rates:
        cpu = "" if name.endswith("actor") else bench.spread(found[-1].cpu_rates[name])
        rows.append((name, *(bench.spread(draws.rates[name]) for draws in found), cpu))
    size = f"{NUM_EPISODES} episodes x {plan.num_tokens} tokens"
    out, is_met = [f"draw    groups of {size}, {plan.num_stored} stored, copied into one batch", table(rows, "")], True
    bounds = {"rllib, a row a token": LEAST_RLLIB, "rllib": LEAST_RLLIB, "cpprb": LEAST_CPPRB}
    for where in ("", ", actor"):
        for side, least in bounds.items():
            if side + where in found[-1].rates:
                ratios = found[-1].ratios(side, where)
                is_fine = median(ratios) >= least
                is_met &= is_fine
                out.append(f"  ours over {side + where}: {bench.spread(ratios)}; at least {least:g}: {_met(is_fine)}")
    return out, is_met


def lines_of_sizes(sizes: buffer_sizes.Sizes) -> tuple[list[str], bool]:
    """Return the costs at both sizes as lines, and whether the bounds hold."""
    columns = ("", f"{sizes.num_small:,} items", f"{sizes.num_large:,} items", "ratio", "of processor time", "")
    rows: list[tuple[str, ...]] = [columns]
    is_met = True
    for name in buffer_sizes.CALLS:
        small, large = (f"{1e3 * median(times):.2f} ms" for times in sizes.wall[name])
        is_fine = min(sizes.ratio(name), sizes.ratio(name, of_cpu=True)) <= MOST_GROWTH
        is_met &= is_fine
        ratios = (f"{sizes.ratio(name):.2f}", f"{sizes.ratio(name, of_cpu=True):.2f}")
        rows.append((name, small, large, *ratios, _met(is_fine)))
    is_fine = sizes.state_bytes <= MOST_STATE
    return [
        f"size    due {buffer_sizes.NUM_VISITS}, sample {buffer_sizes.NUM_REUSES}, add and review "
        f"{buffer_sizes.NUM_PLAYED}; small groups, on disk until drawn; no vectors; at most {MOST_GROWTH:g} times",
        table(rows, ""),
        f"  state of an item {sizes.state_bytes:.0f} bytes (a row of {ITEM.itemsize}, columns and key); "
        f"at most {MOST_STATE}: {_met(is_fine)}; a group adds {GROUP.itemsize}",
        f"  memory of the process {sizes.resident_bytes:.0f} bytes an item with one group, its prompt aside (which "
        f"takes {sizes.prompt_bytes:.0f}); filled in {sizes.fill_s:.0f} s, opened in {sizes.open_s:.0f} s",
    ], is_met and is_fine


def lines_of_iterations(found: buffer_iteration.Iterations, model: str) -> tuple[list[str], bool]:
    """Return the cost of an iteration as lines, and whether the bound holds."""
    is_fine = median(found.busy) <= MOST_BUSY
    return [
        f"iteration  {buffer_iteration.NUM_PROMPTS} prompts x {buffer_iteration.GROUP_SIZE} episodes of "
        f"{found.num_tokens:.0f} tokens ({model}), {buffer_iteration.NUM_VISITS} revisits, "
        f"{buffer_iteration.NUM_REUSES} reused; medians of {len(found.busy)}",
        f"  busy    {bench.spread(found.busy, 1)} ms: {buffer_iteration.summary(found)}; "
        f"at most {MOST_BUSY:g}: {_met(is_fine)}",
        f"  of that {bench.spread(found.cpu, 1)} ms of processor time; the driver waits "
        f"{bench.spread(found.waited, 1)} ms",
    ], is_fine


def run_journal(plan: Plan, directory: str, say: Callable[[str], None]) -> tuple[dict[str, float], bool]:
    """Run the journal's benchmark; return its ratios by tokens of an episode, and whether the bound holds."""
    ratios = {}
    for num_tokens in (120, 1024):
        with tempfile.TemporaryDirectory(dir=directory, prefix=".bench_journal_") as place:
            times = bench_journal.measure(Path(place), num_tokens, plan.megabytes * 10**6, 20)
        say("journal " + bench_journal.report(num_tokens, times))
        ratios[str(num_tokens)] = times.ratio()
    return ratios, min(ratios.values()) >= bench_journal.LEAST_RATIO


def run(sections: Sequence[str], plan: Plan, arguments: argparse.Namespace, say: Callable[[str], None]) -> Any:
    """Run sections; return the figures of each, and whether each section's bounds hold."""
    figures: dict[str, Any] = {}
    is_met: dict[str, bool] = {}
    if {"draw", "iteration"} & set(sections):
        start_ray(arguments.verbose)
    if "draw" in sections:
        draws = measure_draws(plan, str(arguments.directory), say)
        out, is_met["draw"] = lines_of_draws(draws, plan)
        say("\n".join(out))
        figures["draw"] = [asdict(one) for one in draws]
    if "size" in sections:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix=".bench_buffer_") as place:
            sizes = buffer_sizes.measure(Path(place), plan.num_small, plan.num_large, plan.num_iterations)
        out, is_met["size"] = lines_of_sizes(sizes)
        say("\n".join(out))
        figures["size"] = asdict(sizes)
    if "iteration" in sections:
        from rllib_srl.engine.models import local_model

        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix=".bench_buffer_") as place:
            iterations = buffer_iteration.measure(local_model(arguments.model), Path(place), plan.num_iterations)
        out, is_met["iteration"] = lines_of_iterations(iterations, arguments.model)
        say("\n".join(out))
        figures["iteration"] = asdict(iterations)
    if "journal" in sections:
        figures["journal"], is_met["journal"] = run_journal(plan, str(arguments.directory), say)
    return figures, is_met


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description="Measure the buffer: draws, sizes, an iteration, the journal.")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--short", action="store_true", help="small sizes, as a smoke test")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer the iteration needs")
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the disk to be measured")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray and transformers")
    arguments = parser.parse_args(argv)

    def say(line: str) -> None:
        print(line, flush=True)

    figures, is_met = run(arguments.sections, SHORT if arguments.short else Plan(), arguments, say)
    say(bench.conditions("float32"))
    bench.write(arguments, "buffer", {**figures, "is_met": is_met})
    return 0 if all(is_met.values()) else 1


def _met(is_fine: bool) -> str:
    return bench.verdict(is_fine)


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
