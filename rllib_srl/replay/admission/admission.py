"""Decides whether a group may be stored, and which of its episodes get no loss: checks by reason, each counted.

    admit(group, settings, ...) -> Refusal(reason, episodes, train) | None     the first reason that applies

    not stored, no loss
      too_few          no episode
      bad_logp         a policy token's log-prob is not finite or above 0 (occurs in foreign and imported groups)
      invalid          another invariant of `Group` is broken
      secret           the policy wrote a secret in these episodes: the hook "secrets"
      <reason>         of a user's own hook
    not stored, trained on
      too_long         an episode has more than `max_episode_tokens` tokens, prompt included
      degenerate       more than half of the episodes are one repeated token or a loop
      near_duplicate   cosine to the nearest item of another prompt at or above `near_duplicate`
      duplicate        the item has a group of the same tokens (`intake.py`, as the next)
      ungraded         too few valid episodes for a new item

Why half: one degenerate episode among good ones is an ordinary failure, and its low reward is useful signal. If most
episodes are degenerate, the policy has collapsed on this prompt, and training would only compare collapsed episodes.

    hook(group, decode) -> Refusal(reason, episodes, train) | None       decode: token ids -> text
    ADMISSIONS["mine"] = hook, or an import path "module:function"       the setting `replay_admit`

Advantages are those of the whole group. A hook runs once for each well-formed group. One that raises or returns
something else ends the run with an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rllib_srl.common.rules import Rules
from rllib_srl.replay.admission.secrets import Detector, detect, detect_credentials, secret_episodes
from rllib_srl.types import Group

MALFORMED = ("too_few", "bad_logp", "invalid")
REASONS = (*MALFORMED, "secret", "too_long", "degenerate", "near_duplicate", "duplicate", "ungraded")
MIN_TOKENS = 32  # policy-written tokens below which an episode is too short to be judged degenerate
MAX_PERIOD = 64  # longest period of a loop, in tokens
_MAX_LOGP = 1e-4  # as in Group.check_valid: rounding may put a token of probability 1 slightly above 0
_MIN_REPEATS = 3  # of a loop: a phrase written twice may be emphasis
_REASON = re.compile(r"[a-z][a-z0-9_]{0,40}")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Refusal:
    """Why a group is not stored, and which of its episodes get no loss."""

    reason: str  # lower case, as in "word_list"; counted as num_refused_<reason>
    episodes: tuple[int, ...] = ()  # those that the reason is about
    train: bool = False  # whether they are trained on all the same

    @property
    def without_loss(self) -> tuple[int, ...]:
        """Return the episodes that are not trained on."""
        return () if self.train else self.episodes


class Nearest(NamedTuple):
    """The stored item whose embedding is closest to the group's."""

    key: str  # its prompt's
    similarity: float  # cosine, in [-1, 1]


def admit(group: Group, checks: Any, nearest: Nearest | None = None, decode: Decode | None = None) -> Refusal | None:
    """Run the checks on a well-formed group, those that keep episodes out of the loss first.

    Args:
        group: played in this run or foreign.
        checks: `ReplaySettings`; `admit`, `max_episode_tokens`, `degenerate_share` and `near_duplicate` are read.
        nearest: the closest stored item; an item of the same prompt is not a duplicate but an earlier visit.
        decode: token ids -> text; None only without hooks.

    Raises:
        AdmissionError: a user's hook raised, or returned something else than a refusal.
    """
    for name in names_of(checks.admit):
        assert decode is not None
        if refusal := refusal_by(name, group, decode):
            return refusal
    reason = ""
    if checks.max_episode_tokens is not None and group.lengths_G().max() > checks.max_episode_tokens:
        reason = "too_long"
    elif 2 * int(degenerate_G(group, checks.degenerate_share).sum()) > group.size:
        reason = "degenerate"
    elif checks.near_duplicate is not None and nearest is not None and nearest.key != group.prompt.key:
        reason = "near_duplicate" if nearest.similarity >= checks.near_duplicate else ""
    return Refusal(reason, tuple(range(group.size)), train=True) if reason else None


