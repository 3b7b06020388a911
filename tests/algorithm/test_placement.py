"""Where the processes of a run are on a cluster: runners apart, learners together, and no places are left reserved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.common.placement import learner_resources, packed_places
from rllib_srl.common.remote_calls import ActorFailure
from rllib_srl.rollout.started_runners import StartedRunners, runners_started_in_time
from tests.conftest import ROOT


def test_a_learner_asks_for_what_rllib_would_ask_for():
    def asked(num_cpus, num_gpus, others=None):
        given = {"num_cpus_per_learner": num_cpus, "num_gpus_per_learner": num_gpus}
        return learner_resources(SimpleNamespace(**given, custom_resources_per_learner=others))

    assert asked("auto", 0) == {"CPU": 1} and asked("auto", 1) == {"GPU": 1}
    assert asked(0.25, 0, {"learner": 1}) == {"CPU": 0.25, "learner": 1} and asked(0, 0) == {}


def test_runners_are_spread_unless_they_share_a_card_or_tune_places_them(monkeypatch):
    def strategy(**settings):
        group = object.__new__(StartedRunners)
        group._remote_args = {}
        monkeypatch.setattr(EnvRunnerGroup, "_setup", lambda self, **settings: None)
        group._setup(config=SimpleNamespace(**{"colocate": False, "weight_transfer": "object_store", **settings}))
        return group._remote_args.get("scheduling_strategy")

    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
    assert strategy() == "SPREAD" and strategy(colocate=True) is None is strategy(weight_transfer="ipc")
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: "of a trial")
    assert strategy() is None
    assert packed_places({"CPU": 1}, 2, 1.0) is None  # and learners are placed by Tune


def test_runners_start_in_time_inside_the_context_only():
    with runners_started_in_time():
        assert algorithm.EnvRunnerGroup is StartedRunners
    assert algorithm.EnvRunnerGroup is EnvRunnerGroup


@pytest.mark.slow
def test_learners_without_a_place_end_the_wait_by_name_and_leave_nothing_reserved(ray_here):
    with pytest.raises(ActorFailure, match=r"^3 learners of 1.5 CPU found no place within 1 s$"):
        packed_places({"CPU": 1.5}, 3, 1.0)
    assert packed_places({"CPU": 0.5}, 1, 1.0) is None is packed_places({}, 2, 1.0)
    tables = ray.util.placement_group_table().values()
    assert [one["state"] for one in tables if one["state"] != "REMOVED"] == []


@pytest.fixture
def ray_directory():
    """Return a directory for a cluster that a child starts; its path is short, because sockets are in it."""
    own = tempfile.mkdtemp(prefix="ray_", dir="/tmp")
    yield own
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and any(own in word for word in process.cmdline()):
                process.kill()
    shutil.rmtree(own, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_asks_for_more_than_the_head_has_starts_when_the_cluster_grows(tmp_path, ray_directory):
    """With Ray's autoscaler; without `check_resources = False` the run is refused."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.growing_cluster", str(tmp_path), ray_directory]
    subprocess.run(command, check=True, timeout=580, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["before"] == [0] and "or set check_resources = False if the cluster grows" in found["refused"]
    assert "2 seat (the cluster has 0)" in found["refused"]
    assert found["seats_of_runners"] == [1, 1] and found["nodes_of_runners"] == 2
    assert found["num_groups"] == [4, 4]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runners_are_on_nodes_of_their_own_and_learners_on_one(tmp_path):
    """Each node has room for all runners, or for both learners."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.algorithm.placed_nodes", str(tmp_path)]
    subprocess.run(command, check=True, timeout=580, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths})
    found = json.loads((tmp_path / "out.json").read_text())
    assert sorted(found["runners"]) == sorted(found["nodes"])
    assert len(found["learners"]) == 2 and len({*found["learners"]}) == 1
    assert found["num_groups"] == 4 and found["left"] == []
