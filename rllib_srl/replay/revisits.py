"""Draw items to revisit: schedule waiting items that fit, draw by the rule, and fill a draw that would be short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.selection.rules import WHOLE_POOL
from rllib_srl.replay.selection.sampler import Draws
from rllib_srl.replay.selection.shares import DomainShares
from rllib_srl.replay.settings import ReplaySettings


class Revisits(NamedTuple):
    """Slots of the drawn items, and the number of waiting items that were scheduled for the draw."""

    slots_N: np.ndarray
    num_admitted: int


def draw_revisits(
    draws: Draws,
    recall: Recall,
    settings: ReplaySettings,
    num: int,
    now: int,
    generator: np.random.Generator,
    taken: Sequence[int] = (),
    shares: DomainShares | None = None,
) -> Revisits:
    """Draw items to revisit, after scheduling waiting ones that fit or are needed to fill the slots.

    Args:
        draws: of the items.
        recall: their schedule; its `slots` is the budget of load control.
        settings: of the memory.
        num: items wanted.
        now: the training iteration.
        generator: of this draw.
        taken: slots that may not be drawn.
        shares: domain shares of a planner; None: `domain_quotas` applies.
    """
    if settings.selection in WHOLE_POOL:
        return Revisits(draws.items(num, now, generator, taken, shares), 0)
    domains = draws.domains(shares)
    admitted = recall.admit(now, domains, wanted=draws.entry_filter)
    drawn = draws.items(num, now, generator, taken, shares)
    missing = num - len(drawn) if settings.fill_with_not_due else 0
    if missing and (forced := recall.admit(now, domains, missing, draws.entry_filter)):
        admitted += forced
        drawn = draws.items(num, now, generator, taken, shares)
    return Revisits(drawn, admitted)
