"""Named algorithms and memories: one word sets loss, advantage, sampling and replay of a published method.

    SRLConfig().training("dapo")          srl train --algorithm dapo          {"algorithm": "dapo"} under Tune
    SRLConfig().replay("srl")             srl train --replay srl              {"replay": "srl"}

The user's settings take precedence. docs/settings.md lists what each name sets, docs/losses.md what differs from the
papers. None of them loads a reference model for a KL term; set `kl_coeff` for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_srl.common.foreign_names import nearest

MEMORIES: dict[str, dict[str, Any]] = {
    "none": {"replay_revisit_fraction": 0.0, "replay_reuse_fraction": 0.0, "replay_capacity": 0},
    "uniform": {"replay_revisit_fraction": 0.25, "replay_selection": "uniform"},
    "balanced": {"replay_revisit_fraction": 0.25, "replay_selection": "balanced"},
    "srl": {
        "replay_revisit_fraction": 0.25,
        "replay_spacing": "fsrs",
        "replay_selection": "srl",
        "replay_diversity_coeff": 0.5,
        "replay_retain": 1.0,
    },
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", **MEMORIES["none"]},
    "dapo": {"loss": "dapo", **MEMORIES["none"]},
    "spo": {
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
TABLES = {"algorithm": ALGORITHMS, "replay": MEMORIES}


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


def without_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with "algorithm" and "replay" replaced by what they stand for; other values take precedence.

    Raises:
        ValueError: a name is unknown.
    """
    settings = dict(values.items())  # a config, as RLlib passes one, also has methods of these names
    named: dict[str, Any] = {}
    for kind in TABLES:
        if settings.get(kind) is not None:
            named |= settings_of_name(kind, settings[kind])
    return named | {name: value for name, value in settings.items() if name not in TABLES}
