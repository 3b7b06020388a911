"""Bad input and slips of people who call SRL from Python end in one clear message."""

import shutil
from types import SimpleNamespace

import pytest

from rllib_srl import SRL
from rllib_srl.algorithm.resources import PlacementError
from rllib_srl.rollout.rollouts import MOST_LOST_ITERATIONS, EpisodesLost, LossWatch
from tests.small_envs import small_config


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    return small_config(random_llama_dir, tmp_path / "log")


def refused(config, kind=ValueError) -> str:
    with pytest.raises(kind) as caught:
        config.build_algo()
    return str(caught.value)


@pytest.mark.parametrize(("pattern", "message"), [
    ("tokenizer*", "has no tokenizer: expected tokenizer.json or tokenizer.model or vocab.json"),
    ("*.safetensors", "has no weights: expected model.safetensors or "),
    ("config.json", "has no config: expected config.json"),
])  # fmt: skip
def test_a_model_directory_that_lacks_something_is_refused(config, random_llama_dir, tmp_path, pattern, message):
    path = tmp_path / "model"
    shutil.copytree(random_llama_dir, path)
    for file in path.glob(pattern):
        file.unlink()
    assert f"model directory {path} {message}" in refused(config.rl_module(model_config={"model": str(path)}))


def test_more_than_the_cluster_has_is_refused_at_once(config):
    config.env_runners(num_env_runners=2, num_gpus_per_env_runner=1)
    assert refused(config, PlacementError) == (
        "one run needs 2 GPU (the cluster has 0), 0.25 CPU and 1 GPU in one process (no node has that); expected less: "
        "lower num_env_runners = 2, num_learners = 0 or the CPUs and GPUs of each, or set check_resources = False if "
        "the cluster grows on demand"
    )
    config.env_runners(num_gpus_per_env_runner=0, num_cpus_per_env_runner=1)
    assert "one run needs 2.25 CPU (the cluster has 2); expected less" in refused(config, PlacementError)


def test_only_iterations_without_any_group_count_as_lost():
    def batch(num_groups, *errors):
        return SimpleNamespace(groups=[None] * num_groups, errors=list(errors))

    watch = LossWatch()
    for _ in range(MOST_LOST_ITERATIONS - 1):
        watch.check([batch(0, "a"), batch(0, "b")])
    watch.check([batch(0, "a"), batch(1, "b")])
    assert watch.num_lost == 0
    watch.check([batch(0), batch(0)])  # nothing was played
    assert watch.num_lost == 0
    for _ in range(MOST_LOST_ITERATIONS - 1):
        watch.check([batch(0, "a")])
    with pytest.raises(EpisodesLost, match=r"^every episode of the last 5 iterations was lost; the last one: b$"):
        watch.check([batch(0, "a"), batch(0, "b")])


@pytest.mark.slow
def test_relative_paths_and_blanks_name_checkpoints_and_a_stopped_run_says_so(
    random_llama_dir, tmp_path, monkeypatch, ray_here
):
    monkeypatch.chdir(tmp_path)
    algo = small_config(random_llama_dir, tmp_path / "run").build_algo()
    algo.train()
    saved = algo.save_to_path("my results/first one")
    assert saved == str(tmp_path / "my results" / "first one")
    algo.restore_from_path("my results/first one")
    algo.stop()
    with pytest.raises(RuntimeError, match=r"^train\(\) was called after stop\(\); build a new"):
        algo.train()
    again = SRL.from_checkpoint("my results/first one")
    assert again.iteration == 1 and again.train()["training_iteration"] == 2
    again.stop()
