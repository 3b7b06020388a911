"""Processes die or fall silent: runner and buffer come back whatever phase they died in; learners are rebuilt.

Stated times on an idle machine of 2 cores: a runner is back within 30 s, learners are within 20 s.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rllib_srl import SRL
from rllib_srl.common.remote_calls import ActorFailure
from rllib_srl.engine import EngineBrokenError
from rllib_srl.learner.learner import GRPOTorchLearner
from rllib_srl.rollout.env_runner import LLMEnvRunner
from rllib_srl.storage.checkpoints import checkpoints_in
from scripts.chaos.faults import pid_of, send
from scripts.chaos.invariants import Books, faults_of
from scripts.chaos.phases import PHASES, REST, at_moment_of
from tests.small_memory import memory_config, weights_of
from tests.small_worlds import small_config, watch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
RUNNER_BACK_S = 90.0  # three times the stated times, for machines that do other things
LEARNERS_BACK_S = 60.0


def is_first(flag: str) -> bool:
    """Say whether no process has asked before, in any life."""
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Troubled(LLMEnvRunner):
    """Dies when it gets the weights of the first update, then hangs once, and in the end dies whenever it plays."""

    num_loads = 0

    def load_weights(self, *args, **kwargs):
        self.num_loads += 1
        if self.num_loads == 3 and is_first(self.config.env_config["flag"] + ".died"):  # after the self-test's two
            os.kill(os.getpid(), signal.SIGKILL)
        return super().load_weights(*args, **kwargs)

    def play_groups(self, *args, **kwargs):
        flag = self.config.env_config["flag"]
        if self.engine.version == 1 and is_first(flag + ".hung"):
            time.sleep(600)
        if Path(flag + ".doomed").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().play_groups(*args, **kwargs)


class WithBrokenEngine(LLMEnvRunner):
    """Its engine breaks in a step with the weights of the first update, once, and at the end in every step."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        flag, step = self.config.env_config["flag"], self.engine.step

        def broken_step():
            if (self.engine.version == 1 and is_first(flag)) or Path(flag + ".doomed").exists():
                raise EngineBrokenError("vLLM failed in a step: Executor failed.")
            return step()

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
        start = time.monotonic()
        algo.stop()
        assert time.monotonic() - start < 30


def pids_of(algo) -> dict[int, int]:
    return {runner_id: algo.runners.where(runner_id, 30)["pid"] for runner_id in algo.runners.ids}


def drawn(algo) -> list[list[str]]:
    """Return a list that the prompts of every draw are added to."""
    prompts, draw = [], algo.source.draw

    def recorded(num_prompts, shares=None):
        prompts.append(draw(num_prompts, shares))
        return prompts[-1]

    algo.source.draw = recorded
    return prompts


def assert_all_were_played(seen, prompts) -> None:
    """Everything that was drawn was played, and once."""
    assert sorted(m.prompt.key for batch in seen for m in batch.groups) == sorted(p.key for p in prompts[-1])


def assert_engines_agree(algo) -> None:
    """Every engine computes with the same weights, those of the last update."""
    prints = algo.runners.fingerprint(algo.runners.ids, 30)
    assert len({repr(sorted(one.items())) for one in prints.values()}) == 1
    gap, lost = algo.weight_sync.sync(algo.version)
    assert gap.max < 1e-3 and not lost
    assert algo.runners.fingerprint(algo.runners.ids, 30) == prints


def killed_in_each_phase(algo, directory: Path) -> dict:
    """Train one iteration per phase; in each a runner is killed and, in another phase, the buffer."""
    phases, books, chance = list(PHASES), Books(algo.memory), random.Random(1)
    result = algo.train()  # so that there are items to draw
    kills: Counter[str] = Counter()
    faults, num_reused = faults_of(algo, result), 0.0
    for at, phase in enumerate([*phases, REST]):
        victim, of_buffer = chance.random(), phases[(at + 2) % len(phases)]
        runner = partial(send, pid_of(algo, "runner", victim), "KILL")
        buffer = partial(send, pid_of(algo, "buffer", 0.0), "KILL")
        if phase == REST:
            runner()
            pid_of(algo, "runner", victim)  # wait until it has restarted, with the weights of its files
            result = algo.train()
        else:
            delay_s = 0.2 if phase == "play" else 0.0  # so that it dies while it plays
            with at_moment_of(algo, phase, runner, delay_s), at_moment_of(algo, of_buffer, buffer, 0.0):
                result = algo.train()
            kills[f"buffer in {of_buffer}"] += 1
        kills[f"runner in {phase}"] += 1
        num_reused += result["learners"]["default_policy"]["reuse/num_tokens"]
        faults += faults_of(algo, result)
    return {
        "num_iterations": algo.iteration,
        "kills": dict(kills),
        "num_runner_restarts": int(result["num_runner_restarts"]),
        "num_buffer_restarts": int(result["replay"]["num_restarts"]),
        "num_reused_tokens": int(num_reused),
        "faults": faults + books.faults(algo.memory, directory),
    }


