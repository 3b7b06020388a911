"""Time what held answers add to an iteration of the quick-start.

    python -m scripts.bench.held                     about 3 minutes on 2 cores
    python -m scripts.bench.held --num-answers 16    as many as in the proof of retention

The largest number is learned first, then the smallest while answers of the first are held. The share is
the median over iterations: seconds of drawing, passes and norm of the held answers, over those of the iteration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.quickstart import SETTINGS
from rllib_srl.cli.shared.cluster import run_cleanly
from scripts.bench import common as bench

MOST_SHARE = 0.1


def stage(ask: str, tokens: int) -> dict[str, Any]:
    """Return a stage of the quick-start's task that asks for the largest or the smallest number."""
    return {"env": "compare", "domain": ask, "env_config": {**SETTINGS["env_config"], "ask": ask}, "tokens": tokens}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--num-iterations", type=int, default=8, help="that hold answers")
    parser.add_argument("--num-answers", type=int, help="held by an update (default: that of the package)")
    arguments, settings = bench.begin(parser, argv)
    stream = [stage("largest", 1_000), stage("smallest", 1_000_000)]
    if arguments.num_answers is not None:
        settings["replay_retain_answers"] = arguments.num_answers
    config = bench.quickstart_config(**settings, env=None, env_config={}, stream=stream, replay_retain_window=1)
    algo = config.build_algo()
    figures: dict[str, list[float]] = {"iteration, s": [], "held answers, s": [], "share": []}
    try:
        while len(figures["share"]) < arguments.num_iterations and algo.iteration < 4 * arguments.num_iterations:
            result = algo.train()
            learned, held = result.get("learners", {}).get("default_policy", {}), result.get("retention", {})
            if held.get("num_held") != config.replay_retain_answers or "retention_s" not in learned:
                continue  # the first stage, or an iteration without an update
            spent = float(learned["retention_s"]) + float(held["memory_s"])
            whole = float(result["time_this_iter_s"])
            for name, value in zip(figures, (whole, spent, spent / whole), strict=True):
                figures[name].append(value)
            print(f"iteration {algo.iteration}: {whole:.2f} s, of which held answers {spent:.2f} s", flush=True)
    finally:
        algo.stop()
    if not figures["share"]:
        raise RuntimeError("no update held all its answers; expected right answers of the first stage: more iterations")
    whole, share = median(figures["iteration, s"]), median(figures["share"])
    verdict = bench.verdict(share <= MOST_SHARE)
    taken = f"{config.replay_retain_answers} held answers take {share:.1%} of an iteration of {whole:.2f} s"
    print(f"{taken}; at most {MOST_SHARE:.0%}: {verdict}")
    print(bench.conditions(config.compute_dtype))
    bench.write(arguments, figures)
    return 0 if share <= MOST_SHARE else 1


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
