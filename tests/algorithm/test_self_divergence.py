"""Revisits that ask for a different answer than a stored one, in real runs: their share, their text, and off."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from rllib_srl.algorithm.validation import faults_of
from rllib_srl.envs.wrappers.self_iteration import ASKED
from tests.small_memory import go, memory_config, weights_of

INNER = {"world": "tests.small_worlds:Even", "world_config": {"num_prompts": 400}}


@pytest.fixture
def build(random_llama_dir, tmp_path, ray_here):
    built = []

    def of(**replay):
        config = memory_config(random_llama_dir, tmp_path / f"log{len(built)}", **{"revisit_fraction": 0.5, **replay})
        config.environment("rllib_srl.envs.wrappers.self_iteration:SelfIteration")
        config.env_config = INNER
        config.env_runners(max_episode_tokens=512)
        built.append(config.build_algo())
        return built[-1]

    yield of
    for algo in built:
        algo.stop()


@pytest.mark.slow
def test_a_run_asks_its_share_of_revisits_for_a_different_answer(build):
    algo = build(task_growth={"enabled": False, "self_divergence": 0.5}, min_recall_interval=1, reuse_fraction=0.0)
    decode = partial(algo.env_runner.tokenizer.decode, skip_special_tokens=True)
    answers, revisits, diverged = {}, [], []
    for step in go(algo, 16):
        revisits += step.revisits
        for group in step.played:
            if not group.prompt.step:
                answers[group.prompt.prompt_id] = {turns[0] for turns in group.extra["turns"]}
                continue
            (shown,), prompt_id = group.prompt.history, group.prompt.prompt_id
            diverged.append(group)
            assert (group.prompt.step, group.origin) == ("diverge", "revisit") and shown in answers[prompt_id]
            text = decode(group.stream(0)[: int(np.flatnonzero(group.loss_mask_N[: group.offsets[1]])[0])])
            assert text.startswith(f"{prompt_id}: {shown}") and text.endswith(ASKED["diverge"])
            assert step.visits[group.group_id].refused == "diverged"
            trained = [one for one in step.trained if one[1].group_id == group.group_id]
            assert bool(trained) == (np.ptp(group.rewards_G) > 0)
        last = step
    num = len(revisits)
    assert num > 20 and abs(len(diverged) - num / 2) <= 4 * np.sqrt(num / 4)
    assert last.replay["num_diverged"] == last.replay["num_refused_diverged"] == len(diverged)
    assert last.replay["num_diverged_unanswered"] == 0


@pytest.mark.slow
def test_off_is_the_run_without_it_bit_for_bit(build):
    runs = [build(), build(task_growth={"enabled": False, "self_divergence": 0.0})]
    one, other = ([step.played for step in go(algo, 4)] for algo in runs)
    for mine, theirs in zip(one, other, strict=True):
        assert [group.prompt for group in mine] == [group.prompt for group in theirs]
        assert all(np.array_equal(a.token_ids_N, b.token_ids_N) for a, b in zip(mine, theirs, strict=True))
        assert not any(group.prompt.step for group in mine)
    assert np.array_equal(*map(weights_of, runs))


@pytest.mark.slow
def test_an_environment_whose_question_cannot_be_extended_is_refused(random_llama_dir, tmp_path, ray_here):
    config = memory_config(random_llama_dir, tmp_path, task_growth={"enabled": False, "self_divergence": 0.1})
    expected = "self_divergence above 0; expected environments that can ask for a different answer, such as "
    with pytest.raises(ValueError, match=re.escape(expected) + "'self_iteration', not 'tests.small_worlds:Even'"):
        config.build_algo()


@pytest.mark.parametrize(
    ("replay", "reason"),
    [
        ({"task_growth": {"self_divergence": 0.1}}, "with task_growth enabled; expected enabled = False, or p_div"),
        ({"task_growth": {"enabled": False, "self_divergence": 0.1}, "revisit_fraction": 0.0}, "without revisits"),
        ({"task_growth": {"enabled": False, "self_divergence": 1.5}}, "expected a number in [0, 1]"),
    ],
)
def test_impossible_settings_are_refused(random_llama_dir, tmp_path, replay, reason):
    assert any(reason in line for line in faults_of(memory_config(random_llama_dir, tmp_path, **replay)))
