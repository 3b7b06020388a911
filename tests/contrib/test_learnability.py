"""Learnability through a buffer, against p (1 - p)."""

from __future__ import annotations

import numpy as np

from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group


def test_prompts_are_drawn_by_learnability_and_others_only_fill():
    buffer = a_buffer(selection="contrib.learnability", spacing="none")
    buffer.add([a_group(i, 1, i, [1.0] * (2 * i) + [0.0] * (8 - 2 * i)) for i in range(5)], 1)
    drawn = [int(prompt.prompt_id[1:]) for now in range(3, 2003) for prompt in buffer.draw_prompts(1, now)]
    assert fits(np.bincount(drawn, minlength=5), np.array([0, 3, 4, 3, 0]) / 10)  # 16 p (1 - p)
    assert {prompt.prompt_id for prompt in buffer.draw_prompts(5, 3000)} == {f"p{i}" for i in range(5)}
