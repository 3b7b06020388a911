"""Check a machine, or a whole run before it starts: packages, model, environments, gradient, checkpoint.

    srl doctor                                         this machine: resources, packages, what fits onto its GPUs
    srl doctor --env compare --model smollm2-135m      the run that `srl train` with the same flags would start
    srl doctor --model DIR --gpus 4x80                 a model on four GPUs of 80 GiB, from any machine
    srl doctor --model DIR --gpus 1x24 --micro-batch-tokens 2048 --max-episode-tokens 4096
    srl doctor --table                                 the table of docs/gpu.md

With an environment it takes every flag of `srl train` (`srl train --help`). It prints a line for each check, with ok,
warning or failure: right answers are graded 1 and empty ones 0, the gradient is not 0, and a checkpoint
restores the same weights. Nothing is left behind.

The estimate for GPUs is that of the check at the start of a run (`algorithm/gpu_memory.py`). docs/gpu.md says how
far it was compared with one.

Exit status: 1 if a check fails or, with GPUs, no way to train fits; else 0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_srl.cli.shared.command_line import add_debug, add_verbose, help_of

if TYPE_CHECKING:
    from rllib_srl.cli.diagnosis.lines import Findings

GIB = 2**30
WANTED_SHM_GIB = 2.0  # of /dev/shm, as scripts/preflight.py wants it
DEFAULT_MODEL = "smollm2-135m"
PLACED = (  # flat names of settings that a plan for GPUs chooses
    *("num_env_runners", "num_learners", "num_gpus_per_env_runner", "num_gpus_per_learner", "colocate"),
    "engine_tensor_parallel_size",
)


def _gpus(text: str) -> tuple[int, float]:
    """Return number and GiB of "4x80"."""
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if not found or not 1 <= int(found[1]) <= 4096 or not float(found[2]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NUMBERxGIB, such as 4x80")
    return int(found[1]), float(found[2])


def add_flags(one: argparse.ArgumentParser) -> None:
    """Add the flags that `srl train` does not have."""
    one.add_argument("--gpus", type=_gpus, metavar="NxGIB", help="GPUs to plan for, such as 4x80; default: those here")
    one.add_argument("--table", action="store_true", help="print what fits by model size and card, as Markdown")
    one.add_argument("--out", type=Path, metavar="DIR", help="directory that the run would write (default: results)")
    add_verbose(one)
    add_debug(one)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Help does not import the settings, which takes seconds."""
    if {"-h", "--help"} & {*argv}:
        light = argparse.ArgumentParser(
            usage="%(prog)s [--env ENV | --data FILE | --config YAML] [--model MODEL] [--SETTING VALUE ...]",
            **help_of(__doc__),
        )  # fmt: skip
        add_flags(light)
        light.parse_args(["--help"])
    from rllib_srl.cli.shared.flags import Parser, add_settings, with_underscores

    full = Parser(**help_of(__doc__))
    add_flags(full)
    add_settings(full, without=("iterations", "grace_s"))
    arguments: argparse.Namespace = full.parse_args(with_underscores(argv))
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not {"-h", "--help"} & {*words}:
        from rllib_srl.cli.shared.cluster import quiet

        quiet(verbose="--verbose" in words)
    args = parse(words)
    from rllib_srl.cli.shared.cluster import run_cleanly

    return run_cleanly(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    from rllib_srl.algorithm.gpu_memory import table
    from rllib_srl.cli.shared.settings import given_settings

    given = given_settings(args)
    if args.table:
        print("\n".join(table(_settings(args, given))))
        return 0
    for line in machine():
        print(line)
    number, gib = args.gpus or gpus_here()
    print()
    status = 0
    if number:
        status = _plan(args, given, number, gib)
    else:
        print("no GPU: the run computes on the CPU; --gpus 1x80 plans for a GPU that is elsewhere")
    return status if args.gpus else max(status, _checked(args, given))


def _checked(args: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Run the checks and print a line for each; return the exit status."""
    from rllib_srl.cli.diagnosis.lines import FAILURE, WARNING, Findings
    from rllib_srl.cli.diagnosis.surroundings import of_build, of_directory, of_memory, of_packages
    from rllib_srl.replay.tools.describe import counted

    start, found = time.monotonic(), Findings()
    print()
    found.add(of_memory())
    found.add(of_packages())
    if any(given.get(name) != 0 for name in ("num_gpus_per_env_runner", "num_gpus_per_learner")):
        found.add(of_build())
    found.add(of_directory(args.out or Path("results")))
    if any(given.get(name) for name in ("env", "worlds", "stream")):
        _check_run(given, found, args.verbose)
        seconds = f" in {time.monotonic() - start:.0f} s"
    else:
        seconds = ""
        print("no environment: srl doctor --env compare --model smollm2-135m checks a whole run")
    num_failures, num_warnings = found.count(FAILURE), found.count(WARNING)
    print(f"{counted(num_failures, 'failure')}, {counted(num_warnings, 'warning')}{seconds}")
    return int(num_failures > 0)


def _check_run(given: Mapping[str, Any], found: Findings, verbose: bool) -> None:
    """Check settings, model and environments, then short real runs unless one of these fails."""
    import ray

    from rllib_srl.cli.diagnosis.parts import of_environments, of_model, of_settings
    from rllib_srl.cli.diagnosis.trial import of_training
    from rllib_srl.cli.shared.cluster import hushed_stderr, start_ray
    from rllib_srl.cli.shared.settings import build_config

    config = build_config(given)
    if not found.add(of_settings(config)):
        print("fix the settings first: model, environments and training are not checked")
        return
    with hushed_stderr(verbose):  # progress bars
        is_fine = found.add(of_model(config))
    if not (found.add(of_environments(config)) and is_fine):
        print("fix this first: training is not checked")
        return
    is_ours = not ray.is_initialized()
    start_ray(verbose)
    try:
        found.add(of_training(config, verbose))
    finally:
        if is_ours:
            ray.shutdown()


def machine() -> Iterator[str]:
    """Yield one line per resource of this machine."""
    import torch

    yield f"cores       {os.cpu_count()}"
    yield f"memory      {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB"
    shm = os.statvfs("/dev/shm")
    size = shm.f_blocks * shm.f_frsize / GIB
    verdict = "" if size >= WANTED_SHM_GIB else f"; too small, {WANTED_SHM_GIB:g} wanted: docker run --shm-size=4g"
    yield f"/dev/shm    {size:.2g} GiB, which holds weights on their way to the engines{verdict}"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield f"GPU {index}       {card.name}, {card.total_memory / GIB:.0f} GiB"
    if not torch.cuda.device_count():
        yield "GPU         none"
    yield f"torch       {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"
    yield f"engine      {'vLLM' if find_spec('vllm') else 'transformers (vLLM is not installed)'}"


def gpus_here() -> tuple[int, float]:
    """Return the number of GPUs of this machine and the memory of the smallest, GiB."""
    import torch

    from rllib_srl.algorithm.resources import card_bytes_here

    return torch.cuda.device_count(), (card_bytes_here() or 0.0) / GIB


def _settings(args: argparse.Namespace, given: Mapping[str, Any]) -> Any:
    """Return the settings to plan with, by their flat names: those given, except for `PLACED`.

    Raises:
        SettingsError: with `--gpus`, a setting that the plan chooses itself, or an unknown optimiser.
    """
    from rllib_srl import SRLConfig
    from rllib_srl.algorithm.gpu_memory import OPTIMIZER_BYTES
    from rllib_srl.cli.shared.settings import SettingsError, build_config

    config, default = build_config(given), SRLConfig().flat()
    config.activation_checkpointing = given.get("activation_checkpointing", True)
    flat = config.flat()
    for name in PLACED:
        if args.gpus and (value := getattr(flat, name)) != getattr(default, name):
            raise SettingsError(f"{name} = {value!r} with --gpus; expected none: each plan places its own processes")
        setattr(flat, name, getattr(default, name))
    if flat.optimizer_name not in OPTIMIZER_BYTES:
        expected = ", ".join(OPTIMIZER_BYTES)
        raise SettingsError(f"optimizer_name = {flat.optimizer_name!r}; expected one of {expected}")
    return flat


def _plan(args: argparse.Namespace, given: Mapping[str, Any], number: int, gib: float) -> int:
    from rllib_srl.algorithm.gpu_memory import variants
    from rllib_srl.algorithm.model_shape import ModelShape
    from rllib_srl.engine.models import local_model

    model = given.get("model", DEFAULT_MODEL)
    shape = ModelShape.of(Path(local_model(model)))
    if shape is None:
        print(f"error: model {model!r}; expected a config.json with a Llama-like model's sizes", file=sys.stderr)
        return 1
    print(f"{model}: {shape.num_parameters / 1e9:.2f} billion parameters on {number} x {gib:.0f} GiB")
    settings = _settings(args, given)
    checkpointing = "with" if settings.activation_checkpointing else "without"
    print(f"(an estimate, {checkpointing} activation checkpointing; compared with one GPU, see docs/gpu.md)")
    found = variants(shape, settings, number, gib * GIB)
    for one in found:
        where = "engine and learner share it" if number == 1 else f"{one.num_gpus} GPUs, one for the engine"
        print(f"\n{one.name} ({where}): {'does not fit' if one.faults else 'fits'}")
        print(f"  learner {one.learner}")
        for line in one.faults:
            print(f"  {line}")
    return int(all(one.faults for one in found))
