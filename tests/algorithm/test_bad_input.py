"""Bad input ends in one clear message, before anything is played, overwritten or waited for."""

from __future__ import annotations

import shutil

import pytest

from rllib_srl.algorithm.resources import PlacementError
from tests.small_worlds import Even, small_config


class Wordy(Even):
    """Asks more than a context of 48 tokens holds on the prompt "even 6"."""

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed, options=options)
        return observation + "x" * (60 if self.prompt_id == "even 6" else 0), info


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


@pytest.mark.slow
def test_a_prompt_longer_than_the_context_is_left_out_counted_and_named(config, caplog):
    algo = config.environment("tests.algorithm.test_bad_input:Wordy").training(num_prompts_per_batch=40).build_algo()
    played = algo.train()["env_runners"]
    algo.stop()
    assert 0 < played["stop_reason/prompt_too_long"] == played["num_episodes_lost"] < played["num_episodes"]
    assert (
        "an episode was lost: prompt 'even 6' of environment 'tests.algorithm.test_bad_input:Wordy' has 68 tokens; "
        "expected 1 to 47, so that a turn fits max_episode_tokens = 48"
    ) in caplog.text


def test_more_than_the_cluster_has_is_refused_at_once(config):
    config.env_runners(num_env_runners=2, num_gpus_per_env_runner=1)
    assert refused(config, PlacementError) == (
        "one run needs 2 GPU (the cluster has 0), 0.25 CPU and 1 GPU in one process (no node has that); expected less: "
        "lower num_env_runners = 2, num_learners = 0 or the CPUs and GPUs of each, or set check_resources = False if "
        "the cluster grows on demand"
    )
    config.env_runners(num_gpus_per_env_runner=0, num_cpus_per_env_runner=1)
    assert "one run needs 2.25 CPU (the cluster has 2); expected less" in refused(config, PlacementError)


def test_training_prompts_that_are_missing_are_refused(config):
    assert "has no training prompts" in refused(config.environment(env_config={"num_prompts": 0}))
