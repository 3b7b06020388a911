"""The planner: keeps statistics of each domain and computes the plan of the next iteration from them.

    planner.plan(now, mixture) -> Plan   fractions, loss weights
    planner.observe(results, now)        update the statistics with the results of the played groups
    planner.adapt()                      update the replay fractions from forgetting

The planner only does arithmetic on plain numbers; the algorithm plays, draws and learns. Callbacks may change a plan
before it is carried out (`SRLCallback.change_plan`), such as the shares of domains among fresh prompts.

Replay fraction (`adapted`): it follows forgetting within bounds.

    forgetting > threshold   up by rate (high - low)
    else                     down by the same step

The step is a share of the range, not of the value, so that a fraction of 0 can rise again.
Source: experience replay for continual learning (threshold 0.1, rate 0.1, bounds).

Loss weights by progress (`recap_weights`): domains with slow or unstable progress get larger weights.

    loss of a domain, one value per iteration in which it was played: 1 - mean reward
    c = mean of the newer half / mean of the older half        convergence: 1 is a flat loss, above 1 a rising one
    i = std of all / (sum of the two means)                    instability
    weight = K softmax((mix c + (1 - mix) i) / T)              the sum is K; 1 until 2W values are known

1. The weight multiplies advantages after normalisation: applied before, a group's own normalisation cancels it.
2. The formula is the published one, softmax of the mixed score; the released code mixes two softmaxes.
3. At the published T = 5 weights stay within about 0.93 to 1.2.

Source: Dynamic objective reweighting (RECAP) 2025, arXiv 2510.21978; github.com/VietHoang1512/recap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rllib_srl.curriculum.settings import PlannerSettings

FIRST_ACCURACY = 0.5  # of a domain without results
ADAPT_RATE = 0.1  # step of a fraction per iteration, as a share of its range
EMA_RATE = 0.05  # weight of a group's pass rate in the average accuracy of its domain
RECAP_TEMPERATURE, RECAP_MIX = 5.0, 0.5  # as published
LEAST_MEAN = 1e-6  # added to means, so that two losses near 0 count as equal


def adapted(fraction: float, forgetting: float, threshold: float, rate: float, bounds: Sequence[float]) -> float:
    """Return the replay fraction of the next iteration, within `bounds`.

    Args:
        fraction: the fraction of this iteration.
        forgetting: mean over domains, in [0, 1].
        threshold: forgetting above it raises the fraction.
        rate: step, as a share of the range.
        bounds: lowest and highest fraction.
    """
    low, high = bounds
    step = rate * (high - low)
    return min(high, max(low, fraction + (step if forgetting > threshold else -step)))


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


@dataclass(frozen=True)
class Plan:
    """The plan of one iteration. Invariant: None means the default without a planner."""

    fresh: Mapping[str, float] | None = None  # domain -> share of fresh prompts
    revisit_fraction: float | None = None
    reuse_fraction: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # domain -> factor of its loss; 1 where it is missing
    num_reused: int | None = None  # play nothing, and train on so many stored groups


@dataclass
class Domain:
    """Statistics of one domain. Invariant: `acc`, `recall` and `best` are in [0, 1]."""

    last_seen: int
    acc: float = FIRST_ACCURACY  # moving average of pass rates
    num_groups: int = 0
    best: float | None = None  # reference for forgetting: the best measured recall if there is any, else best `acc`
    recall: float | None = None  # measured last
    losses: list[float] = field(default_factory=list)

    @property
    def lost(self) -> float:
        """Forgetting of the domain: `best` - (last recall, else `acc`), at least 0; 0 without a `best`."""
        known = self.acc if self.recall is None else self.recall
        return 0.0 if self.best is None else max(0.0, self.best - known)


class Planner:
    """Plans iterations. Invariant: equal states and calls give equal plans, in any process."""

    def __init__(self, settings: PlannerSettings, fractions: tuple[float, float] = (0.0, 0.0)) -> None:
        """Create a planner without statistics.

        Args:
            settings: of the planner.
            fractions: initial fractions of revisits and of reuse for the adaptation, within its bounds.
        """
        self.settings = settings
        self.domains: dict[str, Domain] = {}
        start = dict(zip(("revisit", "reuse"), fractions, strict=True))
        self.fractions = {name: start[name] for name in settings.adapted}

    def plan(self, now: int, mixture: Mapping[str, float]) -> Plan:
        """Return the plan of iteration `now`.

        Args:
            now: the training iteration.
            mixture: domain -> share of fresh prompts; 0 for domains that are not drawn now.
        """
        self._meet(now, mixture)
        return Plan(None, self.fractions.get("revisit"), self.fractions.get("reuse"), self.weights())

    def weights(self) -> dict[str, float]:
        """Return domain -> factor of its loss; {} if the objective is uniform."""
        settings = self.settings
        if settings.objective != "recap":
            return {}
        losses = {name: domain.losses for name, domain in self.domains.items()}
        return recap_weights(losses, settings.recap_window, RECAP_TEMPERATURE, RECAP_MIX)

    def observe(self, results: Mapping[str, Sequence[Result]], now: int) -> None:
        """Update the statistics with the results of the groups played in iteration `now`, by domain."""
        self._meet(now, dict.fromkeys(results, 1.0))
        for name, groups in results.items():
            domain, rate = self.domains[name], EMA_RATE
            for result in groups:
                domain.acc = (1 - rate) * domain.acc + rate * result.pass_rate
            domain.num_groups += len(groups)
            domain.last_seen = now
            loss = 1.0 - float(np.mean([result.reward for result in groups]))
            domain.losses = [*domain.losses, loss][-2 * self.settings.recap_window :]
            # Until the average has moved away from its initial value it is no measure of the best accuracy.
            if domain.recall is None and domain.num_groups * rate >= 1:
                domain.best = domain.acc if domain.best is None else max(domain.best, domain.acc)

    def recalled(self, name: str, recall: float) -> None:
        """Use a measured recall of a domain, a share of right answers in [0, 1], in place of its average accuracy."""
        domain = self.domains[name]
        domain.best = recall if domain.best is None or domain.recall is None else max(domain.best, recall)
        domain.recall = recall

    def adapt(self) -> None:
        """Adapt the fractions to forgetting, after an update."""
        settings, forgetting = self.settings, self.forgetting()
        limits = (settings.forgetting_threshold, ADAPT_RATE, settings.fraction_bounds)
        for name, fraction in self.fractions.items():
            self.fractions[name] = adapted(fraction, forgetting, *limits)

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
        return values | {f"loss_weight/{name}": weight for name, weight in self.weights().items()}

    def get_state(self) -> dict[str, Any]:
        """Return the state as JSON types, for a checkpoint."""
        domains = {name: asdict(domain) for name, domain in self.domains.items()}
        return {"domains": domains, "fractions": dict(self.fractions)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`; fractions that the saved run did not adapt keep their initial value."""
        self.domains = {name: Domain(**values) for name, values in state["domains"].items()}
        self.fractions |= {name: state["fractions"][name] for name in self.fractions if name in state["fractions"]}

    def _meet(self, now: int, mixture: Mapping[str, float]) -> None:
        for name, weight in mixture.items():
            if weight > 0 and name not in self.domains:
                self.domains[name] = Domain(last_seen=now)
