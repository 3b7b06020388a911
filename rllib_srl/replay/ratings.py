"""People's ratings of stored answers: the rewards they give, and what a memory remembers of them.

    RatedGroup: every rating of one group ──> rewards of its episodes        `with_ratings`
                                         ├──> grade of its item              `grade_of`
                                         ├──> history of its prompt          `corrected`
                                         └──> RatedGroups: what was applied, or not found

The payload of a rated group keeps the rewards of the environment, so that a rating can be changed or taken back. A
`RatedGroup` replaces the earlier one of its group, so applying it twice changes nothing.

The correction of the history: an episode whose reward changes from r to r' adds rho (r' - r) to the sum of its prompt,
with the discount rho that the visit has by now (`replay/history.py`). The mean of the domain keeps the old reward; it
fades.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rllib_srl.replay.history import GroupFacts, discount
from rllib_srl.replay.schedule.recall import grades_of
from rllib_srl.types import PEOPLE, Group

GOOD = 3  # grade
Rewards = dict[str, float]  # episode, as text for JSON -> reward of its rating


@dataclass(frozen=True)
class RatedAnswer:
    """The rating of one episode. Invariant: `fingerprint` identifies the tokens that a person has seen."""

    episode: int
    fingerprint: str
    reward: float | None  # None: the rating was taken back
    is_binary: bool = False  # good or bad, not 1 to 5
    quality: float | None = None  # in [0, 1], for the grade; None: the reward


@dataclass(frozen=True)
class RatedGroup:
    """All ratings of the answers of one group, those taken back included."""

    group_id: str
    key: str  # key of its prompt
    answers: tuple[RatedAnswer, ...]
    pass_reward: float | None = None  # lowest reward of a pass, where the environment pays no reward

    def seen(self, group: Group) -> list[RatedAnswer]:
        return [a for a in self.answers if a.episode < group.size and fingerprint(group, a.episode) == a.fingerprint]


def fingerprint(group: Group, g: int) -> str:
    """Return 16 hex digits that identify an episode by its prompt and tokens, the same in every process."""
    tokens = np.ascontiguousarray(group.stream(g), "<i4").tobytes()
    return hashlib.blake2b(group.prompt.key.encode() + tokens, digest_size=8).hexdigest()


def rewards_of(answers: Iterable[RatedAnswer]) -> Rewards:
    return {str(answer.episode): answer.reward for answer in answers if answer.reward is not None}


@dataclass
class RatedGroups:
    """Which ratings a buffer has applied. Invariant: its fields are of JSON types, and stored."""

    source: str = ""  # id of the ratings file
    position: int = 0  # its newest change that was applied
    num_applied: int = 0  # ratings that were new
    num_changed: int = 0  # ratings that replaced or took back an earlier one
    applied: dict[str, Rewards] = field(default_factory=dict)  # by group id, also after the group has left the memory
    unused: dict[str, int] = field(default_factory=dict)  # group id -> its ratings without a stored answer

    def note(self, group: RatedGroup, rewards: Rewards | None = None, earlier: Rewards | None = None) -> None:
        """Note ratings: `rewards` are of stored answers, which had the ratings `earlier`; None: it is not stored.

        Ratings of a group that is gone count as unused if they were never applied.
        """
        ratings, known = rewards_of(group.answers), self.applied.get(group.group_id, {})
        if rewards is None or earlier is None:
            num_unused = sum(known.get(episode) != reward for episode, reward in ratings.items())
        else:
            num_unused = len(ratings) - len(rewards)
            self.num_applied += len(rewards.keys() - earlier.keys())
            self.num_changed += sum(rewards.get(episode) != reward for episode, reward in earlier.items())
            if rewards or known:
                self.applied[group.group_id] = rewards
        self.unused.pop(group.group_id, None)
        if num_unused:
            self.unused[group.group_id] = num_unused

    @property
    def num_unused(self) -> int:
        return sum(self.unused.values())


def grade_of(answers: Collection[RatedAnswer]) -> int:
    """Return the grade of an item by the mean quality of its rated answers; good and bad alone are at most Good."""
    mean = float(np.mean([answer.reward if answer.quality is None else answer.quality for answer in answers]))
    grade = int(grades_of(np.array([mean]))[0])
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
    item: np.void, row: np.void, half_life: float, before: GroupFacts, after: GroupFacts
) -> tuple[dict[str, Any], bool]:
    """Return corrected fields of an item whose group has other rewards now, and whether its history has the group."""
    fields: dict[str, Any] = {}
    in_history = bool(row["in_history"]) or not before.num_rewarded  # its first rewards
    if in_history:
        elapsed = float(item["version"]) - float(row["version"])  # below 0 only where no visit was rewarded so far
        weight, fade = discount(half_life, np.array([elapsed, -elapsed])).tolist()
        num = after.num_rewarded - before.num_rewarded
        fields["history_sum"] = fade * item["history_sum"] + weight * (after.reward_sum - before.reward_sum)
        fields["history_count"] = fade * item["history_count"] + weight * num
        if elapsed < 0:
            fields["version"] = row["version"]
    is_last = all(item[name] == row[name] for name in ("nll", "version", "reward", "num_success"))
    if is_last and item["group_size"] == after.size:
        fields |= {"reward": after.reward, "variance": after.variance, "num_success": after.num_success}
        fields |= {"pass_rate": after.num_success / after.size}
        fields |= {"num_zero_variance": 0} if after.variance > 0 else {}
    return fields, in_history
