"""Gates of an upgrade: what was measured before and after, and whether a trained model may take the other's place.

    answers to the same held-out prompts, before and after ──paired_change──> Change
    Health, Change ──gate──> Verdict(outcome, reason)
                             passed   bad (counts, several in a row act)   harmful (acts at once)

While training goes on the question is whether there is harm; at the end whether there is none. Between the two lies
what cannot be told from so few prompts, and it is allowed to train on, never to be delivered:

    checks     `sanity`, `drift`, `retention`      harm must be shown to fail them
    the last   `kept`, `gained`                    harmlessness and gain must be shown to pass them

All domains must pass, so that testing many makes it harder, not easier, to pass by luck: no correction is due.

Sources: Tango 1998, Statistics in Medicine 17:891-908 (score interval of a paired difference of proportions);
Berger 1982, Technometrics 24 (tests that must all pass).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Key = TypeVar("Key")


class Outcome(StrEnum):
    """What a gate says. Invariant: in order of severity."""

    PASSED = "passed"
    BAD = "bad"
    HARMFUL = "harmful"


@dataclass(frozen=True)
class Verdict:
    """One gate's word on one domain, "" for what is of no domain."""

    gate: str
    outcome: Outcome
    reason: str
    domain: str = ""

    @property
    def is_passed(self) -> bool:
        """Say whether the gate is open."""
        return self.outcome is Outcome.PASSED


@dataclass(frozen=True)
class Change:
    """Right answers to the same prompts before and after. Invariant: shares in [0, 1], low <= change <= high."""

    num: int  # prompts answered both times
    num_lost: int  # right before, wrong after
    num_gained: int  # wrong before, right after
    before: float  # share of right answers
    after: float
    low: float  # interval of `change` at the confidence asked for
    high: float

    @property
    def change(self) -> float:
        """Return by how much the share of right answers rose."""
        return (self.num_gained - self.num_lost) / self.num

    def __str__(self) -> str:
        """Return "0.812 -> 0.795, -1.7 points [-3.0, -0.3] on 1000 prompts"."""
        span = f"{100 * self.change:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return f"{self.before:.3f} -> {self.after:.3f}, {span} on {self.num} prompts"


@dataclass(frozen=True)
class Health:
    """What a stretch of training left in its own metrics. Invariant: counts are at least 0."""

    num_nonfinite: int  # log-probs and gradients that were no numbers, and so trained nothing
    kl: float  # to the model that is upgraded, nats a token, when the last update began; NaN without one
    num_lost: int  # held-out episodes that infrastructure ended, in the domain that lost the largest share
    num_asked: int  # held-out episodes of that domain, at least 1
    broken: str = ""  # why training could not go on, "" if it could


def paired_change(before: Mapping[Key, bool], after: Mapping[Key, bool], confidence: float) -> Change:
    """Compare answers to the prompts that were answered both times.

    Args:
        before: prompt -> whether its answer was right.
        after: the same, later.
        confidence: of the two-sided interval, in (0, 1).

    Raises:
        ValueError: no prompt was answered both times.
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

    Args:
        num: pairs, at least 1.
        num_lost: right before, wrong after.
        num_gained: wrong before, right after.
        confidence: two-sided, in (0, 1); each bound alone holds with (1 + confidence) / 2.

    Raises:
        ValueError: the numbers do not fit together.

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
    """Return the score statistic of "the change is `difference`", standard normal if it is so; positive: it is more.

    z = (gained - lost - n d) / sqrt(n (2 q + d (1 - d))), where q, the chance of a loss, is the likeliest one given d:
    the larger root of 2 n q^2 + ((2 n + lost - gained) d - lost - gained) q - lost d (1 - d) = 0.
    With d = 0 that is McNemar's (gained - lost) / sqrt(gained + lost).

    Args:
        num: pairs.
        num_lost: right before, wrong after.
        num_gained: wrong before, right after.
        difference: d, in (-1, 1).

    Returns:
        0 where nothing changed and d is 0.

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


def sanity(health: Health, max_lost: float) -> Verdict:
    """Judge whether training and measuring went as they should at all.

    Args:
        health: of the stretch.
        max_lost: share of held-out episodes that infrastructure may end, in [0, 1].
    """
    lost = health.num_lost / health.num_asked
    if health.broken:
        return Verdict("sanity", Outcome.HARMFUL, f"training broke: {health.broken}")
    if health.num_nonfinite:
        return Verdict("sanity", Outcome.BAD, f"{health.num_nonfinite} log-probs or gradients were no numbers")
    if lost > max_lost:
        text = f"{lost:.1%} of held-out episodes were lost; expected at most {max_lost:.1%}"
        return Verdict("sanity", Outcome.BAD, text)
    return Verdict("sanity", Outcome.PASSED, f"all numbers finite, {lost:.1%} of held-out episodes lost")


def drift(health: Health, max_kl: float) -> Verdict:
    """Judge how far the policy is from the model that is upgraded.

    Args:
        health: of the stretch.
        max_kl: nats a token, above 0; NaN, as without an update, passes.
    """
    if math.isnan(health.kl):
        return Verdict("drift", Outcome.PASSED, "no update, no drift")
    text = f"KL {health.kl:.3g} nats a token, at most {max_kl:g}"
    return Verdict("drift", Outcome.BAD if health.kl > max_kl else Outcome.PASSED, text)


def retention(domain: str, change: Change, max_drop: float) -> Verdict:
    """Judge whether a domain is being lost; what few prompts cannot show passes.

        harmful   the whole interval lies below -max_drop: a drop beyond the margin is shown
        bad       the change itself does, and the interval lies below 0: a drop is shown, beyond the margin by estimate

    Args:
        domain: that is to be kept.
        change: from the model that is upgraded.
        max_drop: share of right answers that may be lost, in [0, 1).
    """
    if change.high < -max_drop:
        outcome = Outcome.HARMFUL
    elif change.change < -max_drop and change.high < 0:
        outcome = Outcome.BAD
    else:
        outcome = Outcome.PASSED
    return Verdict("retention", outcome, f"{change}; may lose {100 * max_drop:g}", domain)


def kept(domain: str, change: Change, max_drop: float) -> Verdict:
    """Judge whether a domain is shown not to be lost: the whole interval lies above -max_drop.

    Args:
        domain: that is to be kept.
        change: from the model that is upgraded.
        max_drop: share of right answers that may be lost, in [0, 1).
    """
    is_shown = change.low > -max_drop
    text = f"{change}; a loss of {100 * max_drop:g} {'is' if is_shown else 'cannot be'} excluded"
    return Verdict("kept", Outcome.PASSED if is_shown else Outcome.BAD, text, domain)


def gained(domain: str, change: Change, min_gain: float) -> Verdict:
    """Judge whether a domain is shown to be better: the interval lies above 0, and the change reaches `min_gain`.

    Args:
        domain: that was to be learned.
        change: from the model that is upgraded.
        min_gain: share of right answers, in [0, 1).
    """
    is_better = change.low > 0 and change.change >= min_gain
    text = f"{change}; expected at least {100 * min_gain:+g}, and more than luck"
    return Verdict("gained", Outcome.PASSED if is_better else Outcome.BAD, text, domain)
