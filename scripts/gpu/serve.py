"""Serve a model for two minutes under load: seconds to the first answer, answers per second, latency, versions.

    python -m scripts.gpu.serve --model tiny

Eight people ask at once; every answer is rated, so that versions are trained meanwhile. `--short` lasts 20 s with two
people. Exit status 1 if no question was answered.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rllib_srl.cli.serving.figures import percentile
from scripts.evening import Served, is_word, question_of


def chat(served: Served, seed: int, until: float) -> list[float]:
    """Ask and rate until a time; return the latencies, seconds."""
    rng, latencies = random.Random(seed), []
    while time.monotonic() < until:
        question = question_of(rng)
        name, answer, seconds = served.ask(question)
        served.rate(name, is_word(question, answer))
        latencies.append(seconds)
    return latencies


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; return the exit status."""
    parser = argparse.ArgumentParser(description="Serve a model under load.")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--short", action="store_true", help="20 seconds, two people")
    args = parser.parse_args(argv)
    seconds, people = (20.0, 2) if args.short else (120.0, 8)
    with tempfile.TemporaryDirectory() as directory:
        start = time.monotonic()
        flags = [args.model, "--keep", "compare", "--train-after", 64, "--max-tokens", 24]
        served = Served(flags, Path(directory) / "served")
        try:
            served.ask("Hello.")
            start_s = time.monotonic() - start
            until = time.monotonic() + seconds
            with ThreadPoolExecutor(people) as pool:
                taken = [value for many in pool.map(lambda i: chat(served, i, until), range(people)) for value in many]
            states = [version["state"] for version in served.call("GET", "/versions")["versions"]]
        finally:
            served.stop()
    print(json.dumps({
        "start_s": round(start_s, 1), "answers": len(taken), "answers_per_s": round(len(taken) / seconds, 2),
        "p50_ms": round(1e3 * (percentile(taken, 0.5) or 0)), "p95_ms": round(1e3 * (percentile(taken, 0.95) or 0)),
        "versions": len(states), "active": states.count("active"),
    }))  # fmt: skip
    return int(not taken)


if __name__ == "__main__":
    sys.exit(main())
