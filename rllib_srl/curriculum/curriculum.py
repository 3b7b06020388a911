"""Choose the prompts of an iteration: a plan, revisits from the memory, and fresh prompts.

    Plan()                                       callbacks may change it (`SRLCallback.change_plan`)
    curriculum.fill(num, now, plan) -> Batch     revisits, then fresh prompts
    curriculum.end(plan, groups) -> [domain]     progress of the stream; domains that ended
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from rllib_srl.batch.advantages import AdvantageBatch
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

logger = logging.getLogger(__name__)
PLANNER_RESULTS = "planner"
NUM_SHOWN = 8  # domains in a warning


@dataclass(frozen=True)
class Plan:
    """The plan of one iteration. Invariant: the default leaves everything to the settings."""

    fresh: Mapping[str, float] | None = None  # domain -> share of fresh prompts
    revisit_fraction: float | None = None
    reuse_fraction: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # domain -> factor of its loss; 1 where it is missing
    num_reused: int | None = None  # if set, play nothing and train on this many stored groups

    def __post_init__(self) -> None:
        """Check the fractions; ValueError: one is out of its range."""
        both = {"revisit_fraction": self.revisit_fraction, "reuse_fraction": self.reuse_fraction}
        given = {name: float(share) for name, share in both.items() if share is not None}
        if given and (errors := ReplaySettings.errors(given)):
            raise ValueError(f"a plan has {'; '.join(errors)}")


class Batch(NamedTuple):
    """Prompts to play; the first `num_revisits` were played before."""

    prompts: list[Prompt]
    num_revisits: int


class Curriculum:
    """Chooses the prompts to play. Invariant: its only state is that of source and memory."""

    def __init__(self, source: PromptSource, memory: ReplayClient, metrics: MetricsLogger) -> None:
        """Warn of settings of the memory that the fresh prompts do not suit.

        Args:
            source: source of fresh prompts.
            memory: source of revisits.
            metrics: the logger for the shares of domains.
        """
        self._source, self._memory, self._metrics = source, memory, metrics
        for line in unsuited(memory.settings, source) if memory.is_on else ():
            logger.warning(line)

    def fill(self, num: int, now: int, plan: Plan, in_play: Collection[str] = ()) -> Batch:
        """Return the `num` prompts of iteration `now`; revisits are not among the keys `in_play`."""
        self._memory.set_fractions(plan.revisit_fraction, plan.reuse_fraction)
        revisits = self._memory.draw_prompts(num, now, in_play)
        return Batch(revisits + self._source.draw(num - len(revisits), plan.fresh), len(revisits))

    def learned(self, plan: Plan) -> set[str]:
        """Return the domains that have a share of the fresh prompts of a plan."""
        shares = self._source.domain_weights() if plan.fresh is None else plan.fresh
        return {domain for domain, share in shares.items() if share > 0} if plan.num_reused is None else set()

    def end(self, plan: Plan, groups: Sequence[GroupMeta]) -> list[str]:
        """Advance the stream by the played groups; return its domains that ended with this iteration."""
        if plan.fresh is not None:
            played = [group.prompt.domain for group in groups]
            self._log({("share_realised", name): played.count(name) / len(played) for name in set(played)})
            self._log({("share_intended", name): share for name, share in plan.fresh.items()})
        return list(self._source.advance(int(sum(group.num_loss_tokens_G.sum() for group in groups))))

    def _log(self, values: Mapping[tuple[str, str], float]) -> None:
        for name, value in values.items():
            self._metrics.log_value((PLANNER_RESULTS, *name), value, reduce="mean", window=1)


def unsuited(settings: ReplaySettings, source: PromptSource) -> list[str]:
    """Return warnings: too few prompts to draw any from the memory, and domains that no prompt has; unknown is fine."""
    lines = []
    least = min(settings.min_buffer_size, settings.capacity)
    is_drawn = (settings.revisit_fraction or settings.reuse_fraction) and settings.on_group is None
    if is_drawn and (num := source.num_listed(least - 1)):
        lines.append(
            f"the run has {num} training prompts, fewer than replay_min_buffer_size = {settings.min_buffer_size}: "
            f"nothing is revisited or reused; expected replay_min_buffer_size <= {num}"
        )
    named = settings.domains if isinstance(settings.domains, list | tuple | set | frozenset) else ()
    if named and (known := source.known_domains()) is not None and (unknown := sorted(set(named) - known)):
        listed = ", ".join(map(repr, sorted(known)[:NUM_SHOWN])) + (", ..." if len(known) > NUM_SHOWN else "")
        lines.append(
            f"replay_domains has {', '.join(map(repr, unknown))}, but no training prompt is of this domain; expected "
            f"some of {listed}"
        )
    return lines


def weighted(compared: AdvantageBatch, weights: Mapping[str, float]) -> AdvantageBatch:
    """Return the batch with advantages multiplied by the weight of their domain (1 where it is missing)."""
    if not weights:
        return compared
    factors = [weights.get(group.prompt.domain, 1.0) for group in compared.groups]
    return replace(compared, advantages=[f * a for f, a in zip(factors, compared.advantages, strict=True)])
