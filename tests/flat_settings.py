"""Settings by flat names, for tests that go through many parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllib_srl.algorithm.settings import FLAT, GROUPS


def grouped(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by name, each parameter within the setting that it belongs to.

    Args:
        values: settings, and parameters by their flat names; other names stay as they are. A parameter that only some
            rules read comes with the first of them, unless there is another.
        prefix: of the names, which `values` leaves out, such as "replay_".
    """
    found: dict[str, Any] = {}
    given: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        row = FLAT.get(prefix + name)
        if row is None or not row.of:
            found[name] = value
        elif row.parameter == "*" or (row.is_head and isinstance(value, Mapping)):
            given.setdefault(row.group, {}).update(value)
        else:
            given.setdefault(row.group, {})[row.parameter] = value
    for setting, parts in given.items():
        head = GROUPS[setting].head
        readers = [rules for key in parts if (rules := GROUPS[setting].readers(key))]
        if head not in parts and readers and not isinstance(GROUPS[setting].default(head), bool):
            parts[head] = readers[0][0]
        found[setting.removeprefix(prefix)] = parts[head] if parts.keys() == {head} else parts
    return found
