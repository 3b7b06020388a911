"""The directory of a run: what lies there, whether it may be written, and from which checkpoint it goes on.

    results/compare-20261121-055301/
      settings.yaml        every setting of the run; --resume and evaluate.py read it
      checkpoint_000010/   the newest few
      replay/shard_0/journal.db    the memory; scripts/buffer.py reads it
      transcripts.jsonl, metrics.jsonl, events.out.tfevents.*
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rllib_srl.checkpoints import MANIFEST, PREFIX, CheckpointError, checkpoints_in, place_for, prune, verify_sealed
from rllib_srl.report import TRANSCRIPTS
from scripts.run_log import METRICS
from scripts.settings import all_settings, flag_settings, read_values, read_yaml

SETTINGS_FILE = "settings.yaml"
FIXED = ("env", "env_config", "worlds", "model", "seed", "optimizer_name")  # what a resumed run cannot change


class RunError(ValueError):
    """A directory is not what a run needs; the message says what to give instead."""


@dataclass(frozen=True)
class RunPlan:
    """Where a run writes, from what it goes on, and its settings.

    Invariant: `directory` holds no other run's files and no checkpoint newer than `checkpoint`.
    """

    directory: Path
    checkpoint: Path | None
    values: dict[str, Any]


def plan_run(out: Path | None, resume: Path | None, given: Mapping[str, Any]) -> RunPlan:
    """Decide where a run writes and where it starts; nothing is written.

    Args:
        out: the directory asked for; None: a new one under results/, or that of the resumed run.
        resume: a checkpoint or a run's directory; None starts anew.
        given: settings given now; in a resumed run they go before the earlier ones, but for `FIXED`.

    Raises:
        RunError: `out` is in use, there is no checkpoint, or a fixed setting would change.
        CheckpointError: the checkpoint is damaged.
    """
    if resume is None:
        directory = out or new_directory(str(given.get("env") or "worlds"))
        refuse_used(directory)
        return RunPlan(directory.absolute(), None, dict(given))
    checkpoint = find_checkpoint(resume)
    verify_sealed(checkpoint)
    earlier = settings_of(checkpoint)
    changed = [name for name in FIXED if name in given and earlier and given[name] != earlier[name]]
    if changed:
        lines = [f"  {name} = {given[name]!r}; expected {earlier[name]!r}" for name in changed]
        raise RunError("a resumed run keeps these settings; for others start a new run:\n" + "\n".join(lines))
    directory = (out or checkpoint.parent).absolute()
    if directory != checkpoint.parent:
        refuse_used(directory)
    elif (newest := checkpoints_in(directory)[-1]) != checkpoint:
        raise RunError(
            f"{checkpoint} is not the newest of its run ({newest.name} is), which would be overwritten; "
            "give a new directory with --out"
        )
    return RunPlan(directory, checkpoint, {**earlier, **given})


def new_directory(name: str) -> Path:
    """Return a name under results/ that tells what is trained and when it began."""
    return Path("results") / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_used(directory: Path) -> None:
    """Refuse a directory that holds a run.

    Raises:
        RunError: it does, or it is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise RunError(f"--out {directory} is a file; expected a directory, or a name that is free")
    names = (SETTINGS_FILE, TRANSCRIPTS, METRICS)
    if any((directory / name).exists() for name in names) or any(directory.glob(PREFIX + "*")):
        raise RunError(f"--out {directory} holds a run already; give another, or go on with it: --resume {directory}")


def is_checkpoint(path: Path) -> bool:
    """Say whether a path is a checkpoint, whole or not, rather than the directory of a run."""
    return path.name.startswith(PREFIX) or (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint itself, or the newest finished one of a run's directory.

    Raises:
        CheckpointError: there is none.
    """
    path = path.expanduser().absolute()
    if is_checkpoint(path):
        return path
    finished = checkpoints_in(path)
    if not finished:
        reason = "has no finished checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {reason}; expected a checkpoint, or the directory of a run that wrote one")
    return finished[-1]


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint; {} if no script of ours did."""
    path = checkpoint.parent / SETTINGS_FILE
    return read_values(read_yaml(path)) if path.is_file() else {}


def write_settings(directory: Path, values: Mapping[str, Any], algo: Any) -> None:
    """Write every setting of a run that has started, with the seed and number format that were chosen for it."""
    chosen = {"seed": algo.seed, "compute_dtype": algo.config.compute_dtype}
    every = {setting.name: setting.default for setting in flag_settings()} | dict(values) | chosen
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in every.items() if name in all_settings()}
    text = "# All settings of this run; `train.py --config` takes this file.\n" + yaml.safe_dump(plain, sort_keys=False)
    (directory / SETTINGS_FILE).write_text(text, encoding="utf-8")


def save(algo: Any, directory: Path) -> Path:
    """Return the checkpoint of the current iteration, written now unless it is there."""
    place = place_for(directory, algo.iteration)
    if not (place / MANIFEST).is_file():
        algo.save_to_path(place)
        prune(directory, algo.config.checkpoints_kept)
    return place


def how_to_resume(directory: Path) -> str:
    """Return the command that continues a run."""
    if not checkpoints_in(directory):
        return f"no checkpoint was written yet (checkpoint_every); what there is lies in {directory}"
    return f"continue with: python scripts/train.py --resume {directory}"
