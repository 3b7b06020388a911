"""Gates: tests that decide whether a trained model may replace the model it was trained from.

    answers to the same held-out prompts, before and after ──paired_change──> Change
    Change, KL, counts ──gate──> Verdict(is_passed, reason)

    sanity, drift    numbers are finite, and the policy has not moved too far
    kept             harm is excluded in a domain; a result that is inconclusive does not pass

All domains must pass. Testing more domains thus makes a false pass less likely, and no correction for multiple tests is
needed (an intersection-union test).

Sources: Tango 1998, Statistics in Medicine 17:891-908 (score interval of a paired difference of proportions);
Berger 1982, Technometrics 24 (tests that must all pass).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")


@dataclass(frozen=True)
class Verdict:
    """Outcome of one gate with its reason; `domain` is "" for a gate that concerns no single domain."""

    gate: str
    is_passed: bool
    reason: str
    domain: str = ""

    def __str__(self) -> str:
        """Return the line of a gate that did not pass."""
        return f"{self.gate} {self.domain}".rstrip() + f": {self.reason}"


@dataclass(frozen=True)
class Change:
    """Right answers to the same prompts before and after. Invariant: shares in [0, 1], low <= change <= high."""

    num: int  # prompts answered both times
    num_lost: int  # right before, wrong after
    num_gained: int  # wrong before, right after
    before: float  # share of right answers
    after: float
    low: float  # confidence interval of `change`
    high: float

    @property
    def change(self) -> float:
        """Return the increase of the share of right answers, in [-1, 1]."""
        return (self.num_gained - self.num_lost) / self.num

    def __str__(self) -> str:
        """Return "0.812 -> 0.795, -1.7 points [-3.0, -0.3] on 1000 prompts"."""
        span = f"{100 * self.change:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return f"{self.before:.3f} -> {self.after:.3f}, {span} on {self.num} prompts"


def paired_change(before: Mapping[Key, bool], after: Mapping[Key, bool], confidence: float) -> Change:
    """Compare the answers, prompt -> whether it was right, to the prompts that were answered both times.

    Raises:
        ValueError: there is no such prompt.
    """
    both = sorted(before.keys() & after.keys(), key=str)
    if not both:
        raise ValueError(f"{len(before)} answers before and {len(after)} after have no prompt in common")
    lost = sum(before[key] and not after[key] for key in both)
    gained = sum(after[key] and not before[key] for key in both)
    right = sum(before[key] for key in both)
    low, high = paired_interval(len(both), lost, gained, confidence)
    return Change(len(both), lost, gained, right / len(both), (right - lost + gained) / len(both), low, high)


def paired_interval(num: int, num_lost: int, num_gained: int, confidence: float) -> tuple[float, float]:
    """Return the interval of (gained - lost) / num: the differences that `paired_score` does not reject.

    Each bound alone holds with (1 + confidence) / 2.

    Raises:
        ValueError: the counts are inconsistent or the confidence is out of range.

    Source: Tango 1998, section 3.
    """
    from scipy import optimize, stats

    if num < 1 or min(num_lost, num_gained) < 0 or num_lost + num_gained > num or not 0 < confidence < 1:
        raise ValueError(
            f"num = {num}, num_lost = {num_lost}, num_gained = {num_gained}, confidence = {confidence}; "
            "expected lost + gained <= num >= 1 and a confidence in (0, 1)"
        )
    z = float(stats.norm.ppf((1 + confidence) / 2))
    middle = (num_gained - num_lost) / num

    def bound(end: float, sign: int) -> float:
        def excess(difference: float) -> float:
            return sign * paired_score(num, num_lost, num_gained, difference) - z

        edge = end * (1 - 1e-12)
        if excess(edge) <= 0:  # even the end is not rejected
            return end
        return float(optimize.brentq(excess, *sorted((edge, middle)), xtol=1e-12))

    return (bound(-1.0, 1) if middle > -1 else -1.0), (bound(1.0, -1) if middle < 1 else 1.0)


def paired_score(num: int, num_lost: int, num_gained: int, difference: float) -> float:
    """Return the score statistic of the hypothesis "the change is `difference`".

    It is standard normal under the hypothesis, and positive if the observed change is larger.
    z = (gained - lost - n d) / sqrt(n (2 q + d (1 - d))), where q is the maximum-likelihood probability of a loss given
    d: the larger root of 2 n q^2 + ((2 n + lost - gained) d - lost - gained) q - lost d (1 - d) = 0.
    With d = 0 it is McNemar's (gained - lost) / sqrt(gained + lost).

    n is the number of pairs, and d the difference, in (-1, 1); z is 0 if nothing changed and d is 0.

    Source: Tango 1998, equations 7 and 8, with losses and gains in the places of his two discordant cells.
    """
    n, lost, gained, d = num, num_lost, num_gained, difference
    linear = (2 * n + lost - gained) * d - lost - gained
    q = (-linear + math.sqrt(max(0.0, linear**2 + 8 * n * lost * d * (1 - d)))) / (4 * n)
    variance = n * (2 * q + d * (1 - d))
    gap = gained - lost - n * d
    if variance <= 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def sanity(num_nonfinite: int) -> Verdict:
    """Test that no log-prob and no gradient was not finite."""
    text = f"{num_nonfinite} log-probs or gradients were not finite" if num_nonfinite else "all numbers finite"
    return Verdict("sanity", not num_nonfinite, text)


def drift(kl: float, max_kl: float) -> Verdict:
    """Test the policy's KL divergence from the old model, nats per token."""
    return Verdict("drift", kl <= max_kl, f"KL {kl:.3g} nats per token; limit {max_kl:g}")


def kept(domain: str, change: Change, max_drop: float) -> Verdict:
    """Test non-inferiority in a domain: the whole interval lies above -max_drop, a share of right answers."""
    is_shown = change.low > -max_drop
    text = f"{change}; a drop of {100 * max_drop:g} points {'is' if is_shown else 'is not'} excluded"
    return Verdict("kept", is_shown, text, domain)


def least_prompts(max_drop: float, confidence: float) -> int:
    """Return the smallest number of prompts with which `kept` can pass, for a model that has not changed.

    Without a loss or a gain, paired_score = sqrt(n d / (1 - d)) at a drop of d.
    """
    from scipy import stats

    z = float(stats.norm.ppf((1 + confidence) / 2))
    return math.floor(z**2 * (1 - max_drop) / max_drop) + 1
