"""Detects secrets in policy-written text, and redacts texts.

    text ── detect ──> [Span(start, end, kind)]        private keys, access keys, tokens, passwords; personal data
    group ── secret_episodes ──> the episodes whose policy-written tokens overlap a span
    text ── redact ──> "password=[password]"

Token ids are never edited. The whole stream is searched, so a secret that the environment begins and the policy
completes is found too.

Every pattern takes time linear in the text: repetitions are bounded or possessive, and a match can begin only at the
beginning of a word. Patterns are narrow on purpose (prefixes, lengths, check digits), because the text of environments
contains many numbers.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from rllib_srl.types import Group

PERSONAL = ("email", "phone", "credit_card")


class Span(NamedTuple):
    """One secret: characters `start` to `end` of a text. Invariant: 0 <= start < end."""

    start: int
    end: int
    kind: str


Detector = Callable[[str], list[Span]]


def detect(text: str) -> list[Span]:
    """Return all spans of the default kinds, in order; overlapping spans are merged and get the kind of the first."""
    spans = [*_private_keys(text), *_passwords(text)]
    if _has_any(text, _NEEDLES):
        for kind, needles, pattern in _PATTERNS:
            if _has_any(text, needles):
                spans += [Span(*match.span(), kind) for match in pattern.finditer(text)]
    if _FOUR_DIGITS.search(text):  # a cheap precondition of the two slow patterns
        spans += [Span(*match.span(), "phone") for match in _PHONE.finditer(text)]
        spans += [Span(*match.span(), "credit_card") for match in _CARD.finditer(text) if _is_luhn(match.group())]
    return _merged(spans)


def _has_any(text: str, needles: Sequence[str]) -> bool:
    return any(map(text.__contains__, needles))  # hot path: most texts end here; `map` is faster than a generator


def detect_credentials(text: str) -> list[Span]:
    """Return the spans of `detect` that are not personal data."""
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


def secret_episodes(
    group: Group, decode: Callable[[Sequence[int]], str], detector: Detector = detect
) -> tuple[int, ...]:
    """Return the episodes in which a token that the policy wrote is part of a secret.

    Args:
        group: any valid group.
        decode: token ids -> text, including special tokens, so that texts they separate are not joined.
        detector: text -> spans.
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


def turns_of(group: Group, g: int, decode: Callable[[Sequence[int]], str]) -> list[tuple[bool, int, int, str]]:
    """Return the turns of an episode: whether the policy wrote it, first and last character in the whole text, text.

    The text of the tokens up to a turn's end shows where it ends: some decoders drop a leading space, so that the texts
    of the turns are not those of their tokens alone.
    """
    ids, mask_T = group.stream(g).tolist(), group.loss_mask_N[group.offsets[g] : group.offsets[g + 1]]
    text, cuts = decode(ids), (np.flatnonzero(np.diff(mask_T)) + 1).tolist()
    ends = [*(min(len(text), len(decode(ids[:at]))) for at in cuts), len(text)]
    starts, is_policy = [0, *ends[:-1]], [bool(mask_T[at]) for at in [0, *cuts]]
    return [(*turn, text[turn[1] : turn[2]]) for turn in zip(is_policy, starts, ends, strict=True)]


# --- patterns -------------------------------------------------------------------------------------

