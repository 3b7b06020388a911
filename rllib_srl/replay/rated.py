"""Apply people's ratings of stored answers: they become rewards of their groups, and grades of their items.

    RatedGroup: every rating of one group ──apply──> its episodes' rewards    stored again under a new seq, uses kept
                                              ├────> its item's grade, last visit and history
                                              └────> RatedGroups: what was applied, trained on, stale, or not found

The payload of a group is immutable, so a group whose rewards change is removed and added in one transaction, with the
iteration, the policy versions and the number of uses that it had: the guards of reuse hold as before. Its payload keeps
the rewards of the environment, so that a rating can be changed or taken back. The mapping of a `RatedGroup` replaces
the earlier one, so applying it twice changes nothing.

The correction of the history: an episode whose reward changes from r to r' adds rho (r' - r) to the sum of its prompt,
with the discount rho that the visit has by now (`replay/history.py`). The mean of the domain keeps the old reward; it
fades.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_srl.replay.history import TOLD_BY, discount
from rllib_srl.replay.journal.codec import decode, opened_payload
from rllib_srl.replay.journal.transaction import Change
from rllib_srl.replay.schedule.grading import GRADES, Evidence
from rllib_srl.replay.visits import OF_GROUP, GroupFacts, facts_of
from rllib_srl.types import PEOPLE, Group

if TYPE_CHECKING:
    from rllib_srl.replay.buffer import SRLReplayBuffer

GOOD = 3  # grade
Rewards = dict[str, float]  # episode, as text for JSON -> reward of its rating


@dataclass(frozen=True)
class RatedAnswer:
    """The rating of one episode. Invariant: `fingerprint` is that of the tokens that a person has seen."""

    episode: int
    fingerprint: str
    reward: float | None  # None: the rating was taken back
    is_binary: bool = False  # good or bad, not 1 to 5
    quality: float | None = None  # in [0, 1], for the grade; None: the reward


@dataclass(frozen=True)
class RatedGroup:
    """All ratings of the answers of one group, those taken back included."""

    group_id: str
    key: str  # of its prompt
    answers: tuple[RatedAnswer, ...]
    pass_reward: float | None = None  # lowest reward of a pass, where the environment pays no reward


def fingerprint(group: Group, g: int) -> str:
    """Return 16 hex digits that identify an episode by its prompt and tokens, the same in every process."""
    tokens = np.ascontiguousarray(group.stream(g), "<i4").tobytes()
    return hashlib.blake2b(group.prompt.key.encode() + tokens, digest_size=8).hexdigest()


@dataclass(frozen=True)
class Applied:
    """The last ratings of a group that were applied, also after the group has left the memory."""

    rewards: Rewards
    num_trained: int = 0  # times trained on with these
    num_stale: int = 0  # times trained on with earlier ratings

    def changed_to(self, rewards: Rewards) -> Applied:
        """Return the record under other ratings; what was trained on with a changed one is stale."""
        is_stale = any(rewards.get(episode) != reward for episode, reward in self.rewards.items())
        num_stale = self.num_trained if is_stale else 0
        return Applied(rewards, self.num_trained - num_stale, self.num_stale + num_stale)


class RatedGroups:
    """Which ratings a buffer has applied. Invariant: `get_state` holds all of it, so a snapshot restores it."""

    def __init__(self) -> None:
        """Start without ratings."""
        self.source, self.position = "", 0  # the ratings file, and the newest of its changes that was applied
        self.num_applied = self.num_changed = 0  # ratings that were new; that replaced or took back an earlier one
        self.applied: dict[str, Applied] = {}  # by group id
        self.unused: dict[str, int] = {}  # group id -> its ratings whose answer is not in the memory
        self.is_used = False  # whether any rating was applied or noted
        self._text: str | None = ""

    def advance(self, source: str, position: int) -> None:
        """Note that all changes of a ratings file up to `position` were applied."""
        self.source, self.position, self.is_used, self._text = source, position, True, None

    def count(self, num_applied: int, num_changed: int) -> None:
        """Add to the counts."""
        self.num_applied, self.num_changed = self.num_applied + num_applied, self.num_changed + num_changed
        self._text = None

    def note(self, group_id: str, applied: Applied | None, num_unused: int) -> None:
        """Set what is known of a group."""
        self._text = None
        if applied is not None:
            self.applied[group_id] = applied
        self.unused.pop(group_id, None)
        if num_unused:
            self.unused[group_id] = num_unused

    def note_trained(self, group_ids: Iterable[str]) -> None:
        """Count draws of rated groups."""
        for group_id in group_ids:
            one = self.applied.get(group_id)
            if one is not None and one.rewards:
                self.applied[group_id], self._text = replace(one, num_trained=one.num_trained + 1), None

    @property
    def num_unused(self) -> int:
        """Return the number of ratings whose answers are not in the memory."""
        return sum(self.unused.values())

    @property
    def num_stale_groups(self) -> int:
        """Return the number of groups that were trained on with a rating that was changed afterwards."""
        return sum(one.num_stale > 0 for one in self.applied.values())

    def get_state(self) -> str:
        """Return everything as JSON; "" without ratings."""
        if self._text is None:
            rows = {group_id: [one.rewards, one.num_trained, one.num_stale] for group_id, one in self.applied.items()}
            values = {"source": self.source, "position": self.position, "num_applied": self.num_applied}
            values |= {"num_changed": self.num_changed, "applied": rows, "unused": self.unused}
            self._text = json.dumps(values, separators=(",", ":"))
        return self._text

    def set_state(self, text: str) -> None:
        """Restore the state that `get_state` returned."""
        values = json.loads(text) if text else {}
        self.source, self.position = values.get("source", ""), values.get("position", 0)
        self.num_applied, self.num_changed = values.get("num_applied", 0), values.get("num_changed", 0)
        self.applied = {group_id: Applied(*row) for group_id, row in values.get("applied", {}).items()}
        self.unused = values.get("unused", {})
        self.is_used, self._text = bool(text), text


@dataclass(frozen=True)
class RatedUntil:
    """How far a ratings file was applied to a memory.

    Invariant: every change of `source` up to `position` was applied, or its group is among `unused`.
    """

    source: str = ""
    position: int = 0
    unused: tuple[str, ...] = ()  # ids of groups with ratings of answers that were not found

    @classmethod
    def of(cls, rated: RatedGroups) -> RatedUntil:
        """Return the position of one buffer."""
        return cls(rated.source, rated.position, tuple(rated.unused))


@dataclass(frozen=True)
class _Stored:
    """A rated group in the store."""

    slot: int  # of its item
    at: int  # of its row
    group: Group


def apply(buffer: SRLReplayBuffer, groups: Sequence[RatedGroup], now: int, change: Change) -> dict[str, int]:
    """Apply ratings as part of a transaction.

    Args:
        buffer: the buffer to change.
        groups: of distinct ids.
        now: the last finished training iteration.
        change: the open transaction.

    Returns:
        The number of ratings that are new to the memory, of those that replace or take back an earlier one, of items
        graded, and of groups that are older than `max_age` at the next draw.
    """
    num_applied, num_changed = buffer.rated.num_applied, buffer.rated.num_changed
    graded: dict[int, list[RatedAnswer]] = {}
    num_too_old = 0
    for one in groups:
        stored = _find(buffer, one, change)
        if stored is None:
            _miss(buffer.rated, one)
            continue
        age = now + 1 - int(buffer.store.groups["born"][stored.at])  # at the next draw
        if found := _apply_to(buffer, stored, one, change):
            graded.setdefault(stored.slot, []).extend(found)
            num_too_old += age > buffer.settings.max_age
    grades = {slot: grade_of(answers) for slot, answers in graded.items()}
    buffer.review(grades, now)
    return {
        "num_applied": buffer.rated.num_applied - num_applied,
        "num_changed": buffer.rated.num_changed - num_changed,
        "num_graded": len(grades),
        "num_too_old": num_too_old,
    }


def grade_of(answers: Collection[RatedAnswer]) -> int:
    """Return the grade of an item by the mean quality of its rated answers; good and bad alone are at most Good."""
    mean = float(np.mean([answer.reward if answer.quality is None else answer.quality for answer in answers]))
    grade = int(GRADES["rating"](Evidence(rating_N=np.array([mean])), scale="normalised")[0])
    return min(grade, GOOD) if all(answer.is_binary for answer in answers) else grade


def _find(buffer: SRLReplayBuffer, one: RatedGroup, change: Change) -> _Stored | None:
    slot = buffer.store.slot_of(int(one.key, 16))
    if slot is None:
        return None
    for at in reversed(buffer.store.groups_of(slot)):
        seq = int(buffer.store.groups["seq"][at])
        payload = change.payloads.get(seq) or buffer.ledger.payloads.read(seq)
        if opened_payload(payload, str(seq))[0]["group_id"] == one.group_id:
            return _Stored(slot, at, decode(payload, str(seq)))  # with its own origin
    return None


def _miss(rated: RatedGroups, one: RatedGroup) -> None:
    """Note ratings of a group that is not stored: those that were never applied are unused."""
    given = {str(answer.episode): answer.reward for answer in one.answers if answer.reward is not None}
    earlier = rated.applied.get(one.group_id)
    known: Rewards = earlier.rewards if earlier else {}
    num_unused = sum(known.get(episode) != reward for episode, reward in given.items())
    # The record keeps the rewards that were trained on: a later call finds the same difference.
    applied = replace(earlier.changed_to(given), rewards=known) if earlier else None
    rated.note(one.group_id, applied, num_unused)


def _apply_to(buffer: SRLReplayBuffer, stored: _Stored, one: RatedGroup, change: Change) -> list[RatedAnswer]:
    """Set the ratings of a stored group; return all of them if one is new or differs, else []."""
    group = stored.group
    seen = [a for a in one.answers if a.episode < group.size and fingerprint(group, a.episode) == a.fingerprint]
    rewards = {str(answer.episode): answer.reward for answer in seen if answer.reward is not None}
    num_unused = sum(answer.reward is not None for answer in one.answers) - len(rewards)
    earlier: Rewards = group.extra.get(PEOPLE, {}).get("rated", {})
    entry = buffer.rated.applied.get(one.group_id, Applied({}))
    buffer.rated.note(one.group_id, entry.changed_to(rewards) if rewards or entry.rewards else None, num_unused)
    facts = facts_of(group, buffer.settings.pass_reward)
    if rewards == earlier:
        return []
    num_changed = sum(rewards.get(episode) != reward for episode, reward in earlier.items())
    buffer.rated.count(len(rewards.keys() - earlier.keys()), num_changed)
    _store(buffer, stored, with_ratings(group, rewards, one.pass_reward), facts, change)
    is_given = any(earlier.get(episode) != reward for episode, reward in rewards.items())  # not only taken back
    return [answer for answer in seen if answer.reward is not None] if is_given else []


def with_ratings(group: Group, rewards: Mapping[str, float], pass_reward: float | None) -> Group:
    """Return a group with the rewards of its ratings, and those of the environment for all other episodes.

    Args:
        group: a group, with earlier ratings or without.
        rewards: of the rated episodes; {} restores the group as it was played.
        pass_reward: lowest reward of a pass, for an environment that pays no reward.
    """
    paid = group.extra[PEOPLE]["paid"] if PEOPLE in group.extra else group.rewards_G.tolist()
    extra = {name: value for name, value in group.extra.items() if name != PEOPLE}
    if group.is_unpaid:
        extra.pop("pass_reward", None)
        extra |= {"pass_reward": pass_reward} if pass_reward is not None and rewards else {}
    rewards_G = np.array([rewards.get(str(g), reward) for g, reward in enumerate(paid)], group.rewards_G.dtype)
    extra |= {PEOPLE: {"paid": paid, "rated": dict(rewards)}} if rewards else {}
    return replace(group, rewards_G=rewards_G, extra=extra)


def _store(buffer: SRLReplayBuffer, stored: _Stored, group: Group, before: GroupFacts, change: Change) -> None:
    """Replace a stored group, and correct its item."""
    store, facts = buffer.store, facts_of(group, buffer.settings.pass_reward)
    row = store.groups[stored.at].copy()
    fields, history_clock = _corrections(buffer, stored, row, before, group, facts)
    change.removed_groups.append(store.remove_group(stored.at))
    seq = store.header.next_group_seq
    store.add_group(
        stored.slot,
        born=int(row["born"]),
        uses=int(row["uses"]),
        num_bytes=change.keep(seq, group),
        history_clock=history_clock,
        **{name: getattr(facts, name) for name in OF_GROUP},  # the mean of the domain has none of its new rewards
    )
    if group.group_id in buffer.drawn:
        buffer.drawn[group.group_id] = seq
    if fields:
        store.update(stored.slot, **fields)


def _corrections(
    buffer: SRLReplayBuffer, stored: _Stored, row: np.void, before: GroupFacts, group: Group, facts: GroupFacts
) -> tuple[dict[str, Any], float]:
    """Return the corrected fields of an item whose group has other rewards now, and the group's `history_clock`."""
    settings, item = buffer.settings, buffer.store.items[stored.slot]
    told_by = TOLD_BY[settings.history_by]
    played_at = group.extra.get("history_at", int(row["version"]) if told_by == "version" else None)
    is_last = all(item[name] == row[name] for name in ("nll", "version", "reward", "num_success"))
    fields: dict[str, Any] = {}
    history_clock = -1.0
    if played_at is not None:
        elapsed = float(item[told_by]) - played_at  # below 0 only where no visit was rewarded so far
        both = np.array([elapsed, -elapsed])
        weight, fade = discount(settings.history_by, settings.history_half_life, both).tolist()
        num_before, num = (int(np.count_nonzero(one.has_reward_G)) for one in (stored.group, group))
        if item["history_count"] >= weight * num_before - 1e-6:  # else this visit is no part of the history
            fields["history_sum"] = fade * item["history_sum"] + weight * (facts.reward_sum - before.reward_sum)
            fields["history_count"] = fade * item["history_count"] + weight * (num - num_before)
            history_clock = float(row["history_clock"])
            if elapsed < 0:
                history_clock = float(item["history_clock"]) - elapsed
                fields |= {told_by: played_at, "history_clock": history_clock}
            elif history_clock < 0:  # its first rewards
                history_clock = max(0.0, float(item["history_clock"]) - elapsed)
    if is_last and item["group_size"] == facts.size:
        variance = facts.variance
        fields |= {"reward": facts.reward, "variance": variance, "num_success": facts.num_success}
        fields |= {"pass_rate": facts.num_success / facts.size} | ({"num_silent": 0} if variance > 0 else {})
    return fields, history_clock
