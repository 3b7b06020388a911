"""Runs without a model, with real Ray: learning and forgetting by domain, exact resume, memory, refusals."""

from __future__ import annotations

import time

import numpy as np
import pytest
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRL, SRLConfig
from rllib_srl.algorithm.checkpointing import export_checkpoint
from rllib_srl.cli.report.run_facts import RunFacts
from rllib_srl.engine.stub.law import slot_of
from rllib_srl.storage.checkpoints import CheckpointError

WORLDS = {"compare": {"num_shots": 0}, "chain_sum": {"num_shots": 0}}
CPU_S = 0.15  # most CPU time of an iteration in driver, runner and learner together; about 0.04 (docs/stub.md)


def stub_config(directory, **law) -> SRLConfig:
    return (
        SRLConfig()
        .environment(worlds=WORLDS)
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine={"name": "stub", **law}, num_env_runners=0, num_transcripts=0)
        .training(num_prompts_per_batch=6, group_size=4, checkpoint_every=0, log_directory=str(directory))
        .replay(revisit_fraction=0.25, reuse_fraction=0.25)
        .debugging(seed=1)
    )


def skills_of(algo) -> np.ndarray:
    return np.array(algo.learner_group.get_weights()[DEFAULT_MODULE_ID]["model.skills"])


def record(algo, num: int) -> list[tuple]:
    """Train; return reward, sum of rewards by domain's skills, and skills after each iteration."""
    found = []
    for _ in range(num):
        result = algo.train()
        found.append((result["env_runners"]["episode_return_mean"], algo.version, skills_of(algo).tobytes()))
    return found


def by_domain(algo) -> dict[str, float]:
    return {name: one["accuracy"] for name, one in algo.evaluate()["by_domain"].items()}


def staged_config(directory) -> SRLConfig:
    """Return a run that trains first on compare alone, from iteration 30 on chain_sum alone, without replay."""
    knots = [[0, {"compare": 1.0}], [29, {"compare": 1.0}], [30, {"chain_sum": 1.0}]]
    entries = [{"world": name, "domain": name, "env_config": own} for name, own in WORLDS.items()]
    config = stub_config(directory, learns=0.3, forgets=0.2, chance=0.2, spread=0.5)
    config.worlds = None
    config.environment(stream={"domains": entries, "schedule": knots})
    return config.evaluation(evaluation_duration=60).replay(revisit_fraction=0.0, reuse_fraction=0.0)


@pytest.mark.slow
def test_domains_are_learned_and_forgotten(ray_here, tmp_path):
    algo = staged_config(tmp_path).build_algo()
    try:
        start = by_domain(algo)
        results = [algo.train() for _ in range(29)]
        first = by_domain(algo)
        results += [algo.train() for _ in range(31)]
        second = by_domain(algo)
    finally:
        algo.stop()
    assert start["compare"] < 0.3 and start["chain_sum"] < 0.3
    assert first["compare"] > 0.8 and first["chain_sum"] < 0.3
    assert second["compare"] < first["compare"] - 0.3 and second["chain_sum"] > 0.8
    rewards = [result["env_runners"]["episode_return_mean"] for result in results]
    assert np.mean(rewards[:3]) < 0.4 < 0.7 < np.mean(rewards[24:29]) and np.mean(rewards[30:33]) < 0.5
    learned = [result["learners"][DEFAULT_MODULE_ID] for result in results if DEFAULT_MODULE_ID in result["learners"]]
    assert all(one["stub/gain"] > 0 and one["stub/step_norm"] > 0 for one in learned) and len(learned) > 40


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly_with_memory_and_shares(ray_here, tmp_path):
    algo = stub_config(tmp_path / "one").callbacks("contrib.sec").build_algo()
    before = record(algo, 4)
    algo.save_to_path(tmp_path / "saved")
    start = time.process_time()
    unbroken = record(algo, 12)
    seconds = (time.process_time() - start) / 12
    last = algo.train()
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "saved")
    try:
        assert record(again, 12) == unbroken
        skills = skills_of(again)
    finally:
        again.stop()
    assert len({one[2] for one in before + unbroken}) > 10
    moved = np.flatnonzero(skills)
    assert set(moved.tolist()) == {slot_of(name) for name in WORLDS} and (skills[moved] > 0).all()
    replay, planner = last["replay"], last["planner"]
    assert replay["num_revisits"] > 0 and replay["num_reuses"] > 0 and replay["revisit_share_intended"] == 0.25
    shares = [planner["share_intended"][name] for name in WORLDS]
    assert sum(shares) == pytest.approx(1) and shares[0] != 0.5
    assert seconds < CPU_S, f"{seconds:.3f} s of CPU time an iteration"
    with pytest.raises(CheckpointError, match="is of engine = 'stub' and has no model"):
        export_checkpoint(tmp_path / "saved", SRLConfig().rl_module(model_config={"model": "tiny"}), tmp_path / "out")


def test_the_page_of_a_run_says_that_there_is_no_model(tmp_path):
    once = (np.array([1]), {"iteration": np.array([1.0])}, [])
    facts = RunFacts(tmp_path, {"engine": {"name": "stub"}, "model": "tiny"}, *once)
    assert facts.is_stub
    assert facts.warnings()[0] == "no model was trained: engine = 'stub', the answers follow a law"
    assert not RunFacts(tmp_path, {"engine": "vllm"}, *once).is_stub
