"""The planner at work: it is told what was earned, asked for plans, and its probes are played.

    begin    probes that are due ──> plan ──> the memory's fractions
    end      results by domain, the learner's metrics, progress of the stream ──> hooks

Probes are played greedily under a random stream of their own; training seeds every iteration afresh and the prompt
source hands them out without drawing, so that training samples the same tokens with probes as without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import LEARNER_RESULTS

from rllib_srl.callbacks import hooks
from rllib_srl.comparison import Compared
from rllib_srl.planner import Plan, Planner, PlannerSettings
from rllib_srl.planner.planner import Result
from rllib_srl.types import GroupMeta

if TYPE_CHECKING:
    from rllib_srl.srl import SRL

PLANNER_RESULTS = "planner"
RIGHT = 0.999  # a probe's answer is right from this reward on, as in evaluation


class Planning:
    """Serves one run with a planner. Invariant: with every part of the planner off, it changes and logs nothing."""

    def __init__(self, settings: PlannerSettings, seed: int, fractions: tuple[float, float]) -> None:
        """Plan by `settings`; replay fractions start from `fractions`, of revisits and of reuse."""
        self.settings = settings
        self.planner = Planner(settings, seed, fractions)

    def begin(self, algo: SRL, now: int) -> Plan:
        """Play the probes that are due, and return the plan of an iteration; the memory takes its fractions."""
        if not self.settings.is_on:
            return Plan()
        mixture = algo.source.domain_weights()
        self._probe(algo, self.planner.due_probes(now, mixture), now)
        plan = self.planner.plan(now, mixture)
        algo.memory.set_fractions(plan.revisit_fraction, plan.reuse_fraction)
        return plan

    def end(
        self,
        algo: SRL,
        plan: Plan,
        groups: Sequence[GroupMeta],
        reused: Sequence[GroupMeta],
        now: int,
        is_updated: bool,
    ) -> None:
        """Note what the iteration earned and learned, move the stream on, and call the hooks."""
        if self.settings.is_on:
            self.planner.observe(results_of(groups, algo.config.replay_pass_reward), now)
            ess = self._learned(algo, "reuse/ess") if is_updated and reused else math.nan
            signal = self._learned(algo, self.settings.plasticity_signal) if is_updated else math.nan
            self.planner.adapt(now, ess, signal)
            self._log(algo, plan, groups)
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in groups))
        ended = algo.source.advance(num_tokens)
        shared = {"algorithm": algo, "now": now, "metrics_logger": algo.metrics}
        for callback in hooks(algo):
            callback.post_step(groups=groups, reused=reused, **shared)
            for domain in ended:
                callback.post_domain(domain=domain, **shared)

    def get_state(self) -> dict[str, Any]:
        """Return everything the next plans depend on."""
        return self.planner.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called."""
        self.planner.set_state(state)

    def _probe(self, algo: SRL, domains: Sequence[str], now: int) -> None:
        num, evaluated = self.settings.probe_prompts, algo.config.evaluation_duration
        prompts = [prompt for domain in domains for prompt in algo.source.probes(domain, num, evaluated)]
        greedy = {"group_size": 1, "temperature": 0.0, "as_groups": False, "num_transcripts": 0}
        played = [g for batch in algo.play(prompts, "probe", **greedy) for g in batch.groups] if prompts else []
        for domain in domains:
            rewards = [float(group.rewards_G[0]) for group in played if group.prompt.domain == domain]
            if rewards:  # all lost to infrastructure: asked again in the next iteration
                self.planner.probed(domain, float(np.mean(np.array(rewards) >= RIGHT)), now)
        num_tokens = int(sum(group.num_loss_tokens_G.sum() for group in played))
        for name, number in {"num_probe_prompts": len(prompts), "num_probe_tokens": num_tokens}.items():
            algo.metrics.log_value((PLANNER_RESULTS, name), number, reduce="lifetime_sum")

    @staticmethod
    def _learned(algo: SRL, name: str | None) -> float:
        """Return a metric of this update, nan where none is asked for.

        Raises:
            ValueError: the learner does not report it.
        """
        if name is None:
            return math.nan
        known = algo.metrics.peek((LEARNER_RESULTS, DEFAULT_MODULE_ID))
        if name not in known:
            listed = ", ".join(sorted(map(str, known)))
            raise ValueError(f"planner_plasticity_signal = {name!r}; expected a metric of the learner: {listed}")
        return float(known[name])

    def _log(self, algo: SRL, plan: Plan, groups: Sequence[GroupMeta]) -> None:
        played = [group.prompt.domain for group in groups]
        values = self.planner.gauges()
        values |= {f"share_realised/{name}": played.count(name) / len(played) for name in set(played)}
        values |= {f"share_intended/{name}": share for name, share in (plan.fresh or {}).items()}
        for name, value in values.items():
            algo.metrics.log_value((PLANNER_RESULTS, *name.split("/", 1)), value, reduce="mean", window=1)


def results_of(groups: Sequence[GroupMeta], pass_reward: float) -> dict[str, list[Result]]:
    """Return what the groups of each domain earned; an episode passes from `pass_reward` on."""
    results: dict[str, list[Result]] = {}
    for group in groups:
        passed = float(np.mean(group.rewards_G >= pass_reward))
        results.setdefault(group.prompt.domain, []).append(Result(passed, float(np.mean(group.rewards_G))))
    return results


def weighted(compared: Compared, weights: Mapping[str, float]) -> Compared:
    """Return a batch whose advantages are multiplied by the factor of their domain."""
    if not weights:
        return compared
    factors = [weights.get(group.prompt.domain, 1.0) for group in compared.groups]
    return replace(compared, advantages=[f * a for f, a in zip(factors, compared.advantages, strict=True)])
