"""Fractions that follow forgetting: the rule by hand, a run that follows it, and one that goes on exactly."""

from collections import Counter

import pytest

from rllib_srl import SRL
from rllib_srl.contrib.forgetting import Forgetting
from tests.contrib.test_probe import assert_trained_alike, recorded
from tests.small_envs import watch


class Falling(Forgetting):
    """Nothing is ever forgotten by 1, so that both fractions fall."""

    names, bounds, threshold, rate = ("revisit", "reuse"), (0.0, 0.5), 1.0, 0.2


def test_a_fraction_follows_forgetting_which_is_best_less_now():
    rule = Forgetting()
    rule.bounds = (0.1, 0.5)
    rule.recalled("a", 0.8)
    rule.recalled("a", 0.75)
    assert rule.adapted(0.25) == pytest.approx(0.21)  # .05 is below the threshold; a step is a tenth of the range
    rule.recalled("a", 0.5)
    assert rule.adapted(0.25) == pytest.approx(0.29) and rule.adapted(0.49) == 0.5
    rule.bounds, fraction = (0.0, 0.5), 0.0
    for _ in range(10):
        fraction = rule.adapted(fraction)
    assert fraction == pytest.approx(0.5)  # nothing keeps it at 0
    rule = Forgetting()
    rule.fade = 0.5
    rule.observe({"a": [1.0, 1.0], "b": [1.0]})  # a: .875, known; b: .75, half of it a guess
    assert rule.forgetting() == 0
    rule.observe({"a": [0.0], "b": [0.0]})  # a: .4375; b: .375, its first
    assert rule.forgetting() == pytest.approx((0.4375 + 0) / 2)
    measured = Forgetting()  # a measured recall comes before the mean
    for recall in (0.75, 0.25):
        measured.observe({"a": [1.0] * 99})
        measured.recalled("a", recall)
    assert measured.forgetting() == 0.5


@pytest.fixture
def config(two_domains):
    return two_domains.replay(capacity=500, min_buffer_size=4, degenerate_share=None)


@pytest.mark.slow
def test_fractions_reach_the_memory(config, build):
    algo = build(config.replay(revisit_fraction=0.5, reuse_fraction=0.4).callbacks(Falling))
    seen, played, results = watch(algo), [], []
    for _ in range(6):
        seen.clear()
        results.append(algo.train())
        groups = [group for batch in seen for group in batch.groups if group.rewards_G.size == 4]
        played.append(Counter(group.origin for group in groups)["revisit"])
    # Down by a tenth of 1/2 * 2 each iteration, from .5: .5 .4 .3 .2 .1 0
    assert played == [0, 3, 2, 2, 1, 0]  # 3.2 2.4 1.6 .8 0 of 8, the rest carried
    intended = [result["replay"]["revisit_share_intended"] for result in results]
    assert intended == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0])
    assert results[-1]["planner"]["reuse_fraction"] == 0.0


@pytest.mark.slow
def test_a_run_with_every_callback_goes_on_exactly(config, tmp_path):
    config.replay(revisit_fraction=0.25, reuse_fraction=0.25)
    config.callbacks(["contrib.forgetting", "contrib.recap", "contrib.probe", "contrib.sec"])
    algo = config.build_algo()
    recorded(algo, 3)
    algo.save_to_path(tmp_path / "three")
    want, counts = recorded(algo, 4)
    algo.stop()
    again = SRL.from_checkpoint(tmp_path / "three")
    rows, counts_again = recorded(again, 4)
    assert_trained_alike(rows, want)
    assert counts == counts_again and counts["probe"]
    again.stop()
