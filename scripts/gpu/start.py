"""Run the quick-start and print seconds of its start and of an iteration, by part, and what it learned.

    python -m scripts.gpu.start

On a card vLLM captures CUDA graphs, and engine and learner take no turns where the card holds both. `--short` trains
the tiny model for three iterations.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rllib_srl.cli import quickstart
from rllib_srl.cli.shared.run_log import PARTS
from rllib_srl.cli.shared.runs import RunPlan
from rllib_srl.cli.shared.settings import build_config, check


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    values: dict[str, Any] = dict(quickstart.SETTINGS)
    if "--short" in words:
        values |= {"model": "tiny", "iterations": 3, "engine": "auto"}
    with tempfile.TemporaryDirectory() as directory:
        config = build_config({**values, "log_directory": directory})
        check(config)
        result = quickstart.measured(config, RunPlan(Path(directory), None, values), verbose=False)
    num = len(result.results)
    parts = {f"{name}_s": round(sum(one["timers"][name] for one in result.results) / num, 3) for name in PARTS}
    iteration_s = sum(one["time_this_iter_s"] for one in result.results) / num
    print(json.dumps({
        "start_s": round(result.start_s, 1), "iteration_s": round(iteration_s, 3),
        "before": round(result.before["accuracy"], 3), "after": round(result.after["accuracy"], 3), **parts,
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
