"""Rules of the memory as functions of a table of columns: what is drawn, and what is evicted.

    Candidates (N items, or N groups), num, a generator ──rule──> at most min(num, N) distinct indices into the N

A rule is a function, or a class of `Settings` whose fields are its parameters (docs/memory.md has an example):

    def unsolved(candidates, num, generator):                  SELECTIONS["unsolved"] = unsolved
        left = np.flatnonzero(candidates.reward < 0.9)
        return left[uniform(candidates.take(left), num, generator)]

The rules here return all min(num, N); one that returns fewer leaves the slots to fresh prompts.

Sources: Kool et al. 2019, arXiv 1903.06059 section 2.3 (`weighted`: the num largest of log w + Gumbel noise); Schaul et
al. 2016, arXiv 1511.05952 (priorities); arXiv 2601.02648 (p(1 - p) for problems); Jiang, Lupu and
Bachrach 2025, arXiv 2509.04575 section 3 (ExIt's minimum replacement: `least_diverse`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rllib_srl.common.rules import MISTAKES, Rules, failure
from rllib_srl.common.setting_model import Settings, setting

LEARNABILITY = 3.0  # of `SRL`: weight of 4 p (1 - p) in the priority of a due item
SIGNAL_FLOOR = 0.01  # of `SRL`: added to the variance of a group, so that groups without variance have weight
AGE_SCALE = 16.0  # of `SRL`: iterations in which the priority of a group falls by a factor e
PER_EPSILON = 1e-6  # added to a priority, so that candidates of priority 0 can be drawn

COLUMNS: dict[str, Any] = {
    "seq": np.int64,  # order of insertion; the smallest came first
    "domain": np.int64,
    "pass_rate": np.float64,  # fraction of the episodes of the last visit that passed
    "reward": np.float64,  # mean of the last visit, in [0, 1]
    "variance": np.float64,  # population variance of its rewards, in [0, .25]
    "abs_advantage": np.float64,  # mean |advantage| of a group; of an item: deviation of the rewards of its last visit
    "nll": np.float64,  # mean -log-prob of the policy's tokens, nats per token
    "diversity": np.float64,  # in [0, 1]
    "age": np.int64,  # iterations since a group was played; of an item: since it was created
    "elapsed": np.int64,  # iterations since the last visit; of a group: since it was played
    "overdue": np.float64,  # (now - due) / interval; below 0: not due yet
    "retrievability": np.float64,  # predicted recall, in [0, 1]
    "uses": np.int64,  # number of reuses of a group
    "visits": np.int64,  # number of visits of the item
    "posterior_mean": np.float64,  # posterior mean of recall, in [0, 1]
    "num_zero_variance": np.int64,  # groups of equal rewards in a row, at most 8
    "history_sum": np.float64,  # discounted sum of the rewards of all visits ...
    "history_count": np.float64,  # ... and their discounted number
}
_HALF = ("pass_rate", "reward", "retrievability", "posterior_mean")  # .5 where they are not known; all others 0


class Candidates:
    """The items (revisit, eviction) or groups (reuse) among which a rule chooses; each of `COLUMNS` is an attribute.

    Invariant: every column has N entries.
    """

    def __init__(self, num: int, are_groups: bool = False, diversity_coeff: float = 0.0, **columns: Any) -> None:
        """Build `num` candidates; `seq` defaults to 0, 1, 2, ..."""
        self.num, self.are_groups = num, are_groups
        self.diversity_coeff = diversity_coeff  # strength of diversity in draws, a setting of the memory
        self.columns: dict[str, np.ndarray] = {"seq": np.arange(num)}
        self.columns |= {name: np.asarray(values, COLUMNS[name]) for name, values in columns.items()}

    def __getattr__(self, name: str) -> np.ndarray:
        if name not in COLUMNS:
            raise AttributeError(f"candidates have no column {name!r}; expected one of {[*COLUMNS]}")
        if name not in self.columns:
            self.columns[name] = np.full(self.num, 0.5 if name in _HALF else 0, COLUMNS[name])
        return self.columns[name]

    def take(self, indices: np.ndarray) -> Candidates:
        columns = {name: column[indices] for name, column in self.columns.items()}
        return Candidates(len(indices), self.are_groups, self.diversity_coeff, **columns)

    def __len__(self) -> int:
        return self.num


Rule = Callable[[Candidates, int, np.random.Generator], np.ndarray]

# --- draws that rules are made of -----------------------------------------------------------------


def first(num: int, generator: np.random.Generator, *columns_N: np.ndarray) -> np.ndarray:
    """Return the indices of the `num` smallest by the first column, then the second, ...; ties in random order."""
    tie_N = generator.random(len(columns_N[0]))
    first_K: np.ndarray = np.lexsort((tie_N, *columns_N[::-1]))[:num]
    return first_K


def weighted(log_weight_N: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Draw `num` without replacement, each in proportion to the remaining weights (Plackett-Luce).

    Candidates of weight 0 (log -inf) come last, in random order.
    """
    if np.isnan(log_weight_N).any() or np.isposinf(log_weight_N).any():
        raise ValueError(f"log weights = {log_weight_N}; expected finite numbers or -inf")
    key_N = log_weight_N + generator.gumbel(size=len(log_weight_N))
    possible = np.flatnonzero(key_N > -np.inf)
    ranked = possible[np.argsort(-key_N[possible])[:num]]
    if len(ranked) == num:
        return ranked
    return np.concatenate([ranked, generator.permutation(np.flatnonzero(key_N == -np.inf))[: num - len(ranked)]])


