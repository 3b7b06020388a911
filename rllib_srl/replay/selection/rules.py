"""Selects items to revisit and groups to reuse: named rules, applied within domain quotas and the leech cap.

    Candidates ── quotas ──> each domain's slots ── rule ──> indices ── leech cap ──> exactly min(num, N), distinct

    rule(candidates, num, generator, settings) -> indices        user-defined: SELECTIONS["mine"] = rule

User-defined rules are described in rllib_srl/common/rules.py. `srl` is the rule of this project; the others are
baselines. `srl` fills the slots for items in this order:
    1  with probability `epsilon_new` each: a new item
    2  due items, by lateness x learnability x diversity, drawn with a temperature
    3  early items, lowest retrievability first, if there are too few due ones
No due item starves under `srl`: above temperature 0 each has a positive probability, and at 0 its lateness grows until
it is first. `signal` and the rules of `pool_rules.py` know no due dates: every item is their candidate (`WHOLE_POOL`).

Sources: Schaul et al. 2016, arXiv 1511.05952 (priorities); arXiv 2601.02648 (p(1 - p) for problems).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rllib_srl.common.rules import Rules
from rllib_srl.replay.schedule.load import whole
from rllib_srl.replay.selection import literature, pool_rules
from rllib_srl.replay.selection.candidates import (
    SETTING_NAMES,
    Candidates,
    SelectionSettings,
    faults_of,
    first,
    safe_log,
    tempered,
)
from rllib_srl.replay.selection.context import SIGNAL_NAMES, SignalSettings, signal_faults
from rllib_srl.replay.selection.literature import Proportional, importance_weights
from rllib_srl.replay.selection.quotas import quotas
from rllib_srl.replay.selection.signal import signal

__all__ = [
    "SELECTIONS",
    "SETTINGS_OF",
    "Candidates",
    "Carry",
    "Selected",
    "SelectionSettings",
    "importance",
    "importance_weights",
    "make_settings",
    "quotas",
    "select",
]

Rule = Callable[[Candidates, int, np.random.Generator, SelectionSettings], np.ndarray]


def srl(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Draw new candidates with probability `epsilon_new` a slot, the rest by priority.

    due item   (1 + overdue) (1 + c_l 4 p (1 - p)) (1 + c_d diversity), p the posterior mean of its recall
    group      (signal_floor + 4 variance) (1 + c_d diversity) exp(-age / age_scale) / (1 + uses)
    """
    new = np.flatnonzero(candidates.is_new) if settings.epsilon_new > 0 else np.empty(0, np.int64)
    num_new = min(int(generator.binomial(num, settings.epsilon_new)), len(new)) if len(new) else 0
    if num_new == 0:
        return _by_priority(candidates, num, generator, settings)
    drawn = generator.choice(new, num_new, replace=False)
    rest = np.setdiff1d(np.arange(len(candidates)), drawn)
    return np.concatenate([drawn, rest[_by_priority(candidates.take(rest), num - num_new, generator, settings)]])


