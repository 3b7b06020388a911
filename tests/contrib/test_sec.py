"""SEC: values and shares by hand, and a run in which fresh prompts move to the domain with advantages."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rllib_srl.batch.advantages import group, has_variance
from rllib_srl.contrib.sec import SEC
from rllib_srl.curriculum.curriculum import Plan
from rllib_srl.types import GroupMeta
from tests.replay.groups import a_group, a_prompt
from tests.small_envs import watch


class Sharp(SEC):
    """Shares that follow the values closely."""

    temperature = 0.2


def an_algorithm(mixture, advantage="mean_only"):
    config = SimpleNamespace(loss_settings=lambda: SimpleNamespace(advantage=advantage))
    return {"algorithm": SimpleNamespace(source=SimpleNamespace(domain_weights=lambda: mixture), config=config)}


def step(sec, rewards, now=1, **given):
    groups = [GroupMeta.of(a_group(a_prompt(i, name), rewards=r), None) for i, (name, r) in enumerate(rewards)]
    sec.post_step(**an_algorithm({}, **given), groups=groups, now=now, metrics_logger=MetricsLogger(root=True))


def shares(sec, mixture, now=1):
    return sec.change_plan(**an_algorithm(mixture), plan=Plan(), now=now, metrics_logger=None).fresh


def test_values_and_shares_by_hand():
    """Q' = Q + .5 (r - Q), r the mean of |r - mean|: a: .5 and .375, so .4375, Q .21875; b: zero variance, Q 0."""
    sec = Sharp()
    assert shares(sec, {"a": 0.5, "b": 0.5}) == {"a": 0.5, "b": 0.5}
    step(sec, [("a", [1, 0]), ("a", [1, 0, 0, 0]), ("b", [1, 1])])
    assert sec.values == {"a": pytest.approx(0.21875), "b": 0.0}
    assert shares(sec, {"a": 0.5, "b": 0.5})["a"] == pytest.approx(1 / (1 + np.exp(-0.21875 / 0.2)))
    step(sec, [("b", [1, 0])])  # a was not played and keeps its value
    assert sec.values == {"a": pytest.approx(0.21875), "b": 0.25}
    found = shares(sec, {"a": 0.25, "b": 0.75, "c": 0.0})
    assert set(found) == {"a", "b"} and found["b"] / found["a"] == pytest.approx(3 * np.exp(0.03125 / 0.2))
    again = Sharp()
    again.set_state(sec.get_state())
    assert shares(again, {"a": 0.25, "b": 0.75}) == pytest.approx(found)


def test_an_advantage_that_is_not_of_a_group_is_refused():
    with pytest.raises(ValueError, match=r"contrib.sec with advantage = 'none'; expected one of group"):
        step(SEC(), [("a", [1, 0])], advantage="none")


@pytest.mark.slow
def test_fresh_prompts_move_to_the_domain_with_advantages(two_domains, build):
    """Odd is paid for everything: no advantage; Even has some in every iteration."""
    algo = build(two_domains.callbacks(Sharp))
    seen, values, share = watch(algo), {"even": 0.0, "odd": 0.0}, {"even": 0.5, "odd": 0.5}
    for _ in range(4):
        seen.clear()
        found = algo.train()["planner"]
        played = [one for batch in seen for one in batch.groups]
        num = Counter(one.prompt.domain for one in played)
        assert dict(found["share_intended"]) == pytest.approx(share, abs=1e-6)
        assert dict(found["share_realised"]) == {name: num[name] / len(played) for name in num}
        assert all(abs(8 * share[name] - num[name]) <= 2 for name in share)  # fractions of a slot are carried
        for name in num:
            of = [one.rewards_G.astype(float) for one in played if one.prompt.domain == name]
            size = np.mean([np.abs(group(r)).mean() if has_variance(r) else 0.0 for r in of])
            values[name] += 0.5 * (size - values[name])
        assert dict(found["bandit_value"]) == pytest.approx(values, abs=1e-6)
        weight = {name: np.exp(value / 0.2) for name, value in values.items()}
        share = {name: one / sum(weight.values()) for name, one in weight.items()}
    assert values["odd"] == 0 < 0.3 < values["even"]
