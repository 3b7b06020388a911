#!/usr/bin/env python3
"""Break down the time of one iteration, and compare the verified weight sync with a plain transfer of its bytes.

    python -m scripts.bench.step              the quick-start's configuration

After each iteration the bytes of one weight bundle are transferred once through the object store, `ray.put` here and
`ray.get` in another process, so that both sides of the ratio run under the same load. That `get` copies nothing: the
bytes stay in shared memory. So a second transfer is timed in which the receiver also copies them into its own memory,
as an engine must. The sync does more than either: it casts and packs, verifies every tensor's checksum, prepacks the
engine's layers and compares two policies on the canary.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly, start_ray
from rllib_srl.cli.shared.display import table
from scripts.bench import common as bench

MOST_TRIES = 3  # iterations played for each one measured
MOST_MOVES = 4.0  # the sync's time, in plain moves of its bytes
CANARY = ("learner_canary_s", "engine_canary_s")
SYNC = ("pack_s", "put_s", "get_s", "load_s", *CANARY)
ENGINE = ("get_s", "load_s", "engine_canary_s")  # in the engine's process
LEARN = ("layout_s", "forward_backward_s", "reduce_s", "optimizer_s")
PLAY = ("engine_s", "environment_s")


@dataclass
class Steps:
    """The measured times. Invariant: entry i of every list is of the same iteration."""

    num_bytes: int  # of one weight bundle, and of one plain move
    dtype: str
    parts: list[dict[str, float]] = field(default_factory=list)  # "part" or "part: detail" -> seconds
    moves: list[float] = field(default_factory=list)  # seconds of a plain move
    landings: list[float] = field(default_factory=list)  # the same with a copy into the receiver's own memory
    num_tokens: list[dict[str, int]] = field(default_factory=list)  # generated, trained on, computed

    @property
    def sync_ratios(self) -> list[float]:
        """Return sync time over transfer time, one per iteration."""
        return self.ratios(self.moves)

    def ratios(self, moves: Sequence[float], with_canary: bool = True) -> list[float]:
        """Return the sync over some transfers, with or without the time that it waits for the canary of both sides."""
        left_out = () if with_canary else CANARY
        syncs = [parts["sync"] - sum(parts[f"sync: {name}"] for name in left_out) for parts in self.parts]
        return [sync / move for sync, move in zip(syncs, moves, strict=True)]


def measure(settings: Mapping[str, Any], num_iterations: int, verbose: bool) -> Steps:
    """Train for some iterations after a warm-up, with a plain transfer after each."""
    import ray

    from rllib_srl.engine import pack

    start_ray(verbose)
    algo = bench.quickstart_config(**settings).build_algo()
    try:
        learner = algo.learner_group._learner
        dtype = algo.config.compute_dtype
        payload = pack(learner.model.named_parameters(), 0, dtype).buffer
        steps, reader = Steps(payload.nbytes, dtype), ray.remote(num_cpus=0)(Reader).remote()
        for attempt in range(1 + MOST_TRIES * num_iterations):
            result = algo.train()
            move, landing = (seconds_to_move(payload, reader, copies) for copies in (False, True))
            # The first one warms up; one without signal neither learns nor syncs, and RLlib reports NaN for it.
            if attempt > 0 and not math.isnan(result.get("weight_sync", {}).get("pack_s", math.nan)):
                steps.parts.append(parts_of(result))
                steps.moves.append(move)
                steps.landings.append(landing)
                steps.num_tokens.append(tokens_of(result))
            if len(steps.parts) == num_iterations:
                return steps
        raise RuntimeError(f"{len(steps.parts)} of {attempt} iterations had signal; expected {num_iterations}")
    finally:
        algo.stop()


class Reader:
    """The receiving process of a plain transfer."""

    def take(self, refs: list[Any], copies: bool) -> int:
        """Return the bytes of what lies behind the one reference in `refs`, copied out of shared memory or not."""
        import ray

        received = ray.get(refs[0])
        num_bytes: int = (received.copy() if copies else received).nbytes
        return num_bytes


def seconds_to_move(payload: Any, reader: Any, copies: bool) -> float:
    """Return the seconds to transfer `payload` from here to another process."""
    import ray

    start = time.perf_counter()
    received = ray.get(reader.take.remote([ray.put(payload)], copies), timeout=300)
    seconds = time.perf_counter() - start
    if received != payload.nbytes:
        raise RuntimeError(f"{received} bytes arrived; expected {payload.nbytes}")
    return seconds


def parts_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds by part: whole parts, and of some their details and the remainder."""
    timers, played = result["timers"], result["env_runners"]
    learned, synced = result["learners"]["default_policy"], result["weight_sync"]
    whole = {name: float(timers[name]) for name in ("rollout", "batch", "learn", "sync")}
    whole["batch"] += float(timers["plan"])
    synced = {name: float(synced[name]) for name in SYNC}
    # The learner scores while the engines work: only what it takes beyond them is time of the sync.
    synced["learner_canary_s"] = max(0.0, synced["learner_canary_s"] - sum(synced[name] for name in ENGINE))
    details = {"rollout": (PLAY, played), "batch": ((), {}), "learn": (LEARN, learned), "sync": (SYNC, synced)}
    parts: dict[str, float] = {}
    for name, seconds in whole.items():
        parts[name] = seconds
        names, source = details[name]
        parts |= {f"{name}: {detail}": float(source[detail]) for detail in names}
        if names:
            parts[f"{name}: rest"] = seconds - sum(float(source[detail]) for detail in names)
    parts["other"] = float(result["time_this_iter_s"]) - sum(whole.values())
    return parts


