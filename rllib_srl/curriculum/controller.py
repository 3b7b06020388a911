"""Run the planner within `training_step`: probes, plans, results.

    begin    play the probes that are due ──> plan of the iteration
    end      results by domain, the learner's metrics, progress of the stream ──> domains that ended

Probes do not change training: they are played greedily under a random stream of their own, training is reseeded every
iteration, and the prompt source returns probes without drawing. Training samples the same tokens with and without
probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import LEARNER_RESULTS

from rllib_srl.batch.advantage_estimator import AdvantageBatch
from rllib_srl.common.metric_names import current_metric
from rllib_srl.curriculum import Plan, Planner, PlannerSettings
from rllib_srl.curriculum.planner import Result
from rllib_srl.curriculum.prompts import PromptSource
from rllib_srl.types import GroupMeta, Prompt

if TYPE_CHECKING:
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

PLANNER_RESULTS = "planner"


class Controller:
    """Runs one planner over a prompt source. Invariant: with every part off, the planner changes and logs nothing."""

    def __init__(
        self,
        settings: PlannerSettings,
        seed: int,
        fractions: tuple[float, float],
        source: PromptSource,
        metrics: MetricsLogger,
    ) -> None:
        """Make a planner.

        Args:
            settings: of the planner.
            seed: of its random stream.
            fractions: initial fractions of revisits and of reuse.
            source: of fresh prompts and probes.
            metrics: the logger for the planner's metrics; it also holds the learner's.
        """
        self.settings = settings
        self.planner = Planner(settings, seed, fractions)
        self._source, self._metrics = source, metrics

    def begin(self, now: int, num_heldout: int, play: Callable[[Sequence[Prompt]], Sequence[GroupMeta]]) -> Plan:
        """Play the probes that are due and return the plan of an iteration.

        Args:
            now: the training iteration.
            num_heldout: number of held-out prompts of evaluation; probes use other ones.
            play: plays prompts greedily, once each, and returns their groups.
        """
        if not self.settings.is_on:
            return Plan()
        mixture = self._source.domain_weights()
        self._probe(self.planner.due_probes(now, mixture), now, num_heldout, play)
        return self.planner.plan(now, mixture)

    def end(
        self,
        plan: Plan,
        groups: Sequence[GroupMeta],
        advantages: Sequence[np.ndarray],
        has_reused: bool,
        is_updated: bool,
        pass_reward: float,
        now: int,
    ) -> list[str]:
        """Record the iteration's results and the learner's metrics, and advance the stream.

        Args:
            plan: the plan that `begin` returned.
            groups: the played groups.
            advantages: of the episodes of each.
            has_reused: whether stored groups were trained on as well.
            is_updated: whether the learner changed its weights.
            pass_reward: the lowest reward of a pass, unless the environment defines its own.
            now: the training iteration.

        Returns:
            The domains of a stream that ended with this iteration.
        """
        if self.settings.is_on:
            self.planner.observe(results_of(groups, pass_reward, advantages), now)
            ess = self._learned("reuse/ess") if is_updated and has_reused else math.nan
            signal = self._learned(self.settings.plasticity_signal) if is_updated else math.nan
            self.planner.adapt(now, ess, signal)
            self._log(plan, groups)
        return list(self._source.advance(int(sum(group.num_loss_tokens_G.sum() for group in groups))))

    def get_state(self) -> dict[str, Any]:
        """Return the planner's state, for a checkpoint."""
        return self.planner.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`."""
        self.planner.set_state(state)

    def _probe(
        self,
        domains: Sequence[str],
        now: int,
        num_heldout: int,
        play: Callable[[Sequence[Prompt]], Sequence[GroupMeta]],
    ) -> None:
        num = self.settings.probe_prompts
        prompts = [prompt for domain in domains for prompt in self._source.probes(domain, num, num_heldout)]
        played = play(prompts) if prompts else []
        for domain in domains:
            is_right = [group.is_right_G()[0] for group in played if group.prompt.domain == domain]  # as in evaluation
            if is_right:  # empty if infrastructure ended all episodes: the probe stays due
                self.planner.probed(domain, float(np.mean(is_right)), now)
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in played))
        for name, number in {"num_probe_prompts": len(prompts), "num_probe_tokens": num_tokens}.items():
            self._metrics.log_value((PLANNER_RESULTS, name), number, reduce="lifetime_sum")

    def _learned(self, name: str | None) -> float:
        """Return a metric of this update; nan if `name` is None.

        Raises:
            ValueError: the learner does not report this metric.
        """
        if name is None:
            return math.nan
        name, known = current_metric(name), self._metrics.peek((LEARNER_RESULTS, DEFAULT_MODULE_ID))
        if name not in known:
            listed = ", ".join(sorted(map(str, known)))
            raise ValueError(f"planner_plasticity_signal = {name!r}; expected a metric of the learner: {listed}")
        return float(known[name])

    def _log(self, plan: Plan, groups: Sequence[GroupMeta]) -> None:
        played = [group.prompt.domain for group in groups]
        values = self.planner.gauges()
        values |= {f"share_realised/{name}": played.count(name) / len(played) for name in set(played)}
        values |= {f"share_intended/{name}": share for name, share in (plan.fresh or {}).items()}
        for name, value in values.items():
            self._metrics.log_value((PLANNER_RESULTS, *name.split("/", 1)), value, reduce="mean", window=1)


def results_of(
    groups: Sequence[GroupMeta], pass_reward: float, advantages: Sequence[np.ndarray]
) -> dict[str, list[Result]]:
    """Return the results of the groups of each domain; `is_success_G` decides which episodes pass."""
    results: dict[str, list[Result]] = {}
    for group, advantage_G in zip(groups, advantages, strict=True):
        passed = float(np.mean(group.is_success_G(pass_reward)))
        result = Result(passed, float(np.mean(group.rewards_G)), float(np.mean(np.abs(advantage_G))))
        results.setdefault(group.prompt.domain, []).append(result)
    return results


def weighted(compared: AdvantageBatch, weights: Mapping[str, float]) -> AdvantageBatch:
    """Return the batch with advantages multiplied by the weight of their domain (1 where it is missing)."""
    if not weights:
        return compared
    factors = [weights.get(group.prompt.domain, 1.0) for group in compared.groups]
    return replace(compared, advantages=[f * a for f, a in zip(factors, compared.advantages, strict=True)])
