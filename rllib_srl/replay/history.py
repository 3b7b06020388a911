"""Summarise played groups, and keep the history of items and domains: discounted rewards, equal rewards in a row.

    Group -> GroupFacts -> row of its group, row of its item

    before a visit   s, n *= rho,  rho = 0.5 ** (elapsed / half_life)       what `Visit.history` returns
    after it         s += sum of raw rewards,  n += episodes                what the item's row stores
    of a stored group   rho (s - w S),  rho (n - w n_g)                     `histories_without` the group itself
                     clock += elapsed                                       ... so that a group of the past has the
                                                                            weight 0.5 ** (its ago / half_life) in s

    discount by      elapsed since the last visit                           half-life by default
    "versions"       policy versions, that is updates                       11
    "visits"         1                                                      1
    "kl"             nats per token by which the policy has moved           0.06

The defaults agree: a factor of .5 a visit for groups of 8 that come back every 10 updates, and of .85 for groups of 2
that come back every 2.6 updates, are both .94 an update, a half-life of 11. SPO halves after 0.06 nats.
`DomainStatistics` has the mean reward of each domain, of every played group, refused ones too.

Sources: `docs/design/0003-memory.md`; SPO, arXiv 2509.13232 (tracker of a prompt, discounted by the policy's KL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.batch.estimators import EPSILON
from rllib_srl.types import Group, History

HALF_LIVES = {"versions": 11.0, "visits": 1.0, "kl": 0.06}
TOLD_BY = {"versions": "version", "visits": "visits", "kl": "history_clock"}  # field with the time of an item's visit
MAX_SILENT = 8
_ROUNDING = 1e-9  # episodes
REWARD_FADE = 0.97  # a group
NO_WEIGHT = 1e-9  # below it nothing but rounding is left of a faded weight
_OF_MEAN = ("reward", "reward_weight", "num_noted")

OF_GROUP = (  # numbers in the row of a group
    *("size", "num_success", "reward", "variance", "abs_advantage", "nll"),
    *("num_tokens", "num_loss_tokens", "version", "num_rewarded", "lowest", "highest"),
)


@dataclass(frozen=True)
class GroupFacts:
    """Summary numbers of one group, stored in its row and in its item's row.

    Those of rewards are over the episodes that have one (`Group.has_reward_G`); `size` counts all.
    """

    size: int
    num_success: int
    reward: float  # mean
    reward_sum: float
    variance: float  # population variance of the rewards: ExIt's score S
    abs_advantage: float  # mean |advantage| of the group rule
    nll: float  # mean -log-prob of the policy's tokens, nats
    num_tokens: int
    num_loss_tokens: int
    version: int  # oldest policy version that wrote any of its tokens
    num_rewarded: int  # episodes that have a reward
    lowest: float  # reward
    highest: float


def facts_of(group: Group, pass_reward: float) -> GroupFacts:
    """Summarise a group of at least one episode; `pass_reward` is used where the environment defines none."""
    has_reward_G = group.has_reward_G
    rewards_G = group.rewards_G[has_reward_G].astype(np.float64)
    size = max(1, len(rewards_G))
    reward_sum = float(rewards_G.sum())
    reward = reward_sum / size
    centred_G = rewards_G - reward
    squares = float(centred_G @ centred_G)
    deviation = math.sqrt(squares / (size - 1)) if size > 1 else 0.0
    num_loss_tokens = int(np.count_nonzero(group.loss_mask_N))
    # The setting is compared in double precision: a float32 reward of 0.7 is below a pass_reward of 0.7.
    mark = group.pass_reward
    is_success_G = rewards_G >= pass_reward if mark is None else group.is_success_G(pass_reward)[has_reward_G]
    return GroupFacts(
        size=group.size,
        num_success=int(np.count_nonzero(is_success_G)),
        reward=reward,
        reward_sum=reward_sum,
        # Same threshold as `batch.estimators.has_signal`: rounding errors of equal rewards are no variance.
        variance=squares / size if len(rewards_G) and np.ptp(rewards_G) > 1e-8 else 0.0,
        abs_advantage=float(np.abs(centred_G).sum() / size / (deviation + EPSILON)),
        nll=float(-group.behaviour_logp_N.sum(dtype=np.float64) / max(1, num_loss_tokens)),
        num_tokens=len(group.token_ids_N),
        num_loss_tokens=num_loss_tokens,
        version=int(group.versions_G2.min()),
        num_rewarded=len(rewards_G),
        lowest=float(rewards_G.min()) if len(rewards_G) else 0.0,
        highest=float(rewards_G.max()) if len(rewards_G) else 0.0,
    )


class Policy(NamedTuple):
    """The policy that finds a history."""

    version: int
    kl: float  # nats per token by which it has moved since the start of the run


def discounts(
    by: str, half_life: float | None, rows_N: np.ndarray, version_N: np.ndarray, policy_kl: float
) -> np.ndarray:
    """Return rho = 0.5 ** (elapsed / half_life) of each item, in [0, 1].

    Args:
        by: a key of `HALF_LIVES`.
        half_life: in units of `by`; None: the default.
        rows_N: items before the visit.
        version_N: policy version that plays each.
        policy_kl: nats per token by which the policy has moved since the start of the run.
    """
    return discount(by, half_life, _elapsed(by, rows_N, version_N, policy_kl))


def _elapsed(by: str, rows_N: np.ndarray, version_N: np.ndarray, policy_kl: float) -> np.ndarray:
    if by == "versions":
        elapsed_N = version_N - rows_N["version"].astype(np.float64)
    elif by == "kl":
        elapsed_N = policy_kl - rows_N["history_clock"]
    else:
        elapsed_N = np.ones(len(rows_N))
    at_least_0_N: np.ndarray = np.maximum(0.0, elapsed_N)
    return at_least_0_N


def discount(by: str, half_life: float | None, elapsed_N: np.ndarray) -> np.ndarray:
    """Return rho of visits that lie back by `elapsed_N`, in units of `by`."""
    rho_N: np.ndarray = 0.5 ** (np.maximum(0.0, elapsed_N) / (half_life or HALF_LIVES[by]))
    return rho_N


def after_visit(
    rows_N: np.ndarray, facts: Sequence[GroupFacts], by: str, half_life: float | None, policy_kl: float
) -> dict[str, np.ndarray]:
    """Return the fields of the items' history after a visit by groups with `facts`; the rest is as in `discounts`."""
    elapsed_N = _elapsed(by, rows_N, np.array([one.version for one in facts], np.float64), policy_kl)
    rho_N = discount(by, half_life, elapsed_N)
    size_N, reward_sum_N, variance_N = (
        np.array([getattr(one, name) for one in facts], np.float64) for name in ("size", "reward_sum", "variance")
    )
    is_right_N = np.array([one.num_success == one.size for one in facts], bool)
    return {
        "history_sum": rho_N * rows_N["history_sum"] + reward_sum_N,
        "history_count": rho_N * rows_N["history_count"] + size_N,
        # The policy's KL only grows, so its sum of elapsed KL is the KL itself, without rounding.
        "history_clock": np.full(len(rows_N), policy_kl) if by == "kl" else rows_N["history_clock"] + elapsed_N,
        "num_silent": np.where(variance_N > 0, 0, np.minimum(MAX_SILENT, rows_N["num_silent"] + 1)),
        "is_solved": rows_N["is_solved"] | is_right_N,
    }


