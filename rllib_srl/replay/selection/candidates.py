"""Input of selection and eviction rules: candidate columns, rule settings, and the two ways to draw.

    Candidates (N items, or N groups) + SelectionSettings + a generator  ->  distinct indices into the N

All rules draw in one of two ways:
    first      lexicographic order, ties broken by the generator
    weighted   without replacement, the first draw i with probability w_i / sum w (Plackett-Luce)

Source of `weighted`: Kool et al. 2019, arXiv 1903.06059 section 2.3: the num largest of log w + Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rllib_srl.common.setting_checks import is_integer, is_number
from rllib_srl.common.setting_tables import setting
from rllib_srl.replay.selection.context import Context, SignalSettings

REPO_STRATEGIES = ("highest", "max_variance", "random", "recent")


@dataclass(frozen=True)
class Candidates:
    """The items (revisit) or groups (reuse) a rule chooses among.

    Invariant: every column has as many entries as `seq`, all of them finite.
    """

    seq: np.ndarray  # order of insertion, int64; the smallest came first
    domain: np.ndarray  # int64
    pass_rate: np.ndarray  # share of episodes of the last visit that passed
    reward: np.ndarray  # mean of the last visit, in [0, 1]
    variance: np.ndarray  # of its rewards (population), in [0, .25]; around today's baseline, if that judges groups
    abs_advantage: np.ndarray  # mean |advantage| of the last visit, or its root mean square under today's baseline
    nll: np.ndarray  # mean -log-prob of the policy's tokens, nats per token
    num_success: np.ndarray  # episodes that passed, of ...
    group_size: np.ndarray  # ... the episodes of the last visit
    novelty: np.ndarray  # uncalibrated distance to the k nearest neighbours
    diversity: np.ndarray  # calibrated, in [0, 1]
    age: np.ndarray  # iterations since a group was played; of an item: since it was created
    elapsed: np.ndarray  # iterations since the last visit; of a group: since it was played
    overdue: np.ndarray  # (now - due) / interval; below 0: not due yet
    retrievability: np.ndarray  # predicted recall, in [0, 1]
    uses: np.ndarray  # number of reuses of a group
    lapses: np.ndarray
    visits: np.ndarray  # 0: not measured yet
    score: np.ndarray  # ExIt's S
    is_new: np.ndarray  # never revisited; of a group: never reused
    posterior_mean: np.ndarray  # of recall, in [0, 1]
    num_silent: np.ndarray  # silent groups in a row, at most 8; a small group counts as a fraction
    num_unsolved: np.ndarray  # groups that vary, of an item never solved; see `history.varies`
    history_sum: np.ndarray  # discounted sum of the rewards of all visits ...
    history_count: np.ndarray  # ... and their discounted number
    cost: np.ndarray  # running mean of a group's generated tokens, or any positive unit
    weight: np.ndarray  # given by the user, 1 by default
    are_groups: bool = False
    context: Context = field(default_factory=Context)  # what a rule reads beside the columns

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
    def of(
        cls, num: int, are_groups: bool = False, context: Context | None = None, **columns: Any
    ) -> Candidates:
        """Build `num` candidates from some columns; `seq` defaults to 0, 1, 2, ...

        Other columns default to 0, those of recall to .5, cost and weight to 1.

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
        return cls(**filled, are_groups=are_groups, context=context or Context())

    def take(self, indices: np.ndarray) -> Candidates:
        """Return the candidates at `indices`, in that order."""
        columns = {name: getattr(self, name)[indices] for name in COLUMNS}
        return Candidates(**columns, are_groups=self.are_groups, context=self.context)

    def __len__(self) -> int:
        """Return N."""
        return len(self.seq)


COLUMNS = tuple(column.name for column in fields(Candidates) if column.name not in ("are_groups", "context"))
_INTEGERS: dict[str, Any] = dict.fromkeys(
    ("seq", "domain", "num_success", "group_size", "age", "elapsed", "uses", "lapses", "visits"), np.int64
) | {"is_new": np.bool_}
_DEFAULTS: dict[str, float] = dict.fromkeys(("pass_rate", "reward", "retrievability", "posterior_mean"), 0.5)
_DEFAULTS |= {"cost": 1.0, "weight": 1.0}


