"""Declares settings as dataclass fields with a default and a meaning; `SRLConfig` and docs/settings.md read the table.

    lr: float = setting(0.1, "step size")     ...     TABLE = table_of(Settings)     {"lr": (0.1, "step size")}
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any


def setting(default: Any, meaning: str) -> Any:
    """Return a field of a dataclass of settings.

    Args:
        default: default value; a dict is copied for each instance.
        meaning: unit and meaning, as docs/settings.md prints it.
    """
    metadata = {"meaning": meaning}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=partial(dict, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def table_of(settings: Any) -> dict[str, tuple[Any, str]]:
    """Return name -> (default, meaning) of every setting.

    Args:
        settings: a dataclass whose fields are all made by `setting`.
    """
    defaults = settings()
    return {
        field.name: (getattr(defaults, field.name), field.metadata["meaning"]) for field in dataclasses.fields(settings)
    }
