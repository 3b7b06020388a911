#!/usr/bin/env python3
"""Measure what the memory takes of an iteration of the quick-start, with many items stored: draw, add, sample, stats.

    python -m scripts.bench.buffer                    65,536 items of the environment `compare`, 40 iterations
    python -m scripts.bench.buffer --items 1000 --iterations 5 --model tiny

The groups are the quick-start's: its questions and few shots, in tokens of its model, answered with short numbers. The
buffer has its default settings and commits to the disk before it answers. Nothing is played or trained.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.display import table
from rllib_srl.replay.buffer import SRLReplayBuffer
from rllib_srl.types import Group, Prompt, StopReason
from scripts.bench import common as bench

NUM_PROMPTS, GROUP_SIZE, NUM_VISITS, NUM_REUSES, NUM_HELD = 16, 8, 4, 4, 16
CHUNK = 256  # groups of a call that fills the buffer
MOST_SHARE = 0.005  # of an iteration's time
CALLS = ("draw_prompts", "add", "draw_groups", "draw_answers", "stats")


class Player:
    """Produces groups for the quick-start's prompts without a model: random numbers as answers."""

    def __init__(self, model_dir: Path, seed: int) -> None:
        """Use the tokenizer of the model in `model_dir`."""
        from rllib_srl.cli.quickstart import SETTINGS
        from rllib_srl.engine.model_dir import load_tokenizer
        from rllib_srl.envs.math.compare import Compare

        self._env = Compare(SETTINGS["env_config"])
        self._tokenizer = load_tokenizer(model_dir)
        self._fresh = self._env.prompt_ids("train", seed)
        self._generator = np.random.default_rng(seed)

    def fresh(self, num: int) -> list[Prompt]:
        """Return new prompts."""
        return [Prompt("compare", next(self._fresh), "compare") for _ in range(num)]

    def play(self, prompt: Prompt, group_id: str, version: int) -> Group:
        """Return a group of answers, some of them right."""
        text, _ = self._env.reset(options={"prompt_id": prompt.prompt_id})
        asked = self._tokenizer.encode(text)
        gold = self._env.gold_turns(prompt.prompt_id)[0]
        is_right_G = self._generator.random(GROUP_SIZE) < self._generator.random()
        wrong = [f" {number}\n" for number in self._generator.integers(10, 100, GROUP_SIZE)]
        answers = [self._tokenizer.encode(gold if right else other) for right, other in zip(is_right_G, wrong)]
        ids_N = np.concatenate([[*asked, *answer] for answer in answers]).astype(np.int32)
        mask_N = np.concatenate([np.arange(len(asked) + len(answer)) >= len(asked) for answer in answers])
        return Group(
            group_id=group_id,
            prompt=prompt,
            token_ids_N=ids_N,
            loss_mask_N=mask_N,
            behaviour_logp_N=np.where(mask_N, -self._generator.random(len(ids_N)), 0).astype(np.float32),
            offsets=np.concatenate([[0], np.cumsum([len(asked) + len(answer) for answer in answers])]),
            rewards_G=is_right_G.astype(np.float32),
            versions_G2=np.full((GROUP_SIZE, 2), version),
            stop_reasons=(StopReason.TERMINATED,) * GROUP_SIZE,
        )


def measure(
    model_dir: Path, directory: Path, num_items: int, num_iterations: int
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds and processor seconds of each call by name, one entry per iteration."""
    player = Player(model_dir, 0)
    buffer = SRLReplayBuffer(directory=directory, model_dir=model_dir)
    for start in range(0, num_items, CHUNK):
        prompts = player.fresh(min(CHUNK, num_items - start))
        buffer.add([player.play(prompt, f"{start}.{i}", 0) for i, prompt in enumerate(prompts)], 0)
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in CALLS}

    def timed(name: str, call: Any, *arguments: Any) -> Any:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        answer = call(*arguments)
        timings[name].append((time.perf_counter() - begin, time.process_time() - begin_cpu))
        return answer

    for now in range(1, num_iterations + 1):
        drawn = timed("draw_prompts", buffer.draw_prompts, NUM_VISITS, now, f"{now}.draw_prompts")
        prompts = [*drawn, *player.fresh(NUM_PROMPTS - len(drawn))]
        groups = [player.play(prompt, f"{now}.{i}.new", now) for i, prompt in enumerate(prompts)]
        timed("add", buffer.add, groups, now, f"{now}.add")
        timed("draw_groups", buffer.draw_groups, NUM_REUSES, now, f"{now}.draw_groups")
        timed("draw_answers", buffer.draw_answers, NUM_HELD, now, f"{now}.draw_answers")
        timed("stats", buffer.stats, now)
    buffer.close()
    return timings


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description="Time the memory's calls in an iteration.")
    parser.add_argument("--items", type=int, default=65_536, help="stored before measuring")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--iteration-s", type=float, default=3.0, help="seconds of a whole iteration on this machine")
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    bench.add_output(parser)
    arguments = parser.parse_args(argv)
    from rllib_srl.engine.models import local_model

    with tempfile.TemporaryDirectory() as directory:
        timings = measure(local_model(arguments.model), Path(directory), arguments.items, arguments.iterations)
    rows: list[tuple[str, ...]] = [("call", "ms", "ms of processor time")]
    rows += [(name, *(bench.spread([1e3 * times[at] for times in timings[name]]) for at in (0, 1))) for name in CALLS]
    counted = [name for name in CALLS if name not in ("draw_groups", "draw_answers")]
    share = sum(median(wall for wall, _ in timings[name]) for name in counted) / arguments.iteration_s
    print(table(rows, indent=""))
    print(f"{arguments.items:,} items: without reuse and retention {share:.2%} of an iteration of "
          f"{arguments.iteration_s:g} s; at most {MOST_SHARE:.1%}: {bench.verdict(share <= MOST_SHARE)}")  # fmt: skip
    print(bench.conditions("no model"))
    bench.write(arguments, timings | {"share": share})
    return 0 if share <= MOST_SHARE else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug=False))
