"""SRL teaches the tiny model worlds of two kinds, on the real path: tool use and a hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllib_srl import SRLConfig
from rllib_srl.cli.shared.baselines import Baselines, baselines

pytestmark = [pytest.mark.slow, pytest.mark.engine]

NUM_HELD_OUT = 160
MARGIN = 0.15  # two samples a prompt: twice its standard error, sqrt(2 * .25 / 320), is .08
WORLDS: dict[str, dict[str, Any]] = {
    "word_problem_tool": {"num_shots": 0, "num_steps": 1},  # tool use
    "registers": {"num_shots": 0},  # a hidden state
}


@dataclass(frozen=True)
class Learned:
    """Held-out results of one run. Invariant: both evaluations played the same prompts."""

    before: dict[str, Any]
    after: dict[str, Any]
    rewards: list[float]  # of training, by iteration
    baselines: Baselines  # of a constant answer and of a guess, on those prompts


def learned(world: str, directory: Path, lr: float, iterations: int) -> Learned:
    """Train SRL with vLLM; sampled and greedy accuracy on held-out prompts before and after."""
    config = (
        SRLConfig()
        .environment(world, env_config=WORLDS[world])
        .rl_module(model_config={"model": "tiny"})
        .env_runners(engine={"name": "vllm", "kv_cache_gib": 0.125}, num_env_runners=1)
        .env_runners(max_turns=4, max_turn_tokens=16, max_episode_tokens=192, num_transcripts=0)
        .training(lr=lr, num_prompts_per_batch=16, group_size=8, checkpoint_every=0, log_directory=str(directory))
        .training(compute_dtype="float32")
        .replay(revisit_fraction=0.0, reuse_fraction=0.0, capacity=0)
        .evaluation(evaluation_duration=NUM_HELD_OUT, evaluation_pass_k=2)
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        before = algo.evaluate()
        rewards = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(iterations)]
        known = baselines(config, algo.source.heldout(NUM_HELD_OUT), seed=0)
        return Learned(before, algo.evaluate(), rewards, known)
    finally:
        algo.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", WORLDS)
def test_held_out_reward_rises(ray_here, tmp_path, world):
    found = learned(world, tmp_path, lr=3e-4, iterations=10)
    before, after = found.before["pass_at_1"], found.after["pass_at_1"]
    assert found.before["num_prompts"] == found.after["num_prompts"] == NUM_HELD_OUT
    assert found.before["num_lost"] == found.after["num_lost"] == 0
    assert 0.15 <= before <= 0.7, found
    assert after > before + MARGIN, found
    assert found.baselines.majority is not None
    assert after > max(found.baselines.majority, found.baselines.chance or 0.0) + MARGIN, found
