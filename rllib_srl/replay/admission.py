"""Which groups the memory takes in: pure checks, each with a reason that is counted.

    admit(group, settings, ...) -> Verdict(is_admitted, reason, group)      the first reason that applies, in this order

    too_few          fewer than two episodes: nothing to compare
    bad_logp         a log-prob that is not finite and <= 0 where the policy wrote (foreign and imported groups)
    invalid          another invariant of `Group` is broken
    too_long         an episode has more than `max_episode_tokens` tokens, prompt included
    degenerate       more than half of the episodes are one repeated token or a loop
    off_policy       mean |logp now - behaviour_logp| above `max_drift`, where the caller knows it
    near_duplicate   cosine to the nearest item of another prompt at or above `near_duplicate`
    secret           the policy wrote a secret, and `on_secret` is "refuse"; or nothing is left when it is masked

Why half: one degenerate episode among good ones is a failure like another, and its low reward teaches; when most are,
the policy has collapsed on this prompt, and the group would teach which way to collapse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rllib_srl.replay.secrets import DETECTORS, Masked, mask_spans
from rllib_srl.types import Group

ON_SECRET = ("refuse", "mask", "keep")
_MAX_LOGP = 1e-4  # as in Group.check_valid: rounding may lift a certain token a little above 0


class Reason(str, Enum):
    """Why a group is refused; see the module's table. The order is that of the checks."""

    TOO_FEW = "too_few"
    BAD_LOGP = "bad_logp"
    INVALID = "invalid"
    TOO_LONG = "too_long"
    DEGENERATE = "degenerate"
    OFF_POLICY = "off_policy"
    NEAR_DUPLICATE = "near_duplicate"
    SECRET = "secret"


@dataclass(frozen=True)
class AdmissionSettings:
    """What is refused; None switches a check off. Invariant: `faults` is empty for settings in use."""

    max_episode_tokens: int | None = None  # of the whole stream, prompt included
    degenerate_share: float | None = 0.5  # of an episode's policy-written tokens, for one token or one loop
    min_degenerate_tokens: int = 32  # policy-written tokens below which an episode is too short to judge
    max_loop_period: int = 64  # tokens of the longest loop that is looked for
    max_drift: float | None = None  # nats a token
    near_duplicate: float | None = None  # cosine
    on_secret: str = "refuse"
    detector: str = "default"  # a key of `secrets.DETECTORS`

    def faults(self) -> list[str]:
        """Return one line for each setting out of its range."""
        ranges: tuple[tuple[str, bool, str], ...] = (
            ("max_episode_tokens", _is_none_or(self.max_episode_tokens, lambda n: n >= 1), "at least 1, or None"),
            ("degenerate_share", _is_none_or(self.degenerate_share, lambda s: 0 < s <= 1), "above 0 to 1, or None"),
            ("min_degenerate_tokens", self.min_degenerate_tokens >= 2, "at least 2"),
            ("max_loop_period", self.max_loop_period >= 1, "at least 1"),
            ("max_drift", _is_none_or(self.max_drift, lambda d: d >= 0), "at least 0, or None"),
            ("near_duplicate", _is_none_or(self.near_duplicate, lambda c: -1 <= c <= 1), "-1 to 1, or None"),
            ("on_secret", self.on_secret in ON_SECRET, f"one of {', '.join(ON_SECRET)}"),
            ("detector", self.detector in DETECTORS, f"one of {', '.join(sorted(DETECTORS))}"),
        )
        return [f"{name} = {getattr(self, name)!r}; expected {what}" for name, is_fine, what in ranges if not is_fine]


@dataclass(frozen=True)
class Nearest:
    """The stored item whose embedding is closest to the group's."""

    key: str  # its prompt's
    similarity: float  # cosine, in [-1, 1]


@dataclass(frozen=True)
class Verdict:
    """Whether a group may be stored, and as what.

    Invariant: `reason` is None exactly if the group is admitted; `group` is then what to store, which differs from
    the group given only by `num_masked` tokens taken out of the loss.
    """

    group: Group
    reason: Reason | None = None
    num_masked: int = 0
    secrets: Counter[str] = field(default_factory=Counter)  # spans found, by kind, whatever came of them

    @property
    def is_admitted(self) -> bool:
        """Say whether the group may be stored."""
        return self.reason is None


