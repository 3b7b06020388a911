"""Computes the realised replay shares of an iteration, and the timing of its visits.

Shares are counted in three units, because each can hide a shift that another shows:
    prompts played (revisits cost generation)    groups trained on ("signal")    their loss tokens (what trains)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta

ORIGINS = ("fresh", "revisit", "reuse")
TIMINGS = ("new", "early", "on_time", "late")
AGES = (1, 2, 4, 8, 16, 32)  # upper bounds of the age histogram, iterations


def counts_of(groups: Iterable[GroupMeta], trained: Iterable[GroupMeta]) -> Counter[str]:
    """Count by origin: groups and their generated tokens, groups that are trained on and their loss tokens.

    Args:
        groups: played and drawn groups.
        trained: groups of the batch, parts of groups included.
    """
    whats = ("groups", "signal", "tokens", "generated")
    counts: Counter[str] = Counter({f"num_{what}_{origin}": 0 for what in whats for origin in ORIGINS})
    for group in groups:
        counts[f"num_groups_{group.origin}"] += 1
        counts[f"num_generated_{group.origin}"] += int(group.num_loss_tokens_G.sum())  # reuse: at the time of play
    for group in trained:
        counts[f"num_signal_{group.origin}"] += 1
        counts[f"num_tokens_{group.origin}"] += int(group.num_loss_tokens_G.sum())
    return counts


def shares_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of revisits and reuses in counts over any period; nan where nothing was counted.

    The revisit share is revisit / (fresh + revisit); the reuse share is reuse / (fresh + revisit + reuse).
    """

    def share(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")

    shares = {}
    for what, name in (("groups", "prompts"), ("signal", "signal"), ("tokens", "tokens")):
        fresh, revisit, reuse = (counts.get(f"num_{what}_{origin}", 0) for origin in ORIGINS)
        shares[f"revisit_share_{name}"] = share(revisit, fresh + revisit)
        shares[f"reuse_share_{name}"] = share(reuse, fresh + revisit + reuse)
    return shares


def visit_counts(visits: Iterable[Visit]) -> Counter[str]:
    """Count graded visits by timing, and lapses. Refusals are lifetime counts of the memory (`buffer_metrics.py`)."""
    counts: Counter[str] = Counter({f"num_visits_{timing}": 0 for timing in TIMINGS} | {"num_lapses": 0})
    for visit in visits:
        counts[f"num_visits_{visit.timing}"] += bool(visit.grade)
        counts["num_lapses"] += visit.is_lapse
    return counts


def age_counts(reused: Sequence[GroupMeta], now: int) -> dict[str, int]:
    """Count reused groups by age in iterations, in bins up to 1, 2, 4, ..., 32, and above."""
    ages = [now - born_of(group) for group in reused]
    counts, low = {}, 0
    for high in AGES:
        counts[f"reuse_age_to_{high}"] = sum(low < age <= high for age in ages)
        low = high
    counts["reuse_age_above"] = sum(age > low for age in ages)
    return counts


def born_of(group: GroupMeta) -> int:
    """Return the iteration in which a group was played: the first part of its id."""
    return int(group.group_id.split(".", 1)[0])
