"""The driver's side of retention: which stored answers an update holds, and how they fare. Handles no tokens.

    remember    draw     stored answers of domains that are not being learned now
    batch       add_to   held answers to the shards
    look back   report   cross-entropy, Delta and cosines to the metrics

A domain is held unless it has a share of the *fresh* prompts, or was among them in the last `retain_window` iterations.
Revisits do not count: with them a domain would be released when holding it matters. Prompts in the batch are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rllib_srl.batch.retention import split
from rllib_srl.batch.shard import TrainingShard
from rllib_srl.learner.group.learners import Learners
from rllib_srl.learner.retention import HeldReport
from rllib_srl.losses.retention import scales
from rllib_srl.replay.client import ReplayClient
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.types import GroupMeta

COMPARED_EVERY = 10  # iterations: gradients of held domains are compared with that of the batch
CONFLICT = -0.3  # cosine
RATE = 0.05  # weight of a group in the faded pass rate
LEAST_GROUPS = 20  # groups of a domain before its pass rate counts as its best
MARGIN = 0.1
UPDATES = 20


class Retention:
    """Retention of a run in which answers may be held."""

    def __init__(self, settings: ReplaySettings, memory: ReplayClient, learners: Learners, timeout_s: float) -> None:
        """Use the parts of a run."""
        self._settings, self._memory, self._learners, self._timeout_s = settings, memory, learners, timeout_s
        self._fresh_at: dict[str, int] = {}  # domain -> last iteration in which it was among the fresh prompts
        self._counts: dict[str, float] = {}
        self._watch = RetentionWatch(settings)
        self._compared: tuple[str, ...] = ()

    def draw(
        self, groups: Sequence[GroupMeta], reused: Sequence[GroupMeta], now: int, learned: Collection[str] = ()
    ) -> list[GroupMeta]:
        """Draw the answers that this iteration's update holds.

        Args:
            groups: those that the iteration has played.
            reused: those that its update trains on again.
            now: number of the iteration.
            learned: domains with a share of its fresh prompts; they are not held.
        """
        self._fresh_at |= {group.prompt.domain: now for group in groups if group.origin == "fresh"}
        recent = {domain for domain, at in self._fresh_at.items() if now - at < self._settings.retain_window}
        without = sorted(recent.union(learned))
        keys = self.left_out([*groups, *reused])
        start = time.perf_counter()
        held = self._memory.draw_answers(self._settings.retain_answers, now, without, sorted(keys))
        self._counts = {"memory_s": time.perf_counter() - start}
        self._watch.observe(groups, held)
        self._compared = () if now % COMPARED_EVERY else tuple(sorted({group.prompt.domain for group in held}))
        return held

    def left_out(self, groups: Sequence[GroupMeta]) -> set[str]:
        """Return the keys of prompts whose answers an update on these groups does not hold."""
        return {group.prompt.key for group in groups}

    def add_to(self, shards: Sequence[TrainingShard], held: Sequence[GroupMeta]) -> None:
        """Set each shard's part of retention; `held` is what `draw` returned."""
        num_tokens = [int(group.num_loss_tokens_G.sum()) for group in held]
        factors = scales(num_tokens, [group.prompt.domain for group in held], self._settings.retain)
        for shard, part in zip(shards, split(held, factors, self._compared, len(shards)), strict=True):
            shard.retention = part
        self._counts |= {"num_held": len(held), "num_held_tokens": sum(num_tokens)}

    def report(self) -> tuple[dict[str, float], dict[str, dict[str, float]], list[str]]:
        """Return metrics of the answers that the update held, those by domain, and warnings."""
        reports: list[HeldReport] = self._learners.retention_report(self._timeout_s)
        of_all, by_domain = means_of([report.sums for report in reports])
        if (cosines := reports[0].cosines) is not None:
            of_all["cosine"] = cosines.of_all
            for domain, cosine in cosines.by_domain.items():
                by_domain[domain]["cosine"] = cosine
        warnings = self._watch.warnings(cosines.by_domain if cosines else {})
        return {**self._counts, **of_all}, by_domain, warnings

    def get_state(self) -> dict[str, Any]:
        """Return when each domain was last among the fresh prompts, and the state of warnings."""
        return {"fresh_at": dict(self._fresh_at), "watch": self._watch.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._fresh_at = dict(state["fresh_at"])
        self._watch.set_state(state["watch"])


def means_of(
    reports: Sequence[Mapping[str, Sequence[float]]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return mean cross-entropy and Delta per answer, nats, over all held answers (NaN without any) and by domain."""
    sums: dict[str, np.ndarray] = {}
    for report in reports:
        for domain, row in report.items():
            sums[domain] = sums.get(domain, np.zeros(3)) + np.array(row)
    of_all = _means(sum(sums.values(), np.zeros(3)))
    return of_all, {domain: _means(sums_3) for domain, sums_3 in sums.items()}


def _means(sums_3: np.ndarray) -> dict[str, float]:
    num, nll, delta = sums_3.tolist()
    return {"nll": nll / num, "delta": delta / num} if num else {"nll": float("nan"), "delta": float("nan")}


# --- warnings -------------------------------------------------------------------------------------


@dataclass
class DomainRecord:
    """Pass rate of a domain's revisits. Invariant: `best` is at least `rate` once `num_groups` is `LEAST_GROUPS`."""

    rate: float = 0.0  # faded pass rate
    num_groups: int = 0
    best: float = 0.0
    num_below: int = 0  # consecutive updates that held and revisited the domain while it was below its best


class RetentionWatch:
    """Warns where retention fails. Invariant: one object gives each warning only once.

    conflict     cosine of the gradients of a domain's held answers and of the rest of the update below `CONFLICT`
    below best   faded pass rate of a held domain's revisits more than `MARGIN` below their best, in `UPDATES`
                 consecutive updates that also revisited it; without revisits it is unknown

    The faded pass rate moves by `RATE` of the way to each revisited group. Fresh groups are not part of it: rules that
    draw hard prompts would always be below a best that these have set. One batch of a few prompts does not move it by
    `MARGIN`: its standard deviation is at most a sixth of a group's.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        """Start without records."""
        self._settings = settings
        self._records: dict[str, DomainRecord] = {}
        self._warned: set[tuple[str, ...]] = set()
        self._held: set[str] = set()
        self._revisited: set[str] = set()
        self._learned = "stored groups"  # domain of most fresh prompts, in the last iteration that had any

    def observe(self, groups: Sequence[GroupMeta], held: Sequence[GroupMeta]) -> None:
        """Note the groups that were played in an iteration, and the answers that its update holds."""
        revisits = [group for group in groups if group.origin == "revisit"]
        for group in revisits:
            if group.has_reward_G is None or group.has_reward_G.all():
                self._note(group.prompt.domain, float(group.is_success_G(self._settings.pass_reward).mean()))
        self._held = {answer.prompt.domain for answer in held}
        self._revisited = {group.prompt.domain for group in revisits}
        fresh = Counter(group.prompt.domain for group in groups if group.origin == "fresh")
        self._learned = max(sorted(fresh), key=fresh.__getitem__, default=self._learned)

    def _note(self, domain: str, rate: float) -> None:
        record = self._records.setdefault(domain, DomainRecord(rate))
        record.rate += RATE * (rate - record.rate)
        record.num_groups += 1
        if record.num_groups >= LEAST_GROUPS:
            record.best = max(record.best, record.rate)

    def warnings(self, cosines: Mapping[str, float]) -> list[str]:
        """Return the warnings after an iteration's update; `cosines` is by held domain, {} if it compared none."""
        return [*self._conflicts(cosines), *self._below_best()]

    def _conflicts(self, cosines: Mapping[str, float]) -> Iterator[str]:
        for domain, cosine in sorted(cosines.items()):
            if cosine < CONFLICT and self._is_new("conflict", domain, self._learned):
                yield (
                    f"learning {self._learned!r} undoes {domain!r}: the cosine of their gradients is {cosine:.2f}. "
                    f"A larger replay_retain than {self._settings.retain:g} keeps more, a smaller one learns more"
                )

    def _below_best(self) -> Iterator[str]:
        for domain in sorted(self._held & self._revisited & self._records.keys()):
            record = self._records[domain]
            is_below = record.rate < record.best - MARGIN
            record.num_below = record.num_below + 1 if is_below else 0
            if record.num_below >= UPDATES and self._is_new("below best", domain):
                yield (
                    f"{domain!r} was held for {UPDATES} updates and still passes {record.rate:.0%} of its revisits, "
                    f"at its best {record.best:.0%}: raise replay_retain ({self._settings.retain:g}), "
                    "replay_retain_answers or replay_revisit_fraction"
                )

    def _is_new(self, *warning: str) -> bool:
        is_new = warning not in self._warned
        self._warned.add(warning)
        return is_new

    def get_state(self) -> dict[str, Any]:
        """Return the records; warnings are repeated after a resume."""
        return {domain: asdict(record) for domain, record in self._records.items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._records = {domain: DomainRecord(**record) for domain, record in state.items()}
