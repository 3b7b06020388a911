"""Records of the benchmarks: one line a run, with figures, machine and commit."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench import common as bench
from tests.conftest import ROOT

PROGRAMS = sorted(path for path in (ROOT / "scripts" / "bench").glob("*.py") if "ArgumentParser(" in path.read_text())


def git(*arguments: str) -> str:
    names = ("-c", "user.name=n", "-c", "user.email=n@example.org")
    done = subprocess.run(["git", *names, *arguments], cwd=bench.ROOT, check=True, capture_output=True, timeout=30)
    return done.stdout.decode().strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "repository"
    path.mkdir()
    monkeypatch.setattr(bench, "ROOT", path)
    git("init", "-q")
    (path / "code.py").write_text("1\n")
    git("add", "code.py")
    git("commit", "-qm", "Begin")
    return path


def test_each_run_appends_a_line_with_its_figures_machine_and_commit(repository: Path, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, default=Path("x"))
    bench.add_output(parser)
    path, every = tmp_path / "records.jsonl", tmp_path / "every.json"
    arguments = parser.parse_args(["--record", str(path), "--json", str(every)])
    figures = {"turns_ms": [5.0, 1.0, 3.0, 2.0, 4.0], "pair": (1, 2), "name": "grid", 8: {"is_met": True}}
    bench.write(arguments, "envs", figures)
    (repository / "code.py").write_text("2\n")
    bench.write(arguments, "envs", [])
    clean, dirty = map(json.loads, path.read_text().splitlines())
    assert clean["figures"] == {
        "turns_ms": {"median": 3.0, "low": 1.0, "high": 5.0, "num": 5},
        "pair": [1, 2],
        "name": "grid",
        "8": {"is_met": True},
    }
    assert (clean["commit"], clean["is_dirty"], dirty["is_dirty"]) == (git("rev-parse", "HEAD"), False, True)
    assert (clean["benchmark"], clean["arguments"]) == ("envs", {"directory": "x"})
    assert clean["machine"]["num_cores"] >= 1 and clean["machine"]["memory_gib"] > 0 and clean["machine"]["cpu"]
    assert {"python", "torch", "ray"} <= set(clean["versions"])
    assert json.loads(every.read_text()) == []  # of the last run


def test_without_a_file_the_line_goes_to_the_documentation() -> None:
    parser = argparse.ArgumentParser()
    bench.add_output(parser)
    assert parser.parse_args(["--record"]).record == ROOT / "docs" / "benchmarks.jsonl"
    assert parser.parse_args([]).record is None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_program_offers_it(program: Path) -> None:
    source = program.read_text()
    assert "add_output(parser)" in source and f'write(arguments, "{program.stem}", ' in source