@dataclass(frozen=True)
class SelectionSettings:
    """Parameters of all selection and eviction rules; each rule reads its own.

    Invariant: each value is within its limits; `pool_hard` is below `pool_easy`.
    """

    temperature: float = setting(1.0, "of draws by priority; 0 takes the highest first")
    epsilon_new: float = setting(0.0, "probability that a slot goes to a new candidate, regardless of priority")
    diversity_coeff: float = setting(0.5, "weight of diversity in a priority or value; 0 ignores it")
    learnability_coeff: float = setting(3.0, "weight of p(1 - p) in the priority of a due item")
    signal_floor: float = setting(
        0.01, "added to a signal term in [0, 1], so that candidates without signal have weight"
    )
    age_scale: float = setting(16.0, "iterations in which the priority of a group falls by a factor e")
    leech_share: float = setting(0.1, "share of the slots that leeches may take")
    uniform_floor: float = setting(0.0, "share of a proportional rule's draws that are uniform")
    high_reward_factor: float = setting(2.0, "draws among so many times the slots; 1: takes the highest")
    kappa: float = setting(10.0, "inverse temperature of the score")
    per_alpha: float = setting(0.6, "exponent of the priority")
    per_beta: float = setting(0.4, "exponent of the importance weights")
    fresh_tau: float = setting(500.0, "iterations in which a priority falls by a factor e")
    pier_lambda: float = setting(0.5, "weight of uncertainty against age")
    pier_base: float = setting(10.0, "base b of the priority")
    pier_alpha: float = setting(1.5, "exponent of the priority")
    pier_beta: float = setting(1.0, "exponent of the importance weights")
    pool_hard: float = setting(0.25, "highest reward of the hard pool")
    pool_easy: float = setting(0.75, "rewards above are in the easy pool")
    pool_hard_weight: float = setting(0.2, "weight of a hard candidate; a normal one has 1")
    pool_easy_weight: float = setting(0.2, "weight of an easy candidate")
    exgrpo_sigma: float = setting(1.0, "deviation of the bucket weights, in successes")
    repo_strategy: str = setting("highest", "highest, max_variance, random or recent")
    rlep_min_success: int = setting(2, "successes a candidate must have")
    greso_least: float = setting(0.01, "least probability that a pass plays a prompt, in (0, 1]")
    mopps_target: float = setting(0.5, "pass rate that is preferred, in [0, 1]")
    spo_floor: float = setting(0.05, "added to sqrt(v(1 - v)), above 0")
    reservoir_seed: int = setting(0, "seed of the lottery numbers")
    signal: SignalSettings = field(default_factory=SignalSettings)  # parameters of the rule `signal`

    def __post_init__(self) -> None:
        """Check the invariant.

        Raises:
            ValueError: naming every setting out of its limits.
        """
        faults = faults_of({name: getattr(self, name) for name in SETTING_NAMES})
        if faults:
            raise ValueError("; ".join(faults))


SETTING_NAMES = tuple(setting.name for setting in fields(SelectionSettings) if setting.name != "signal")
_SHARES = (
    "epsilon_new",
    "leech_share",
    "uniform_floor",
    "per_beta",
    "pier_lambda",
    "pier_beta",
    "pool_hard",
    "pool_easy",
    "mopps_target",
)
_POSITIVE = ("signal_floor", "age_scale", "fresh_tau", "exgrpo_sigma", "spo_floor")
_COUNTS = ("rlep_min_success", "reservoir_seed")


def faults_of(values: Mapping[str, Any]) -> list[str]:
    """Validate settings; return error messages, each as "name = value; expected ..."."""
    faults = [f"{name} = {value!r}; expected {want}" for name, value in values.items() if (want := _fault(name, value))]
    hard = values.get("pool_hard", SelectionSettings.pool_hard)
    easy = values.get("pool_easy", SelectionSettings.pool_easy)
    if not faults and hard >= easy:
        faults.append(f"pool_hard = {hard!r}; expected less than pool_easy = {easy!r}")
    return faults


def _fault(name: str, value: Any) -> str:
    if name not in SETTING_NAMES:
        return "no such setting"
    if name == "repo_strategy":
        return "" if value in REPO_STRATEGIES else f"one of {list(REPO_STRATEGIES)}"
    if name in _COUNTS:
        return "" if is_integer(value, 0) and value < 2**63 else "an integer of at least 0"
    is_finite = is_number(value)
    if name in _SHARES:
        return "" if is_finite and 0 <= value <= 1 else "a number in [0, 1]"
    if name in _POSITIVE:
        return "" if is_finite and value > 0 else "a number above 0"
    if name == "greso_least":
        return "" if is_finite and 0 < value <= 1 else "a number in (0, 1]"
    if name == "high_reward_factor":
        return "" if is_finite and value >= 1 else "a number of at least 1"
    if name == "pier_base":
        return "" if is_finite and value > 1 else "a number above 1"
    return "" if is_finite and value >= 0 else "a number of at least 0"


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
