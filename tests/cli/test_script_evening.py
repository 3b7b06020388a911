"""scripts/evening.py without a model: what it says if the server does not start."""

from __future__ import annotations

import subprocess
import sys

from tests.cli.killing import ROOT


def test_a_server_that_does_not_start_is_no_stack_trace(tmp_path):
    command = [sys.executable, "scripts/evening.py", "--model", "no-such-model", "--out", str(tmp_path / "served")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    own, ours = found.stderr.strip().split("\n")[0], found.stderr.strip().split("\n")[-1]
    assert "no-such-model" in own
    assert ours == f"error: srl serve --out {tmp_path / 'served'} has ended with status 1; its own message says why"
