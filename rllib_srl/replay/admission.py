"""Decides whether a group may be stored, and which of its episodes get no loss: checks by reason, each counted.

    admit(group, settings, ...) -> Refusal(reason, episodes, train) | None     the first reason; episodes of all hooks

    not stored, no loss
      too_few          no episode
      bad_logp         a policy token's log-prob is not finite or above 0 (occurs in foreign and imported groups)
      invalid          another invariant of `Group` is broken
      secret           the policy wrote a secret in these episodes: the hook "secrets"
      <reason>         of a user's hook
    not stored, trained on
      too_long         an episode has more than `max_episode_tokens` tokens, prompt included
      degenerate       more than half of the episodes are one repeated token or a loop
      duplicate        the item has a group of the same tokens (`intake.py`, as the next)
      ungraded         too few valid episodes for a new item

Why half: one degenerate episode among good ones is an ordinary failure, and its low reward is useful signal. If most
episodes are degenerate, the policy has collapsed on this prompt, and training would only compare collapsed episodes.

A hook is `hook(group, decode) -> Refusal | None`, where `decode` turns token ids into text. It runs once for each
well-formed group; docs/memory.md has an example.

Secrets are searched in the whole stream, so one that the environment begins and the policy completes is found too.
Every pattern takes time linear in the text: repetitions are bounded or possessive, and a match can begin only at the
beginning of a word. Patterns are narrow on purpose (prefixes, lengths, check digits), because the text of environments
contains many numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from rllib_srl.common.rules import Rules
from rllib_srl.types import Group

MALFORMED = ("too_few", "bad_logp", "invalid")
REASONS = (*MALFORMED, "secret", "too_long", "degenerate", "duplicate", "ungraded")
MIN_TOKENS = 32  # policy-written tokens below which an episode is too short to be judged degenerate
MAX_PERIOD = 64  # longest period of a loop, in tokens
_MAX_LOGP = 1e-4  # as in Group.check_valid: rounding may put a token of probability 1 slightly above 0
_MIN_REPEATS = 3  # copies that make a loop: a phrase written twice may be emphasis
_REASON = re.compile(r"[a-z][a-z0-9_]{0,40}")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Refusal:
    """Why a group is not stored, and which of its episodes get no loss."""

    reason: str  # lower case, as in "word_list"; counted as num_refused_<reason>
    episodes: tuple[int, ...] = ()  # those to which the reason applies
    train: bool = False  # whether they are trained on nevertheless


def admit(group: Group, checks: Any, decode: Decode | None = None) -> Refusal | None:
    """Run the checks of `ReplaySettings` on a well-formed group, those that keep episodes out of the loss first.

    Raises:
        RuleError: a user's hook raised, or returned something other than a refusal.
    """
    refusals = list[Refusal]()
    for name in names_of(checks.admit):
        assert decode is not None
        if (hook := ADMISSIONS.own.get(name)) is not None and hook is ADMISSIONS[name]:
            refusal = hook(group, decode)
        else:
            refusal = ADMISSIONS.call(name, group, decode, check=partial(_error_of, size=group.size))
        if refusal is not None:
            refusals.append(refusal)
    if refusals:
        without_loss = {g for refusal in refusals if not refusal.train for g in refusal.episodes}
        return Refusal(refusals[0].reason, tuple(sorted(without_loss)))
    reason, limit = "", checks.degenerate_share
    if checks.max_episode_tokens is not None and group.lengths_G().max() > checks.max_episode_tokens:
        reason = "too_long"
    elif limit is not None and 2 * sum(is_degenerate(group, g, limit) for g in range(group.size)) > group.size:
        reason = "degenerate"
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


# --- degenerate episodes --------------------------------------------------------------------------


def is_degenerate(group: Group, g: int, limit: float) -> bool:
    """Return whether one token or one loop takes more than a fraction `limit` of what the policy wrote in an episode.

    False below `MIN_TOKENS` policy-written tokens.
    """
    ids_T = group.stream(g)[group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]]
    if len(ids_T) < MIN_TOKENS:
        return False
    most_common = int(np.unique(ids_T, return_counts=True)[1].max())
    return max(most_common, longest_loop(ids_T, MAX_PERIOD)) > limit * len(ids_T)


def longest_loop(ids_T: np.ndarray, max_period: int) -> int:
    """Return the length in tokens of the longest loop of at least three copies, 0 for none.

    In a loop of period p <= `max_period`, ids[t] = ids[t - p] for all but its first p tokens. Time: O(T * max_period).
    """
    num = min(max_period, len(ids_T) // _MIN_REPEATS)
    if num < 1:
        return 0
    padded_T = np.concatenate([np.full(num, -1), ids_T])
    same_PT = sliding_window_view(padded_T, len(ids_T))[:num] == ids_T  # row i: as the token num - i earlier
    at_T, period_P = np.arange(len(ids_T)), num - np.arange(num)
    differs_PT = np.maximum.accumulate(np.where(same_PT, -1, at_T), axis=1)  # the last place where it was another
    run_P = (at_T - differs_PT).max(axis=1)
    is_loop_P = run_P >= (_MIN_REPEATS - 1) * period_P
    return int((run_P + period_P)[is_loop_P].max(initial=0))


# --- secrets --------------------------------------------------------------------------------------

PERSONAL = ("email", "phone", "credit_card")


class Span(NamedTuple):
    """One secret: characters `start` to `end` of a text. Invariant: 0 <= start < end."""

    start: int
    end: int
    kind: str


Detector = Callable[[str], list[Span]]


def detect(text: str) -> list[Span]:
    """Return all spans of the default kinds, in order; overlapping spans are merged and get the kind of the first."""
    lower, spans, has_digits = text.lower(), list[Span](), bool(_FOUR_DIGITS.search(text))
    for kind, needles, pattern, pick in _PATTERNS:
        # hot path: most texts end here; `map` is faster than a generator
        if any(map(lower.__contains__, needles)) or (has_digits and not needles):
            picked = (pick(match) for match in pattern.finditer(text))
            spans += [Span(*place, kind) for place in picked if place is not None]
    return _merged(spans)


def detect_credentials(text: str) -> list[Span]:
    return [span for span in detect(text) if span.kind not in PERSONAL]


def redact(text: str, detector: Detector = detect) -> str:
    """Return the text with each secret replaced by its kind in brackets, as in "[aws_key]"."""
    return redact_turns([text], detector)[0]


def redact_turns(turns: Sequence[str], detector: Detector = detect) -> list[str]:
    """Return the turns of an episode with each secret replaced by its kind.

    For a secret that spans several turns, the kind is inserted in the turn where the secret begins.
    """
    starts = list(accumulate(map(len, turns), initial=0))[:-1]
    spans = detector("".join(turns))
    if len(turns) > 1:  # also search each turn alone: a match begins at the start of a word, which joining may hide
        alone = [(start, span) for start, turn in zip(starts, turns, strict=True) for span in detector(turn)]
        spans = [*spans, *(Span(start + span.start, start + span.end, span.kind) for start, span in alone)]
    spans = _merged(spans)
    redacted = []
    for turn, start in zip(turns, starts, strict=True):
        pieces, end, done = [], start + len(turn), start
        for span in spans:
            if span.end <= start or span.start >= end:
                continue
            pieces.append(turn[done - start : max(span.start, start) - start])
            pieces += [f"[{span.kind}]"] if span.start >= start else []
            done = min(span.end, end)
        redacted.append("".join([*pieces, turn[done - start :]]))
    return redacted


def secret_episodes(group: Group, decode: Decode, detector: Detector = detect) -> tuple[int, ...]:
    """Return the episodes in which a token that the policy wrote is part of a secret.

    `decode` includes special tokens, so that texts they separate are not joined.
    """
    episodes, clean = [], set[bytes]()
    for g in range(group.size):
        ids_T = group.stream(g)
        if (data := ids_T.tobytes()) in clean:  # short answers are often identical
            continue
        spans = detector(decode(ids_T.tolist()))
        if not spans:  # the usual case, at the cost of one decode
            clean.add(data)
            continue
        written = [(start, end) for is_policy, start, end, _ in turns_of(group, g, decode) if is_policy]
        if any(start < span.end and end > span.start for span in spans for start, end in written):
            episodes.append(g)
    return tuple(episodes)


def turns_of(group: Group, g: int, decode: Decode) -> list[tuple[bool, int, int, str]]:
    """Return the turns of an episode: whether the policy wrote it, first and last character in the whole text, text.

    The text of the tokens up to a turn's end shows where it ends: some decoders drop a leading space, so that the texts
    of the turns are not those of their tokens alone.
    """
    ids, mask_T = group.stream(g).tolist(), group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
    text, cuts = decode(ids), (np.flatnonzero(np.diff(mask_T)) + 1).tolist()
    ends = [*(min(len(text), len(decode(ids[:at]))) for at in cuts), len(text)]
    starts, is_policy = [0, *ends[:-1]], [bool(mask_T[at]) for at in [0, *cuts]]
    return [(*turn, text[turn[1] : turn[2]]) for turn in zip(is_policy, starts, ends, strict=True)]


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if merged and span.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


# --- hooks ----------------------------------------------------------------------------------------

Hook = Callable[[Group, Decode], Refusal | None]


def _without(detector: Detector) -> Hook:
    """Return a hook that refuses episodes in which the policy wrote something that a detector finds."""

    def hook(group: Group, decode: Decode) -> Refusal | None:
        episodes = secret_episodes(group, decode, detector)
        return Refusal("secret", episodes) if episodes else None

    return hook


DETECTORS: dict[str, Detector] = {"secrets": detect, "credentials": detect_credentials}
ADMISSIONS: Rules[Hook] = Rules("replay_admit", {name: _without(detector) for name, detector in DETECTORS.items()})


def names_of(admit: Any) -> tuple[Any, ...]:
    """Return the names of hooks in a value of the setting `admit`: one name, a list of them, or None."""
    if admit is None:
        return ()
    return tuple(admit) if isinstance(admit, list | tuple) else (admit,)


def detector_of(admit: Any) -> Detector | None:
    """Return the package's detector by which transcripts are redacted; None if no hook of `admit` is one."""
    return next((DETECTORS[name] for name in names_of(admit) if name in DETECTORS), None)


