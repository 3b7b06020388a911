"""Screening: play a few episodes of each prompt first, and the others only where the rewards of the first differ.

    prompt ── screen_size episodes ──┬─ rewards differ ── group_size - screen_size more ──> a group to train on
                                     └─ all equal ──> a visit of screen_size episodes: graded, stored, not trained on

All episodes of a group are trained on, those of the screen included. With `dynamic_sampling_tries` = n, further prompts
are screened in place of those screened out, in at most n rounds; with 0 the batch is smaller and tokens are saved.

*Bias.* A group is trained on only if its screen is mixed. Of the groups of G episodes with k successes, the share

    w(k) = 1 - (C(k, s) + C(G - k, s)) / C(G, s)          s = screen_size; C(n, s) = 0 for n < s

has a mixed screen. So the expected sum over groups is that of GRPO with each group weighted by w(k): nearly solved
and nearly failed prompts count less. For G = 8 and s = 2: .25, .43, .54, .57, .54, .43, .25 for k = 1 to 7. Factors of
1 / w(k) would remove the bias; neither the paper nor this package applies them.

Differences from the paper:
1. Prompts are screened and completed in the same iteration, under the same weights. The paper plays the screen of one
   batch together with the rest of the previous one, and keeps a surplus of screened prompts for later.
2. A screen passes if its rewards differ. The paper sets a range of pass rates; (0, 1) is the same rule.
3. Prompts that are screened out update the memory: their silent result is a visit of `screen_size` episodes.
4. In an environment with `settle_group` the screen is settled alone, then the whole group again.

Source: Zhang et al. 2025 (SPEED-RL), arXiv 2506.09016.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_srl.batch.estimators import has_signal


def with_signal(episodes: Iterable[SingleAgentEpisode]) -> frozenset[str]:
    """Return the ids of the groups whose valid episodes have different rewards.

    Args:
        episodes: of any groups; those ended by infrastructure are ignored.
    """
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        if not episode.custom_data["stop_reason"].is_infrastructure:
            rewards.setdefault(episode.custom_data["group_id"], []).append(episode.get_return())
    return frozenset(group_id for group_id, own in rewards.items() if has_signal(np.array(own, np.float32)))
