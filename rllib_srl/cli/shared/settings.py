"""Read the settings of a run, under their names in SRLConfig, from YAML files and flags.

    run.yaml                        srl train --config run.yaml --lr 2e-5 --env_config num_numbers=2
      env: compare
      env_config: {num_shots: 4}    flags override the file, the file overrides the defaults
      model: smollm2-135m
      lr: 2e-5

      replay_spacing: {name: fixed, interval: 8}      the same as --replay_spacing name=fixed interval=8

Flags, `--help` and docs/settings.md are made from one table: `rllib_srl.algorithm.settings` and, for RLlib's own
settings, `RLLIB` below.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rllib_srl import SRL, SRLConfig
from rllib_srl.algorithm import settings as ours
from rllib_srl.algorithm.checks import early_faults
from rllib_srl.algorithm.own_data import ENVIRONMENT as OWN_DATA
from rllib_srl.algorithm.resources import check_machine_holds
from rllib_srl.algorithm.settings import FLAT, GROUPS, place_of
from rllib_srl.algorithm.validation import faults_of
from rllib_srl.cli.shared.command_line import add_debug, add_verbose
from rllib_srl.cli.shared.stopping import GRACE_S
from rllib_srl.common.foreign_names import in_place_of
from rllib_srl.common.setting_tables import Group, public
from rllib_srl.losses.presets import DEFAULTS, PRESET

RUN, ENVIRONMENT, MODEL, RUNNERS = "run", "environment", "model", "env runners and engine"
TRAINING, LEARNERS, EVALUATION, MEMORY = "training", "learners", "evaluation", "memory"
PLANNER = "planner of continual learning"


@dataclass(frozen=True)
class Setting:
    """One setting. Invariant: `default` is its value in a new `SRLConfig`."""

    name: str
    group: str
    default: Any
    meaning: str


# RLlib's most used settings: name -> (group, unit and meaning). `model` stands for model_config["model"].
RLLIB = {
    "callbacks": (TRAINING, 'callbacks: "contrib.trackers:wandb", "module:Class", a list; not kept by --resume'),
    "env": (ENVIRONMENT, 'environment: an installed name (docs/environments.md), or "package.module:Class"'),
    "env_config": (ENVIRONMENT, "settings of the environment"),
    "model": (MODEL, 'policy: "smollm2-135m", "tiny", a local directory, or a Hugging Face hub id'),
    "seed": (TRAINING, "random seed of the run; none: a different one for each"),
    "lr": (TRAINING, "learning rate, or a schedule [[step, rate], ...] whose steps are generated turns"),
    "num_epochs": (TRAINING, "optimiser steps per batch"),
    "grad_clip": (TRAINING, "maximum norm of the gradient"),
    "num_env_runners": (RUNNERS, "processes that generate and play episodes; 0: the main process does, for debugging"),
    "num_cpus_per_env_runner": (RUNNERS, "CPUs that Ray reserves per env runner"),
    "num_gpus_per_env_runner": (RUNNERS, "GPUs that Ray reserves per env runner; below 1: a share of one"),
    "custom_resources_per_env_runner": (RUNNERS, "further Ray resources per env runner"),
    "sample_timeout_s": (RUNNERS, "timeout of one round of sampling, seconds"),
    "num_learners": (LEARNERS, "learner processes; 0: the main process trains"),
    "num_cpus_per_learner": (LEARNERS, "CPUs that Ray reserves per learner; auto: 1 without a GPU, else 0"),
    "num_gpus_per_learner": (LEARNERS, "GPUs that Ray reserves per learner; below 1: a share of one"),
    "num_cpus_for_main_process": (LEARNERS, "CPUs that Ray reserves for the main process"),
    "evaluation_interval": (EVALUATION, "iterations between evaluations; none: no evaluation"),
    "evaluation_duration": (EVALUATION, "number of held-out prompts per evaluation"),
}
DEFAULT_OF: dict[str, Callable[[SRLConfig], Any]] = {
    "model": lambda config: config.model_config["model"],
    "callbacks": lambda config: None,
}
ORDER = (RUN, ENVIRONMENT, MODEL, RUNNERS, TRAINING, LEARNERS, EVALUATION, MEMORY, PLANNER)
OURS = {ENVIRONMENT: ours.ENVIRONMENT, RUNNERS: ours.ENV_RUNNERS, TRAINING: ours.TRAINING}
OURS |= {EVALUATION: ours.EVALUATION, MEMORY: ours.REPLAY, PLANNER: ours.PLANNER}
ITERATIONS = Setting("iterations", RUN, 100, "total number of iterations, those before a resume included")
GRACE = Setting("grace_s", RUN, GRACE_S, "seconds from SIGTERM to exit, in which the iteration may finish and be saved")
MAX_FAILURES = Setting("max_failures", RUN, 3, "new starts after lost processes, without a newer checkpoint; 0: none")
SCRIPTS_OWN = (ITERATIONS, GRACE, MAX_FAILURES)
# The settings in `--help`; `--help-all` also shows the rest.
USED_MOST = (
    *("env", "env_config", "data", "reward", "model", "engine"),
    *("seed", "lr", "iterations", "num_prompts_per_batch", "group_size"),
    *("max_turn_tokens", "max_episode_tokens", "num_env_runners", "evaluation_interval", "checkpoint_every"),
)
MAPPINGS = ("env_config", "worlds", "mixture", "regularisers", "custom_resources_per_env_runner")
SHORTHANDS = {  # stand for env and env_config
    "data": "your own questions: a file or a hub data set",
    "reward": 'with data: reward functions, module:f, file.py:f or a URL',
}
NOT_A_FLAG = ("log_directory",)  # the scripts set it, from --out
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class SettingsError(ValueError):
    """Invalid settings in a YAML file or a flag; the message lists each error."""


@cache
def all_settings() -> dict[str, Setting]:
    """Return every setting by name, ordered by group; the group "run" belongs to the scripts."""
    config = SRLConfig()
    rows = [*SCRIPTS_OWN]
    for name, (group, meaning) in RLLIB.items():
        default = DEFAULT_OF[name](config) if name in DEFAULT_OF else getattr(config, name)
        rows.append(Setting(name, group, default, meaning))
    rows += [Setting(name, ENVIRONMENT, None, meaning) for name, meaning in SHORTHANDS.items()]
    for group, table in OURS.items():
        rows += [Setting(name, group, row.default, row.meaning) for name, row in public(table).items()]
    return {row.name: row for row in sorted(rows, key=lambda row: ORDER.index(row.group))}


def flag_settings() -> list[Setting]:
    """Return the settings that scripts take as flags and in YAML files."""
    return [setting for setting in all_settings().values() if setting.name not in NOT_A_FLAG]


def add_settings(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add `--config`, a flag for each setting and `--help-all`; a flag that is not given leaves no attribute."""
    parser.add_argument("--config", metavar="YAML", type=Path, help="file with the settings below; flags override it")
    all_help: dict[argparse.Action, str] = {}
    parser.add_argument("--help-all", action=HelpAll, all_help=all_help, help="show all settings and exit")
    used_most = parser.add_argument_group("settings used most (--help-all shows all)")
    groups: dict[str, Any] = {}
    for setting in flag_settings():
        if setting.name in without:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(f"settings: {setting.group}")
        is_mapping = setting.name in MAPPINGS or setting.name in GROUPS
        action = (used_most if setting.name in USED_MOST else groups[setting.group]).add_argument(
            f"--{setting.name}",
            default=argparse.SUPPRESS,
            nargs="+" if is_mapping else None,
            metavar="NAME=VALUE" if setting.name in MAPPINGS else "VALUE",
            help=f"{setting.meaning} (default: {shown(setting.default)})".replace("%", "%%"),
        )
        if setting.name not in USED_MOST:
            all_help[action], action.help = str(action.help), argparse.SUPPRESS


