"""Tune: two trials at once on two CPUs, each in its own placement group; a trial that cannot fit says so at once."""

import json
from pathlib import Path

import numpy as np
import pytest
from ray import tune

from rllib_srl import SRL, register
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.replay.reading import reading
from rllib_srl.replay.store import holder_of
from scripts.memory_laws import content
from tests.algorithm.test_kills import DyingLearner
from tests.small_envs import small_config
from tests.small_memory import check_memory, go, memory_config, weights_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    register()  # Tune's registry lies in Ray, and an earlier test may have used another Ray
    config = small_config(random_llama_dir, tmp_path, slow_s=0.5).training(log_directory=None)
    # .75 CPU a trial: .25 for its main process, with the learner in it, and .5 for its runner.
    return config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5)


@pytest.fixture(autouse=True)
def _with_logs(monkeypatch):
    monkeypatch.delenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", raising=False)  # `srl tune` sets it for its process


def fit(config, directory, max_failures=0, **changes) -> tune.ResultGrid:
    run_config = tune.RunConfig(
        storage_path=str(directory),
        stop={"training_iteration": 3},
        failure_config=tune.FailureConfig(max_failures=max_failures),
        verbose=0,
    )
    return tune.Tuner("SRL", param_space={**config.to_dict(), **changes}, run_config=run_config).fit()


@pytest.mark.smoke
def test_two_trials_run_at_the_same_time_and_keep_their_memories_apart(random_llama_dir, tmp_path, ray_here):
    register()
    rates, config = [0.0, 1e-3], memory_config(random_llama_dir, tmp_path, groups_per_item=99, max_logp_gap=None)
    config.environment(env_config={"num_prompts": 400, "meeting": str(tmp_path / "meeting")})
    config.env_runners(num_env_runners=1, num_cpus_per_env_runner=0.5).training(log_directory=None)
    results = fit(config, tmp_path, lr=tune.grid_search(rates), checkpoint_every=2)
    assert results.num_errors == 0 and [len(result.metrics_dataframe) for result in results] == [3, 3]
    assert [result.config["lr"] for result in results] == rates and len({result.path for result in results}) == 2
    payloads = []
    for result in results:
        ran_with, replay = result.metrics["config"], result.metrics["replay"]
        assert (ran_with["num_env_runners"], ran_with["group_size"]) == (1, 4)
        lines = (Path(result.path) / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["iteration"] for line in lines] == [n for n in (1, 2, 3) for _ in range(8)]
        assert (replay["num_items"], replay["num_revisits_owed"], replay["num_restarts"]) == (10, 2, 0)
        path = Path(result.path) / "replay/memory.db"
        assert wait_until(lambda path=path: holder_of(path) is None)  # the actor ends with its trial
        with reading(path) as memory:
            seqs = sorted(content(memory.tables)["groups"])
            assert len(memory.tables) == 10 and len(seqs) == replay["num_stored_groups"] > 8
            payloads.append({memory.store.group(seq).token_ids_N.tobytes() for seq in seqs})
    # Equal seeds and rates: the first iteration is the same, and each trial goes its own way after its update.
    assert 4 <= len(payloads[0] & payloads[1]) < 9
    written = {metrics["training_iteration"]: checkpoint for checkpoint, metrics in results[1].best_checkpoints}
    assert set(written) == {2, 3}  # `checkpoint_every`, and Tune's own at the end
    other = config.copy(copy_frozen=False).training(lr=1e-3, log_directory=str(tmp_path / "clone")).build_algo()
    other.restore_from_path(written[2].path)
    assert (other.iteration, other.version, other.memory.num_items) == (2, 2, 7)
    assert go(other, 1)[0].replay["num_items"] == 10
    check_memory(other)
    other.stop()


def test_a_trial_that_loses_its_learner_goes_on_from_its_checkpoint(config, tmp_path):
    """By Tune's own FailureConfig; its weights are those of a trial that was not disturbed."""
    weights = []
    for name, num_errors in (("killed", 1), ("unbroken", 0)):
        flag = tmp_path / "flag"
        config.environment(env_config={"slow_s": 0.0, "flag": str(flag)})
        config.learners(num_learners=1, num_cpus_per_learner=0.25, learner_class=DyingLearner)
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
