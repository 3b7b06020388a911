"""scripts/house.py: which calls a walk counts, and what the table of lines adds up."""

import subprocess

from scripts import house


def test_lines_and_statements_are_added_up_by_folder(tmp_path):
    files = {
        "rllib_srl/types.py": "a = 1\n\nb = 2\n",
        "rllib_srl/storage/disk.py": "def f():\n    return 1\n",
        "rllib_srl/common/rules.py": "a = 1\n",
        "rllib_srl/contrib/greso.py": "a = 1\n",
        "rllib_srl/cli/main.py": "COMMANDS = {'train': 1, 'tune': 2}\n",
        "tests/test_x.py": "if 1:\n    a = 1\n",
        "setup.cfg": "[options]\ninstall_requires =\n    numpy\n    ray\n",
        "docs/settings.md": "| setting |\n|---|\n| `a` |\n| `b` |\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    (tmp_path / "rllib_srl" / "untracked.py").write_text("a = 1\n")
    rows = {name: numbers for name, *numbers in house.rows_of(tmp_path)}
    assert rows["rllib_srl/"] == ["1", "3", "2", "400"]
    assert rows["rllib_srl/common"] == ["2", "3", "3", "1,400"]  # with storage
    assert rows["core together"] == ["4", "7", "6", "30,000"] and rows["contrib"] == ["1", "1", "1", "6,000"]
    assert rows["tests"] == ["1", "2", "2", "34,000"] and rows["all tracked Python"] == ["6", "10", "9", ""]
    assert [rows[name][0] for name in ("settings", "commands", "hard dependencies")] == ["2", "2", "2"]
