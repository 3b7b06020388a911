"""Settings of a run as flat texts and numbers without secrets, for reports and trackers.

    settings_to_log(config)                           {"model": "tiny", "lr": 1e-4, "env_config.num_shots": 0, ...}
    dict(flat_settings({"a": {"api_key": "x"}}))      {"a.api_key": "[secret]"}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rllib_srl.algorithm.settings import SETTINGS
from rllib_srl.replay.admission import redact

# RLlib's settings that are shown beside those of SRL.
OF_RLLIB = (
    *("env", "env_config", "seed", "lr", "num_epochs", "grad_clip", "num_env_runners", "num_learners"),
    *("evaluation_interval", "evaluation_duration"),
)
_SECRET_NAME = re.compile(r"(key|token|secret|password|passwd|authorization|cookie|credential)s?$", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def settings_to_log(config: Any) -> dict[str, Any]:
    """Return the settings of a run as texts and numbers, nested names joined by ".", without secrets."""
    names = [name for name, row in SETTINGS.items() if name in OF_RLLIB or not row.is_rllib]
    values = {"model": config.model_config["model"], **{name: getattr(config, name) for name in names}}
    del values["seal_key_file"]
    return dict(flat_settings(values))


def flat_settings(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as (name, text or number), nested names joined by ".", without secrets."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{name}", value
        else:
            is_secret = isinstance(value, str) and _SECRET_NAME.search(str(name))
            yield f"{prefix}{name}", "[secret]" if is_secret else without_secrets(str(value))


def without_secrets(text: str) -> str:
    """Return a text without the passwords and keys that the memory's detector finds, nor users in addresses."""
    return redact(_USER_IN_ADDRESS.sub("[password]", text))
