"""Read the settings of a run, under their names in SRLConfig, from YAML files and flags.

    run.yaml                        srl train --config run.yaml --lr 2e-5 --env_config num_numbers=2
      env: compare
      env_config: {num_shots: 4}    flags override the file, the file overrides the defaults
      model: smollm2-135m
      lr: 2e-5

Types, ranges and defaults are those of the models in `rllib_srl.algorithm.settings`. What needs Ray or torch is
imported where it is used, so that `srl train --help` loads neither.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from rllib_srl.algorithm.named import ALGORITHMS, MEMORIES, without_names
from rllib_srl.algorithm.settings import PARTS, Part, errors_of, without_secrets
from rllib_srl.common.foreign_names import in_place_of
from rllib_srl.common.loading import OWN_DATA, with_whole_rules
from rllib_srl.common.setting_model import PRESET, Setting, Settings, setting

if TYPE_CHECKING:
    from rllib_srl.algorithm.config import SRLConfig

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PARSED = re.compile(rf"(?![+-]?0\d){NUMBER.pattern}|true|false|none|null|[\[{{'\"].*", re.IGNORECASE | re.DOTALL)


class RunSettings(Settings):
    """How long `srl train` goes on; no part of SRLConfig."""

    iterations: int = setting(100, "total number of iterations, those before a resume included", ge=1)
    max_failures: int = setting(3, "new starts after lost processes, without a newer checkpoint; 0: none", ge=0)


class Shorthands(Settings):
    """Words that stand for several settings; what is given beside them wins."""

    algorithm: Literal[tuple(ALGORITHMS)] | None = setting(  # type: ignore[valid-type]
        None, f"a paper's method: {' '.join(ALGORITHMS)}; sets its loss, groups and memory (docs/settings.md)"
    )
    replay: Literal[tuple(MEMORIES)] | None = setting(  # type: ignore[valid-type]
        None, f"memory in one word, else srl: {' '.join(MEMORIES)}"
    )
    data: Any = setting(None, "your own questions: a file or a hub data set")
    reward: Any = setting(None, "with data: reward functions, module:f, file.py:f or a URL")


RUN = Part("run", "", RunSettings)
WORDS = Part("in one word", "", Shorthands)
ALL_PARTS = (RUN, WORDS, *PARTS)
SHORTHANDS = tuple(WORDS.rows)
NOT_A_FLAG = ("log_directory",)  # the scripts set it, from --out


class SettingsError(ValueError):
    """Invalid settings in a YAML file or a flag; the message lists each error."""


@cache
def all_settings() -> dict[str, Setting]:
    """Return every setting by name, ordered by part."""
    return {name: row for part in ALL_PARTS for name, row in part.rows.items()}


def flag_settings() -> dict[str, Setting]:
    """Return the settings that scripts take as flags and in YAML files."""
    return {name: row for name, row in all_settings().items() if name not in NOT_A_FLAG}


def shown(default: Any) -> str:
    """Return a default in YAML notation."""
    if default is None:
        return "none"
    text = yaml.safe_dump(list(default) if isinstance(default, tuple) else default, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def listed(value: Any) -> Any:
    """Return a setting's value in the types of YAML and JSON: a tuple as a list."""
    if isinstance(value, Mapping):
        return {name: listed(part) for name, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def flat_settings(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as (name, text or number), nested names joined by ".", without secrets."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            is_plain = isinstance(value, bool | int | float)
            yield f"{prefix}{name}", value if is_plain else str(without_secrets(value, str(name)))


def run_settings(values: Mapping[str, Any]) -> RunSettings:
    return RunSettings(**{name: values[name] for name in RUN.rows if name in values})


def given_settings(arguments: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings from flags and the file of `--config`, which flags override; SettingsError: all errors.

    Settings of the file that the command does `without` are left out, with a note: the file may be that of a run.
    """
    path = getattr(arguments, "config", None)
    values = _content_of(path) if path else {}
    if unused := [name for name in values if name in without]:
        text = textwrap.shorten(", ".join(unused), 90)
        print(f"note: this command does not use these settings of {path}: {text}", file=sys.stderr)
        values = {name: value for name, value in values.items() if name not in unused}
    unknown = _unknown_names(values)
    known = flag_settings()
    read, wrong = _read({name: value for name, value in {**values, **_flags_given(arguments)}.items() if name in known})
    out_of_range = errors_of(read, ALL_PARTS)[0]
    wrong += out_of_range.values()
    read = {name: value for name, value in read.items() if name not in out_of_range}
    try:
        read = expanded(read)
    except ValueError as error:
        wrong.append(str(error))
    if unknown or wrong:
        wrong += [line for line in more_errors(read) if line not in wrong]
        names = [f"settings file {path} has unknown names:", *unknown] if unknown else []
        raise SettingsError("\n".join([*names, invalid(wrong)]).strip())
    return read


def invalid(lines: Sequence[str]) -> str:
    """Return the message for some errors in settings, "" for none."""
    return "".join(["invalid settings:", *(f"\n  {line}" for line in lines)]) if lines else ""


def expanded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those that the shorthands stand for in their place; ValueError: they contradict others."""
    values = with_whole_rules(without_names(values))
    others = {name: value for name, value in values.items() if name not in SHORTHANDS}
    data, reward = values.get("data"), values.get("reward")
    if data is None and reward is None:
        return others
    from rllib_srl.algorithm.config import SRLConfig

    if values.get("env") not in (None, OWN_DATA) or values.get("envs") or values.get("stream"):
        name = next(name for name in ("env", "envs", "stream") if values.get(name))
        shorthand = "data" if data is not None else "reward"
        raise ValueError(f"{shorthand} with {name} = {values[name]!r}; expected one of the two")
    config = SRLConfig()
    if data is not None:
        config.data(data)
    if reward is not None:
        config.reward(reward)
    env_config = values.get("env_config") or {}
    if data is None and "path" not in env_config:
        raise ValueError(f"reward = {reward!r}; expected data with it: the questions whose answers it rewards")
    return {**others, "env": OWN_DATA, "env_config": {**config.env_config, **env_config}}


def _flags_given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in flag_settings() if hasattr(arguments, name)}


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that were given, and `--config`, as words for another command."""
    settings = {"config": getattr(arguments, "config", None), **_flags_given(arguments)}
    listed = {name: value if isinstance(value, list) else [str(value)] for name, value in settings.items() if value}
    return [word for name, values in listed.items() for word in (f"--{name}", *values)]


def more_errors(read: Mapping[str, Any]) -> list[str]:
    """Return the errors in the readable settings; required settings may still be missing."""
    from rllib_srl.algorithm.checks import early_errors
    from rllib_srl.algorithm.validation import config_errors

    try:
        config = build_config(read)
        config.choose_length()
        lines = config_errors(config)
        lines += early_errors(config, lines)
    except (TypeError, ValueError) as error:  # from RLlib's own setters
        lines = str(error).splitlines()
    return [line for line in lines if re.split(r"\W", line, maxsplit=1)[0] in {"data", *read}]


def check(config: SRLConfig) -> None:
    """Validate a config; if a local Ray is still to be started, also check the resources of this machine.

    Raises:
        SettingsError: all errors.
        PlacementError: this machine has too few resources.
    """
    import ray

    from rllib_srl.algorithm.resources import check_machine_holds
    from rllib_srl.algorithm.srl import SRL

    try:
        config.validate()
    except ValueError as error:
        raise SettingsError(str(error).replace("SRLConfig is invalid:", "invalid settings:")) from None
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        check_machine_holds(SRL.default_resource_request(config), config)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file; SettingsError: it cannot be read, or has an unknown name."""
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
    known = list(flag_settings())
    return [f"  {name}: {_instead(str(name), value, known)}" for name, value in content.items() if name not in known]


def _instead(name: str, value: Any, known: list[str]) -> str:
    if name in NOT_A_FLAG:
        return "use --out"
    nested = value if isinstance(value, Mapping) else {}
    flat = [full for key in nested for full in (f"{name}_{key}", key) if full in known]
    if flat:
        return f"write {', '.join(flat)} without this heading: names are flat"
    return in_place_of(name, known) or "--help lists the settings"


def read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values converted to the types of their settings; SettingsError: those of a wrong type, all at once."""
    read, errors = _read(values)
    if errors:
        raise SettingsError(invalid(errors))
    return read


def _read(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the readable values, and an error message for each other one; the values are text or from YAML."""
    read, errors = {}, []
    for name, value in values.items():
        try:
            read[name] = read_value(name, value)
        except (ValueError, yaml.YAMLError) as error:
            errors.append(f"{name} = {value!r}; expected {' '.join(str(error).split())}")
    return read, errors


def read_value(name: str, value: Any) -> Any:
    """Convert one value from text or YAML; whether it fits its setting is checked apart."""
    row = all_settings()[name]
    if name in SHORTHANDS and not str(value).lstrip().startswith(("[", "{")):
        return value
    if row.is_mapping:
        return _mapping(value)
    if isinstance(value, str) and not (isinstance(row.default, str) and row.default != "auto") and value != PRESET:
        value = plain(value)
    if isinstance(row.default, tuple) and isinstance(value, list):
        return tuple(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if isinstance(row.default, float) and is_integer else value


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
            # Other text is meant as typed: in YAML " #" starts a comment, ": " a mapping, and 007 is 7.
            value = {name: plain(text) if _PARSED.fullmatch(text.strip()) else text for name, _, text in pairs}
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("name=value pairs, or one JSON object")


def build_config(values: Mapping[str, Any]) -> SRLConfig:
    """Return a config with the given settings, not yet validated; SettingsError: they contradict each other."""
    from rllib_srl.algorithm.config import SRLConfig

    try:
        settings = {name: value for name, value in expanded(values).items() if name not in RUN.rows}
        return SRLConfig().update_from_dict(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def model_config_of(values: Mapping[str, Any]) -> SRLConfig:
    """Return a config with only those settings of a run that shape the tensors of its model."""
    names = [name for name in values if name == "model" or name.startswith("lora_")]
    return build_config({name: values[name] for name in names})
