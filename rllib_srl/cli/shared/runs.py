"""The directory of a run: its files, whether a new run may use it, and the checkpoint to resume from.

    results/compare-20261121-055301/
      settings.yaml        every setting of the run; `srl train --resume` and `srl evaluate` read it
      checkpoint_000010/   the newest few
      replay/memory.db            the memory; srl memory reads it
      transcripts.jsonl, metrics.jsonl, events.out.tfevents.*
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rllib_srl.cli.shared.cluster import command
from rllib_srl.cli.shared.settings import (
    SHORTHANDS,
    all_settings,
    expanded,
    flag_settings,
    listed,
    read_values,
    read_yaml,
    shown,
)
from rllib_srl.cli.shared.stopping import ENDING
from rllib_srl.common.foreign_names import nearest
from rllib_srl.common.loading import OWN_DATA, functions_in, with_file_names, without_users_rules
from rllib_srl.common.setting_model import PRESET
from rllib_srl.storage.checkpoints import (
    MANIFEST,
    PREFIX,
    CheckpointError,
    checkpoints_in,
    place_for,
    prune,
    set_aside,
    verify_own,
    verify_sealed,
)
from rllib_srl.storage.disk import writing
from rllib_srl.storage.paths import MEMORY, TRANSCRIPTS

SETTINGS_FILE, METRICS = "settings.yaml", "metrics.jsonl"
FIXED = ("env", "env_config", "envs", "model", "seed", "optimizer_name")  # settings a resumed run cannot change
NOT_INHERITED = ("seal_key_file", "callbacks")  # a directory must not choose the key that verifies it, or code


class RunError(ValueError):
    """A directory or setting does not fit a run; the message contains the remedy."""


@dataclass(frozen=True)
class RunPlan:
    """The directory of a run, the checkpoint it resumes from, and its settings.

    Invariant: `directory` has no files of another run and no checkpoint newer than `checkpoint`; `checkpoint` is sealed
    with the user's key unless `is_trusted`.
    """

    directory: Path
    checkpoint: Path | None
    values: dict[str, Any]
    is_trusted: bool = False
    iteration: int = 0  # of the checkpoint

    def is_done(self, last: int) -> bool:
        """Return whether the checkpoint is of iteration `last` or a later one."""
        return self.checkpoint is not None and self.iteration >= last

    def refuse_done(self, last: int) -> None:
        """Check that the checkpoint is of an iteration before `last`."""
        if self.is_done(last):
            of = f"the {self.iteration} that were played before the checkpoint"
            raise RunError(f"iterations = {last}; expected more than {of}")


def plan_run(out: Path | None, resume: Path | None, settings: Mapping[str, Any], trust: bool = False) -> RunPlan:
    """Choose the directory, the checkpoint and the settings of a run, without writing anything.

    Args:
        out: the directory given; None: a new one under results/, or that of the resumed run.
        resume: a checkpoint or a run's directory; None starts a new run.
        settings: the settings given; in a resumed run they override the earlier ones, except `FIXED`.
        trust: accept a checkpoint sealed with any key.

    Raises:
        RunError: `out` is in use, there is no checkpoint, or a fixed setting would change.
        CheckpointError: the checkpoint is damaged, or sealed with another key.
    """
    if resume is None:
        data = (settings.get("env_config") or {}).get("path") if settings.get("env") == OWN_DATA else None
        directory = out or new_directory(Path(data).stem if data else str(settings.get("env") or "envs"))
        refuse_used(directory)
        return RunPlan(directory.absolute(), None, dict(settings))
    checkpoint = find_checkpoint(resume)
    about = verify_sealed(checkpoint) if trust else verify_own(checkpoint, settings.get("seal_key_file"))
    earlier = settings_of(checkpoint, trust, settings.get("seal_key_file"))
    both = [name for name in FIXED if name in settings and earlier]  # whose files may have moved
    changed = [name for name in both if with_file_names(settings[name]) != with_file_names(earlier[name])]
    if changed:
        lines = [f"  {name} = {settings[name]!r}; expected {earlier[name]!r}" for name in changed]
        raise RunError("a resumed run keeps these settings; to change them, start a new run:\n" + "\n".join(lines))
    directory = (out or checkpoint.parent).absolute()
    if directory != checkpoint.parent:
        refuse_used(directory)
    elif (newest := checkpoints_in(directory)[-1]) != checkpoint:
        raise RunError(
            f"{checkpoint} is not the newest checkpoint of its run; resuming from it would overwrite {newest.name}: "
            "set a new directory by --out"
        )
    values = {**earlier, **settings}
    if about.get("has_memory") and values.get("replay_capacity") == 0:
        raise RunError(
            "replay_capacity = 0, but the checkpoint has a memory, which a resumed run keeps; leave out "
            "replay_capacity and the settings that imply it (algorithm, replay): loss = 'dapo' changes the loss alone, "
            "replay_revisit_fraction = 0 stops revisits"
        )
    return RunPlan(directory, checkpoint, values, trust, int(about.get("iteration", 0)))


def resume_or_restart(out: Path) -> Path | None:
    """Return what `--resume auto` resumes: `out` if it has a finished checkpoint, else None for a new run in it.

    The files of an attempt that ended before its first checkpoint are moved to a directory below `out`: a new run must
    not take over their memory, and nothing is deleted.
    """
    if checkpoints_in(out):
        return out
    patterns = (SETTINGS_FILE, TRANSCRIPTS, METRICS, MEMORY, PREFIX + "*", "events.out.tfevents.*")
    if paths := sorted(path for pattern in patterns for path in out.glob(pattern)):
        set_aside(paths, out)
    return None


def new_directory(name: str) -> Path:
    """Return a path under results/ with `name` and the current time."""
    return Path("results") / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_used(directory: Path) -> None:
    """Check that a directory holds no run and is no file; RunError: it does, or it is."""
    if directory.exists() and not directory.is_dir():
        raise RunError(f"--out {directory} is a file; expected a directory, or an unused name")
    names = (SETTINGS_FILE, TRANSCRIPTS, METRICS)
    if any((directory / name).exists() for name in names) or any(directory.glob(PREFIX + "*")):
        has_checkpoint = bool(checkpoints_in(directory))
        remedy = f"or resume it: --resume {directory}" if has_checkpoint else "or delete it: no checkpoint was finished"
        raise RunError(f"--out {directory} already has a run; set another, {remedy}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, complete or not, rather than the directory of a run."""
    return path.name.startswith(PREFIX) or (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> Path:
    """Return a checkpoint itself, or the newest finished one of a run's directory; CheckpointError: there is none."""
    path = path.expanduser().absolute()
    if is_checkpoint(path):
        return path
    finished = checkpoints_in(path)
    if not finished:
        reason = "has no finished checkpoint" if path.is_dir() else "is a file" if path.exists() else missing(path)
        raise CheckpointError(f"{path} {reason}; expected a checkpoint, or the directory of a run with one")
    return finished[-1]


def missing(path: Path) -> str:
    """Return "does not exist", and the nearest name in the same directory if there is one."""
    parent = path.absolute().parent
    near = nearest(path.name, [entry.name for entry in parent.iterdir()]) if parent.is_dir() else ""
    return "does not exist" + (f"; did you mean {path.with_name(near)}?" if near else "")


class Source(NamedTuple):
    """What a command reads. Invariant: without a checkpoint, `settings` has the model and nothing else."""

    checkpoint: Path | None
    settings: dict[str, Any]  # of the checkpoint's run


def source_of(
    what: str | Path,
    trust: bool = True,
    key_file: str | Path | None = None,
    *,
    trains: bool = False,
    needs_settings: bool = True,
) -> Source:
    """Return the checkpoint at a path with its settings, as `settings_of`, or the model of a name.

    Raises:
        CheckpointError: the path is the directory of a run without a checkpoint, or a mistyped or another directory.
        RunError: there are no settings, which are needed, or they name code that is not trusted.
    """
    path = Path(what).expanduser().absolute()
    if is_checkpoint(path) or (path / SETTINGS_FILE).is_file() or (path.is_dir() and checkpoints_in(path)):
        checkpoint = find_checkpoint(path)
        settings = settings_of(checkpoint, trust, key_file, trains=trains)
        if needs_settings and not settings:
            raise RunError(f"{checkpoint.parent} has no {SETTINGS_FILE}; expected a run of srl train")
        return Source(checkpoint, settings)
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{what} has neither a run ({SETTINGS_FILE}) nor a model (config.json)")
    if not path.exists() and "?" in (hint := missing(Path(what))) and "/" in str(what):  # not the hub's OWNER/NAME
        raise CheckpointError(f"{what} {hint}")
    return Source(None, {"model": str(what)})


def settings_of(
    checkpoint: Path, trust: bool = False, key_file: str | Path | None = None, *, trains: bool = True
) -> dict[str, Any]:
    """Return the settings of the run that wrote a checkpoint, without `NOT_INHERITED`; {} without a settings file.

    A settings file is not sealed, and a reward function or an agent that it names is code. So a checkpoint must have
    been sealed with the user's key, and its manifest must list the function.

    Args:
        checkpoint: of the run.
        trust: accept functions that are not listed; right for a command that runs none of them.
        key_file: the setting `seal_key_file`.
        trains: False leaves out a user's own rules, which only training needs.

    Raises:
        RunError: the settings name such a function.
    """
    path = checkpoint.parent / SETTINGS_FILE
    read = expanded(read_values(read_yaml(path))) if path.is_file() else {}
    values = {name: value for name, value in read.items() if name not in NOT_INHERITED}
    values = values if trains else without_users_rules(values)
    if not trust and (named := functions_in(values)):
        try:
            listed = verify_own(checkpoint, key_file).get("functions", ())
        except CheckpointError:
            listed = ()
        if unlisted := [name for name in named if name not in listed]:
            raise RunError(
                f"{path} names code that no checkpoint sealed with your key lists: {', '.join(unlisted)}; read it, "
                "and if you trust it, add --trust-checkpoint"
            )
    return values


def write_settings(directory: Path, values: Mapping[str, Any], algo: Any) -> None:
    """Write every setting of a started run, including the seed and dtype that were chosen automatically.

    A setting that is left to a preset stays so, with the value that the preset gives it as a comment.
    """
    chosen = {"seed": algo.seed, "compute_dtype": algo.config.compute_dtype}
    every = {name: row.initial for name, row in flag_settings().items()} | dict(values) | chosen
    plain = {name: listed(value) for name, value in every.items() if name in all_settings() and name not in SHORTHANDS}
    text = "# All settings of this run; `srl train --config` takes this file.\n"
    used = vars(algo.config.loss_settings())
    for line in yaml.safe_dump(plain, sort_keys=False).splitlines():
        name, _, value = line.partition(": ")
        text += line + (f"  # {shown(used[name])}" if value == PRESET else "") + "\n"
    with writing(directory / SETTINGS_FILE):
        (directory / SETTINGS_FILE).write_text(text, encoding="utf-8")


def save(algo: Any, directory: Path) -> Path:
    """Return the checkpoint of the current iteration; write it if it does not exist."""
    place = place_for(directory, algo.iteration)
    if not (place / MANIFEST).is_file():
        algo.save_to_path(place)
        prune(directory, algo.config.checkpoints_kept)
    return place


@contextmanager
def gone_if_it_fails(
    directory: Path, is_kept: Callable[[BaseException], bool] = lambda error: False
) -> Iterator[None]:
    """If the block fails before an iteration has finished, empty `directory`, if it was new or empty before.

    An error that `is_kept` leaves the directory as it is.
    """
    is_ours = not directory.exists() or not any(directory.iterdir())
    is_new = is_ours and not directory.exists()

    def remove() -> None:
        if not directory.is_dir() or (directory / METRICS).is_file():
            return
        for path in directory.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if is_new:
            directory.rmdir()

    ENDING.clean_up = remove if is_ours else bool
    try:
        yield
    except BaseException as error:
        if is_ours and not is_kept(error):
            remove()
        raise
    finally:
        ENDING.clean_up = bool


def how_to_resume(directory: Path, *words: object) -> str:
    """Return the command that resumes a run, with additional `words`; a note if there is no checkpoint."""
    if checkpoints_in(directory):
        return f"continue with: {command('train', '--resume', directory, *words)}"
    if not (directory / METRICS).is_file():
        return f"no iteration has finished; --out {directory} can be used again"
    return f"no checkpoint was written yet (checkpoint_every); the files are in {directory}"
