"""Named algorithms and memories: one word sets loss, advantage, sampling and replay of a published method.

    SRLConfig().training("dapo")          srl train --algorithm dapo          {"algorithm": "dapo"} under Tune
    SRLConfig().replay("srl")             srl train --replay srl              {"replay": "srl"}

The user's settings take precedence, and a later name replaces an earlier one. docs/settings.md lists what each name
sets, docs/losses.md what differs from the papers. None of them loads a reference model for a KL term; set `kl_coeff`
for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_srl.common.foreign_names import nearest
from rllib_srl.replay.settings import ReplaySettings

_OF_MEMORY = ("revisit_fraction", "reuse_fraction", "retain", "spacing", "selection", "diversity_coeff")


def _memory(**changes: Any) -> dict[str, Any]:
    """Return all settings that the name of a memory sets: the defaults, some of them changed.

    Its capacity is left as it is, so that a run which is resumed with another memory drops nothing.
    """
    values = {name: ReplaySettings.model_fields[name].default for name in _OF_MEMORY} | changes
    return {f"{ReplaySettings.prefix}{name}": value for name, value in values.items()}


_UNIFORM = {"revisit_fraction": 0.25, "retain": 0.0, "spacing": "none", "selection": "uniform", "diversity_coeff": 0.0}
MEMORIES: dict[str, dict[str, Any]] = {
    "none": _memory(**_UNIFORM | {"revisit_fraction": 0.0, "capacity": 0}),
    "uniform": _memory(**_UNIFORM),
    "balanced": _memory(**_UNIFORM | {"selection": "balanced"}),
    "srl": _memory(),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", **MEMORIES["none"]},
    "dapo": {"loss": "dapo", **MEMORIES["none"]},
    "spo": {
        **MEMORIES["uniform"],
        "num_prompts_per_batch": 128,  # one episode each: as many episodes as 16 prompts of 8
        "group_size": 1,
        "advantage": "posterior",
        "surprise_scale": "centred",
        "min_surprise": 0.0,
        "replay_selection": "contrib.spo",
    },
    "srl": MEMORIES["srl"],
}
SOURCES = {
    "grpo": "Shao et al. 2024, arXiv 2402.03300",
    "dapo": "Yu et al. 2025, arXiv 2503.14476",
    "spo": "Xu and Ding 2025, arXiv 2509.13232",
    "srl": "this project: revisits by spaced repetition and diversity, and retention",
}
TABLES = {"algorithm": ALGORITHMS, "replay": MEMORIES}  # a memory replaces that of the algorithm
NAMED = frozenset(setting for table in TABLES.values() for values in table.values() for setting in values)


def settings_of_name(kind: str, name: Any) -> Mapping[str, Any]:
    """Return the settings of a named algorithm (`kind` "algorithm") or memory ("replay").

    Raises:
        ValueError: the name is unknown.
    """
    table = TABLES[kind]
    if not isinstance(name, str) or name not in table:
        near = nearest(name, table) if isinstance(name, str) else ""
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"{kind} = {name!r}; expected one of {', '.join(map(repr, table))}{hint}")
    return table[name]


def named_settings(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a named algorithm and memory stand for together; `names` has them by kind, None: none.

    Raises:
        ValueError: a name is unknown.
    """
    chosen = {kind: settings_of_name(kind, names[kind]) for kind in TABLES if names.get(kind) is not None}
    replaced = MEMORIES["none"].keys() if "replay" in chosen else ()
    kept = {name: value for name, value in chosen.get("algorithm", {}).items() if name not in replaced}
    return {**kept, **chosen.get("replay", {})}


def without_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with "algorithm" and "replay" replaced by what they stand for; other values take precedence.

    Raises:
        ValueError: a name is unknown.
    """
    return named_settings(values) | {name: value for name, value in values.items() if name not in TABLES}