class HelpAll(argparse.Action):
    """`--help-all`: the page of `--help` with the settings that it omits."""

    def __init__(
        self, option_strings: list[str], dest: str, all_help: Mapping[argparse.Action, str], help: str | None = None
    ) -> None:
        """Store `all_help`: the help text of each flag that `--help` omits."""
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)
        self._all_help = all_help

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print the help and exit."""
        for action, text in self._all_help.items():
            action.help = text
        parser.print_help()
        parser.exit()


def add_flags_of_played_runs(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that play the held-out prompts of finished runs or of models."""
    text = "use the reward functions that the settings of someone else's run name; they are code"
    parser.add_argument("--trust-checkpoint", "--trust_checkpoint", action="store_true", help=text)
    add_verbose(parser)
    add_debug(parser)
    add_settings(parser, without=("iterations", "grace_s", "model"))


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-checkpoint`."""
    text = "with --resume: accept a checkpoint of another user or machine, or an old one; its pickles can run any code"
    parser.add_argument("--trust-checkpoint", "--trust_checkpoint", action="store_true", help=text)


def shown(default: Any) -> str:
    """Return a default in YAML notation."""
    if default is None:
        return "none"
    text = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


class Parser(argparse.ArgumentParser):
    """A parser that reports errors as one message without the usage, with exit status 2.

    The message lists all unknown flags at once, and errors in the other settings as far as they can be validated.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; exit if there are unknown ones."""
        arguments, extra = self.parse_known_args(args, namespace)
        if extra:
            self._refuse(extra, arguments)
        return arguments

    def _refuse(self, extra: list[str], arguments: argparse.Namespace) -> NoReturn:
        is_name = [not NUMBER.fullmatch(word) and (word.startswith("-") or "=" in word) for word in extra]
        unknown = [word for word, is_one in zip(extra, is_name, strict=True) if is_one] or extra
        known = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        hints = [(word.partition("=")[0], in_place_of(word.partition("=")[0], known, "--")) for word in unknown]
        lines = ["unknown arguments:", *(f"  {word}: {hint or '--help lists them all'}" for word, hint in hints)]
        try:
            lines += _more_faults(given_settings(arguments))
        except SettingsError as error:
            lines.append(str(error))
        self.error("\n".join(lines))

    def error(self, message: str) -> NoReturn:
        """Exit with a message."""
        self.exit(2, f"error: {message}\n")


def with_underscores(argv: Iterable[str]) -> list[str]:
    """Return `argv` with underscores in flags (--group-size: --group_size) and negative values joined to their flag.

    argparse would treat the -1e-5 of `--lr -1e-5` as a flag.
    """

    names = set(all_settings())

    def spelt(word: str) -> str:
        flag, equals, value = word.partition("=")
        name = flag[2:].replace("-", "_")
        return f"--{name}{equals}{value}" if flag.startswith("--") and name in names else word

    words: list[str] = []
    for word in map(spelt, argv):
        is_value = word.startswith("-") and NUMBER.fullmatch(word)
        if is_value and words and words[-1].removeprefix("--") in names:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def grace_of(values: Mapping[str, Any]) -> float:
    """Return `grace_s`, the seconds from SIGTERM to the end of the process.

    Raises:
        SettingsError: the value is not a number, or below 0.
    """
    grace_s = values.get(GRACE.name, GRACE.default)
    if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s < math.inf:
        raise SettingsError(f"{GRACE.name} = {grace_s!r}; expected a number of at least 0")
    return float(grace_s)


def max_failures_of(values: Mapping[str, Any]) -> int:
    """Return `max_failures`, the new starts of a run, or of a trial of Tune, that has lost a process.

    Raises:
        SettingsError: the value is not an integer, or below 0.
    """
    number = values.get(MAX_FAILURES.name, MAX_FAILURES.default)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise SettingsError(f"{MAX_FAILURES.name} = {number!r}; expected an integer of at least 0")
    return number


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings from the flags of `add_settings` and the file of `--config`; flags override the file.

    Raises:
        SettingsError: unknown names, values of the wrong type, and errors in the other settings; all at once.
    """
    faults: list[str] = []
    path = getattr(arguments, "config", None)
    values = _content_of(path) if path else {}
    if unknown := _unknown_names(values):
        faults += [f"settings file {path} has unknown names:", *unknown]
    known = {setting.name for setting in flag_settings()}
    read, wrong = _read({name: value for name, value in {**values, **_given(arguments)}.items() if name in known})
    if wrong:
        faults += ["settings cannot be read:", *wrong]
    try:
        read = expanded(read)
    except ValueError as error:
        faults.append(f"settings have faults:\n  {error}")
    if faults:
        raise SettingsError("\n".join([*faults, *_more_faults(read)]))
    return read


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the environment that `data` and `reward` stand for in their place.

    Raises:
        ValueError: they contradict other settings.
    """
    rest = {name: value for name, value in values.items() if name not in SHORTHANDS}
    data, reward = (values.get(name) for name in SHORTHANDS)
    if data is None and reward is None:
        return rest
    if values.get("env") not in (None, OWN_DATA) or values.get("worlds") or values.get("stream"):
        name = next(name for name in ("env", "worlds", "stream") if values.get(name))
        shorthand = "data" if data is not None else "reward"
        raise ValueError(f"{shorthand} with {name} = {values[name]!r}; expected one of the two")
    config = SRLConfig()
    if data is not None:
        config.data(data)
    if reward is not None:
        config.reward(reward)
    given = values.get("env_config") or {}
    if data is None and "path" not in given:
        raise ValueError(f"reward = {reward!r}; expected data beside it: the questions whose answers it rewards")
    return {**rest, "env": OWN_DATA, "env_config": {**config.env_config, **given}}


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    names = [setting.name for setting in flag_settings()]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def _more_faults(read: Mapping[str, Any]) -> list[str]:
    """Return the errors in the readable settings; required settings may still be missing."""
    try:
        config = build_config(read)
        config.choose_length()
        lines = faults_of(config)
        lines += early_faults(config, lines)
    except (TypeError, ValueError) as error:  # from RLlib's own setters
        lines = str(error).splitlines()
    named = [line for line in map(in_flag_names, lines) if re.split(r"\W", line, maxsplit=1)[0] in read]
    return ["settings have faults:", *(f"  {line}" for line in named)] if named else []


def check(config: SRLConfig, more: Iterable[str] = ()) -> None:
    """Validate a config; if a local Ray is still to be started, also check the resources of this machine.

    Args:
        config: the config.
        more: errors that are already known.

    Raises:
        SettingsError: all errors, in the names of flags and YAML files.
        PlacementError: this machine has too few resources.
    """
    import ray

    lines = list(more)
    try:
        config.validate()
    except ValueError as error:
        lines += [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    if lines:
        raise SettingsError("settings have faults:\n" + "\n".join(f"  {in_flag_names(line)}" for line in lines))
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        check_machine_holds(SRL.default_resource_request(config), config)


def in_flag_names(line: str) -> str:
    """Return an error message in the names of flags and YAML files."""
    return line.replace("model_config['model']", "model").replace("env_config of env", "env_config")


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file.

    Raises:
        SettingsError: the file is missing, is not a mapping, or has an unknown name.
    """
    content = _content_of(path)
    if unknown := _unknown_names(content):
        raise SettingsError("\n".join([f"settings file {path} has unknown names:", *unknown]))
    return content


def _content_of(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror}; expected a YAML file that can be read") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"settings file {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path} holds a {type(content).__name__}; expected lines of `name: value`")
    return content


def _unknown_names(content: Mapping[Any, Any]) -> list[str]:
    known = [setting.name for setting in flag_settings()]
    return [f"  {name}: {_instead(str(name), known)}" for name in content if name not in known]


def _instead(name: str, known: list[str]) -> str:
    if name in NOT_A_FLAG:
        return "use --out"
    if place := place_of(name):
        return f"use {place}"
    return in_place_of(name, known) or "--help lists the settings"


def read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values converted to the types of their settings.

    Raises:
        SettingsError: values of the wrong type, all at once.
    """
    read, faults = _read(values)
    if faults:
        raise SettingsError("\n".join(["settings cannot be read:", *faults]))
    return read


def _read(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the readable values, and an error message for each other one."""
    read, faults = {}, []
    for name, value in values.items():
        try:
            read[name] = read_value(name, value)
        except (ValueError, yaml.YAMLError) as error:
            shown_value = value[0] if isinstance(value, list) and name in GROUPS and len(value) == 1 else value
            faults.append(f"  {name} = {shown_value!r}; expected {' '.join(str(error).split())}")
    return read, faults


def read_value(name: str, value: Any) -> Any:
    """Convert one value, from text or YAML, to the type of its setting; `SRLConfig.validate` checks ranges.

    Raises:
        ValueError: the value has the wrong type; the message names the expected one.
    """
    if name in SHORTHANDS:
        is_yaml = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
        return plain(value) if is_yaml else value
    if name in MAPPINGS or (name in FLAT and FLAT[name].parameter == "*"):
        return _mapping(value)
    if name in GROUPS:
        return _group_value(GROUPS[name], value)
    return _plain_value(_default_of(name), value)


def _default_of(name: str) -> Any:
    """Return the default of a setting, or of a parameter by its flat name."""
    if name in FLAT:
        default = FLAT[name].default
    else:
        default = all_settings()[name].default
    return DEFAULTS[name] if isinstance(default, str) and default == PRESET else default


def _group_value(group: Group, value: Any) -> Any:
    """Convert the value of a setting with parameters: that of its head, or a mapping."""
    words = value if isinstance(value, list) and all(isinstance(word, str) for word in value) else [value]
    is_mapping = isinstance(words[0], str) and (words[0].lstrip().startswith("{") or "=" in words[0])
    if not is_mapping and len(words) > 1 and isinstance(group.default(group.head), str):
        raise ValueError("one value, name=value pairs, or one JSON object")
    given = _mapping(words) if is_mapping else words[0] if len(words) == 1 else value
    if not isinstance(given, Mapping):
        return _plain_value(_default_of(group.flat[group.head]), given)
    values, faults = {}, []
    for key, one in given.items():
        try:
            values[key] = _plain_value(_default_of(group.flat[key]), one) if key in group.flat else one
        except ValueError as error:
            faults.append(f"{key} to be {error}")
    if faults:
        raise ValueError(", ".join(faults))
    return values


def _plain_value(default: Any, value: Any) -> Any:
    if isinstance(value, str) and value == PRESET:
        return value
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
    """Parse `text` as YAML, except that 3e-5 is a number, which YAML 1.1 reads as text."""
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
    """Return a config with the given settings, not yet validated.

    Raises:
        SettingsError: settings contradict each other.
    """
    try:
        return apply_settings(SRLConfig(), expanded(values))
    except ValueError as error:
        raise SettingsError(str(error)) from None


def model_config_of(values: Mapping[str, Any]) -> SRLConfig:
    """Return a config with only those settings of a run that shape the tensors of its model."""
    return build_config({name: values[name] for name in ("model", "lora") if name in values})


def apply_settings(config: SRLConfig, values: Mapping[str, Any]) -> SRLConfig:
    """Set settings by name, and return `config`."""
    own = [setting.name for setting in SCRIPTS_OWN]
    rest = {name: value for name, value in values.items() if name not in own}
    if "env" in rest:
        config.environment(rest.pop("env"))
    if "model" in rest:
        config.rl_module(model_config={"model": rest.pop("model")})
    if "env_config" in rest:
        config.environment(env_config=rest.pop("env_config") or {})
    updated: SRLConfig = config.update_from_dict(rest)
    return updated
