"""Print where methods did best in results of the study `pool_tuning`, and the settings to run with more seeds.

    python scripts/pool_choice.py results/tune/pool_tuning results/more/pool_tuning

Finished trials of all directories count; a setting's figure is the mean of its accuracy over training. Settings with
more seeds stand above those with fewer, because the best of many single runs is partly luck.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import help_of
from rllib_srl.cli.shared.display import table
from rllib_srl.studies.curves import curve_of
from rllib_srl.studies.measures import measure
from rllib_srl.studies.results import read_results
from rllib_srl.tune_configs.pools import MEASURES

Figures = Mapping[str, Mapping[int, Mapping[str, float]]]  # setting -> seed -> measures


def figures_in(directories: Iterable[Path]) -> Figures:
    """Return the measures of every finished trial.

    Raises:
        ResultsError: a directory has no readable results.
    """
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for directory in directories:
        results = read_results(directory)
        for trial in results.trials:
            if trial.is_finished:
                found[trial.header.arm][trial.header.seed] = measure(curve_of(trial, results.study))
    return found


def ranked(figures: Figures, method: str) -> list[tuple[str, int, dict[str, float]]]:
    """Return setting, number of seeds and mean measures of a method's settings, the best first."""
    rows = []
    for setting, by_seed in figures.items():
        if setting.partition("_0.")[0] == method:
            names = next(iter(by_seed.values()))
            means = {name: sum(one[name] for one in by_seed.values()) / len(by_seed) for name in names}
            rows.append((setting, len(by_seed), means))
    return sorted(rows, key=lambda row: (-row[1], -row[2][MEASURES[0]], row[0]))


def rows_of(ranking: Sequence[tuple[str, int, dict[str, float]]]) -> Iterable[Sequence[str]]:
    """Return the lines of the table."""
    yield "setting", "seeds", "over training", "final", "pool over training", "live"
    for setting, num_seeds, means in ranking:
        names = (MEASURES[0], "average_accuracy", "pool_area", "live_share")
        yield setting, str(num_seeds), *(f"{means[name]:.3f}" if name in means else "-" for name in names)


def choose(arguments: argparse.Namespace) -> int:
    """Print the tables and the names of the best settings."""
    figures = figures_in(arguments.directories)
    for method in sorted({setting.partition("_0.")[0] for setting in figures}):
        ranking = ranked(figures, method)
        print(table(list(rows_of(ranking))))
        print("best:", *(setting for setting, _, _ in ranking[: arguments.top]), end="\n\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(**help_of(__doc__))
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="results of pool_tuning")
    parser.add_argument("--top", type=int, default=3, metavar="N", help="settings named (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments: Any = parser.parse_args(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: choose(arguments), arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
