"""The planner: keeps statistics of each domain and computes the plan of the next iteration from them.

    planner.due_probes(now, mixture)     domains to probe now; the results go to planner.probed(domain, recall, now)
    planner.plan(now, mixture) -> Plan   shares, fractions, loss weights
    planner.observe(results, now)        update the statistics with the results of the played groups
    planner.adapt(now, ess, signal)      update the replay fractions from forgetting

The planner only does arithmetic on plain numbers; the algorithm plays, draws and learns.

Replay fraction (`adapted`, `Plasticity`): it follows forgetting within bounds, and stays at the lower bound until the
learner's plasticity signal has settled.

    forgetting > threshold   up by rate (high - low)        not before the signal has settled
    else                     down by the same step
    effective sample size of reused tokens < floor          down, whatever the forgetting

1. The step is a share of the range, not of the value, so that a fraction of 0 can rise again.
2. The second source switches the ratio of gradient steps in pixel control, by the share of active units of the
   critic; here the signal is any metric of the learner, and it releases replay.

Sources: experience replay for continual learning (threshold 0.1, rate 0.1, bounds); Ma et al. 2024 (Adaptive Replay
Ratio), arXiv 2310.07418.

Probe schedule (`Probe`): the gap between the probes of a domain grows while it is mastered, and returns to the first
gap when it is not.

    probed at `due`;  mastered: gap x growth, due += round(gap);  not: gap = first, due += first
    first 1, growth 1.5, always mastered:  1 3 5 8 13       (1.5, 2.25, 3.375, 5.06 rounded to even)

A probe plays held-out prompts greedily and only updates the statistics: it advances no generator of training, grades
no item, and its tokens are counted separately. The published gain of this schedule came from replay in both arms;
here the schedule is a measurement, and only the use of its results changes training.

Source: task-focused consolidation with spaced recall (TFC-SR) 2025, arXiv 2507.21109.

Loss weights by progress (`recap_weights`): domains with slow or unstable progress get larger weights.

    loss of a domain, one value per iteration in which it was played: 1 - mean reward
    c = mean of the newer half / mean of the older half        convergence: 1 is a flat loss, above 1 a rising one
    i = std of all / (sum of the two means)                    instability
    weight = K softmax((mix c + (1 - mix) i) / T)              the sum is K; 1 until 2W values are known

1. The weight multiplies advantages after normalisation: applied before, a group's own normalisation cancels it.
2. The formula is the published one, softmax of the mixed score; the released code mixes two softmaxes.
3. At the published T = 5 weights stay within about 0.93 to 1.2.

Source: Dynamic objective reweighting (RECAP) 2025, arXiv 2510.21978; github.com/VietHoang1512/recap.

Shares by a bandit over domains (`mode = "sec"`): fresh prompts go where advantages are large.

    r = mean |advantage| of the domain's played episodes in an iteration
    Q' = Q + rate (r - Q)                              TD(0), Q = 0 at first
    share = floor + (1 - K floor) softmax(Q / temperature + log weight)

1. The source draws the domain of each prompt; here the shares are exact in the long run.
2. The weight is that of the mixture; equal weights, the default, are the source's.
3. Revisits count in r as well. They are drawn by the memory's own rule, except in a finite pool without a revisit
   fraction, where the shares divide the whole batch.

Source: Self-evolving curriculum (SEC), Chen et al. 2025, arXiv 2505.14970.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rllib_srl.curriculum.settings import PlannerSettings
from rllib_srl.replay.selection.shares import DomainShares, averaged, bands, floored_softmax, staleness, uncertainty


def adapted(
    fraction: float,
    forgetting: float,
    threshold: float,
    rate: float,
    bounds: Sequence[float],
    is_settled: bool = True,
    is_stale: bool = False,
) -> float:
    """Return the replay fraction of the next iteration, within `bounds`.

    Args:
        fraction: the fraction of this iteration.
        forgetting: mean over domains, in [0, 1].
        threshold: forgetting above it raises the fraction.
        rate: step, as a share of the range.
        bounds: lowest and highest fraction.
        is_settled: False holds the fraction at the lower bound.
        is_stale: True if the effective sample size is too low: the fraction falls.
    """
    low, high = bounds
    if not is_settled:
        return low
    step = rate * (high - low)
    return min(high, max(low, fraction + (step if forgetting > threshold and not is_stale else -step)))


@dataclass
class Plasticity:
    """Checks every n iterations whether a signal has settled. Invariant: once settled it stays settled."""

    every: int
    tolerance: float
    last: float | None = None
    is_settled: bool = False

    def look(self, value: float, now: int) -> bool:
        """Update with the signal of iteration `now`; return whether it has settled: |change| <= tolerance.

        The first check only stores the value.
        """
        if not self.is_settled and now % self.every == 0 and math.isfinite(value):
            self.is_settled = self.last is not None and abs(value - self.last) <= self.tolerance
            self.last = value
        return self.is_settled

    def get_state(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        return {"last": self.last, "is_settled": self.is_settled}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`."""
        self.last, self.is_settled = state["last"], state["is_settled"]


