"""Nodes of a Ray cluster die: learners are rebuilt from the newest checkpoint, the run goes on without a runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.algorithm.test_memory_resume import OF_THE_PROCESS
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def happened(name, directory) -> dict:
    """Run one of `lost_nodes.py`, and return what it wrote."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.lost_nodes", name, str(directory)]
    subprocess.run(command, check=True, timeout=580, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    return json.loads((directory / "out.json").read_text())


def counted(iteration) -> dict:
    """Return the counts of an iteration but those of the rebuild."""
    own = ("num_learner_rebuilds", "num_iterations_repeated", "num_orphan_groups")
    replay = {n: v for n, v in iteration["replay"].items() if "orphan" not in n and n not in OF_THE_PROCESS}
    return {**{name: n for name, n in iteration["counts"].items() if name not in own}, **replay}


def test_a_learners_node_is_drained_then_dies_in_mid_update_and_the_rest_goes_on_as_a_resume_would(tmp_path):
    """The drain notice leads to a checkpoint, so that no whole iteration is lost."""
    did = happened("learner", tmp_path)
    assert [one["iteration"] for one in did["begun"]] == [1, 2, 3]
    assert [one["iteration"] for one in did["rebuilt"]] == [4, 5] == [one["version"] for one in did["rebuilt"]]
    assert [one["num_learners"] for one in did["begun"] + did["rebuilt"]] == [2, 2, 2, 1, 1]
    for rebuilt, resumed in zip(did["rebuilt"], did["resumed"], strict=True):
        assert rebuilt["weights"] == resumed["weights"]
        assert counted(rebuilt) == counted(resumed)
        counts = rebuilt["counts"]
        assert (counts["num_learner_rebuilds"], counts["num_iterations_repeated"]) == (1, 0)
        assert (counts["num_orphan_groups"], resumed["counts"]["num_orphan_groups"]) == (4, 0)
    assert len({one["weights"] for one in did["begun"] + did["rebuilt"]}) == 5


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
    did = happened("runner", tmp_path)
    check_that_the_rest_played_on(did)
    assert did["lost"][-1]["counts"]["num_groups_played_again"] == 2


def test_a_runners_node_dies_in_mid_slice_and_its_groups_go_to_the_other_runner(tmp_path):
    """Each group that was launched is taken once or still in play, and no prompt is left out or comes twice."""
    did = happened("ahead", tmp_path)
    check_that_the_rest_played_on(did)
    assert 1 <= did["lost"][-1]["counts"]["num_groups_played_again"] <= 8
    num = 4 * (did["back"][-1]["iteration"] + 1)
    ids, prompts = zip(*did["taken"], *did["in_play"], strict=True)
    assert len(did["in_play"]) == 4
    assert len(ids) == len({*ids}) == len({*prompts}) == num
