"""The whole path once with what a stranger runs: RLlib, a remote vLLM engine, and a real model of 135M parameters."""

import json

import numpy as np
import pytest
from ray.rllib.core import DEFAULT_MODULE_ID

from rllib_srl import SRLConfig
from rllib_srl.batch.shard import fetched
from rllib_srl.engine.canary import BF16_GROWTH, FP32_MAX_GAP
from rllib_srl.engine.protocol import EngineError
from tests.small_envs import small_config, watch

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.mark.timeout(900)
def test_smollm2_learns_to_compare_numbers(ray_here, tmp_path):
    """Greedy accuracy on 200 held-out questions went from .385 to .905 where this was written."""
    config = (
        SRLConfig()
        .environment("rllib_srl.envs.math.compare:Compare")
        .rl_module(model_config={"model": "smollm2-135m"})
        .env_runners(engine="vllm", engine_kv_cache_gib=0.5, num_env_runners=1)
        .env_runners(max_turns=1, max_turn_tokens=8, max_episode_tokens=256)
        .training(lr=3e-5, num_prompts_per_batch=16, group_size=8, checkpoint_every=0, log_directory=str(tmp_path))
        .evaluation(evaluation_duration=200)
        .debugging(seed=1)
    )
    algo = config.build_algo()
    try:
        before = algo.evaluate()
        results = [algo.train() for _ in range(3)]
        after = algo.evaluate()
        healthy = algo.weight_sync.healthy
    finally:
        algo.stop()
    assert before["num_prompts"] == after["num_prompts"] == 200 and after["num_lost"] == 0
    assert after["accuracy"] > before["accuracy"] + 0.15, (before, after)
    assert after["accuracy"] > before["accuracy_high"], (before, after)
    for version, result in enumerate(results, start=1):
        assert result["weight_sync"]["version"] == version
        if algo.config.compute_dtype == "float32":
            assert result["weight_sync"]["canary_max"] <= FP32_MAX_GAP
        else:
            assert 0 < result["weight_sync"]["canary_mean"] <= BF16_GROWTH * healthy.mean
        learner = result["learners"][DEFAULT_MODULE_ID]
        assert learner["is_prefix_sharing"] == 1
        # Shared once: the few-shot text by all, each question by its 8 answers.
        assert learner["num_computed_tokens"] < 0.4 * 16 * 8 * result["env_runners"]["episode_len_mean"]
        assert np.isfinite(learner["loss"]) and learner["rollout_logp_abs_diff"] < 0.2
    lines = [json.loads(line) for line in (tmp_path / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3 * 2 * 8 and all(line["turns"][0]["text"].endswith("Answer:") for line in lines)


@pytest.mark.smoke
@pytest.mark.timeout(400)
def test_vllm_resumes_with_the_same_tokens_and_sleeps_while_it_learns(ray_here, random_llama_dir, tmp_path, build):
    """Each iteration reseeds from (seed, iteration), so that even vLLM samples what it would have sampled."""
    config = small_config(random_llama_dir, tmp_path)
    config.env_runners(engine="vllm", engine_kv_cache_gib=0.125, num_env_runners=1, num_cpus_per_env_runner=1)
    algo = build(config.env_runners(colocate=True))
    algo.train()
    algo.save_to_path(tmp_path / "one")
    whole = played(algo, 2)
    assert algo.version == 3
    algo.restore_from_path(tmp_path / "one")
    again = played(algo, 2)
    assert again == whole


def played(algo, num_iterations: int) -> list[dict]:
    """Train, and return prompts and tokens of each iteration, and whether its engine slept while the learner worked."""
    play, update, seen, asleep, record = algo.rollouts.play, algo.learners.update, watch(algo), [], []

    def probed(*args):
        with pytest.raises(EngineError, match="sleep"):
            algo.runners.fingerprint([1], 30)
        asleep.append(True)
        return update(*args)

    algo.learners.update = probed
    for _ in range(num_iterations):
        algo.train()
        groups = fetched([meta.ref for meta in seen[-1].groups], 60.0)
        prompts = [group.prompt.prompt_id for group in groups]
        record.append({"prompts": prompts, "tokens": [group.token_ids_N.tolist() for group in groups]})
    assert asleep == [True] * num_iterations
    algo.rollouts.play, algo.learners.update = play, update
    return record