def tempered(log_priority_N: np.ndarray, num: int, generator: np.random.Generator, temperature: float) -> np.ndarray:
    """Draw in proportion to priority ** (1 / temperature); at 0 take the highest first, ties in random order."""
    if temperature == 0:
        return first(num, generator, -log_priority_N)
    return weighted(log_priority_N / temperature, num, generator)


def in_turns(domain_N: np.ndarray, item_N: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return all indices in an order in which every item comes once before any comes twice, and domains take turns.

    Domains, items of a domain and indices of an item are in random order. An item is of one domain.
    """
    item_N, place_N = (_renamed(values_N, generator) for values_N in (item_N, domain_N))
    order_N: np.ndarray = np.lexsort((generator.random(len(item_N)), item_N))
    place_N, round_N = place_N[order_N], occurrences(item_N[order_N])
    turn_N = occurrences(place_N * (len(order_N) + 1) + round_N)  # of the domain, in the round
    in_turns_N: np.ndarray = order_N[np.lexsort((place_N, turn_N, round_N))]
    return in_turns_N


def _renamed(values_N: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return the values renamed to 0, 1, ... in random order."""
    values, at_N = np.unique(values_N, return_inverse=True)
    renamed_N: np.ndarray = generator.permutation(len(values))[at_N]
    return renamed_N


def occurrences(values_N: np.ndarray) -> np.ndarray:
    """Return how often each value came before: [5, 5, 3, 5] -> [0, 1, 0, 2]."""
    order_N = np.argsort(values_N, kind="stable")
    found_N = np.empty(len(values_N), np.int64)
    found_N[order_N] = np.arange(len(values_N)) - np.searchsorted(values_N[order_N], values_N[order_N])
    return found_N


# --- rules ----------------------------------------------------------------------------------------


class SRL(Settings):
    """Draw by priority.

    due item   (1 + overdue) (1 + 12 p (1 - p)) (1 + c_d diversity), p the posterior mean of its recall
    group      (.01 + 4 variance) (1 + c_d diversity) exp(-age / 16) / (1 + uses)

    If too few items are due, early ones fill the slots, lowest retrievability first. No due item starves: above
    temperature 0 each has a positive probability, and at 0 its lateness grows until it is first.
    """

    temperature: float = setting(1.0, "of draws by priority; 0 takes the highest first", ge=0)

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        log_priority_N = self.log_priority(candidates)
        if candidates.are_groups:
            return tempered(log_priority_N, num, generator, self.temperature)
        due = np.flatnonzero(candidates.overdue >= 0)
        drawn: np.ndarray = due[tempered(log_priority_N[due], min(num, len(due)), generator, self.temperature)]
        if len(drawn) == num:
            return drawn
        early = np.flatnonzero(candidates.overdue < 0)
        return np.concatenate([drawn, early[first(num - len(drawn), generator, candidates.retrievability[early])]])

    def log_priority(self, candidates: Candidates) -> np.ndarray:
        log_priority_N: np.ndarray
        log_diversity_N = np.log1p(candidates.diversity_coeff * candidates.diversity)
        if candidates.are_groups:
            log_priority_N = np.log(SIGNAL_FLOOR + 4 * candidates.variance) + log_diversity_N
            log_priority_N = log_priority_N - candidates.age / AGE_SCALE - np.log1p(candidates.uses)
        else:
            recall_N = candidates.posterior_mean
            log_learnability_N = np.log1p(LEARNABILITY * 4 * recall_N * (1 - recall_N))
            log_priority_N = np.log1p(np.maximum(candidates.overdue, 0.0)) + log_learnability_N + log_diversity_N
        return log_priority_N


class PER(Settings):
    """Prioritised replay: draw in proportion to (priority + 1e-6) ** alpha, with the mean |advantage| as TD error.

    Differences from the source: draws are without replacement and not stratified over a sum tree; the loss has no
    importance weights.

    Sources: Schaul et al. 2016, arXiv 1511.05952 section 3.3; with |A|: Wang et al. 2025, arXiv 2504.08837.
    """

    alpha: float = setting(0.6, "exponent of the priority", ge=0)
    by: Literal["abs_advantage", "reward"] = setting(
        "abs_advantage", 'priority: "abs_advantage", or "reward" such as the grade by a rubric'
    )

    def __call__(self, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
        return weighted(self.log_weight(candidates), num, generator)

    def log_weight(self, candidates: Candidates) -> np.ndarray:
        log_weight_N: np.ndarray = self.alpha * np.log(np.abs(getattr(candidates, self.by)) + PER_EPSILON)
        return log_weight_N


def high_reward(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Draw uniformly among the 2 num candidates of the highest mean reward of the last visit.

    Source: `TrajectoryBuffer.sample` of AGentCL (GRPO with experience replay on the domains of tau2), which orders
    equal rewards by age and fills each domain's slots apart.
    """
    return generator.permutation(first(2 * num, generator, -candidates.reward))[:num]


def uniform(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    return weighted(np.zeros(len(candidates)), num, generator)


def fifo(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Take the longest since the last visit, then the first inserted: a queue whose drawn items move to the end."""
    return first(num, generator, -candidates.elapsed, candidates.seq)


def recent(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    return first(num, generator, -candidates.seq)


def balanced(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Let domains take turns, and draw uniformly within each."""
    return in_turns(candidates.domain, np.arange(len(candidates)), generator)[:num]


# Functions, and classes of rules with parameters.
SELECTIONS: Rules[Any] = Rules(
    "selection",
    {"srl": SRL, "per": PER} | {f.__name__: f for f in (uniform, fifo, recent, high_reward, balanced)},
)

# Rules that use how long an item has been due; a user's rule is assumed to, if there is a spacing rule.
BY_DUE = ("srl", "fifo")
DATELESS = tuple(name for name in SELECTIONS if name != "srl")  # rules that read neither due dates nor predicted recall

# --- eviction: new items are among the candidates, so a rule may evict them at once ----------------


def first_inserted(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    return first(num, generator, candidates.seq)


def mastered_first(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Evict the highest posterior mean of recall, then the highest retrievability."""
    return first(num, generator, -candidates.posterior_mean, -candidates.retrievability)


def least_diverse(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    return first(num, generator, candidates.diversity)


def largest_domain(candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Evict from the domains with the most items, the first inserted first: domains share the memory equally."""
    newest, num_newer_N = np.argsort(-candidates.seq), np.empty(len(candidates), np.int64)  # of the same domain
    num_newer_N[newest] = occurrences(candidates.domain[newest])
    return first(num, generator, -num_newer_N)


EVICTIONS: Rules[Any] = Rules(
    "eviction", {"fifo": first_inserted} | {f.__name__: f for f in (mastered_first, least_diverse, largest_domain)}
)


def apply(title: str, rule: Rule, candidates: Candidates, num: int, generator: np.random.Generator) -> np.ndarray:
    """Return the indices of at most min(num, N) distinct candidates that a rule draws, or an error with its `title`."""
    if not (count := min(num, len(candidates))):
        return np.empty(0, np.int64)
    try:
        indices = np.asarray(rule(candidates, count, generator))
    except MISTAKES as error:
        raise failure(title, error) from error
    distinct, numbers = np.unique(indices), np.arange(len(candidates))
    if not len(distinct) == len(indices) <= count or not np.isin(distinct, numbers).all():
        raise ValueError(
            f"{title} returned {len(indices)} indices, {len(distinct)} of them distinct; "
            f"expected at most {count} distinct ones below {len(candidates)}"
        )
    return indices.astype(np.int64)
