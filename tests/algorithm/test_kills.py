"""Processes die or fall silent: runner and buffer come back whatever phase they died in; a lost learner
ends the run with one error that says how to resume.

Stated times on an idle machine of 2 cores: a runner is back within 30 s, a lost learner is noticed within 20 s.
"""

import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from rllib_srl import SRL
from rllib_srl.common.remote_calls import ActorFailure, ProcessLost
from rllib_srl.engine.protocol import EngineBrokenError
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.storage.checkpoints import checkpoints_in
from tests.small_envs import small_config, watch
from tests.small_memory import weights_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
RUNNER_BACK_S = 90.0  # three times the stated times, for machines that do other things
LEARNERS_END_S = 60.0


def is_first(flag: str) -> bool:
    """Say whether no process has asked before, in any life."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Troubled(LLMEnvRunner):
    """Dies when it gets the weights of the first update, then hangs once, and in the end dies whenever it plays."""

    has_played = False

    def load_weights(self, *args, **kwargs):
        if self.has_played and is_first(self.config.env_config["flag"] + ".died"):  # not in the self-test
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_weights(*args, **kwargs)

    def play_groups(self, *args, **kwargs):
        flag, self.has_played = self.config.env_config["flag"], True
        if self.engine.version == 1 and is_first(flag + ".hung"):
            os.kill(os.getpid(), signal.SIGSTOP)  # `ray.kill` asks the process to end, which a stopped one never does
        if Path(flag + ".doomed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().play_groups(*args, **kwargs)


class WithBrokenEngine(LLMEnvRunner):
    """Its engine fails in a step, in the driver's own process."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)

        def broken_step():
            raise EngineBrokenError("vLLM failed in a step: Executor failed.")

        self.engine.step = broken_step


class DyingLearner(GRPOTorchLearner):
    """One of them dies in the middle of the third update."""

    num_updates = 0

    def _accumulate_gradients(self):
        sums = super()._accumulate_gradients()
        self.num_updates += 1
        if self.num_updates == 3 and is_first(self.config.env_config["flag"]):
            self.end()
        return sums

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class SilentLearner(DyingLearner):
    """One of them falls silent in the middle of the third update."""

    def end(self):
        time.sleep(600)


@pytest.fixture
def config(random_llama_dir, tmp_path, ray_here):
    config = small_config(random_llama_dir, tmp_path, flag=str(tmp_path / "flag"))
    return config.training(start_timeout_s=RUNNER_BACK_S, sync_timeout_s=60.0, update_timeout_s=60.0)


@contextmanager
def running(config, num_env_runners: int = 1):
    """Run settings, or an algorithm that was built from a checkpoint, and stop it."""
    if isinstance(config, SRL):
        algo = config
    else:
        algo = config.env_runners(num_env_runners=num_env_runners).build_algo()
    try:
        yield algo
    finally:
        algo.stop()


def pids_of(algo) -> dict[int, int]:
    return {runner_id: algo.runners.places[runner_id].pid for runner_id in algo.runners.ids}


def drawn(algo) -> list[list[str]]:
    """Return a list that the prompts of every draw are added to."""
    prompts, draw = [], algo.source.draw

    def recorded(num_prompts, shares=None):
        prompts.append(draw(num_prompts, shares))
        return prompts[-1]

    algo.source.draw = recorded
    return prompts


def assert_engines_agree(algo) -> None:
    """Every engine computes with the same weights, those of the last update."""
    prints = algo.runners.fingerprint(algo.runners.ids, 30)
    assert len({repr(sorted(one.items())) for one in prints.values()}) == 1
    gap, lost = algo.weight_sync.sync(algo.version)
    assert gap.max < 1e-3 and not lost
    assert algo.runners.fingerprint(algo.runners.ids, 30) == prints


@pytest.mark.smoke
def test_a_runner_dies_while_it_loads_then_hangs_then_always_dies(config):
    flag = config.env_config["flag"]
    config.env_runners(env_runner_cls=Troubled, sample_timeout_s=15.0)
    with running(config) as algo:
        seen, prompts, old = watch(algo), drawn(algo), pids_of(algo)
        assert algo.train()["num_runner_restarts"] == 1
        assert Path(flag + ".died").exists() and algo.version == 1
        assert_engines_agree(algo)

        second = pids_of(algo)
        seen.clear()
        start = time.monotonic()
        assert algo.train()["num_runner_restarts"] == 2
        assert 15 <= time.monotonic() - start < 15 + RUNNER_BACK_S
        # Everything that was drawn was played, and once.
        assert sorted(m.prompt.key for batch in seen for m in batch.groups) == sorted(p.key for p in prompts[-1])
        assert old != second != pids_of(algo)
        with pytest.raises(ProcessLookupError):
            os.kill(second[1], 0)
        assert_engines_agree(algo)

        Path(flag + ".doomed").touch()
        with pytest.raises(ActorFailure, match=r"4 prompts could not be played in 3 attempts: runner 1 died") as caught:
            algo.train()
        assert "\n" not in str(caught.value)


def test_a_broken_engine_in_the_main_process_ends_the_run(config):
    config.env_runners(env_runner_cls=WithBrokenEngine)
    with running(config, num_env_runners=0) as algo, pytest.raises(ProcessLost, match="Executor failed"):
        algo.train()


@pytest.mark.parametrize("learner_class", [DyingLearner, SilentLearner])
def test_a_lost_learner_ends_the_run_with_one_error_and_the_checkpoint_goes_on(config, tmp_path, learner_class):
    """The resumed run equals one that was never disturbed."""
    config.training(checkpoint_every=1, update_timeout_s=20.0 if learner_class is SilentLearner else 60.0)
    config.learners(num_learners=2, learner_class=learner_class)
    with running(config) as algo:
        algo.train()
        algo.train()
        workers = algo.learner_group._backend_executor.worker_group.workers
        start, learners = time.monotonic(), [psutil.Process(one.metadata.pid) for one in workers]
        with pytest.raises(ProcessLost) as caught:
            algo.train()
        assert time.monotonic() - start < LEARNERS_END_S
        newest = str(checkpoints_in(tmp_path)[-1])
        assert caught.value.checkpoint == newest and newest.endswith("checkpoint_000002")
        reason = "learner 0, 1 gave no answer within 20 s" if learner_class is SilentLearner else r"learner [01] died"
        assert re.fullmatch(
            rf"{reason} while updating; stop this algorithm and resume with SRL.from_checkpoint\('{newest}'\)",
            str(caught.value),
        )
        assert psutil.wait_procs(learners, timeout=60)[1] == []  # a silent one would wait without a limit
    if learner_class is SilentLearner:
        return
    with running(SRL.from_checkpoint(newest)) as again:  # the flag is there: none is lost again
        resumed = [again.train() for _ in range(2)][-1]
        weights = weights_of(again)
        assert_engines_agree(again)
    config.training(log_directory=str(tmp_path / "unbroken"), checkpoint_every=0)
    with running(config) as unbroken:
        result = [unbroken.train() for _ in range(4)][-1]
        assert np.array_equal(weights_of(unbroken), weights)
    name = "num_env_steps_sampled_lifetime"
    assert (result["training_iteration"], result[name]) == (resumed["training_iteration"], resumed[name])
