"""Settings of a run, by the names they have in SRLConfig, from YAML files and flags.

    run.yaml                        python scripts/train.py --config run.yaml --lr 3e-5 --env_config num_numbers=2
      env: compare
      env_config: {num_shots: 4}    flags go before the file, the file before the defaults
      model: smollm2-135m
      lr: 3e-5

One table (`rllib_srl.config` and, for RLlib's own settings, `RLLIB` below) makes flags, `--help` and docs/settings.md.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rllib_srl import SRLConfig
from rllib_srl import config as ours
from rllib_srl.losses.presets import DEFAULTS, PRESET

RUN, ENVIRONMENT, MODEL, RUNNERS = "run", "environment", "model", "env runners and engine"
TRAINING, LEARNERS, EVALUATION, MEMORY = "training", "learners", "evaluation", "memory"
PLANNER = "planner of continual learning"

@dataclass(frozen=True)
class Setting:
    """One setting. Invariant: `default` is what a new `SRLConfig` holds."""

    name: str
    group: str
    default: Any
    meaning: str


# RLlib's settings that are used most: name -> (group, unit and meaning). `model` stands for model_config["model"].
RLLIB = {
    "env": (ENVIRONMENT, 'what is played: an installed name, or "package.module:Class"'),
    "env_config": (ENVIRONMENT, "its settings"),
    "model": (MODEL, '"smollm2-135m", "tiny", a local directory, or a Hugging Face hub id'),
    "seed": (TRAINING, "of prompts, sampling and learner; none: another one each time"),
    "lr": (TRAINING, "learning rate, or a schedule [[step, rate], ...] over generated turns"),
    "num_epochs": (TRAINING, "optimiser steps on each batch"),
    "grad_clip": (TRAINING, "largest norm of the gradient"),
    "num_env_runners": (RUNNERS, "processes that generate and play; 0: all in one process, for debugging"),
    "num_cpus_per_env_runner": (RUNNERS, "CPUs Ray reserves for each"),
    "num_gpus_per_env_runner": (RUNNERS, "GPUs Ray reserves for each; below 1: a share"),
    "custom_resources_per_env_runner": (RUNNERS, "further Ray resources of each"),
    "sample_timeout_s": (RUNNERS, "seconds one round of playing may take"),
    "num_learners": (LEARNERS, "processes that learn; 0: the main process does"),
    "num_cpus_per_learner": (LEARNERS, "CPUs Ray reserves for each"),
    "num_gpus_per_learner": (LEARNERS, "GPUs Ray reserves for each; below 1: a share"),
    "num_cpus_for_main_process": (LEARNERS, "CPUs Ray reserves for the main process"),
    "evaluation_interval": (EVALUATION, "iterations between evaluations; none: no evaluation"),
    "evaluation_duration": (EVALUATION, "held-out prompts an evaluation plays"),
}
GROUPS = (RUN, ENVIRONMENT, MODEL, RUNNERS, TRAINING, LEARNERS, EVALUATION, MEMORY, PLANNER)
OURS: dict[str, dict[str, tuple[Any, str]]] = {ENVIRONMENT: ours.ENVIRONMENT, RUNNERS: ours.ENV_RUNNERS}
OURS |= {TRAINING: ours.TRAINING, EVALUATION: ours.EVALUATION, MEMORY: ours.REPLAY, PLANNER: ours.PLANNER}
ITERATIONS = Setting("iterations", RUN, 100, "iterations in all; a resumed run counts those it had")
MAPPINGS = ("env_config", "worlds", "mixture", "custom_resources_per_env_runner")
NOT_A_FLAG = ("log_directory",)  # the scripts set it, from --out
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class SettingsError(ValueError):
    """A YAML file or a flag says what no setting can be; the message names each fault."""


@cache
def all_settings() -> dict[str, Setting]:
    """Return every setting by name, group by group; that of the group "run" is the scripts' own."""
    config = SRLConfig()
    rows = [ITERATIONS]
    for name, (group, meaning) in RLLIB.items():
        default = config.model_config["model"] if name == "model" else getattr(config, name)
        rows.append(Setting(name, group, default, meaning))
    rows += [Setting(name, group, *row) for group, table in OURS.items() for name, row in table.items()]
    return {row.name: row for row in sorted(rows, key=lambda row: GROUPS.index(row.group))}


def flag_settings() -> list[Setting]:
    """Return the settings that scripts take as flags and in YAML files."""
    return [setting for setting in all_settings().values() if setting.name not in NOT_A_FLAG]