def tokens_of(result: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that were generated, trained on, and computed by the learner."""
    learned = result["learners"]["default_policy"]
    return {
        "generated": int(result["env_runners"]["num_generated_tokens"]),
        "trained": int(learned["num_tokens"]),
        "computed": int(learned["num_computed_tokens"]),
    }


def lines(steps: Steps, most: float) -> list[str]:
    """Return the table of parts, and the sync's ratio."""
    middle = {name: median(parts[name] for parts in steps.parts) for name in steps.parts[0]}
    total = sum(seconds for name, seconds in middle.items() if ":" not in name)
    rows = [
        (
            ("  " + name.split(": ")[1].removesuffix("_s")) if ":" in name else name,
            f"{seconds:.2f}",
            f"{seconds / total:.1%}",
        )
        for name, seconds in middle.items()
    ]
    tokens = {name: f"{median(one[name] for one in steps.num_tokens):g}" for name in steps.num_tokens[0]}
    ratio = median(steps.sync_ratios)
    return [
        table([("part", "seconds", "share"), *rows, ("all", f"{total:.2f}", "100.0%")], ""),
        f"medians over {len(steps.parts)} iterations; tokens an iteration: "
        + ", ".join(f"{number} {name}" for name, number in tokens.items()),
        f"moving {steps.num_bytes / 2**20:.0f} MiB once through the object store: {bench.spread(steps.moves, 3)} s, "
        f"and into the receiver's own memory: {bench.spread(steps.landings, 3)} s",
        f"sync over move: {bench.spread(steps.sync_ratios, 1)}; at most {most:g}: {bench.verdict(ratio <= most)}",
        f"  without the canary {bench.spread(steps.ratios(steps.moves, False), 1)}",
        f"sync over move into own memory: {bench.spread(steps.ratios(steps.landings), 1)}",
        f"  without the canary {bench.spread(steps.ratios(steps.landings, False), 1)}",
        bench.conditions(steps.dtype),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the sync takes too long."""
    parser = argparse.ArgumentParser(description="Split one iteration of the quick-start into its parts.")
    parser.add_argument("--model", help="default: the quick-start's")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings in place of its own")
    parser.add_argument("--num-iterations", type=int, default=7, help="after one to warm up")
    parser.add_argument("--most", type=float, default=MOST_MOVES, help="exit status 1 above this ratio of sync to move")
    bench.add_output(parser)
    parser.add_argument("--verbose", action="store_true", help="show the output of Ray, RLlib, vLLM and transformers")
    arguments = parser.parse_args(argv)

    from rllib_srl.cli.shared.settings import read_values

    settings = read_values(dict(pair.split("=", 1) for pair in arguments.set))
    settings |= {"model": arguments.model} if arguments.model else {}
    steps = measure(settings, arguments.num_iterations, arguments.verbose)
    if not steps.parts:
        raise ValueError("no iteration updated the weights (no group had signal); expected some: more --num-iterations")
    print("\n".join(lines(steps, arguments.most)))
    bench.write(arguments, {**vars(steps), "sync_ratios": steps.sync_ratios})
    return 0 if median(steps.sync_ratios) <= arguments.most else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
