"""Episodes for tests of the episode buffer: every number tells where it comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.replay import SRLEpisodeReplayBuffer


def an_episode(number: int, rewards: Sequence[float] | int, is_done: bool = True) -> SingleAgentEpisode:
    """Return an episode whose observation at step t is [number, t] and whose action is t; by default t + 1 rewards."""
    rewards = [float(t + 1) for t in range(rewards)] if isinstance(rewards, int) else list(rewards)
    return SingleAgentEpisode(
        id_=f"e{number}",
        observations=[np.array([number, t], np.float32) for t in range(len(rewards) + 1)],
        infos=[{"at": t} for t in range(len(rewards) + 1)],
        actions=list(range(len(rewards))),
        rewards=rewards,
        terminated=is_done,
        extra_model_outputs={"logp": [-float(t) for t in range(len(rewards))]},
        len_lookback_buffer=0,
    )


def a_buffer(**settings) -> SRLEpisodeReplayBuffer:
    """Return a buffer that draws the same in every test."""
    return SRLEpisodeReplayBuffer(**{"capacity": 100, "batch_size_B": 1, "seed": 3, **settings})


def seen(drawn: Sequence[SingleAgentEpisode]) -> list[tuple]:
    """Return what a learner reads of each drawn transition."""
    return [
        (
            tuple(one.get_observations(0).tolist()),
            tuple(one.get_observations(1).tolist()),
            int(one.get_actions(0)),
            float(one.get_rewards(0)),
            bool(one.is_terminated),
            bool(one.is_truncated),
            int(one.get_extra_model_outputs("n_step", 0)),
            float(one.get_extra_model_outputs("weights", 0)),
        )
        for one in drawn
    ]


def places(drawn: Sequence[SingleAgentEpisode]) -> list[tuple[int, int]]:
    """Return (number of the episode, step) of each drawn transition."""
    return [tuple(int(value) for value in one.get_observations(0)) for one in drawn]
