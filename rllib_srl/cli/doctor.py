"""Show the machine's resources, and which ways to train a model fit onto its GPUs or onto others.

    srl doctor                                         this machine, and SmolLM2-135M on its GPUs
    srl doctor --model DIR --gpus 4x80                 a model on four GPUs of 80 GiB, from any machine
    srl doctor --model DIR --gpus 1x24 --micro-batch-tokens 2048 --max-episode-tokens 4096
    srl doctor --table                                 the table of docs/gpu.md

The estimate is that of the check at the start of a run (`algorithm/gpu_memory.py`). No figure was measured on a GPU.

Exit status: 0 if some way fits, or no GPU is asked for; else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GIB = 2**30


def _gpus(text: str) -> tuple[int, float]:
    """Return number and GiB of "4x80"."""
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if not found or not 1 <= int(found[1]) <= 4096 or not float(found[2]) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected NUMBERxGIB, such as 4x80")
    return int(found[1]), float(found[2])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an integer of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    one = argparse.ArgumentParser(prog="srl doctor", description=__doc__.splitlines()[0] if __doc__ else "")
    one.add_argument("--model", default="smollm2-135m", metavar="MODEL", help="name or directory, as for srl train")
    one.add_argument("--gpus", type=_gpus, metavar="NxGIB", help="GPUs to plan for, such as 4x80; default: those here")
    one.add_argument("--micro-batch-tokens", type=_positive, metavar="N", help="as the setting of that name")
    one.add_argument("--max-episode-tokens", type=_positive, metavar="N", help="as the setting of that name")
    one.add_argument("--no-activation-checkpointing", action="store_true", help="plan without it")
    one.add_argument("--table", action="store_true", help="print what fits by model size and card, as Markdown")
    one.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return one


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    args = parser().parse_args(argv)
    from rllib_srl.cli.shared.cluster import run_cleanly

    return run_cleanly(lambda: _run(args), args.debug)


def _run(args: argparse.Namespace) -> int:
    from rllib_srl.algorithm.gpu_memory import table

    if args.table:
        print("\n".join(table(_settings(args))))
        return 0
    for line in machine():
        print(line)
    number, gib = args.gpus or gpus_here()
    print()
    if not number:
        print("no GPU: the run computes on the CPU; --gpus 1x80 plans for a GPU that is elsewhere")
        return 0
    return _plan(args, number, gib)


def machine() -> Iterator[str]:
    """Yield one line per resource of this machine."""
    import torch

    yield f"cores       {os.cpu_count()}"
    yield f"memory      {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.0f} GiB"
    shm = os.statvfs("/dev/shm")
    yield f"/dev/shm    {shm.f_blocks * shm.f_frsize / GIB:.1f} GiB, which holds weights on their way to the engines"
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


def _settings(args: argparse.Namespace) -> Any:
    from rllib_srl import SRLConfig

    config = SRLConfig().training(activation_checkpointing=not args.no_activation_checkpointing)
    for name in ("micro_batch_tokens", "max_episode_tokens"):
        if getattr(args, name) is not None:
            setattr(config, name, getattr(args, name))
    return config.flat()


def _plan(args: argparse.Namespace, number: int, gib: float) -> int:
    from rllib_srl.algorithm.gpu_memory import ModelShape, variants
    from rllib_srl.engine.models import local_model

    shape = ModelShape.of(Path(local_model(args.model)))
    if shape is None:
        print(f"error: model {args.model!r}; expected a config.json with a Llama-like model's sizes", file=sys.stderr)
        return 1
    print(f"{args.model}: {shape.num_parameters / 1e9:.2f} billion parameters on {number} x {gib:.0f} GiB")
    checkpointing = "without" if args.no_activation_checkpointing else "with"
    print(f"(an estimate, {checkpointing} activation checkpointing; no figure was measured on a GPU)")
    found = variants(shape, _settings(args), number, gib * GIB)
    for one in found:
        where = "engine and learner share it" if number == 1 else f"{one.num_gpus} GPUs, one for the engine"
        print(f"\n{one.name} ({where}): {'does not fit' if one.faults else 'fits'}")
        print(f"  learner {one.learner}")
        for line in one.faults:
            print(f"  {line}")
    return int(all(one.faults for one in found))
