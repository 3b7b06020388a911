r"""Find the numbers in prose that stand for themselves, without rejected ones and operands of calculations.

    numbers_of("10 + 11 equals 21.")       21; the others are operands
    numbers_of("It is not 20, it is 21")   21, then 20, which is rejected
    numbers_of("It costs $1,234.50")       1234.50

Numbers are ASCII digits with an optional sign, decimals, an exponent, thousands separated by commas or thin spaces, a
percent sign, a currency before and a unit behind them, and fractions, `\frac` included. Other digits (Arabic-Indic,
fullwidth, superscripts) are not numbers, as in math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rllib_srl.envs.math.marks import NOT, REJECTED_BEHIND
from rllib_srl.envs.math.number_words import MULTIPLES
from rllib_srl.envs.math.quantity import numbers_in

_WINDOW = 80  # characters before and behind a number in which a word may reject it
_SPACES = "\u00a0\u2009\u202f"
_UNIT = r"(?:[mckd]?m|[mk]?g|m[ls]|cl|dl|l|s|h|hrs?|min|km/?h|mph|lbs?|ft|in|oz|yd|USD|EUR|GBP)"
_RUN = r"(?:(?<![\w.])\.(?=\d))?\d(?:\d|[.,](?=\d))*(?:[eE][+-]?\d{1,3}(?!\w))?"
_TOKEN = re.compile(
    rf"\\[dt]?frac\{{\s*(?P<over>-?\d{{1,60}})\s*\}}\{{\s*(?P<under>-?\d{{1,60}})\s*\}}|{_RUN}(?:\s*/\s*{_RUN})?",
    re.ASCII,
)
_BEHIND_UNIT = re.compile(rf"{_UNIT}(?![\w^])|°")
_PERCENT = re.compile(r"\s*%")
_OPERATOR_AFTER = re.compile(r"\s*(?:[+*/^±]\s*[\w(\\{.-]|-\s*(?:[\d(.\\]|[A-Za-z](?!\w))|[+*/^]\s*$)", re.MULTILINE)
_JOINED = re.compile(
    r"\s*(?:[.,;/&|]|\band\b|\bor\b|\bto\b)?(?:\s*(?:and|or|maybe|perhaps|possibly)\b)*\s*", re.IGNORECASE
)
_HEDGED = re.compile(r"[^.;!?\n=]*\b(?:or|maybe|perhaps|possibly)\b[^.;!?\n=]*", re.IGNORECASE)
_REJECTED_BEFORE = re.compile(rf"{NOT}(?:\s+(?!but\b|so\b)[\w'’]+){{0,3}}[\s*$(]*$", re.IGNORECASE)
_QUESTION = re.compile(r"(?:[^.!?\n]|\.(?=\d)){0,200}\?")
_NEGATIVE_WORD = re.compile(r"\b(?:minus|negative)\s+$", re.IGNORECASE)
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}


# Words in front of a number, and behind it, that make another number or no number of it.
_FUNCTIONS = r"sqrt|cbrt|(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|exp|lg|abs|floor|ceil|gcd|lcm|max|min|det"
_OPERAND_BEFORE = re.compile(
    rf"(?:(?<![A-Za-z])(?:{_FUNCTIONS})|\\(?!approx|text|quad|qquad|to|implies|Rightarrow|therefore|equiv|in)[A-Za-z]+"
    r"|[√∛∑∏∫]|\b(?:twice|thrice|double|triple|half|squared?|cubed?|nearly|almost|under|over|above|below|beyond|exceeds?"
    r"|exceeding|up\s+to|(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower|other)\s+than|at\s+(?:least|most)"
    r"|(?:%|roots?|log(?:arithm)?|sine|cosine|tangent|factorial|powers?|multiples?|factors?|divisors?|squares?|cubes?"
    r"|reciprocal|inverse|opposite|negation|half|halves|thirds?|quarters?|fourths?|fifths?|percent|fraction|double|triple"
    r"|logarithm|absolute\s+value|times)\s+of)|%\s+of|(?:base|mod|modulo|power|exponent))"
    r"(?:\s+(?:the|a|an|number|just|only|about))*[\s({$]*$",
    re.IGNORECASE,
)
_OPERAND_AFTER = re.compile(
    r"[\s)}$]*(?:(?:squared|cubed|factorial|choose|mod|modulo|to\s+the\s+(?:power|\w+th)|raised|x"
    r"|times(?!\s*$)|less\s+than|more\s+than|fewer\s+than|or\s+(?:more|less|fewer|greater|higher|lower|above|below|so)"
    rf"|and\s+a\s+(?:half|third|quarter)|in\s+base|base|-?(?:{'|'.join(sorted(MULTIPLES))}))\b"
    r"|\s*\(?\s*base\b|\s*%\s*of\s+[$\d]|\\(?:pmod|bmod|mod)\b)",
    re.IGNORECASE,
)


def _mixed(match: re.Match[str]) -> str:
    whole, over, under = map(int, match.groups())
    return f"{whole * under + over}/{under}"


def _mixed_text(match: re.Match[str]) -> str:
    whole, over, under = map(int, match.groups())
    return f"{whole * under + over}/{under}" if 0 < over < under else match[0]


def _half(match: re.Match[str]) -> str:
    parts = {"half": 2, "third": 3, "quarter": 4}
    return f"{int(match[1]) * parts[match[2].lower()] + 1}/{parts[match[2].lower()]}"


def _power(match: re.Match[str]) -> str:
    return f"e{_POWERS[match[1].lower()]}"


_LEVELLED: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"[\u2212\u2013]"), "-"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\{([^{}]*)\}"), r" \1 "),
    (re.compile(rf"(?<=\d)(?:[{_SPACES}]|\\[,!]|\{{,\}})(?=\d{{3}}(?!\d))", re.ASCII), ""),
    (re.compile(r"\^\{?\\circ\}?"), "°"),
    (re.compile(r"\\([dt]?)frac(\d)(\d)", re.ASCII), r"\\\1frac{\2}{\3}"),
    (re.compile(r"(?<![\d.,])(\d{1,9})\s?\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}", re.ASCII), _mixed),
    (re.compile(r"(?<![\d.,/])(\d{1,9}) (\d{1,9})\s?/\s?(\d{1,9})(?![\d.,/]\d)", re.ASCII), _mixed_text),
    (re.compile(r"(?<![\d.,/])(\d{1,9}) and (?:a|one) (half|third|quarter)\b", re.ASCII | re.IGNORECASE), _half),
    (
        re.compile(r"(?<![\d.,/])[1-9]\d{0,2}(?: \d{3})+(?![\d/]|,\d)", re.ASCII),
        lambda match: match[0].replace(" ", ""),
    ),
    (
        re.compile(r"(?<![\d.,/])[1-9]\d{0,2}(?:['’_]\d{3})+(?!\d)", re.ASCII),
        lambda match: re.sub("['’_]", "", match[0]),
    ),
    (re.compile(r"(?<=\d)\s?(?:\\times|\\cdot|[×·*xX])\s?10\s?\^\s?\{?([+-]?\d{1,3})\}?(?!\d)", re.ASCII), r"e\1"),
    (re.compile(r"(?<![\w.^*/×·])10\s?\^\s?\{?(-\d{1,3})\}?(?!\d)", re.ASCII), r"1e\1"),
    (re.compile(r"(?<=\d)\s?(hundred|thousand|million|billion|trillion)\b", re.IGNORECASE), _power),
    (re.compile(r"(?<=\d)\s?dozen\b", re.IGNORECASE), " * 12"),
    (re.compile(r"\\(?=[%$])"), ""),
    (re.compile(r"\\\\|\\[,;:!()\[\] ]|\\q?quad\b|\\(?:left|right|displaystyle)\b|[€£$]"), " "),
    (re.compile(r"\\(?:times|cdot|ast)\b|[×·]"), "*"),
    (re.compile(r"\\div\b|÷"), "/"),
    (re.compile(r"\\pm\b"), "±"),
    (re.compile(r"[=-]+>|→|\\(?:approx|equiv|to|implies|Rightarrow)\b|≈"), " = "),
    (re.compile(r"\\(?:geq?|leq?|neq?|gt|lt)\b|[≥≤≠]|!=|[<>]=?"), "<"),
    (re.compile(r"(?<![\w)\]}])\*\*|\*\*(?![\w(\\])"), " "),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=\d)", re.ASCII), " * "),
    (re.compile(r"(?<=\d)\s+(?:plus|minus|times|over|(?:divided|multiplied)\s+by)\s+(?=[-\d(])", re.ASCII), " + "),
    (re.compile(r"(?<=\d)\s{0,2}per\s?cent\b"), "%"),
)


@dataclass(frozen=True)
class Number:
    """A number that stands for itself. Invariant: `text` is the original spelling, signs and percent included."""

    text: str
    start: int
    end: int
    is_rejected: bool
    within: str  # the text it stands in, as `start` and `end` count

    def is_joined_to(self, later: Number) -> bool:
        """Return whether this number and a later one are members of a list, or alternatives."""
        if later.start - self.end > _WINDOW:
            return False
        between = self.within[self.end : later.start]
        return bool(_JOINED.fullmatch(between) or _HEDGED.fullmatch(between))


def numbers_of(text: str) -> Iterator[Number]:
    """Yield the numbers of a text that stand for themselves, the last one first."""
    levelled = text
    for pattern, put in _LEVELLED:
        levelled = pattern.sub(put, levelled)
    for token in reversed(list(_TOKEN.finditer(levelled))):
        sign = _sign_of(levelled, token)
        if sign is None or _is_attached(levelled, token):
            continue
        percent = _PERCENT.match(levelled, token.end())
        end = percent.end() if percent else token.end()
        written = token[0].strip(",")
        if "/" in written or token["over"]:
            value = numbers_in(written)
            if value and value[0].denominator == 1:  # a division that is not carried out
                continue
        if _QUESTION.match(levelled, end):
            continue
        before = levelled[max(0, token.start() - _WINDOW) : token.start()].rstrip("+-")
        is_rejected = bool(_REJECTED_BEFORE.search(before) or REJECTED_BEHIND.match(levelled, end, end + _WINDOW))
        yield Number(sign + written + ("%" if percent else ""), token.start(), end, is_rejected, levelled)


def rejects(text: str) -> bool:
    """Return whether a text rejects something, as "is not" does."""
    return re.search(NOT, text[-1000:], re.IGNORECASE) is not None


def _is_attached(text: str, token: re.Match[str]) -> bool:
    """Return whether a number is part of a word, a formula, a time, or a calculation that continues."""
    start, end = token.span()
    before, after = text[start - 1 : start], text[end : end + 1]
    if before.isalnum() or before in tuple("_\\{^<±") or text[:start].rstrip()[-1:] in tuple("<±^"):
        return True
    if _OPERAND_BEFORE.search(text, max(0, start - _WINDOW), start) or _OPERAND_AFTER.match(text, end):
        return True
    if before == ":" and text[start - 2 : start - 1].isdigit():
        return True
    if before == "(" and (text[start - 2 : start - 1].isalnum() or text[start - 2 : start - 1] == "}"):
        return True
    if after.isalpha() or after == "°":
        unit = _BEHIND_UNIT.match(text, end)
        return unit is None
    is_time = after == ":" and text[end + 1 : end + 2].isdigit()
    return is_time or after.isalnum() or after in tuple("_\\^({") or bool(_OPERATOR_AFTER.match(text, end))


def _sign_of(text: str, token: re.Match[str]) -> str | None:
    """Return the sign in front of a number, "" for none; None if the number is the operand of a calculation."""
    head = text[: token.start()].rstrip()
    if head[-1:] not in tuple("+-*/"):
        return "-" if _NEGATIVE_WORD.search(text, max(0, token.start() - 12), token.start()) else ""
    operator, is_spaced = head[-1], head[-2:-1].isspace() or len(head) == 1
    left = head[:-1].rstrip()
    is_operand = left[-1:].isdigit() or left[-1:] in tuple(")]}%°!") or (left[-1:].isalpha() and not is_spaced)
    is_operand |= left[-1:].isalpha() and not left[-2:-1].isalpha()  # a variable
    if operator in "*/":
        return None if is_operand else ""
    return None if is_operand else operator.replace("+", "")
