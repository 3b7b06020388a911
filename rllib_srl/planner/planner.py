"""The planner: what it knows of each domain, and the plan it makes of it for the next iteration.

    planner.due_probes(now, mixture)     domains whose recall is asked for now     planner.probed(domain, recall, ...)
    planner.plan(now, mixture) -> Plan   shares, fractions, weights of losses
    planner.observe(results, now)        what each domain's groups earned
    planner.adapt(now, ess, signal)      the fraction follows forgetting

All of it is arithmetic on plain numbers; playing, drawing and learning is the algorithm's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rllib_srl.planner.fraction import Plasticity, adapted
from rllib_srl.planner.probes import Probe
from rllib_srl.planner.recap import recap_weights
from rllib_srl.planner.settings import PlannerSettings
from rllib_srl.planner.shares import DomainShares, averaged, bands, floored_softmax, staleness, uncertainty


@dataclass(frozen=True)
class Result:
    """What one group earned: the share of its episodes that passed, and its mean reward. Invariant: both in [0, 1]."""

    pass_rate: float
    reward: float


@dataclass(frozen=True)
class Plan:
    """What an iteration does. Invariant: None leaves the choice to whoever makes it without a planner."""

    fresh: Mapping[str, float] | None = None  # domain -> share of fresh prompts
    stored: DomainShares | None = None  # of revisits and of reuse
    revisit_fraction: float | None = None
    reuse_fraction: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # domain -> factor of its loss; 1 where it is missing


@dataclass
class Domain:
    """What is known of one domain. Invariant: `acc` and what probes found lie in [0, 1]."""

    acc: float
    last_seen: int
    variance: float = 1.0  # sum of squared weights of what `acc` averages
    num_groups: int = 0
    best: float | None = None  # of what forgetting is measured by: probes where there are any, else `acc`
    recall: float | None = None  # of the last probe
    due: int | None = None
    gap: float = 1.0
    losses: list[float] = field(default_factory=list)

    @property
    def lost(self) -> float:
        """Return the best that was known less what is known now, 0 where nothing was."""
        known = self.acc if self.recall is None else self.recall
        return 0.0 if self.best is None else max(0.0, self.best - known)


class Planner:
    """Plans iterations. Invariant: equal states and calls give equal plans, in any process."""

    def __init__(self, settings: PlannerSettings, seed: int, fractions: tuple[float, float] = (0.0, 0.0)) -> None:
        """Start knowing nothing.

        Args:
            settings: of the planner.
            seed: of the run.
            fractions: of revisits and of reuse, where adaptation starts, within its bounds.
        """
        self.settings = settings
        self.domains: dict[str, Domain] = {}
        self._generator = np.random.default_rng(np.random.SeedSequence([seed, sum(b"planner")]))
        start = dict(zip(("revisit", "reuse"), fractions, strict=True))
        self.fractions = {name: start[name] for name in settings.adapted}
        self._plasticity = Plasticity(settings.plasticity_every, settings.plasticity_tolerance)

    # --- before an iteration --------------------------------------------------------------------

    def due_probes(self, now: int, mixture: Mapping[str, float]) -> list[str]:
        """Return the domains whose recall is to be measured before iteration `now`.

        Args:
            now: the training iteration.
            mixture: domain -> share of fresh prompts, those that are not drawn now with 0.
        """
        self._meet(now, mixture)
        return [
            name
            for name, domain in self.domains.items()
            if (self.settings.probe_first and domain.recall is None) or (domain.due is not None and domain.due <= now)
        ]

    def probed(self, name: str, recall: float, now: int) -> None:
        """Take what a probe found, the share of right answers."""
        domain, settings = self.domains[name], self.settings
        if settings.probe_first and domain.recall is None:
            domain.acc = recall
        domain.recall = recall
        domain.best = recall if domain.best is None else max(domain.best, recall)
        if domain.due is not None and domain.due <= now:
            after = Probe(domain.due, domain.gap).after(
                recall, now, settings.probe_every, settings.probe_mastery, settings.probe_growth
            )
            domain.due, domain.gap = after.due, after.gap

    def plan(self, now: int, mixture: Mapping[str, float]) -> Plan:
        """Return the plan of iteration `now`; see `due_probes` for the arguments."""
        self._meet(now, mixture)
        settings = self.settings
        if settings.mode == "off":
            return Plan(None, None, *self._fractions(), self.weights())
        active = [name for name, weight in mixture.items() if weight > 0]
        fresh = self.shares(active, now, [mixture[name] for name in active])
        known = list(self.domains)
        stored = self.shares(known, now, None)
        only = None
        if settings.single_every and now % settings.single_every == 0:
            only = active[int(self._generator.choice(len(active), p=fresh))]
            fresh, stored = [float(name == only) for name in active], [float(name == only) for name in known]
        band_K = bands(np.array([self.domains[name].acc for name in known]), settings.band_bounds).tolist()
        item_bands = None if settings.item_bands is None else tuple(settings.item_bands)
        low, high = settings.band_bounds
        divided = DomainShares(
            dict(zip(known, stored, strict=True)), dict(zip(known, band_K, strict=True)), item_bands, (low, high), only
        )
        return Plan(dict(zip(active, fresh, strict=True)), divided, *self._fractions(), self.weights())

    def shares(self, names: Sequence[str], now: int, weights: Sequence[float] | None) -> list[float]:
        """Return the shares of domains, by the rule of `mode`.

        Args:
            names: of domains that were met.
            now: the training iteration.
            weights: base weight of each, > 0; None: none, as for what comes from the memory.
        """
        settings, rows = self.settings, [self.domains[name] for name in names]
        acc_K = np.array([row.acc for row in rows])
        base_K = np.zeros(len(rows)) if weights is None else np.asarray(weights, float)
        if settings.mode == "softmax":
            log_K = np.zeros(len(rows)) if weights is None else np.log(base_K)
            is_forgotten = weights is None and settings.rehearse == "forgotten"
            need_K = np.array([row.lost for row in rows]) if is_forgotten else 1 - acc_K
            score_K = settings.sharpness * need_K + log_K
        else:
            since_K = np.array([now - row.last_seen for row in rows])
            score_K = (
                np.asarray(settings.band_weights, float)[bands(acc_K, settings.band_bounds)]
                + settings.staleness_coeff * staleness(since_K, settings.staleness_horizon)
                + settings.uncertainty_coeff * uncertainty(np.array([row.variance for row in rows]))
                + base_K
            ) / settings.temperature
        return floored_softmax(score_K, settings.least_share).tolist()

    def weights(self) -> dict[str, float]:
        """Return domain -> factor of its loss; {} where the objective is uniform."""
        settings = self.settings
        if settings.objective != "recap":
            return {}
        losses = {name: domain.losses for name, domain in self.domains.items()}
        return recap_weights(losses, settings.recap_window, settings.recap_temperature, settings.recap_mix)

    # --- after an iteration ---------------------------------------------------------------------

    def observe(self, results: Mapping[str, Sequence[Result]], now: int) -> None:
        """Take what the played groups of each domain earned in iteration `now`."""
        self._meet(now, dict.fromkeys(results, 1.0))
        for name, groups in results.items():
            domain, rate = self.domains[name], self.settings.ema_rate
            for result in groups:
                domain.acc, domain.variance = averaged(domain.acc, domain.variance, result.pass_rate, rate)
            domain.num_groups += len(groups)
            domain.last_seen = now
            loss = 1.0 - float(np.mean([result.reward for result in groups]))
            domain.losses = [*domain.losses, loss][-2 * self.settings.recap_window :]
            # An average that still holds much of its start says nothing of what was once known.
            if domain.recall is None and domain.num_groups * rate >= 1:
                domain.best = domain.acc if domain.best is None else max(domain.best, domain.acc)

    def adapt(self, now: int, ess: float = math.nan, signal: float = math.nan) -> None:
        """Move the fractions by forgetting, once the learner of iteration `now` has been heard.

        Args:
            now: the training iteration.
            ess: effective sample size of the reused tokens, a share; nan where nothing was reused.
            signal: the learner's metric `plasticity_signal`; nan where it was not reported.
        """
        settings = self.settings
        is_settled = settings.plasticity_signal is None or self._plasticity.look(signal, now)
        for name, fraction in self.fractions.items():
            self.fractions[name] = adapted(
                fraction,
                self.forgetting(),
                settings.forgetting_threshold,
                settings.adapt_rate,
                settings.fraction_bounds,
                is_settled,
                is_stale=name == "reuse" and ess < settings.min_ess,
            )

    def forgetting(self) -> float:
        """Return the mean over domains of the best that was known less what is known now, 0 where nothing was."""
        lost = [domain.lost for domain in self.domains.values() if domain.best is not None]
        return float(np.mean(lost)) if lost else 0.0

    def gauges(self) -> dict[str, float]:
        """Return what is known, by name of a metric."""
        values: dict[str, float] = {"forgetting": self.forgetting()}
        values |= {f"{name}_fraction": fraction for name, fraction in self.fractions.items()}
        for name, domain in self.domains.items():
            values |= {f"acc_ema/{name}": domain.acc, f"last_seen/{name}": domain.last_seen}
            if domain.recall is not None:
                values[f"recall/{name}"] = domain.recall
        return values | {f"loss_weight/{name}": weight for name, weight in self.weights().items()}

    # --- checkpoints ----------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return everything the next plans depend on, as JSON types."""
        return {
            "domains": {name: asdict(domain) for name, domain in self.domains.items()},
            "fractions": dict(self.fractions),
            "plasticity": self._plasticity.get_state(),
            "generator": self._generator.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called; fractions that are adapted now but were not then start afresh."""
        self.domains = {name: Domain(**values) for name, values in state["domains"].items()}
        self.fractions |= {name: state["fractions"][name] for name in self.fractions if name in state["fractions"]}
        self._plasticity.set_state(state["plasticity"])
        self._generator.bit_generator.state = state["generator"]

    def _meet(self, now: int, mixture: Mapping[str, float]) -> None:
        settings = self.settings
        for name, weight in mixture.items():
            if weight > 0 and name not in self.domains:
                domain = self.domains[name] = Domain(acc=settings.acc_init, last_seen=now)
                if settings.probe_every:
                    first = Probe.first(now, settings.probe_every)
                    domain.due, domain.gap = first.due, first.gap

    def _fractions(self) -> tuple[float | None, float | None]:
        return self.fractions.get("revisit"), self.fractions.get("reuse")
