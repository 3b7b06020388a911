"""Write docs/settings.md from the table of settings.

    python scripts/settings_doc.py            writes it
    python scripts/settings_doc.py --check    checks that it is current
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not scripts/, whose files would hide packages of the same names

from rllib_srl.algorithm.settings import GROUPS  # noqa: E402
from rllib_srl.cli.shared.settings import RLLIB, RUN, Setting, all_settings, shown  # noqa: E402
from rllib_srl.common.setting_tables import Group  # noqa: E402
from rllib_srl.replay.settings import RULES, parameters_of  # noqa: E402

TARGET = ROOT / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written by `python scripts/settings_doc.py`; do not edit.

Each setting is an attribute of `SRLConfig`, a flag of `srl train` and a key of its YAML file. In Python
`.environment(...)` sets `env`, `env_config`, `worlds`, `mixture` and `stream`,
`.rl_module(model_config={"model": ...})` sets `model`, `.data(...)` and `.reward(...)` are methods of their own, and
the method of its group sets any other setting. Flags and the defaults on this page write `None` as `none`.

A default of `preset` leaves the value to the preset that `loss` names (see [losses](losses.md)); the value in brackets
applies if no preset sets it. A setting marked + has parameters, which are listed [below](#parameters). Settings marked
\\* belong to RLlib. Other settings of RLlib keep its defaults; `validate()` rejects those that have no effect here.
"""
PARAMETERS = """
## Parameters

A setting with parameters takes one value or a dictionary: `replay_spacing="sm2"`, or
`replay_spacing={"name": "fixed", "interval": 8}`. Parameters that are left out have their defaults; without the
first one, the setting keeps its own. On the command line: `--replay_spacing name=fixed interval=8`, or
`--replay_spacing '{"name": "fixed", "interval": 8}'`. "of" lists the rules that read a parameter, if not all do;
`validate()` rejects it with any other rule.
"""


def document() -> str:
    """Return the text of docs/settings.md."""
    parts = [INTRODUCTION]
    group = ""
    for setting in all_settings().values():
        if setting.group == RUN:
            continue
        if setting.group != group:
            group = setting.group
            parts.append(f"\n## {group[0].upper()}{group[1:]}\n\n| setting | default | meaning |\n|---|---|---|\n")
        parts.append(_row(setting))
    return "".join([*parts, PARAMETERS, *map(_parameters, GROUPS.values())])


def _parameters(group: Group) -> str:
    """Return the table of the parameters of a setting, and one of each rule with parameters of its own."""
    rows = [(key, group.table[flat], group.readers(key)) for key, flat in group.flat.items()]
    if group.name == "replay_reuse_selection":
        return f"\n### `{group.name}`\n\nAs `replay_selection`.\n"
    head, *others = [(key, row.default, row.meaning, " ".join(rules)) for key, row, rules in rows]
    of = group.name.removeprefix("replay_")
    for rule in RULES[of].own if group.rest else ():  # a parameter that every rule has is marked by none
        others += [(key, row.default, row.meaning, rule) for key, row in (parameters_of(of, rule) or {}).items()]
    merged: dict[tuple[str, str, str], list[str]] = {}
    for key, default, meaning, rules in others:
        merged.setdefault((key, shown(default), meaning.replace("|", "\\|")), []).append(rules)
    lines = [f"\n### `{group.name}`\n\nWritten alone: `{head[0]}`.\n\n| parameter | of | default | meaning |\n"]
    lines += ["|---|---|---|---|\n"]
    every = list(RULES[of].own) if group.rest else []
    merged = {row: [] if rules == every else rules for row, rules in merged.items()}
    lines += [f"| `{key}` | {' '.join(rules)} | `{text}` | {what} |\n" for (key, text, what), rules in merged.items()]
    return "".join(lines) if others else ""


def _row(setting: Setting) -> str:
    mark = " *" if setting.name in RLLIB else " +" if setting.name in GROUPS else ""
    meaning = setting.meaning.replace("|", "\\|")
    return f"| `{setting.name}`{mark} | `{shown(setting.default)}` | {meaning} |\n"


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
