"""Draws stored right answers to hold: of each group the first two (`right_answers`), of each domain the newest 128."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rllib_srl.replay.items import Tables
from rllib_srl.replay.selection.rules import in_turns, occurrences

PER_DOMAIN = 128


def draw_answers(
    tables: Tables,
    num: int,
    generator: np.random.Generator,
    without_slots: Sequence[int] = (),
    without_domains: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Draw `num` distinct answers, fewer only if there are fewer; items are left out by slot, domains by number.

    Every item comes once before any comes twice, and domains take turns; otherwise the draw is uniform.

    Returns:
        The seq of the group of each answer, and the answer's number among the `right_answers` of its group.
    """
    groups, domains = tables.groups, tables.items["domain"]
    at_N = np.flatnonzero(groups["num_answers"])
    domain_N, seq_N = domains[groups["slot"][at_N]].astype(np.int64), groups["seq"][at_N].astype(np.int64)
    order_N = np.argsort(domain_N * (tables.next_group_seq + 1) - seq_N)  # newest first in each domain
    rank_N = np.arange(len(at_N)) - np.searchsorted(domain_N[order_N], domain_N[order_N])
    at_N = at_N[order_N[rank_N < PER_DOMAIN]]
    at_N = np.repeat(at_N, groups["num_answers"][at_N])
    number_N, slot_N = occurrences(at_N), groups["slot"][at_N]
    is_able_N = occurrences(domains[slot_N]) < PER_DOMAIN
    is_able_N &= ~np.isin(slot_N, without_slots) & ~np.isin(domains[slot_N], without_domains)
    able = np.flatnonzero(is_able_N)
    drawn = able[in_turns(domains[slot_N[able]], slot_N[able], generator)[: max(0, num)]]
    return list(zip(groups["seq"][at_N[drawn]].tolist(), number_N[drawn].tolist(), strict=True))
