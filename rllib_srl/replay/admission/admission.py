"""Decides whether a group may be stored, and which of its episodes get no loss: checks by reason, each counted.

    admit(group, settings, ...) -> Refusal(reason, episodes, train) | None     the first reason that applies

    not stored, no loss
      too_few          no episode
      bad_logp         a policy token's log-prob is not finite or above 0 (occurs in foreign and imported groups)
      invalid          another invariant of `Group` is broken
      secret           the policy wrote a secret in these episodes: the hook "secrets" of `hooks.py`
      <reason>         of a user's own hook
    not stored, trained on
      too_long         an episode has more than `max_episode_tokens` tokens, prompt included
      degenerate       more than half of the episodes are one repeated token or a loop
      near_duplicate   cosine to the nearest item of another prompt at or above `near_duplicate`

Why half: one degenerate episode among good ones is an ordinary failure, and its low reward is useful signal. If most
episodes are degenerate, the policy has collapsed on this prompt, and training would only compare collapsed episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rllib_srl.common.setting_checks import is_integer, is_number
from rllib_srl.replay.admission.hooks import Decode, Refusal, fault_of_names, names_of, refusal_by
from rllib_srl.types import Group

_MAX_LOGP = 1e-4  # as in Group.check_valid: rounding may put a token of probability 1 slightly above 0


class Reason(str, Enum):
    """Reasons to refuse a group beside those of users' hooks; see the module's table."""

    TOO_FEW = "too_few"
    BAD_LOGP = "bad_logp"
    INVALID = "invalid"
    TOO_LONG = "too_long"
    DEGENERATE = "degenerate"
    NEAR_DUPLICATE = "near_duplicate"
    SECRET = "secret"


MALFORMED = (Reason.TOO_FEW.value, Reason.BAD_LOGP.value, Reason.INVALID.value)
_LENGTH = "an integer of at least 1, or None"
# Settings of the memory of the same names.
SHARED = ("max_episode_tokens", "degenerate_share", "near_duplicate", "admit")


@dataclass(frozen=True)
class AdmissionSettings:
    """Settings of the admission checks; None disables a check. Invariant: `faults` is empty for settings in use."""

    max_episode_tokens: int | None = None  # of the whole stream, prompt included
    degenerate_share: float | None = 0.5  # largest share of one token or loop in an episode's policy tokens
    min_degenerate_tokens: int = 32  # policy-written tokens below which an episode is too short to judge
    max_loop_period: int = 64  # longest period that is searched, in tokens
    near_duplicate: float | None = None  # cosine
    admit: str | tuple[str, ...] | None = "secrets"  # names of hooks, see `hooks.py`

    def faults(self) -> list[str]:
        """Return one error message for each setting out of range."""
        ranges: tuple[tuple[str, bool, str], ...] = (
            ("max_episode_tokens", self.max_episode_tokens is None or is_integer(self.max_episode_tokens, 1), _LENGTH),
            ("degenerate_share", _is_share(self.degenerate_share), "a number in (0, 1], or None"),
            ("min_degenerate_tokens", self.min_degenerate_tokens >= 2, "at least 2"),
            ("max_loop_period", self.max_loop_period >= 1, "at least 1"),
            ("near_duplicate", _is_share(self.near_duplicate), "a number in (0, 1], or None"),
        )
        wrong = {name: f"expected {what}" for name, is_fine, what in ranges if not is_fine}
        if fault := fault_of_names(self.admit):
            wrong["admit"] = fault
        return [f"{name} = {getattr(self, name)!r}; {what}" for name, what in wrong.items()]


@dataclass(frozen=True)
class Nearest:
    """The stored item whose embedding is closest to the group's."""

    key: str  # its prompt's
    similarity: float  # cosine, in [-1, 1]


def admit(
    group: Group,
    settings: AdmissionSettings,
    *,
    nearest: Nearest | None = None,
    decode: Decode | None = None,
    is_checked: bool = False,
) -> Refusal | None:
    """Run the admission checks on a group, those that keep episodes out of the loss first.

    Args:
        group: played in this run, or foreign.
        settings: of the checks.
        nearest: the closest stored item; an item of the same prompt is not a duplicate but an earlier visit.
        decode: token ids -> text.
        is_checked: whether the caller has already run `settings.faults` and `fault_of` without findings.

    Raises:
        ValueError: settings out of range, or no `decode` although a hook needs it.
        AdmissionError: a user's hook raised, took too long or returned something else than a refusal.
    """
    faults = [] if is_checked else settings.faults()
    names = names_of(settings.admit)
    if names and decode is None:
        faults.append(f"decode = None; expected token ids -> text, because admit = {settings.admit!r}")
    if faults:
        raise ValueError("admission: " + "; ".join(faults))
    if not is_checked and (fault := fault_of(group)):
        return Refusal(fault.value, tuple(range(group.size)))
    for name in names:
        assert decode is not None
        if refusal := refusal_by(name, group, decode):
            return refusal
    reason = _refusal_of(group, settings, nearest)
    return None if reason is None else Refusal(reason.value, tuple(range(group.size)), train=True)


