"""Takes played groups into the tables of a memory: checks, measures, grades and stores each, and grows new items.

    group -> admit? -> item, new or known -> diversity -> grade, due date, history -> stored -> new items (`on_group`)

A refused group still grades an item that exists, because the recall test has happened, and counts in its history; the
episodes that its visit names get no loss. A group with too few valid episodes grades nothing. A broken group
(`admission.malformed`) is ignored: its numbers never reach a row.

The hook `replay_on_group(group, room, generator) -> prompts` makes new items from each played group that is stored
(docs/memory.md has an example). `room` is the maximum tokens of a prompt that leave room for a turn, None without a
limit; the state of `generator` is saved. With the hook, groups keep the policy's texts: `group.extra["turns"]`, a list
of texts for each episode, and `group.extra["can_iterate"]`, if the environment defines it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.batch.posterior import NO_HISTORY
from rllib_srl.common.rules import Rules
from rllib_srl.replay.admission import Decode, Refusal, admit, malformed
from rllib_srl.replay.diversity.embedders import Embedder
from rllib_srl.replay.diversity.neighbours import diversity, measure
from rllib_srl.replay.history import OF_GROUP, DomainStatistics, GroupFacts, after_visit, facts_of, history_of
from rllib_srl.replay.items import Tables, key_of
from rllib_srl.replay.payloads import encode
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, RatedGroups, corrected, rewards_of, with_ratings
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import Store
from rllib_srl.types import PEOPLE, Group, History, Prompt

MOST_AT_ONCE = 128  # groups before items above capacity are evicted, so that new items are candidates too
OnGroup = Callable[[Group, int | None, np.random.Generator], Iterable[Prompt]]
ON_GROUP: Rules[OnGroup] = Rules("replay_on_group", {})


@dataclass
class Visit:
    """Outcome of adding one played group. Invariant: `refused` is empty exactly if the group was stored."""

    group_id: str
    key: str
    refused: str = ""  # one of `admission.REASONS`, or the reason of a hook
    without_loss: tuple[int, ...] = ()  # episodes that are not trained on
    is_new: bool = False  # the item did not exist before
    grade: int = 0  # 1 to 4; 0 where nothing was graded
    pass_rate: float = 0.0
    is_lapse: bool = False
    num_grown: int = 0  # items that `on_group` added
    history: History = NO_HISTORY  # before the call of `add`, discounted for this visit

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Visit:
        read = {"without_loss": tuple(values["without_loss"]), "history": History(*values["history"])}
        return cls(**{**values, **read})


@dataclass
class Entry:
    """A well-formed group that is being added, and its outcome."""

    group: Group
    visit: Visit
    facts: GroupFacts
    slot: int | None  # slot of its item; None: it has none
    vector_D: np.ndarray | None = None  # None: nothing is embedded
    novelty: float = 0.0
    is_visit: bool = False  # is this a visit of its item?


@dataclass
class Intake:
    """Takes played and rated groups into a memory. Invariant: it changes only the objects that it was given."""

    settings: ReplaySettings
    tables: Tables
    recall: Recall
    embedder: Embedder | None
    statistics: DomainStatistics
    counts: Counter[str]
    store: Store
    generator: np.random.Generator  # generator of new items
    decode: Decode | None  # token ids -> text, for hooks of admission
    on_group: OnGroup | None
    max_prompt_tokens: int | None  # longest history that becomes an item

    def __post_init__(self) -> None:
        self._reads_recall = self.settings.reads_recall

    def history_of(self, group: Group) -> History:
        """Return the history of a group's prompt as a visit by its policy finds it."""
        slot, mean = self.tables.slot_of(key_of(group.prompt)), self.statistics.mean(group.prompt.domain)
        if slot is None or not group.size:
            return History(0.0, 0.0, mean)
        version, half_life = int(group.versions_G2.min()), self.settings.history_half_life
        return history_of(self.tables.items[slot], version, half_life, mean)

    def take(self, played: Sequence[tuple[Group, Visit]], now: int, is_played: bool) -> None:
        """Take in groups of distinct prompts, in order; record the outcome in each visit."""
        entries = list[Entry]()
        for group, visit in played:
            if refusal := malformed(group):
                self._refuse(visit, refusal)
                continue
            facts = facts_of(group, self.settings.pass_reward)
            visit.pass_rate = facts.num_success / facts.size
            entries.append(Entry(group, visit, facts, self.tables.slot_of(key_of(group.prompt))))
        if self.embedder is not None and entries:
            slots, groups = [-1 if e.slot is None else e.slot for e in entries], [entry.group for entry in entries]
            measured = measure(self.embedder, groups, slots, self.tables, self.settings.diversity_device)
            for entry, vector_D, novelty in zip(entries, *measured, strict=True):
                entry.vector_D, entry.novelty = vector_D, novelty
        for entry in entries:
            self._enter(entry, now)
        visits_N = self.tables.items["visits"]
        tested = [e for e in entries if e.slot is not None and (is_played or not visits_N[e.slot])]
        self._grade([entry for entry in tested if entry.facts.num_rewarded], now)
        for entry in entries:
            if entry.is_visit or (is_played and entry.slot is None and entry.facts.num_rewarded):
                self.statistics.note(entry.group.prompt.domain, entry.facts.reward)
        if is_played:
            rewarded = [(entry.group.prompt, entry.facts) for entry in entries if entry.facts.num_rewarded]
            self.count_by_domain("num_groups", [prompt for prompt, _ in rewarded])
            zero_variance = [prompt for prompt, visit in rewarded if not visit.variance]
            self.count_by_domain("num_groups_zero_variance", zero_variance)
        stored = [entry for entry in entries if not entry.visit.refused]
        for entry in stored:
            self._store(entry, now)
        for entry in stored if is_played and self.on_group else ():
            entry.visit.num_grown = self._grow(entry.group, now)

    def _refuse(self, visit: Visit, refusal: Refusal) -> None:
        visit.refused, visit.without_loss = refusal.reason, () if refusal.train else refusal.episodes
        self.counts[f"num_refused_{refusal.reason}"] += 1
        self.counts["num_episodes_without_loss"] += len(visit.without_loss)

    def _enter(self, entry: Entry, now: int) -> None:
        refusal, slot = admit(entry.group, self.settings, self.decode), entry.slot
        if refusal is None and slot is None and entry.facts.size < self.settings.min_graded:
            refusal = Refusal("ungraded", train=True)
        elif refusal is None and slot is not None and self._is_duplicate(entry, slot):
            refusal = Refusal("duplicate", train=True)
        if refusal is not None:
            self._refuse(entry.visit, refusal)
        elif entry.slot is None:
            entry.slot, entry.visit.is_new = self._add_item(entry.group.prompt, now), True

    def _is_duplicate(self, entry: Entry, slot: int) -> bool:
        numbers, ids_N = (entry.facts.num_tokens, np.float32(entry.facts.nll)), entry.group.token_ids_N
        rows = [self.tables.groups[at] for at in self.tables.groups_of(slot)]
        same = [row for row in rows if (row["num_tokens"], row["nll"]) == numbers]  # few, whose payloads are read
        return any(np.array_equal(self.store.group(int(row["seq"])).token_ids_N, ids_N) for row in same)

    def _grade(self, entries: Sequence[Entry], now: int) -> None:
        """Grade visits and write the changed fields of their items' rows."""
        if not entries:
            return
        settings, slots = self.settings, [entry.slot for entry in entries if entry.slot is not None]
        facts = [entry.facts for entry in entries]
        size_N, variance_N, *others = (
            np.array([getattr(group, name) for group in facts])
            for name in ("size", "variance", "num_success", "reward", "nll")
        )
        fields: dict[str, Any] = dict(zip(("num_success", "reward", "nll"), others, strict=True))
        before_N = self.tables.items.at(slots)
        fields |= after_visit(before_N, facts, settings.history_half_life)
        if self.embedder is not None:
            novelty_N = np.array([entry.novelty for entry in entries])
            vectors_ND = np.stack([entry.vector_D for entry in entries if entry.vector_D is not None])
            self.tables.set_vectors(slots, vectors_ND)
            fields |= {"diversity": diversity(variance_N, novelty_N), "novelty": novelty_N, "has_vector": True}
        fields |= {"pass_rate": fields["num_success"] / size_N, "group_size": size_N, "variance": variance_N}
        fields["visits"] = before_N["visits"] + 1
        if self._reads_recall:
            grade_N, is_lapse_N = self.recall.visit(slots, facts, now, **fields)
            for entry, grade, is_lapse in zip(entries, grade_N.tolist(), is_lapse_N.tolist(), strict=True):
                entry.visit.grade, entry.visit.is_lapse = grade, is_lapse
        else:  # nothing reads grades: the item rests, and is then due at any time
            last_N = np.where(size_N >= settings.min_graded, now, before_N["last_review"])
            self.tables.items.update(slots, last_review=last_N, due=last_N + settings.min_recall_interval, **fields)
        for entry in entries:
            entry.is_visit = True

    def count_by_domain(self, name: str, prompts: Iterable[Prompt]) -> None:
        self.counts.update(f"domains/{prompt.domain}/{name}" for prompt in prompts)

    def _add_item(self, prompt: Prompt, now: int) -> int:
        due = now + self.settings.min_recall_interval
        return self.tables.add_item(key_of(prompt), prompt, prompt.domain, now, due=due)

    def _store(self, entry: Entry, now: int) -> None:
        assert entry.slot is not None
        tables = self.tables
        fields = self._written(tables.next_group_seq, entry.group, entry.facts)
        fields |= {"born": now, "in_history": entry.is_visit}
        _, num = tables.add_group(entry.slot, entry.group.group_id, self.settings.groups_per_item, **fields)
        self.counts["num_groups_replaced"] += num

    def _written(self, seq: int, group: Group, facts: GroupFacts) -> dict[str, Any]:
        """Write the payload of a group, and return the fields of its row that depend on it."""
        payload = encode(group)
        self.store.put("payloads", [(seq, payload)])
        return {"num_bytes": len(payload), **{name: getattr(facts, name) for name in OF_GROUP}}

    def _grow(self, group: Group, now: int) -> int:
        """Add the new items that `on_group` makes of a stored group; known prompts are left out."""
        num = 0
        for prompt in self.on_group(group, self.max_prompt_tokens, self.generator) if self.on_group else ():
            if self.tables.slot_of(key_of(prompt)) is None:
                self._add_item(prompt, now)
                num += 1
        self.counts["num_grown"] += num
        return num

    def rate(self, slot: int, at: int, ratings: RatedGroup, rated: RatedGroups) -> list[RatedAnswer]:
        """Set the ratings of a stored group, and note them; return all of them if one is new or differs, else []."""
        tables, row = self.tables, self.tables.groups[at].copy()
        seq = int(row["seq"])
        group = self.store.group(seq)
        seen = ratings.seen(group)
        rewards, earlier = rewards_of(seen), group.extra.get(PEOPLE, {}).get("rated", {})
        rated.note(ratings, rewards, earlier)
        if rewards == earlier:
            return []
        after = with_ratings(group, rewards, ratings.pass_reward)
        facts = [facts_of(group, self.settings.pass_reward) for group in (group, after)]
        # The mean of the domain has none of the new rewards.
        fields, in_history = corrected(tables.items[slot], row, self.settings.history_half_life, *facts)
        tables.groups.update([at], in_history=in_history, **self._written(seq, after, facts[1]))
        tables.items.update([slot], **fields)
        is_given = any(earlier.get(episode) != reward for episode, reward in rewards.items())  # not only taken back
        return [answer for answer in seen if answer.reward is not None] if is_given else []


def parts_of(played: Iterable[tuple[Group, Visit]]) -> Iterator[list[tuple[Group, Visit]]]:
    """Split played groups, in order, into parts of distinct prompts, each at most `MOST_AT_ONCE` long."""
    part: dict[str, tuple[Group, Visit]] = {}
    for group, visit in played:
        if len(part) == MOST_AT_ONCE or visit.key in part:
            yield list(part.values())
            part = {}
        part[visit.key] = group, visit
    if part:
        yield list(part.values())