@dataclass(frozen=True)
class Probe:
    """The probe schedule of one domain. Invariant: `due` is later than every probe so far."""

    due: int
    gap: float

    @classmethod
    def first(cls, now: int, gap: int) -> Probe:
        """Return the schedule of a domain first seen in iteration `now`: due `gap - 1` iterations later."""
        return cls(now + gap - 1, float(gap))

    def after(self, recall: float, now: int, first_gap: int, mastery: float, growth: float) -> Probe:
        """Return the schedule after a probe.

        Args:
            recall: share of right answers, in [0, 1].
            now: iteration of the probe.
            first_gap: gap after a recall below `mastery`, in iterations.
            mastery: lowest recall with which the gap grows.
            growth: factor of the gap.
        """
        if recall < mastery:
            return Probe(now + first_gap, float(first_gap))
        gap = self.gap * growth
        return Probe(now + max(1, round(gap)), gap)


LEAST_MEAN = 1e-6  # added to means, so that two losses near 0 count as equal


def convergence(loss_N: Sequence[float]) -> float:
    """Return mean(newer half) / mean(older half); 1 if both are nearly 0."""
    half = len(loss_N) // 2
    old, new = float(np.mean(loss_N[:half])), float(np.mean(loss_N[half:]))
    return (new + LEAST_MEAN) / (old + LEAST_MEAN)


def instability(loss_N: Sequence[float]) -> float:
    """Return std(all) / (sum of the means of the two halves); 0 if all losses are nearly 0."""
    half = len(loss_N) // 2
    return float(np.std(loss_N) / (np.mean(loss_N[:half]) + np.mean(loss_N[half:]) + LEAST_MEAN))


def recap_weights(
    losses: Mapping[str, Sequence[float]], window: int, temperature: float, mix: float
) -> dict[str, float]:
    """Return domain -> weight; 1 for a domain with fewer than 2 `window` losses, the sum is the number of domains.

    Args:
        losses: of each domain, oldest first, >= 0; only the last 2 `window` are used.
        window: W, number of losses in each half.
        temperature: of the softmax, > 0.
        mix: weight of convergence in the score, in [0, 1]; 1 ignores instability.
    """
    known = {domain: list(loss_N)[-2 * window :] for domain, loss_N in losses.items() if len(loss_N) >= 2 * window}
    weights = dict.fromkeys(losses, 1.0)
    if not known:
        return weights
    score_K = np.array([mix * convergence(loss_N) + (1 - mix) * instability(loss_N) for loss_N in known.values()])
    return weights | dict(zip(known, scaled_softmax(score_K, temperature).tolist(), strict=True))


