"""The driver's side of retention: which stored answers an update holds, and where new targets go. Handles no tokens.

    remember    draw     stored answers of domains that are not being learned now
    batch       add_to   held answers, and those whose targets are taken, to the shards
    look back   keep     targets to the memory, from object store to object store; KL, Delta and cosines to the metrics

A domain is held unless it was among the *fresh* prompts of the last `retain_window` iterations. Revisits do not count:
with them a domain would be released when holding it matters. Prompts in the batch are left out. The weight is `retain`
times the pass rate of the fresh prompts: what cannot be done yet is learned first, and held answers then return to
their targets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from rllib_srl.batch.retention import plan
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
PER_DOMAIN = 128  # maximum stored targets of a domain, from its newest groups: those of the best policy so far


class Retention:
    """Retention of a run with a memory and `replay_retain` above 0."""

    def __init__(
        self,
        settings: ReplaySettings,
        memory: ReplayClient,
        learners: Learners,
        timeout_s: float,
        gradings: Mapping[str, str],
    ) -> None:
        """Use the parts of a run; `gradings` has the `grading_digest` of each environment."""
        self._settings, self._memory, self._learners, self._timeout_s = settings, memory, learners, timeout_s
        self._gradings = dict(gradings)
        self._changed: list[str] = []  # environments whose grading has changed since their targets were stored
        self._warnings: list[str] = []
        self._fresh_at: dict[str, int] = {}  # domain -> last iteration in which it was among the fresh prompts
        self.weight = settings.retain  # weight of the KL in this update
        self._counts: dict[str, float] = {}
        self._watch = RetentionWatch(settings)
        self._compared: tuple[str, ...] = ()

    def draw(self, groups: Sequence[GroupMeta], now: int) -> list[GroupMeta]:
        """Draw the answers that the update of this iteration holds, from the groups it has played."""
        fresh = [group for group in groups if group.origin == "fresh"]
        self.weight = self._settings.retain * pass_rate(fresh, self._settings.pass_reward)
        self._fresh_at |= {group.prompt.domain: now for group in fresh}
        learned = [domain for domain, at in self._fresh_at.items() if now - at < self._settings.retain_window]
        keys = {group.prompt.key for group in groups}
        self._memory_s = 0.0
        with self._timed():
            self._num_outdated = self._drop_outdated(now)
            held = self._memory.draw_targets(self._settings.retain_answers, now, learned, sorted(keys))
        self._watch.observe(groups, held)
        self._compared = () if now % COMPARED_EVERY else tuple(sorted({group.prompt.domain for group in held}))
        return held

    def _drop_outdated(self, now: int) -> int:
        """Remove the targets of environments whose grading has changed since the checkpoint; return their number."""
        changed, self._changed = self._changed, []
        num = self._memory.drop_targets(changed, now) if changed else 0
        if num:
            self._warnings.append(
                f"{', '.join(changed)}: config or code has changed since the checkpoint, so {num} stored answers may "
                "no longer be right and are not held; answers that are graded from now on give new targets"
            )
        return num

    def add_to(
        self,
        shards: Sequence[TrainingShard],
        held: Sequence[GroupMeta],
        stored: Sequence[tuple[GroupMeta, Collection[int]]],
        trained: Sequence[GroupMeta],
        oldest: int,
    ) -> None:
        """Set each shard's part of retention; `held` is what `draw` returned, for the rest see `plan`."""
        num_tokens = [int(group.num_loss_tokens_G.sum()) for group in held]
        factors = scales(num_tokens, [group.prompt.domain for group in held], self.weight)
        parts = plan(held, factors, stored, trained, len(shards), self._settings.pass_reward, oldest)
        for shard, part in zip(shards, parts, strict=True):
            shard.retention = replace(part, compared=self._compared)
        self._counts = {
            "weight": self.weight,
            "num_outdated": self._num_outdated,
            "num_held": len(held),
            "num_held_tokens": sum(num_tokens),
            "num_taken": len(parts[0].taken) + sum(len(part.scored) for part in parts),
            "num_scored": sum(len(part.scored) for part in parts),
        }

    def keep(self, now: int) -> tuple[dict[str, float], dict[str, dict[str, float]], list[str]]:
        """Send the update's targets to the memory; return metrics of held answers, those by domain, and warnings."""
        num_stored = 0
        if self._counts["num_taken"]:
            with self._timed():
                num_stored = self._memory.add_targets(self._learners.take_targets(), now, PER_DOMAIN)
        reports: list[HeldReport] = self._learners.retention_report(self._timeout_s)
        of_all, by_domain = means_of([report.sums for report in reports])
        if (cosines := reports[0].cosines) is not None:
            of_all["cosine"] = cosines.of_all
            for domain, cosine in cosines.by_domain.items():
                by_domain[domain]["cosine"] = cosine
        counts = {**self._counts, "num_stored": num_stored, "memory_s": self._memory_s}
        warnings, self._warnings = self._warnings, []
        warnings += self._watch.warnings(cosines.by_domain if cosines else {})
        return {**counts, **of_all}, by_domain, warnings

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._memory_s += time.perf_counter() - start

    def get_state(self) -> dict[str, Any]:
        """Return when each domain was last among the fresh prompts, the state of warnings, and grading digests."""
        return {"fresh_at": dict(self._fresh_at), "watch": self._watch.get_state(), "gradings": dict(self._gradings)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._fresh_at = dict(state["fresh_at"])
        self._watch.set_state(state["watch"])
        self._changed = [name for name, own in self._gradings.items() if state["gradings"].get(name, own) != own]


def pass_rate(groups: Sequence[GroupMeta], pass_reward: float) -> float:
    """Return the fraction of the groups' answers that are right, 1 without any group."""
    return fmean(float(group.is_success_G(pass_reward).mean()) for group in groups) if groups else 1.0


def means_of(
    reports: Sequence[Mapping[str, Sequence[float]]],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return the mean KL and Delta per answer, nats, over all held answers (NaN without any) and by domain."""
    sums: dict[str, np.ndarray] = {}
    for report in reports:
        for domain, row in report.items():
            sums[domain] = sums.get(domain, np.zeros(3)) + np.array(row)
    of_all = _means(sum(sums.values(), np.zeros(3)))
    return of_all, {domain: _means(sums_3) for domain, sums_3 in sums.items()}


def _means(sums_3: np.ndarray) -> dict[str, float]:
    num, kl, delta = sums_3.tolist()
    return {"kl": kl / num, "delta": delta / num} if num else {"kl": float("nan"), "delta": float("nan")}


# --- warnings -------------------------------------------------------------------------------------


@dataclass
class DomainRecord:
    """A domain's pass rate over time. Invariant: `best` is at least `rate` once `num_groups` is `LEAST_GROUPS`."""

    rate: float = 0.0  # faded pass rate
    num_groups: int = 0
    best: float = 0.0
    num_below: int = 0  # consecutive updates that held the domain while it was below its best


class RetentionWatch:
    """Warns where retention fails. Invariant: one object gives each warning only once.

    conflict     cosine of the gradients of a domain's held answers and of the rest of the update below `CONFLICT`
    below best   faded pass rate of a held domain more than `MARGIN` below its best, in `UPDATES` consecutive updates

    The faded pass rate of a domain moves by `RATE` of the way to each of its played groups, fresh or revisited.
    One batch of a few prompts does not move it by `MARGIN`: its standard deviation is at most a sixth of a group's.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        """Start without records."""
        self._settings = settings
        self._records: dict[str, DomainRecord] = {}
        self._warned: set[tuple[str, ...]] = set()
        self._held: set[str] = set()
        self._learned = ""

    def observe(self, groups: Sequence[GroupMeta], held: Sequence[GroupMeta]) -> None:
        """Note the groups that were played in an iteration, and the answers that its update holds."""
        for group in groups:
            if group.has_reward_G is None or group.has_reward_G.all():
                self._note(group.prompt.domain, float(group.is_success_G(self._settings.pass_reward).mean()))
        self._held = {answer.prompt.domain for answer in held}
        fresh = Counter(group.prompt.domain for group in groups if group.origin == "fresh")
        self._learned = max(sorted(fresh), key=fresh.__getitem__, default="")

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
        for domain in sorted(self._held & self._records.keys()):
            record = self._records[domain]
            is_below = record.rate < record.best - MARGIN
            record.num_below = record.num_below + 1 if is_below else 0
            if record.num_below >= UPDATES and self._is_new("below best", domain):
                yield (
                    f"{domain!r} was held for {UPDATES} updates and still passes {record.rate:.0%} of its answers, "
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
