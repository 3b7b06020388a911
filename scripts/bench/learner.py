#!/usr/bin/env python3
"""Benchmark the learner's prefix tries against a padded Hugging Face step: speed, memory and processor utilisation.

    python -m scripts.bench.learner                       both shapes, SmolLM2-135M: about 15 minutes on a free core
    python -m scripts.bench.learner --shapes long --num-prompts 2

Both sides run in turns in one process on the same episodes, under the same load; bounds are on medians of the paired
ratios. Memory is measured in a fresh process per side: the peak of its resident size above weights, gradients and
optimiser state. The matmul rate is measured beside each step, at the shapes of the step.

    gain          seconds of the padded step / seconds of ours; ideal = padded tokens / unique tokens
    utilisation   FLOPs of unique tokens, forward and backward, recomputation not counted / seconds / matmul rate
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly
from scripts.bench import common as bench

LEAST_GAIN = 0.8  # of the ideal
MOST_MEMORY = 0.5  # of the padded side's
LEAST_UTILISATION = 0.55
MEMORY_TIMEOUT_S = 1800
SHAPES = ("fewshot", "long")


@dataclass
class Figures:
    """Results of one shape. Invariant: entry i of every list is of the same pair of runs."""

    shape: str
    ideal: float  # padded tokens over unique tokens
    tokens: dict[str, int]  # computed by each side, and the unique ones
    passes: dict[str, int]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"padded": [], "trie": []})
    utilisations: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def gains(self) -> list[float]:
        """Return the gain of each pair."""
        return [a / b for a, b in zip(self.seconds["padded"], self.seconds["trie"], strict=True)]

    @property
    def is_met(self) -> bool:
        """Return whether all three bounds hold."""
        memory = self.peak_bytes["trie"] / self.peak_bytes["padded"]
        gain = median(self.gains) / self.ideal
        return gain >= LEAST_GAIN and memory <= MOST_MEMORY and median(self.utilisations) >= LEAST_UTILISATION


def measure(shape: str, arguments: argparse.Namespace, dtype: str) -> Figures:
    """Time both sides of one shape in turns, after one warm-up of each."""
    from scripts.bench.learner_sides import SIDES, Count, Side, episodes_of_shape, matmul_rate

    parts = episodes_of_shape(shape, arguments.model, arguments.num_prompts)
    sides = {name: Side.load(name, arguments.model, dtype, arguments.budget) for name in SIDES}
    passes = {name: [one for part in parts for one in side.passes(part)] for name, side in sides.items()}
    tokens = {name: sum(one["token_ids"].size for one in ones) for name, ones in passes.items()}
    counts = [Count.of(part) for part in parts]
    tokens["unique"] = sum(count.num_tokens for count in counts)
    ideal = tokens["padded"] / tokens["unique"]
    figures = Figures(shape, ideal, tokens, {name: len(ones) for name, ones in passes.items()})
    config = sides["trie"].model.config
    for side in sides.values():
        side.gradients(parts[0], at_most=1)
    runs = arguments.repeats if len(parts) == 1 else 1
    for part, count in zip(parts * runs, counts * runs, strict=True):
        rates = []
        for name, side in sides.items():
            rates.append(matmul_rate(config, count, dtype))
            figures.seconds[name].append(side.gradients(part))
        rates.append(matmul_rate(config, count, dtype))
        figures.rates.append((rates[1] + rates[2]) / 2)  # right before and after our step
        figures.utilisations.append(count.flops(config) / figures.seconds["trie"][-1] / figures.rates[-1])
    return figures


def peak_above_state(side: str, shape: str, arguments: argparse.Namespace, dtype: str) -> int:
    """Return the peak resident bytes of a step above weights, gradients and optimiser state."""
    import torch

    from scripts.bench.learner_sides import Side, episodes_of_shape

    part = episodes_of_shape(shape, arguments.model, arguments.num_prompts)[0]
    one = Side.load(side, arguments.model, dtype, arguments.budget)
    for parameter in one.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-9)
    torch.optim.AdamW(one.model.parameters(), fused=True).step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _resident("VmRSS")
    one.gradients(part, at_most=2)  # later passes are like these
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}; expected Linux")


def peaks(shape: str, arguments: argparse.Namespace, dtype: str) -> dict[str, int]:
    """Measure each side in a process of its own."""
    found = {}
    for side in ("padded", "trie"):
        command = [sys.executable, "-m", "scripts.bench.learner", "--peak-of", side, "--shapes", shape]
        command += ["--model", arguments.model, "--budget", str(arguments.budget), "--dtype", dtype]
        command += ["--num-prompts", str(arguments.num_prompts)] if arguments.num_prompts else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"the process that measures memory failed: {done.stderr.strip()[-500:]}")
        found[side] = int(done.stdout.split()[-1])
    return found


def lines(figures: Figures, budget: int) -> list[str]:
    """Return the lines to print for one shape."""
    tokens, gain = figures.tokens, median(figures.gains)
    seconds = {name: sum(figures.seconds[name]) for name in figures.seconds}
    memory = figures.peak_bytes["trie"] / figures.peak_bytes["padded"]
    mib = {name: peak / 2**20 for name, peak in figures.peak_bytes.items()}
    ratios = [one / figures.ideal for one in figures.gains]
    utilisation = median(figures.utilisations)
    return [
        f"{figures.shape}: {tokens['padded']} padded tokens in {figures.passes['padded']} passes of at most {budget}, "
        f"{tokens['trie']} in {figures.passes['trie']} of ours, {tokens['unique']} unique",
        f"  seconds      padded {seconds['padded']:.1f}, trie {seconds['trie']:.1f} over {len(ratios)} pairs",
        f"  gain         {bench.spread(figures.gains, 1)}, ideal {figures.ideal:.1f}",
        f"  of the ideal {bench.spread(ratios)}; at least {LEAST_GAIN}: {bench.verdict(gain / figures.ideal >= 0.8)}",
        f"  peak memory  padded {mib['padded']:.0f} MiB, trie {mib['trie']:.0f} MiB: {memory:.2f}; "
        f"at most {MOST_MEMORY}: {bench.verdict(memory <= MOST_MEMORY)}",
        f"  utilisation  {bench.spread(figures.utilisations)} of {bench.spread([r / 1e9 for r in figures.rates], 0)} "
        f"GFLOP/s; at least {LEAST_UTILISATION}: {bench.verdict(utilisation >= LEAST_UTILISATION)}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a bound is missed."""
    from rllib_srl.algorithm.resources import best_dtype

    parser = argparse.ArgumentParser(description="Prefix tries against a padded Hugging Face step.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--budget", type=int, default=4096, help="tokens of one pass on both sides")
    parser.add_argument("--num-prompts", type=int, help="default: 16 of few-shot, 8 of long")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs per shape")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=best_dtype(0))
    parser.add_argument("--peak-of", choices=("padded", "trie"), help="measure this side's memory in this process")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of transformers")
    arguments = parser.parse_args(argv)
    if arguments.peak_of:
        print(peak_above_state(arguments.peak_of, arguments.shapes[0], arguments, arguments.dtype))
        return 0
    found: list[Figures] = []
    for shape in arguments.shapes:
        figures = measure(shape, arguments, arguments.dtype)
        figures.peak_bytes = peaks(shape, arguments, arguments.dtype)
        print("\n".join(lines(figures, arguments.budget)), flush=True)
        found.append(figures)
    print(bench.conditions(arguments.dtype))
    print("GPU: not measured by this script")
    bench.write(arguments, {one.shape: {**vars(one), "gains": one.gains} for one in found})
    return 0 if all(one.is_met for one in found) else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