def scaled_softmax(score_K: np.ndarray, temperature: float) -> np.ndarray:
    """Return K softmax(score / temperature): weights whose mean is 1."""
    weight_K = np.exp((score_K - score_K.max()) / temperature)
    scaled_K: np.ndarray = len(score_K) * weight_K / weight_K.sum()
    return scaled_K


@dataclass(frozen=True)
class Result:
    """The result of one group. Invariant: `pass_rate` and `reward` are in [0, 1]."""

    pass_rate: float
    reward: float  # mean
    abs_advantage: float = 0.0  # mean over its episodes


@dataclass(frozen=True)
class Plan:
    """The plan of one iteration. Invariant: None means the default without a planner."""

    fresh: Mapping[str, float] | None = None  # domain -> share of fresh prompts
    stored: DomainShares | None = None  # of revisits and of reuse
    revisit_fraction: float | None = None
    reuse_fraction: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # domain -> factor of its loss; 1 where it is missing


@dataclass
class Domain:
    """Statistics of one domain. Invariant: `acc`, `recall` and `best` are in [0, 1]."""

    acc: float
    last_seen: int
    variance: float = 1.0  # sum of squared weights of the average `acc`
    num_groups: int = 0
    best: float | None = None  # reference for forgetting: best recall of the probes if there are any, else best `acc`
    recall: float | None = None  # of the last probe
    due: int | None = None
    gap: float = 1.0
    losses: list[float] = field(default_factory=list)
    value: float = 0.0  # Q of the bandit, `mode = "sec"`

    @property
    def lost(self) -> float:
        """Forgetting of the domain: `best` - (last recall, else `acc`), at least 0; 0 without a `best`."""
        known = self.acc if self.recall is None else self.recall
        return 0.0 if self.best is None else max(0.0, self.best - known)


