"""scripts/house.py: which calls a walk counts, and what the table of lines adds up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from scripts import house

MEMORY = """
class SRLReplayBuffer:
    def add(self):
        return draw_nothing()

    def draw_prompts(self):
        return [self.add() for _ in range(2)]

    def stats(self):
        return helper()

def draw_nothing():
    return 0

def helper():
    from_elsewhere()
"""


@pytest.fixture
def hook(tmp_path):
    """Yield a hook on the files of `tmp_path`, and a function that makes a module there."""

    def module(name: str, text: str, **names):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        loaded = importlib.util.module_from_spec(spec)
        vars(loaded).update(names)
        spec.loader.exec_module(loaded)
        return loaded

    found = house.Hook(tmp_path)
    found.is_on = True
    yield found, module
    sys.setprofile(None)


def test_a_walk_counts_files_with_calls_and_not_imports(hook, tmp_path):
    found, module = hook
    other = module("other", "def work():\n    return 1\n")
    found.gradient.is_on = True
    sys.setprofile(found)
    module("imported", "class Empty:\n    size = 1\n")
    other.work()
    sys.setprofile(None)
    assert found.gradient.files == {str(tmp_path / "other.py")} and found.gradient.num_lines() == 2
    assert found.gradient.paths(("other.py",)) == [] and found.gradient.num_lines(("other.py",)) == 0
    assert found.memory.files == set() and not found.has_gradient


def test_the_walk_of_the_memory_covers_its_calls_and_what_they_call(hook, tmp_path):
    found, module = hook
    other = module("other", "def work():\n    return 1\n")
    buffer = module("buffer", MEMORY, from_elsewhere=other.work).SRLReplayBuffer()
    sys.setprofile(found)
    buffer.stats()
    assert found.memory.files == set() and found.called == set()
    buffer.draw_prompts()
    other.work()
    sys.setprofile(None)
    assert found.memory.files == {str(tmp_path / "buffer.py")} and found.called == {"add", "draw_prompts"}


def test_a_backward_pass_ends_the_walk_to_the_gradient(hook, tmp_path):
    torch = pytest.importorskip("torch")
    found, module = hook
    later = module("later", "def work():\n    return 1\n").work
    found.gradient.is_on = True
    sys.setprofile(found)
    torch.ones(1, requires_grad=True).sum().backward()
    later()
    sys.setprofile(None)
    assert found.has_gradient and found.gradient.files == set()


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
