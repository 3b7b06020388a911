"""Grades visits: 1 (Again), 2 (Hard), 3 (Good) or 4 (Easy), 0 for no grade.

    pass rate -> Beta posterior -> its mean  \\
    mean reward                               |-> cut at three bounds -> grade         success is 2 and above
    change of log-likelihood                  |
    human rating                             /

A group of G episodes is a noisy test of recall: 2 successes of 2 are weaker evidence than 8 of 8. The Beta posterior
of an item's recall accounts for that. It keeps a fraction m = `MEMORY` of earlier evidence, because the policy has
changed since; s of n episodes are successes:

    alpha' = a + m (alpha - a) + s,    beta' = b + m (beta - b) + (n - s)        a, b: prior

With Jeffreys' prior and no earlier visits, 0 to 2 successes of 8 are Again, 3 to 5 Hard, 6 and 7 Good, 8 Easy; of 4,
0 and 1 are Again, then one grade each; 2 of 2 are at most Good.

A user-defined grade is one registered function: `GRADES["mine"] = function(evidence, min_graded) -> grade_N`.

Sources: Jeffreys 1946, Proc. R. Soc. A 186, "An invariant form for the prior probability in estimation problems";
Ye et al., github.com/open-spaced-repetition/py-fsrs (the grades).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rllib_srl.common.rules import Rules

PRIOR = (0.5, 0.5)  # Jeffreys': a, b
MEMORY = 0.25  # fraction of earlier evidence that is kept at a new visit
BOUNDS = (0.35, 0.65, 0.9)  # lowest recall of Hard, Good and Easy
# Nats a token: the geometric mean of the token probabilities changed by a factor of exp(-0.5) = 0.6, 0.9 and 1.1.
LIKELIHOOD_BOUNDS = (-0.5, -0.1, 0.1)
RATING_SCALES = {"ordinal": (1.0, 5.0), "binary": (0.0, 1.0), "normalised": (0.0, 1.0)}


@dataclass(frozen=True)
class Evidence:
    """Evidence of N visits, one array a column; None for columns that were not measured."""

    num_success_N: np.ndarray | None = None
    size_N: np.ndarray | None = None  # valid episodes
    alpha_N: np.ndarray | None = None  # posterior after this visit; see `posterior`
    beta_N: np.ndarray | None = None
    reward_N: np.ndarray | None = None  # mean over the group, in [0, 1]
    logp_change_N: np.ndarray | None = None  # nats a token; nan where no success is stored
    rating_N: np.ndarray | None = None  # nan where there is no rating

    def need(self, grade: str, *names: str) -> list[np.ndarray]:
        """Return the columns that a grade reads, as float64.

        Raises:
            ValueError: columns were not measured; the message names them.
        """
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(f"grade = {grade!r} reads {', '.join(missing)}; expected one value a visit")
        return [np.asarray(getattr(self, name), np.float64) for name in names]


def posterior(
    num_success_N: np.ndarray,
    size_N: np.ndarray,
    alpha_N: np.ndarray | float = PRIOR[0],
    beta_N: np.ndarray | float = PRIOR[1],
) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha and beta of the Beta posterior of recall after a visit.

    Args:
        num_success_N: successful episodes.
        size_N: valid episodes.
        alpha_N: before the visit; default: the prior, for a new item.
        beta_N: before the visit; default: the prior.
    """
    a, b = PRIOR
    num_success_N, size_N = np.asarray(num_success_N, np.float64), np.asarray(size_N, np.float64)
    return (
        a + MEMORY * (np.asarray(alpha_N, np.float64) - a) + num_success_N,
        b + MEMORY * (np.asarray(beta_N, np.float64) - b) + (size_N - num_success_N),
    )


def by_pass_rate(evidence: Evidence, min_graded: int = 2) -> np.ndarray:
    """Grade by the posterior mean of recall, alpha / (alpha + beta); 0 below `min_graded` valid episodes."""
    size_N, alpha_N, beta_N = evidence.need("pass_rate", "size_N", "alpha_N", "beta_N")
    return np.where(size_N >= min_graded, _cut(alpha_N / (alpha_N + beta_N)), 0)


def by_reward(evidence: Evidence, min_graded: int = 2) -> np.ndarray:
    """Grade by the mean reward of the group, for rewards that are not binary; 0 below `min_graded` valid episodes."""
    size_N, reward_N = evidence.need("reward", "size_N", "reward_N")
    return np.where(size_N >= min_graded, _cut(reward_N), 0)


def by_likelihood(evidence: Evidence, min_graded: int = 2) -> np.ndarray:
    """Estimate a grade without playing, from the change of a stored success's likelihood since it was generated.

    The change is the mean over its tokens of logp - behaviour_logp; nan is graded 0. It is only a proxy for recall:
    the policy may have learned another solution. `min_graded` is ignored, as no episode is played.
    """
    (change_N,) = evidence.need("likelihood", "logp_change_N")
    return np.where(np.isnan(change_N), 0, _cut(change_N, LIKELIHOOD_BOUNDS))


def by_rating(evidence: Evidence, min_graded: int = 2, scale: str = "normalised") -> np.ndarray:
    """Grade by a human rating; nan is graded 0, and `min_graded` ignored, as a rating is of one answer.

    The ordinal ratings 1 to 5 become the grades 1, 1, 2, 3, 4. A binary rating of 1 is Good, because one bit cannot
    tell Good from Easy.

    Args:
        evidence: with rating.
        min_graded: ignored.
        scale: a key of `RATING_SCALES`.

    Raises:
        ValueError: the column is missing, the scale is unknown or ratings lie outside it.
    """
    (rating_N,) = evidence.need("rating", "rating_N")
    if scale not in RATING_SCALES:
        raise ValueError(f"scale = {scale!r}; expected one of {sorted(RATING_SCALES)}")
    low, high = RATING_SCALES[scale]
    is_rated_N = ~np.isnan(rating_N)
    bad_N = is_rated_N & ~((rating_N >= low) & (rating_N <= high))
    if scale == "binary":
        bad_N |= is_rated_N & ~np.isin(rating_N, (0, 1))
    if bad_N.any():
        raise ValueError(f"rating = {rating_N[bad_N][:5].tolist()}; expected {low:g} to {high:g} ({scale})")
    grade_N = np.where(rating_N > 0, 3, 1) if scale == "binary" else _cut((rating_N - low) / (high - low))
    return np.where(is_rated_N, grade_N, 0)


_OWN: dict[str, Callable[..., np.ndarray]] = {
    "pass_rate": by_pass_rate,
    "reward": by_reward,
    "likelihood": by_likelihood,
    "rating": by_rating,
}
GRADES: Rules[Callable[..., np.ndarray]] = Rules("grade", _OWN)


def _cut(value_N: np.ndarray, bounds: tuple[float, float, float] = BOUNDS) -> np.ndarray:
    """Return 1 plus the number of bounds that are at most the value."""
    return 1 + np.searchsorted(np.asarray(bounds), value_N, side="right")
