"""RLlib's DQN trains with the episode buffer, named in its configuration, and learns a chain with one reward."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest

from rllib_srl.replay import SRLEpisodeReplayBuffer
from tests.replay.episodes import seen

LENGTH = 4


class Chain(gymnasium.Env):
    """Four states; action 1 goes on, action 0 back to the start. Only the end has a reward."""

    observation_space = gymnasium.spaces.Box(0, 1, (LENGTH,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config=None):
        self._at = self._steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = self._steps = 0
        return self._seen(), {}

    def step(self, action):
        self._at, self._steps = (self._at + 1 if action else 0), self._steps + 1
        is_end = self._at == LENGTH
        return self._seen(), float(is_end), is_end, self._steps >= 12, {}

    def _seen(self):
        return np.eye(LENGTH, dtype=np.float32)[min(self._at, LENGTH - 1)]


@pytest.mark.slow
def test_dqn_trains_with_it(ray_here):
    import torch
    from ray.rllib.algorithms.dqn import DQNConfig

    config = (
        DQNConfig()
        .environment(Chain)
        .env_runners(num_env_runners=0, rollout_fragment_length=4)
        .learners(num_learners=0)
        .debugging(seed=1)
        .training(
            replay_buffer_config={
                "type": "rllib_srl.replay.SRLEpisodeReplayBuffer", "capacity": 300, "segment_length": 4, "seed": 1,
            },
            n_step=2,
            train_batch_size=16,
            lr=5e-3,
            num_steps_sampled_before_learning_starts=60,
            target_network_update_freq=40,
            epsilon=[[0, 1.0], [600, 0.1]],
        )
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .reporting(min_sample_timesteps_per_iteration=300, min_time_s_per_iteration=0)
    )  # fmt: skip
    algo = config.build_algo()
    try:
        results = [algo.train() for _ in range(3)]
        buffer = algo.local_replay_buffer
        assert isinstance(buffer, SRLEpisodeReplayBuffer)
        visited = buffer._schedule.store.items["visits"][buffer._schedule.store.slots()]
        assert len(buffer) <= 300 < buffer.get_added_timesteps() == 900  # it evicted
        assert (visited > 0).mean() > 0.9  # TD errors arrived, and new segments are drawn soon
        metrics = results[-1]["replay_buffer"]
        assert metrics["num_env_steps_sampled"] == 16 * 75 and 0 < metrics["srl"]["num_visits"] <= 16 * 75
        assert 1 <= metrics["srl"]["mean_grade"] <= 4 and metrics["srl"]["num_silent"] > 0
        state, other = pickle.loads(pickle.dumps(buffer.get_state())), SRLEpisodeReplayBuffer(300, segment_length=4)
        other.set_state(state)
        drawn = [seen(one.sample(16, n_step=2)) for one in (buffer, other)]
        assert drawn[0] == drawn[1] and other.sample(1)[0].observation_space == Chain.observation_space
        module = algo.get_module()
        with torch.no_grad():
            actions = module.forward_inference({"obs": torch.eye(LENGTH)})["actions"]
        assert actions.tolist() == [1] * LENGTH  # a random policy reaches the end in 1 of 16 attempts
    finally:
        algo.stop()
