"""Selects items to revisit and groups to reuse: named rules, applied within domain quotas.

    Candidates ── quotas ──> each domain's slots ── rule ──> exactly min(num, N) distinct indices

A rule is a function without parameters, or a frozen dataclass whose fields are its parameters:

    def mine(candidates, num, generator) -> indices            SELECTIONS["mine"] = mine

    @dataclass(frozen=True)
    class Mine:                                                SELECTIONS["mine"] = Mine
        floor: float = setting(0.1, "least weight")            replay_selection = {"name": "mine", "floor": 0.2}
        def __call__(self, candidates, num, generator) -> indices: ...

With a method `loss_weights(candidates, indices)` it also weighs the loss of drawn groups, in (0, 1]. An import path or
"contrib.file" names a rule too (rllib_srl/common/rules.py). `srl` is this project's rule, the others are baselines.

Sources: Schaul et al. 2016, arXiv 1511.05952 (priorities); arXiv 2601.02648 (p(1 - p) for problems).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.common.setting_checks import check_within
from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.selection.candidates import Candidates, first, importance_weights, tempered, weighted
from rllib_srl.replay.selection.quotas import quotas

__all__ = ["PER", "SELECTIONS", "SRL", "Candidates", "HighReward", "Rule", "Selected", "loss_weights", "select"]

Rule = Callable[[Candidates, int, np.random.Generator], np.ndarray]
AT_LEAST_0 = (0, math.inf, "a number of at least 0")
ABOVE_0 = (1e-9, math.inf, "a number above 0")
SHARE = (0, 1, "a number in [0, 1]")
PER_EPSILON = 1e-6  # added to a priority, so that candidates of priority 0 can be drawn


@dataclass(frozen=True)
class SRL:
    """Draw new candidates with probability `epsilon_new` a slot, the rest by priority.

    due item   (1 + overdue) (1 + c_l 4 p (1 - p)) (1 + c_d diversity), p the posterior mean of its recall
    group      (signal_floor + 4 variance) (1 + c_d diversity) exp(-age / age_scale) / (1 + uses)

    If too few items are due, early ones fill the slots, lowest retrievability first. No due item starves: above
    temperature 0 each has a positive probability, and at 0 its lateness grows until it is first.
    """

    temperature: float = setting(1.0, "of draws by priority; 0 takes the highest first")
    epsilon_new: float = setting(0.0, "probability that a slot goes to a new candidate, regardless of priority")
    learnability_coeff: float = setting(3.0, "weight c_l of p(1 - p) in the priority of a due item")
    signal_floor: float = setting(0.01, "added to the variance of a group, so that groups without any have weight")
    age_scale: float = setting(16.0, "iterations in which the priority of a group falls by a factor e")

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: naming every parameter out of its range.
        """
        within = {"temperature": AT_LEAST_0, "epsilon_new": SHARE, "learnability_coeff": AT_LEAST_0}
        check_within(self, within | {"signal_floor": ABOVE_0, "age_scale": ABOVE_0})

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        new = np.flatnonzero(candidates.is_new) if self.epsilon_new > 0 else np.empty(0, np.int64)
        num_new = min(int(generator.binomial(num, self.epsilon_new)), len(new)) if len(new) else 0
        if num_new == 0:
            return self._by_priority(candidates, num, generator)
        drawn = generator.choice(new, num_new, replace=False)
        rest = np.setdiff1d(np.arange(len(candidates)), drawn)
        return np.concatenate([drawn, rest[self._by_priority(candidates.take(rest), num - num_new, generator)]])

    def _by_priority(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        log_priority_N = self.log_priority(candidates)
        if candidates.are_groups:
            return tempered(log_priority_N, num, generator, self.temperature)
        due = np.flatnonzero(candidates.overdue >= 0)
        drawn: np.ndarray = due[tempered(log_priority_N[due], min(num, len(due)), generator, self.temperature)]
        if len(drawn) == num:
            return drawn
        early = np.flatnonzero(candidates.overdue < 0)
        filled = early[first(num - len(drawn), generator, candidates.retrievability[early])]
        return np.concatenate([drawn, filled])

    def log_priority(self, candidates: Candidates) -> np.ndarray:
        """Return the logarithm of each candidate's priority."""
        log_diversity_N = np.log1p(candidates.diversity_coeff * candidates.diversity)
        if candidates.are_groups:
            log_signal_N = np.log(self.signal_floor + 4 * candidates.variance)
            of_groups_N: np.ndarray = (
                log_signal_N + log_diversity_N - candidates.age / self.age_scale - np.log1p(candidates.uses)
            )
            return of_groups_N
        recall_N = candidates.posterior_mean
        log_learnability_N = np.log1p(self.learnability_coeff * 4 * recall_N * (1 - recall_N))
        of_items_N: np.ndarray = np.log1p(np.maximum(candidates.overdue, 0.0)) + log_learnability_N + log_diversity_N
        return of_items_N


@dataclass(frozen=True)
class PER:
    """Prioritised replay: draw in proportion to (priority + 1e-6) ** alpha, the mean |advantage| for the TD error.

    Differences from the source: draws are without replacement and not stratified over a sum tree; beta is constant.

    Sources: Schaul et al. 2016, arXiv 1511.05952 section 3.3; with |A|: Wang et al. 2025, arXiv 2504.08837.
    """

    alpha: float = setting(0.6, "exponent of the priority")
    beta: float = setting(0.4, "exponent of the importance weights of reused groups; 0: none")
    by: str = setting("abs_advantage", 'priority: "abs_advantage", or "reward" such as the grade by a rubric')

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            ValueError: naming every parameter out of its range.
        """
        check_within(self, {"alpha": AT_LEAST_0, "beta": SHARE})
        if self.by not in ("abs_advantage", "reward"):
            raise ValueError(f"by = {self.by!r}; expected 'abs_advantage' or 'reward'")

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        return weighted(self._log_weight(candidates), num, generator)

    def loss_weights(self, candidates: Candidates, indices: np.ndarray) -> np.ndarray:
        """Return the importance weights of drawn candidates."""
        return importance_weights(self._log_weight(candidates), indices, self.beta)

    def _log_weight(self, candidates: Candidates) -> np.ndarray:
        priority_N = np.abs(getattr(candidates, self.by))
        log_weight_N: np.ndarray = self.alpha * np.log(priority_N + PER_EPSILON)
        return log_weight_N


@dataclass(frozen=True)
class HighReward:
    """Draw uniformly among the ceil(factor num) candidates of the highest mean reward of the last visit.

    Differences from the source: equal rewards are ordered at random, not by age; the source fills each domain's slots
    apart, here `domain_quotas` does.

    Source: the strategy "high_reward" of AGentCL (GRPO with experience replay on the domains of tau2), its
    `TrajectoryBuffer.sample`.
    """

    factor: float = setting(2.0, "draws among so many times the slots; 1 takes the highest")

    def __post_init__(self) -> None:
        """Check the parameter.

        Raises:
            ValueError: it is out of its range.
        """
        check_within(self, {"factor": (1, math.inf, "a number of at least 1")})

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        """Draw `num` of the candidates."""
        return generator.permutation(first(math.ceil(self.factor * num), generator, -candidates.reward))[:num]


def uniform(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Draw uniformly."""
    return weighted(np.zeros(len(candidates)), num, generator)


def fifo(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Take the longest since the last visit, then the first inserted: a queue whose drawn items move to the end."""
    return first(num, generator, -candidates.elapsed, candidates.seq)


def recent(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Take the last inserted."""
    return first(num, generator, -candidates.seq)


def balanced(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Divide the slots equally among domains, and draw uniformly within each."""
    domains = np.unique(candidates.domain)
    return _in_domains(uniform, candidates, num, generator, dict.fromkeys(domains.tolist(), 1.0), {})[0]


_OWN: dict[str, Any] = {
    "srl": SRL,
    "uniform": uniform,
    "fifo": fifo,
    "recent": recent,
    "high_reward": HighReward,
    "balanced": balanced,
    "per": PER,
}
SELECTIONS: Rules[Any] = Rules("selection", _OWN)  # rules without parameters, and classes of rules

# Rules of prompts to which it matters how long an item is due; with one of your own only a spacing rule says so.
BY_DUE = ("srl", "fifo")
DATELESS = tuple(name for name in _OWN if name != "srl")  # rules that read neither due dates nor predicted recall

Carry = Mapping[int, float]  # fractions of slots of each domain, in [-1, 1], carried to the next draw by rounding


class Selected(NamedTuple):
    """The drawn indices, and the carry for the next call of `select`."""

    indices: np.ndarray
    carry: Carry = field(default_factory=dict)


def select(
    name: str,
    rule: Rule,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    domain_weights: Mapping[int, float] | None = None,
    carry: Carry | None = None,
) -> Selected:
    """Draw exactly min(num, N) distinct candidates, by a rule, within domain quotas.

    Args:
        name: of the rule, for messages.
        rule: as `SELECTIONS.make` returns it.
        candidates: N items or groups.
        num: slots to fill.
        generator: of this draw.
        domain_weights: domain -> weight of its share of the slots; None: no quotas.
        carry: `Selected.carry` of the previous call.

    Raises:
        ValueError: a rule that breaks its contract.
    """
    num = min(num, len(candidates))
    drawn, left = _in_domains(rule, candidates, num, generator, domain_weights, carry or {})
    distinct = np.unique(drawn)
    in_range = len(drawn) == 0 or (distinct[0] >= 0 and distinct[-1] < len(candidates))
    if len(drawn) != num or len(distinct) != num or not in_range:
        raise ValueError(
            f"selection {name!r} returned {len(drawn)} indices, {len(distinct)} of them distinct; "
            f"expected {num} distinct ones below {len(candidates)}"
        )
    return Selected(drawn, left)


def loss_weights(
    rule: Rule, candidates: Candidates, indices: np.ndarray, domain_weights: Mapping[int, float] | None = None
) -> np.ndarray:
    """Return the loss weight of each drawn group, in (0, 1]: 1 for a rule without the method `loss_weights`.

    The weights correct for the rule's preferences within a domain. Domain shares are intended and are not corrected.

    Args:
        rule: as for `select`, as are `candidates` and `domain_weights`.
        indices: drawn by `select`.
    """
    of_rule: Callable[[Candidates, np.ndarray], np.ndarray] | None = getattr(rule, "loss_weights", None)
    if not candidates.are_groups or not len(indices) or of_rule is None:
        return np.ones(len(indices))
    if domain_weights is None:
        return of_rule(candidates, indices)
    weight_N = np.ones(len(indices))
    for domain in np.unique(candidates.domain[indices]):
        inside, is_drawn_N = np.flatnonzero(candidates.domain == domain), candidates.domain[indices] == domain
        weight_N[is_drawn_N] = of_rule(candidates.take(inside), np.searchsorted(inside, indices[is_drawn_N]))
    return weight_N


def _in_domains(
    rule: Rule,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    weights: Mapping[int, float] | None,
    carry: Carry,
) -> tuple[np.ndarray, Carry]:
    """Apply a rule within each domain's slots; return the indices and the domains' carry."""
    if weights is None:
        return np.asarray(rule(candidates, num, generator)), carry
    domains, counts = np.unique(candidates.domain, return_counts=True)
    slots = quotas(num, weights, dict(zip(domains.tolist(), counts.tolist())), generator, carry)
    parts = [np.empty(0, np.int64)]
    for domain, count in slots.num.items():
        if count > 0:
            inside = np.flatnonzero(candidates.domain == domain)
            parts.append(inside[rule(candidates.take(inside), count, generator)])
    return np.concatenate(parts), slots.carry