def add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add `--config` and a flag for each setting; a flag that is not given leaves no attribute."""
    parser.add_argument("--config", metavar="YAML", type=Path, help="file of settings by the names below; flags win")
    groups: dict[str, Any] = {}
    for setting in flag_settings():
        if setting.name in without:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(f"settings: {setting.group}")
        is_mapping = setting.name in MAPPINGS
        groups[setting.group].add_argument(
            f"--{setting.name}",
            default=argparse.SUPPRESS,
            nargs="+" if is_mapping else None,
            metavar="NAME=VALUE" if is_mapping else "VALUE",
            help=f"{setting.meaning} (default: {shown(setting.default)})".replace("%", "%%"),
        )


def shown(default: Any) -> str:
    """Return a default as YAML would say it."""
    if default is None:
        return "none"
    text = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")


def with_underscores(argv: Iterable[str]) -> list[str]:
    """Return `argv` with flags such as --group-size spelt as the settings are: --group_size."""

    def spelt(word: str) -> str:
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        return f"--{name}{equals}{value}" if flag.startswith("--") and name in all_settings() else word

    return [spelt(word) for word in argv]


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the flags of `add_settings` and the file of `--config` give, flags first.

    Raises:
        SettingsError: unknown names, or values of the wrong kind; all at once.
    """
    flags = {s.name: getattr(arguments, s.name) for s in flag_settings() if hasattr(arguments, s.name)}
    return read_values({**(read_yaml(arguments.config) if arguments.config else {}), **flags})


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file.

    Raises:
        SettingsError: the file is missing, is no mapping, or names no setting.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}; expected a YAML file that can be read") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"settings file {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path} holds {type(content).__name__}; expected lines of `name: value`")
    known = [setting.name for setting in flag_settings()]
    if faults := [f"  {name}: {_instead(str(name), known)}" for name in content if name not in known]:
        raise SettingsError(f"settings file {path} has names that are no settings:\n" + "\n".join(faults))
    return content


def _instead(name: str, known: list[str]) -> str:
    if name in NOT_A_FLAG:
        return "expected --out in its place"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else "--help lists the settings"


def read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the types of their settings.

    Raises:
        SettingsError: values of the wrong kind, all at once.
    """
    read, faults = {}, []
    for name, value in values.items():
        try:
            read[name] = read_value(name, value)
        except (ValueError, yaml.YAMLError) as error:
            faults.append(f"  {name} = {value!r}; expected {' '.join(str(error).split())}")
    if faults:
        raise SettingsError("settings cannot be read:\n" + "\n".join(faults))
    return read


def read_value(name: str, value: Any) -> Any:
    """Return one value, from text or YAML, in the type of its setting; ranges are `SRLConfig.validate`'s business.

    Raises:
        ValueError: saying what is expected.
    """
    if name in MAPPINGS:
        return _mapping(value)
    default = all_settings()[name].default
    if default == PRESET and value != PRESET:
        default = DEFAULTS[name]  # the preset's values are of the same type
    if isinstance(default, str) and default != "auto":
        return str(value)
    if isinstance(value, str):
        value = plain(value)
    if value is None or isinstance(value, list | tuple):
        return tuple(value) if isinstance(default, tuple) and value else value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError("true or false")
    elif isinstance(default, int | float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("a number")
        value = float(value) if isinstance(default, float) else value
    return value


def plain(text: str) -> Any:
    """Return what YAML says `text` is, and 3e-5 as a number, which YAML 1.1 takes for text."""
    if NUMBER.fullmatch(text.strip()):
        return int(text) if re.fullmatch(r"[+-]?\d+", text.strip()) else float(text)
    return None if text.strip().casefold() == "none" else yaml.safe_load(text)


def _mapping(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        if len(value) == 1 and "=" not in value[0].split("{")[0]:
            value = plain(value[0])  # JSON or YAML
        else:
            pairs = [word.partition("=") for word in value]
            if not all(equals and name for name, equals, _ in pairs):
                raise ValueError("name=value pairs, or one JSON object")
            value = {name: plain(text) for name, _, text in pairs}
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("name=value pairs, or one JSON object")


def build_config(values: Mapping[str, Any]) -> SRLConfig:
    """Return the config of settings by name, not yet validated."""
    return apply_settings(SRLConfig(), values)


def apply_settings(config: SRLConfig, values: Mapping[str, Any]) -> SRLConfig:
    """Set settings by name, and return `config`."""
    rest = {name: value for name, value in values.items() if name != ITERATIONS.name}
    if "env" in rest:
        config.environment(rest.pop("env"))
    if "model" in rest:
        config.rl_module(model_config={"model": rest.pop("model")})
    if "env_config" in rest:
        config.environment(env_config=rest.pop("env_config") or {})
    return config.update_from_dict(rest)
