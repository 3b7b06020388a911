"""Write docs/settings.md from the table of settings.

python scripts/settings_doc.py            writes it
python scripts/settings_doc.py --check    checks that it is current
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not scripts/, whose files would hide packages of the same names

from rllib_srl.algorithm.named import ALGORITHMS, MEMORIES, SOURCES  # noqa: E402
from rllib_srl.algorithm.settings import FLAT, GROUPS  # noqa: E402
from rllib_srl.cli.shared.settings import RUN, all_parts, shown  # noqa: E402
from rllib_srl.common.setting_model import Group, Setting  # noqa: E402
from rllib_srl.replay.settings import parameters_of, rules  # noqa: E402

TARGET = ROOT / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written by `python scripts/settings_doc.py`; do not edit.

Each setting is an attribute of `SRLConfig`, a flag of `srl train` and a key of its YAML file. In Python
`.environment(...)` sets `env`, `env_config`, `worlds`, `mixture` and `stream`,
`.rl_module(model_config={"model": ...})` sets `model`, `.data(...)` and `.reward(...)` are methods, and the method of
its group sets any other setting. Flags and the defaults on this page write `None` as `none`.

A default marked ^ applies if the preset that `loss` names does not set another (see [losses](losses.md)); in
`SRLConfig` such a setting is "preset" until it is set. A setting marked + has parameters, which are listed
[below](#parameters). Settings marked \\* belong to RLlib. Other settings of RLlib keep its defaults; `validate()`
rejects those that have no effect here.
"""
PARAMETERS = """
## Parameters

A setting with parameters takes one value or a dictionary: `replay_spacing="fsrs"`, or
`replay_spacing={"name": "fixed", "interval": 8}`. Parameters that are left out have their defaults; without the
first one, the setting keeps its own. On the command line: `--replay_spacing name=fixed interval=8`, or
`--replay_spacing '{"name": "fixed", "interval": 8}'`. "of" lists the rules that read a parameter, if not all do;
`validate()` rejects it with any other rule.
"""


NAMES = """
## Named algorithms and memories

`.training("dapo")` or `--algorithm dapo` sets these, `.replay("srl")` or `--replay srl` those of a memory. A setting
that you give beside the name wins.

| name | sets | source |
|---|---|---|
"""


def document() -> str:
    """Return the text of docs/settings.md."""
    parts, title = [INTRODUCTION], ""
    for part in all_parts():
        if part is RUN:
            continue
        if part.title != title:
            title = part.title
            parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts += [_row(name, row) for name, row in part.rows.items()]
    parts += [NAMES, *(_named(f"algorithm {name}", values, SOURCES[name]) for name, values in ALGORITHMS.items())]
    parts += [_named(f"replay {name}", values, "") for name, values in MEMORIES.items()]
    return "".join([*parts, PARAMETERS, *map(_parameters, GROUPS.values())])


def _parameters(group: Group) -> str:
    """Return the table of the parameters of a setting, and one of each rule with parameters of its own."""
    if group.name == "replay_reuse_selection":
        return f"\n### `{group.name}`\n\nAs `replay_selection`.\n"
    rows = {key: group.table[flat] for key, flat in group.flat.items()}
    head, *others = [(key, _default(row), row.meaning, " ".join(row.rules)) for key, row in rows.items()]
    of = group.name.removeprefix("replay_")
    for rule in rules()[of].own if group.rest else ():  # a parameter that every rule has is marked by none
        others += [(key, _default(row), row.meaning, rule) for key, row in (parameters_of(of, rule) or {}).items()]
    merged: dict[tuple[str, str, str], list[str]] = {}
    for key, default, meaning, readers in others:
        merged.setdefault((key, default, meaning.replace("|", "\\|")), []).append(readers)
    lines = [f"\n### `{group.name}`\n\nWritten alone: `{head[0]}`.\n\n| parameter | of | default | meaning |\n"]
    lines += ["|---|---|---|---|\n"]
    every = list(rules()[of].own) if group.rest else []
    merged = {row: [] if readers == every else readers for row, readers in merged.items()}
    lines += [f"| `{key}` | {' '.join(of)} | {text} | {what} |\n" for (key, text, what), of in merged.items()]
    return "".join(lines) if others else ""


def _named(name: str, values: Mapping[str, Any], source: str) -> str:
    listed = ", ".join(f"`{setting}: {shown(value)}`" for setting, value in values.items())
    return f"| `{name}` | {listed} | {source} |\n"


def _default(row: Setting) -> str:
    return f"`{shown(row.default)}`{' ^' if row.is_preset else ''}"


def _row(name: str, row: Setting) -> str:
    mark = " *" if name in FLAT and row.is_rllib else " +" if name in GROUPS else ""
    meaning = row.meaning.replace("|", "\\|")
    return f"| `{name}`{mark} | {_default(row)} | {meaning} |\n"


def main(argv: list[str] | None = None) -> int:
    """Write the document, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/settings.md from the table of settings.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the document is out of date")
    if parser.parse_args(argv).check:
        is_current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == document()
        print(f"docs/{TARGET.name} is {'current' if is_current else 'out of date: run scripts/settings_doc.py'}")
        return 0 if is_current else 1
    TARGET.write_text(document(), encoding="utf-8")
    print(f"wrote docs/{TARGET.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