@pytest.mark.timeout(400)
def test_death_in_each_phase_costs_work_and_nothing_else(random_llama_dir, tmp_path, ray_here):
    """In each of five phases a runner dies and the buffer; in the end a runner dies and comes back unnoticed."""
    config = memory_config(random_llama_dir, tmp_path / "log", groups_per_item=99, max_logp_gap=None)
    config.environment(env_config={"num_prompts": 400, "slow_s": 0.5}).evaluation(evaluation_interval=1)
    config.env_runners(num_transcripts=0).training(lr=1e-4, start_timeout_s=RUNNER_BACK_S, update_timeout_s=60.0)
    with running(config, num_env_runners=2) as algo:
        result = killed_in_each_phase(algo, tmp_path / "copy")
        newest = algo.version
        seen = watch(algo)
        algo.train()
        assert {batch.version for batch in seen if batch.groups[0].ref is not None} == {newest}
    assert result["faults"] == []
    want = {f"{who} in {phase}": 1 for who in ("runner", "buffer") for phase in PHASES} | {"runner in rest": 1}
    assert result["kills"] == want and result["num_iterations"] == 7
    assert result["num_runner_restarts"] == 6  # the sixth came back before it was asked, without the weights
    assert 1 <= result["num_buffer_restarts"] <= 5  # a death that nobody noticed is none
    assert result["num_reused_tokens"] > 0


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
        assert_all_were_played(seen, prompts)
        assert old != second != pids_of(algo)
        with pytest.raises(ProcessLookupError):
            os.kill(second[1], 0)
        assert_engines_agree(algo)

        Path(flag + ".doomed").touch()
        with pytest.raises(ActorFailure, match=r"4 prompts could not be played in 3 attempts: runner 1 died") as caught:
            algo.train()
        assert "\n" not in str(caught.value)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_runner_with_a_broken_engine_is_restarted_like_a_dead_one(config, caplog, max_lag):
    flag = config.env_config["flag"]
    config.env_runners(env_runner_cls=WithBrokenEngine)
    if max_lag:
        config.env_runners(max_lag=max_lag, slice_s=0.05, late="drop")
    with running(config) as algo:
        seen, prompts, old = watch(algo), drawn(algo), pids_of(algo)
        *_, result = (algo.train() for _ in range(4))
        reason = "runner 1 cannot go on (vLLM failed in a step: Executor failed.)"
        assert f"{reason}; restarting it and playing its prompts again" in caplog.messages
        assert 1 <= result["num_groups_played_again"] <= (8 if max_lag else 4)
        assert result["num_runner_restarts"] == 1 and algo.version == 4 and pids_of(algo) != old
        with pytest.raises(ProcessLookupError):
            os.kill(old[1], 0)
        if not max_lag:
            assert_all_were_played(seen, [[prompt for drawn_at_once in prompts for prompt in drawn_at_once]])
        assert_engines_agree(algo)
        if max_lag:
            return
        Path(flag + ".doomed").touch()
        with pytest.raises(ActorFailure, match=r"not be played in 3 attempts: runner 1 cannot go on \(vLLM failed in"):
            algo.train()


def test_a_broken_engine_in_the_main_process_ends_the_run(config):
    Path(config.env_config["flag"] + ".doomed").touch()
    config.env_runners(env_runner_cls=WithBrokenEngine)
    with running(config, num_env_runners=0) as algo, pytest.raises(EngineBrokenError, match="Executor failed"):
        algo.train()


def rebuilt_in_the_third_update(config, directory, message, caplog) -> None:
    """Compare a run whose learners are lost in its third iteration with one that resumes the checkpoint before it."""
    config.training(checkpoint_every=1)
    with running(config) as algo:
        algo.train()
        algo.train()
        shutil.copytree(checkpoints_in(directory)[-1], directory / "two")
        start = time.monotonic()
        results = [algo.train(), algo.train()]
        assert time.monotonic() - start < LEARNERS_BACK_S
        assert [line for line in caplog.messages if re.match(message, line)] != []
        assert "training goes on after iteration 2 with 2 of 2 learners" in caplog.messages
        assert [(one["num_learner_rebuilds"], one["num_iterations_repeated"]) for one in results] == [(1, 0)] * 2
        assert [one["training_iteration"] for one in results] == [3, 4] and algo.version == 4
        weights = weights_of(algo)
        assert_engines_agree(algo)
    with running(SRL.from_checkpoint(directory / "two")) as again:
        resumed = [again.train(), again.train()]
        assert np.array_equal(weights_of(again), weights)
    name = "num_env_steps_sampled_lifetime"
    assert [one[name] for one in resumed] == [one[name] for one in results]


def test_dead_learners_are_rebuilt_and_the_run_goes_on_as_a_resume_would(config, tmp_path, caplog):
    config.learners(num_learners=2, learner_class=DyingLearner)
    message = r"^learner [01] died while updating; starting new learners from .*checkpoint_000002 \(attempt 1 of 3\)$"
    rebuilt_in_the_third_update(config, tmp_path, message, caplog)


def test_a_silent_learner_is_replaced_in_time(config, tmp_path, caplog):
    config.learners(num_learners=2, learner_class=SilentLearner).training(update_timeout_s=10.0)
    message = r"^learner 0, 1 gave no answer within 10 s while updating; starting new learners from .*000002 "
    rebuilt_in_the_third_update(config, tmp_path, message, caplog)


def test_a_learner_that_dies_before_the_first_checkpoint_begins_the_run_again(config, tmp_path, caplog):
    """With runners that play ahead: each prompt is trained on once."""
    config.learners(num_learners=1, learner_class=DyingLearner).training(checkpoint_every=10)
    config.env_runners(max_lag=1, slice_s=0.05, late="drop")
    with running(config, num_env_runners=2) as algo:
        results = [algo.train() for _ in range(4)]
        assert [one["training_iteration"] for one in results] == [1, 2, 1, 2] and algo.version == 2
        assert results[-1]["num_learner_rebuilds"] == 1 and results[-1]["num_iterations_repeated"] == 2
        assert results[-1]["num_env_steps_sampled_lifetime"] == results[1]["num_env_steps_sampled_lifetime"]
        assert len(algo.ahead.outstanding) == 4
        assert_engines_agree(algo)
        algo.save_to_path(tmp_path / "saved")
        assert not list(tmp_path.glob("replay/state_*"))