def _error_of(refusal: Any, size: int) -> str:
    """Return what is wrong with the answer of a user's hook about a group of `size` episodes, "" if nothing is."""
    if refusal is None or (
        isinstance(refusal, Refusal)
        and _REASON.fullmatch(str(refusal.reason))
        and set(refusal.episodes) <= set(range(size))
    ):
        return ""
    return f"expected None or Refusal('lower_case', episodes), episodes from 0 to {size - 1}"


# --- patterns of secrets -------------------------------------------------------------------------------------

Pick = Callable[[re.Match[str]], tuple[int, int] | None]  # the span of a match that is a secret

_UNQUOTED = 4  # group of the pattern of passwords
_PLACEHOLDER = re.compile(r"[$<{%*\[(]|(?:none|null|true|false|undefined|str|bytes|password|secret)\b", re.I)
_CODE = re.compile(r"[A-Za-z_][\w.]*+[\[(]|[A-Za-z_]\w*+\.[A-Za-z_]", re.ASCII)


def _whole(match: re.Match[str]) -> tuple[int, int] | None:
    return match.span()


def _card(match: re.Match[str]) -> tuple[int, int] | None:
    """Return the span of a number whose check digit is valid. Source: ISO/IEC 7812-1, annex B."""
    digits = [int(digit) for digit in reversed(match.group()) if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return match.span() if (sum(digits[0::2]) + sum(doubled)) % 10 == 0 else None


def _password(match: re.Match[str]) -> tuple[int, int] | None:
    """Return the span of an assigned value, without the name, unless it is a placeholder, prose or code."""
    number = match.lastindex or 0
    value = match.group(number)
    is_prose = match.group(1) == ":" and not re.search(r"[0-9]", value)  # "the password: please"
    if _PLACEHOLDER.match(value) or (number == _UNQUOTED and (is_prose or _CODE.match(value))):
        return None
    return match.span(number)


_WORD, _NUMBER = r"(?<![A-Za-z0-9_-])", r"(?<![\w+)=*/.-])"
# fmt: off
_ROWS: tuple[tuple[str, str, str, Pick], ...] = (  # kind, lower-case strings of which a match has one, pattern, span
    # A key without an END marker within 32,768 characters extends over the base64 lines that follow.
    ("private_key", "private", r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
                   r"(?:(?:[^-]|-(?!----(?:BEGIN|END) )){0,32768}+"
                   r"-----END (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
                   r"|(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{20,}+)*+)", _whole),
    ("password", "pass pwd secret key token",
     r"(?<![A-Za-z0-9])(?i:password|passwd|pwd|passphrase|secret|api[_-]?key|access[_-]?key|access[_-]?token"
     r"|auth[_-]?token|private[_-]?token|bearer[_-]?token)\b[\"']?[ \t]{0,4}(=|:)(?!=)[ \t]{0,4}"
     r"(?:\"([^\"\n]{4,256})\"|'([^'\n]{4,256})'|([^\s\"',;&]{4,256}))", _password),
    ("aws_key", "akia asia aroa aida", r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}(?![A-Za-z0-9])", _whole),
    ("github_token", "gh", _WORD + r"gh[pousr]_[A-Za-z0-9]{36,255}+(?![A-Za-z0-9_])", _whole),
    ("github_token", "github_pat_", _WORD + r"github_pat_[A-Za-z0-9_]{22,255}+", _whole),
    ("slack_token", "xox", _WORD + r"xox[abeoprs]-[A-Za-z0-9-]{10,250}+", _whole),
    ("slack_token", "hooks.slack.com", r"https://hooks\.slack\.com/services/[A-Za-z0-9/]{20,100}+", _whole),
    ("api_key", "sk-", _WORD + r"sk-(?=[A-Za-z_-]{0,60}[0-9])(?=[^A-Z\s]{0,60}[A-Z])[A-Za-z0-9_-]{20,250}+", _whole),
    ("api_key", "hf_ _live_ aiza", _WORD + r"(?:hf_|[rs]k_live_|AIza)[A-Za-z0-9_-]{24,120}+", _whole),
    ("jwt", "eyj", _WORD + r"eyJ[A-Za-z0-9_-]{8,8192}+\.eyJ[A-Za-z0-9_-]{8,8192}+\.[A-Za-z0-9_-]{8,8192}+", _whole),
    ("email", "@", r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}+@"
                   r"(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}+\.){1,8}[A-Za-z]{2,24}+(?![A-Za-z0-9])", _whole),
    ("phone", "+", _NUMBER + r"\+[1-9][0-9]{0,2}(?:[0-9]{9,12}|(?:[ .-]|[ ]?\([0-9]{1,4}\)[ ]?)[0-9]{1,5}"
                   r"(?:[ .-]?[0-9]{2,5}){1,4})(?![\w]|[ .-]?[0-9])", _whole),
    # Of the other two a match has four digits in a row.
    ("phone", "", _NUMBER + r"(?<![0-9][ ])(?:\([2-9][0-9]{2}\)[ ]?|[2-9][0-9]{2}([.-]))[2-9][0-9]{2}(?(1)\1|-)[0-9]{4}"
                  r"(?![\w]|[ .-]?[0-9])", _whole),
    ("credit_card", "", r"(?<![\w.+-])(?<![0-9][ ])(?=3[0-9]|4|5[1-5]|6|2[2-7])"
                  r"(?:[0-9]{13,19}|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ -])[0-9]{6}\2[0-9]{5})"
                  r"(?![\w]|[ .-][0-9])", _card),
)
# fmt: on
_PATTERNS = tuple((kind, needles.split(), re.compile(text, re.ASCII), pick) for kind, needles, text, pick in _ROWS)
_FOUR_DIGITS = re.compile(r"[0-9]{4}")
