"""Runners that play on while the learner trains (`max_lag`): what is trained on, when, and what is never lost."""

import os
import signal
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rllib_srl import SRL
from rllib_srl.batch.shard import fetched
from tests.small_memory import go, memory_config, watched
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
P = 4  # prompts of a batch


def ahead_config(model_dir, directory, env="Even", max_lag=1, num_env_runners=1, **env_config):
    config = memory_config(model_dir, directory, env, groups_per_item=4, max_logp_gap=None)
    config.environment(env_config={"num_prompts": 400, **env_config})
    config.env_runners(num_env_runners=num_env_runners, max_turns=3, num_env_threads=32)
    return config.env_runners(max_lag=max_lag, slice_s=0.05)


def lag_of(meta, version) -> int:
    return version - int(meta.versions_G2[:, 0].min())


def test_each_prompt_is_trained_on_once_and_lags_one_update(random_llama_dir, tmp_path, ray_here, build):
    config = ahead_config(random_llama_dir, tmp_path, num_env_runners=2, slow_s=0.02)
    algo = build(config.evaluation(evaluation_interval=3))
    lags, num_heldout, engine_s = [], [], 0.0
    with watched(algo) as iterations:
        for _ in range(7):
            version = algo.version
            # However slow a runner is at the moment: what is in play has ended.
            assert wait_until(lambda: all(one.batch for one in algo.rollouts.ahead.outstanding), 120)
            result = algo.train()
            lags += [lag_of(meta, version) for meta in iterations[-1].metas]
            assert len(iterations[-1].metas) == result["env_runners"]["num_groups"] == P
            assert result["rollout"]["late_share"] == 0 and len(algo.rollouts.ahead.outstanding) == P
            assert result["rollout"]["lag_max"] == max(lags[-P:])
            engine_s += result["env_runners"]["engine_s"]
            num_heldout.append(result.get("evaluation", {}).get("num_prompts"))
    assert engine_s > 0
    assert set(result["rollout"]) == {"lag_mean", "lag_max", "late_share"} and result["rollout"]["lag_mean"] == 1
    ids = [meta.group_id for one in iterations for meta in one.metas]
    begun = ids + [one.group_id for one in algo.rollouts.ahead.outstanding]
    first = {f"1.{slot}" for slot in range(2 * P)}  # of the first iteration, then P in each
    assert len(set(begun)) == len(begun) == 8 * P
    assert set(begun) == first | {f"{now}.{slot}" for now in range(2, 8) for slot in range(P)}
    assert set(lags[:P]) == {0} and set(lags[P:]) == {1}
    trained = [group.group_id for one in iterations for origin, group, _ in one.trained if origin == "fresh"]
    assert len(set(trained)) == len(trained) and set(trained) <= set(ids)
    assert num_heldout == [None, None, 8, None, None, 8, None]  # played on the same engines, between training


def test_late_groups_enter_the_memory_and_are_reused_later(random_llama_dir, tmp_path, ray_here, build):
    config = ahead_config(random_llama_dir, tmp_path, "Straggling", slow_s=0.5)
    algo = build(config.replay(reuse_fraction=0.5, revisit_fraction=0.0, max_age=50))
    late, reused = {}, set()
    with watched(algo) as iterations:
        deadline = time.monotonic() + 120
        while not set(late) & reused and time.monotonic() < deadline:
            version = algo.version
            result = algo.train()
            new = {meta.group_id: meta for meta in iterations[-1].metas if lag_of(meta, version) > 1}
            assert result["rollout"]["late_share"] == len(new) / len(iterations[-1].metas)
            trained = {group.group_id for origin, group, _ in iterations[-1].trained if origin != "reuse"}
            assert not trained & set(new)
            late |= new
            reused |= {meta.group_id for meta in iterations[-1].reused}
    found = set(late) & reused
    assert found
    stored = {group.group_id: group for one in iterations for origin, group, _ in one.trained if origin == "reuse"}
    for group_id in found & set(stored):
        assert np.array_equal(stored[group_id].versions_G2, late[group_id].versions_G2)  # as they were played


