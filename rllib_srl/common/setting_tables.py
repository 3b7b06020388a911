"""Declares the parameters of a rule that is a frozen dataclass: `factor: float = setting(2.0, "draws among ...")`."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from rllib_srl.common.setting_model import Setting


def setting(default: Any, meaning: str) -> Any:
    """Return a field of a dataclass: a parameter with its default and meaning, as docs/settings.md prints it."""
    return dataclasses.field(default=default, metadata={"setting": partial(Setting, meaning=meaning)})


def table_of(rule: type) -> dict[str, Setting]:
    """Return name -> `Setting` of each field of a dataclass that `setting` made."""
    fields = [field for field in dataclasses.fields(rule) if "setting" in field.metadata]
    return {field.name: field.metadata["setting"](field.default) for field in fields}
