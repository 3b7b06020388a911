"""Each message of scripts/preflight.py and each early stop of scripts/setup.sh, driven by facts made up here."""

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.preflight import Facts, check, choose_set

REPO = Path(__file__).resolve().parent.parent
GOOD = Facts(
    python=(3, 12, 1), python_path="/usr/bin/python3.12", has_ensurepip=True, has_compiler=True, has_libnuma=True,
    system="Linux", machine="x86_64", cpu_flags=frozenset({"avx2", "amx_bf16"}), num_cores=2, memory_gib=24.0,
    disk_gib=50.0, shm_gib=12.0, gpu="",
)  # fmt: skip


def by_level(facts: Facts, level: str, package_set: str = "") -> list[str]:
    return [found.text for found in check(facts, package_set or choose_set(facts)) if found.level == level]


def test_a_good_machine_misses_nothing() -> None:
    assert by_level(GOOD, "missing") == by_level(GOOD, "warning") == []
    assert "Python 3.12.1 (/usr/bin/python3.12)" in by_level(GOOD, "ok")
    assert any("amx_bf16" in text and "uses bf16 autocast" in text for text in by_level(GOOD, "ok"))


@pytest.mark.parametrize(("change", "words"), [
    ({"python": (3, 10, 13)}, ["Python 3.10.13", "expected 3.11, 3.12 or 3.13", "PYTHON="]),
    ({"has_ensurepip": False}, ["venv module", "apt-get install python3-venv (or python3.12-venv)"]),
    ({"has_compiler": False}, ["C compiler", "apt-get install gcc libc6-dev python3-dev"]),
    ({"has_libnuma": False}, ["libnuma.so.1", "apt-get install libnuma1"]),
    ({"memory_gib": 3.9}, ["memory: 3.9 GiB", "needs 5.5", "docker run --memory"]),
    ({"disk_gib": 3.1}, ["disk: 3.1 GiB free", "about 8 needed", "larger disk"]),
    ({"gpu": "NVIDIA A100, 535.104.05"}, ["driver 535.104.05 is too old; expected 580", "--set cpu"]),
    ({"gpu": "NVIDIA A100, 580.65.06", "disk_gib": 12.0}, ["disk: 12.0 GiB free", "about 20 needed"]),
])  # fmt: skip
def test_what_is_missing_is_named_with_its_mend(change: dict, words: list[str]) -> None:
    (text,) = by_level(replace(GOOD, **change), "missing")
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("change", "package_set", "note"), [
    ({}, "cpu", "no NVIDIA GPU"),
    ({"cpu_flags": frozenset({"avx2", "avx512_bf16"})}, "cpu", "everything on the CPU is fp32"),
    ({"cpu_flags": frozenset({"sse4_2"})}, "plain", "no AVX2, which vLLM needs: the TransformersEngine"),
    ({"system": "Darwin", "machine": "arm64"}, "plain", "Darwin arm64: the TransformersEngine samples text"),
    ({"machine": "aarch64"}, "plain", "Linux aarch64: the TransformersEngine samples text"),
])  # fmt: skip
def test_the_set_follows_the_machine(change: dict, package_set: str, note: str) -> None:
    facts = replace(GOOD, **change)
    assert choose_set(facts) == package_set
    assert any(note in text for text in by_level(facts, "note"))
    assert by_level(facts, "missing") == []


def test_a_gpu_is_used_only_where_it_is() -> None:
    facts = replace(GOOD, gpu="NVIDIA H200, 580.65.06")
    assert choose_set(facts) == "gpu"
    assert "NVIDIA GPU: NVIDIA H200, 580.65.06" in by_level(facts, "ok")
    assert any("not used" in text for text in by_level(facts, "note", package_set="cpu"))
    assert "an NVIDIA GPU" in by_level(GOOD, "missing", package_set="gpu")[0]


def test_an_installed_environment_needs_no_tools_to_make_it() -> None:
    facts = replace(GOOD, has_ensurepip=False, has_compiler=False, disk_gib=3.0)
    assert len(by_level(facts, "missing")) == 3
    assert by_level(replace(facts, is_installed=True), "missing") == []


def test_old_pythons_can_read_it() -> None:
    ast.parse((REPO / "scripts" / "preflight.py").read_text(), feature_version=(3, 7))


def test_it_runs_on_this_machine() -> None:
    command = [sys.executable, "-S", "scripts/preflight.py", "--installed"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    assert f"Python {sys.version.split()[0]}" in result.stdout
    assert result.returncode == int("  missing  " in result.stdout)


def fake_path(folder: Path, **scripts: str) -> str:
    """Return a PATH with the tools setup.sh uses, no Python, and `scripts` as shell programs."""
    folder.mkdir()
    for name in ("dirname", "cat", "sed", "uname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_setup_stops_before_it_changes_anything(tmp_path: Path) -> None:
    fake = f'case "$1" in scripts/preflight.py) echo "  missing  disk"; exit 1;; *) exec {sys.executable} "$@";; esac'
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path / name)
    shutil.copytree(REPO / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{fake_path(tmp_path / 'bin', python9=fake)}:{os.environ['PATH']}"
    command, env = ["bash", "scripts/setup.sh", "--set", "cpu"], {**os.environ, "PATH": path, "PYTHON": "python9"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, input="")
    assert result.returncode == 1
    assert "missing  disk" in result.stdout
    assert "nothing was changed" in result.stderr
    assert not (tmp_path / ".venv").exists()
