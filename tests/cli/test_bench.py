"""The benchmarks in a short mode, on the tiny model: both sides of a ratio did the same work, and parts add up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from rllib_srl.engine.models import local_model
from scripts.bench import buffer as bench_buffer
from tests.conftest import ROOT
from tests.quick_workers import IMPORTS, VLLM

pytestmark = pytest.mark.engine


def figures_of(name, tmp_path, *arguments):
    """Run a benchmark and return the figures it wrote, and what it printed."""
    path = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.quick_workers", "-m", f"scripts.bench.{name}", *arguments]
    command += ["--model", "tiny", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", IMPORTS: VLLM}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=environment)
    assert path.exists(), done.stderr[-2000:]
    return json.loads(path.read_text()), done


def test_the_parts_of_a_step_add_up_and_the_plain_move_has_the_bytes_of_the_sync(tmp_path):
    figures, done = figures_of("step", tmp_path, "--num-iterations", "2", "--most", "1e9")
    assert done.returncode == 0, done.stderr[-2000:]
    from rllib_srl.learner.scoring import load_causal_lm

    size = getattr(torch, figures["dtype"]).itemsize
    needed = [-(-p.numel() * size // 64) * 64 for p in load_causal_lm(str(local_model("tiny"))).parameters()]
    assert figures["num_bytes"] == sum(needed)
    assert 1 <= len(figures["parts"]) == len(figures["moves"]) == len(figures["landings"]) <= 2
    for parts in figures["parts"]:
        for whole in ("rollout", "learn", "sync"):
            details = [seconds for name, seconds in parts.items() if name.startswith(f"{whole}: ")]
            assert sum(details) == pytest.approx(parts[whole])
            assert min(details) > -0.05 * parts[whole]
        assert parts["other"] >= 0
        for name in ("rollout: engine_s", "learn: forward_backward_s", "learn: optimizer_s", "sync: load_s"):
            assert parts[name] > 0
    for parts, move, ratio in zip(figures["parts"], figures["moves"], figures["sync_ratios"]):
        assert ratio == pytest.approx(parts["sync"] / move)
    assert "sync over move" in done.stdout


def test_the_memory_is_timed_with_items_stored(tmp_path, capsys):
    path = tmp_path / "figures.json"
    words = ["--items", "300", "--iterations", "2", "--iteration-s", "1e9", "--model", "tiny", "--json", str(path)]
    assert bench_buffer.main(words) == 0
    figures = json.loads(path.read_text())
    assert all(len(figures[name]) == 2 and figures[name][0][0] > 0 for name in bench_buffer.CALLS)
    assert "300 items" in capsys.readouterr().out
