"""What share of an iteration came from the memory, intended against realised; and how its visits fell.

Three ways to count the same thing, because each can hide what another shows:
    prompts played (revisits cost generation)    groups with signal (only they train)    loss tokens (what trains)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rllib_srl.advantages import has_signal
from rllib_srl.replay.visits import Visit
from rllib_srl.types import GroupMeta

ORIGINS = ("fresh", "revisit", "reuse")
TIMINGS = ("new", "early", "on_time", "late")
AGES = (1, 2, 4, 8, 16, 32)  # upper bounds of the age histogram, iterations


def counts_of(groups: Iterable[GroupMeta]) -> Counter:
    """Count groups, groups with signal and loss tokens of the latter, by origin."""
    whats = ("groups", "signal", "tokens", "generated")
    counts: Counter = Counter({f"num_{what}_{origin}": 0 for what in whats for origin in ORIGINS})
    for group in groups:
        counts[f"num_groups_{group.origin}"] += 1
        counts[f"num_generated_{group.origin}"] += int(group.num_loss_tokens_G.sum())  # of reuse: once, long ago
        if has_signal(group.rewards_G):
            counts[f"num_signal_{group.origin}"] += 1
            counts[f"num_tokens_{group.origin}"] += int(group.num_loss_tokens_G.sum())
    return counts


def shares_of(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the shares that revisits and reuses have, of counts of any span; nan where nothing was counted.

    The revisit share is of what was played; the reuse share of what was trained on, or for prompts of all groups.
    """

    def share(part: float, whole: float) -> float:
        return part / whole if whole else float("nan")

    shares = {}
    for what, name in (("groups", "prompts"), ("signal", "signal"), ("tokens", "tokens")):
        fresh, revisit, reuse = (counts.get(f"num_{what}_{origin}", 0) for origin in ORIGINS)
        shares[f"revisit_share_{name}"] = share(revisit, fresh + revisit)
        shares[f"reuse_share_{name}"] = share(reuse, fresh + revisit + reuse)
    return shares


def visit_counts(visits: Iterable[Visit]) -> Counter:
    """Count graded visits by timing, and lapses; the memory itself counts over its lifetime what it refused."""
    counts: Counter = Counter({f"num_visits_{timing}": 0 for timing in TIMINGS} | {"num_lapses": 0})
    for visit in visits:
        counts[f"num_visits_{visit.timing}"] += bool(visit.grade)
        counts["num_lapses"] += visit.is_lapse
    return counts


def age_counts(reused: Sequence[GroupMeta], now: int) -> dict[str, int]:
    """Count reused groups by age in iterations: up to 1, 2, 4, ..., and more.

    An orphan may be of an iteration that has not come again yet: it counts as young.
    """
    ages = [max(1, now - born_of(group)) for group in reused]
    counts, low = {}, 0
    for high in AGES:
        counts[f"reuse_age_to_{high}"] = sum(low < age <= high for age in ages)
        low = high
    counts["reuse_age_above"] = sum(age > low for age in ages)
    return counts


def born_of(group: GroupMeta) -> int:
    """Return the iteration a group was played in: the first part of its id."""
    return int(group.group_id.split(".", 1)[0])
