"""Write the report of a run or a study: one self-contained HTML page.

    srl report results/first                       a run of srl train
    srl report results/tune/replay                 a study of srl tune
    srl report results/first --transcripts 1000    all episodes that the run has written down

The directory decides: that of a study has study.json and trials/, that of a run metrics.jsonl. The file is
report.html, there or in --out. A run may still be training; srl dashboard serves its report live. Secrets in settings
are left out, but read the transcripts before you share a page. Unfinished trials of a study are listed; its numbers
come from finished ones.
"""

from __future__ import annotations

import argparse

from rllib_srl.cli.report.run_facts import RunFacts
from rllib_srl.cli.report.run_page import page_of_run
from rllib_srl.cli.shared.display import text_of
from rllib_srl.cli.shared.flags import Program, integer_from, local_directory
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.runs import RunError, missing
from rllib_srl.storage.disk import writing
from rllib_srl.studies.records import STUDY_FILE, read_results
from rllib_srl.studies.report.page import Notice, to_html
from rllib_srl.studies.report.study_page import page_of

NAME = "report.html"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=local_directory, metavar="DIR", help="directory of a run or a study")
    parser.add_argument("--out", type=local_directory, metavar="DIR", help="directory of the report (DIR)")
    text = "episodes of a run (default: 6)"
    parser.add_argument("--transcripts", type=integer_from(0), default=6, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    results = arguments.results
    if (results / STUDY_FILE).is_file():
        page = page_of(read_results(results))
    elif (results / METRICS).is_file():
        page = page_of_run(RunFacts.read(results), arguments.transcripts)
    else:
        there = "has neither" if results.is_dir() else missing(results)
        raise RunError(f"{results} {there}; expected the directory of a run ({METRICS}) or of a study ({STUDY_FILE})")
    directory = arguments.out or results
    directory.mkdir(parents=True, exist_ok=True)
    with writing(directory / NAME):
        (directory / NAME).write_text(to_html(page), encoding="utf-8")
    print(page.title)
    print(text_of(block for block in page.blocks if isinstance(block, Notice)))
    print(f"wrote {directory / NAME}")
    return 0


main = Program(__doc__, add_flags, run)
