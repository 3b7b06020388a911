"""Check a machine, or a run before it starts: resources, what fits onto GPUs, settings, grading.

    srl doctor                                         this machine: resources, what fits onto its GPUs
    srl doctor --env compare --model smollm2-135m      the run that `srl train` with the same flags would start
    srl doctor --model DIR --gpus 4x80                 a model on four GPUs of 80 GiB, from any machine
    srl doctor --model DIR --gpus 1x24 --micro-batch-tokens 2048 --max-episode-tokens 4096
    srl doctor --serve DIR --gpus 1x24                 whether `srl serve` and its training fit onto a card together

With an environment it takes every flag of `srl train` (`srl train --help`). It prints a line for each check, with ok,
warning or failure: settings are valid, right answers are graded 1 and empty ones 0. What fits is estimated as at the
start of a run; docs/gpu.md says how far the estimate was compared with real GPUs.

Exit status: 1 if a check fails or, with GPUs, no way to train fits; else 0.
"""

from __future__ import annotations

import argparse
import re

from rllib_srl.cli.shared.flags import LIBRARIES, Program


def _gpus(text: str) -> tuple[int, float]:
    """Return number and GiB of "4x80"."""
    match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if not match or not 1 <= int(match[1]) <= 4096 or not float(match[2]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NUMBERxGIB, such as 4x80")
    return int(match[1]), float(match[2])


def add_flags(parser: argparse.ArgumentParser) -> None:
    text = "GPUs to plan for, such as 4x80 (default: those here)"
    parser.add_argument("--gpus", type=_gpus, metavar="NxGIB", help=text)
    text = "name or directory of a model that `srl serve` would serve and train"
    parser.add_argument("--serve", metavar="MODEL", help=text)


def run(arguments: argparse.Namespace) -> int:
    from rllib_srl.cli.shared import diagnosis
    from rllib_srl.cli.shared.display import counted
    from rllib_srl.cli.shared.settings import build_config, given_settings

    settings, findings = given_settings(arguments), diagnosis.Findings()
    findings.add(diagnosis.of_machine())
    number, gib = arguments.gpus or diagnosis.gpus_here()
    if arguments.serve:
        from rllib_srl.cli.serving.card import fit

        findings.add(fit(arguments.serve, number, gib))
    elif number:
        findings.add(diagnosis.of_gpus(settings, number, gib, places_all=bool(arguments.gpus)))
    if not arguments.gpus and not arguments.serve:
        findings.add(diagnosis.of_package())
        if any(settings.get(name) for name in ("env", "envs", "stream")):
            if findings.add(diagnosis.of_settings(config := build_config(settings))):
                findings.add(diagnosis.of_environments(config))
        else:
            print("no environment: srl doctor --env compare --model smollm2-135m checks a whole run")
    num_failures = findings.num[diagnosis.FAILURE]
    print(f"{counted(num_failures, 'failure')}, {counted(findings.num[diagnosis.WARNING], 'warning')}")
    return int(num_failures > 0)


USAGE = "%(prog)s [--env ENV | --data FILE | --config YAML] [--model MODEL] [--gpus NxGIB] [--SETTING VALUE ...]"
main = Program(__doc__, add_flags, run, usage=USAGE, without=(), verbose=LIBRARIES)
