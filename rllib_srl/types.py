"""The nouns every room shares: what is played, how it ended, and what is kept of it.

    Prompt  --played G times-->  episodes  --collected-->  Group  --its metadata-->  GroupMeta (what the driver sees)

A `Group` is flat: the G token streams lie end to end in one array, cut by `offsets`.

Dimension letters, used as suffixes of array names everywhere in the package:
P prompts, G episodes of a group, B episodes in a batch, T tokens, N tokens laid end to end,
V vocabulary, D embedding, K neighbours.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np


class StopReason(str, Enum):
    """Why an episode ended; a healthy run ends episodes in all of the first six ways.

    Invariant: a reason that `is_infrastructure` says nothing about the policy, so such an
    episode carries no reward, trains nothing and grades nothing. Every other episode stays in
    its group with its reward.
    """

    TERMINATED = "terminated"  # the environment said the episode is over
    TRUNCATED = "truncated"  # the environment cut it off
    OUT_OF_TURNS = "out_of_turns"
    OUT_OF_TOKENS = "out_of_tokens"  # the last turn hit its token limit, or the context is full
    UNPARSABLE = "unparsable"  # the environment could not read the answer (info["stop_reason"])
    TOOL_TIMEOUT = "tool_timeout"  # a tool the policy called ran too long (info["stop_reason"])
    ENV_TIMEOUT = "env_timeout"  # reset, step or grading hung
    ENV_CRASHED = "env_crashed"  # reset, step or grading raised
    ENGINE_FAILED = "engine_failed"
    ABORTED = "aborted"  # the runner's own deadline passed

    @property
    def is_infrastructure(self) -> bool:
        """Say whether the machine, and not the policy, caused this ending."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset(
    {StopReason.ENV_TIMEOUT, StopReason.ENV_CRASHED, StopReason.ENGINE_FAILED, StopReason.ABORTED}
)


@dataclass(frozen=True)
class Prompt:
    """A starting state given to the policy: enough to `reset` its environment to exactly this task.

    Invariant: equal `key` means the same environment, prompt and history; how a revisit is asked is not part of it.
    """

    env_id: str
    prompt_id: str
    domain: str = ""
    history: tuple[str, ...] = ()  # earlier policy turns, replayed by the environment's reset
    step: str = ""  # how a revisit is asked where the world can iterate: "", "improve" or "diverge"

    @property
    def key(self) -> str:
        """Return 16 hex digits that are the same in every process."""
        return _key_of(self.env_id, self.prompt_id, tuple(self.history))


@lru_cache(maxsize=4096)  # an iteration asks for the same few keys again and again
def _key_of(env_id: str, prompt_id: str, history: tuple[str, ...]) -> str:
    text = json.dumps([env_id, prompt_id, list(history)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
    origin: str = "fresh"  # "fresh", "revisit" or "reuse"
    extra: dict[str, Any] = field(default_factory=dict)

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
        num_tokens, faults = len(self.token_ids_N), []
        for name in ("loss_mask_N", "behaviour_logp_N"):
            if len(getattr(self, name)) != num_tokens:
                faults.append(f"{name} has {len(getattr(self, name))} entries, token_ids_N has {num_tokens}")
        for name, want in (("versions_G2", self.size), ("stop_reasons", self.size), ("offsets", self.size + 1)):
            if len(getattr(self, name)) != want:
                faults.append(f"{name} has {len(getattr(self, name))} entries; expected {want}")
        if not faults:
            faults += self._faults_of_values(num_tokens)
        if faults:
            raise ValueError(f"group {self.group_id} is not valid: " + "; ".join(faults))

    def _faults_of_values(self, num_tokens: int) -> list[str]:
        faults = []
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or (np.diff(self.offsets) < 1).any():
            faults.append(f"offsets {self.offsets.tolist()} do not cut {num_tokens} tokens into non-empty streams")
        elif self.loss_mask_N[self.offsets[:-1]].any():
            faults.append("the first token of a stream is marked as written by the policy")
        written = self.behaviour_logp_N[self.loss_mask_N]
        if not np.isfinite(written).all() or (written > 1e-4).any():
            faults.append("behaviour_logp_N is not finite and <= 0 on every policy-written token")
        if self.behaviour_logp_N[~self.loss_mask_N].any():
            faults.append("behaviour_logp_N is not 0 outside loss_mask_N")
        if not np.isfinite(self.rewards_G).all():
            faults.append("rewards_G is not finite")
        if any(reason.is_infrastructure for reason in self.stop_reasons):
            faults.append("an episode that infrastructure ended is in the group")
        return faults


@dataclass(frozen=True)
class ListedRef:
    """Where a Group lies that shares one object of the object store with others: ten times faster than one each."""

    ref: Any  # a Ray ObjectRef of a list of Groups
    index: int


@dataclass(frozen=True)
class GroupMeta:
    """What the driver knows of a group: small numbers and a reference, never tokens.

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

    @classmethod
    def of(cls, group: Group, ref: Any) -> GroupMeta:
        """Describe `group`, which is reachable through `ref`."""
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
        )
