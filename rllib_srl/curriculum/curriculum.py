"""What an iteration plays: a plan, revisits from the memory, and fresh prompts.

    curriculum.plan(now) -> Plan                 by the planner; callbacks may change it
    curriculum.fill(num, now, plan) -> Batch     revisits, then fresh prompts
    curriculum.end(plan, groups, ...)            results by domain, progress of the stream ──> domains that ended

    revisit_fraction = .25     a fixed share of revisits, the rest from the prompt source
    "auto"                     the share follows what revisits teach (`LiveBalance`)
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rllib_srl.batch.advantages import AdvantageBatch
from rllib_srl.curriculum.planner import Plan, Planner, Result
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.settings import AUTO_START, ReplaySettings
from rllib_srl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

logger = logging.getLogger(__name__)
PLANNER_RESULTS = "planner"
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


class Curriculum:
    """Decides what is played. Invariant: with every part of the planner off, it changes and logs nothing."""

    def __init__(
        self,
        settings: PlannerSettings,
        fractions: tuple[float, float],
        source: PromptSource,
        memory: ReplayClient,
        metrics: MetricsLogger,
    ) -> None:
        """Warn of domains in the memory's settings that no fresh prompt has.

        Args:
            settings: of the planner.
            fractions: initial fractions of revisits and of reuse.
            source: of fresh prompts.
            memory: of old prompts.
            metrics: the logger for the planner's metrics.
        """
        self.is_planned = settings.is_on
        self.planner = Planner(settings, fractions)
        self._source, self._memory, self._metrics = source, memory, metrics
        self._balance = LiveBalance() if memory.is_on and memory.is_auto else None
        for line in unknown_domains(memory.settings, source) if memory.is_on else ():
            logger.warning(line)

    def plan(self, now: int) -> Plan:
        """Return the plan of an iteration."""
        return self.planner.plan(now, self._source.domain_weights()) if self.is_planned else Plan()

    def fill(self, num: int, now: int, plan: Plan, in_play: Collection[str] = ()) -> Batch:
        """Return the `num` prompts of iteration `now`; revisits are not among the keys `in_play`."""
        fraction = plan.revisit_fraction if self._balance is None else self._balance.fraction
        self._memory.set_fractions(fraction, plan.reuse_fraction)
        revisits = self._memory.draw_prompts(num, now, in_play)
        return Batch(revisits + self._source.draw(num - len(revisits), plan.fresh), len(revisits))

    def end(
        self, plan: Plan, groups: Sequence[GroupMeta], trained: Collection[str], pass_reward: float, now: int
    ) -> list[str]:
        """Record the iteration's results, and advance the stream.

        Args:
            plan: of the iteration.
            groups: the played groups.
            trained: ids of the groups that are trained on.
            pass_reward: the lowest reward of a pass, unless the environment defines its own.
            now: the training iteration.

        Returns:
            The domains of a stream that ended with this iteration.
        """
        if self._balance is not None:
            self._balance.observe(groups, trained)
        if self.is_planned:
            self.planner.observe(results_of(groups, pass_reward), now)
            self.planner.adapt()
            self._log(self.planner.gauges())
        if self.is_planned or plan.fresh is not None:
            played = [group.prompt.domain for group in groups]
            self._log({f"share_realised/{name}": played.count(name) / len(played) for name in set(played)})
            self._log({f"share_intended/{name}": share for name, share in (plan.fresh or {}).items()})
        return list(self._source.advance(int(sum(group.num_loss_tokens_G.sum() for group in groups))))

    def get_state(self) -> dict[str, Any]:
        """Return the state of the planner and of the share that adapts, for a checkpoint."""
        return {"planner": self.planner.get_state(), "balance": self._balance and self._balance.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`; that of a run whose share did not adapt leaves the share."""
        self.planner.set_state(state["planner"])
        if self._balance is not None and state["balance"]:
            self._balance.set_state(state["balance"])

    def _log(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._metrics.log_value((PLANNER_RESULTS, *name.split("/", 1)), value, reduce="mean", window=1)


def unknown_domains(settings: ReplaySettings, source: PromptSource) -> list[str]:
    """Return a warning if the memory's setting `domains` names some of which the source is known to have no prompt."""
    named = settings.domains if isinstance(settings.domains, list | tuple | set | frozenset) else ()
    if not named or (known := source.known_domains()) is None or not (unknown := sorted(set(named) - known)):
        return []
    listed = ", ".join(map(repr, sorted(known)[:NUM_SHOWN])) + (", ..." if len(known) > NUM_SHOWN else "")
    return [
        f"replay_domains has {', '.join(map(repr, unknown))}, but no training prompt is of this domain; expected some "
        f"of {listed}"
    ]


def results_of(groups: Sequence[GroupMeta], pass_reward: float) -> dict[str, list[Result]]:
    """Return the results of the groups of each domain; `is_success_G` decides which episodes pass."""
    results: dict[str, list[Result]] = {}
    for group in groups:
        result = Result(float(np.mean(group.is_success_G(pass_reward))), float(np.mean(group.rewards_G)))
        results.setdefault(group.prompt.domain, []).append(result)
    return results


def weighted(compared: AdvantageBatch, weights: Mapping[str, float]) -> AdvantageBatch:
    """Return the batch with advantages multiplied by the weight of their domain (1 where it is missing)."""
    if not weights:
        return compared
    factors = [weights.get(group.prompt.domain, 1.0) for group in compared.groups]
    return replace(compared, advantages=[f * a for f, a in zip(factors, compared.advantages, strict=True)])
