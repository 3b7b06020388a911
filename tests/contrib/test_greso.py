"""GRESO through a buffer: what has zero variance is skipped, geometrically, and each pass plays the rest."""

from collections import Counter

import numpy as np
import pytest

from rllib_srl.contrib.greso import skipped_passes
from rllib_srl.replay.settings import ReplaySettings
from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group


def test_zero_variance_prompts_come_back_less_often():
    """Eight varied prompts and eight of zero variance: a pass plays the former, the latter at most half of the time."""
    buffer = a_buffer(selection="contrib.greso", spacing="none", min_recall_interval=1)
    rewards = [(1.0, 0.0), (1.0, 1.0)]
    buffer.add([a_group(i, 1, i, rewards[i % 2]) for i in range(16)], 1)
    visits: Counter = Counter()
    for now in range(2, 42):
        prompts = buffer.draw_prompts(4, now)
        numbers = [int(prompt.prompt_id[1:]) for prompt in prompts]
        visits.update(numbers)
        buffer.add([a_group(p, now, i, rewards[n % 2]) for i, (p, n) in enumerate(zip(prompts, numbers))], now)
    mixed, equal = ([visits[i] for i in range(start, 16, 2)] for start in (0, 1))
    assert sum(mixed) + sum(equal) == 160 and max(equal) < min(mixed) and sum(equal) > 0
    # q = 1/4: P(k passes are skipped) = (3/4) ** k / 4
    lots = (np.arange(40_000) + 0.5) / 40_000
    count_K = np.bincount(skipped_passes(lots, np.full(40_000, 0.25)).astype(int))[:8]
    assert fits(count_K, 0.75 ** np.arange(8) / 4 / (1 - 0.75**8))
    with pytest.raises(ValueError, match=r"least = 0\.0; expected a number in \(0, 1\]"):
        ReplaySettings(selection="contrib.greso", selection_config={"least": 0.0}).checked()
