"""Slips of people who call SRL from Python: relative paths, a call after the end, an environment that fails."""

from __future__ import annotations

import pytest

from rllib_srl import SRL, SRLConfig
from rllib_srl.rollout.rollouts import MOST_LOST_ITERATIONS, EpisodesLost, LossWatch
from tests.small_worlds import small_config


class Batch:
    """What `LossWatch` reads of a batch."""

    def __init__(self, num_groups, *errors):
        self.groups, self.errors = [None] * num_groups, list(errors)


def test_only_iterations_without_any_group_count_as_lost():
    watch = LossWatch()
    for _ in range(MOST_LOST_ITERATIONS - 1):
        watch.check([Batch(0, "a"), Batch(0, "b")])
    watch.check([Batch(0, "a"), Batch(1, "b")])
    assert watch.num_lost == 0
    watch.check([Batch(0), Batch(0)])  # nothing was played
    assert watch.num_lost == 0
    for _ in range(MOST_LOST_ITERATIONS - 1):
        watch.check([Batch(0, "a")])
    with pytest.raises(EpisodesLost, match=r"^every episode of the last 5 iterations was lost; the last one: b$"):
        watch.check([Batch(0, "a"), Batch(0, "b")])


@pytest.mark.slow
def test_a_run_that_loses_every_episode_ends_with_the_reason(random_llama_dir, tmp_path, ray_here):
    algo = small_config(random_llama_dir, tmp_path, env="Failing").build_algo()
    for _ in range(MOST_LOST_ITERATIONS - 1):
        algo.train()
    with pytest.raises(EpisodesLost, match="no such file"):
        algo.train()
    algo.stop()


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


@pytest.mark.parametrize(("given", "expected"), [(None, 512), (300, 300)])
def test_the_longest_episode_follows_the_model(given, expected):
    config = SRLConfig().environment("compare").rl_module(model_config={"model": "tiny"}).training(lr=1e-4)
    config.env_runners(max_episode_tokens=given)
    config.validate()
    assert config.max_episode_tokens == expected