_WORD = r"(?<![A-Za-z0-9_-])"
# fmt: off
_ROWS: tuple[tuple[str, str, str], ...] = (  # kind; strings of which a match contains one; pattern
    ("aws_key", "AKIA ASIA AROA AIDA", r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    ("github_token", "gh", _WORD + r"gh[pousr]_[A-Za-z0-9]{36,255}+(?![A-Za-z0-9_])"),
    ("github_token", "github_pat_", _WORD + r"github_pat_[A-Za-z0-9_]{22,255}+"),
    ("slack_token", "xox", _WORD + r"xox[abeoprs]-[A-Za-z0-9-]{10,250}+"),
    ("slack_token", "hooks.slack.com", r"https://hooks\.slack\.com/services/[A-Za-z0-9/]{20,100}+"),
    ("api_key", "sk-", _WORD + r"sk-(?=[A-Za-z_-]{0,60}[0-9])(?=[^A-Z\s]{0,60}[A-Z])[A-Za-z0-9_-]{20,250}+"),
    ("api_key", "hf_ _live_ AIza", _WORD + r"(?:hf_|[rs]k_live_|AIza)[A-Za-z0-9_-]{24,120}+"),
    ("jwt", "eyJ", _WORD + r"eyJ[A-Za-z0-9_-]{8,8192}+\.eyJ[A-Za-z0-9_-]{8,8192}+\.[A-Za-z0-9_-]{8,8192}+"),
    ("email", "@", r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9_%+-][A-Za-z0-9._%+-]{0,63}+@"
                   r"(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}+\.){1,8}[A-Za-z]{2,24}+(?![A-Za-z0-9])"),
    ("phone", "+", r"(?<![\w+)=*/.-])\+[1-9][0-9]{0,2}(?:[0-9]{9,12}|(?:[ .-]|[ ]?\([0-9]{1,4}\)[ ]?)[0-9]{1,5}"
                   r"(?:[ .-]?[0-9]{2,5}){1,4})(?![\w]|[ .-]?[0-9])"),
)
# fmt: on
_PATTERNS = tuple((kind, needles.split(), re.compile(pattern, re.ASCII)) for kind, needles, pattern in _ROWS)
_NEEDLES = tuple(needle for _, needles, _ in _PATTERNS for needle in needles)
_FOUR_DIGITS = re.compile(r"[0-9]{4}")
_PHONE = re.compile(  # without a country code
    r"(?<![\w+)=*/.-])(?<![0-9][ ])(?:\([2-9][0-9]{2}\)[ ]?|[2-9][0-9]{2}([.-]))[2-9][0-9]{2}(?(1)\1|-)[0-9]{4}"
    r"(?![\w]|[ .-]?[0-9])",
    re.ASCII,
)
_CARD = re.compile(
    r"(?<![\w.+-])(?<![0-9][ ])(?=3[0-9]|4|5[1-5]|6|2[2-7])"
    r"(?:[0-9]{13,19}|[0-9]{4}([ -])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ -])[0-9]{6}\2[0-9]{5})"
    r"(?![\w]|[ .-][0-9])",
    re.ASCII,
)


def _is_luhn(number: str) -> bool:
    """Return whether the check digit is valid. Source: ISO/IEC 7812-1, annex B."""
    digits = [int(digit) for digit in reversed(number) if digit.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[0::2]) + sum(doubled)) % 10 == 0


_KEY_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END (?:[A-Z0-9]{1,12} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_KEY_BODY = re.compile(r"(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{20,}+)*+")
_MAX_KEY = 32_768  # characters of a block, at most; an END marker further away belongs to another block


def _private_keys(text: str) -> Iterator[Span]:
    """Yield PEM blocks; a block without an END marker extends over the base64 lines that follow."""
    if "PRIVATE KEY" not in text:
        return
    ends = [match.end() for match in _KEY_END.finditer(text)]
    done = 0
    for match in _KEY_BEGIN.finditer(text):
        if match.start() < done:
            continue
        following = bisect_left(ends, match.end())
        if following < len(ends) and ends[following] - match.start() <= _MAX_KEY:
            done = ends[following]
        else:
            body = _KEY_BODY.match(text, match.end())
            done = body.end() if body else match.end()
        yield Span(match.start(), done, "private_key")


_PASSWORD = re.compile(
    r"(?<![a-z0-9])(?:password|passwd|pwd|passphrase|secret|api[_-]?key|access[_-]?key|access[_-]?token|auth[_-]?token"
    r"|private[_-]?token|bearer[_-]?token)\b[\"']?[ \t]{0,4}(=|:)(?!=)[ \t]{0,4}"
    r"(?:\"([^\"\n]{4,256})\"|'([^'\n]{4,256})'|([^\s\"',;&]{4,256}))",
    re.ASCII | re.IGNORECASE,
)
_IN_PASSWORDS = ("pass", "pwd", "secret", "key", "token")  # every match of `_PASSWORD` contains one of them
_PLACEHOLDER = re.compile(r"[$<{%*\[(]|(?:none|null|true|false|undefined|str|bytes|password|secret)\b", re.I)
_CODE = re.compile(r"[A-Za-z_][\w.]*+[\[(]|[A-Za-z_]\w*+\.[A-Za-z_]", re.ASCII)


def _passwords(text: str) -> Iterator[Span]:
    """Yield the values of password assignments, without the name."""
    lower = text.lower()
    if not _has_any(lower, _IN_PASSWORDS):
        return
    for match in _PASSWORD.finditer(text):
        group = next(number for number in (2, 3, 4) if match.group(number) is not None)
        value = match.group(group)
        if _PLACEHOLDER.match(value):
            continue
        if group == 4:
            is_prose = match.group(1) == ":" and not re.search(r"[0-9]", value)  # "the password: please"
            if is_prose or _CODE.match(value):
                continue
        yield Span(*match.span(group), "password")


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order; overlapping spans are merged and get the kind of the first."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if merged and span.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged
