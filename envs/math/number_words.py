"""Read a number that is written in words, or partly so, as a fraction.

spelled("forty-five")            45          spelled("2.4 million")        2400000
spelled("three quarters")        3/4         spelled("two and a half")     5/2
spelled("forty apples")          None        the whole text must be a number
"""

from __future__ import annotations

import re
from fractions import Fraction

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: value for value, word in enumerate(_ONES)} | {word: 10 * ten for ten, word in enumerate(_TENS, 2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "twentieth": 20, "hundredth": 100, "thousandth": 1000,
    "millionth": 10**6, "billionth": 10**9,
}  # fmt: skip
MULTIPLES = frozenset((  # words that make another number of the one in front of them, so they are not units
    "hundred", "dozen", "lakh", "crore", "half", "halves", *_SCALES,
    *(f"{word}s" for word in ("hundred", "dozen", *_SCALES, *_PARTS)),
))  # fmt: skip
_MIXED = re.compile(r"(?P<whole>.+?) and (?P<part>(?:a|an|[a-z]+)[ -][a-z]+)")
_DIGITS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d{1,30})?|\d{1,30}(?:\.\d{1,30})?", re.ASCII)
_MAX_CHARS = 120


def spelled(text: str) -> Fraction | None:
    """Return the number that a text spells with at least one word, or None."""
    said = re.sub(r"(?<=\w)-(?=[a-z])", " ", text.casefold().replace("\u2212", "-"))  # any other hyphen is a sign
    said = re.sub(r"^-\s*", "minus ", " ".join(said.split()))
    if not said or len(said) > _MAX_CHARS or not re.search("[a-z]", said):
        return None
    sign = 1
    for word in ("minus ", "negative "):
        if said.startswith(word):
            sign, said = -1, said.removeprefix(word)
    value = _value(said)
    return None if value is None else sign * value


def _value(said: str) -> Fraction | None:
    part = _part(said)
    if part is not None:
        return part
    mixed = _MIXED.fullmatch(said)
    if mixed and (part := _part(mixed["part"])) is not None:
        whole = _count(mixed["whole"])
        return None if whole is None else whole + part
    return _whole(said.split())


def _part(said: str) -> Fraction | None:
    """Return the value of "two thirds", "3 fifths" and "a half"."""
    over, _, under = said.rpartition(" ")
    name = under if under in _PARTS else under.removesuffix("s")
    is_plural = under != name or name == "halves"
    if name not in _PARTS or under == "halfs" or is_plural == (over in ("", "a", "an", "one", "1")):
        return None  # "twenty third" is an ordinal
    if over in ("", "a", "an"):
        return Fraction(1, _PARTS[name]) if over or name == "half" else None
    value = _count(over)
    return None if value is None else value / _PARTS[name]


def _count(said: str) -> Fraction | None:
    return Fraction(said.replace(",", "")) if _DIGITS.fullmatch(said) else _whole(said.split())


def _whole(words: list[str]) -> Fraction | None:
    """Return the value of "three hundred and five thousand two", of "2.4 million" and of "5 hundred"."""
    total, last = Fraction(0), 10**15
    group: Fraction | None = None
    tens_free, ones_free = True, True
    for number, word in enumerate(words):
        if word == "and":
            if (group is None and not total) or number == len(words) - 1:
                return None
            continue
        if word in _SCALES:
            if _SCALES[word] >= last or (group is None and number):
                return None
            total, last = total + (1 if group is None else group) * _SCALES[word], _SCALES[word]
            group, tens_free, ones_free = None, True, True
        elif word == "hundred":
            if group is not None and not 0 < group < 100:
                return None
            group, tens_free, ones_free = Fraction(1 if group is None else group) * 100, True, True
        elif word in _SMALL:
            value = _SMALL[word]
            fits = tens_free and ones_free if value == 0 or value >= 10 else ones_free
            if not fits or (group is not None and value == 0):
                return None
            group = (group or Fraction(0)) + value
            tens_free, ones_free = False, value >= 20
        elif word == "a" and number == 0 and len(words) > 1 and words[1] in ("hundred", *_SCALES):
            group, tens_free, ones_free = Fraction(1), False, False
        elif _DIGITS.fullmatch(word) and group is None and len(words) > 1:
            group, tens_free, ones_free = Fraction(word.replace(",", "")), False, False
        else:
            return None
    if group is None and not total:
        return None
    return total + (group or 0)
