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
from collections.abc import Callable, Sequence
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
    lower, spans, has_digits = text.lower(), list[Span](), bool(_FOUR_DIGITS.search(text))
    for kind, needles, pattern, pick in _PATTERNS:
        # hot path: most texts end here; `map` is faster than a generator
        if any(map(lower.__contains__, needles)) or (has_digits and not needles):
            picked = (pick(match) for match in pattern.finditer(text))
            spans += [Span(*place, kind) for place in picked if place is not None]
    return _merged(spans)


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


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans in order; overlapping spans are merged and get the kind of the first."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if merged and span.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


# --- patterns -------------------------------------------------------------------------------------

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
