"""Where the processes of a run are on a cluster: runners apart, learners together, and no places are left reserved."""

from types import SimpleNamespace

import pytest
import ray
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rllib_srl.common.placement import learner_resources, packed_places
from rllib_srl.common.remote_calls import ActorFailure
from rllib_srl.rollout.runner_group import StartedRunners


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
        group._setup(config=SimpleNamespace(**{"colocate": False, **settings}))
        return group._remote_args.get("scheduling_strategy")

    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
    assert strategy() == "SPREAD" and strategy(colocate=True) is None
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: "of a trial")
    assert strategy() is None
    assert packed_places({"CPU": 1}, 2, 1.0) is None  # and learners are placed by Tune


@pytest.mark.slow
def test_learners_without_a_place_end_the_wait_by_name_and_leave_nothing_reserved(ray_here):
    with pytest.raises(ActorFailure, match=r"^3 learners of 1.5 CPU could not be placed within start_timeout_s = 1$"):
        packed_places({"CPU": 1.5}, 3, 1.0)
    assert packed_places({"CPU": 0.5}, 1, 1.0) is None is packed_places({}, 2, 1.0)
    tables = ray.util.placement_group_table().values()
    assert [one["state"] for one in tables if one["state"] != "REMOVED"] == []
