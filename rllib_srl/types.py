"""Data types that all folders share: prompts, groups of episodes, their metadata, and stop reasons.

    Prompt  --played G times-->  episodes  --collected-->  Group  --its metadata-->  GroupMeta (what the driver sees)

A `Group` is flat: the G token streams are concatenated in one array and separated by `offsets`. A stream holds one
conversation, or several of the same episode one after the other (`Group.starts`).

Dimension letters, used as suffixes of array names everywhere in the package:
P prompts, G episodes of a group, B episodes in a batch, T tokens, N tokens concatenated,
V vocabulary, D embedding, K neighbours, k likeliest tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class StopReason(str, Enum):
    """Why an episode ended; a healthy run ends episodes in all of the first six ways.

    Invariant: an ending with `is_infrastructure` is not caused by the policy. Such an episode has no
    reward and is used neither for training nor for grading. Every other episode stays in its group
    with its reward.
    """

    TERMINATED = "terminated"  # the environment returned terminated=True
    TRUNCATED = "truncated"  # the environment returned truncated=True
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"  # the last turn hit its token limit, or the context is full
    UNPARSABLE = "unparsable"  # the environment could not read the answer (info["stop_reason"])
    TOOL_TIMEOUT = "tool_timeout"  # a tool the policy called ran too long (info["stop_reason"])
    ENV_TIMEOUT = "env_timeout"  # reset, step or grading hung
    ENV_CRASHED = "env_crashed"  # reset, step or grading raised
    ENGINE_FAILED = "engine_failed"
    ABORTED = "aborted"  # the runner's own deadline passed
    PROMPT_TOO_LONG = "prompt_too_long"  # the prompt leaves no room for a turn: it was not played

    @property
    def is_infrastructure(self) -> bool:
        """Return whether the infrastructure, not the policy, caused this ending."""
        return self in _INFRASTRUCTURE


PEOPLE = "people"  # in `Group.extra`: ratings by people, and the rewards of the environment; see `replay/ratings.py`
_INFRASTRUCTURE = frozenset(
    {
        *(StopReason.ENV_TIMEOUT, StopReason.ENV_CRASHED, StopReason.ENGINE_FAILED, StopReason.ABORTED),
        StopReason.PROMPT_TOO_LONG,
    }
)


@dataclass(frozen=True)
class Prompt:
    """A starting state: enough to `reset` its environment to exactly this task.

    Invariant: equal `key` means the same environment, prompt and history; `step` and `domain` are not part of it.
    """

    env_id: str
    prompt_id: str
    domain: str = ""
    history: tuple[str, ...] = ()  # earlier policy turns, replayed by the environment's reset
    step: str = ""  # kind of self-iteration at a revisit, where the environment supports it: "", "improve" or "diverge"

    @property
    def key(self) -> str:
        """Return 16 hex digits that are the same in every process."""
        return _key_of(self.env_id, self.prompt_id, tuple(self.history))


@lru_cache(maxsize=4096)  # an iteration computes the same few keys many times
def _key_of(env_id: str, prompt_id: str, history: tuple[str, ...]) -> str:
    text = json.dumps([env_id, prompt_id, list(history)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


_CONVERSATIONS = "conversations"  # in `Group.extra`
HISTORY = "history_of_prompt"  # in `Group.extra` of one of origin "reuse", for the baseline from history


@dataclass(frozen=True)
class Group:
    """The episodes of one prompt, played together: the unit that is stored, drawn, evicted and sharded.

    Invariant (`check_valid`): token stream g is `token_ids_N[offsets[g]:offsets[g + 1]]`;
    `behaviour_logp_N` is finite and <= 0 where `loss_mask_N` is True and 0 elsewhere; the first
    token of a stream is never trained on.
    """

    group_id: str
    prompt: Prompt
    token_ids_N: np.ndarray  # int32
    loss_mask_N: np.ndarray  # bool, True on tokens the policy wrote
    behaviour_logp_N: np.ndarray  # float32, nats
    offsets: np.ndarray  # int64 [G + 1]
    rewards_G: np.ndarray  # float32, the return of each episode
    versions_G2: np.ndarray  # int64 [G, 2], first and last policy version that wrote each episode
    stop_reasons: tuple[StopReason, ...]
    num_dropped: int = 0  # episodes lost to infrastructure; not among the G here
    origin: str = "fresh"  # "fresh", "revisit", "reuse" or "retain"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def pass_reward(self) -> float | None:
        """Return the environment's lowest passing reward, None if the environment does not define one."""
        return self.extra.get("pass_reward")

    @property
    def is_unpaid(self) -> bool:
        """Return whether the environment pays no reward, so that only ratings by people are rewards."""
        return bool(self.extra.get("is_unpaid", False))

    @property
    def has_reward_G(self) -> np.ndarray:
        """Return which episodes have a reward: all, but without an environment's reward those that people rated."""
        if not self.is_unpaid:
            return np.ones(self.size, bool)
        rated = self.extra.get(PEOPLE, {}).get("rated", {})
        return np.array([str(g) in rated for g in range(self.size)], bool)

    def is_success_G(self, pass_reward: float) -> np.ndarray:
        """Return for each episode whether it passed, by the environment's mark or else by `pass_reward`."""
        return passed(self.rewards_G, self.pass_reward, pass_reward)

    def starts(self, g: int) -> tuple[int, ...]:
        """Return where the conversations of episode `g` begin in its stream: (0,) for a single one.

        A conversation is a sequence of its own: its tokens attend to no other conversation of the episode.
        """
        return tuple(self.extra.get(_CONVERSATIONS, {}).get(str(g), (0,)))

    @property
    def size(self) -> int:
        """Return G, the number of valid episodes."""
        return len(self.rewards_G)

    def lengths_G(self) -> np.ndarray:
        """Return the number of tokens of each episode, prompt included."""
        return np.diff(self.offsets)

    def num_loss_tokens_G(self) -> np.ndarray:
        """Return the number of policy-written tokens of each episode."""
        cuts = pairwise(self.offsets.tolist())
        return np.array([np.count_nonzero(self.loss_mask_N[start:end]) for start, end in cuts], np.int64)

    def num_turns_G(self) -> np.ndarray:
        """Return how often the policy began to write in each episode."""
        begins_N = np.flatnonzero(self.loss_mask_N[1:] & ~self.loss_mask_N[:-1])
        return np.diff(np.searchsorted(begins_N, np.asarray(self.offsets)))

    def stream(self, g: int) -> np.ndarray:
        """Return the token ids of episode `g`, int32 [T]."""
        return self.token_ids_N[self.offsets[g] : self.offsets[g + 1]]

    def check_valid(self) -> None:
        """Check every invariant of the class.

        Raises:
            ValueError: naming all broken invariants at once.
        """
        num_tokens, errors = len(self.token_ids_N), []
        for name in ("loss_mask_N", "behaviour_logp_N"):
            if len(getattr(self, name)) != num_tokens:
                errors.append(f"{name} has {len(getattr(self, name))} entries, token_ids_N has {num_tokens}")
        for name, want in (("versions_G2", self.size), ("stop_reasons", self.size), ("offsets", self.size + 1)):
            if len(getattr(self, name)) != want:
                errors.append(f"{name} has {len(getattr(self, name))} entries; expected {want}")
        if not errors:
            errors += self._errors_of_values(num_tokens)
        if errors:
            raise ValueError(f"group {self.group_id} is not valid: " + "; ".join(errors))

    def _errors_of_values(self, num_tokens: int) -> list[str]:
        errors = []
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or (np.diff(self.offsets) < 1).any():
            errors.append(f"offsets {self.offsets.tolist()} do not cut {num_tokens} tokens into non-empty streams")
        elif self.loss_mask_N[self.offsets[:-1]].any():
            errors.append("the first token of a stream is marked as written by the policy")
        written = self.behaviour_logp_N[self.loss_mask_N]
        if not np.isfinite(written).all() or (written > 1e-4).any():
            errors.append("behaviour_logp_N is not finite and <= 0 on every policy-written token")
        errors += self._errors_of_conversations() if not errors and _CONVERSATIONS in self.extra else []
        if self.behaviour_logp_N[~self.loss_mask_N].any():
            errors.append("behaviour_logp_N is not 0 outside loss_mask_N")
        if not np.isfinite(self.rewards_G).all():
            errors.append("rewards_G is not finite")
        if any(reason.is_infrastructure for reason in self.stop_reasons):
            errors.append("an episode that infrastructure ended is in the group")
        return errors

    def _errors_of_conversations(self) -> list[str]:
        errors, several = [], self.extra[_CONVERSATIONS]
        if not isinstance(several, dict) or not set(several) <= set(map(str, range(self.size))):
            return [f"conversations {str(several)[:60]} are not those of {self.size} episodes"]
        for g in map(int, several):
            starts, end = several[str(g)], int(self.offsets[g + 1] - self.offsets[g])
            if not isinstance(starts, list) or not all(type(start) is int for start in starts):
                errors.append(f"conversations {str(starts)[:60]} of episode {g} are not positions")
            elif starts[:1] != [0] or any(b <= a for a, b in pairwise((*starts, end))):
                errors.append(f"conversations {starts} of episode {g} do not cut its {end} tokens")
            elif self.loss_mask_N[self.offsets[g] + np.array(starts)].any():
                errors.append(f"the first token of a conversation of episode {g} is marked as written by the policy")
        return errors