def _by_priority(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    if candidates.are_groups:
        return tempered(_log_priority_of_groups(candidates, settings), num, generator, settings.temperature)
    due = np.flatnonzero(candidates.overdue >= 0)
    log_priority = _log_priority_of_items(candidates, settings)[due]
    drawn: np.ndarray = due[tempered(log_priority, min(num, len(due)), generator, settings.temperature)]
    if len(drawn) == num:
        return drawn
    early = np.flatnonzero(candidates.overdue < 0)
    filled = early[first(num - len(drawn), generator, candidates.retrievability[early])]
    return np.concatenate([drawn, filled])


def _log_priority_of_items(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    recall_N = candidates.posterior_mean
    log_priority_N: np.ndarray = (
        np.log1p(np.maximum(candidates.overdue, 0.0))
        + np.log1p(settings.learnability_coeff * 4 * recall_N * (1 - recall_N))
        + np.log1p(settings.diversity_coeff * candidates.diversity)
    )
    return log_priority_N


def _log_priority_of_groups(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    log_priority_N: np.ndarray = (
        np.log(settings.signal_floor + 4 * candidates.variance)
        + np.log1p(settings.diversity_coeff * candidates.diversity)
        - candidates.age / settings.age_scale
        - np.log1p(candidates.uses)
    )
    return log_priority_N


def fifo(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Take the longest since the last visit, then the first inserted: a queue whose drawn items move to the end."""
    return first(num, generator, -candidates.elapsed, candidates.seq)


def recent(candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings) -> np.ndarray:
    """Take the last inserted."""
    return first(num, generator, -candidates.seq)


def high_reward(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Draw uniformly among the ceil(f num) candidates of the highest mean reward of the last visit, f 2 as published.

    Differences from the source:
    1. Equal rewards are ordered at random, not by age.
    2. The source fills each domain's slots apart: here with `domain_quotas`.

    Source: the strategy "high_reward" of AGentCL (GRPO with experience replay on the domains of tau2), its
    `TrajectoryBuffer.sample`.
    """
    top = first(math.ceil(settings.high_reward_factor * num), generator, -candidates.reward)
    return generator.permutation(top)[:num]


def hardest(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Take the lowest pass rate of the last visit."""
    return first(num, generator, candidates.pass_rate)


def balanced(
    candidates: Candidates, num: int, generator: np.random.Generator, settings: SelectionSettings
) -> np.ndarray:
    """Divide the slots equally among domains, and draw uniformly within each."""
    domains = np.unique(candidates.domain)
    return _in_domains(uniform, candidates, num, generator, settings, dict.fromkeys(domains.tolist(), 1.0), {})[0]


def _learnability(candidates: Candidates, settings: SelectionSettings) -> np.ndarray:
    return safe_log(candidates.pass_rate * (1 - candidates.pass_rate))


uniform = Proportional(lambda candidates, settings: np.zeros(len(candidates)))
learnability = Proportional(_learnability)

_OWN: dict[str, Rule] = {
    "srl": srl,
    "signal": signal,
    "uniform": uniform,
    "fifo": fifo,
    "recent": recent,
    "high_reward": high_reward,
    "balanced": balanced,
    "hardest": hardest,
    "learnability": learnability,
    "per": literature.per,
    "fresh_per": literature.fresh_per,
    "exit": literature.exit,
    "nll_surprise": literature.nll_surprise,
    "pier": literature.pier,
    "difficulty_pool": literature.difficulty_pool,
    "exgrpo": literature.exgrpo,
    "repo": literature.repo,
    "rlep": literature.rlep,
    "greso": pool_rules.greso,
    "mopps": pool_rules.mopps,
    "spo": pool_rules.spo,
}
SELECTIONS: Rules[Rule] = Rules("selection", _OWN)

# Rules of prompts that read each one's history. Every item is a candidate, due or not, and they draw no groups.
WHOLE_POOL = ("signal", "greso", "mopps", "spo")
# Rules of prompts to which it matters how long an item is due; with one of your own only a spacing rule says so.
BY_DUE = ("srl", "fifo")
DATELESS = tuple(name for name in _OWN if name != "srl")  # rules that read neither due dates nor predicted recall
READ_HISTORY = ("mopps", "spo")  # read the discounted rewards of each item
# Rules with which unseen and stored prompts of a finite pool compete (`revisit_fraction = "auto"`).
POOL_RULES = (*WHOLE_POOL, "fifo", "uniform", "balanced")

COMMON = ("diversity_coeff", "leech_share", "reservoir_seed")  # also read by `select` and eviction
SETTINGS_OF: dict[str, tuple[str, ...]] = {
    "srl": ("temperature", "epsilon_new", "learnability_coeff", "signal_floor", "age_scale"),
    "signal": SIGNAL_NAMES,
    "uniform": (),
    "fifo": (),
    "recent": (),
    "high_reward": ("high_reward_factor",),
    "balanced": (),
    "hardest": (),
    "learnability": ("uniform_floor",),
    "per": ("uniform_floor", "per_alpha", "per_beta"),
    "fresh_per": ("uniform_floor", "per_alpha", "per_beta", "fresh_tau"),
    "exit": ("uniform_floor", "kappa"),
    "nll_surprise": ("temperature",),
    "pier": ("uniform_floor", "pier_lambda", "pier_base", "pier_alpha", "pier_beta"),
    "difficulty_pool": ("uniform_floor", "pool_hard", "pool_easy", "pool_hard_weight", "pool_easy_weight"),
    "exgrpo": ("exgrpo_sigma",),
    "repo": ("repo_strategy",),
    "rlep": ("uniform_floor", "rlep_min_success"),
    "greso": ("greso_least",),
    "mopps": ("mopps_target",),
    "spo": ("uniform_floor", "spo_floor"),
}


def make_settings(rule: str, values: Mapping[str, Any], beside: Iterable[str] = ()) -> SelectionSettings:
    """Build the settings of a rule from a dictionary; a name that the rule does not read is an error.

    A name that two rules read with different meanings (`kappa` of signal and of exit) is that of `rule`.

    Args:
        rule: a key of `SELECTIONS` or an import path; a user-defined rule may read every setting.
        values: setting -> value.
        beside: other rules whose settings may be in the same dictionary.

    Raises:
        ValueError: an unknown rule, or unknown names and values out of range, all at once.
    """
    rules = list(dict.fromkeys([rule, *beside]))
    for each in rules:
        SELECTIONS.named(each)
    read = {name for each in rules for name in SETTINGS_OF.get(each, SETTING_NAMES)} | set(COMMON)
    faults = [
        f"{name} = {value!r}; expected a setting of {' or '.join(rules)}: {sorted(read)}"
        for name, value in values.items()
        if name not in read
    ]
    reads = {each: SETTINGS_OF.get(each, SETTING_NAMES) for each in rules}
    reader = {name: next((each for each in rules if name in reads[each]), "") for name in read}
    of_signal = {name: value for name, value in values.items() if reader.get(name) == "signal"}
    others = {name: value for name, value in values.items() if name in read and name not in of_signal}
    faults += signal_faults(of_signal) + faults_of(others)
    if faults:
        raise ValueError("; ".join(faults))
    return SelectionSettings(**others, signal=SignalSettings(**of_signal))


@dataclass(frozen=True)
class Carry:
    """Fractions of slots carried to the next draw by rounding: of leeches in [0, 1), of each domain in [-1, 1]."""

    leeches: float = 0.0
    domains: Mapping[int, float] = field(default_factory=dict)


class Selected(NamedTuple):
    """The drawn indices, and the carry for the next call of `select`."""

    indices: np.ndarray
    carry: Carry


def select(
    rule: str,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    settings: SelectionSettings,
    domain_weights: Mapping[int, float] | None = None,
    is_leech_N: np.ndarray | None = None,
    carry: Carry | None = None,
    applied: Rule | None = None,
) -> Selected:
    """Draw exactly min(num, N) distinct candidates, by a rule, within domain quotas and the leech cap.

    Leeches get at most floor(carry + leech_share num) slots; above that they only fill slots that no other candidate
    can fill. The cap and the fill take precedence over quotas.

    Args:
        rule: a key of `SELECTIONS` or an import path.
        candidates: N items or groups.
        num: slots to fill.
        generator: of this draw.
        settings: of the rule.
        domain_weights: domain -> weight of its share of the slots; None: no quotas.
        is_leech_N: which candidates are leeches; None: none.
        carry: `Selected.carry` of the previous call.
        applied: called in place of the rule, to record its reasons.

    Raises:
        ValueError: an unknown rule, a mask of the wrong length, or a rule that breaks its contract.
    """
    found = applied or SELECTIONS.named(rule)
    if is_leech_N is not None and len(is_leech_N) != len(candidates):
        raise ValueError(f"is_leech_N has {len(is_leech_N)} entries, candidates have {len(candidates)}")
    carry, num = carry or Carry(), min(num, len(candidates))
    is_leech_N = np.zeros(len(candidates), bool) if is_leech_N is None else np.asarray(is_leech_N, bool)
    max_leeches, leech_carry = whole(carry.leeches + settings.leech_share * num)

    def draw(among: np.ndarray, count: int) -> tuple[np.ndarray, Mapping[int, float]]:
        inside = candidates if len(among) == len(candidates) else candidates.take(among)
        drawn, left = _in_domains(found, inside, count, generator, settings, domain_weights, carry.domains)
        _check_rule(rule, drawn, count, len(among))
        return among[drawn], left

    drawn, domain_carry = draw(np.arange(len(candidates)), num)
    leeches = drawn[is_leech_N[drawn]]
    if len(leeches) > max_leeches:
        is_allowed_N = ~is_leech_N
        is_allowed_N[draw(leeches, max_leeches)[0]] = True
        among, rest = np.flatnonzero(is_allowed_N), np.flatnonzero(~is_allowed_N)
        drawn, domain_carry = draw(among, min(num, len(among)))
        drawn = np.concatenate([drawn, draw(rest, num - len(drawn))[0]])
    return Selected(drawn, Carry(leech_carry, domain_carry))


def importance(
    rule: str,
    candidates: Candidates,
    indices: np.ndarray,
    settings: SelectionSettings,
    domain_weights: Mapping[int, float] | None = None,
) -> np.ndarray:
    """Return the loss weight of each drawn group, in (0, 1]: its importance weight, 1 for a rule without them.

    The weights correct for the rule's preferences within a domain. Domain shares are intended and are not corrected.

    Args:
        rule: as for `select`, as are `candidates` and `settings`.
        indices: drawn by `select`.
        domain_weights: as passed to `select`.
    """
    found = SELECTIONS.named(rule)
    if not candidates.are_groups or not len(indices) or not isinstance(found, Proportional) or not found.beta:
        return np.ones(len(indices))
    if domain_weights is None:
        return importance_weights(found, candidates, indices, settings)
    weight_N = np.ones(len(indices))
    for domain in np.unique(candidates.domain[indices]):
        inside, is_drawn_N = np.flatnonzero(candidates.domain == domain), candidates.domain[indices] == domain
        at = np.searchsorted(inside, indices[is_drawn_N])
        weight_N[is_drawn_N] = importance_weights(found, candidates.take(inside), at, settings)
    return weight_N


def _in_domains(
    rule: Rule,
    candidates: Candidates,
    num: int,
    generator: np.random.Generator,
    settings: SelectionSettings,
    weights: Mapping[int, float] | None,
    carry: Mapping[int, float],
) -> tuple[np.ndarray, Mapping[int, float]]:
    """Apply a rule within each domain's slots; return the indices and the domains' carry."""
    if weights is None:
        return np.asarray(rule(candidates, num, generator, settings)), carry
    domains, counts = np.unique(candidates.domain, return_counts=True)
    slots = quotas(num, weights, dict(zip(domains.tolist(), counts.tolist())), generator, carry)
    parts = [np.empty(0, np.int64)]
    for domain, count in slots.num.items():
        if count > 0:
            inside = np.flatnonzero(candidates.domain == domain)
            parts.append(inside[rule(candidates.take(inside), count, generator, settings)])
    return np.concatenate(parts), slots.carry


def _check_rule(rule: str, drawn: np.ndarray, num: int, num_candidates: int) -> None:
    distinct = np.unique(drawn)
    in_range = len(drawn) == 0 or (distinct[0] >= 0 and distinct[-1] < num_candidates)
    if len(drawn) != num or len(distinct) != num or not in_range:
        raise ValueError(
            f"selection {rule!r} returned {len(drawn)} indices, {len(distinct)} of them distinct; "
            f"expected {num} distinct ones below {num_candidates}"
        )
