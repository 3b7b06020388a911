"""SPO (arXiv 2509.13232): the history is its value tracker, and the arm of the studies trains and draws by it."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from rllib_srl.batch.posterior import posterior
from rllib_srl.cli.shared.settings import apply_settings, expanded
from rllib_srl.replay.selection.pool import Surprise
from rllib_srl.replay.selection.rules import SELECTIONS
from tests.replay.groups import a_buffer, a_group
from tests.small_memory import go, memory_config, weights_of

NUM_OFFLINE = 8  # samples of each prompt by the first policy: the tracker's first count, 1 / (1 - .875)
HALF = 0.06  # nats
FLOOR = 0.05
SPO = {
    "advantage": {"name": "posterior", "scale": "centred", "min_surprise": 0.0},
    "group_size": 1,
    "replay_revisit_fraction": "auto",
    "replay_reuse_fraction": 0.0,
    "replay_history": {"by": "kl"},
    "replay_selection": "spo",
}


class Tracker:
    """The tracker of the paper: alpha and beta of each prompt, discounted by 2 ** (-D / .06) at each visit."""

    def __init__(self, offline):
        """Start from the successes among the offline samples of each prompt."""
        self.alpha, self.beta = np.array(offline, float), NUM_OFFLINE - np.array(offline, float)
        self.seen = np.zeros(len(offline))  # KL of the policy at the last visit

    @property
    def value(self):
        return self.alpha / (self.alpha + self.beta)

    def update(self, prompt, reward, kl):
        rho = 2 ** (-(kl - self.seen[prompt]) / HALF)
        self.alpha[prompt] = rho * self.alpha[prompt] + reward
        self.beta[prompt] = rho * self.beta[prompt] + 1 - reward
        self.seen[prompt] = kl


def test_the_history_is_the_tracker_of_spo():
    generator = np.random.default_rng(2)
    num = 6
    offline = generator.integers(0, NUM_OFFLINE + 1, num)
    given = {"history_by": "kl", "min_graded": 1, "selection": "spo", "surprise": Surprise(1, 0.0)}
    with closing(a_buffer(**given)) as buffer:
        first = [a_group(i, 1, i, rewards=np.arange(NUM_OFFLINE) < offline[i]) for i in range(num)]
        buffer.add(first, 1, policy_kl=0.0)
        tracker, kl = Tracker(offline), 0.0
        for now in range(2, 30):
            kl += float(generator.uniform(0, 0.03))
            asked = generator.permutation(num)[: generator.integers(2, num + 1)]
            rewards = generator.integers(0, 2, len(asked)).astype(float)
            groups = [a_group(int(asked[at]), now, at, rewards=[rewards[at]]) for at in range(len(asked))]
            histories = [visit.history for visit in buffer.add(groups, now, policy_kl=kl)]
            surprise = rewards - tracker.value[asked]
            expected = (surprise - surprise.mean()) / max(0.05, surprise.std())
            ours = posterior([np.array([r]) for r in rewards], histories, prior_weight=0.0, scale="centred")
            np.testing.assert_allclose(np.concatenate(ours), expected, atol=1e-9)
            for prompt, reward in zip(asked, rewards, strict=True):
                tracker.update(prompt, reward, kl)
            slots = buffer.store.slots()
            candidates = buffer.draws.all_candidates(slots, now + 1)
            prompts = [int(buffer.store.prompt_of(slot).prompt_id[1:]) for slot in slots.tolist()]
            weight = np.sqrt(tracker.value * (1 - tracker.value))[prompts] + FLOOR
            found = SELECTIONS["spo"].probabilities(candidates, buffer.draws._rule_settings["items"])
            np.testing.assert_allclose(found, weight / weight.sum(), atol=1e-9)


@pytest.mark.slow
def test_the_arm_of_the_studies_on_the_real_learner(random_llama_dir, tmp_path, ray_here, build):
    config = memory_config(random_llama_dir, tmp_path / "log")
    config.environment(env_config={"num_prompts": 10}).training(num_prompts_per_batch=6)
    config = apply_settings(config, expanded({**SPO, "replay_min_buffer_size": 4}))
    algo = build(config)
    assert (config.group_size, config.replay_reuse_fraction) == (1, 0.0)
    weight, before = config.loss_settings().prior_weight, weights_of(algo)
    past: dict[str, list[tuple[float, float]]] = {}  # key -> KL and reward of its visits
    rewards_so_far: list[float] = []
    for _ in range(6):
        kl = algo.policy_kl
        (one,) = go(algo, 1)
        assert len({group.prompt.key for group in one.played}) == len(one.played) == 6
        mean = np.average(rewards_so_far, weights=0.97 ** np.arange(len(rewards_so_far))[::-1]) if past else 0.5
        surprises = []
        for group in one.played:
            assert group.size == 1
            seen = past.get(group.prompt.key, [])
            rho = [2 ** (-(kl - then) / HALF) for then, _ in seen]
            total = sum(r * reward for r, (_, reward) in zip(rho, seen, strict=True))
            value = (weight * mean + total) / (weight + sum(rho))
            surprises.append(float(group.rewards_G[0]) - value)
        for group in one.played:
            past.setdefault(group.prompt.key, []).append((kl, float(group.rewards_G[0])))
            rewards_so_far.append(float(group.rewards_G[0]))
        expected = (np.array(surprises) - np.mean(surprises)) / max(0.05, np.std(surprises))
        trained = {group.group_id: advantage_G for _, group, advantage_G in one.trained}
        assert len(trained) == 6  # nothing is skipped
        for group, advantage in zip(one.played, expected, strict=True):
            np.testing.assert_allclose(trained[group.group_id], [advantage], atol=1e-6)
    assert algo.policy_kl > 0 and not np.array_equal(weights_of(algo), before)