def with_starts(extra: Mapping[str, Any], starts_G: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return a `Group.extra` that also holds where conversations begin: {"conversations": {"<g>": starts}}.

    Episodes of one conversation are left out; so is an entry without episodes.

    Args:
        extra: the rest of it.
        starts_G: `Group.starts` of each episode.
    """
    several = {str(g): [int(at) for at in starts] for g, starts in enumerate(starts_G) if len(starts) > 1}
    rest = {name: value for name, value in extra.items() if name != _CONVERSATIONS}
    return rest | ({_CONVERSATIONS: several} if several else {})


class History(NamedTuple):
    """Rewards of a prompt and of its domain before a visit, as the policy of the visit discounts them.

    Invariant: no reward of the episodes that are judged by it is part of it.
    """

    reward_sum: float = 0.0  # s: discounted sum of the prompt's raw rewards
    num_episodes: float = 0.0  # n: discounted number of its episodes
    domain_mean: float = 0.5  # m: faded mean reward of its domain


@dataclass(frozen=True)
class ListedRef:
    """Reference to one Group within a stored list of Groups: ten times faster than one stored object per Group."""

    ref: Any  # a Ray ObjectRef of a list of Groups
    index: int


@dataclass(frozen=True)
class GroupMeta:
    """Metadata of a group on the driver: small arrays and a reference, never tokens.

    Invariant: built by `GroupMeta.of`, so it agrees with the group behind `ref`.
    """

    group_id: str
    prompt: Prompt
    rewards_G: np.ndarray
    lengths_G: np.ndarray
    num_loss_tokens_G: np.ndarray
    versions_G2: np.ndarray
    stop_reasons: tuple[StopReason, ...]
    num_dropped: int
    origin: str
    ref: Any  # a Ray ObjectRef of the Group, a `ListedRef`, or the Group itself in one process
    num_turns_G: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    pass_reward: float | None = None  # as `Group.pass_reward`
    has_reward_G: np.ndarray | None = None  # as `Group.has_reward_G`; None: all
    history: History | None = None  # of a stored group without the group itself, for the baseline from history

    def is_success_G(self, pass_reward: float) -> np.ndarray:
        """Return for each episode whether it passed, by the environment's mark or else by `pass_reward`."""
        return passed(self.rewards_G, self.pass_reward, pass_reward)

    def is_right_G(self) -> np.ndarray:
        """Return for each episode whether evaluation counts it as right: by `pass_reward`, else by `RIGHT`."""
        return self.is_success_G(RIGHT)

    @classmethod
    def of(cls, group: Group, ref: Any) -> GroupMeta:
        """Build the metadata of `group`.

        Args:
            group: the group.
            ref: reference through which the group can be fetched.
        """
        return cls(
            group_id=group.group_id,
            prompt=group.prompt,
            rewards_G=group.rewards_G,
            lengths_G=group.lengths_G(),
            num_loss_tokens_G=group.num_loss_tokens_G(),
            versions_G2=group.versions_G2,
            stop_reasons=group.stop_reasons,
            num_dropped=group.num_dropped,
            origin=group.origin,
            ref=ref,
            num_turns_G=group.num_turns_G(),
            pass_reward=group.pass_reward,
            has_reward_G=group.has_reward_G if group.is_unpaid else None,
            history=group.extra.get(HISTORY),
        )


def listed(metas: Sequence[GroupMeta], groups: Any) -> list[GroupMeta]:
    """Return metadata with references into one list of groups; a stored list is not fetched.

    Args:
        metas: of all groups, in the order of the list.
        groups: a Ray ObjectRef of the list, or in one process the list itself.
    """
    if isinstance(groups, list):
        return [replace(meta, ref=group) for meta, group in zip(metas, groups, strict=True)]
    return [replace(meta, ref=ListedRef(groups, at)) for at, meta in enumerate(metas)]


class ProcessBrokenError(RuntimeError):
    """The process that raises it can do nothing any more and must be replaced; the message says why."""


RIGHT = 0.999  # lowest reward of a right answer in evaluation, if the environment defines no `pass_reward`


def passed(rewards_G: np.ndarray, mark: float | None, default: float) -> np.ndarray:
    """Return which rewards are a pass.

    Args:
        rewards_G: float32 where they come from a group.
        mark: the environment's lowest passing reward, None if it defines none.
        default: threshold without a mark: the setting `replay_pass_reward`, or `RIGHT`.

    Both are compared in the precision of the rewards, because 2/3 in double precision exceeds a float32 reward of 2/3.
    """
    return rewards_G >= default if mark is None else rewards_G >= np.asarray(mark, rewards_G.dtype)
