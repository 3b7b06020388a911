"""Detect absurdly large formulas from their text, in microseconds, before anything is computed.

    is_absurd("10000000!")                 True         is_absurd("20!")               False
    is_absurd("9^{9^9}")                   True         is_absurd("2^{2^3}")           False
    is_absurd("\\binom{10^9}{10^8}")       True         is_absurd("\\binom{20}{10}")   False
    is_absurd("(" * 500 + "x")             True

Only sizes written as numbers are detected; everything else that takes long is left to a deadline.
"""

from __future__ import annotations

import re
from math import factorial, log10

MOST_EXPONENT = 10_000
MOST_FACTORIAL = 3_000  # 3000! has 9,131 digits; also the smaller side of a binomial
MOST_DEPTH = 60  # of brackets; parsers recurse for each

_ABSURD = float("inf")
_MOST_LENGTH = 15  # digits; beyond, a number is larger than any bound
_NUMBER = r"\d[\d,]*"
_RAISED = r"\s*\^[\s{(+-]*"  # between a base and its exponent: 9^9, 9^{9, 9 ^ { (9
_TOWER = rf"{_NUMBER}(?:{_RAISED}{_NUMBER})*"
_CLOSED = r"[\s)}]*"
_EXPONENT = re.compile(rf"{_RAISED}(?P<tower>{_TOWER})", re.ASCII)
_FACTORIAL = re.compile(rf"(?<![\d,])(?P<tower>{_TOWER}){_CLOSED}!(?P<is_twice>{_CLOSED}!)?", re.ASCII)
_BINOMIAL = re.compile(
    rf"\\[dt]?binom[\s{{]*(?P<over>{_TOWER}){_CLOSED}[\s{{]*(?P<under>{_TOWER})", re.ASCII
)  # fmt: skip


def is_absurd(formula: str) -> bool:
    """Return whether a LaTeX formula has an exponent, factorial, binomial or nesting too large to compute."""
    return (
        _depth(formula) > MOST_DEPTH
        or any(_value(match["tower"]) > MOST_EXPONENT for match in _EXPONENT.finditer(formula))
        or any(_factorial_of(match) > MOST_FACTORIAL for match in _FACTORIAL.finditer(formula))
        or any(_chosen(match) > MOST_FACTORIAL for match in _BINOMIAL.finditer(formula))
    )


def _value(tower: str) -> float:
    """Return the value of 9, 9^9, 9^{9^9 and so on; infinity beyond every bound."""
    numbers = [digits.replace(",", "") for digits in re.findall(_NUMBER, tower, re.ASCII)]
    if any(len(digits) > _MOST_LENGTH for digits in numbers):
        return _ABSURD
    value = 1.0
    for digits in reversed(numbers):
        base = int(digits)
        if base > 1 and value * log10(base) > _MOST_LENGTH:
            return _ABSURD
        value = float(base) ** value
    return value


def _factorial_of(match: re.Match[str]) -> float:
    value = _value(match["tower"])
    if not match["is_twice"]:
        return value
    return float(factorial(int(value))) if value < _MOST_LENGTH else _ABSURD


def _chosen(match: re.Match[str]) -> float:
    over, under = _value(match["over"]), _value(match["under"])
    return under if over == _ABSURD else min(under, max(over - under, 0.0))


def _depth(formula: str) -> int:
    depth = deepest = 0
    for letter in formula:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth -= 1
    return deepest
