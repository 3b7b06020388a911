"""Input of selection and eviction rules: candidate columns, and the two ways to draw.

    Candidates (N items, or N groups) + a generator  ->  distinct indices into the N

Most rules draw in one of two ways:
    first      lexicographic order, ties broken by the generator
    weighted   without replacement, the first draw i with probability w_i / sum w (Plackett-Luce)

Sources: Kool et al. 2019, arXiv 1903.06059 section 2.3 (`weighted`: the num largest of log w + Gumbel noise); Schaul et
al. 2016, arXiv 1511.05952 section 3.4 (importance weights).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

MOST_CANDIDATES = 4096  # of a draw; of more, a uniform sample is drawn first


@dataclass(frozen=True)
class Candidates:
    """The items (revisit) or groups (reuse) a rule chooses among.

    Invariant: every column has as many entries as `seq`, all of them finite.
    """

    seq: np.ndarray  # order of insertion, int64; the smallest came first
    domain: np.ndarray  # int64
    pass_rate: np.ndarray  # share of episodes of the last visit that passed
    reward: np.ndarray  # mean of the last visit, in [0, 1]
    variance: np.ndarray  # of its rewards (population), in [0, .25]
    abs_advantage: np.ndarray  # mean |advantage| of a group; of an item: deviation of the rewards of its last visit
    nll: np.ndarray  # mean -log-prob of the policy's tokens, nats per token
    num_success: np.ndarray  # episodes that passed, of ...
    group_size: np.ndarray  # ... the episodes of the last visit
    diversity: np.ndarray  # calibrated, in [0, 1]
    age: np.ndarray  # iterations since a group was played; of an item: since it was created
    elapsed: np.ndarray  # iterations since the last visit; of a group: since it was played
    overdue: np.ndarray  # (now - due) / interval; below 0: not due yet
    retrievability: np.ndarray  # predicted recall, in [0, 1]
    uses: np.ndarray  # number of reuses of a group
    visits: np.ndarray  # of the item
    is_new: np.ndarray  # never revisited; of a group: never reused
    posterior_mean: np.ndarray  # of recall, in [0, 1]
    num_silent: np.ndarray  # groups of equal rewards in a row, at most 8
    history_sum: np.ndarray  # discounted sum of the rewards of all visits ...
    history_count: np.ndarray  # ... and their discounted number
    are_groups: bool = False
    diversity_coeff: float = 0.0  # strength of diversity in draws, a setting of the memory

    def __post_init__(self) -> None:
        """Check the invariant.

        Raises:
            ValueError: naming every column that is too long, too short or not finite.
        """
        faults = []
        for name in COLUMNS:
            column = getattr(self, name)
            if len(column) != len(self.seq):
                faults.append(f"{name} has {len(column)} entries, seq has {len(self.seq)}")
            elif column.dtype.kind == "f" and column.strides != (0,) and not np.isfinite(column.sum()):
                # The sum takes half the time of looking at each entry; a stride of 0 marks a default, which is finite.
                faults.append(f"{name} has {np.count_nonzero(~np.isfinite(column))} entries that are not finite")
        if faults:
            raise ValueError("candidates do not fit together: " + "; ".join(faults))

    @classmethod
    def of(cls, num: int, are_groups: bool = False, diversity_coeff: float = 0.0, **columns: Any) -> Candidates:
        """Build `num` candidates from some columns; `seq` defaults to 0, 1, 2, ...

        Other columns default to 0, those of recall to .5.

        Raises:
            ValueError: unknown columns, or columns that break the class invariant.
        """
        unknown = sorted(set(columns) - set(COLUMNS))
        if unknown:
            raise ValueError(f"columns = {unknown}; expected some of {list(COLUMNS)}")
        filled: dict[str, np.ndarray] = {}
        for name in COLUMNS:
            dtype = _INTEGERS.get(name, np.float64)
            if name in columns:
                filled[name] = np.asarray(columns[name], dtype)
            else:
                filled[name] = np.broadcast_to(np.array(_DEFAULTS.get(name, 0), dtype), num)  # takes no memory
        if "seq" not in columns:
            filled["seq"] = np.arange(num)
        return cls(**filled, are_groups=are_groups, diversity_coeff=diversity_coeff)

    def take(self, indices: np.ndarray) -> Candidates:
        """Return the candidates at `indices`, in that order."""
        columns = {name: getattr(self, name)[indices] for name in COLUMNS}
        return Candidates(**columns, are_groups=self.are_groups, diversity_coeff=self.diversity_coeff)

    def __len__(self) -> int:
        """Return N."""
        return len(self.seq)


COLUMNS = tuple(column.name for column in fields(Candidates) if column.name not in ("are_groups", "diversity_coeff"))
_INTEGERS: dict[str, Any] = dict.fromkeys(
    ("seq", "domain", "num_success", "group_size", "age", "elapsed", "uses", "visits", "num_silent"), np.int64
) | {"is_new": np.bool_}
_DEFAULTS: dict[str, float] = dict.fromkeys(("pass_rate", "reward", "retrievability", "posterior_mean"), 0.5)


def first(num: int, generator: np.random.Generator, *columns_N: np.ndarray) -> np.ndarray:
    """Return the indices of the `num` smallest by the first column, then the second, ...; ties in random order."""
    tie_N = generator.random(len(columns_N[0]))
    first_K: np.ndarray = np.lexsort((tie_N, *columns_N[::-1]))[:num]
    return first_K


def weighted(log_weight_N: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Draw `num` without replacement, each in proportion to the remaining weights.

    Candidates of weight 0 (log -inf) come last, in random order.

    Raises:
        ValueError: a weight that is nan or infinite.
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


def safe_log(value_N: np.ndarray) -> np.ndarray:
    """Return the logarithm, -inf where the value is 0 or below."""
    log_N: np.ndarray = np.log(value_N, where=value_N > 0, out=np.full(len(value_N), -np.inf))
    return log_N


def importance_weights(log_weight_N: np.ndarray, indices: np.ndarray, beta: float) -> np.ndarray:
    """Return (N P_i) ** -beta / max_j (N P_j) ** -beta of candidates that `weighted` has drawn, in (0, 1].

    The maximum is over all candidates of positive probability P; a candidate of probability 0, drawn to fill a batch,
    has weight 1. Difference from the source: beta is constant, not annealed.
    """
    is_possible_N = np.isfinite(log_weight_N)
    if not is_possible_N.any():
        return np.ones(len(indices))
    above_K: np.ndarray = log_weight_N[indices] - log_weight_N[is_possible_N].min()
    weight_K: np.ndarray = np.exp(-beta * np.maximum(above_K, 0.0))
    return weight_K
