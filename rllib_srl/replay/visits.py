"""Summarises a played group for its item's row (`GroupFacts`), and reports the outcome to the driver (`Visit`).

    Group -> GroupFacts (numbers only) -> buffer -> Visit -> driver

The hook `replay_on_group` makes new items from each played group that is stored:

    def mine(group, room, generator):                       replay_on_group="my_module:mine"
        yield replace(group.prompt, history=(*group.prompt.history, group.extra["turns"][0][0]))

Arguments: the group; `room`, the most tokens of a prompt that leave room for a turn, None without a limit; a generator
whose state is saved. Known prompts are left out. With the hook, groups keep the policy's texts: `group.extra["turns"]`,
a list of texts for each episode, and `group.extra["can_iterate"]`, if the environment says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllib_srl.batch.estimators import EPSILON
from rllib_srl.batch.posterior import NO_HISTORY
from rllib_srl.common.rules import Rules
from rllib_srl.types import Group, History, Prompt

OnGroup = Callable[[Group, int | None, np.random.Generator], Iterable[Prompt]]
ON_GROUP: Rules[OnGroup] = Rules("replay_on_group", {})

OF_GROUP = (  # numbers in the row of a group
    *("size", "num_success", "reward", "variance", "abs_advantage", "nll"),
    *("num_tokens", "num_loss_tokens", "version", "num_rewarded", "lowest", "highest"),
)


@dataclass(frozen=True)
class GroupFacts:
    """Summary numbers of one group, stored in its row and in its item's row.

    Those of rewards are over the episodes that have one (`Group.has_reward_G`); `size` counts all.
    """

    size: int
    num_success: int
    reward: float  # mean
    reward_sum: float
    variance: float  # population variance of the rewards: ExIt's score S
    abs_advantage: float  # mean |advantage| of the group rule
    nll: float  # mean -log-prob of the policy's tokens, nats
    num_tokens: int
    num_loss_tokens: int
    version: int  # oldest policy version that wrote any of its tokens
    num_rewarded: int  # episodes that have a reward
    lowest: float  # reward
    highest: float


def facts_of(group: Group, pass_reward: float) -> GroupFacts:
    """Compute the summary numbers of a group.

    Args:
        group: of at least one episode.
        pass_reward: lowest reward of a success, used where the environment defines none.
    """
    has_reward_G = group.has_reward_G
    rewards_G = group.rewards_G[has_reward_G].astype(np.float64)
    size = max(1, len(rewards_G))
    reward_sum = float(rewards_G.sum())
    reward = reward_sum / size
    centred_G = rewards_G - reward
    squares = float(centred_G @ centred_G)
    deviation = math.sqrt(squares / (size - 1)) if size > 1 else 0.0
    num_loss_tokens = int(np.count_nonzero(group.loss_mask_N))
    # The setting is compared in double precision: a float32 reward of 0.7 is below a pass_reward of 0.7.
    mark = group.pass_reward
    is_success_G = rewards_G >= pass_reward if mark is None else group.is_success_G(pass_reward)[has_reward_G]
    return GroupFacts(
        size=group.size,
        num_success=int(np.count_nonzero(is_success_G)),
        reward=reward,
        reward_sum=reward_sum,
        # Same threshold as `batch.estimators.has_signal`: rounding errors of equal rewards are no variance.
        variance=squares / size if len(rewards_G) and np.ptp(rewards_G) > 1e-8 else 0.0,
        abs_advantage=float(np.abs(centred_G).sum() / size / (deviation + EPSILON)),
        nll=float(-group.behaviour_logp_N.sum(dtype=np.float64) / max(1, num_loss_tokens)),
        num_tokens=len(group.token_ids_N),
        num_loss_tokens=num_loss_tokens,
        version=int(group.versions_G2.min()),
        num_rewarded=len(rewards_G),
        lowest=float(rewards_G.min()) if len(rewards_G) else 0.0,
        highest=float(rewards_G.max()) if len(rewards_G) else 0.0,
    )


@dataclass(frozen=True)
class Visit:
    """Outcome of adding one played group.

    Invariant: `refused` is empty exactly if the group was stored.
    """

    group_id: str
    key: str
    refused: str = ""  # one of `admission.REASONS`, or the reason of a hook
    without_loss: tuple[int, ...] = ()  # episodes that are not trained on
    is_new: bool = False  # the item did not exist before
    timing: str = "new"  # "new", "early", "on_time" or "late" against the item's due date
    grade: int = 0  # 1 to 4; 0 where nothing was graded
    pass_rate: float = 0.0
    is_lapse: bool = False
    num_grown: int = 0  # items that `on_group` added
    history: History = NO_HISTORY  # before the call of `add`, discounted for this visit

    def as_dict(self) -> dict[str, Any]:
        """Return JSON types, for the store."""
        lists = {name: list(getattr(self, name)) for name in ("without_loss", "history")}
        return {**vars(self), **lists}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Visit:
        """Return the visit whose `as_dict` this is."""
        read = {"without_loss": tuple(values["without_loss"]), "history": History(*values["history"])}
        return cls(**{**values, **read})


def timing_of(now: int, due: float, interval: float) -> str:
    """Return "early", "on_time" or "late"; on time is from the due date to max(1, interval / 4) iterations later.

    Args:
        now: the iteration of the visit.
        due: due date of the item, in iterations.
        interval: its effective interval, in iterations.
    """
    if now < due:
        return "early"
    return "on_time" if now <= due + max(1.0, 0.25 * interval) else "late"
