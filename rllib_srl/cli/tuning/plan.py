"""Plan and validate the trials of a study before they start: arms, seeds, settings and directory.

    planned(study, given, ...)   the study with the flags applied, the arms and seeds to run now, its directory
    config_of(plan, arm, seed)   the settings of one trial

`--arms` and `--seeds` select trials of the same study; any other setting makes it another study, which an existing
results directory refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllib_srl.cli.shared.runs import RunError
from rllib_srl.cli.shared.settings import all_settings, build_config, listed
from rllib_srl.common.foreign_names import nearest
from rllib_srl.studies.study import Primary, Study

FIXED = ("env", "env_config", "worlds", "mixture", "stream", "seed", "iterations", "evaluation_interval")
SHORT = {"num_prompts_per_batch": 8, "group_size": 4, "evaluation_duration": 32, "checkpoint_every": 2}
SHORT_STAGES, SHORT_SEEDS, SHORT_TOKENS = 2, 2, 800  # of a stage: an iteration must not be longer
CHECKPOINT_EVERY = 10  # iterations, in addition to the checkpoint after each stage


@dataclass(frozen=True)
class Plan:
    """The trials to run. Invariant: arms and seeds are those of the study, in its order."""

    study: Study
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    directory: Path

    def trials(self) -> list[tuple[str, int]]:
        """Return arm and seed of every trial, whole pairs first."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


def planned(
    study: Study,
    given: Mapping[str, Any],
    storage: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    is_short: bool = False,
) -> Plan:
    """Return the plan, validated as far as possible without starting anything.

    Args:
        study: as defined in its file.
        given: settings of all arms, which override the study's.
        storage: parent directory of the studies' directories.
        arms: the arms to run now; None: all.
        seeds: the seeds to run now; None: all.
        is_short: two arms, two seeds and two short stages, under a name of its own.

    Raises:
        ValueError: all errors, one per line.
    """
    study = with_settings(shortened(study) if is_short else study, given)
    faults = study.faults()
    faults += _unknown("arm", arms or (), [arm.name for arm in study.arms])
    faults += _unknown("seed", seeds or (), study.seeds)
    if not faults:
        faults = faults_of_trials(study)
    if faults:
        raise RunError(f"study {study.name!r} cannot be run:\n" + "\n".join(f"  {fault}" for fault in faults))
    chosen = tuple(arm.name for arm in study.arms if not arms or arm.name in arms)
    return Plan(study, chosen, tuple(s for s in study.seeds if not seeds or s in seeds), storage / study.name)


def with_settings(study: Study, given: Mapping[str, Any]) -> Study:
    """Return a study whose arms all have the given settings.

    Raises:
        RunError: the study fixes a given setting, or its arms differ in it.
    """
    values, faults = dict(given), []
    for name in values:
        own = [arm.name for arm in study.arms if name in arm.settings]
        if name in FIXED:
            faults.append(f"  {name}: fixed by the study" + ("; expected --seeds" if name == "seed" else ""))
        elif own:
            faults.append(f"  {name}: set by the arms ({', '.join(own)}); expected other settings")
    if faults:
        raise RunError(f"study {study.name!r} does not accept these settings:\n" + "\n".join(faults))
    plain = {name: listed(value) for name, value in from_anywhere(values).items()}
    return replace(study, settings={**study.settings, **plain})


def from_anywhere(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the model's directory as an absolute path: trials run in directories of their own."""
    values = dict(given)
    if "model" in values and Path(values["model"]).is_dir():
        values["model"] = str(Path(values["model"]).absolute())
    return values


def shortened(study: Study) -> Study:
    """Return a study of two arms, two seeds and two stages that takes a minute, as a smoke test."""
    primary = study.primary
    kept = (primary.treatment, primary.controls[0])
    stream = [{**stage, "tokens": SHORT_TOKENS} for stage in study.settings["stream"][:SHORT_STAGES]]
    domains = [d for d in study.domains if d.learned_at is not None and d.learned_at < len(stream)]
    return replace(
        study,
        name=f"{study.name}_short",
        arms=tuple(arm for arm in study.arms if arm.name in kept),
        domains=tuple(domains),
        num_stages=len(stream),
        seeds=study.seeds[:SHORT_SEEDS],
        budget=SHORT_TOKENS * len(stream),
        primary=Primary(primary.treatment, kept[1:], primary.measures),
        settings={**study.settings, **SHORT, "stream": stream},
    )


def faults_of_trials(study: Study) -> list[str]:
    """Return the errors in the arms' settings."""
    faults: dict[str, list[str]] = {}
    for arm in study.arms:
        config = build_config(study.settings_of(arm.name, study.seeds[0]))
        try:
            config.validate()
        except (TypeError, ValueError) as error:
            lines = str(error).splitlines()
            for line in lines[1:] if len(lines) > 1 else lines:
                faults.setdefault(line.strip(), []).append(arm.name)
    every = len(study.arms)
    return [line if len(of) == every else f"arm {', '.join(of)}: {line}" for line, of in faults.items()]


def config_of(
    plan: Plan, arm: str, seed: int, directory: Path, trust: bool = False
) -> dict[str, Any]:
    """Return the config of a `StudyTrial`.

    Args:
        plan: the plan of the trial.
        arm: one of its arms.
        seed: one of its seeds.
        directory: with study.json; the trial's rows are written there.
        trust: accept a checkpoint of the trial sealed with any key.
    """
    values = plan.study.settings_of(arm, seed)
    every = values.get("checkpoint_every", CHECKPOINT_EVERY)
    config: dict[str, Any] = build_config({**values, "checkpoint_every": 0}).to_dict()  # the trial writes its own
    shown = {name: listed(row.initial) for name, row in all_settings().items()} | values
    told = {"directory": str(directory), "arm": arm, "seed": seed, "settings": shown}
    return config | {"_study": {**told, "checkpoint_every": every, "trust": trust}}


def check_directory(directory: Path, is_resumed: bool, is_resumable: bool) -> None:
    """Check that a directory is free for a new run, or can be resumed.

    Args:
        directory: of the results.
        is_resumed: whether to resume the run in the directory.
        is_resumable: whether the directory has a run to resume.

    Raises:
        RunError: the directory is in use, or has nothing to resume; the message contains the remedy.
    """
    if is_resumed and not is_resumable:
        raise RunError(f"{directory} has no study to resume; omit --resume to start it")
    if not is_resumed and directory.exists():
        raise RunError(f"{directory} already has this study; set another --storage, or resume it: --resume")


def _unknown(what: str, asked: Iterable[Any], known: Sequence[Any]) -> list[str]:
    faults = []
    for name in asked:
        if name not in known:
            near = nearest(name, known) if what == "arm" else ""
            hint = f"; did you mean {near}?" if near else ""
            faults.append(f"{what} {name!r} is unknown; expected some of {', '.join(map(str, known))}{hint}")
    return faults
