"""Compare an iteration of the quick-start in float32 with one in bfloat16 on this processor.

    python -m scripts.bench.dtypes          about 5 minutes on 2 cores

Both formats train in turn, in the order and its reverse, each from the start; rollouts and learning use the same
format. `compute_dtype` "auto" should be the faster one.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

if __name__ == "__main__":
    from rllib_srl.cli.shared.cluster import quiet

    quiet(verbose="--verbose" in sys.argv)

from rllib_srl.cli.shared.cluster import run_cleanly
from scripts.bench import common as bench

DTYPES = ("float32", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both formats and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--num-iterations", type=int, default=4, help="of a run, after one to warm up")
    arguments, settings = bench.begin(parser, argv)
    seconds = defaultdict[str, list[float]](list)
    for dtype in (*DTYPES, *reversed(DTYPES)):
        config = bench.quickstart_config(**settings, compute_dtype=dtype)
        seconds[dtype] += bench.iterations(config, arguments.num_iterations)["seconds"]
        print(f"{dtype}: {bench.spread(seconds[dtype])} s an iteration", flush=True)
    narrow, wide = (median(seconds[dtype]) for dtype in reversed(DTYPES))
    auto = bench.quickstart_config(**settings).compute_dtype
    print(f"bfloat16 over float32: {narrow / wide:.2f}; auto is {auto} here")
    print(bench.conditions("both formats"))
    bench.write(arguments, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(run_cleanly(main, debug="--verbose" in sys.argv))