@dataclass
class _Sums:
    """Faded sums of one domain."""

    reward: float = 0.0  # of groups' mean rewards
    reward_weight: float = 0.0
    num_noted: int = 0  # groups


class DomainStatistics:
    """Statistics by domain name. Invariant: `get_state` holds all of it, as JSON types."""

    def __init__(self, state: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._sums = {domain: _Sums(**values) for domain, values in (state or {}).items()}

    def note(self, domain: str, reward: float) -> int:
        """Add the mean reward of a played group; return its number among the groups of its domain, from 1."""
        sums = self._sums.setdefault(domain, _Sums())
        sums.reward = REWARD_FADE * sums.reward + reward
        sums.reward_weight = REWARD_FADE * sums.reward_weight + 1
        sums.num_noted += 1
        return sums.num_noted

    def mean(self, domain: str) -> float:
        """Return the faded mean reward of a domain; without a group, that of all domains; without any, .5."""
        known = self._sums.get(domain)
        parts = [known] if known is not None else list(self._sums.values())
        weight = sum(one.reward_weight for one in parts)
        return sum(one.reward for one in parts) / weight if weight else 0.5

    def means_without(
        self, domains: Sequence[str], domain_N: np.ndarray, place_N: np.ndarray, reward_N: np.ndarray
    ) -> np.ndarray:
        """Return `mean` of the domain of each of N groups, without the group itself, float64 [N].

        Args:
            domains: names; `domain_N` are positions in them.
            domain_N: of each group.
            place_N: number of each group among those of its domain, as `note` returned it; 0: it is not among them.
            reward_N: mean reward of each group when it was noted.
        """
        of = [self._sums.get(name, _Sums()) for name in domains]
        reward_D, weight_D, num_D = (np.array([getattr(one, n) for one in of], np.float64) for n in _OF_MEAN)
        own_N = np.where(place_N > 0, REWARD_FADE ** (num_D[domain_N] - place_N), 0.0)
        sum_N, weight_N = reward_D[domain_N] - own_N * reward_N, weight_D[domain_N] - own_N
        is_alone_N = weight_N < NO_WEIGHT
        if not is_alone_N.any():
            without_N: np.ndarray = sum_N / weight_N
            return without_N
        totals = [sum(getattr(one, n) for one in self._sums.values()) for n in _OF_MEAN[:2]]
        sum_N = np.where(is_alone_N, totals[0] - reward_D[domain_N], sum_N)
        weight_N = np.where(is_alone_N, totals[1] - weight_D[domain_N], weight_N)
        is_known_N = weight_N >= NO_WEIGHT
        mean_N: np.ndarray = np.where(is_known_N, sum_N / np.where(is_known_N, weight_N, 1.0), 0.5)
        return mean_N

    def get_state(self) -> dict[str, dict[str, Any]]:
        return {domain: asdict(sums) for domain, sums in self._sums.items()}


def histories_without(
    policy: Policy,
    by: str,
    half_life: float | None,
    statistics: DomainStatistics,
    domains: Sequence[str],
    items_N: np.ndarray,
    groups_N: np.ndarray,
    reward_sum_N: np.ndarray,
) -> list[History]:
    """Return the history of each stored group's prompt as `policy` finds it now, without the group itself.

    No reward of a group is part of its own baseline: its sum S and its episodes n_g leave the prompt's history with the
    weight w that they have in it by now, and the mean of the domain is that of its other groups.

    Args:
        policy: that finds them.
        by: as in `discounts`, like `half_life`.
        half_life: in units of `by`.
        statistics: of the domains.
        domains: of each group.
        items_N: row of each group's item.
        groups_N: row of each group.
        reward_sum_N: exact sum of each group's rewards.
    """
    num_N = groups_N["num_rewarded"].astype(np.float64)
    is_part_N = groups_N["history_clock"] >= 0
    rho_N = discounts(by, half_life, items_N, np.full(len(items_N), policy.version), policy.kl)
    weight_N = is_part_N * discount(by, half_life, items_N["history_clock"] - groups_N["history_clock"])
    count_N = items_N["history_count"] - weight_N * num_N
    is_left_N = count_N > _ROUNDING
    sum_N = np.where(is_left_N, items_N["history_sum"] - weight_N * reward_sum_N, 0.0)
    names = list(dict.fromkeys(domains))
    domain_N = np.array([names.index(name) for name in domains], np.int64)
    mean_reward_N = reward_sum_N / np.maximum(1.0, num_N)
    mean_N = statistics.means_without(names, domain_N, groups_N["domain_place"], mean_reward_N)
    columns = (rho_N * sum_N, rho_N * np.where(is_left_N, count_N, 0.0), mean_N)
    return [History(*row) for row in zip(*(column_N.tolist() for column_N in columns), strict=True)]