def logps_by_version(directories, ids) -> np.ndarray:
    """Return the log-prob of each token but the first, by each version's weights, float32 [V, T - 1]."""
    found = []
    for directory in directories:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        with torch.inference_mode():
            logp_TV = model(torch.tensor([ids.tolist()])).logits[0, :-1].float().log_softmax(-1)
        found.append(logp_TV.gather(-1, torch.tensor(ids[1:].astype(np.int64))[:, None])[:, 0].numpy())
    return np.stack(found)


def test_log_probs_are_those_of_the_version_that_wrote_the_token(random_llama_dir, tmp_path, ray_here, build):
    """Of each episode the versions of its tokens never fall, from the first version to the last."""
    config = ahead_config(random_llama_dir, tmp_path, "Straggling", slow_s=0.4)
    config.replay(revisit_fraction=0.0).training(lr=3e-3)
    algo = build(config)
    weights, spanning = [algo.export_to_huggingface(tmp_path / "v0")], 0
    with watched(algo) as iterations:
        deadline = time.monotonic() + 120
        while spanning < 4 and time.monotonic() < deadline:
            algo.train()
            weights.append(algo.export_to_huggingface(tmp_path / f"v{algo.version}"))
            for group in fetched([meta.ref for meta in iterations[-1].metas], 60.0):
                for g, (first, last) in enumerate(group.versions_G2):
                    span = slice(group.offsets[g], group.offsets[g + 1])
                    mask_T = group.loss_mask_N[span].astype(bool)
                    by_version = logps_by_version(weights[first : last + 1], group.token_ids_N[span])[:, mask_T[1:]]
                    gap = np.abs(by_version - group.behaviour_logp_N[span][mask_T]) < 1e-3
                    assert gap[0, 0] and gap[-1, -1] and gap.any(0).all()
                    earliest = np.maximum.accumulate(gap.argmax(0))  # a version for each token that never falls
                    assert gap[earliest, np.arange(gap.shape[1])].all()
                    spanning += bool(first < last and not gap[0].all() and not gap[-1].all())
    assert spanning >= 4


def test_a_killed_runner_costs_time_and_no_group(random_llama_dir, tmp_path, ray_here, build):
    config = ahead_config(random_llama_dir, tmp_path, num_env_runners=2, slow_s=0.2)
    algo = build(config)
    with watched(algo) as iterations:
        for now in range(1, 6):
            if now in (2, 4):
                pid = algo.runners.places[1 + now % 4 // 2].pid
                os.kill(pid, signal.SIGKILL)
            result = algo.train()
    assert result["num_runner_restarts"] == 2
    ids = [meta.group_id for one in iterations for meta in one.metas]
    ids += [one.group_id for one in algo.rollouts.ahead.outstanding]
    assert len(set(ids)) == len(ids) == 6 * P
    prints = algo.runners.fingerprint(algo.runners.ids, 30)
    assert len({repr(sorted(one.items())) for one in prints.values()}) == 1


def test_a_resumed_run_asks_again_what_was_in_play(random_llama_dir, tmp_path, ray_here):
    config = ahead_config(random_llama_dir, tmp_path, max_lag=2, slow_s=0.05).replay(revisit_fraction=0.0)
    algo = config.build_algo()
    taken = [meta.prompt.key for one in go(algo, 3) for meta in one.metas]
    in_play = [one.prompt.key for one in algo.rollouts.ahead.outstanding]
    assert len(in_play) == 2 * P and len(set(taken + in_play)) == 5 * P
    algo.save_to_path(tmp_path / "saved")
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "saved")
    later = [meta.prompt.key for one in go(again, 2) for meta in one.metas]
    still = [one.prompt.key for one in again.rollouts.ahead.outstanding]
    again.stop()
    assert set(in_play) <= set(later + still)
    assert len(set(taken + later + still)) == 3 * P + 4 * P  # 400 prompts: none comes twice, none is left out