def admit(
    group: Group,
    settings: AdmissionSettings,
    *,
    nearest: Nearest | None = None,
    drift: float | None = None,
    decode: Callable[[Sequence[int]], str] | None = None,
    is_checked: bool = False,
) -> Verdict:
    """Judge a group; the cheap checks come first.

    Args:
        group: played here, or foreign.
        settings: what is refused.
        nearest: the closest stored item; one of the same prompt is no duplicate but an earlier visit.
        drift: mean |logp now - behaviour_logp| over the policy-written tokens, nats; None where unknown.
        decode: token ids -> text.
        is_checked: whether `settings.faults` and `fault_of` the group have been asked, and found nothing.

    Raises:
        ValueError: settings out of range, or no `decode` although `on_secret` asks for one.
    """
    faults = [] if is_checked else settings.faults()
    if settings.on_secret != "keep" and decode is None:
        faults.append(f"decode = None; expected token ids -> text, because on_secret = {settings.on_secret!r}")
    if faults:
        raise ValueError("admission: " + "; ".join(faults))
    fault = None if is_checked else fault_of(group)
    if reason := fault or _refusal_of(group, settings, nearest, drift):
        return Verdict(group, reason)
    if settings.on_secret == "keep":
        return Verdict(group)
    assert decode is not None
    masked = mask_spans(group, decode, DETECTORS[settings.detector])
    if masked.num_tokens and _is_lost(masked, settings):
        return Verdict(group, Reason.SECRET, secrets=masked.kinds)
    return Verdict(masked.group, None, masked.num_tokens, masked.kinds)


def fault_of(group: Group) -> Reason | None:
    """Return what makes a group no group."""
    if group.size < 2:
        return Reason.TOO_FEW
    if group.loss_mask_N.dtype != bool:  # zeros and ones would pick tokens 0 and 1
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


def _refusal_of(
    group: Group, settings: AdmissionSettings, nearest: Nearest | None, drift: float | None
) -> Reason | None:
    if settings.max_episode_tokens is not None and group.lengths_G().max() > settings.max_episode_tokens:
        return Reason.TOO_LONG
    if settings.degenerate_share is not None and 2 * int(degenerate_G(group, settings).sum()) > group.size:
        return Reason.DEGENERATE
    # Not "drift > max": a drift that is not a number is none that was bounded.
    if settings.max_drift is not None and drift is not None and not drift <= settings.max_drift:
        return Reason.OFF_POLICY
    if (
        settings.near_duplicate is not None
        and nearest is not None
        and nearest.key != group.prompt.key
        and nearest.similarity >= settings.near_duplicate
    ):
        return Reason.NEAR_DUPLICATE
    return None


def _is_lost(masked: Masked, settings: AdmissionSettings) -> bool:
    return settings.on_secret == "refuse" or not masked.group.loss_mask_N.any()


def degenerate_G(group: Group, settings: AdmissionSettings) -> np.ndarray:
    """Say for each episode whether one token or one loop takes more than `degenerate_share` of what the policy wrote.

    Episodes of fewer than `min_degenerate_tokens` policy-written tokens are not. All are fine where the share is None.
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
    """Return how often the most frequent id of each stream occurs, [S]; 0 for no ids."""
    most_S = np.zeros(len(streams), np.int64)
    ids_N, stream_N = _end_to_end(streams)
    order_N = np.lexsort((ids_N, stream_N))
    ids_N, stream_N = ids_N[order_N], stream_N[order_N]
    last_R = np.flatnonzero((np.diff(ids_N, append=0) != 0) | (np.diff(stream_N, append=-1) != 0))
    np.maximum.at(most_S, stream_N[last_R], np.diff(last_R, prepend=-1))
    return most_S


_MIN_REPEATS = 3  # a phrase said twice is emphasis


def longest_loops(streams: Sequence[np.ndarray], max_period: int) -> np.ndarray:
    """Return the length of the longest stretch of each stream that repeats itself at least three times over, [S].

    A stretch of period p has ids[t] = ids[t - p] throughout, its first p tokens aside. Costs tokens * max_period.

    Args:
        streams: token ids.
        max_period: tokens of the longest n-gram that is looked for, >= 1.
    """
    longest_S = np.zeros(len(streams), np.int64)
    num = min(max_period, max(map(len, streams), default=0) // _MIN_REPEATS)
    if num < 1:
        return longest_S
    ids_N, stream_N = _end_to_end(streams)
    # Each stream its own ids, and none for what stands before the first.
    ids_N = np.unique(ids_N, return_inverse=True)[1] * len(streams) + stream_N
    earlier_M = np.concatenate([np.full(num, -1), ids_N])
    same_M = np.flatnonzero(sliding_window_view(earlier_M, len(ids_N))[:num] == ids_N)  # row i: num - i tokens earlier
    last_R = np.flatnonzero(np.diff(same_M, append=-1) != 1)  # a row begins with a token that has none before it
    num_R, period_R = np.diff(last_R, prepend=-1), num - same_M[last_R] // len(ids_N)
    is_loop_R = num_R >= (_MIN_REPEATS - 1) * period_R
    np.maximum.at(longest_S, stream_N[same_M[last_R] % len(ids_N)][is_loop_R], (num_R + period_R)[is_loop_R])
    return longest_S


def _end_to_end(streams: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids, and the number of the stream of each."""
    return np.concatenate(streams), np.repeat(np.arange(len(streams)), [len(ids) for ids in streams])


def _is_none_or(value: Any, is_fine: Callable[[Any], bool]) -> bool:
    return value is None or is_fine(value)
