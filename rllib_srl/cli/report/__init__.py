"""Write the report of a study: one self-contained HTML page, and the same in Markdown.

    srl report results/replay
    srl report results/replay --out docs/replay

RESULTS is the directory of a study, with study.json and trials/. The files are report.html and report.md, in RESULTS
or in --out. Unfinished runs are listed; all numbers come from finished runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.studies.report.blocks import Notice, to_html, to_markdown
from rllib_srl.studies.report.text import page_of
from rllib_srl.studies.results import read_results

NAMES = ("report.html", "report.md")


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="directory of a study")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="directory of the report (RESULTS)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser.parse_args(argv)


def run(arguments: argparse.Namespace) -> int:
    """Write the report; return the exit status."""
    page = page_of(read_results(arguments.results))
    directory = arguments.out or arguments.results
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in zip(NAMES, (to_html(page), to_markdown(page)), strict=True):
        (directory / name).write_text(text, encoding="utf-8")
    print(page.title)
    for notice in (block for block in page.blocks if isinstance(block, Notice)):
        print("\n".join([notice.title, *(f"  {line}" for line in notice.lines)]))
    for name in NAMES:
        print(f"wrote {directory / name}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: run(arguments), arguments.debug)

