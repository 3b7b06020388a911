"""Takes played groups into the tables of a memory: checks, measures, grades and stores each, and grows new items.

    group -> admit? -> item, new or known -> diversity -> grade, due date, history -> stored -> new items (`on_group`)

A refused group still grades an item that exists, because the recall test has happened, and counts in its history; the
episodes that its visit names get no loss. A group with too few valid episodes grades nothing. A broken group
(`admission.malformed`) is ignored: its numbers never reach a row.

The hook `replay_on_group` makes new items from each played group that is stored:

    def mine(group, room, generator):                       replay_on_group="my_module:mine"
        yield replace(group.prompt, history=(*group.prompt.history, group.extra["turns"][0][0]))

Arguments: the group; `room`, the most tokens of a prompt that leave room for a turn, None without a limit; a generator
whose state is saved. Known prompts are left out. With the hook, groups keep the policy's texts: `group.extra["turns"]`,
a list of texts for each episode, and `group.extra["can_iterate"]`, if the environment says it.
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
from rllib_srl.replay.diversity.tracker import DiversityTracker, Measured, diversity
from rllib_srl.replay.history import OF_GROUP, DomainStatistics, GroupFacts, after_visit, facts_of, history_at
from rllib_srl.replay.items import Tables, key_of, rows_at
from rllib_srl.replay.payloads import decode, encode
from rllib_srl.replay.ratings import RatedAnswer, RatedGroup, RatedGroups, corrected, rewards_of, with_ratings
from rllib_srl.replay.schedule.recall import Recall
from rllib_srl.replay.settings import ReplaySettings
from rllib_srl.replay.store import Store
from rllib_srl.types import PEOPLE, Group, History, Prompt

MOST_AT_ONCE = 128  # groups before items above capacity are evicted, so that new items are candidates too
OnGroup = Callable[[Group, int | None, np.random.Generator], Iterable[Prompt]]
ON_GROUP: Rules[OnGroup] = Rules("replay_on_group", {})


@dataclass(frozen=True)
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

    def as_dict(self) -> dict[str, Any]:
        """Return JSON types, for the store."""
        return {**vars(self), "without_loss": list(self.without_loss), "history": list(self.history)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Visit:
        """Return the visit whose `as_dict` this is."""
        read = {"without_loss": tuple(values["without_loss"]), "history": History(*values["history"])}
        return cls(**{**values, **read})


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
    grade: int = 0
    is_lapse: bool = False
    num_grown: int = 0

    def visit(self, history: History) -> Visit:
        """Return the outcome for the driver."""
        return Visit(
            group_id=self.group.group_id,
            key=self.group.prompt.key,
            refused=self.refusal.reason if self.refusal else "",
            without_loss=self.refusal.without_loss if self.refusal else (),
            is_new=self.is_new,
            grade=self.grade,
            pass_rate=self.facts.num_success / self.facts.size if self.facts else 0.0,
            is_lapse=self.is_lapse,
            num_grown=self.num_grown,
            history=history,
        )


@dataclass
class Intake:
    """The way of played and rated groups into a memory. Invariant: all that it changes is in what it was given."""

    settings: ReplaySettings
    tables: Tables
    recall: Recall
    tracker: DiversityTracker | None
    statistics: DomainStatistics
    counts: Counter[str]
    store: Store
    generator: np.random.Generator  # of new items
    decode: Decode | None  # token ids -> text, for hooks of admission
    on_group: OnGroup | None
    max_prompt_tokens: int | None  # of a history that becomes an item

    def __post_init__(self) -> None:
        """Gather what every call reads of the settings."""
        self._reads_recall = self.settings.reads_recall

    def history_of(self, group: Group) -> History:
        """Return the history of a group's prompt as a visit by its policy finds it."""
        slot, mean = self.tables.slot_of(key_of(group.prompt)), self.statistics.mean(group.prompt.domain)
        if slot is None or not group.size:
            return History(0.0, 0.0, mean)
        version, half_life = int(group.versions_G2.min()), self.settings.history_half_life
        return history_at(self.tables.items[slot], version, half_life, mean)

    def take(self, groups: Sequence[Group], now: int, is_played: bool) -> list[Entry]:
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
            self._enter(entry, now)
        tested = [
            (entry, facts)
            for entry, facts in whole
            if entry.slot is not None
            and (is_played or self.tables.items["visits"][entry.slot] == 0)
            and facts.num_rewarded
        ]
        if tested:
            self._grade([entry for entry, _ in tested], [facts for _, facts in tested], now)
        for entry, facts in whole:
            if entry.is_visit or (is_played and entry.slot is None):
                self.statistics.note(entry.group.prompt.domain, facts.reward)
        if is_played:
            rewarded = [(entry.group.prompt, facts.variance) for entry, facts in whole if facts.num_rewarded]
            self.count_by_domain("num_groups", [prompt for prompt, _ in rewarded])
            self.count_by_domain("num_groups_without_signal", [prompt for prompt, variance in rewarded if not variance])
        stored = [(entry, facts) for entry, facts in whole if entry.refusal is None]
        for entry, facts in stored:
            assert entry.slot is not None
            num_replaced = self._store(entry.slot, entry.group, facts, born=now, in_history=entry.is_visit)
            self.counts["num_groups_replaced"] += num_replaced
        for entry, _ in stored if is_played and self.on_group else ():
            entry.num_grown = self._grow(entry.group, now)
        return entries

    def _enter(self, entry: Entry, now: int) -> None:
        """Check a group, and add its item if it is new."""
        group, facts = entry.group, entry.facts
        if facts is not None:
            entry.refusal = self._judged(entry, facts)
            if entry.slot is None and entry.refusal is None and facts.size < self.settings.min_graded:
                entry.refusal = Refusal("ungraded", train=True)
        if entry.refusal is not None:
            self.counts[f"num_refused_{entry.refusal.reason}"] += 1
            self.counts["num_episodes_without_loss"] += len(entry.refusal.without_loss)
        elif entry.slot is None:
            entry.slot, entry.is_new = self._add_item(group.prompt, now), True

    def _judged(self, entry: Entry, facts: GroupFacts) -> Refusal | None:
        """Return why a group is not stored, None if it is."""
        similarity = -1.0
        # A known prompt is never a near duplicate, even if its answers have become similar to another prompt's.
        if entry.slot is None and entry.measured is not None and entry.measured.nearest is not None:
            other, cosine = entry.measured.nearest
            similarity = similarity if other in self.tables.removed_slots else cosine
        refusal = admit(entry.group, self.settings, similarity, self.decode)
        if refusal is not None or entry.slot is None:
            return refusal
        for at in self.tables.groups_of(entry.slot):  # reading all payloads would cost too much
            row = self.tables.groups[at]
            if (row["num_tokens"], row["nll"]) == (facts.num_tokens, np.float32(facts.nll)) and np.array_equal(
                self._group(int(row["seq"])).token_ids_N, entry.group.token_ids_N
            ):
                return Refusal("duplicate", train=True)
        return None

    def _grade(self, entries: Sequence[Entry], facts: Sequence[GroupFacts], now: int) -> None:
        """Grade visits and write the changed fields of their items' rows."""
        settings, slots = self.settings, [entry.slot for entry in entries if entry.slot is not None]
        size_N, variance_N, *others = (
            np.array([getattr(one, name) for one in facts])
            for name in ("size", "variance", "num_success", "reward", "nll")
        )
        fields: dict[str, Any] = dict(zip(("num_success", "reward", "nll"), others, strict=True))
        before_N = rows_at(self.tables.items, slots)
        fields |= after_visit(before_N, facts, settings.history_half_life)
        if self.tracker is not None:
            measured = [entry.measured for entry in entries if entry.measured is not None]
            novelty_N = np.array([one.novelty for one in measured])
            self.tracker.pending |= {slot: one.vector_D for slot, one in zip(slots, measured, strict=True)}
            fields |= {"diversity": diversity(variance_N, novelty_N), "novelty": novelty_N, "has_vector": True}
        fields |= {"pass_rate": fields["num_success"] / size_N, "group_size": size_N, "variance": variance_N}
        fields["visits"] = before_N["visits"] + 1
        if self._reads_recall:
            grade_N, is_lapse_N = self.recall.visit(slots, facts, now, **fields)
            for entry, grade, is_lapse in zip(entries, grade_N.tolist(), is_lapse_N.tolist(), strict=True):
                entry.grade, entry.is_lapse = grade, is_lapse
        else:  # nothing reads grades: the item rests, and is then due at any time
            last_N = np.where(size_N >= settings.min_graded, now, before_N["last_review"])
            self.tables.update(slots, last_review=last_N, due=last_N + settings.min_recall_interval, **fields)
        for entry in entries:
            entry.is_visit = True

    def count_by_domain(self, name: str, prompts: Iterable[Prompt]) -> None:
        """Add the prompts to a lifetime count of their domains."""
        self.counts.update(f"domains/{prompt.domain}/{name}" for prompt in prompts)

    def _add_item(self, prompt: Prompt, now: int) -> int:
        due = now + self.settings.min_recall_interval
        return self.tables.add_item(key_of(prompt), prompt, prompt.domain, now, due=due)

    def _store(self, slot: int, group: Group, facts: GroupFacts, **fields: Any) -> int:
        """Store a group under a new number; return how many left for it."""
        payload = encode(group)
        self.store.put("payloads", [(self.tables.next_group_seq, payload)])
        fields |= {name: getattr(facts, name) for name in OF_GROUP}
        most = self.settings.groups_per_item
        return self.tables.add_group(slot, group.group_id, most, num_bytes=len(payload), **fields)[1]

    def _grow(self, group: Group, now: int) -> int:
        """Add the new items that `on_group` makes of a stored group; known prompts are left out."""
        num = 0
        for prompt in self.on_group(group, self.max_prompt_tokens, self.generator) if self.on_group else ():
            if self.tables.slot_of(key_of(prompt)) is None:
                self._add_item(prompt, now)
                num += 1
        self.counts["num_grown"] += num
        return num

    def _group(self, seq: int) -> Group:
        return decode(self.store.payload(seq), str(seq))

    def rate(
        self, groups: Sequence[RatedGroup], now: int, rated: RatedGroups
    ) -> tuple[dict[int, list[RatedAnswer]], int]:
        """Apply ratings, and note them in `rated`.

        Returns:
            The rated answers of each item by slot, where one is new or differs, and the number of groups among them
            that are older than `max_age` at the next draw.
        """
        graded, num_too_old = dict[int, list[RatedAnswer]](), 0
        for one in groups:
            slot, at = self.tables.slot_of(int(one.key, 16)), self.tables.group_at(one.group_id)
            if slot is None or at is None or at not in self.tables.groups_of(slot):
                rated.note(one)
                continue
            age = now + 1 - int(self.tables.groups["born"][at])
            if answers := self._rate_group(slot, at, one, rated):
                graded.setdefault(slot, []).extend(answers)
                num_too_old += age > self.settings.max_age
        return graded, num_too_old

    def _rate_group(self, slot: int, at: int, one: RatedGroup, rated: RatedGroups) -> list[RatedAnswer]:
        """Set the ratings of a stored group; return all of them if one is new or differs, else [].

        A payload is never changed, so the group is stored again under a new number, with the iteration, the policy
        versions and the number of uses that it had: the guards of reuse hold as before.
        """
        tables, row = self.tables, self.tables.groups[at].copy()
        seq, group = int(row["seq"]), self._group(int(row["seq"]))
        seen = one.seen(group)
        rewards, earlier = rewards_of(seen), group.extra.get(PEOPLE, {}).get("rated", {})
        rated.note(one, rewards, earlier)
        if rewards == earlier:
            return []
        after = with_ratings(group, rewards, one.pass_reward)
        facts = [facts_of(group, self.settings.pass_reward) for group in (group, after)]
        fields, in_history = corrected(tables.items[slot], row, self.settings.history_half_life, *facts)
        targets = {episode: self.store.target(seq, episode) for episode in tables.episodes_with_target(seq)}
        tables.remove_group(at)
        new = tables.next_group_seq
        # The mean of the domain has none of its new rewards.
        self._store(slot, after, facts[1], born=int(row["born"]), uses=int(row["uses"]), in_history=in_history)
        for episode, payload in targets.items():
            tables.targets[new, episode] = len(payload)
            self.store.put("targets", [(new, episode, payload)])
        if fields:
            tables.update([slot], **fields)
        is_given = any(earlier.get(episode) != reward for episode, reward in rewards.items())  # not only taken back
        return [answer for answer in seen if answer.reward is not None] if is_given else []


def parts_of(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Split groups, in order, into parts of distinct prompts, each at most `MOST_AT_ONCE` long."""
    part: dict[str, Group] = {}
    for group in groups:
        if len(part) == MOST_AT_ONCE or group.prompt.key in part:
            yield list(part.values())
            part = {}
        part[group.prompt.key] = group
    if part:
        yield list(part.values())
