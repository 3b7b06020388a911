"""Write a trained model to a Hugging Face directory, with a model card.

    srl export results/first models/first                  the newest checkpoint of a run
    srl export results/first/checkpoint_000010 models/ten
    srl evaluate results/first --json accuracy.json
    srl export results/first models/first --results accuracy.json

OUT has the weights (fp32, adapters merged), the tokenizer and README.md: base model, data, settings, results with
intervals and versions. Read the card before you share it. No pickle is opened, and neither Ray nor an
engine starts. To share it: hf upload OWNER/NAME OUT.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rllib_srl.algorithm.checkpointing import export_checkpoint, refuse_not_empty
from rllib_srl.cli.shared import runs
from rllib_srl.cli.shared.cluster import run_cleanly
from rllib_srl.cli.shared.command_line import Parser, add_debug, add_verbose, help_of
from rllib_srl.cli.shared.json_lines import json_lines
from rllib_srl.cli.shared.model_card import CARD, Facts, card
from rllib_srl.cli.shared.paths import local_directory
from rllib_srl.cli.shared.run_log import METRICS
from rllib_srl.cli.shared.settings import model_config_of
from rllib_srl.common.metric_names import numbers_of
from rllib_srl.storage.disk import writing


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(**help_of(__doc__))
    text = "the directory of a run, or a checkpoint"
    parser.add_argument("run", type=local_directory, metavar="RUN", help=text)
    parser.add_argument("out", type=local_directory, metavar="OUT", help="new or empty directory")
    text = "results for the card, instead of the run's own evaluations: the file of srl evaluate RUN --json FILE"
    parser.add_argument("--results", type=Path, metavar="FILE", help=text)
    add_verbose(parser, "transformers")
    add_debug(parser)
    arguments: argparse.Namespace = parser.parse_args(argv)
    return arguments


def export(arguments: argparse.Namespace) -> int:
    """Write the directory; return the exit status."""
    out = arguments.out.absolute()
    refuse_not_empty(out)  # before any work
    facts = export_run(runs.find_checkpoint(arguments.run), arguments.results, out)
    with writing(out):
        (out / CARD).write_text(card(out.name, facts), encoding="utf-8")
    print(f"model       {out}")
    print(f"model card  {out / CARD}")
    return 0


def export_run(checkpoint: Path, results: Path | None, out: Path) -> Facts:
    """Write the model of a checkpoint to `out`; return the facts of its run.

    Raises:
        RunError: the run has no settings file, or `results` belong to something else.
    """
    settings = runs.settings_of(checkpoint, trust=True)  # code that they name is not run here
    if not settings:
        raise runs.RunError(f"{checkpoint.parent} has no {runs.SETTINGS_FILE}; expected a run of srl train")
    measured = results_in(results, checkpoint) if results else None
    last = int(export_checkpoint(checkpoint, model_config_of(settings), out).get("iteration", 0))
    lines = filter(None, json_lines(checkpoint.parent / METRICS, dict))
    own = [line for line in lines if "evaluation/accuracy" in line and line["iteration"] <= last]
    found = {**measured, "iteration": last} if measured else own[-1] if own else None
    return Facts(settings["model"], last, settings, found)


def results_in(path: Path, checkpoint: Path) -> dict[str, float]:
    """Return the metrics of a file of `srl evaluate --json`, under the names of metrics.jsonl.

    Raises:
        RunError: the file cannot be read, or its results are not those of `checkpoint`.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        what, numbers = Path(figures["what"]), dict(numbers_of({"evaluation": figures}))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise runs.RunError(f"--results {path} cannot be read; expected a file of srl evaluate --json") from error
    if what.name != checkpoint.name or "evaluation/accuracy" not in numbers:
        raise runs.RunError(f"--results {path} has the results of {what}; expected those of {checkpoint}")
    return numbers


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    return run_cleanly(lambda: export(arguments), arguments.debug)
