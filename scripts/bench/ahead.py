"""Measure what `max_lag` saves where environments wait: wall time of an iteration, synchronous and ahead, in one run.

    python -m scripts.bench.ahead                        waits of 0, .1, 1 and 5 s, max_lag 0, 1 and 4
    python -m scripts.bench.ahead --short                waits of 0 and .3 s, max_lag 0 and 1, few iterations

Each run trains the tiny model on the environment `compare`, of which every step waits. All runs generate about as many
tokens an iteration. The first iterations are not counted: with `max_lag` they begin more prompts than they train on.
Printed are mean seconds an iteration, and ratios to `max_lag=0`. Groups that wait together end together, so with
`max_lag` m one iteration waits and m follow at once: a median would leave the waits out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_srl import SRLConfig
from rllib_srl.envs.math.compare import Compare
from scripts.bench.common import add_output, write

WAITS_S, LAGS = (0.0, 0.1, 1.0, 5.0), (0, 1, 4)
NUM_PROMPTS, GROUP_SIZE = 8, 4


class Waiting(Compare):
    """`Compare` whose steps wait as a tool or a judge would. Invariant: as in `Compare`."""

    wait_s = 0.0

    def __init__(self, env_config: Any = None) -> None:
        """Take `wait_s` beside the settings of `Compare`."""
        given = dict(env_config or {})
        self.wait_s = float(given.pop("wait_s", 0.0))
        super().__init__(given)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Wait, then step as `Compare`."""
        time.sleep(self.wait_s)
        return super().step(action)


def seconds_of(wait_s: float, max_lag: int, num_iterations: int, directory: Path) -> float:
    """Return the mean seconds of an iteration."""
    config = (
        SRLConfig()
        .environment("scripts.bench.ahead:Waiting", env_config={"wait_s": wait_s})
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine="transformers", num_env_runners=1, num_cpus_per_env_runner=0.5, max_lag=max_lag)
        .env_runners(num_env_threads=256, max_turn_tokens=16, max_episode_tokens=256, num_transcripts=0)
        .training(num_prompts_per_batch=NUM_PROMPTS, group_size=GROUP_SIZE, lr=1e-5, compute_dtype="float32")
        .training(checkpoint_every=0, log_directory=str(directory))
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        for _ in range(max_lag + 1):
            algo.train()
        start = time.perf_counter()
        for _ in range(num_iterations):
            algo.train()
        return (time.perf_counter() - start) / num_iterations
    finally:
        algo.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="two waits, two lags, few iterations")
    parser.add_argument("--iterations", type=int, default=10, help="counted in each run (default: 10)")
    add_output(parser)
    arguments = parser.parse_args(argv)
    waits, lags, num = ((0.0, 0.3), (0, 1), 4) if arguments.short else (WAITS_S, LAGS, arguments.iterations)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for wait_s in waits:
            times = {lag: seconds_of(wait_s, lag, num, Path(directory) / f"{wait_s}-{lag}") for lag in lags}
            ratios = "  ".join(f"max_lag {lag}: {times[lag] / times[0]:.2f}" for lag in lags if lag)
            print(f"wait {wait_s:g} s: {times[0]:.2f} s an iteration; {ratios}", flush=True)
            found |= {f"wait_{wait_s:g}_lag_{lag}_s": seconds for lag, seconds in times.items()}
    write(arguments, "ahead", found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
