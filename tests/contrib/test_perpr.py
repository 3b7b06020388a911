"""PerpR through a buffer: stored groups by their perplexity."""

from __future__ import annotations

import numpy as np

from tests.replay.frequencies import fits
from tests.replay.groups import a_buffer, a_group, drawn_groups


def surprising(index: int, perplexity: float):
    """Return a group whose policy tokens all have log-prob -log(perplexity)."""
    group = a_group(index, 1, index)
    logp_N = np.where(group.loss_mask_N, -np.log(perplexity), 0).astype(np.float32)
    return a_group(index, 1, index, behaviour_logp_N=logp_N)


def test_groups_are_drawn_by_perplexity():
    given = {"max_age": 10**6, "max_uses": 10**6}
    buffer = a_buffer(reuse_selection="contrib.perpr", **given)
    buffer.add([surprising(i, perplexity) for i, perplexity in enumerate((1.0, 2.0, 5.0))], 1)
    drawn = [int(group.prompt.prompt_id[1:]) for now in range(3, 2003) for group in drawn_groups(buffer, 1, now)]
    assert fits(np.bincount(drawn, minlength=3), np.array([1, 2, 5]) / 8)
    greedy = a_buffer(reuse_selection="contrib.perpr", reuse_selection_config={"temperature": 0.0}, **given)
    greedy.add([surprising(i, perplexity) for i, perplexity in enumerate((1.0, 2.0, 5.0))], 1)
    assert [group.prompt.prompt_id for group in drawn_groups(greedy, 2, 2)] == ["p2", "p1"]
