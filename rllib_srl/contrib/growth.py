"""ExIt's task growth: partial histories of played episodes become new prompts, to be continued or improved.

    replay_on_group="contrib.growth"

    a visited item (m, history)                     new items, one for each history
        episode: y_1 y_2 ... y_T    ──────────>     history + y_1, ..., history + y_1 .. y_(T-1)      partial histories
                                                    history + y_1 .. y_T      if the environment can iterate on answers

`Prompt.step` tells the two kinds apart: it is "" if turns are to be continued, and "improve" or, with probability
`p_div`, "diverge" if the history consists of answers to iterate on. One of the group's episodes with a turn is drawn
uniformly. Only prompts are kept, never old tokens, so no importance ratio is needed. A history of more than `depth`
turns, or that would leave no room for a turn, is not grown.

Differences from the paper: the step is drawn when an item is made, not at each visit; a visit starts from the item's
own history, as each shorter one is an item too; and the memory draws and evicts by its own rules, not by Var(r).

Source: Jiang, Lupu and Bachrach 2025, arXiv 2509.04575v1, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rllib_srl.types import Group, Prompt


@dataclass(frozen=True)
class Growth:
    """Grow histories; make one with other parameters in your own module: `mine = Growth(depth=2)`."""

    depth: int = 8  # turns of the longest history
    p_div: float = 0.2  # probability that a step asks for a different answer, in [0, 1]

    def __call__(self, group: Group, room: int | None, generator: np.random.Generator) -> Iterator[Prompt]:
        """Yield the prompts grown from one episode, shortest history first; draws two numbers a group."""
        prompt, iterates = group.prompt, bool(group.extra.get("can_iterate", False))
        which, step = generator.random(2)
        played = [g for g, turns in enumerate(group.extra.get("turns", ())) if turns]
        if not played or (prompt.step and not iterates):  # the environment's last self-iteration step
            return
        g = played[int(which * len(played))]
        turns = tuple(group.extra["turns"][g])
        asked = ("diverge" if step < self.p_div else "improve") if iterates else ""
        for t, end in enumerate(_turn_ends(group, g, len(turns))[: len(turns) - (not iterates)], 1):
            history = prompt.history + turns[:t]
            if len(history) <= self.depth and (room is None or end <= room):
                yield replace(prompt, history=history, step=asked)


def _turn_ends(group: Group, g: int, num_turns: int) -> list[int]:
    """Return the end of each turn in tokens; the stream's end if turns and runs of loss tokens differ in number."""
    mask_T = group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]].astype(np.int8)
    ends: list[int] = (np.flatnonzero(np.diff(mask_T, append=0) == -1) + 1).tolist()
    # Masked secrets split a turn, and an empty reply joins two; the length of the whole stream is a safe upper bound.
    return ends if len(ends) == num_turns else [len(mask_T)] * num_turns


growth = Growth()