class Planner:
    """Plans iterations. Invariant: equal states and calls give equal plans, in any process."""

    def __init__(self, settings: PlannerSettings, seed: int, fractions: tuple[float, float] = (0.0, 0.0)) -> None:
        """Create a planner without statistics.

        Args:
            settings: of the planner.
            seed: of the run.
            fractions: initial fractions of revisits and of reuse for the adaptation, within its bounds.
        """
        self.settings = settings
        self.domains: dict[str, Domain] = {}
        self._generator = np.random.default_rng(np.random.SeedSequence([seed, sum(b"planner")]))
        start = dict(zip(("revisit", "reuse"), fractions, strict=True))
        self.fractions = {name: start[name] for name in settings.adapted}
        self._plasticity = Plasticity(settings.plasticity_every, settings.plasticity_tolerance)

    # --- before an iteration --------------------------------------------------------------------

    def due_probes(self, now: int, mixture: Mapping[str, float]) -> list[str]:
        """Return the domains to probe before iteration `now`.

        Args:
            now: the training iteration.
            mixture: domain -> share of fresh prompts; 0 for domains that are not drawn now.
        """
        self._meet(now, mixture)
        return [
            name
            for name, domain in self.domains.items()
            if (self.settings.probe_first and domain.recall is None) or (domain.due is not None and domain.due <= now)
        ]

    def probed(self, name: str, recall: float, now: int) -> None:
        """Update domain `name` with the recall of a probe, the share of right answers in [0, 1]."""
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
        if settings.mode == "sec":
            return Plan(dict(zip(active, fresh, strict=True)), None, *self._fractions(), self.weights())
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
            names: of known domains.
            now: the training iteration.
            weights: base weight of each, > 0; None for stored groups, which have no base weights.
        """
        settings, rows = self.settings, [self.domains[name] for name in names]
        acc_K = np.array([row.acc for row in rows])
        base_K = np.zeros(len(rows)) if weights is None else np.asarray(weights, float)
        if settings.mode == "softmax":
            log_K = np.zeros(len(rows)) if weights is None else np.log(base_K)
            is_forgotten = weights is None and settings.rehearse == "forgotten"
            need_K = np.array([row.lost for row in rows]) if is_forgotten else 1 - acc_K
            score_K = settings.sharpness * need_K + log_K
        elif settings.mode == "sec":
            value_K = np.array([row.value for row in rows])
            score_K = value_K / settings.temperature + (0.0 if weights is None else np.log(base_K))
        else:
            since_K = np.array([now - row.last_seen for row in rows])
            score_K = (
                np.asarray(settings.band_weights, float)[bands(acc_K, settings.band_bounds)]
                + settings.staleness_coeff * staleness(since_K, settings.staleness_horizon)
                + settings.uncertainty_coeff * uncertainty(np.array([row.variance for row in rows]))
                + base_K
            ) / settings.temperature
        shares: list[float] = floored_softmax(score_K, settings.least_share).tolist()
        return shares

    def weights(self) -> dict[str, float]:
        """Return domain -> factor of its loss; {} if the objective is uniform."""
        settings = self.settings
        if settings.objective != "recap":
            return {}
        losses = {name: domain.losses for name, domain in self.domains.items()}
        return recap_weights(losses, settings.recap_window, settings.recap_temperature, settings.recap_mix)

    # --- after an iteration ---------------------------------------------------------------------

    def observe(self, results: Mapping[str, Sequence[Result]], now: int) -> None:
        """Update the statistics with the results of the groups played in iteration `now`, by domain."""
        self._meet(now, dict.fromkeys(results, 1.0))
        for name, groups in results.items():
            domain, rate, value_rate = self.domains[name], self.settings.ema_rate, self.settings.sec_rate
            for result in groups:
                domain.acc, domain.variance = averaged(domain.acc, domain.variance, result.pass_rate, rate)
            reward = float(np.mean([result.abs_advantage for result in groups]))
            domain.value += value_rate * (reward - domain.value)
            domain.num_groups += len(groups)
            domain.last_seen = now
            loss = 1.0 - float(np.mean([result.reward for result in groups]))
            domain.losses = [*domain.losses, loss][-2 * self.settings.recap_window :]
            # Until the average has moved away from its initial value it is no measure of the best accuracy.
            if domain.recall is None and domain.num_groups * rate >= 1:
                domain.best = domain.acc if domain.best is None else max(domain.best, domain.acc)

    def adapt(self, now: int, ess: float = math.nan, signal: float = math.nan) -> None:
        """Adapt the fractions to forgetting, after the update of iteration `now`.

        Args:
            now: the training iteration.
            ess: effective sample size of the reused tokens, as a share; nan without reuse.
            signal: the learner's metric `plasticity_signal`; nan if it was not reported.
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
        """Return the mean of `Domain.lost` over the domains with a `best`; 0 if there are none."""
        lost = [domain.lost for domain in self.domains.values() if domain.best is not None]
        return float(np.mean(lost)) if lost else 0.0

    def gauges(self) -> dict[str, float]:
        """Return the statistics as metrics, by name."""
        values: dict[str, float] = {"forgetting": self.forgetting()}
        values |= {f"{name}_fraction": fraction for name, fraction in self.fractions.items()}
        for name, domain in self.domains.items():
            values |= {f"acc_ema/{name}": domain.acc, f"last_seen/{name}": domain.last_seen}
            if domain.recall is not None:
                values[f"recall/{name}"] = domain.recall
            if self.settings.mode == "sec":
                values[f"bandit_value/{name}"] = domain.value
        return values | {f"loss_weight/{name}": weight for name, weight in self.weights().items()}

    # --- checkpoints ----------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON types, for a checkpoint."""
        return {
            "domains": {name: asdict(domain) for name, domain in self.domains.items()},
            "fractions": dict(self.fractions),
            "plasticity": self._plasticity.get_state(),
            "generator": self._generator.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`; fractions that the saved run did not adapt keep their initial value."""
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