def fault_of(group: Group) -> Reason | None:
    """Return the reason why a group is malformed ("too_few", "bad_logp" or "invalid"), or None."""
    if group.size < 1:
        return Reason.TOO_FEW
    if group.loss_mask_N.dtype != bool:  # an integer mask would index tokens 0 and 1
        return Reason.INVALID
    if len(group.behaviour_logp_N) == len(group.loss_mask_N):
        written = group.behaviour_logp_N[group.loss_mask_N]
        if not (np.isfinite(written) & (written <= _MAX_LOGP)).all():
            return Reason.BAD_LOGP
    try:
        group.check_valid()
    except ValueError:
        return Reason.INVALID
    return None


def _refusal_of(group: Group, settings: AdmissionSettings, nearest: Nearest | None) -> Reason | None:
    if settings.max_episode_tokens is not None and group.lengths_G().max() > settings.max_episode_tokens:
        return Reason.TOO_LONG
    if settings.degenerate_share is not None and 2 * int(degenerate_G(group, settings).sum()) > group.size:
        return Reason.DEGENERATE
    if (
        settings.near_duplicate is not None
        and nearest is not None
        and nearest.key != group.prompt.key
        and nearest.similarity >= settings.near_duplicate
    ):
        return Reason.NEAR_DUPLICATE
    return None


def degenerate_G(group: Group, settings: AdmissionSettings) -> np.ndarray:
    """Return for each episode whether one token or one loop takes more than `degenerate_share` of the policy's tokens.

    False for episodes of fewer than `min_degenerate_tokens` policy-written tokens, and for all if the share is None.
    """
    is_degenerate_G = np.zeros(group.size, bool)
    if settings.degenerate_share is None:
        return is_degenerate_G
    judged_S = np.flatnonzero(group.num_loss_tokens_G() >= settings.min_degenerate_tokens)
    if len(judged_S):
        spans = [slice(group.offsets[g], group.offsets[g + 1]) for g in judged_S]
        streams = [group.token_ids_N[span][group.loss_mask_N[span]] for span in spans]
        most_S = np.maximum(most_common(streams), longest_loops(streams, settings.max_loop_period))
        is_degenerate_G[judged_S] = most_S > settings.degenerate_share * np.array([len(ids) for ids in streams])
    return is_degenerate_G


def most_common(streams: Sequence[np.ndarray]) -> np.ndarray:
    """Return the count of the most frequent id of each stream, [S]; 0 for an empty stream."""
    most_S = np.zeros(len(streams), np.int64)
    ids_N, stream_N = _end_to_end(streams)
    order_N = np.lexsort((ids_N, stream_N))
    ids_N, stream_N = ids_N[order_N], stream_N[order_N]
    last_R = np.flatnonzero((np.diff(ids_N, append=0) != 0) | (np.diff(stream_N, append=-1) != 0))
    np.maximum.at(most_S, stream_N[last_R], np.diff(last_R, prepend=-1))
    return most_S


_MIN_REPEATS = 3  # a phrase written twice may be emphasis


def longest_loops(streams: Sequence[np.ndarray], max_period: int) -> np.ndarray:
    """Return the length in tokens of each stream's longest loop of at least three copies, [S]; 0 for none.

    In a loop of period p, ids[t] = ids[t - p] for all but its first p tokens. Time: O(tokens * max_period).

    Args:
        streams: token ids.
        max_period: longest period that is searched, in tokens, >= 1.
    """
    longest_S = np.zeros(len(streams), np.int64)
    num = min(max_period, max(map(len, streams), default=0) // _MIN_REPEATS)
    if num < 1:
        return longest_S
    ids_N, stream_N = _end_to_end(streams)
    # Ids are made unique to their stream, and -1 pads the start, so that no match crosses a stream's boundary.
    ids_N = np.unique(ids_N, return_inverse=True)[1] * len(streams) + stream_N
    earlier_M = np.concatenate([np.full(num, -1), ids_N])
    same_M = np.flatnonzero(sliding_window_view(earlier_M, len(ids_N))[:num] == ids_N)  # row i: num - i tokens earlier
    last_R = np.flatnonzero(np.diff(same_M, append=-1) != 1)  # a row's first token never matches, so runs end there
    num_R, period_R = np.diff(last_R, prepend=-1), num - same_M[last_R] // len(ids_N)
    is_loop_R = num_R >= (_MIN_REPEATS - 1) * period_R
    np.maximum.at(longest_S, stream_N[same_M[last_R] % len(ids_N)][is_loop_R], (num_R + period_R)[is_loop_R])
    return longest_S


def _end_to_end(streams: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids concatenated, and the stream number of each."""
    return np.concatenate(streams), np.repeat(np.arange(len(streams)), [len(ids) for ids in streams])


def _is_share(value: Any) -> bool:
    return value is None or (is_number(value) and 0 < value <= 1)
