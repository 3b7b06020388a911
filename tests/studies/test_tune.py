"""Tune: two trials at once on two CPUs, each in its own placement group; a trial that cannot fit says so at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from ray import tune

from rllib_srl import SRL, register
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.learner.learner import GRPOTorchLearner
from tests.small_memory import weights_of
from tests.small_worlds import small_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    register()  # Tune's registry lies in Ray, and an earlier test may have used another Ray
    config = small_config(random_llama_dir, tmp_path, slow_s=0.5).training(log_directory=None)
    # .75 CPU a trial: .25 for its main process, with the learner in it, and .5 for its runner.
    return config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)


def fit(config, directory, max_failures=0, **changes) -> tune.ResultGrid:
    run_config = tune.RunConfig(
        storage_path=str(directory),
        stop={"training_iteration": 3},
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
    )
    return tune.Tuner("SRL", param_space={**config.to_dict(), **changes}, run_config=run_config).fit()


@pytest.mark.smoke
def test_two_trials_run_at_the_same_time(config, tmp_path):
    rates = [0.0, 1e-3]
    config.environment(env_config={"meeting": str(tmp_path / "meeting")})
    results = fit(config, tmp_path, lr=tune.grid_search(rates), checkpoint_every=2)
    assert results.num_errors == 0 and [len(result.metrics_dataframe) for result in results] == [3, 3]
    assert sorted(result.config["lr"] for result in results) == rates
    assert len({result.path for result in results}) == 2
    for result in results:
        ran_with = result.metrics["config"]
        assert (ran_with["num_env_runners"], ran_with["group_size"]) == (1, 4)
        lines = (Path(result.path) / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == [n for n in (1, 2, 3) for _ in range(8)]
    moved = next(result for result in results if result.config["lr"])
    written = {metrics["training_iteration"]: checkpoint for checkpoint, metrics in moved.best_checkpoints}
    assert set(written) == {2, 3}  # `checkpoint_every`, and Tune's own at the end
    again = SRL.from_checkpoint(written[2].path)
    assert (again.iteration, again.version) == (2, 2)
    again.stop()


class DyingOnce(GRPOTorchLearner):
    """Dies in the middle of the third update, once."""

    num_updates = 0

    def _accumulate_gradients(self):
        sums = super()._accumulate_gradients()
        self.num_updates += 1
        flag = Path(self.config.env_config["flag"])
        if self.num_updates == 3 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sums


def test_a_trial_that_loses_its_learner_goes_on_from_its_checkpoint(config, tmp_path):
    """By Tune's own FailureConfig; its weights are those of a trial that was not disturbed."""
    weights = []
    for name, num_errors in (("killed", 1), ("unbroken", 0)):
        flag = tmp_path / "flag"
        config.environment(env_config={"slow_s": 0.0, "flag": str(flag)})
        config.learners(num_learners=1, num_cpus_per_learner=0.25, learner_class=DyingOnce)
        (result,) = fit(config, tmp_path / name, max_failures=1, checkpoint_every=1)
        assert result.error is None and result.metrics["training_iteration"] == 3 and flag.exists()
        assert len(list(Path(result.path).glob("error.txt"))) == num_errors
        again = SRL.from_checkpoint(result.checkpoint.path)
        weights.append(weights_of(again))
        again.stop()
    assert np.array_equal(*weights)


def test_the_request_of_a_trial_is_that_of_its_processes(config):
    bundles = SRL.default_resource_request(config.learners(num_learners=2)).bundles
    assert [dict(bundle) for bundle in bundles] == [{"CPU": 0.25}, {"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.25}]


@pytest.mark.parametrize(("changes", "kind", "line"), [
    ({"num_env_runners": 7}, PlacementError, "one run needs 3.75 CPU (the cluster has 2); expected less"),
    ({"group_sise": 2}, ValueError, "group_sise = 2; expected no setting of that name; did you mean group_size?"),
])  # fmt: skip
def test_what_cannot_run_is_refused_before_a_trial_starts(config, tmp_path, changes, kind, line):
    with pytest.raises(kind) as caught:
        fit(config, tmp_path, **changes)
    assert line in str(caught.value)
