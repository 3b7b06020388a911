"""A node of a Ray cluster dies: the run goes on without its runner, and takes it back (lost_nodes.py)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_runners_node_dies_in_mid_play_and_the_runner_rejoins_on_another(tmp_path):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.lost_nodes", str(tmp_path)]
    subprocess.run(command, check=True, timeout=580, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
