"""Probes: the published schedule, recall by the environment's pass mark, a run that trains as one without probes."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_srl.contrib.forgetting import Forgetting
from rllib_srl.contrib.probe import Probe
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.types import GroupMeta
from tests.algorithm.test_resume import go_on
from tests.replay.groups import a_group, a_prompt


def recorded(algo, num_iterations: int) -> tuple[list[dict], Counter]:
    """Train, and return what each iteration trained on and left behind, and how many prompts each stream played."""
    play, counts = algo.rollouts.play, Counter()

    def counting(prompts, iteration, stream="train", *arguments, **options):
        counts[stream] += len(prompts)
        return play(prompts, iteration, stream, *arguments, **options)

    algo.rollouts.play = counting
    rows = go_on(algo, num_iterations)
    algo.rollouts.play = play
    return rows, counts


def assert_trained_alike(one: list[dict], other: list[dict]) -> None:
    """Check that prompts and tokens are equal, and weights up to what the order of arrival rounds (1e-3 a step)."""
    for a, b in zip(one, other, strict=True):
        assert (a["iteration"], a["prompts"]) == (b["iteration"], b["prompts"])
        assert np.array_equal(a["tokens"], b["tokens"])
        assert np.abs(a["weights"] - b["weights"]).max() < 3e-4


class Five(Probe):
    """Few prompts, and every recall is mastery."""

    num_prompts, mastery = 5, 0.0


def test_probes_come_at_the_published_iterations():
    def probed(recall, num):
        probe, (due, gap), at = Probe(), (1, 1.0), []
        for now in range(1, num + 1):
            if due <= now:
                at.append(now)
                due, gap = probe.after(gap, recall, now)
        return at

    assert probed(1.0, 20) == [1, 3, 5, 8, 13]
    assert probed(0.4, 6) == [1, 2, 3, 4, 5, 6]
    assert Probe().after(2.25, 0.1, 5) == [6, 1.0]  # failure starts afresh


@pytest.mark.parametrize(("mark", "recall"), [(2 / 3, 0.75), (None, 0.25)])
def test_a_probe_goes_by_the_pass_reward_of_the_environment(mark, recall):
    """Grades 4, 3, 3 and 2 of 4: three are a pass of a rubric, one is full marks."""
    extra = {} if mark is None else {"pass_reward": mark}
    rewards = np.float32([1, 2 / 3, 2 / 3, 1 / 3])
    played = [GroupMeta.of(a_group(a_prompt(i, "a"), rewards=[r], extra=extra), None) for i, r in enumerate(rewards)]
    rule, plan = Forgetting(), Plan()
    algorithm = SimpleNamespace(
        source=SimpleNamespace(
            domain_weights=lambda: {"a": 1.0, "later": 0.0}, probes=lambda *_: [g.prompt for g in played]
        ),
        config=SimpleNamespace(evaluation_duration=8),
        play=lambda prompts, stream, **_: [SimpleNamespace(groups=played)],
        callbacks=[rule],
    )
    probe = Probe()
    found = probe.change_plan(algorithm=algorithm, plan=plan, now=1, metrics_logger=MetricsLogger(root=True))
    assert found is plan and rule.domains["a"].recall == recall
    again = Probe()
    again.set_state(probe.get_state())
    assert again.schedule == probe.schedule == {"a": [3, 1.5] if recall >= 0.5 else [2, 1.0]}


@pytest.mark.slow
def test_probes_change_nothing_that_is_trained(two_domains):
    plain = two_domains.copy(copy_frozen=False).build_algo()
    want, counts = recorded(plain, 3)
    plain.stop()
    assert counts == {"train": 24}
    algo = two_domains.callbacks(Five).build_algo()
    rows, counts = recorded(algo, 3)
    algo.stop()
    found = rows[-1]["planner"]
    assert_trained_alike(rows, want)
    assert counts == {"train": 24, "probe": 20}  # 5 of each domain in the first iteration, and in the third
    assert found["num_probe_prompts"] == 20 and 20 <= found["num_probe_tokens"] <= 60  # 1 to 3 tokens an answer
    assert found["recall"]["odd"] == 1.0
