"""Runners and learners that do not start: the run says so within `start_timeout_s`."""

import os
import time
from pathlib import Path

import psutil
import pytest

from rllib_srl import SRLConfig
from rllib_srl.common.remote_calls import RunnerFailure
from rllib_srl.learner.group.learners import LearnerFailure
from rllib_srl.learner.learner import GRPOTorchLearner
from tests.small_envs import small_config
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
START_S = 20.0


def hang(config) -> None:
    (Path(config.log_directory) / "process").write_text(str(os.getpid()))
    time.sleep(250)


class NoEngine(SRLConfig):
    def engine_settings(self):
        hang(self)
        return super().engine_settings()


class NoLearner(GRPOTorchLearner):
    def build(self):
        hang(self.config)


def started(config) -> None:
    config.env_runners(num_env_runners=1).training(start_timeout_s=START_S).build_algo()


def test_a_runner_without_an_engine_ends_the_start_by_name(random_llama_dir, tmp_path, ray_here):
    config = NoEngine.from_dict(small_config(random_llama_dir, tmp_path).to_dict())
    with pytest.raises(RunnerFailure, match=r"^runner 1 gave no answer within 20 s while starting$"):
        started(config)
    process = int((tmp_path / "process").read_text())
    assert wait_until(lambda: not psutil.pid_exists(process))


def test_learners_that_do_not_start_end_the_start_by_name(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path).learners(num_learners=1, learner_class=NoLearner)
    with pytest.raises(LearnerFailure, match=r"^1 learner did not start within start_timeout_s = 20$"):
        started(config)
    os.kill(int((tmp_path / "process").read_text()), 9)
