"""Fills a batch with prompts: revisits from the memory, and fresh or never visited ones.

    revisit_fraction = .25     a fixed share of revisits, the rest from the prompt source
    "auto"                     the share follows what revisits teach (`LiveBalance`)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rllib_srl.curriculum.planner import Plan
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.settings import AUTO_START, ReplaySettings
from rllib_srl.types import GroupMeta, Prompt

logger = logging.getLogger(__name__)
FADE = 0.985  # a group: about 67 groups count
AUTO_BOUNDS = (0.05, 0.5)  # lowest and highest revisit fraction of "auto"
AUTO_STEP = 0.05  # of an iteration, as a share of the range between the bounds
NUM_SHOWN = 8  # domains in a warning
MIN_GROUPS = 8.0  # faded groups of each kind below which the fraction stays


class Batch(NamedTuple):
    """Prompts to play; the first `num_revisits` were played before."""

    prompts: list[Prompt]
    num_revisits: int


class LiveBalance:
    """Adapts the revisit fraction: it falls while revisits teach less often than fresh prompts, and rises else.

    A group is live if it is trained on. The fraction falls by a step if the faded share of live groups among revisits
    lies below that among fresh prompts, rises by a step if it lies above, and stays if they are equal or one of the
    two has fewer than `MIN_GROUPS`. It stays within `AUTO_BOUNDS`; the lower bound keeps the share of revisits known.

    Invariant: `get_state` holds its whole state.
    """

    def __init__(self) -> None:
        """Start at `AUTO_START`, without groups."""
        self.fraction = AUTO_START
        self._live = {"fresh": 0.0, "revisit": 0.0}
        self._all = {"fresh": 0.0, "revisit": 0.0}

    def observe(self, groups: Sequence[GroupMeta], trained: Collection[str]) -> None:
        """Update the shares with the played groups of an iteration, and the fraction.

        Args:
            groups: with `origin` "fresh" or "revisit".
            trained: ids of the groups that are trained on.
        """
        for group in groups:
            self._live[group.origin] = FADE * self._live[group.origin] + (group.group_id in trained)
            self._all[group.origin] = FADE * self._all[group.origin] + 1
        if min(self._all.values()) < MIN_GROUPS:
            return
        (low, high), gap = AUTO_BOUNDS, self.live_share("revisit") - self.live_share("fresh")
        step = AUTO_STEP * (high - low) * ((gap > 0) - (gap < 0))
        self.fraction = round(min(high, max(low, self.fraction + step)), 9)

    def live_share(self, origin: str) -> float:
        """Return the faded share of live groups among "fresh" or "revisit"; 0 without groups."""
        return self._live[origin] / self._all[origin] if self._all[origin] else 0.0

    def get_state(self) -> dict[str, Any]:
        """Return fraction and sums, as JSON types."""
        return {"fraction": self.fraction, "live": dict(self._live), "all": dict(self._all)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `get_state` returned."""
        self.fraction, self._live, self._all = state["fraction"], dict(state["live"]), dict(state["all"])


class StreamFiller:
    """Fills batches with a share of revisits, and with the next prompts of the source."""

    def __init__(self, source: PromptSource, memory: ReplayClient, balance: LiveBalance | None) -> None:
        """Draw from both; `balance` adapts the share, None leaves it to the settings and the plan."""
        self._source, self._memory, self._balance = source, memory, balance

    def fill(self, num: int, now: int, plan: Plan, in_play: Collection[str] = ()) -> Batch:
        """Return the `num` prompts of iteration `now`; revisits are not among the keys `in_play`."""
        fraction = plan.revisit_fraction if self._balance is None else self._balance.fraction
        self._memory.set_fractions(fraction, plan.reuse_fraction)
        revisits = self._memory.draw_prompts(num, now, in_play)
        return Batch(revisits + self._source.draw(num - len(revisits), plan.fresh), len(revisits))

    def more(self, num: int, now: int, plan: Plan) -> Batch:
        """Return `num` further prompts in the same iteration: fresh ones."""
        return Batch(self._source.draw(num, plan.fresh), 0)

    def observe(self, groups: Sequence[GroupMeta], trained: Collection[str]) -> None:
        """Adapt the share to the played groups of an iteration; see `LiveBalance.observe`."""
        if self._balance is not None:
            self._balance.observe(groups, trained)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the balance, {} without one."""
        return {} if self._balance is None else self._balance.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`; that of a run without a balance changes nothing."""
        if self._balance is not None and state:
            self._balance.set_state(state)


def make_filler(source: PromptSource, memory: ReplayClient) -> StreamFiller:
    """Return the filler for the memory's settings; `source` has the fresh prompts."""
    if not memory.is_on:
        return StreamFiller(source, memory, None)
    for line in unknown_domains(memory.settings, source):
        logger.warning(line)
    return StreamFiller(source, memory, LiveBalance() if memory.is_auto else None)


def unknown_domains(settings: ReplaySettings, source: PromptSource) -> list[str]:
    """Return a warning for each setting that names domains of which the source has no prompt, where that is known."""
    quotas, chosen = settings.domain_quotas, settings.domains
    named: dict[str, Collection[str]] = {
        "replay_domain_quotas": quotas if isinstance(quotas, Mapping) else (),
        "replay_domains": chosen if isinstance(chosen, list | tuple | set | frozenset) else (),
    }
    if not any(named.values()) or (known := source.known_domains()) is None:
        return []
    listed = ", ".join(map(repr, sorted(known)[:NUM_SHOWN])) + (", ..." if len(known) > NUM_SHOWN else "")
    return [
        f"{name} has {', '.join(map(repr, unknown))}, but no training prompt is of this domain; expected some of "
        f"{listed}"
        for name, names in named.items()
        if (unknown := sorted(set(names) - known))
    ]
