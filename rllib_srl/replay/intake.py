"""Takes played groups into the tables of a memory: checks, measures, grades and stores each, and grows new items.

    group -> admit? -> item, new or known -> diversity -> grade, due date, history -> stored -> new items (`on_group`)

A refused group still grades an item that exists, because the recall test has happened; the episodes that its visit
names get no loss. A group with too few valid episodes grades nothing. Both count in the history of their prompt, with
an item or without (`replay/history.py`). A broken group (`admission.malformed`) is ignored: its numbers never reach a
row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rllib_srl.replay.admission.admission import Decode, Nearest, Refusal, admit, malformed
from rllib_srl.replay.diversity.tracker import DiversityTracker, Measured, diversity
from rllib_srl.replay.history import DomainStatistics, UnstoredHistories, after_visit, discounts
from rllib_srl.replay.items import Tables, key_of, rows_at
from rllib_srl.replay.payloads import decode, encode
from rllib_srl.replay.schedule.recall import Graded, Recall
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import Commit
from rllib_srl.replay.visits import OF_GROUP, GroupFacts, OnGroup, Visit, facts_of
from rllib_srl.types import Group, History, Prompt


@dataclass
class Entry:
    """A group on its way in."""

    group: Group
    facts: GroupFacts | None = None  # None: it is broken
    measured: Measured | None = None  # None: nothing is embedded
    slot: int | None = None  # of its item; None: it has none
    refusal: Refusal | None = None  # why it is not stored
    is_new: bool = False
    is_visit: bool = False  # of its item
    domain_place: int = 0  # number of the group among those of its domain, from 1; 0: it is not among them
    graded: Graded = field(default_factory=lambda: Graded(0))
    num_grown: int = 0

    def visit(self, history: History) -> Visit:
        """Return the outcome for the driver."""
        return Visit(
            group_id=self.group.group_id,
            key=self.group.prompt.key,
            refused=self.refusal.reason if self.refusal else "",
            without_loss=self.refusal.without_loss if self.refusal else (),
            is_new=self.is_new,
            timing=self.graded.timing,
            grade=self.graded.grade,
            pass_rate=self.facts.num_success / self.facts.size if self.facts else 0.0,
            is_lapse=self.graded.is_lapse,
            num_grown=self.num_grown,
            history=history,
        )


@dataclass
class Intake:
    """The way of played groups into a memory. Invariant: all that it changes is in the parts that it was given."""

    settings: ReplaySettings
    tables: Tables
    recall: Recall
    tracker: DiversityTracker | None
    statistics: DomainStatistics
    unstored: UnstoredHistories
    counts: Counter[str]
    generator: np.random.Generator  # of new items
    payload: Callable[[int], bytes]  # seq -> bytes of a stored group
    decode: Decode | None  # token ids -> text, for hooks of admission
    on_group: OnGroup | None
    max_prompt_tokens: int | None  # of a history that becomes an item

    def __post_init__(self) -> None:
        """Gather what every call reads of the settings."""
        self._discounting = (self.settings.history_by, self.settings.history_half_life)
        self._reads_recall = self.settings.reads_recall

    def histories(self, groups: Sequence[Group], policy_kl: float) -> list[History]:
        """Return the history of each group's prompt as a visit by its policy finds it."""
        found = []
        for group in groups:
            sums = (0.0, 0.0)
            if group.size:
                slot = self.tables.slot_of(key := key_of(group.prompt))
                rows_1 = self.unstored.rows([key]) if slot is None else rows_at(self.tables.items, [slot])
                version_1 = np.array([group.versions_G2.min()], np.float64)
                rho = float(discounts(*self._discounting, rows_1, version_1, policy_kl)[0])
                sums = (rho * float(rows_1["history_sum"][0]), rho * float(rows_1["history_count"][0]))
            found.append(History(*sums, self.statistics.mean(group.prompt.domain)))
        return found

    def take(
        self, groups: Sequence[Group], now: int, changes: Commit, is_played: bool, policy_kl: float
    ) -> list[Entry]:
        """Take in groups of distinct prompts, in order."""
        entries = [Entry(group) for group in groups]
        for entry in entries:
            entry.refusal = malformed(entry.group)
            if entry.refusal is None:
                entry.facts = facts_of(entry.group, self.settings.pass_reward)
                entry.slot = self.tables.slot_of(key_of(entry.group.prompt))
        whole = [(entry, entry.facts) for entry in entries if entry.facts is not None]
        if self.tracker is not None:
            slots = [-1 if entry.slot is None else entry.slot for entry, _ in whole]
            measured = self.tracker.measure([entry.group for entry, _ in whole], slots)
            for (entry, _), one in zip(whole, measured, strict=True):
                entry.measured = one
        for entry in entries:
            self._enter(entry, now, changes)
        tested = [
            (entry, facts)
            for entry, facts in whole
            if entry.slot is not None
            and (is_played or self.tables.items["visits"][entry.slot] == 0)
            and facts.num_rewarded
        ]
        if tested:
            self._grade([entry for entry, _ in tested], [facts for _, facts in tested], now, changes, policy_kl)
        for entry, facts in whole:
            if entry.is_visit or (is_played and entry.slot is None):
                entry.domain_place = self.statistics.note(entry.group.prompt.domain, facts.reward)
        if is_played:
            self._count_played(whole, policy_kl)
        stored = [(entry, facts) for entry, facts in whole if entry.refusal is None]
        for entry, facts in stored:
            self._keep(entry, facts, now, changes, policy_kl)
        for entry, _ in stored if is_played else ():
            entry.num_grown = self._grow(entry.group, now)
        return entries

    def _enter(self, entry: Entry, now: int, changes: Commit) -> None:
        """Check a group, and add its item if it is new."""
        group, facts = entry.group, entry.facts
        if facts is not None:
            entry.refusal = self._judged(entry, facts, changes)
            if entry.slot is None and entry.refusal is None and facts.size < self.settings.min_graded:
                entry.refusal = Refusal("ungraded", train=True)
        if entry.refusal is not None:
            self.counts[f"num_refused_{entry.refusal.reason}"] += 1
            self.counts["num_episodes_without_loss"] += len(entry.refusal.without_loss)
        elif entry.slot is None:
            entry.slot, entry.is_new = self._add_item(key_of(group.prompt), group.prompt, now), True

    def _judged(self, entry: Entry, facts: GroupFacts, changes: Commit) -> Refusal | None:
        """Return why a group is not stored, None if it is."""
        nearest = None
        # A known prompt is never a near duplicate, even if its answers have become similar to another prompt's.
        if entry.slot is None and entry.measured is not None and entry.measured.nearest is not None:
            other, similarity = entry.measured.nearest
            if other not in changes.removed_slots:
                nearest = Nearest(self.tables.prompt_of(other).key, similarity)
        refusal = admit(entry.group, self.settings, nearest, self.decode)
        if refusal is not None or entry.slot is None:
            return refusal
        for at in self.tables.groups_of(entry.slot):  # reading all payloads would cost too much
            row = self.tables.groups[at]
            if (row["num_tokens"], row["nll"]) == (facts.num_tokens, np.float32(facts.nll)) and np.array_equal(
                self.group(int(row["seq"]), changes).token_ids_N, entry.group.token_ids_N
            ):
                return Refusal("duplicate", train=True)
        return None

    def _grade(
        self, entries: Sequence[Entry], facts: Sequence[GroupFacts], now: int, changes: Commit, policy_kl: float
    ) -> None:
        """Grade visits and write the changed fields of their items' rows."""
        settings, slots = self.settings, [entry.slot for entry in entries if entry.slot is not None]
        size_N, variance_N, *others = (
            np.array([getattr(one, name) for one in facts])
            for name in ("size", "variance", "num_success", "reward", "nll", "version")
        )
        fields: dict[str, Any] = dict(zip(("num_success", "reward", "nll", "version"), others, strict=True))
        before_N = rows_at(self.tables.items, slots)
        fields |= after_visit(before_N, facts, *self._discounting, policy_kl)
        if self.tracker is not None:
            measured = [entry.measured for entry in entries if entry.measured is not None]
            novelty_N = np.array([one.novelty for one in measured])
            changes.vectors |= {slot: one.vector_D for slot, one in zip(slots, measured, strict=True)}
            fields |= {"diversity": diversity(variance_N, novelty_N), "novelty": novelty_N, "has_vector": True}
        fields |= {"pass_rate": fields["num_success"] / size_N, "group_size": size_N, "variance": variance_N}
        fields["visits"] = before_N["visits"] + 1
        if self._reads_recall:
            for entry, graded in zip(entries, self.recall.visit(slots, facts, now, **fields), strict=True):
                entry.graded = graded
        else:  # nothing reads grades: the item rests, and is then due at any time
            last_N = np.where(size_N >= settings.min_graded, now, before_N["last_review"])
            self.tables.update(slots, last_review=last_N, due=last_N + settings.min_recall_interval, **fields)
        for entry in entries:
            entry.is_visit = True

    def _count_played(self, whole: Sequence[tuple[Entry, GroupFacts]], policy_kl: float) -> None:
        """Count played groups by domain, and add those without an item to the histories of their prompts."""
        rewarded = [(entry.group.prompt, facts.variance) for entry, facts in whole if facts.num_rewarded]
        self.count_by_domain("num_groups", [prompt for prompt, _ in rewarded])
        self.count_by_domain("num_groups_without_signal", [prompt for prompt, variance in rewarded if not variance])
        noted = {
            key_of(entry.group.prompt): facts for entry, facts in whole if entry.slot is None and facts.num_rewarded
        }
        num_dropped = self.unstored.note(list(noted), list(noted.values()), *self._discounting, policy_kl)
        if num_dropped:
            self.counts["num_histories_dropped"] += num_dropped

    def count_by_domain(self, name: str, prompts: Iterable[Prompt]) -> None:
        """Add the prompts to a lifetime count of their domains."""
        self.counts.update(f"domains/{prompt.domain}/{name}" for prompt in prompts)

    def _add_item(self, key: int, prompt: Prompt, now: int) -> int:
        """Add an item, with the history of its prompt's refused groups; return its slot."""
        fields = {"due": now + self.settings.min_recall_interval, **self.unstored.take(key)}
        return self.tables.add_item(key, prompt, prompt.domain, now, **fields)

    def _keep(self, entry: Entry, facts: GroupFacts, now: int, changes: Commit, policy_kl: float) -> None:
        """Store a group."""
        group, slot = entry.group, entry.slot
        assert slot is not None
        if self.settings.history_by != "versions":  # the row has the version, but not these
            by_visits = int(self.tables.items["visits"][slot])
            history_at = policy_kl if self.settings.history_by == "kl" else by_visits
            group = replace(group, extra={**group.extra, "history_at": history_at})
        # Without a visit the group is no part of the history.
        clock = self.tables.items["history_clock"][slot] if entry.is_visit else -1.0
        evicted = self.store_group(
            slot, group, facts, changes, born=now, history_clock=clock, domain_place=entry.domain_place
        )
        self.counts["num_groups_replaced"] += len(evicted)

    def store_group(
        self, slot: int, group: Group, facts: GroupFacts, changes: Commit, **fields: Any
    ) -> list[int]:
        """Store a group under a new number; return the numbers of those that left for it."""
        seq, payload = self.tables.next_group_seq, encode(group)
        changes.payloads[seq] = payload
        fields |= {name: getattr(facts, name) for name in OF_GROUP}
        _, evicted = self.tables.add_group(slot, group.group_id, num_bytes=len(payload), **fields)
        changes.removed_groups += evicted
        return evicted

    def _grow(self, group: Group, now: int) -> int:
        """Add the new items that `on_group` makes of a stored group; known prompts are left out."""
        if self.on_group is None:
            return 0
        num = 0
        for prompt in self.on_group(group, self.max_prompt_tokens, self.generator):
            if self.tables.slot_of(key := key_of(prompt)) is None:
                self._add_item(key, prompt, now)
                num += 1
        self.counts["num_grown"] += num
        return num

    def group(self, seq: int, changes: Commit, origin: str | None = None) -> Group:
        """Return a group that is stored or about to be."""
        payload = changes.payloads.get(seq) or self.payload(seq)
        return decode(payload, str(seq), origin)
