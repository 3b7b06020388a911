"""Nodes of a Ray cluster die: the run goes on without a runner, and takes it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def happened(directory) -> dict:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.lost_nodes", str(directory)]
    subprocess.run(command, check=True, timeout=580, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    return json.loads((directory / "out.json").read_text())


def check_that_the_rest_played_on(did) -> None:
    """Each iteration has all its groups, and the second runner is away, then back with verified weights."""
    assert [one["runners"] for one in did["begun"] + did["lost"]] == [[1, 2], [1, 2], [1], [1]]
    assert did["back"][-1]["runners"] == [1, 2]
    every = did["begun"] + did["lost"] + did["back"]
    assert [one["iteration"] for one in every] == list(range(1, len(every) + 1))
    assert {one["num_groups"] for one in every} == {4}
    assert did["lost"][-1]["counts"]["num_runners_lost"] == 1
    assert "num_runner_restarts" not in did["lost"][-1]["counts"]
    assert did["back"][-1]["counts"]["num_runner_restarts"] == 1
    assert did["gap"] < 1e-3 and did["missing"] == []
    assert max(one["seconds"] for one in did["lost"]) < 60  # the run does not wait for a node that is dead


def test_a_runners_node_dies_in_mid_play_and_the_runner_rejoins_on_another(tmp_path):
    did = happened(tmp_path)
    check_that_the_rest_played_on(did)
    assert did["lost"][-1]["counts"]["num_groups_played_again"] == 2
