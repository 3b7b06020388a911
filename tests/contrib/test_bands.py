"""Shares by accuracy: priorities by hand, and a run in which a mastered domain gets what the floor leaves it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_srl.contrib.bands import Bands, Failing
from rllib_srl.curriculum.planner import Plan
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group, a_prompt
from tests.small_worlds import small_config, watch

EVEN, ODD = "tests.small_worlds:Even", "tests.small_worlds:Odd"


def algorithm(mixture):
    config = SimpleNamespace(replay_pass_reward=0.9)
    return SimpleNamespace(source=SimpleNamespace(domain_weights=lambda: mixture), config=config)


def after(kind, accuracies, now, **parameters):
    """Return a callback that has just seen these accuracies by domain."""
    callback = type("Changed", (kind,), {"ema_rate": 1.0, **parameters})()
    groups = []
    for number, (name, num_right) in enumerate(accuracies.items()):
        rewards = [1.0] * num_right + [0.0] * (10 - num_right)
        groups.append(GroupMeta.of(a_group(a_prompt(number, name), rewards=rewards), None))
    callback.post_step(algorithm=algorithm({}), groups=groups, now=now, metrics_logger=MetricsLogger(root=True))
    return callback


def shares(callback, mixture, now):
    return callback.change_plan(algorithm=algorithm(mixture), plan=Plan(), now=now, metrics_logger=None).fresh


def test_shares_by_band_are_those_worked_by_hand():
    bands = after(Bands, {"weak": 2, "strong": 9}, 5)
    # Both are equally stale, unknown and weighted: sigma(.6 - .1) = .62246, of .96, above a floor of .02.
    found = shares(bands, {"weak": 0.5, "strong": 0.5}, 5)
    assert found == pytest.approx({"weak": 0.61756, "strong": 0.38244}, abs=1e-5)
    bands.domains["weak"][2] = 15  # played again
    # weak: .6 + .9; strong: .1 + .1 + .1 * 10 / 50: sigma(1.28) = .78245
    found = shares(bands, {"weak": 0.9, "strong": 0.1}, 15)
    assert found["weak"] == pytest.approx(0.02 + 0.96 * 0.78245, abs=1e-5)
    again = Bands()
    again.set_state(bands.get_state())
    assert shares(again, {"weak": 0.9, "strong": 0.1}, 15) == found


def test_an_average_knows_how_much_it_has_seen():
    bands = Bands()
    group = GroupMeta.of(a_group(a_prompt(1, "a"), rewards=[1.0, 1.0]), None)
    bands.post_step(algorithm=algorithm({}), groups=[group], now=3, metrics_logger=MetricsLogger(root=True))
    assert bands.domains["a"] == pytest.approx([0.525, 0.905, 3])  # .95 .5 + .05; .95^2 + .05^2


def test_shares_by_failure_rate():
    failing = after(Failing, {"weak": 2, "strong": 9}, 1)
    found = shares(failing, {"weak": 0.5, "strong": 0.5}, 1)
    assert found["weak"] == pytest.approx(0.001 + 0.998 * 0.89090, abs=1e-5)  # sigma(3 (.8 - .1))
    tilted = shares(failing, {"weak": 0.25, "strong": 0.75}, 1)  # e^2.1 = 8.1662 to 3
    assert tilted["weak"] == pytest.approx(0.001 + 0.998 * 8.1662 / 11.1662, abs=1e-5)


class Steep(Failing):
    """Shares that follow the last group."""

    ema_rate, sharpness, floor = 1.0, 50.0, 0.125


@pytest.mark.slow
def test_a_domain_that_is_known_gets_what_the_floor_leaves_it(random_llama_dir, tmp_path, ray_here, build):
    config = small_config(random_llama_dir, tmp_path)
    config.env = None
    config.environment(worlds={EVEN: {}, ODD: {"pay": 0.0}}).training(num_prompts_per_batch=8)
    algo = build(config.callbacks(Steep))
    seen = watch(algo)
    for now in range(4):
        seen.clear()
        result = algo.train()
        num = sum(group.prompt.domain == "odd" for batch in seen for group in batch.groups)
        assert now == 0 or num == 1  # an eighth of 8: odd is paid for everything
    found = result["planner"]
    assert dict(found["share_realised"]) == {"even": 0.875, "odd": 0.125} and found["accuracy"]["odd"] == 1.0
    assert np.isclose(found["share_intended"]["odd"], 0.125, atol=1e-6)