def malformed(group: Group) -> Refusal | None:
    """Return the refusal of a group that breaks an invariant of `Group`, or None."""
    reason = ""
    if group.size < 1:
        reason = "too_few"
    elif group.loss_mask_N.dtype != bool:  # an integer mask would index tokens 0 and 1
        reason = "invalid"
    elif len(group.behaviour_logp_N) == len(group.loss_mask_N):
        written = group.behaviour_logp_N[group.loss_mask_N]
        reason = "" if (np.isfinite(written) & (written <= _MAX_LOGP)).all() else "bad_logp"
    if not reason:
        try:
            group.check_valid()
        except ValueError:
            reason = "invalid"
    return Refusal(reason, tuple(range(group.size))) if reason else None


# --- hooks ----------------------------------------------------------------------------------------

Hook = Callable[[Group, Decode], Refusal | None]


class AdmissionError(ValueError):
    """A hook raised an exception, or returned something else than a `Refusal` or None."""


def _hook_of(detector: Detector) -> Hook:
    def secrets(group: Group, decode: Decode) -> Refusal | None:
        found = secret_episodes(group, decode, detector)
        return Refusal("secret", found) if found else None

    return secrets


DETECTORS: dict[str, Detector] = {"secrets": detect, "credentials": detect_credentials}
ADMISSIONS: Rules[Hook] = Rules("admit", {name: _hook_of(detector) for name, detector in DETECTORS.items()})


def names_of(admit: Any) -> tuple[Any, ...]:
    """Return the names of hooks in a value of the setting `admit`: one name, a list of them, or None."""
    if admit is None:
        return ()
    return tuple(admit) if isinstance(admit, list | tuple) else (admit,)


def detector_of(admit: Any) -> Detector | None:
    """Return the package's detector by which transcripts are redacted; None if no hook of `admit` is one."""
    return next((DETECTORS[name] for name in names_of(admit) if name in DETECTORS), None)


def refusal_by(name: str, group: Group, decode: Decode) -> Refusal | None:
    """Return the refusal of a group by a hook.

    Raises:
        AdmissionError: the hook raised, or returned something else.
    """
    hook = ADMISSIONS.get(name) or ADMISSIONS.named(name)
    if hook is ADMISSIONS.own.get(name):
        return hook(group, decode)
    about = f"replay_admit = {name!r}, group {group.group_id}"
    try:
        refusal = hook(group, decode)
    except Exception as error:  # of any type: it is a user's function
        raise AdmissionError(f"{about}: raised {type(error).__name__}: {error}; expected a Refusal or None") from error
    if refusal is None:
        return None
    if not isinstance(refusal, Refusal) or not _REASON.fullmatch(str(refusal.reason)):
        raise AdmissionError(f"{about}: returned {str(refusal)[:80]}; expected Refusal('lower_case', episodes) or None")
    if not set(refusal.episodes) <= set(range(group.size)):
        raise AdmissionError(f"{about}: episodes {refusal.episodes!r}; expected some of 0 to {group.size - 1}")
    return refusal


# --- degenerate episodes --------------------------------------------------------------------------


def degenerate_G(group: Group, most: float | None) -> np.ndarray:
    """Return for each episode whether one token or one loop takes more than a fraction `most` of the policy's tokens.

    False for episodes of fewer than `MIN_TOKENS` policy-written tokens, and for all if `most` is None.
    """
    is_degenerate_G = np.zeros(group.size, bool)
    judged_S = np.flatnonzero(group.num_loss_tokens_G() >= MIN_TOKENS) if most is not None else np.empty(0, np.int64)
    if len(judged_S):
        spans = [slice(group.offsets[g], group.offsets[g + 1]) for g in judged_S]
        streams = [group.token_ids_N[span][group.loss_mask_N[span]] for span in spans]
        most_S = np.maximum(most_common(streams), longest_loops(streams, MAX_PERIOD))
        is_degenerate_G[judged_S] = most_S > most * np.array([len(ids) for ids in streams])
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
