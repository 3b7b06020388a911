"""Through `algo.train()` the KL is that against the reference of its name, by hand, whatever the policy has become."""

from __future__ import annotations

import numpy as np
import pytest

from tests.losses.kl_by_hand import captured, k3_mean, weights_now
from tests.small_worlds import Even, small_config, watch

NUM_ITERATIONS = 8


class Lottery(Even):
    """Pays by prompt, and little by answer, so that iterations are good and bad by chance and groups have a signal."""

    def step(self, action):
        luck, little = int(self.prompt_id.rsplit(" ", 1)[1]) // 2 % 5 / 4, sum(map(ord, action)) % 2 / 100
        return "", luck + little, True, False, {}


def expected_references(kind, policies, means):
    """Return the reference of each iteration by the rule, and whether it moved at each look.

    There is a look every second iteration, at the mean of the last two.
    """
    reference, best, references, moves = policies[0], -np.inf, [], []
    for now in range(1, NUM_ITERATIONS + 1):
        references.append(reference)
        if now % 2:
            continue
        after, mean = policies[now], np.mean(means[now - 2 : now])
        moves.append(kind == "ema" or (kind == "last_good" and bool(mean >= best)))
        if kind == "ema":
            reference = {name: 0.25 * after[name] + 0.75 * reference[name] for name in reference}
        if kind == "last_good" and mean >= best:
            reference, best = after, mean
    return references, moves


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "ema", "last_good"])
def test_the_kl_is_that_against_the_reference(kind, random_llama_dir, tmp_path, ray_here, build):
    config = small_config(random_llama_dir, tmp_path)
    config.environment("tests.learner.test_moving_references:Lottery")
    kl = {"coeff": 0.05, "estimator": "k3", "reference": kind, "reference_every": 2, "reference_rate": 0.25}
    algo = build(config.training(kl=kl, lr=3e-3))
    model = algo.learner_group._learner.model
    seen, batches, kls = captured(algo, lambda: weights_now(model)), watch(algo), []
    for _ in range(NUM_ITERATIONS):
        kls.append(algo.train()["learners"]["default_policy"]["kl"])
    policies = [weights for _, weights in seen] + [weights_now(model)]
    means = [float(np.mean([g.rewards_G.mean() for g in batch.groups])) for batch in batches]
    references, moves = expected_references(kind, policies, means)
    groups = [groups for groups, _ in seen]
    by_hand = [k3_mean(random_llama_dir, *one) for one in zip(groups, policies, references, strict=False)]
    assert kls == pytest.approx(by_hand, rel=1e-3, abs=1e-7)
    assert set(moves) == {"base": {False}, "ema": {True}, "last_good": {False, True}}[kind]
    against_base = k3_mean(random_llama_dir, groups[-1], policies[-2], policies[0])
    assert (against_base == pytest.approx(kls[-1], rel=0.05)) == (kind == "base")
