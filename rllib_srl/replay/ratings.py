"""People's ratings of stored answers: the rewards they give, and what a memory remembers of them.

    RatedGroup: every rating of one group ──> rewards of its episodes        `with_ratings`
                                         ├──> grade of its item              `grade_of`
                                         ├──> history of its prompt          `corrected`
                                         └──> RatedGroups: what was applied, trained on, stale, or not found

The payload of a rated group keeps the rewards of the environment, so that a rating can be changed or taken back. A
`RatedGroup` replaces the earlier one of its group, so applying it twice changes nothing.

The correction of the history: an episode whose reward changes from r to r' adds rho (r' - r) to the sum of its prompt,
with the discount rho that the visit has by now (`replay/history.py`). The mean of the domain keeps the old reward; it
fades.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rllib_srl.replay.history import TOLD_BY, GroupFacts, discount
from rllib_srl.replay.schedule.recall import grades_of_ratings
from rllib_srl.types import PEOPLE, Group

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

    def seen(self, group: Group) -> list[RatedAnswer]:
        """Return the ratings of answers that are those of `group`."""
        return [a for a in self.answers if a.episode < group.size and fingerprint(group, a.episode) == a.fingerprint]


def fingerprint(group: Group, g: int) -> str:
    """Return 16 hex digits that identify an episode by its prompt and tokens, the same in every process."""
    tokens = np.ascontiguousarray(group.stream(g), "<i4").tobytes()
    return hashlib.blake2b(group.prompt.key.encode() + tokens, digest_size=8).hexdigest()


def rewards_of(answers: Iterable[RatedAnswer]) -> Rewards:
    """Return the rewards of ratings that were not taken back."""
    return {str(answer.episode): answer.reward for answer in answers if answer.reward is not None}


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

    def __init__(self, text: str = "") -> None:
        values = json.loads(text) if text else {}
        # The ratings file, and the newest of its changes that was applied.
        self.source: str = values.get("source", "")
        self.position: int = values.get("position", 0)
        # Ratings that were new; that replaced or took back an earlier one.
        self.num_applied: int = values.get("num_applied", 0)
        self.num_changed: int = values.get("num_changed", 0)
        self.applied = {group_id: Applied(*row) for group_id, row in values.get("applied", {}).items()}
        self.unused: dict[str, int] = values.get("unused", {})  # group id -> its ratings without a stored answer

    def get_state(self) -> str:
        """Return everything as JSON."""
        rows = {group_id: [one.rewards, one.num_trained, one.num_stale] for group_id, one in self.applied.items()}
        return json.dumps({**vars(self), "applied": rows}, separators=(",", ":"))

    def note(self, group_id: str, applied: Applied | None, num_unused: int) -> None:
        """Set what is known of a group."""
        if applied is not None:
            self.applied[group_id] = applied
        self.unused.pop(group_id, None)
        if num_unused:
            self.unused[group_id] = num_unused

    def note_missing(self, one: RatedGroup) -> None:
        """Note ratings of a group that is not stored: those that were never applied are unused."""
        given = rewards_of(one.answers)
        earlier = self.applied.get(one.group_id)
        known = earlier.rewards if earlier else {}
        # The record keeps the rewards that were trained on: a later call finds the same difference.
        applied = replace(earlier.changed_to(given), rewards=known) if earlier else None
        self.note(one.group_id, applied, sum(known.get(episode) != reward for episode, reward in given.items()))

    def note_stored(self, one: RatedGroup, rewards: Rewards, earlier: Rewards) -> None:
        """Note ratings of a stored group; `rewards` are of answers that are in it, `earlier` those that it had."""
        entry = self.applied.get(one.group_id, Applied({}))
        num_unused = len(rewards_of(one.answers)) - len(rewards)
        self.note(one.group_id, entry.changed_to(rewards) if rewards or entry.rewards else None, num_unused)
        if rewards != earlier:
            self.num_applied += len(rewards.keys() - earlier.keys())
            self.num_changed += sum(rewards.get(episode) != reward for episode, reward in earlier.items())

    def note_trained(self, group_ids: Iterable[str]) -> None:
        """Count draws of rated groups."""
        for group_id in group_ids:
            one = self.applied.get(group_id)
            if one is not None and one.rewards:
                self.applied[group_id] = replace(one, num_trained=one.num_trained + 1)

    @property
    def num_unused(self) -> int:
        """Return the number of ratings whose answers are not in the memory."""
        return sum(self.unused.values())

    @property
    def num_stale_groups(self) -> int:
        """Return the number of groups that were trained on with a rating that was changed afterwards."""
        return sum(one.num_stale > 0 for one in self.applied.values())


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


def grade_of(answers: Collection[RatedAnswer]) -> int:
    """Return the grade of an item by the mean quality of its rated answers; good and bad alone are at most Good."""
    mean = float(np.mean([answer.reward if answer.quality is None else answer.quality for answer in answers]))
    grade = int(grades_of_ratings(np.array([mean]))[0])
    return min(grade, GOOD) if all(answer.is_binary for answer in answers) else grade


def with_ratings(group: Group, rewards: Mapping[str, float], pass_reward: float | None) -> Group:
    """Return a group with the rewards of its ratings, and those of the environment for all other episodes.

    Without `rewards` it is the group as it was played. `pass_reward` is for an environment that pays no reward.
    """
    paid = group.extra[PEOPLE]["paid"] if PEOPLE in group.extra else group.rewards_G.tolist()
    extra = {name: value for name, value in group.extra.items() if name != PEOPLE}
    if group.is_unpaid:
        extra.pop("pass_reward", None)
        extra |= {"pass_reward": pass_reward} if pass_reward is not None and rewards else {}
    rewards_G = np.array([rewards.get(str(g), reward) for g, reward in enumerate(paid)], group.rewards_G.dtype)
    extra |= {PEOPLE: {"paid": paid, "rated": dict(rewards)}} if rewards else {}
    return replace(group, rewards_G=rewards_G, extra=extra)


def corrected(
    item: np.void, row: np.void, by: str, half_life: float | None, group: Group, before: GroupFacts, after: GroupFacts
) -> tuple[dict[str, Any], float]:
    """Return the corrected fields of an item whose group has other rewards now, and the group's `history_clock`.

    `item` and `row` are the rows of item and group; `before` and `after` the group's facts with old and new rewards.
    """
    told_by = TOLD_BY[by]
    played_at = group.extra.get("history_at", int(row["version"]) if told_by == "version" else None)
    fields: dict[str, Any] = {}
    history_clock = -1.0
    if played_at is not None:
        elapsed = float(item[told_by]) - played_at  # below 0 only where no visit was rewarded so far
        weight, fade = discount(by, half_life, np.array([elapsed, -elapsed])).tolist()
        if item["history_count"] >= weight * before.num_rewarded - 1e-6:  # else the visit is no part of the history
            num = after.num_rewarded - before.num_rewarded
            fields["history_sum"] = fade * item["history_sum"] + weight * (after.reward_sum - before.reward_sum)
            fields["history_count"] = fade * item["history_count"] + weight * num
            history_clock = float(row["history_clock"])
            if elapsed < 0:
                history_clock = float(item["history_clock"]) - elapsed
                fields |= {told_by: played_at, "history_clock": history_clock}
            elif history_clock < 0:  # its first rewards
                history_clock = max(0.0, float(item["history_clock"]) - elapsed)
    is_last = all(item[name] == row[name] for name in ("nll", "version", "reward", "num_success"))
    if is_last and item["group_size"] == after.size:
        fields |= {"reward": after.reward, "variance": after.variance, "num_success": after.num_success}
        fields |= {"pass_rate": after.num_success / after.size} | ({"num_silent": 0} if after.variance > 0 else {})
    return fields, history_clock
