"""SPO's draw through a buffer, against its formula."""

import numpy as np

from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group


def test_prompts_are_drawn_by_the_deviation_of_their_rewards():
    """Prompt i has 2 i right answers of 8: v = (1 + 2 i) / 10."""
    buffer = a_buffer(selection="contrib.spo", spacing="none", history_half_life=1e9)
    buffer.add([a_group(i, 1, i, [1.0] * (2 * i) + [0.0] * (8 - 2 * i)) for i in range(5)], 1)
    drawn = [int(prompt.prompt_id[1:]) for now in range(3, 3003) for prompt in buffer.draw_prompts(1, now)]
    value_N = (1 + 2 * np.arange(5)) / 10
    weight_N = np.sqrt(value_N * (1 - value_N)) + 0.05
    assert fits(np.bincount(drawn, minlength=5), weight_N / weight_N.sum())
