"""Settings of environments: every range is kept, names and types are known, and all errors come at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Optional, get_args, get_type_hints

import pytest

from rllib_srl.common.environments import resolve
from rllib_srl.envs.question import QuestionSettings
from rllib_srl.envs.settings import OneOf, Settings, Within, read_settings
from tests.envs.table import entry_points


def every_class(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for one in base.__subclasses__():
        yield from (one, *every_class(one))


def outside(allowed: Within | OneOf) -> list[Any]:
    if isinstance(allowed, OneOf):
        return ["no such name"]
    above = [] if allowed.most == float("inf") else [allowed.most + 1]
    return [allowed.least - 1, *above, *([allowed.least] if allowed.is_open else [])]


def test_every_range_of_every_environment_is_kept() -> None:
    for path in entry_points().values():
        resolve(path)  # imported, its settings are known
    num_checked = 0
    for settings_class in every_class():
        for name, hint in get_type_hints(settings_class, include_extras=True).items():
            for allowed in get_args(hint)[1:]:
                for value in outside(allowed) if isinstance(allowed, (Within, OneOf)) else ():
                    said = re.escape(f"env_config of X: {name} = {value!r}; expected {allowed}")
                    with pytest.raises(ValueError, match=said + "$"):
                        read_settings(settings_class, {name: value}, "X")
                    num_checked += 1
    assert num_checked > 100


@dataclass(frozen=True)
class OwnSettings(QuestionSettings):
    """Settings of a user's environment, with types that none of the package's environments has."""

    names: list[str] | None = None
    mode: Literal["easy", "hard"] = "easy"
    weight: Optional[float] = None  # noqa: UP045


def test_settings_of_a_user_may_have_any_type() -> None:
    given = {"names": ["a"], "mode": "hard", "weight": 2}
    settings = read_settings(OwnSettings, given, "Own")
    assert {name: getattr(settings, name) for name in given} == given
    for wrong in ({"names": [1]}, {"names": "a"}, {"mode": "no"}, {"weight": "2"}, {"weight": True}):
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"env_config of Own: {name} = {re.escape(repr(value))}; expected "):
            read_settings(OwnSettings, wrong, "Own")


def test_all_errors_come_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        read_settings(OwnSettings, {"num_shots": 65, "mode": 3, "shots": 1, "retry_reward": -0.5}, "Own")
    for part in ("shots is not a setting; expected one of ", "num_shots = 65; ", "mode = 3; ", "retry_reward = -0.5; "):
        assert part in str(caught.value)
