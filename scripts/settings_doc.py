"""Write docs/settings.md from the table of settings.

python scripts/settings_doc.py            writes it
python scripts/settings_doc.py --check    checks that it is current
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not scripts/, whose files would hide packages of the same names

from rllib_srl.algorithm.named import ALGORITHMS, MEMORIES, SOURCES  # noqa: E402
from rllib_srl.algorithm.settings import SETTINGS  # noqa: E402
from rllib_srl.cli.shared.settings import ALL_PARTS, RUN, shown  # noqa: E402
from rllib_srl.common.setting_model import Setting, Settings  # noqa: E402
from rllib_srl.replay.settings import rules  # noqa: E402

TARGET = ROOT / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written by `python scripts/settings_doc.py`; do not edit.

Each setting has one name: as an attribute of `SRLConfig`, as a flag of `srl train`, and as a key of its YAML file and
of Tune's `param_space`. In Python
`.environment(...)` sets `env`, `env_config`, `envs`, `mixture` and `stream`,
`.rl_module(model_config={"model": ...})` sets `model`, `.data(...)` and `.reward(...)` are methods, and the method of
its group sets any other setting. Flags and the defaults on this page write `None` as `none`. In the `name=value` of a
flag, numbers, `true`, `false` and `none` are read as such, and what starts with `[`, `{` or a quote is YAML; all else
is text, as typed.

A default marked ^ applies if the preset that `loss` names does not set another (see [losses](losses.md)); in
`SRLConfig` such a setting is "preset" until it is set. "Only with" names the setting that another one belongs to:
`validate()` rejects a change that nothing would read. Settings marked \\* belong to RLlib. Other settings of RLlib keep
its defaults; `validate()` rejects those that have no effect here.
"""
RULES = """
## Parameters of rules

Rules of the memory have their own parameters, which stand in the setting with `_config`:
`.replay(spacing="fixed", spacing_config={"interval": 8})`, or on the command line
`--replay_spacing fixed --replay_spacing_config interval=8`.

| setting | rule | parameter | default | meaning |
|---|---|---|---|---|
"""
NAMES = """
## Named algorithms and memories

`.training("dapo")` or `--algorithm dapo` sets these, `.replay("srl")` or `--replay srl` those of a memory, which
replaces that of the algorithm. A setting that you give beside the name wins, and a later name replaces an earlier one.
Of a memory's shares, retention, spacing, selection and diversity, those that are not listed get their defaults; its
capacity stays as it is, so that a resumed run which gets another memory drops nothing.

| name | sets | source |
|---|---|---|
"""


def document() -> str:
    """Return the text of docs/settings.md."""
    parts, title = [INTRODUCTION], ""
    for part in ALL_PARTS:
        if part is RUN:
            continue
        if part.title != title:
            title = part.title
            parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts += [_row(name, row) for name, row in part.rows.items()]
    parts += [NAMES, *(_named(f"algorithm {name}", values, SOURCES[name]) for name, values in ALGORITHMS.items())]
    parts += [_named(f"replay {name}", values, "") for name, values in MEMORIES.items()]
    return "".join([*parts, RULES, *_parameters("spacing"), *_parameters("selection")])


def _parameters(name: str) -> Iterator[str]:
    """Yield a row for each parameter that rules of the memory do not share with all others."""
    for rule, made in rules()[name].own.items():
        table = made.table() if isinstance(made, type) and issubclass(made, Settings) else {}
        for parameter, row in table.items():
            if parameter != "desired_retention":
                yield f"| `replay_{name}_config` | {rule} | `{parameter}` | {_default(row)} | {_escaped(row)} |\n"


def _named(name: str, values: Mapping[str, Any], source: str) -> str:
    changed = {setting: value for setting, value in values.items() if value != SETTINGS[setting].default}
    listed = ", ".join(f"`{setting}: {shown(value)}`" for setting, value in changed.items())
    return f"| `{name}` | {listed or 'the defaults'} | {source} |\n"


def _default(row: Setting) -> str:
    return f"`{shown(row.default)}`{' ^' if row.is_preset else ''}"


def _row(name: str, row: Setting) -> str:
    return f"| `{name}`{' *' * row.is_rllib} | {_default(row)} | {_escaped(row)} |\n"


def _escaped(row: Setting) -> str:
    return row.meaning.replace("|", "\\|")


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
