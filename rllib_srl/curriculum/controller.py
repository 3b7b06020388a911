"""Run the planner within `training_step`.

    begin    plan of the iteration
    end      results by domain, progress of the stream ──> domains that ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.batch.advantage_estimator import AdvantageBatch
from rllib_srl.curriculum.planner import Plan, Planner, Result
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.types import GroupMeta

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

PLANNER_RESULTS = "planner"


class Controller:
    """Runs one planner over a prompt source. Invariant: with every part off, the planner changes and logs nothing."""

    def __init__(
        self,
        settings: PlannerSettings,
        fractions: tuple[float, float],
        source: PromptSource,
        metrics: MetricsLogger,
    ) -> None:
        """Make a planner.

        Args:
            settings: of the planner.
            fractions: initial fractions of revisits and of reuse.
            source: of fresh prompts.
            metrics: the logger for the planner's metrics.
        """
        self.is_on = settings.is_on
        self.planner = Planner(settings, fractions)
        self._source, self._metrics = source, metrics

    def begin(self, now: int) -> Plan:
        """Return the plan of an iteration."""
        return self.planner.plan(now, self._source.domain_weights()) if self.is_on else Plan()

    def end(
        self,
        plan: Plan,
        groups: Sequence[GroupMeta],
        pass_reward: float,
        now: int,
    ) -> list[str]:
        """Record the iteration's results, and advance the stream.

        Args:
            plan: of the iteration.
            groups: the played groups.
            pass_reward: the lowest reward of a pass, unless the environment defines its own.
            now: the training iteration.

        Returns:
            The domains of a stream that ended with this iteration.
        """
        if self.is_on:
            self.planner.observe(results_of(groups, pass_reward), now)
            self.planner.adapt()
            self._log(self.planner.gauges())
        if self.is_on or plan.fresh is not None:
            played = [group.prompt.domain for group in groups]
            self._log({f"share_realised/{name}": played.count(name) / len(played) for name in set(played)})
            self._log({f"share_intended/{name}": share for name, share in (plan.fresh or {}).items()})
        return list(self._source.advance(int(sum(group.num_loss_tokens_G.sum() for group in groups))))

    def get_state(self) -> dict[str, Any]:
        """Return the planner's state, for a checkpoint."""
        return self.planner.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`."""
        self.planner.set_state(state)

    def _log(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._metrics.log_value((PLANNER_RESULTS, *name.split("/", 1)), value, reduce="mean", window=1)


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
