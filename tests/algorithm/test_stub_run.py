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
ITERATIONS_PER_S = 2.0  # at least, on a busy machine; about 14 of one idle core (docs/stub.md)


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


@pytest.mark.slow
def test_domains_are_learned_and_forgotten_and_the_memory_acts(ray_here, tmp_path):
    """First only compare, then only chain_sum: accuracy by domain rises where it trains and falls elsewhere."""
    stages = [[0, {"compare": 1.0}], [30, {"chain_sum": 1.0}]]
    entries = [{"world": name, "domain": name, "env_config": own} for name, own in WORLDS.items()]
    config = stub_config(tmp_path, learns=0.3, forgets=0.2, chance=0.2, spread=0.5)
    config = config.environment(stream={"domains": entries, "schedule": stages}).evaluation(evaluation_duration=60)
    config.worlds = None
    config = config.replay(revisit_fraction=0.0, reuse_fraction=0.25)
    algo = config.build_algo()
    try:
        start = by_domain(algo)
        results = [algo.train() for _ in range(28)]
        first = by_domain(algo)
        results += [algo.train() for _ in range(32)]
        second = by_domain(algo)
    finally:
        algo.stop()
    names = {name.partition("#")[0]: name for name in start}
    compare, sums = names["compare"], names["chain_sum"]
    assert start[compare] < 0.3 and start[sums] < 0.3
    assert first[compare] > 0.8 and first[sums] < 0.3
    assert second[compare] < first[compare] - 0.3 and second[sums] > 0.8
    replay = [result["replay"] for result in results]
    assert sum(one["num_groups_reuse"] for one in replay) > 60 and replay[-1]["num_items"] > 100
    norms = [result["learners"][DEFAULT_MODULE_ID]["stub/step_norm"] for result in results if "learners" in result]
    assert max(norms) > 0 and all(np.isfinite(norms))


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly_and_is_fast(ray_here, tmp_path):
    algo = stub_config(tmp_path / "one").build_algo()
    before = record(algo, 3)
    algo.save_to_path(tmp_path / "saved")
    start = time.monotonic()
    unbroken = record(algo, 12)
    rate = 12 / (time.monotonic() - start)
    last = algo.train()["replay"]
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "saved")
    try:
        assert record(again, 12) == unbroken
        skills = skills_of(again)
    finally:
        again.stop()
    assert len({one[2] for one in before + unbroken}) > 10
    moved = np.flatnonzero(skills)
    assert set(moved.tolist()) == {slot_of(name) for name in WORLDS}
    assert (skills[moved] > 0).all()
    assert last["revisit_share_intended"] == 0.25 and last["num_items"] > 20
    assert rate > ITERATIONS_PER_S, f"{rate:.1f} iterations a second"
    with pytest.raises(CheckpointError, match="is of engine = 'stub' and has no model"):
        export_checkpoint(tmp_path / "saved", SRLConfig().rl_module(model_config={"model": "tiny"}), tmp_path / "out")


def test_the_page_of_a_run_says_that_there_is_no_model(tmp_path):
    facts = RunFacts(tmp_path, {"engine": {"name": "stub"}, "model": "tiny"}, [{"iteration": 1.0}], [])
    assert facts.is_stub
    assert facts.warnings()[0] == "no model was trained: engine = 'stub', the answers follow a law"
    assert not RunFacts(tmp_path, {"engine": "vllm"}, [{"iteration": 1.0}], []).is_stub
